"""A strict JSON reader that knows on which line each key stands.

The standard library's decoder reads the strings and numbers; objects and arrays are walked here, because only so a
duplicate key or a stray comma can be refused with its place, and comments be stepped over where people write by hand.
"""

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

BACKSLASH_HINT = r'write backslashes doubled ("C:\\data") or forward slashes ("C:/data")'

Trail = tuple[str | int, ...]

_MAX_DEPTH = 64
_SPACE = re.compile(r"[ \t\r\n]*")
_SPACE_AND_COMMENTS = re.compile(r"(?:[ \t\r\n]|//[^\n]*|#[^\n]*|/\*.*?\*/)*", re.DOTALL)
_SCALARS = json.JSONDecoder()


class ParseError(ValueError):
    """Text that can't be read, or that two readers could take differently.

    ``where`` is LINE or LINE:COLUMN (from 1); ``problem`` says what is wrong, after the key where one is known.
    """

    def __init__(self, where: str, problem: str) -> None:
        super().__init__(f"{where}: {problem}")
        self.where, self.problem = where, problem


class JsonError(ParseError):
    """Text that isn't JSON."""


@dataclass(frozen=True)
class Document:
    """What a text holds: its ``value``, and for the trail to every object member the line of its key."""

    value: Any
    lines: dict[Trail, int]


def read_json(text: str, *, by_hand: bool = False) -> Document:
    """Read one JSON value that fills ``text``. Raises JsonError, also for duplicate keys and for NaN and infinities.

    ``by_hand`` accepts comments (//, #, /* */) and a comma after the last element, as people leave them in files.
    """
    reader = _Reader(text, by_hand)
    value = reader.value(())
    if reader.peek():
        reader.fail("expected the end of the text")
    return Document(value, reader.lines)


class _Reader:
    """Recursive descent over ``text``; ``at`` is the offset of the next character."""

    def __init__(self, text: str, by_hand: bool) -> None:
        self.text = text
        self.by_hand = by_hand
        self.at = 0
        self.lines: dict[Trail, int] = {}

    def value(self, trail: Trail) -> Any:
        if len(trail) > _MAX_DEPTH:
            self.fail(f"nested deeper than {_MAX_DEPTH} levels")
        opening = self.peek()
        if opening == "{":
            return self.object(trail)
        if opening == "[":
            return [self.value((*trail, index)) for index, _ in enumerate(self.elements("]"))]
        return self.scalar(trail)

    def object(self, trail: Trail) -> dict[str, Any]:
        members: dict[str, Any] = {}
        for _ in self.elements("}"):
            if self.peek() != '"':
                self.fail("expected a key in double quotes")
            line = self.line(self.at)
            name = self.scalar(trail)
            if name in members:
                raise JsonError(str(line), f"{name}: given twice, first on line {self.lines[*trail, name]}")
            if self.peek() != ":":
                self.fail("expected ':' after the key")
            self.at += 1
            self.lines[*trail, name] = line
            members[name] = self.value((*trail, name))
        return members

    def elements(self, closing: str) -> Iterator[None]:
        """Step over the brackets and commas around the elements; the caller reads one whenever it has the turn."""
        self.at += 1
        if self.peek() != closing:
            yield
            while self.peek() == ",":
                comma = self.at
                self.at += 1
                if self.peek() == closing:
                    if self.by_hand:
                        break
                    self.fail(f"a comma may not stand before '{closing}'", comma)
                yield
            if self.peek() != closing:
                self.fail(f"expected ',' or '{closing}'")
        self.at += 1

    def scalar(self, trail: Trail) -> Any:
        start = self.at
        try:
            value, self.at = _SCALARS.raw_decode(self.text, start)
        except json.JSONDecodeError as error:
            self.fail_scalar(error, trail)
        except ValueError:  # the interpreter's limit on the digits of an integer
            self.fail("a number with too many digits")
        if isinstance(value, float) and not math.isfinite(value):
            token = self.text[start : self.at]
            raise JsonError(str(self.line(start)), f"{_name(trail)}{token[:20]} is not a finite number")
        return value

    def fail_scalar(self, error: json.JSONDecodeError, trail: Trail) -> NoReturn:
        if "escape" in error.msg:
            backslash = self.text.rindex("\\", 0, error.pos + 1)
            escape = self.text[backslash : backslash + 2]
            self.fail(f"{_name(trail)}{escape} is not an escape that JSON knows: {BACKSLASH_HINT}", backslash)
        if "control character" in error.msg:
            self.fail(f"{_name(trail)}a line break or tab inside a string: write \\n or \\t", error.pos)
        if "Unterminated" in error.msg:
            self.fail(f"{_name(trail)}a string without its closing quote", error.pos)
        self.fail("expected a value", error.pos)

    def peek(self) -> str:
        """Skip white space and return the next character, "" at the end."""
        space = (_SPACE_AND_COMMENTS if self.by_hand else _SPACE).match(self.text, self.at)
        assert space is not None, "the pattern matches the empty string"
        self.at = space.end()
        if self.text.startswith(("//", "/*", "#"), self.at):
            self.fail("a comment without its end (*/)" if self.by_hand else "JSON has no comments")
        return self.text[self.at : self.at + 1]

    def line(self, at: int) -> int:
        return self.text.count("\n", 0, at) + 1

    def fail(self, problem: str, at: int | None = None) -> NoReturn:
        at = self.at if at is None else at
        ending = ", but the text ends here" if at >= len(self.text) else ""
        column = at - self.text.rfind("\n", 0, at)
        raise JsonError(f"{self.line(at)}:{column}", problem + ending)


def _name(trail: Trail) -> str:
    """The innermost key of a trail, as the front of a message."""
    names = [part for part in trail if isinstance(part, str)]
    return f"{names[-1]}: " if names else ""
