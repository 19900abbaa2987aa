"""How a key is declared, and what can be told about it: everything the loader, the command line and the docs show."""

import difflib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

Decides = Literal["layer", "result"]

MAX_INT = 2**31 - 1  # every count fits an int32; not worth a word in the docs

# By the JSON schema's type, or its format where it has one.
_NOUNS = {
    "boolean": "true or false",
    "integer": "a whole number",
    "number": "a number",
    "string": "a string",
    "path": "a path",
}
_PLURALS = {"number": "numbers", "string": "strings", "path": "paths"}
_BOUNDS = {
    "minimum": "at least",
    "exclusiveMinimum": "above",
    "maximum": "at most",
    "exclusiveMaximum": "below",
}


def key(
    default: object,
    doc: str,
    *,
    unit: str = "",
    flag: str = "",
    decides: Decides | None = None,
    available: tuple[object, ...] = (),
    aliases: tuple[str, ...] = (),
    inverse: str = "",
) -> Any:
    """Declare a key of a section in one line: its annotation gives the type and range, this the rest.

    ``flag`` is the short flag. ``decides`` says what a changed value makes different: the teacher's records ("layer"),
    the trained student ("result"), or nothing. ``available``, where not empty, lists the only values that work as yet.
    ``aliases`` are other spellings, dotted where they stand in a group ("optimizer.lr"). ``inverse`` is a
    name under which the value's reciprocal may be given instead.
    """
    extra: dict[str, Any] = {"unit": unit, "flag": flag, "decides": decides, "available": available}
    extra |= {"aliases": aliases, "inverse": inverse}
    return Field(default, description=doc, json_schema_extra=extra)


# No value is converted: true is not 1, "3" is not 3; only 1 is accepted for 1.0.
STRICT = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class Section(BaseModel):
    """A group of keys, under the ``title`` that the ancestor's page gives it."""

    model_config = STRICT
    title: ClassVar[str]

    @field_validator("*")
    @classmethod
    def _is_available(cls, value: object, info: ValidationInfo) -> object:
        assert info.field_name is not None, "only fields are validated"
        extra: Any = cls.model_fields[info.field_name].json_schema_extra
        names = [show(choice) for choice in extra["available"]]
        # Compared as JSON: there () is [] and true is not 1.
        if names and show(value) not in names:
            raise ValueError(f"{show(value)} is not available yet (available: {', '.join(names)})")
        return value


@dataclass(frozen=True)
class Key:
    """All that is declared about one key. ``schema`` is the JSON schema of its type and range."""

    name: str
    section: str
    doc: str
    unit: str
    flag: str
    decides: Decides | None
    available: tuple[object, ...]
    aliases: tuple[str, ...]
    inverse: str
    default: Any
    schema: dict[str, Any]

    @property
    def flags(self) -> tuple[str, ...]:
        """The short flag, where there is one, and the long flag."""
        return (*filter(None, [self.flag]), f"--{self.name}")

    @property
    def types(self) -> frozenset[str]:
        """The JSON types of its values other than null."""
        return frozenset(choice["type"] for choice in _choices(self.schema))

    def describe(self) -> str:
        """What a value must be, to follow "must be": "a whole number", "a string or a list of strings"."""
        return " or ".join(_noun(choice) for choice in _choices(self.schema))

    def bounds(self) -> str:
        """The range of a number, "at least 0, below 1"; "" where there is none."""
        number = _choices(self.schema)[0]
        number = number.get("items") or number.get("prefixItems", [number])[0]
        return ", ".join(
            f"{word} {number[name]:g}" for name, word in _BOUNDS.items() if number.get(name, MAX_INT) != MAX_INT
        )


def section_keys(name: str, section: type[Section]) -> list[Key]:
    """The keys that ``section`` declares, in the order of their declaration."""
    keys = []
    for field, schema in section.model_json_schema()["properties"].items():
        told = {part: schema.pop(part) for part in ("unit", "flag", "decides", "default", "inverse")}
        doc, _ = schema.pop("description"), schema.pop("title")
        lists = {part: tuple(schema.pop(part)) for part in ("available", "aliases")}
        keys.append(Key(name=field, section=name, doc=doc, schema=schema, **told | lists))
    return keys


def show(value: object) -> str:
    """A value as JSON on one line, shortened, for messages and docs."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 80 else text[:77] + "..."


def suggest(word: str, known: Iterable[str]) -> str:
    """'; did you mean X?' for the nearest known word, "" if none is near."""
    spelled = {name.lower().lstrip("-"): name for name in known}
    near = difflib.get_close_matches(word.lower().lstrip("-"), spelled, n=1, cutoff=0.6)
    return f"; did you mean '{spelled[near[0]]}'?" if near else ""


def _choices(schema: dict[str, Any]) -> list[dict[str, Any]]:
    """The alternatives of a union, null left out."""
    return [choice for choice in schema.get("anyOf", [schema]) if choice["type"] != "null"]


def _noun(schema: dict[str, Any]) -> str:
    if "const" in schema:
        return show(schema["const"])
    if "enum" in schema:
        return "one of " + ", ".join(map(show, schema["enum"]))
    if schema["type"] == "array" and "prefixItems" in schema:
        items = schema["prefixItems"]
        return f"a list of {len(items)} {_PLURALS[items[0]['type']]}"
    if schema["type"] == "array":
        return f"a list of {_PLURALS[schema['items'].get('format', schema['items']['type'])]}"
    if schema["type"] == "object":
        values = schema["additionalProperties"]
        return "an object" if values is True else f"an object of {_PLURALS[values['type']]}"
    return _NOUNS[schema.get("format", schema["type"])]
