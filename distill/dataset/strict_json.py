"""JSON without its loopholes, and read from a stream value by value, so that a file is never in memory whole.

A key that is given twice and the numbers NaN and Infinity are errors. Every error says line and column.
"""

import codecs
import json
import re
from typing import BinaryIO, NoReturn

from distill.errors import InputError

MAX_ROW = 1 << 28
"""Most bytes that a row may have: what a damaged or hostile file can make us hold."""

BOM = b"\xef\xbb\xbf"

_BLOCK = 1 << 20
_BLANK = re.compile(r"[ \t\r\n]*")
# The longest that can be cut off without the decoder's taking it for an error of its own: \ud83d\ude00.
_LONGEST_LEXEME = 12


class JsonError(ValueError):
    """What is wrong with a text that should be JSON; the caller knows where it stands."""


def _unique_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    result = dict(pairs)
    if len(result) < len(pairs):
        keys = [key for key, _ in pairs]
        raise JsonError(f"the key {next(key for key in keys if keys.count(key) > 1)!r} is given twice")
    return result


def _no_constant(name: str) -> NoReturn:
    raise JsonError(f"{name} is no JSON number")


_DECODER = json.JSONDecoder(object_pairs_hook=_unique_keys, parse_constant=_no_constant)


def parse_text(text: str) -> object:
    """The one JSON value that a text is. Raises JsonError with the column."""
    try:
        value, end = _DECODER.raw_decode(text, _skip_blank(text, 0))
    except json.JSONDecodeError as error:
        raise JsonError(f"broken JSON: {error.msg} (column {error.colno})") from error
    except (ValueError, RecursionError) as error:
        raise JsonError(f"broken JSON: {error}") from error
    if _skip_blank(text, end) != len(text):
        raise JsonError(f"broken JSON: more than one value on the line (column {end + 1})")
    return value


def decode(content: bytes, name: str, line: int = 1) -> str:
    """UTF-8 bytes, of which the first is on ``line`` of the file ``name``, as text. Raises InputError."""
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _not_utf8(error, name, line) from error


def _not_utf8(error: UnicodeDecodeError, name: str, line: int) -> InputError:
    line += error.object.count(b"\n", 0, error.start)
    return InputError(f"{name}:{line}: not UTF-8 (byte 0x{error.object[error.start]:02x}); save it as UTF-8")


class JsonStream:
    """The JSON values in a stream of UTF-8, one after another. ``name`` is the file's, for messages.

    In memory is the value being read and at most a block beyond it. All methods raise InputError with file:line.
    """

    def __init__(self, stream: BinaryIO, name: str, block: int = _BLOCK) -> None:
        self._stream = stream
        self._name = name
        self._block = block
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self._text = ""  # what is in memory; all of it before _position is done with
        self._position = 0
        self._line, self._counted = 1, 0  # the line at _counted, a position in _text
        self._column = 0  # characters before _text on the line that it begins on
        self._ended = False
        self._read_block(first=True)

    @property
    def line(self) -> int:
        """The line that the next character is on, counted from 1."""
        self._line += self._text.count("\n", self._counted, self._position)
        self._counted = self._position
        return self._line

    def peek(self) -> str:
        """The next character that isn't white space, which is passed over; "" at the end."""
        self._position = _skip_blank(self._text, self._position)
        while self._position == len(self._text) and self._more():
            self._position = _skip_blank(self._text, self._position)
        return self._text[self._position : self._position + 1]

    def take(self, character: str) -> bool:
        """Go past the next character that isn't white space if it is this one."""
        found = self.peek() == character
        self._position += found
        return found

    def value(self) -> object:
        """The next value."""
        self.peek()
        while True:
            try:
                value, self._position = _DECODER.raw_decode(self._text, self._position)
                return value
            except json.JSONDecodeError as error:
                cut_off = error.msg.startswith("Unterminated") or error.pos + _LONGEST_LEXEME >= len(self._text)
                if not (cut_off and self._more()):
                    line = self.line + self._text.count("\n", self._position, error.pos)
                    column = error.colno + (self._column if error.lineno == 1 else 0)
                    raise InputError(f"{self._name}:{line}: broken JSON: {error.msg} (column {column})") from error
            except (ValueError, RecursionError) as error:
                raise InputError(f"{self._name}:{self.line}: broken JSON: {error}") from error

    def _more(self) -> bool:
        """Have more text in memory, and what is done with no longer; False if there is no more."""
        if self._ended:
            return False
        if len(self._text) - self._position > MAX_ROW:
            raise too_long(self._name, self.line)
        line, done = self.line, self._text[: self._position]
        self._column = len(done) - 1 - done.rindex("\n") if "\n" in done else self._column + len(done)
        self._text = self._text[self._position :]
        self._line, self._position, self._counted = line, 0, 0
        self._read_block()
        return True

    def _read_block(self, first: bool = False) -> None:
        content = self._stream.read(max(self._block, len(self._text)))  # Doubling, a long value is parsed anew rarely.
        self._ended = not content
        try:
            self._text += self._decoder.decode(content.removeprefix(BOM) if first else content, final=self._ended)
        except UnicodeDecodeError as error:
            raise _not_utf8(error, self._name, self._line + self._text.count("\n")) from error


def too_long(name: str, line: int) -> InputError:
    """What to say of a row that is longer than MAX_ROW."""
    return InputError(f"{name}:{line}: longer than {MAX_ROW >> 20} MiB from here on; cut it into several rows")


def _skip_blank(text: str, position: int) -> int:
    match = _BLANK.match(text, position)
    assert match is not None, "the pattern matches the empty string"
    return match.end()
