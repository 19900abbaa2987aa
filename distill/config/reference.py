"""What is generated from the schema: the reference page, and the JSON schema with which editors check a file."""

import json
from itertools import groupby
from pathlib import Path
from typing import Any

from distill.config.keys import Key, show
from distill.config.root import Config, section_model

_HEAD = """# Configuration reference

Generated from the schema in `distill/config/sections.py`; a test keeps it current.

A configuration file is JSON. Keys may stand at the top or in their section (`{"training": {"lr": 1e-4}}` is
`{"lr": 1e-4}`), each once; `null` means the default. Nothing is converted and nothing ignored: an unknown key, a wrong
type or a value out of range ends the run with exit code 2 and one line that names file, line and key. Relative paths
count from the file's folder. `"$schema": "config.schema.json"` makes editors complete and check the keys.

On the command line every key is a flag (`--lr 1e-4`, `--lr=1e-4`, the short flag where there is one) or a pair
(`lr=1e-4`), and counts more than the file; relative paths count from the working directory. Booleans: `--add_bos`,
`--no-add_bos`, `--add_bos false`. Lists and objects are JSON: `-fl '["lm_head"]'`. `-topk N` implies `--enable_topK`.

*Decides*: a new value of a **layer** key makes other teacher records, so they are collected anew; one of a **result**
or **layer** key makes another student, so an unfinished training does not go on with it; all others can change at any
time.
"""

_TABLE = """
## {title}

{intro}

| key | flag | value | default | decides | what it is |
| --- | --- | --- | --- | --- | --- |
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
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "distill configuration",
        "type": "object",
        "properties": properties,
        "additionalProperties": False,
        "$defs": {key.name: _editor_schema(key) for key in all_keys},
    }
    return json.dumps(schema, indent=2, ensure_ascii=False) + "\n"


def write_generated(root: Path) -> None:
    """Write docs/configuration.md and config.schema.json under ``root``."""
    (root / "docs" / "configuration.md").write_text(reference_markdown(), encoding="utf-8")
    (root / "config.schema.json").write_text(json_schema(), encoding="utf-8")


def keys_by_section() -> dict[str, list[Key]]:
    """The keys of each section, in order."""
    return {section: list(keys) for section, keys in groupby(Config.keys(), key=lambda key: key.section)}


def value_text(key: Key) -> str:
    """Type, range, unit and what works as yet: "a whole number, at least 1 (tokens)"."""
    text = ", ".join(filter(None, [key.describe(), key.bounds()])) + (f" ({key.unit})" if key.unit else "")
    available = ", ".join(map(show, key.available))
    return f"{text}; as yet only {available}" if available else text


def _row(key: Key) -> str:
    cells = [
        f"`{key.name}`",
        f"`{key.flag}`" if key.flag else "",
        value_text(key),
        f"`{show(key.default)}`",
        key.decides or "",
        key.doc,
    ]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


def _editor_schema(key: Key) -> dict[str, Any]:
    told = {"description": f"{key.doc} Value: {value_text(key)}.", "default": key.default}
    choices = key.available or key.schema.get("enum")
    if choices:
        return told | {"enum": [*(choice for choice in choices if choice is not None), None]}
    alternatives = [choice for choice in key.schema.get("anyOf", [key.schema]) if choice["type"] != "null"]
    return told | {"anyOf": [*alternatives, {"type": "null"}]}
