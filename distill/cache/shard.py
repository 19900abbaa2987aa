"""One sealed HDF5 shard: built in memory, written once, read by slices. Writer and reader are mirror twins.

A shard holds whole samples as flat arrays; nothing in it depends on time, host, path or worker, so equal content
gives equal bytes. ``docs/cache-format.md`` describes every array.
"""

import hashlib
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import h5py
import numpy as np
import numpy.typing as npt

from distill import __version__
from distill.codec import CODECS, Codec, id_dtype
from distill.errors import DistillError, InputError, MachineError, machine_failed
from distill.files import allocated, write_durably
from distill.types import ROLES, Records, Span, TokenizedSample, sample_key

FORMAT = "distill-shard"
FORMAT_VERSION = 1

_KEY_BYTES = 32
_CHUNK_ROWS = 16_384
_H5_ERRORS = (OSError, KeyError, RuntimeError, ValueError, TypeError)


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
    return hashlib.sha256(np.ascontiguousarray(targets, dtype="<u4").tobytes()).digest()


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
    codec = CODECS[layer["cache_precision"]]
    arrays = {
        "tokens": _concat([s.token_ids for s in samples], id_dtype(int(max(s.token_ids.max() for s in samples)) + 1)),
        "token_counts": np.array([len(s.token_ids) for s in samples], np.uint32),
        "target_positions": _concat([s.targets for s in samples], np.uint32),
        "target_counts": np.array([len(s.targets) for s in samples], np.uint32),
        "span_counts": np.array([len(s.spans) for s in samples], np.uint32),
        "span_starts": np.array([span.start for s in samples for span in s.spans], np.uint32),
        "span_ends": np.array([span.end for s in samples for span in s.spans], np.uint32),
        "span_roles": np.array([ROLES.index(span.role) for s in samples for span in s.spans], np.uint8),
        **codec.encode(records, vocab_size),
    }
    header = {"format": FORMAT, "version": FORMAT_VERSION, "made_by": f"distill {__version__}", "layer": dict(layer)}
    data = _to_hdf5(arrays, json.dumps(header, sort_keys=True))
    rows = key_rows(samples)
    info = ShardInfo(
        name=shard_name(rows),
        sha256=hashlib.sha256(data).hexdigest(),
        bytes=len(data),
        samples=len(samples),
        tokens=len(arrays["tokens"]),
        targets=len(records),
        entries=len(records.entry_ids),
        kept_mass_sum=_kept_mass(records.tail_logprobs),
    )
    return ShardImage(info, data, rows)


def bytes_bound(tokens: int, targets: int, top_k: int, vocab_size: int) -> int:
    """An upper bound of what a shard takes on disk, both files: the arrays before compression and HDF5's own share."""
    per_entry = np.dtype(id_dtype(vocab_size)).itemsize + 2
    return 16 * 1024 + tokens * 8 + targets * (24 + top_k * per_entry)


class ShardReader:
    """Reads samples and records of one sealed shard by slices.

    Opening checks the file's digest where ``info`` is given. Raises InputError naming the file if it is damaged.
    """

    def __init__(self, path: Path, info: ShardInfo | None = None) -> None:
        self.path = path
        if info is not None:
            _check_digest(path, info)
        try:
            self._file = h5py.File(path, "r", locking=False)
            self._codec, self.layer = self._read_header()
            small = {name: self._file[name][:] for name in _SMALL_ARRAYS}
            self._record_arrays = {name: self._file[name][:] for name in self._codec.record_arrays}
            self._entry_arrays = {name: self._file[name] for name in self._codec.entry_arrays}
        except InputError:
            raise
        except _H5_ERRORS as error:
            raise damaged(path, error) from error
        self.tokens = small["tokens"]
        self.target_positions: npt.NDArray[np.int32] = small["target_positions"].astype(np.int32)
        self._token_offsets = _offsets(small["token_counts"])
        self._target_offsets = _offsets(small["target_counts"])
        self._span_offsets = _offsets(small["span_counts"])
        self._spans = np.stack([small["span_starts"], small["span_ends"], small["span_roles"]], axis=1)
        self._entry_offsets = _offsets(self._record_arrays["entry_counts"])

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
            entries=int(self._entry_offsets[-1]),
            kept_mass_sum=_kept_mass(self._record_arrays["tail_logprobs"]),
        )

    def key_rows(self) -> bytes:
        """What the ``.keys`` file has to hold, computed from the samples themselves."""
        rows = range(len(self))
        keys = b"".join(sample_key(self.token_ids(row)) for row in rows)
        return keys + b"".join(target_digest(self.targets(row)) for row in rows)

    def _records(self, start: int, end: int) -> Records:
        first, last = int(self._entry_offsets[start]), int(self._entry_offsets[end])
        arrays = {name: array[start:end] for name, array in self._record_arrays.items()}
        try:
            arrays |= {name: stored[first:last] for name, stored in self._entry_arrays.items()}
        except _H5_ERRORS as error:
            raise damaged(self.path, error) from error
        return self._codec.decode(arrays)

    def _read_header(self) -> tuple[Codec, dict[str, Any]]:
        header = json.loads(str(self._file.attrs["header"]))
        if header.get("format") != FORMAT:
            raise ValueError("not a shard of distill")
        if header.get("version") != FORMAT_VERSION:
            raise InputError(
                f"{self.path}: format version {header.get('version')}, this program reads {FORMAT_VERSION}; update it"
            )
        layer = header["layer"]
        if layer["mode"] != "topk" or layer["cache_precision"] not in CODECS:
            what = f"mode {layer['mode']!r} with precision {layer['cache_precision']!r}"
            raise InputError(f"{self.path}: {what} is not available yet")
        return CODECS[layer["cache_precision"]], layer


_SMALL_ARRAYS = (
    "tokens",
    "token_counts",
    "target_positions",
    "target_counts",
    "span_counts",
    "span_starts",
    "span_ends",
    "span_roles",
)


def damaged(path: Path, error: Exception) -> DistillError:
    """The error for a file that can't be read; a damaged shard is collected again once it is moved away."""
    if machine_failed(error):
        return MachineError(f"{path}: cannot be read: {error}")
    reason = " ".join(str(error).split())[:200]
    return InputError(f"{path}: damaged shard ({reason}); move it away and collect again")


def _check_digest(path: Path, info: ShardInfo) -> None:
    try:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise damaged(path, error) from error
    if digest != info.sha256:
        raise damaged(path, ValueError("its SHA-256 differs from the index"))


def _to_hdf5(arrays: Mapping[str, npt.NDArray[np.generic]], header: str) -> bytes:
    buffer = io.BytesIO()
    # track_times would put the clock into the file; libver is pinned because its default moves between releases.
    with h5py.File(buffer, "w", libver=("v110", "v110")) as file:
        file.attrs["header"] = header
        for name, array in arrays.items():
            if not len(array):
                file.create_dataset(name, data=array, track_times=False)
                continue
            file.create_dataset(
                name,
                data=array,
                chunks=(min(len(array), _CHUNK_ROWS),),
                compression="gzip",
                compression_opts=4,
                shuffle=True,
                fletcher32=True,
                track_times=False,
            )
    return buffer.getvalue()


def _concat(arrays: Sequence[npt.NDArray[np.int32]], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    joined = np.concatenate(arrays)
    assert joined.min() >= 0 and joined.max() <= np.iinfo(np.dtype(dtype)).max, "value outside its stored type"
    return joined.astype(dtype)


def _offsets(counts: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    return np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])


def _kept_mass(tails: npt.NDArray[np.float32]) -> float:
    return float(-np.expm1(tails.astype(np.float64)).sum())
