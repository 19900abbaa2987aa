"""The text containers: streams of bytes to rows, each with its file:line."""

import csv
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO

from distill.dataset.rows import cells_to_sample, check_columns, to_sample
from distill.dataset.strict_json import BOM, MAX_ROW, JsonError, JsonStream, decode, parse_text, too_long
from distill.errors import InputError
from distill.types import Sample


def read_jsonl(stream: BinaryIO, name: str) -> Iterator[Sample]:
    """A row a line; blank lines are passed over. Raises InputError with file:line."""
    for number, line in _lines(stream, name):
        if not line.strip():
            continue
        text = decode(line.rstrip(), name, number)
        try:
            row = parse_text(text)
        except JsonError as error:
            raise InputError(f"{name}:{number}: {error}") from error
        yield to_sample(row, f"{name}:{number}")


def read_json(stream: BinaryIO, name: str) -> Iterator[Sample]:
    """A list of rows, or one row; a row's line is the one it begins on. Raises InputError with file:line."""
    rows = JsonStream(stream, name)
    if rows.take("["):
        yield from _read_list(rows, name)
        return
    rows.peek()
    where = f"{name}:{rows.line}"
    row = rows.value()
    if rows.peek():
        raise InputError(f"{name}:{rows.line}: more than one value; a file with a row a line is named .jsonl")
    yield to_sample(row, where)


def _read_list(rows: JsonStream, name: str) -> Iterator[Sample]:
    closed = rows.take("]")
    while not closed:
        rows.peek()
        where = f"{name}:{rows.line}"
        yield to_sample(rows.value(), where)
        closed = rows.take("]")
        if not closed and not rows.take(","):
            raise InputError(f"{name}:{rows.line}: broken JSON: expected , or ] after a row")
    if rows.peek():
        raise InputError(f"{name}:{rows.line}: broken JSON: more text after the list of rows")


def read_txt(stream: BinaryIO, name: str) -> Iterator[Sample]:
    """The whole file is one completion; its line ends become ``\\n``. Raises InputError with file:line."""
    content = stream.read(MAX_ROW + 1)
    if len(content) > MAX_ROW:
        raise too_long(name, 1)
    text = decode(content.removeprefix(BOM), name).replace("\r\n", "\n")
    if not text.strip():
        raise InputError(f"{name}:1: the file is empty")
    yield Sample(f"{name}:1", text=text)


def read_csv(stream: BinaryIO, name: str) -> Iterator[Sample]:
    """Comma-separated cells under a header, quoted as RFC 4180 says; a row's line is the one it begins on.

    An empty cell counts as absent; ``conversations``, ``messages`` and ``tags`` may be JSON text. Raises InputError
    with file:line.
    """
    header: list[str] = []
    for number, cells in _csv_rows(stream, name):
        where = f"{name}:{number}"
        if not header:
            header = cells
            check_columns(header, where)
            continue
        if len(cells) != len(header):
            raise InputError(f"{where}: {len(cells)} cells, but the header has {len(header)}; is a quote missing?")
        yield cells_to_sample(dict(zip(header, cells, strict=True)), where)


def _csv_rows(stream: BinaryIO, name: str) -> Iterator[tuple[int, list[str]]]:
    """The rows with the number of the line that each begins on, without blank lines."""
    row_bytes, last = 0, b""

    def lines() -> Iterator[str]:
        nonlocal row_bytes, last
        for number, last in _lines(stream, name):
            row_bytes += len(last)
            if row_bytes > MAX_ROW:
                raise too_long(name, first)
            yield decode(last, name, number)

    reader = csv.reader(lines(), strict=True)
    while True:
        first, row_bytes = reader.line_num + 1, 0
        try:
            with _long_cells():
                cells = next(reader, None)
        except csv.Error as error:
            raise InputError(f"{name}:{first}: broken CSV: {error}; is a quote missing or not doubled?") from error
        if cells is None:
            return
        if reader.line_num > first or last.strip():
            yield first, cells


@contextmanager
def _long_cells() -> Iterator[None]:
    """The csv module's own limit is 128 KiB a cell, and one for the whole process."""
    before = csv.field_size_limit(MAX_ROW)
    try:
        yield
    finally:
        csv.field_size_limit(before)


def _lines(stream: BinaryIO, name: str) -> Iterator[tuple[int, bytes]]:
    """The physical lines, numbered from 1, the byte order mark taken off.

    Bytes are split at ``\\n`` only: U+2028 and other line ends of str.splitlines may stand inside strings.
    """
    number = 0
    while line := stream.readline(MAX_ROW + 1):
        number += 1
        if len(line) > MAX_ROW:
            raise too_long(name, number)
        yield number, line.removeprefix(BOM) if number == 1 else line
