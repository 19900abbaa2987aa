"""What the files, the environment and the command line say, as one tree of entries that know where they come from."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from distill.config.keys import suggest
from distill.config.reader import Document
from distill.config.root import Config, Setting, keys_by_name
from distill.config.spelling import (
    ARCHITECTURE,
    FREE,
    STUDENT,
    Trail,
    canonical,
    component,
    holds_options,
    is_group,
    with_absolute_references,
)
from distill.errors import InputError


@dataclass(frozen=True)
class Entry:
    """One value at its canonical ``trail``. ``spelled`` is where the user wrote it; the rest is as in Setting.

    ``layer`` numbers the files in the order in which they count; the environment and the command line come after.
    """

    trail: Trail
    value: Any
    said: str
    origin: str
    folder: Path
    layer: int = 0
    spelled: Trail = ()


def entries_of(document: Document, path: Path, layer: int, package: Trail = ()) -> Iterator[Entry]:
    """The entries of one file whose content stands at ``package``. InputError for unknown keys and for twins."""
    if not isinstance(document.value, dict):
        raise InputError(f"{path}:1: must be an object of keys and values")
    seen: dict[Trail, int] = {}
    for inner, value in _leaves(document, path, (), document.value, package):
        spelled, line = (*package, *inner), document.lines[inner]
        said = f"{path}:{line}: {said_name(spelled)}"
        trail = canonical(spelled, said)
        if trail in seen:
            raise InputError(f"{said}: given twice, first on line {seen[trail]}")
        seen[trail] = line
        yield Entry(
            trail,
            with_absolute_references(value, spelled),
            said,
            f"{path}:{line}",
            path.absolute().parent,
            layer,
            spelled,
        )


def _leaves(
    document: Document, path: Path, inner: tuple[Any, ...], value: Any, package: Trail
) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """The values of keys, each with its place in the document. ``$schema`` is for editors."""
    spelled = (*package, *inner)
    if inner == ("$schema",) or (value is None and is_group(spelled) and not component(spelled)):
        return
    if spelled and isinstance(value, str) and spelled in ((STUDENT,), ("model",)):
        document.lines[*inner, "_name"] = document.lines[inner]
        yield (*inner, "_name"), value
    elif isinstance(value, dict) and _is_inner_node(spelled, value):
        for name, item in value.items():
            yield from _leaves(document, path, (*inner, name), item, package)
    elif is_group(spelled) and not component(spelled):
        kind = "section" if spelled[0] in Config.model_fields else "group"
        said = f"{path}:{document.lines[inner]}: {said_name(spelled)}"
        raise InputError(f"{said}: is a {kind}, must be an object of keys and values")
    else:
        yield inner, value


def _is_inner_node(spelled: Trail, value: dict[str, Any]) -> bool:
    if not spelled:
        return True
    key = component(spelled)
    if key:
        return holds_options(key, value)
    return is_group(spelled) or (spelled[0] in FREE and bool(value))


def said_name(spelled: Trail) -> str:
    """How messages name a place: a key by its name alone, everything else in full."""
    alone = spelled[0] in Config.model_fields and spelled[-1] not in ARCHITECTURE
    return spelled[-1] if alone or spelled[-1] in keys_by_name() else ".".join(spelled)


class Tree:
    """Entries laid over each other: the last on a trail counts, an object that is a key's value as a whole."""

    def __init__(self) -> None:
        self.entries: dict[Trail, Entry] = {}

    def put(self, entry: Entry) -> None:
        """Add ``entry``, in place of what stood there, above it or below it."""
        trail = entry.trail
        if trail[0] in keys_by_name() and len(trail) > 1:
            self._put_inside(entry)
            return
        for other in [other for other in self.entries if _overlap(other, trail)]:
            del self.entries[other]
        self.entries[trail] = entry

    def _put_inside(self, entry: Entry) -> None:
        """Change one member of an object that is a key's value."""
        top = entry.trail[:1]
        old = self.entries[top].value if top in self.entries else keys_by_name()[top[0]].default
        value = old if isinstance(old, dict) else {}
        self.entries[top] = replace(entry, trail=top, value=_with(value, entry.trail[1:], entry.value))

    def delete(self, trail: Trail, said: str) -> None:
        """Remove what stands at ``trail`` and below it, as spelled or not. InputError if there is nothing."""
        ends = len(trail)
        gone = [other for other, entry in self.entries.items() if trail in (other[:ends], entry.spelled[:ends])]
        if not gone:
            raise InputError(f"{said}: nothing to take away, it is not set")
        for other in gone:
            del self.entries[other]

    def check_known(self, trail: Trail, said: str) -> None:
        """InputError unless ``trail``, of a free group, is set already: a slip there would go unseen."""
        if trail[0] in FREE and not any(_overlap(other, trail) for other in self.entries):
            hint = suggest(".".join(trail), [".".join(other) for other in self.entries if other[0] == trail[0]])
            raise InputError(f"{said}: nothing is called so{hint or '; a new name is written with + before it'}")

    def check_new(self, trail: Trail, said: str) -> None:
        """InputError if ``trail`` is set already."""
        if trail in self.entries:
            raise InputError(f"{said}: is set already, by {self.entries[trail].origin}; leave out the +")


def nested(entries: Iterable[Entry]) -> dict[str, Any]:
    """The values as one object of objects, for references between them."""
    tree: dict[str, Any] = {}
    for entry in entries:
        node = tree
        for part in entry.trail[:-1]:
            node = node.setdefault(part, {})
        node[entry.trail[-1]] = entry.value
    return tree


def as_setting(entry: Entry) -> Setting:
    """The entry of a whole key as what the schema checks."""
    return Setting(entry.trail[0], entry.value, said=entry.said, origin=entry.origin, folder=entry.folder)


def _overlap(one: Trail, other: Trail) -> bool:
    shorter = min(len(one), len(other))
    return one[:shorter] == other[:shorter]


def _with(value: Mapping[str, Any], trail: Trail, member: Any) -> dict[str, Any]:
    inner = value.get(trail[0])
    if len(trail) > 1:
        member = _with(inner if isinstance(inner, dict) else {}, trail[1:], member)
    return {**value, trail[0]: member}
