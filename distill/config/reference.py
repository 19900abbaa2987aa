"""What is generated from the schema: the reference page, and the JSON schema with which editors check a file."""

import json
from itertools import groupby
from pathlib import Path
from typing import Any

from distill.config.keys import Key, show
from distill.config.root import Config, keys_by_name, section_model
from distill.config.spelling import ARCHITECTURE, alias_names, canonical, component, inverses
from distill.errors import InputError

_HEAD = """# Configuration reference

Generated from the schema in `distill/config/sections.py`; a test keeps it current.

A configuration file is JSON (comments, and a comma at the end of a list, are fine) or YAML. Keys may stand at the top
or in their section (`{"training": {"lr": 1e-4}}` is `{"lr": 1e-4}`), each once; `null` means the default. Nothing is
converted and nothing ignored: an unknown key, a wrong type or a value out of range ends the run with exit code 2 and
one line that names file, line and key. Relative paths count from the file's folder. `"$schema": "config.schema.json"`
makes editors complete and check the keys. *Also* lists other spellings: `optimizer.lr` is `{"optimizer": {"lr": …}}`.

On the command line every key is a flag (`--lr 1e-4`, `--lr=1e-4`, the short flag where there is one) or a pair
(`lr=1e-4`, `training.lr=1e-4`), and counts more than the file; relative paths count from the working directory.
Booleans: `--add_bos`, `--no-add_bos`, `--add_bos false`. Lists and objects are JSON: `-fl '["lm_head"]'`.
`-topk N` implies `--enable_topK`.

What counts more: defaults, then files (`--config` as often as wanted, later over earlier), then the environment
(`DISTILL_LR=1e-4`), then flags and pairs. [layers.md](layers.md) has files that include others, references between
values, and sweeps. `python run.py config` prints every value with its origin, `--explain KEY` what is told here of one.

*Decides*: a new value of a **layer** key makes other teacher records, so they are collected anew; one of a **result**
or **layer** key makes another student, so an unfinished training does not go on with it; all others can change at any
time.
"""

_TABLE = """
## {title}

{intro}

| key | flag | value | default | decides | what it is | also |
| --- | --- | --- | --- | --- | --- | --- |
"""


def reference_markdown() -> str:
    """The page docs/configuration.md."""
    page = _HEAD
    for section, keys in keys_by_section().items():
        model = section_model(section)
        page += _TABLE.format(title=model.title, intro=model.__doc__)
        page += "".join(map(_row, keys))
    return page


def json_schema() -> str:
    """The file config.schema.json: every key at the top and in its section, null allowed everywhere."""
    properties: dict[str, Any] = {"$schema": {"type": "string"}}
    all_keys = Config.keys()
    for section, keys in keys_by_section().items():
        references = {key.name: {"$ref": f"#/$defs/{key.name}"} for key in keys}
        properties[section] = {"type": ["object", "null"], "properties": references, "additionalProperties": False}
        properties |= references
    for section in ("student", "model"):
        properties[section]["type"] = ["object", "string", "null"]
        properties[section]["properties"] |= {option: {} for option in ARCHITECTURE}
    properties |= _other_spellings() | {name: {"type": ["object", "null"]} for name in ("args", "data")}
    properties |= {"defaults": {"type": ["array", "string", "object"]}, "loggers": {}}
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "distill configuration",
        "type": "object",
        "properties": properties,
        "additionalProperties": False,
        "$defs": {key.name: _editor_schema(key) for key in all_keys},
    }
    return json.dumps(schema, indent=2, ensure_ascii=False) + "\n"


def _other_spellings() -> dict[str, Any]:
    """Aliases and inverses at the top, and the groups that the dotted ones make."""
    properties: dict[str, Any] = {name: {"type": ["number", "null"], "minimum": 0} for name in inverses()}
    for alias, key in alias_names().items():
        group, _, name = alias.partition(".")
        if not name:
            properties[group] = {"$ref": f"#/$defs/{key}"}
        elif group not in keys_by_name():
            properties[group] = {"type": ["object", "null"]}
    return properties


def write_generated(root: Path) -> None:
    """Write docs/configuration.md and config.schema.json under ``root``."""
    (root / "docs" / "configuration.md").write_text(reference_markdown(), encoding="utf-8")
    (root / "config.schema.json").write_text(json_schema(), encoding="utf-8")


def explain(name: str) -> str:
    """All that is declared of the key called ``name``, in any of its spellings. InputError if nothing is."""
    trail = canonical(tuple(name.split(".")), f"--explain: {name}")
    key = keys_by_name().get(inverses().get(trail[0], trail[0]))
    if key is None:
        raise InputError(f"--explain: {name}: is not a key, but a group whose names are yours")
    decides = {"layer": "the teacher's records", "result": "the student", None: "neither records nor student"}
    rows = [
        ("what", key.doc),
        ("value", value_text(key)),
        ("default", show(key.default)),
        ("flags", ", ".join(key.flags)),
        ("section", key.section),
        ("also", ", ".join(other_spellings(key))),
        ("decides", decides[key.decides]),
    ]
    return f"{key.name}\n" + "".join(f"  {head + ':':<9} {text}\n" for head, text in rows if text)


def keys_by_section() -> dict[str, list[Key]]:
    """The keys of each section, in order."""
    return {section: list(keys) for section, keys in groupby(Config.keys(), key=lambda key: key.section)}


def value_text(key: Key) -> str:
    """Type, range, unit and what works as yet: "a whole number, at least 1 (tokens)"."""
    text = ", ".join(filter(None, [key.describe(), key.bounds()])) + (f" ({key.unit})" if key.unit else "")
    available = ", ".join(map(show, key.available))
    return f"{text}; as yet only {available}" if available else text


def other_spellings(key: Key) -> list[str]:
    """What else a key is called, and what stands for its reciprocal."""
    return [*key.aliases, *filter(None, [key.inverse and f"{key.inverse} = 1/{key.name}"])]


def _row(key: Key) -> str:
    cells = [
        f"`{key.name}`",
        f"`{key.flag}`" if key.flag else "",
        value_text(key),
        f"`{show(key.default)}`",
        key.decides or "",
        key.doc,
        ", ".join(f"`{name}`" for name in other_spellings(key)),
    ]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


def _editor_schema(key: Key) -> dict[str, Any]:
    told = {"description": f"{key.doc} Value: {value_text(key)}.", "default": key.default}
    choices = key.available or key.schema.get("enum")
    options = [{"type": "object"}] if component((key.name,)) else []
    if choices and not options:
        return told | {"enum": [*(choice for choice in choices if choice is not None), None]}
    alternatives = [choice for choice in key.schema.get("anyOf", [key.schema]) if choice.get("type") != "null"]
    return told | {"anyOf": [*alternatives, *options, {"type": "null"}]}
