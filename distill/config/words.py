"""Texts of the command line and the environment as values: a key's own type decides what its text means."""

import re
from typing import Any

from distill.config.keys import Key
from distill.config.reader import JsonError, ParseError, read_json
from distill.config.root import keys_by_name
from distill.errors import InputError

BOOLEANS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")


def value_of_text(trail: tuple[str, ...], text: str, said: str) -> Any:
    """What ``text`` means at the canonical ``trail``: by the key's type, or in a free group as YAML has it."""
    key = keys_by_name().get(trail[0])
    return key_value(key, text, said) if key is not None and len(trail) == 1 else free_value(text, said)


def key_value(key: Key, text: str, said: str) -> Any:
    """The value of ``key`` that ``text`` stands for. What fits none of its types stays text, and is refused later."""
    if text == "null":
        return None
    if "boolean" in key.types:
        return BOOLEANS.get(text.lower(), text)
    if key.types & {"integer", "number"} and NUMBER.fullmatch(text):
        return int(text) if re.fullmatch(r"[+-]?\d{1,18}", text) else float(text)
    if key.types & {"array", "object"} and ("string" not in key.types or text.startswith(("[", "{"))):
        if text.startswith("${"):
            return text
        try:
            return read_json(text).value
        except JsonError as error:
            raise InputError(f"{said}: must be {key.describe()} in JSON: {error.problem} ({error.where})") from None
    return text


def free_value(text: str, said: str) -> Any:
    """A value as YAML has it on one line: a number, a text, true, [1, 2], {a: 1}."""
    from distill.config.yaml_reader import read_yaml

    if not text or text.startswith("${"):
        return text
    try:
        return read_yaml(text).value
    except ParseError as error:
        raise InputError(f"{said}: cannot be read as a value: {error.problem}") from None
