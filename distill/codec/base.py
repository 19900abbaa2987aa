"""What the codecs share: how an array is stored, what a codec is, and the arithmetic of a record's two parts.

A record's mass is split into the kept entries and the tail. Whatever was decoded is a valid distribution: the entries
are shifted so that both parts add up to one (logs of both, never 1 - sum).
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from distill.types import FloatArray, Records

Array = npt.NDArray[Any]
Counts = npt.NDArray[np.int64]
Packing = Literal["text", "symbols", "runs"]

# A tail of exactly 0 is a kept mass too small for float32 to tell from none; the entries stay finite all the same.
_LARGEST_TAIL = np.float32(-1e-12)


@dataclass(frozen=True, slots=True, eq=False)
class Stored:
    """An array and how it goes into a file.

    ``chunk`` is the storage chunk's shape, by default (``None``) a plain one-dimensional cut. ``packing`` says what
    deflate should look for: repeated strings (``text``), skewed single bytes (``symbols``), or those and runs of one
    byte (``runs``).
    """

    array: Array
    chunk: tuple[int, ...] | None = None
    packing: Packing = "text"


@dataclass(frozen=True, slots=True)
class ArrayType:
    """What an array must look like: the names of the dtypes that it may have, and its number of dimensions."""

    dtypes: frozenset[str]
    ndim: int = 1


class Store(Protocol):
    """Where a decoder finds arrays: an opened shard, or arrays in memory."""

    def whole(self, name: str) -> Array:
        """All of an array."""
        ...

    def rows(self, name: str, start: int, stop: int) -> Array:
        """Rows of a one-dimensional array."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of an array."""
        ...

    def chunk_shape(self, name: str) -> tuple[int, ...]:
        """The shape of the array's storage chunks."""
        ...

    def chunk(self, name: str, index: tuple[int, ...]) -> Array:
        """The storage chunk at a place in the grid of chunks, in full: zeros beyond the array's end."""
        ...


class Decoder(Protocol):
    """Reads the records of one shard.

    ``entry_counts``: int64 [R]. ``tail_logprobs``: float32 [R].
    """

    @property
    def entry_counts(self) -> Counts: ...  # noqa: D102

    @property
    def tail_logprobs(self) -> FloatArray: ...  # noqa: D102

    def records(self, start: int, stop: int) -> Records:
        """Records ``start`` to ``stop``, at least one."""
        ...


@dataclass(frozen=True, slots=True)
class Codec(ABC):
    """An encoding of a shard's records.

    ``array_types``: the arrays that it stores, all of them and no others. Of these ``record_arrays`` have a row for
    each record, ``entry_arrays`` one for each entry.
    """

    array_types: Mapping[str, ArrayType]
    record_arrays: tuple[str, ...]
    entry_arrays: tuple[str, ...] = ()

    @abstractmethod
    def encode(self, records: Records, vocab_size: int) -> dict[str, Stored]:
        """Arrays to store. Ids must be in [0, vocab_size): HDF5 would clamp them silently."""

    @abstractmethod
    def open(self, store: Store) -> Decoder:
        """A decoder over what ``encode`` made. Raises ValueError for arrays that don't fit each other."""

    @abstractmethod
    def bytes_bound(self, targets: int, top_k: int, vocab_size: int) -> int:
        """An upper bound of what the arrays' contents take before compression, whatever the records."""

    def decode(self, arrays: Mapping[str, Stored]) -> Records:
        """All records of what ``encode`` made."""
        decoder = self.open(MemoryStore(arrays))
        return decoder.records(0, len(decoder.entry_counts))


class MemoryStore:
    """A ``Store`` over arrays that were just encoded."""

    def __init__(self, arrays: Mapping[str, Stored]) -> None:
        self._arrays = arrays

    def whole(self, name: str) -> Array:
        """See ``Store.whole``."""
        return self._arrays[name].array

    def rows(self, name: str, start: int, stop: int) -> Array:
        """See ``Store.rows``."""
        return self._arrays[name].array[start:stop]

    def shape(self, name: str) -> tuple[int, ...]:
        """See ``Store.shape``."""
        return self._arrays[name].array.shape

    def chunk_shape(self, name: str) -> tuple[int, ...]:
        """See ``Store.chunk_shape``."""
        stored = self._arrays[name]
        return stored.chunk or stored.array.shape

    def chunk(self, name: str, index: tuple[int, ...]) -> Array:
        """See ``Store.chunk``."""
        return cut_chunk(self._arrays[name].array, self.chunk_shape(name), index)


def cut_chunk(array: Array, chunk: tuple[int, ...], index: tuple[int, ...]) -> Array:
    """The chunk at ``index`` of the grid, contiguous, filled up with zeros where it reaches beyond the array."""
    part = array[tuple(slice(i * size, (i + 1) * size) for i, size in zip(index, chunk, strict=True))]
    if part.shape != chunk:
        part = np.pad(part, [(0, size - length) for size, length in zip(chunk, part.shape, strict=True)])
    return np.ascontiguousarray(part)


def demand(condition: bool, what: str) -> None:
    """Raise ValueError: what a file says of itself is not true."""
    if not condition:
        raise ValueError(what)


def demand_rows(store: Store, names: tuple[str, ...], rows: int) -> None:
    """Raise ValueError unless each of these arrays has so many rows."""
    for name in names:
        found = store.shape(name)[0]
        demand(found == rows, f"{name}: {found} rows where there should be {rows}")


def id_dtype(vocab_size: int) -> npt.DTypeLike:
    """The unsigned type that ids below ``vocab_size`` are stored in."""
    return np.uint16 if vocab_size <= 1 << 16 else np.uint32


def offsets(counts: Array) -> Counts:
    """int64 [n + 1]: where each of n consecutive pieces starts, and the end of the last."""
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(counts, dtype=np.int64)])


def log1mexp(x: FloatArray) -> FloatArray:
    """log(1 - exp(x)) for x <= 0, accurate at both ends (Maechler 2012, "Accurately computing log(1 - exp(-|a|))")."""
    x = np.minimum(x, 0.0)
    with np.errstate(divide="ignore"):
        near = np.log(-np.expm1(np.maximum(x, -1.0)))
    return np.where(x > -np.log(2.0), near, np.log1p(-np.exp(np.minimum(x, -0.5)))).astype(np.float32)


def agree_with_tail(logprobs: FloatArray, counts: Counts, tails: FloatArray) -> FloatArray:
    """Shift each record's logprobs [E] so that their mass and its tail [R] sum to one.

    Every record has at least one entry and its first is its largest.
    """
    if not len(counts):
        return logprobs
    starts = np.cumsum(counts) - counts
    largest = logprobs[starts]
    masses = np.add.reduceat(np.exp(logprobs - np.repeat(largest, counts)), starts)
    shift = log1mexp(np.minimum(tails, _LARGEST_TAIL)) - (largest + np.log(masses))
    return logprobs + np.repeat(shift, counts).astype(np.float32)


def check(records: Records, vocab_size: int) -> None:
    """Assert what every codec relies on."""
    ids = records.entry_ids
    assert (records.entry_counts >= 1).all(), "a record without entries"
    assert records.entry_counts.sum() == len(ids) == len(records.entry_logprobs), "entry counts and entries differ"
    assert not len(ids) or (ids.min() >= 0 and ids.max() < vocab_size), "an entry id outside the vocabulary"
    assert np.isfinite(records.entry_logprobs).all(), "an entry without a finite logprob"


def likeliest_first(ids: Array, logprobs: Array, top: Array) -> None:
    """Exchange, in place, each row's first entry with the one in column ``top``; both arrays are [rows, entries]."""
    rows = np.arange(len(top))
    for array in (ids, logprobs):
        first = array[:, 0].copy()
        array[:, 0] = array[rows, top]
        array[rows, top] = first
