"""A layer: the records of one teacher under one set of collection settings, in one folder.

The folder holds ``layer.json`` (what it is), sealed shards with their key rows, and ``index.jsonl`` (one line a sealed
shard). The shards are the truth: an index line that is missing or torn is made anew from its shard, so a kill between
any two writes costs nothing.
"""

import hashlib
import json
import re
import zlib
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np

from distill.cache.shard import (
    FORMAT_VERSION,
    ShardInfo,
    ShardReader,
    keys_path,
    shard_name,
    shard_path,
    target_digest,
)
from distill.errors import InputError
from distill.files import TEMPORARY_SUFFIX, append_durably, disk_bytes, make_folder, os_errors, write_durably
from distill.records import select
from distill.types import Records, TokenizedSample

_OPEN_SHARDS = 64
INDEX_VERSION = 1
_INDEX = "index.jsonl"
_LAYER = "layer.json"


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """Everything that decides what a record holds. Two layers are the same if and only if these are.

    ``weights``, ``model_config`` and ``token_map`` are digests, ``dtype`` is the teacher's compute type, ``vocab_size``
    the crop.
    """

    teacher: str
    weights: str
    model_config: str
    dtype: str
    quantisation: str
    attention: str
    token_map: str
    vocab_size: int
    mode: str
    top_k: int
    cache_precision: str

    def describe(self) -> dict[str, Any]:
        """The fields that identify the layer, as they stand in ``layer.json`` and in every shard.

        A field that comes later has to be left out at its default, or it would orphan every older cache.
        """
        return {
            "weights": self.weights,
            "model_config": self.model_config,
            "dtype": self.dtype,
            "quantisation": self.quantisation,
            "attention": self.attention,
            "token_map": self.token_map,
            "vocab_size": self.vocab_size,
            "mode": self.mode,
            "top_k": self.top_k,
            "cache_precision": self.cache_precision,
            "version": FORMAT_VERSION,
        }

    @property
    def folder_name(self) -> str:
        """``<teacher>-<12 hex>``; the hex alone identifies the layer."""
        safe = re.sub(r"[^A-Za-z0-9._-]+", "-", self.teacher).strip("-.") or "teacher"
        return f"{safe}-{self.hex}"

    @property
    def hex(self) -> str:
        """12 hex digits that stand for ``describe()``."""
        return hashlib.sha256(json.dumps(self.describe(), sort_keys=True).encode()).hexdigest()[:12]


@dataclass(frozen=True, slots=True)
class Located:
    """Where the records of a sample are: shard name and row. They hold its targets, perhaps among more."""

    shard: str
    row: int


@dataclass(slots=True)
class Layer:
    """An opened layer. Readers take no lock; the one who collects holds a lock and alone writes the index."""

    folder: Path
    spec: LayerSpec
    shards: dict[str, ShardInfo]
    _readers: "OrderedDict[str, ShardReader]" = field(default_factory=OrderedDict)
    _verified: set[str] = field(default_factory=set)

    @classmethod
    def open(cls, parent: Path, spec: LayerSpec) -> Self:
        """The layer of ``spec`` under ``parent``; an absent one is an empty one and isn't created.

        Whatever the teacher's folder is called now, its layer is the one with the same hex.
        """
        folders = sorted(parent.glob(f"*-{spec.hex}"), key=lambda folder: (not any(folder.glob("*.h5")), folder))
        folder = next(iter(folders), parent / spec.folder_name)
        sizes = {path.stem: path.stat().st_size for path in folder.glob("*.h5")}
        index = _read_index(folder / _INDEX)
        return cls(folder, spec, {name: info for name, info in index.items() if sizes.get(name) == info.bytes})

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        for reader in self._readers.values():
            reader.close()
        self._readers.clear()

    # -- writing: only under the lock -------------------------------------------------------------------------------

    def prepare(self) -> list[str]:
        """Make the folder ready for new shards: remove temporary files, adopt sealed shards that the index lacks.

        Returns a line for everything that was found amiss and mended.
        """
        make_folder(self.folder)
        mended = []
        for path in self.folder.glob(f"*{TEMPORARY_SUFFIX}"):
            if path.is_file():
                path.unlink(missing_ok=True)
        if not (self.folder / _LAYER).exists():
            text = json.dumps({"teacher": self.spec.teacher, **self.spec.describe()}, indent=2)
            write_durably(self.folder / _LAYER, text.encode())
        for path in sorted(self.folder.glob("*.h5")):
            if path.stem not in self.shards:
                self._adopt(path)
                mended.append(f"{path.name}: sealed before the index knew of it; adopted")
        for name in self.shards:
            path = keys_path(self.folder, name)
            if not path.exists() or shard_name(path.read_bytes()) != name:
                write_durably(path, self.reader(name).key_rows())
        for path in self.folder.glob("*.keys"):
            if path.stem not in self.shards:
                path.unlink(missing_ok=True)
        self.compact()
        return mended

    def register(self, info: ShardInfo) -> None:
        """Put a shard that was just sealed into the index."""
        append_durably(self.folder / _INDEX, _index_line(info))
        self.shards[info.name] = info

    def compact(self) -> None:
        """Rewrite the index sorted and without what is gone, if that changes anything."""
        data = b"".join(_index_line(self.shards[name]) for name in sorted(self.shards))
        path = self.folder / _INDEX
        if not path.exists() or path.read_bytes() != data:
            write_durably(path, data)

    def _adopt(self, path: Path) -> None:
        with ShardReader(path) as reader:
            if reader.layer != self.spec.describe():
                raise InputError(f"{path}: belongs to another layer; move it away")
            rows = reader.key_rows()
            if shard_name(rows) != path.stem:
                raise InputError(f"{path}: its name doesn't fit its content; move it away")
            reader.all_records()  # checks the checksum of every chunk
            info = reader.info()
        if not keys_path(self.folder, info.name).exists():
            write_durably(keys_path(self.folder, info.name), rows)
        self.register(info)

    # -- finding ----------------------------------------------------------------------------------------------------

    def locate(self, samples: Iterable[TokenizedSample]) -> dict[bytes, Located]:
        """Where the records of ``samples`` are, by key; a sample whose wanted targets aren't all stored is left out."""
        wanted = {sample.key: sample for sample in samples}
        found: dict[bytes, Located] = {}
        exact: set[bytes] = set()
        for name in sorted(self.shards):
            keys, digests = self._key_rows(name)
            for row, key in enumerate(keys):
                sample = wanted.get(key)
                if sample is None or key in exact:
                    continue
                if digests[row] == target_digest(sample.targets):
                    exact.add(key)
                elif key in found or not self._covers(name, row, sample):
                    continue
                found[key] = Located(name, row)
        return found

    def missing(self, samples: Iterable[TokenizedSample]) -> list[TokenizedSample]:
        """The samples that have to be collected."""
        samples = list(samples)
        found = self.locate(samples)
        return [sample for sample in samples if sample.key not in found]

    def _key_rows(self, name: str) -> tuple[list[bytes], list[bytes]]:
        path = keys_path(self.folder, name)
        rows = path.read_bytes() if path.exists() else b""
        if shard_name(rows) != name:  # derived data: what is lost or damaged is computed again
            rows = self.reader(name).key_rows()
            if shard_name(rows) != name:
                raise InputError(f"{path}: neither it nor its shard fits its name; move both away")
        split = [rows[i : i + 32] for i in range(0, len(rows), 32)]
        return split[: len(split) // 2], split[len(split) // 2 :]

    def _covers(self, name: str, row: int, sample: TokenizedSample) -> bool:
        return bool(np.isin(sample.targets, self.reader(name).targets(row)).all())

    # -- reading ----------------------------------------------------------------------------------------------------

    def reader(self, name: str) -> ShardReader:
        """The reader of a shard, its digest checked when first opened; the least recently used ones are closed."""
        if name in self._readers:
            self._readers.move_to_end(name)
            return self._readers[name]
        reader = ShardReader(shard_path(self.folder, name), None if name in self._verified else self.shards[name])
        self._verified.add(name)
        if reader.layer != self.spec.describe():
            raise InputError(f"{reader.path}: belongs to another layer; move it away")
        self._readers[name] = reader
        if len(self._readers) > _OPEN_SHARDS:
            self._readers.popitem(last=False)[1].close()
        return reader

    def read(self, sample: TokenizedSample, located: Located) -> Records:
        """The records of ``sample``'s targets, in their order."""
        reader = self.reader(located.shard)
        records, stored = reader.records(located.row), reader.targets(located.row)
        if len(stored) == len(sample.targets):
            return records
        return select(records, np.searchsorted(stored, sample.targets))

    def bytes(self) -> int:
        """What the layer's folder takes on disk."""
        return disk_bytes(self.folder) if self.folder.exists() else 0


def _index_line(info: ShardInfo) -> bytes:
    text = json.dumps({"version": INDEX_VERSION, **info.to_json()}, sort_keys=True).encode()
    return b"%08x %s\n" % (zlib.crc32(text), text)


def _read_index(path: Path) -> dict[str, ShardInfo]:
    if not path.exists():
        return {}
    with os_errors("read", path):
        lines = path.read_bytes().split(b"\n")
    shards = {}
    for line in lines:
        checksum, _, text = line.partition(b" ")
        # A line that was torn by a kill, or is of another version, is made anew: `prepare` adopts its shard.
        if not text or checksum != b"%08x" % zlib.crc32(text):
            continue
        entry = json.loads(text)
        if entry.pop("version", None) == INDEX_VERSION:
            shards[entry["name"]] = ShardInfo(**entry)
    return shards
