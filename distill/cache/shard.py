"""One sealed HDF5 shard: built in memory, written once, read sample by sample. Writer and reader are mirror twins.

A shard holds whole samples as flat arrays; nothing in it depends on time, host, path or worker, so equal content
gives equal bytes. ``docs/cache-format.md`` describes every array.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import h5py
import numpy as np
import numpy.typing as npt

from distill import __version__
from distill.cache.storage import H5_ERRORS, FileStore, to_hdf5
from distill.codec import ArrayType, Codec, MemoryStore, Stored, codec_for, id_dtype
from distill.errors import DistillError, InputError, MachineError, machine_failed
from distill.files import allocated, write_durably
from distill.types import ROLES, Records, Span, TokenizedSample, sample_key

FORMAT = "distill-shard"
FORMAT_VERSION = 1

_POSITION = np.dtype("<u4")
_COUNTS = ArrayType(frozenset({"uint32"}))
_SAMPLE_TYPES = {
    "tokens": ArrayType(frozenset({"uint16", "uint32"})),
    "token_counts": _COUNTS,
    "target_positions": _COUNTS,
    "target_counts": _COUNTS,
    "span_counts": _COUNTS,
    "span_starts": _COUNTS,
    "span_ends": _COUNTS,
    "span_roles": ArrayType(frozenset({"uint8"})),
}
_SAMPLE_BYTES = 3 * 4 + 2 * 32  # counts, and a key with a target digest in the file beside
_TOKEN_BYTES = 4 + 9  # every token a span of its own
_FILE_BYTES = 24 * 1024  # HDF5's own


@dataclass(frozen=True, slots=True)
class ShardInfo:
    """What the index knows of a sealed shard. ``kept_mass_sum`` is over its targets."""

    name: str
    sha256: str
    bytes: int
    samples: int
    tokens: int
    targets: int
    entries: int
    kept_mass_sum: float

    def to_json(self) -> dict[str, Any]:
        """The index entry."""
        return asdict(self)


@dataclass(frozen=True, slots=True, eq=False)
class ShardImage:
    """A shard as bytes, not yet on disk, and the rows that identify its samples."""

    info: ShardInfo
    data: bytes
    keys: bytes

    @property
    def disk_bytes(self) -> int:
        """What both files take on disk."""
        return allocated(len(self.data)) + allocated(len(self.keys))

    def seal(self, folder: Path) -> None:
        """Write both files. The rename of the shard, which comes last, is what makes it part of the layer."""
        write_durably(keys_path(folder, self.info.name), self.keys)
        write_durably(shard_path(folder, self.info.name), self.data)


def shard_path(folder: Path, name: str) -> Path:
    """The shard's file in its layer folder."""
    return folder / f"{name}.h5"


def keys_path(folder: Path, name: str) -> Path:
    """The file of 32-byte rows beside it: one key a sample, then one digest of its targets a sample."""
    return folder / f"{name}.keys"


def target_digest(targets: npt.NDArray[np.int32]) -> bytes:
    """32 bytes that stand for a sample's target positions."""
    return hashlib.sha256(np.ascontiguousarray(targets, _POSITION).data).digest()


def key_rows(samples: Sequence[TokenizedSample]) -> bytes:
    """Content of the ``.keys`` file."""
    return b"".join(s.key for s in samples) + b"".join(target_digest(s.targets) for s in samples)


def shard_name(rows: bytes) -> str:
    """The name is a hash of the key rows: the same samples and targets are the same shard, on any machine."""
    return hashlib.sha256(rows).hexdigest()[:32]


def build_shard(
    samples: Sequence[TokenizedSample], records: Records, *, layer: Mapping[str, Any], vocab_size: int
) -> ShardImage:
    """Encode ``samples`` and their ``records`` (in the samples' order, each by rising position) into an image.

    ``layer`` is the description of the layer it belongs to; it goes into the file, so that a shard explains itself.
    """
    assert len(records) == sum(len(s.targets) for s in samples), "records and targets differ in number"
    codec = _codec_of(layer)
    assert codec is not None, "a layer without a codec"
    ids = id_dtype(int(max(s.token_ids.max() for s in samples)) + 1)
    encoded = codec.encode(records, vocab_size)
    arrays = {
        "tokens": _concat([s.token_ids for s in samples], ids),
        "token_counts": _counts(len(s.token_ids) for s in samples),
        "target_positions": _concat([s.targets for s in samples], np.uint32),
        "target_counts": _counts(len(s.targets) for s in samples),
        "span_counts": _counts(len(s.spans) for s in samples),
        "span_starts": _counts(span.start for s in samples for span in s.spans),
        "span_ends": _counts(span.end for s in samples for span in s.spans),
        "span_roles": _counts((ROLES.index(span.role) for s in samples for span in s.spans), np.uint8),
        **encoded,
    }
    header = {"format": FORMAT, "version": FORMAT_VERSION, "made_by": f"distill {__version__}", "layer": dict(layer)}
    data = to_hdf5(arrays, header)
    rows = key_rows(samples)
    info = ShardInfo(
        name=shard_name(rows),
        sha256=hashlib.sha256(data).hexdigest(),
        bytes=len(data),
        samples=len(samples),
        tokens=sum(len(s.token_ids) for s in samples),
        targets=len(records),
        entries=len(records.entry_ids),
        kept_mass_sum=_kept_mass(codec.open(MemoryStore(encoded)).tail_logprobs),
    )
    return ShardImage(info, data, rows)


def bytes_bound(
    tokens: int,
    targets: int,
    top_k: int,
    vocab_size: int,
    *,
    samples: int | None = None,
    precision: str = "exact",
    mode: str = "topk",
) -> int:
    """An upper bound of what a shard takes on disk, both files: the arrays before compression and HDF5's own share.

    ``samples`` is how many make up the tokens and targets; unknown, as many as there can be.
    """
    codec = codec_for(mode, precision)
    assert codec is not None, "a layer without a codec"
    rows = min(targets, tokens // 2) if samples is None else samples
    arrays = tokens * _TOKEN_BYTES + targets * 4 + rows * _SAMPLE_BYTES + codec.bytes_bound(targets, top_k, vocab_size)
    return _FILE_BYTES + arrays + arrays // 256  # what deflate can't shorten it lengthens by less than that


def array_types(header: Mapping[str, Any]) -> Mapping[str, tuple[frozenset[str], int]]:
    """What a shard with this header holds: array names, each with the dtypes it may have and its dimensions.

    Raises KeyError for a mode or precision that this version doesn't know.
    """
    layer = header["layer"]
    codec = _codec_of(layer)
    if codec is None:
        raise KeyError(f"mode {layer['mode']!r} with precision {layer['cache_precision']!r}")
    return {name: (kind.dtypes, kind.ndim) for name, kind in {**_SAMPLE_TYPES, **codec.array_types}.items()}


class ShardReader:
    """Reads samples and records of one sealed shard. Raises InputError naming the file if it is damaged."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = h5py.File(path, "r", locking=False)
            codec, self.layer = self._read_header()
            store = FileStore(self._file)
            small = {name: store.whole(name) for name in _SAMPLE_TYPES}
            self._decoder = codec.open(store)
        except InputError:
            raise
        except H5_ERRORS as error:
            raise damaged(path, error) from error
        self.tokens = small["tokens"]
        self.target_positions: npt.NDArray[np.int32] = small["target_positions"].astype(np.int32)
        self._token_offsets = _offsets(small["token_counts"])
        self._target_offsets = _offsets(small["target_counts"])
        self._span_offsets = _offsets(small["span_counts"])
        self._spans = np.stack([small["span_starts"], small["span_ends"], small["span_roles"]], axis=1)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __len__(self) -> int:
        return len(self._token_offsets) - 1

    def close(self) -> None:
        """Close the file; the reader is of no use afterwards."""
        self._file.close()

    def token_ids(self, row: int) -> npt.NDArray[np.int32]:
        """int32 [L] of sample ``row``."""
        tokens = self.tokens[self._token_offsets[row] : self._token_offsets[row + 1]]
        return np.asarray(tokens, np.int32)

    def targets(self, row: int) -> npt.NDArray[np.int32]:
        """int32 [R], the stored target positions of sample ``row``."""
        return self.target_positions[self._target_offsets[row] : self._target_offsets[row + 1]]

    def spans(self, row: int) -> tuple[Span, ...]:
        """The content spans of sample ``row``."""
        rows = self._spans[self._span_offsets[row] : self._span_offsets[row + 1]]
        return tuple(Span(int(start), int(end), ROLES[role]) for start, end, role in rows)

    def records(self, row: int) -> Records:
        """The records of sample ``row``, one for each of its stored targets."""
        return self._records(int(self._target_offsets[row]), int(self._target_offsets[row + 1]))

    def all_records(self) -> Records:
        """The records of the whole shard."""
        return self._records(0, int(self._target_offsets[-1]))

    def info(self) -> ShardInfo:
        """Recompute what the index should say of this file; used to adopt a shard that the index lacks."""
        data = self.path.read_bytes()
        return ShardInfo(
            name=self.path.stem,
            sha256=hashlib.sha256(data).hexdigest(),
            bytes=len(data),
            samples=len(self),
            tokens=len(self.tokens),
            targets=len(self.target_positions),
            entries=int(self._decoder.entry_counts.sum()),
            kept_mass_sum=_kept_mass(self._decoder.tail_logprobs),
        )

    def key_rows(self) -> bytes:
        """What the ``.keys`` file has to hold, computed from the samples themselves."""
        rows = range(len(self))
        keys = b"".join(sample_key(self.token_ids(row)) for row in rows)
        return keys + b"".join(target_digest(self.targets(row)) for row in rows)

    def _records(self, start: int, end: int) -> Records:
        try:
            return self._decoder.records(start, end)
        except H5_ERRORS as error:
            raise damaged(self.path, error) from error

    def _read_header(self) -> tuple[Codec, dict[str, Any]]:
        header = json.loads(str(self._file.attrs["header"]))
        if header.get("format") != FORMAT:
            raise ValueError("not a shard of distill")
        if header.get("version") != FORMAT_VERSION:
            raise InputError(
                f"{self.path}: format version {header.get('version')}, this program reads {FORMAT_VERSION}; update it"
            )
        layer = header["layer"]
        codec = _codec_of(layer)
        if codec is None:
            what = f"mode {layer['mode']!r} with precision {layer['cache_precision']!r}"
            raise InputError(f"{self.path}: {what} is not available yet")
        return codec, layer


def damaged(path: Path, error: Exception) -> DistillError:
    """The error for a file that can't be read; a damaged shard is collected again once it is moved away."""
    if machine_failed(error):
        return MachineError(f"{path}: cannot be read: {error}")
    reason = " ".join(str(error).split())[:200]
    return InputError(f"{path}: damaged shard ({reason}); move it away and collect again")


def _codec_of(layer: Mapping[str, Any]) -> Codec | None:
    return codec_for(layer["mode"], layer["cache_precision"])


def _concat(arrays: Sequence[npt.NDArray[np.int32]], dtype: npt.DTypeLike) -> Stored:
    joined = np.concatenate(arrays)
    limit = np.iinfo(np.dtype(dtype)).max
    assert not len(joined) or (joined.min() >= 0 and joined.max() <= limit), "value outside its stored type"
    return Stored(joined.astype(dtype))


def _counts(values: Iterable[int], dtype: npt.DTypeLike = np.uint32) -> Stored:
    return Stored(np.array(list(values), dtype))


def _offsets(counts: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    return np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])


def _kept_mass(tails: npt.NDArray[np.float32]) -> float:
    return float(-np.expm1(tails.astype(np.float64)).sum())
