"""The exact encoding: fp16 logprobs and plain ids, statistics in float32."""

import numpy as np

from distill.codec.base import (
    Array,
    ArrayType,
    Codec,
    Counts,
    Store,
    Stored,
    agree_with_tail,
    check,
    demand_rows,
    id_dtype,
    likeliest_first,
    offsets,
)
from distill.types import FloatArray, Records

# fp16 has no finite value below -65504; a logprob there carries no information either way.
_LOWEST_LOGPROB = -60_000.0
_FLOAT32 = ArrayType(frozenset({"float32"}))
_IDS = ArrayType(frozenset({"uint16", "uint32"}))
_STATISTICS = {"tail_logprobs": _FLOAT32, "label_logprobs": _FLOAT32, "entropies": _FLOAT32}
_STATISTICS_BYTES = 12
_FULL_CHUNK_ENTRIES = 1 << 17


class ExactCodec(Codec):
    """Records of some entries: flat arrays of ids and of fp16 logprobs, each record by falling probability."""

    def encode(self, records: Records, vocab_size: int) -> dict[str, Stored]:
        """See ``Codec.encode``."""
        check(records, vocab_size)
        return _statistics(records) | {
            "entry_counts": Stored(records.entry_counts.astype(id_dtype(vocab_size + 1))),
            "entry_ids": Stored(records.entry_ids.astype(id_dtype(vocab_size))),
            "entry_logprobs": Stored(_half(records.entry_logprobs)),
        }

    def open(self, store: Store) -> "ExactDecoder":
        """See ``Codec.open``."""
        return ExactDecoder(store)

    def bytes_bound(self, targets: int, top_k: int, vocab_size: int) -> int:
        """See ``Codec.bytes_bound``."""
        return targets * (_STATISTICS_BYTES + 4 + top_k * (np.dtype(id_dtype(vocab_size)).itemsize + 2))


class ExactDecoder:
    """Decoder of ``ExactCodec``."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.entry_counts: Counts = store.whole("entry_counts").astype(np.int64)
        self._statistics = _Statistics(store)
        self.tail_logprobs = self._statistics.tails
        self._offsets = offsets(self.entry_counts)

    def records(self, start: int, stop: int) -> Records:
        """See ``Decoder.records``."""
        first, last = int(self._offsets[start]), int(self._offsets[stop])
        logprobs = self._store.rows("entry_logprobs", first, last).astype(np.float32)
        ids = self._store.rows("entry_ids", first, last).astype(np.int64)
        return self._statistics.records(start, stop, self.entry_counts[start:stop], ids, logprobs)


class ExactFullCodec(Codec):
    """Whole distributions: a row of fp16 logprobs a record, column = token id."""

    def encode(self, records: Records, vocab_size: int) -> dict[str, Stored]:
        """See ``Codec.encode``."""
        check(records, vocab_size)
        rows = dense_rows(records, _half(records.entry_logprobs), vocab_size)
        chunk = (max(1, min(len(rows), _FULL_CHUNK_ENTRIES // vocab_size)), vocab_size)
        return _statistics(records) | {"entry_logprobs": Stored(rows, chunk)}

    def open(self, store: Store) -> "ExactFullDecoder":
        """See ``Codec.open``."""
        return ExactFullDecoder(store)

    def bytes_bound(self, targets: int, top_k: int, vocab_size: int) -> int:
        """See ``Codec.bytes_bound``."""
        del top_k
        return targets * (_STATISTICS_BYTES + 2 * vocab_size)


class ExactFullDecoder:
    """Decoder of ``ExactFullCodec``."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._statistics = _Statistics(store)
        self.tail_logprobs = self._statistics.tails
        demand_rows(store, (*EXACT_FULL.record_arrays, "entry_logprobs"), len(self.tail_logprobs))
        self._block = store.chunk_shape("entry_logprobs")[0]
        vocab_size = store.shape("entry_logprobs")[1]
        self.entry_counts: Counts = np.full(len(self.tail_logprobs), vocab_size, np.int64)

    def records(self, start: int, stop: int) -> Records:
        """See ``Decoder.records``."""
        logprobs = read_rows(self._store, "entry_logprobs", self._block, start, stop).astype(np.float32)
        ids = np.tile(np.arange(logprobs.shape[1]), (len(logprobs), 1))
        likeliest_first(ids, logprobs, logprobs.argmax(1))
        return self._statistics.records(start, stop, self.entry_counts[start:stop], ids.ravel(), logprobs.ravel())


class _Statistics:
    """What both exact encodings keep a record besides its entries."""

    def __init__(self, store: Store) -> None:
        self.tails: FloatArray = store.whole("tail_logprobs").astype(np.float32)
        self._labels = store.whole("label_logprobs").astype(np.float32)
        self._entropies = store.whole("entropies").astype(np.float32)

    def records(self, start: int, stop: int, counts: Counts, ids: Array, logprobs: Array) -> Records:
        tails = self.tails[start:stop]
        return Records(
            entry_counts=counts,
            entry_ids=ids,
            entry_logprobs=agree_with_tail(logprobs, counts, tails),
            tail_logprobs=tails,
            label_logprobs=self._labels[start:stop],
            entropies=self._entropies[start:stop],
        )


def dense_rows(records: Records, values: Array, vocab_size: int) -> Array:
    """``values`` [E] as [R, vocab_size], column = token id. Every record must hold each id once."""
    rows = np.empty((len(records), vocab_size), values.dtype)
    assert len(values) == rows.size, "a full distribution without all ids"
    np.put_along_axis(rows, records.entry_ids.reshape(rows.shape), values.reshape(rows.shape), 1)
    return rows


def read_rows(store: Store, name: str, block: int, start: int, stop: int) -> Array:
    """Rows of an array that is stored in chunks of ``block`` whole rows."""
    first = start // block
    chunks = [store.chunk(name, (i, 0)) for i in range(first, -(-stop // block))]
    rows = chunks[0] if len(chunks) == 1 else np.concatenate(chunks)
    return rows[start - first * block : stop - first * block]


def _half(logprobs: FloatArray) -> Array:
    return np.maximum(logprobs, _LOWEST_LOGPROB).astype(np.float16)


def _statistics(records: Records) -> dict[str, Stored]:
    return {name: Stored(getattr(records, name).astype(np.float32)) for name in _STATISTICS}


EXACT = ExactCodec(
    array_types=_STATISTICS
    | {"entry_counts": _IDS, "entry_ids": _IDS, "entry_logprobs": ArrayType(frozenset({"float16"}))},
    record_arrays=("entry_counts", *_STATISTICS),
    entry_arrays=("entry_ids", "entry_logprobs"),
)
EXACT_FULL = ExactFullCodec(
    array_types=_STATISTICS | {"entry_logprobs": ArrayType(frozenset({"float16"}), 2)},
    record_arrays=tuple(_STATISTICS),
)
