"""Sweeps: the values in ``key=a,b`` words, combined, one run each, and a table of what came out."""

import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distill.errors import InputError

_BRACKETS = {"[": 1, "{": 1, "(": 1, "]": -1, "}": -1, ")": -1}
_HEAD = ("run", "values", "steps", "seconds", "KL before", "KL after", "CE after")


@dataclass(frozen=True, slots=True)
class Point:
    """One run of a sweep: its words, and those of them that vary."""

    words: list[str]
    label: str


@dataclass(frozen=True, slots=True)
class Row:
    """What came out of one run; ``summary`` is its summary.json."""

    label: str
    summary: dict[str, Any]


def sweep_points(words: Sequence[str]) -> list[Point]:
    """Every combination of the values in ``words``, the last word's varying fastest. InputError if nothing varies."""
    rest = [word for word in words if word != "-m"]
    choices = [_choices(word) for word in rest]
    if not any(len(choice) > 1 for choice in choices):
        raise InputError("-m: nothing varies; give a key several values, lr=1e-4,1e-5")
    points = []
    for combination in itertools.product(*choices):
        label = " ".join(word for word, choice in zip(combination, choices, strict=True) if len(choice) > 1)
        points.append(Point(list(combination), label))
    return points


def read_row(label: str, cache_folder: Path) -> Row:
    """The newest run under ``cache_folder``."""
    latest = cache_folder / "runs" / "latest"
    folder = latest if latest.is_dir() else latest.with_name(latest.read_text(encoding="utf-8").strip())
    return Row(label, json.loads((folder / "summary.json").read_text(encoding="utf-8")))


def sweep_table(rows: Sequence[Row]) -> str:
    """The runs in their order, a line each."""
    lines = [_HEAD, *(_cells(number, row) for number, row in enumerate(rows, 1))]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    aligned = (
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )
    return "\n" + "\n".join(aligned) + "\n"


def _cells(number: int, row: Row) -> tuple[str, ...]:
    train, validation = row.summary["train"], row.summary["validation"]
    numbers = (
        *((train["steps"], "d"), (train["seconds"], ".1f")),
        *((validation["before"]["kl"], ".4f"), (validation["after"]["kl"], ".4f"), (validation["after"]["ce"], ".4f")),
    )
    return str(number), row.label, *("" if value is None else format(value, form) for value, form in numbers)


def _choices(word: str) -> list[str]:
    """The words that ``word`` stands for: several if its value has commas outside brackets and quotes."""
    name, equals, text = word.partition("=")
    if not equals or word.startswith("-"):
        return [word]
    return [f"{name}={part}" for part in _parts(text)]


def _parts(text: str) -> Iterator[str]:
    depth, quote, start = 0, "", 0
    for at, char in enumerate(text):
        if quote:
            quote = "" if char == quote else quote
        elif char in "\"'":
            quote = char
        elif char == "," and not depth:
            yield text[start:at]
            start = at + 1
        depth += 0 if quote else _BRACKETS.get(char, 0)
    yield text[start:]
