"""Files that name others in ``defaults``: found, read once each, and laid over each other in the order they say.

The rules are Hydra's. An entry is a file (``base.yaml``), a choice of a group (``student: tiny-llama``, the file
``student/tiny-llama.yaml``, whose keys stand under ``student``) or ``_self_``, the file's own keys; these come last
where nothing else is said. A file is looked for beside the one that names it, then among those of this package. Where a
group has no such file, the choice is a plain value (``lr_scheduler: wsd``). ``# @package _global_`` on a file's first
line has its keys stand at the top.
"""

import errno
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from distill.config.keys import suggest
from distill.config.reader import Document, ParseError, read_json
from distill.config.spelling import Trail, component
from distill.config.tree import Entry, entries_of
from distill.config.yaml_reader import read_yaml
from distill.errors import InputError

BUNDLED = Path(__file__).parent / "bundled"
SUFFIXES = (".yaml", ".yml", ".json")
_GLOBAL = re.compile(r"\s*#\s*@package\s+_global_\s*$", re.MULTILINE)


@dataclass(frozen=True)
class Choice:
    """What a group of files is to be, by the words that say so."""

    option: str
    said: str
    folder: Path


@dataclass
class Composer:
    """Reads files and what they include. ``choices`` (by group) count more than the files' own; ``taken`` were used."""

    choices: Mapping[str, Choice]
    taken: set[str] = field(default_factory=set)
    layer: int = 0

    def file(self, path: Path, package: Trail = (), chain: tuple[str, ...] = ()) -> Iterator[Entry]:
        """The entries of ``path`` and of all that it includes, in the order in which they count."""
        if any(step.rpartition(":")[0] == str(path) for step in chain):
            raise InputError(f"{chain[-1]}: defaults: files include each other: {' → '.join(chain)}")
        by = f" (included by {', '.join(reversed(chain))})" if chain else ""
        text, document = read_document(path, by)
        package = () if _GLOBAL.match(text) else package
        defaults = document.value.pop("defaults", None) if isinstance(document.value, dict) else None
        own = True
        for entry, line in _entries(defaults, document, path):
            where = f"{path}:{line}"
            if entry == "_self_":
                yield from self._own(document, path, package, by)
                own = False
                continue
            yield from self._included(entry, path, package, (*chain, where))
        if own:
            yield from self._own(document, path, package, by)

    def left_over(self) -> Iterator[Entry]:
        """The choices of groups that no file's defaults name."""
        for group, choice in self.choices.items():
            if group not in self.taken:
                yield from self._choice(group, choice.option, choice.folder / "x", (), (), choice.said)

    def _own(self, document: Document, path: Path, package: Trail, by: str) -> Iterator[Entry]:
        self.layer += 1
        try:
            entries = list(entries_of(document, path, self.layer, package))
        except InputError as error:
            raise InputError(f"{error}{by}") from None
        yield from entries

    def _included(self, entry: Any, path: Path, package: Trail, chain: tuple[str, ...]) -> Iterator[Entry]:
        said = f"{chain[-1]}: defaults"
        if isinstance(entry, str):
            found = find_file(entry, path.parent) or find_file(entry.removeprefix("/"), path.parent)
            if found is None:
                raise InputError(
                    f"{said}: no file {entry!r} beside it or bundled{_nearest(entry, path.parent)}{_by(chain)}"
                )
            yield from self.file(found, package, chain)
            return
        ((group, options),) = entry.items()
        optional = group.startswith("optional ")
        group = group.removeprefix("optional ").removeprefix("override ").strip().removeprefix("/")
        name = group_name("/".join((*package, group)))
        chosen = self.choices.get(name)
        if chosen is not None:
            self.taken.add(name)
            yield from self._choice(group, chosen.option, path, package, chain, chosen.said)
            return
        for option in options if isinstance(options, list) else [options]:
            if option is None or (optional and find_file(f"{group}/{option}", path.parent) is None):
                continue
            yield from self._choice(group, str(option), path, package, chain, said)

    def _choice(
        self, group: str, option: str, path: Path, package: Trail, chain: tuple[str, ...], said: str
    ) -> Iterator[Entry]:
        place = (*package, *group.split("/"))
        found = find_file(f"{group}/{option}", path.parent)
        if found is not None:
            yield from self.file(found, place, chain)
        elif component(place) or place[-1] in ("student", "model", "loggers"):
            self.layer += 1
            document = Document(_nest(place, option), {place[: i + 1]: 0 for i in range(len(place))})
            for entry in entries_of(document, path, self.layer):
                origin = "command line"
                if chain and said.startswith(chain[-1]):
                    said, origin = f"{chain[-1]}: defaults: {group}", chain[-1]
                yield Entry(entry.trail, entry.value, said, origin, entry.folder, entry.layer, entry.spelled)
        else:
            file = f"{group}/{option}"
            near = _nearest(file, path.parent)
            raise InputError(f"{said}: no file {file}.yaml beside it or bundled{near}{_by(chain)}")


def find_file(name: str, folder: Path) -> Path | None:
    """The file ``name``, with or without its suffix, in ``folder`` or among the bundled ones."""
    for base, file in ((folder, name), (folder, group_name(name)), (BUNDLED, group_name(name))):
        for path in (base / file, *(base / f"{file}{suffix}" for suffix in SUFFIXES)):
            if path.suffix in SUFFIXES and path.is_file():
                return Path(os.path.normpath(path))
    return None


def group_name(name: str) -> str:
    """``name`` of a group or of a file in it; a student may be called model."""
    return f"student{name.removeprefix('model')}" if name.partition("/")[0] == "model" else name


def read_document(path: Path, by: str = "") -> tuple[str, Document]:
    """The text of a configuration file, and what it holds. ``by`` says for whom it is read."""
    try:
        data = path.read_bytes()
    except OSError as error:
        if error.errno == errno.EIO:
            raise  # the disk's fault, not the user's
        way_out = by or "; name the file with --config PATH"
        raise InputError(f"{path}: cannot be read ({error.strerror}){way_out}") from None
    try:
        text = data.decode("utf-8-sig")
        return text, read_json(text, by_hand=True) if path.suffix not in (".yaml", ".yml") else read_yaml(text)
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise InputError(f"{path}:{line}: is not UTF-8 text; save it as UTF-8") from None
    except ParseError as error:
        raise InputError(f"{path}:{error.where}: {error.problem}") from None


def _entries(defaults: Any, document: Document, path: Path) -> Iterator[tuple[Any, int]]:
    """The entries of a defaults list, each with its line."""
    if defaults is None:
        return
    top = document.lines["defaults",]
    items = defaults if isinstance(defaults, list) else [defaults]
    for index, entry in enumerate(items):
        lines = [document.lines.get(trail) for trail in (("defaults", index), *_first_key(entry, index))]
        line = next((line for line in reversed(lines) if line), top)
        if isinstance(entry, dict) and not isinstance(defaults, list):
            yield from (({group: option}, document.lines["defaults", group]) for group, option in entry.items())
        elif isinstance(entry, str) or (isinstance(entry, dict) and len(entry) == 1):
            yield entry, line
        else:
            raise InputError(f"{path}:{line}: defaults: an entry is a file's name, {{group: name}} or _self_")


def _first_key(entry: Any, index: int) -> list[tuple[str, int, str]]:
    return [("defaults", index, next(iter(entry)))] if isinstance(entry, dict) and entry else []


def _nearest(name: str, folder: Path) -> str:
    """A hint at a file of nearly that name."""
    group = name.rpartition("/")[0]
    files = [path for base in (folder, BUNDLED) for path in (base / group).glob("*") if path.suffix in SUFFIXES]
    return suggest(name.rpartition("/")[2].partition(".")[0], [path.stem for path in files])


def _by(chain: tuple[str, ...]) -> str:
    return f" (included by {', by '.join(reversed(chain[:-1]))})" if len(chain) > 1 else ""


def _nest(place: Trail, value: str) -> Any:
    return {place[0]: _nest(place[1:], value)} if place else value
