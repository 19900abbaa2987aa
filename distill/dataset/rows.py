"""One row of whatever container to a Sample, or what is wrong with it."""

from collections.abc import Callable, Mapping
from typing import Any

from distill.dataset.strict_json import JsonError, parse_text
from distill.errors import InputError
from distill.types import Role, Sample, Turn

Row = Mapping[str, object]

COLUMNS = (
    *("conversations", "init", "tags", "messages", "text", "input"),
    *("prompt", "instruction"),
    *("response", "completion", "output"),
)
"""The keys that decide what a row is; all others are ignored."""

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
_KNOWN = "known are conversations, messages, prompt, text"


class _RowError(ValueError):
    """What is wrong with one row; the caller knows where it stands."""


def to_sample(row: object, where: str) -> Sample:
    """The sample in a row as JSON has it. Raises InputError that begins with ``where``."""
    try:
        return _sample(row, where)
    except _RowError as error:
        raise InputError(f"{where}: {error}") from error


def cells_to_sample(row: Row, where: str) -> Sample:
    """The sample in a row of a table: an empty cell counts as absent, and turns may be JSON text.

    Turns may also stand as one list a key, as `datasets` keeps a sequence of objects. Raises InputError that begins
    with ``where``.
    """
    empty = sorted(key for key, cell in row.items() if cell is None or cell == "")
    try:
        return _sample({key: _unpacked(key, cell) for key, cell in row.items() if key not in empty}, where)
    except _RowError as error:
        hint = f" (empty: {', '.join(empty)})" if empty and _KNOWN in str(error) else ""
        raise InputError(f"{where}: {error}{hint}") from error


def check_columns(names: list[str], where: str) -> None:
    """Raise InputError that begins with ``where`` if a column is given twice or none says what a row is."""
    twice = sorted({name for name in names if name in COLUMNS and names.count(name) > 1})
    if twice:
        raise InputError(f"{where}: the column {twice[0]!r} is given twice")
    if not {"conversations", "messages", "text", *_PROMPT_KEYS} & set(names):
        raise InputError(f"{where}: no known column in {sorted(names)}; {_KNOWN}")


def _unpacked(key: str, cell: object) -> object:
    if isinstance(cell, str) and (key in ("conversations", "messages") or (key == "tags" and cell.startswith("["))):
        try:
            return parse_text(cell)
        except JsonError as error:
            raise _RowError(f"{key}: {error}") from error
    if key in ("conversations", "messages") and isinstance(cell, dict):
        columns = list(cell.values())
        if all(isinstance(column, list) and len(column) == len(columns[0]) for column in columns):
            return [dict(zip(cell, turn, strict=True)) for turn in zip(*columns, strict=True)]
    return cell


def _sample(value: object, where: str) -> Sample:
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
    raise _RowError(f"unknown form of row with the keys {sorted(row)}; {_KNOWN}")


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
