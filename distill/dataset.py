"""Text files to samples: every row is read, or refused as ``file:line`` with what is wrong with it.

Rows are told apart one by one, by their keys, in this order (a key whose value is null counts as absent):

1. ShareGPT, the ancestor's: ``{"init": system, "conversations": [{"from": ..., "value": ...}], "tags": [...]}``;
   with the tag ``completion`` the value of its only turn is plain text
2. OpenAI: ``{"messages": [{"role": ..., "content": ...}]}``
3. instruct: ``{"prompt" | "instruction", "input"?, "response" | "completion" | "output"}``
4. plain text: ``{"text": ...}``
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from distill.errors import InputError
from distill.types import Role, Sample, Turn

SUFFIXES = (".jsonl", ".json", ".txt")
LATER_SUFFIXES = (".parquet", ".csv", ".gz", ".zst")

Row = Mapping[str, object]

_SHAREGPT_ROLES: dict[str, Role] = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
}
_OPENAI_ROLES: dict[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
}
_PROMPT_KEYS = ("prompt", "instruction")
_ANSWER_KEYS = ("response", "completion", "output")
_BOM = b"\xef\xbb\xbf"
_BLANK = re.compile(r"[ \t\r\n]*")


class _RowError(ValueError):
    """What is wrong with one row; the caller knows where it stands."""


def read_samples(paths: str | Sequence[str]) -> Iterator[Sample]:
    """Yield the samples of a file, a folder (its files, sorted by name) or a list of those, in order.

    ``.jsonl`` has a row a line, ``.json`` a list of rows or one row, and a ``.txt`` file is one completion (its line
    ends become ``\\n``). All are UTF-8, with or without a byte order mark.

    Raises InputError, while iterating, for what is missing, unreadable or empty, and for the first bad row.
    """
    paths = [paths] if isinstance(paths, str) else list(paths)
    files = [file for path in paths for file in _files(path)]
    count = 0
    for file in files:
        for sample in _read_file(file):
            count += 1
            yield sample
    if not count:
        raise InputError(f"{', '.join(paths) or 'dataset_path'}: no samples in it; give a file or folder with text")


# -- files ------------------------------------------------------------------------------------------------------------


def _files(name: str) -> list[Path]:
    path = Path(name)
    if path.is_dir():
        return _folder_files(path)
    if path.exists():
        if not _is_text_file(path):
            raise InputError(f"{_short(path)}: not a kind of file that can be read; known are {', '.join(SUFFIXES)}")
        return [path]
    if re.fullmatch(r"[\w.-]+/[\w.-]+", name) and path.suffix.lower() not in SUFFIXES + LATER_SUFFIXES:
        raise InputError(f"{name}: no such file or folder; Hugging Face dataset ids are not available yet")
    raise InputError(f"{_short(path)}: no such file or folder")


def _folder_files(folder: Path) -> list[Path]:
    try:
        inside = sorted(file for file in folder.iterdir() if file.is_file() and not file.name.startswith("."))
    except OSError as error:
        raise InputError(f"{_short(folder)}: can't be read: {error.strerror}") from error
    files = [file for file in inside if _is_text_file(file)]
    if not files:
        raise InputError(f"{_short(folder)}: no {', '.join(SUFFIXES)} file in this folder")
    return files


def _is_text_file(path: Path) -> bool:
    suffix = path.suffix.lower()
    if suffix in LATER_SUFFIXES:
        raise InputError(f"{_short(path)}: {suffix} files are not available yet; convert it to .jsonl")
    return suffix in SUFFIXES


def _short(path: Path) -> str:
    """The path as people read it: relative to the working directory where it lies below it."""
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_absolute() and path.is_relative_to(here) else path)


def _read_file(path: Path) -> Iterator[Sample]:
    read = {".jsonl": _read_jsonl, ".json": _read_json, ".txt": _read_txt}[path.suffix.lower()]
    try:
        yield from read(path, _short(path))
    except OSError as error:
        raise InputError(f"{_short(path)}: can't be read: {error.strerror}") from error


def _read_jsonl(path: Path, name: str) -> Iterator[Sample]:
    # Binary files are split at \n only: U+2028 and other line ends of str.splitlines may stand inside JSON strings.
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            content = line.removeprefix(_BOM) if number == 1 else line
            if not content.strip():
                continue
            text = _decode(content.rstrip(), name, number)
            row, end = _parse(text, name, first_line=number)
            if end != len(text):
                raise InputError(f"{name}:{number}: broken JSON: more than one value on the line (column {end + 1})")
            yield _sample(row, f"{name}:{number}")


def _read_json(path: Path, name: str) -> Iterator[Sample]:
    text = _decode(path.read_bytes().removeprefix(_BOM).rstrip(), name)
    start = _skip_blank(text, 0)
    if text.startswith("[", start):
        yield from _read_list(text, name, start + 1)
        return
    row, end = _parse(text, name, start)
    if end != len(text):
        line = _line(text, _skip_blank(text, end))
        raise InputError(f"{name}:{line}: more than one value; a file with a row a line is named .jsonl")
    yield _sample(row, f"{name}:{_line(text, start)}")


def _read_list(text: str, name: str, position: int) -> Iterator[Sample]:
    """The rows of a JSON list whose ``[`` ends at ``position``, one by one so that each knows its line."""
    line, counted = 1, 0
    position = _skip_blank(text, position)
    closed = text.startswith("]", position)
    while not closed:
        line, counted = line + text.count("\n", counted, position), position
        row, position = _parse(text, name, position)
        yield _sample(row, f"{name}:{line}")
        position = _skip_blank(text, position)
        closed = text.startswith("]", position)
        if not closed and not text.startswith(",", position):
            raise InputError(f"{name}:{_line(text, position)}: broken JSON: expected , or ] after a row")
        if not closed:
            position = _skip_blank(text, position + 1)
    rest = _skip_blank(text, position + 1)
    if rest != len(text):
        raise InputError(f"{name}:{_line(text, rest)}: broken JSON: more text after the list of rows")


def _read_txt(path: Path, name: str) -> Iterator[Sample]:
    where = f"{name}:1"
    text = _decode(path.read_bytes().removeprefix(_BOM), name).replace("\r\n", "\n")
    try:
        yield Sample(where, text=_text(text, "the file"))
    except _RowError as error:
        raise InputError(f"{where}: {error}") from error


def _skip_blank(text: str, position: int) -> int:
    match = _BLANK.match(text, position)
    assert match is not None, "the pattern matches the empty string"
    return match.end()


def _line(text: str, position: int) -> int:
    return text.count("\n", 0, position) + 1


def _decode(content: bytes, name: str, line: int = 1) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        line += content.count(b"\n", 0, error.start)
        raise InputError(f"{name}:{line}: not UTF-8 (byte 0x{content[error.start]:02x}); save it as UTF-8") from error


# -- JSON -------------------------------------------------------------------------------------------------------------


def _unique_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    result = dict(pairs)
    if len(result) < len(pairs):
        keys = [key for key, _ in pairs]
        raise _RowError(f"the key {next(key for key in keys if keys.count(key) > 1)!r} is given twice")
    return result


def _no_constant(name: str) -> NoReturn:
    raise _RowError(f"{name} is no JSON number")


_DECODER = json.JSONDecoder(object_pairs_hook=_unique_keys, parse_constant=_no_constant)


def _parse(text: str, name: str, position: int = 0, *, first_line: int = 1) -> tuple[object, int]:
    """The JSON value at ``position`` and where it ends; ``first_line`` is the number of the text's first line."""
    position = _skip_blank(text, position)
    try:
        value, end = _DECODER.raw_decode(text, position)
    except json.JSONDecodeError as error:
        line = first_line + error.lineno - 1
        raise InputError(f"{name}:{line}: broken JSON: {error.msg} (column {error.colno})") from error
    except (ValueError, RecursionError) as error:
        line = first_line + _line(text, position) - 1
        raise InputError(f"{name}:{line}: broken JSON: {error}") from error
    return value, end


# -- rows -------------------------------------------------------------------------------------------------------------


def _sample(row: object, where: str) -> Sample:
    try:
        return _to_sample(row, where)
    except _RowError as error:
        raise InputError(f"{where}: {error}") from error


def _to_sample(value: object, where: str) -> Sample:
    if not isinstance(value, dict):
        raise _RowError(f"a row is a JSON object, not {_kind(value)}")
    row: Row = {key: item for key, item in value.items() if item is not None}
    if "conversations" in row:
        return _sharegpt(row, where)
    if "messages" in row:
        return Sample(where, turns=_turns(row, "messages", _openai_turn))
    if any(key in row for key in _PROMPT_KEYS) and any(key in row for key in _ANSWER_KEYS):
        return Sample(where, turns=_instruct(row))
    if "text" in row:
        return Sample(where, text=_text(row["text"], "text"))
    raise _RowError(f"unknown form of row with the keys {sorted(row)}; known are conversations, messages, prompt, text")


def _sharegpt(row: Row, where: str) -> Sample:
    turns = _turns(row, "conversations", _sharegpt_turn)
    tags = row.get("tags", [])
    if not isinstance(tags, list | str):
        raise _RowError(f"tags is a list, not {_kind(tags)}")
    init = row.get("init", "")
    if not isinstance(init, str):
        raise _RowError(f"init is a string, not {_kind(init)}")
    if "completion" in (tags if isinstance(tags, list) else [tags]):
        if len(turns) > 1 or init.strip():
            raise _RowError("a completion (see its tags) has one turn and an empty init")
        return Sample(where, text=turns[0].content)
    if init.strip():
        turns = (Turn("system", _text(init, "init")), *turns)
    return Sample(where, turns=turns)


def _turns(row: Row, key: str, read_turn: Callable[[Row, str], Turn]) -> tuple[Turn, ...]:
    values = row[key]
    if not isinstance(values, list):
        raise _RowError(f"{key} is a list of turns, not {_kind(values)}")
    if not values:
        raise _RowError(f"no turns in {key}")
    turns = []
    for number, value in enumerate(values, start=1):
        if not isinstance(value, dict):
            raise _RowError(f"turn {number} is a JSON object, not {_kind(value)}")
        turns.append(read_turn(value, f"turn {number}"))
    return tuple(turns)


def _sharegpt_turn(turn: Row, what: str) -> Turn:
    return Turn(_role(turn.get("from"), what, _SHAREGPT_ROLES), _text(turn.get("value"), f"{what}: value"))


def _openai_turn(turn: Row, what: str) -> Turn:
    role = _role(turn.get("role"), what, _OPENAI_ROLES)
    for key in ("tool_calls", "function_call"):
        if turn.get(key):
            raise _RowError(f"{what}: {key} are not supported; write the call into content")
    content = turn.get("content")
    if isinstance(content, list):
        content = "".join(_text_part(part, what) for part in content)
    return Turn(role, _text(content, f"{what}: content"))


def _text_part(part: Any, what: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else _kind(part)
    if kind != "text" or not isinstance(part.get("text"), str):
        raise _RowError(f"{what}: a part of type {kind!r} in content; only text is supported")
    text: str = part["text"]
    return text


def _instruct(row: Row) -> tuple[Turn, ...]:
    prompt, answer = (_one_of(row, keys) for keys in (_PROMPT_KEYS, _ANSWER_KEYS))
    context = row.get("input", "")
    if not isinstance(context, str):
        raise _RowError(f"input is a string, not {_kind(context)}")
    question = f"{prompt}\n\n{_text(context, 'input')}" if context.strip() else prompt
    return Turn("user", question), Turn("assistant", answer)


def _one_of(row: Row, keys: tuple[str, ...]) -> str:
    present = [key for key in keys if key in row]
    if len(present) > 1:
        raise _RowError(f"both {present[0]} and {present[1]} are given; keep one")
    return _text(row[present[0]], present[0])


def _role(name: object, what: str, roles: Mapping[str, Role]) -> Role:
    if not isinstance(name, str) or name not in roles:
        raise _RowError(f"{what}: unknown role {name!r}; known are {', '.join(roles)}")
    return roles[name]


def _text(value: object, what: str) -> str:
    if not isinstance(value, str):
        raise _RowError(f"{what} is missing" if value is None else f"{what} is a string, not {_kind(value)}")
    if not value.strip():
        raise _RowError(f"{what} is empty")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise _RowError(f"{what} has half a surrogate pair (\\u{ord(value[error.start]):04x})") from error
    return value


def _kind(value: object) -> str:
    kinds = {dict: "an object", list: "a list", str: "a string", bool: "true or false", type(None): "null"}
    return kinds.get(type(value), "a number")
