"""Where a key may stand, and what each place means: sections, groups such as ``optimizer.lr``, and other spellings.

Everything is turned into one form, the key's name alone, before files are laid over each other. So two files may spell
a key in two ways, and a reference finds it by any of them.
"""

import re
from functools import cache
from typing import Any

from distill.config.keys import suggest
from distill.config.root import Config, keys_by_name
from distill.errors import InputError

Trail = tuple[str, ...]

FREE = ("args", "data", "loggers")
"""Groups whose names are the user's own, or are read when everything is known."""
_OBJECTS = ("args", "data")

STUDENT = "student"
# What a student's architecture is described by, next to the keys of the sections ``student`` and ``model``.
ARCHITECTURE = (
    "_name", "vocab_size", "n_layer", "n_head", "n_kv_head", "hidden_dim", "intermediate_dim", "tokenizer",
)  # fmt: skip
_STUDENT_SECTIONS = ("student", "model")
_REFERENCE = re.compile(r"\$\{(\.*)([\w-]+(?:\.[\w-]+)*)\}")


def canonical(trail: Trail, said: str) -> Trail:
    """The one form of ``trail``: a key's name (and what lies inside its object), or a name of a free group.

    Raises InputError that says ``said`` where nothing is called so.
    """
    found = _lookup(trail)
    if found is None and trail[0] in Config.model_fields and len(trail) > 1:
        found = _in_section(trail, said)
    if found is None:
        raise InputError(f"{said}: unknown key{_hint(trail)}")
    return found


def is_group(trail: Trail) -> bool:
    """Whether ``trail`` only gathers keys: a section, or the front of spelled-out names."""
    front = ".".join(trail) + "."
    return (len(trail) == 1 and trail[0] in (*Config.model_fields, *_OBJECTS)) or any(
        name.startswith(front) for name in alias_names()
    )


def component(trail: Trail) -> str:
    """The key that ``trail`` means, if it has options of its own (optimizer: optimizer.lr), else ""."""
    found = _lookup(trail[1:] if len(trail) > 1 and trail[0] in Config.model_fields else trail)
    fronts = (f"{found[0]}.", ".".join(trail) + ".") if found is not None and len(found) == 1 else ()
    return found[0] if found is not None and any(name.startswith(fronts) for name in alias_names()) else ""


def option_of(spelled: Trail) -> str:
    """The component that ``spelled`` names an option of, "" if of none."""
    return component(spelled[:-1]) if len(spelled) > 1 else ""


def other_names() -> frozenset[str]:
    """The names besides the keys' own that stand at the top."""
    return frozenset([*(name for name in alias_names() if "." not in name), *inverses()])


def inverses() -> dict[str, str]:
    """The names under which a key's reciprocal may be given, and that key."""
    return {key.inverse: key.name for key in keys_by_name().values() if key.inverse}


def holds_options(key: str, value: dict[str, Any]) -> bool:
    """Whether the object given for the component ``key`` holds its options, rather than being the key's value."""
    known = alias_names()
    return (
        "object" not in keys_by_name()[key].types or "_name" in value or any(f"{key}.{name}" in known for name in value)
    )


def with_absolute_references(value: Any, trail: Trail) -> Any:
    """``value``, which stands at ``trail``, with each ``${name}`` in its texts in the one form."""
    if isinstance(value, list):
        return [with_absolute_references(item, trail) for item in value]
    if isinstance(value, dict):
        return {name: with_absolute_references(item, (*trail, name)) for name, item in value.items()}
    return _REFERENCE.sub(lambda match: _absolute(match, trail), value) if isinstance(value, str) else value


def _absolute(match: re.Match[str], trail: Trail) -> str:
    dots, name = match[1], match[2]
    base = trail[: -len(dots)] if dots else ()
    parts = (*base, *name.split("."))
    found = _lookup(parts)
    if found is None and parts[0] in Config.model_fields and len(parts) > 1:
        found = _lookup(parts[1:])
    return "${" + ".".join(found or parts) + "}"


def _in_section(trail: Trail, said: str) -> Trail | None:
    section, inner = trail[0], trail[1:]
    found = _lookup(inner)
    if found is not None and found[0] not in FREE:
        home = keys_by_name()[inverses().get(found[0], found[0])].section
        if home != section:
            raise InputError(f"{said}: belongs in the section {home!r}, not {section!r}")
        return found
    if section in _STUDENT_SECTIONS and inner[0] in ARCHITECTURE:
        return (STUDENT, *inner)
    return None


def _lookup(trail: Trail) -> Trail | None:
    """``trail`` by the aliases and, last of all, as a key with what is inside it. A section's name is none of them."""
    if trail[0] in FREE or (len(trail) == 1 and trail[0] in inverses()):
        return trail
    for length in range(len(trail), 0, -1):
        key = alias_names().get(".".join(trail[:length]))
        if key is not None:
            return _lookup((key, *trail[length:]))
    if trail[-1] == "_name" and len(trail) > 1:
        return _lookup(trail[:-1])
    if trail[0] == "lr_scheduler" and len(trail) > 1:
        return ("lr_scheduler_args", *trail[1:])
    known = keys_by_name().get(trail[0])
    return trail if known is not None and (len(trail) == 1 or "object" in known.types) else None


def _hint(trail: Trail) -> str:
    words = [*keys_by_name(), *alias_names(), *inverses(), *Config.model_fields]
    inner = trail[1:] if trail[0] in Config.model_fields and len(trail) > 1 else trail
    return suggest(".".join(inner), words) or suggest(trail[-1], words) or "; `python run.py --help` lists all"


@cache
def alias_names() -> dict[str, str]:
    """Every other spelling of a key, dotted where it stands in a group, and the key it means."""
    aliases = {alias: key.name for key in keys_by_name().values() for alias in key.aliases}
    assert not aliases.keys() & keys_by_name().keys(), "an alias is the name of a key"
    return aliases
