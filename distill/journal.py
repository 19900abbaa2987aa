"""What the rounds of one training collected and decided, in a file beside its state: nothing else is ever deleted."""

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from distill.errors import InputError
from distill.files import append_durably, make_folder, os_errors, write_durably

_JOURNAL = "rounds.jsonl"
_VERSION = 1


@dataclass(slots=True)
class Journal:
    """The journal of a training that goes in rounds; appended durably, a torn last line is as if not there.

    ``own``: the shards that it collected, by their layer's folder (relative to the dataset's) and name. ``ends``: where
    its parts end, see ``parts``.
    """

    path: Path
    own: set[tuple[str, str]] = field(default_factory=set)
    ends: list[int] = field(default_factory=list)

    @classmethod
    def exists(cls, state: Path) -> bool:
        """Whether the training of this state folder goes in rounds."""
        return (state / _JOURNAL).exists()

    @classmethod
    def own_of(cls, state: Path) -> frozenset[tuple[str, str]]:
        """The shards that the rounds of this state folder collected; none if it doesn't go in rounds."""
        return frozenset(cls.open(state).own) if cls.exists(state) else frozenset()

    @classmethod
    def open(cls, state: Path) -> Self:
        """The journal of a training, empty if there is none. InputError if it is of a newer version."""
        journal = cls(state / _JOURNAL)
        if not journal.path.exists():
            make_folder(state)
            journal._append({"version": _VERSION})
            return journal
        with os_errors("read", journal.path):
            *lines, torn = journal.path.read_bytes().split(b"\n")
        for line in lines:
            journal._read(line)
        if torn:  # the next line must not be appended to half a line
            write_durably(journal.path, b"".join(line + b"\n" for line in lines))
        return journal

    def promise(self, layer: str, shard: str) -> None:
        """Before a shard is written: it is the rounds' own."""
        if (layer, shard) not in self.own:
            self._append({"layer": layer, "shard": shard})
            self.own.add((layer, shard))

    def forget(self, layer: str, shards: Iterable[str]) -> None:
        """These are gone: should somebody collect them again, they are no longer the rounds' own."""
        for shard in shards:
            if (layer, shard) in self.own:
                self._append({"layer": layer, "gone": shard})
                self.own.discard((layer, shard))

    def end_part(self, end: int) -> None:
        """A part is collected; it ends at position ``end``."""
        self._append({"end": end})
        self.ends.append(end)

    def _read(self, line: bytes) -> None:
        try:
            entry = json.loads(line)
            if entry.get("version", _VERSION) != _VERSION:
                raise InputError(f"{self.path}: version {entry['version']}, this program reads {_VERSION}; update it")
            if "end" in entry:
                self.ends.append(int(entry["end"]))
            elif "shard" in entry:
                self.own.add((str(entry["layer"]), str(entry["shard"])))
            elif "gone" in entry:
                self.own.discard((str(entry["layer"]), str(entry["gone"])))
        except (ValueError, LookupError, AttributeError, TypeError) as error:
            raise InputError(f"{self.path}: damaged ({error}); start again with --fresh") from error

    def _append(self, entry: dict[str, object]) -> None:
        append_durably(self.path, json.dumps(entry).encode() + b"\n")
