"""A layer: the records of one teacher under one set of collection settings, in one folder.

The folder holds ``layer.json`` (what it is), sealed shards with their key rows, and ``index.jsonl`` (one line a sealed
shard). The shards are the truth: an index line that is missing or torn is made anew from its shard, so a kill between
any two writes costs nothing.
"""

import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple, Self

import numpy as np

from distill.cache.gate import Admissions, Finding, RefusedShardError
from distill.cache.index import INDEX_FILE, index_bytes, index_line, is_shard_name, read_index, same_info
from distill.cache.readers import Readers
from distill.cache.shard import ShardInfo, ShardReader, keys_path, shard_name, shard_path, target_digest
from distill.cache.spec import LAYER_FILE, LayerSpec, layer_hex, read_spec
from distill.cache.strict import FileState, file_sha256, read_bounded
from distill.errors import InputError
from distill.files import TEMPORARY_SUFFIX, append_durably, disk_bytes, make_folder, os_errors, sync, write_durably
from distill.records import select
from distill.types import Records, TokenizedSample

_OPEN_SHARDS = 64
_ROW = 32  # bytes of a key, and of a digest of targets


class Located(NamedTuple):
    """Where the records of a sample are: shard name and row, and which layer of a source (0 is its own).

    They hold the sample's targets, perhaps among more. A tuple, because there may be millions.
    """

    shard: str
    row: int
    layer: int = 0


@dataclass(slots=True)
class Layer:
    """An opened layer. Readers take no lock; the one who collects holds a lock and alone writes the index.

    Threads may ``read`` from one layer; all else is for one thread at a time.
    ``notes`` are lines about what was found amiss when it was opened.
    """

    folder: Path
    spec: LayerSpec
    shards: dict[str, ShardInfo]
    admissions: Admissions
    notes: list[str] = field(default_factory=list)
    _readers: Readers = field(default_factory=partial(Readers, _OPEN_SHARDS))
    _checked: dict[Path, FileState] = field(default_factory=dict)
    _lock: threading.RLock = field(default_factory=threading.RLock)

    @classmethod
    def open(cls, parent: Path, spec: LayerSpec, admissions: Admissions | None = None) -> Self:
        """The layer of ``spec`` under ``parent``; an absent one is an empty one and isn't created.

        Whatever the teacher's folder is called now, its layer is the one with the same hex. Without ``admissions``
        every shard passes the gate once for each opened layer, and a damaged one stays where it is.
        """
        folders = sorted(parent.glob(f"*-{spec.hex}"), key=lambda folder: (not any(folder.glob("*.h5")), folder))
        folder = next(iter(folders), parent / spec.folder_name)
        return cls._open(folder, spec, Admissions() if admissions is None else admissions)

    @classmethod
    def load(cls, folder: Path, admissions: Admissions) -> Self:
        """The layer in ``folder``, by its ``layer.json`` alone; InputError if that is damaged or of another version."""
        return cls._open(folder, read_spec(folder), admissions)

    @classmethod
    def _open(cls, folder: Path, spec: LayerSpec, admissions: Admissions) -> Self:
        index = read_index(folder / INDEX_FILE)
        with os_errors("read", folder):
            sizes = {path.stem: path.lstat().st_size for path in folder.glob("*.h5")}
        layer = cls(folder, spec, {n: info for n, info in index.items() if sizes.get(n) == info.bytes}, admissions)
        if (sizes or (folder / LAYER_FILE).exists()) and (fault := layer._layer_file_fault()):
            layer.notes.append(f"{fault}; it is derived, and written anew by a run that may write")
        for name in sorted(sizes.keys() - layer.shards.keys()):
            if is_shard_name(name):
                layer._adopt(name)
            else:
                layer.notes.append(f"{folder}: {name!r} is not the name of a shard; ignored")
        return layer

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._readers.close()

    # -- writing: only under the lock -------------------------------------------------------------------------------

    def prepare(self) -> list[str]:
        """Make the folder ready for new shards: remove temporary files, write what is missing of the derived ones.

        Returns a line for everything that was found amiss and mended.
        """
        make_folder(self.folder)
        for path in self.folder.glob(f"*{TEMPORARY_SUFFIX}"):
            if path.is_file():
                path.unlink(missing_ok=True)
        if self._layer_file_fault():
            write_durably(self.folder / LAYER_FILE, self.spec.to_json())
        for name in list(self.shards):
            path = keys_path(self.folder, name)
            if not self.has_key_rows(name):
                write_durably(path, self.reader(name).key_rows())
        for path in self.folder.glob("*.keys"):
            if path.stem not in self.shards:
                path.unlink(missing_ok=True)
        self.compact()
        notes, self.notes = self.notes, []
        return notes

    def register(self, info: ShardInfo) -> None:
        """Put a shard that was just sealed into the index, and admit it: it was written here."""
        append_durably(self.folder / INDEX_FILE, index_line(info))
        self.shards[info.name] = info
        self.admissions.add(info.sha256)

    def compact(self) -> None:
        """Rewrite the index sorted and without what is gone, if that changes anything."""
        data = index_bytes(self.shards.values())
        path = self.folder / INDEX_FILE
        if not path.exists() or path.read_bytes() != data:
            write_durably(path, data)

    def drop(self, names: Iterable[str]) -> None:
        """Delete shards. A kill at any instant leaves a valid layer, with or without each of them."""
        names = [name for name in names if name in self.shards]
        if not names:
            return
        for name in names:
            self._forget(name)
        # The shards go first: an index line or key rows without a shard mean nothing, a shard without them is adopted.
        for path_of in (shard_path, keys_path):
            with os_errors("delete", self.folder):
                for name in names:
                    path_of(self.folder, name).unlink(missing_ok=True)
                sync(self.folder)
        self.compact()

    def _layer_file_fault(self) -> str:
        """What is wrong with ``layer.json``; "" if nothing is."""
        try:
            read_spec(self.folder)
        except InputError as error:
            return str(error)
        return ""

    def _adopt(self, name: str) -> None:
        """Take in a shard that the index lacks or disagrees with, if the gate lets it through."""
        try:
            finding = self._inspect(name)
        except RefusedShardError as error:
            self.notes.append(str(self.set_aside(name, error)))
            return
        self.shards[name] = finding.info
        self.notes.append(f"{finding.info.name}.h5: not in the index as it is; adopted")

    # -- finding ----------------------------------------------------------------------------------------------------

    def locate(self, samples: Iterable[TokenizedSample], *, number: int = 0) -> dict[bytes, Located]:
        """Where the records of ``samples`` are, by key; a sample whose wanted targets aren't all stored is left out.

        ``number``: that of this layer in a source.
        """
        wanted = {sample.key: sample for sample in samples}
        found: dict[bytes, Located] = {}
        for name in sorted(self.shards):
            rows = self._key_rows(name)
            keys: list[bytes] = np.frombuffer(rows[: len(rows) // 2], f"V{_ROW}").tolist()
            if wanted.keys().isdisjoint(keys):
                continue
            for row, key in enumerate(keys):
                sample = wanted.get(key)
                if sample is None:
                    continue
                digest = len(rows) // 2 + row * _ROW
                if rows[digest : digest + _ROW] == target_digest(sample.targets):
                    del wanted[key]  # no other shard can have more of what is wanted
                elif key in found or not self._covers(name, row, sample):
                    continue
                found[key] = Located(name, row, number)
        return found

    def missing(self, samples: Iterable[TokenizedSample]) -> list[TokenizedSample]:
        """The samples that have to be collected."""
        samples = list(samples)
        found = self.locate(samples)
        return [sample for sample in samples if sample.key not in found]

    def keys(self, name: str) -> list[bytes]:
        """The keys of a shard's samples, in their order."""
        rows: list[bytes] = np.frombuffer(self._key_rows(name), f"V{_ROW}").tolist()
        return rows[: len(rows) // 2]

    def _key_rows(self, name: str) -> bytes:
        """Derived data: what is lost or damaged is computed again."""
        rows = self._stored_rows(name)
        if rows is None:
            rows = self.reader(name).key_rows()
            if shard_name(rows) != name:
                path = shard_path(self.folder, name)
                raise self.set_aside(name, InputError(f"{path}: its name doesn't fit its content"))
        return rows

    def _stored_rows(self, name: str) -> bytes | None:
        path = keys_path(self.folder, name)
        if not path.exists():
            return None
        state = FileState.of(path)
        size = 2 * _ROW * self.shards[name].samples
        if state.size != size:
            return None
        rows = read_bounded(path, size)
        if self._checked.get(path) != state:
            if shard_name(rows) != name:
                return None
            self._checked[path] = state
        return rows

    def _covers(self, name: str, row: int, sample: TokenizedSample) -> bool:
        return bool(np.isin(sample.targets, self.reader(name).targets(row)).all())

    # -- reading ----------------------------------------------------------------------------------------------------

    def reader(self, name: str) -> ShardReader:
        """The reader of a shard, for use by one thread; the least recently used ones are closed.

        When first opened its SHA-256 is compared with the index, and a shard that wasn't written here passes the gate.
        Raises InputError naming the file if it is damaged, hostile or of another layer.
        """
        with self._readers.lent(name, partial(self._opened, name)) as reader:
            return reader

    def read(self, sample: TokenizedSample, located: Located) -> Records:
        """The records of ``sample``'s targets, in their order."""
        with self._readers.lent(located.shard, partial(self._opened, located.shard)) as reader:
            try:
                records = reader.records(located.row)
            except InputError as error:
                what = f"{reader.path}: damaged shard (the records of sample {located.row} cannot be read)"
                raise self.set_aside(located.shard, InputError(what)) from error
            stored = reader.targets(located.row)
        if len(stored) == len(sample.targets):
            return records
        return select(records, np.searchsorted(stored, sample.targets))

    def _opened(self, name: str) -> ShardReader:
        path = shard_path(self.folder, name)
        with self._lock:
            if name not in self.shards:  # another thread had it set aside
                raise InputError(f"{path}: damaged shard; it is set aside, the next run collects it again")
            state = FileState.of(path)
            known = self.shards[name].sha256
            if self._checked.get(path) != state and not (known in self.admissions and file_sha256(path) == known):
                self.check(name)
            reader = ShardReader(path)
            if FileState.of(path) != state:
                reader.close()
                raise InputError(f"{path}: changed while it was opened; start again when nothing writes to it")
            self._checked[path] = state
            return reader

    def set_aside(self, name: str, error: InputError) -> InputError:
        """Move a damaged shard out of the dataset, so that the next run collects it again.

        Returns the error to raise: what is wrong, and where the file is now.
        """
        self._forget(name)
        path, damaged = shard_path(self.folder, name), self.admissions.damaged_folder
        if damaged is not None:
            target = damaged / self.folder.name / path.name
            try:
                target.parent.mkdir(parents=True, exist_ok=True)
                path.rename(target)
            except FileNotFoundError:
                pass  # another thread was there first
            except OSError as failure:
                reason = failure.strerror
                return InputError(f"{error}; cannot be set aside ({reason}), move it away and collect again")
            return InputError(f"{error}; set aside as {target}, the next run collects it again")
        return InputError(f"{error}; move it away and collect again")

    def bytes(self) -> int:
        """What the layer's folder takes on disk."""
        return disk_bytes(self.folder) if self.folder.exists() else 0

    def check(self, name: str) -> None:
        """Have the gate read all of a shard, whatever is known of it, and compare it with the index.

        Raises InputError naming the file and the object in it; what is damaged is set aside.
        """
        try:
            finding = self._inspect(name)
        except RefusedShardError as error:
            raise self.set_aside(name, error) from error
        if not same_info(finding.info, self.shards[name]):
            path = shard_path(self.folder, name)
            raise self.set_aside(name, InputError(f"{path}: damaged shard (it differs from the index)"))

    def has_key_rows(self, name: str) -> bool:
        """Whether the ``.keys`` file of a shard is there and fits its name."""
        return self._stored_rows(name) is not None

    def _inspect(self, name: str) -> Finding:
        path = shard_path(self.folder, name)
        finding = self.admissions.inspect(path)
        if finding.layer != self.spec.describe():
            for owner in self.folder.parent.glob(f"*-{layer_hex(finding.layer)}"):
                raise InputError(f"{path}: belongs to another layer, {owner.name}; move it there")
            raise RefusedShardError(f"{path}: belongs to another layer, which is not here")
        return finding

    def _forget(self, name: str) -> None:
        self.shards.pop(name, None)
        self._checked.pop(shard_path(self.folder, name), None)
        self._checked.pop(keys_path(self.folder, name), None)
        self._readers.forget(name)
