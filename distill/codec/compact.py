"""The compact encoding: ids as gaps in an order of the vocabulary, probabilities as levels of their square root.

Every entry is two bytes, most of them small, which deflate then shortens. Records stand in blocks, one storage chunk
each. Gaps are stored entry by entry (all first gaps of the block, all second ones ...), because their size depends on
how far down the order they are; levels record by record, the records of a block by rising entropy, because their size
depends on that. ``docs/cache-format.md`` has the whole of it.
"""

import numpy as np
import numpy.typing as npt

from distill.codec.base import (
    Array,
    ArrayType,
    Codec,
    Counts,
    Store,
    Stored,
    check,
    demand,
    demand_rows,
    id_dtype,
    likeliest_first,
    offsets,
)
from distill.codec.levels import (
    ESCAPE,
    FOURTH_ROOTS,
    ROOTS,
    Scale,
    decode_tails,
    dequantise,
    encode_tails,
    quantise,
)
from distill.codec.orders import Orders, build_orders, choose_orders, number_of_orders
from distill.types import FloatArray, Records

_BLOCK_ENTRIES = 1 << 15  # in a block: more compress a little better, fewer make random reading faster
_BLOCK_RECORDS = (8, 512)
_ENCODED_AT_ONCE = 1 << 17  # entries
_DECODED_AT_ONCE = 1 << 17
_NATS = 1024  # units of a nat, for labels and entropies
_LARGEST, _INFINITE, _UNKNOWN = 65_533, 65_534, 65_535


def _type(*dtypes: str, ndim: int = 1) -> ArrayType:
    return ArrayType(frozenset(dtypes), ndim)


_RECORD_TYPES = {
    "tail_odds": _type("int16"),
    "label_losses": _type("uint16"),
    "entropies": _type("uint16"),
    "steps": _type("uint8"),
    "floors": _type("uint8"),
    "levels": _type("uint8", ndim=2),
    "level_excess": _type("uint16"),
    "level_excess_counts": _type("uint32"),
}
_ID_TYPES = {
    "entry_counts": _type("uint16", "uint32"),
    "record_orders": _type("uint8"),
    "order_deltas": _type("uint16", "uint32"),
    "order_lengths": _type("uint32"),
    "gaps": _type("uint8", ndim=2),
    "gap_excess": _type("uint16", "uint32"),
    "gap_excess_counts": _type("uint32"),
}
_RECORD_BYTES = 2 + 2 + 2 + 1 + 1
_BLOCK_BYTES = 8


class CompactCodec(Codec):
    """Records of some entries."""

    def encode(self, records: Records, vocab_size: int) -> dict[str, Stored]:
        """See ``Codec.encode``."""
        check(records, vocab_size)
        values = _Values(records, ROOTS)
        counts, width = records.entry_counts, int(records.entry_counts.max())
        chosen = choose_orders(records, vocab_size)
        places = np.repeat(chosen.astype(np.int64) * vocab_size, counts) + records.entry_ids
        orders, ranks = build_orders(places, number_of_orders(len(records)), vocab_size)
        entry_ranks = ranks[places]
        gaps = _Bytes(len(records), width, id_dtype(vocab_size))
        ends = offsets(counts)
        for rows in _parts(len(records), width):
            entries = slice(int(ends[rows.start]), int(ends[rows.stop]))
            part = counts[rows]
            levels = values.quantise(rows, _padded(records.entry_logprobs[entries], part, width, -np.inf))
            steps, levels = _by_rank(_padded(entry_ranks[entries], part, width, -1), levels)
            gaps.put(rows, steps)
            values.levels.put(rows, levels)
        block = min(_block_records(width), len(records))
        return values.stored(block) | {
            "entry_counts": Stored(counts.astype(id_dtype(vocab_size + 1))),
            "record_orders": Stored(chosen),
            "order_deltas": Stored(orders.deltas, packing="runs"),
            "order_lengths": Stored(orders.lengths.astype(np.uint32)),
            "gaps": Stored(gaps.low.T, (width, block), "symbols"),
            "gap_excess": Stored(gaps.excess, packing="runs"),
            "gap_excess_counts": Stored(gaps.excess_counts(block)),
        }

    def open(self, store: Store) -> "CompactDecoder":
        """See ``Codec.open``."""
        return CompactDecoder(store)

    def bytes_bound(self, targets: int, top_k: int, vocab_size: int) -> int:
        """See ``Codec.bytes_bound``."""
        id_bytes = np.dtype(id_dtype(vocab_size)).itemsize
        orders = number_of_orders(targets)
        order_ids = min(orders * vocab_size, targets * top_k)
        # Gaps of one record add up to less than the vocabulary, so only so many can be long.
        long_gaps = min(top_k, vocab_size // ESCAPE + 1)
        record = _RECORD_BYTES + 4 + 1 + 2 * top_k + long_gaps * id_bytes + 2 * top_k
        blocks = targets // _BLOCK_RECORDS[0] + 1
        return targets * record + _BLOCK_BYTES * blocks + order_ids * id_bytes + 4 * orders


class CompactDecoder:
    """Decoder of ``CompactCodec``."""

    def __init__(self, store: Store) -> None:
        self.entry_counts: Counts = store.whole("entry_counts").astype(np.int64)
        demand_rows(store, COMPACT.record_arrays, len(self.entry_counts))
        demand(store.shape("gaps") == store.shape("levels")[::-1], "gaps: not the shape of levels")
        self._values = _StoredValues(store, ROOTS)
        self.tail_logprobs = self._values.tails
        self._gaps = _StoredBytes(store, "gaps", "gap_excess", None)
        orders = Orders.from_deltas(store.whole("order_deltas"), store.whole("order_lengths"))
        self._order_ids = orders.ids
        starts, chosen = offsets(orders.lengths), store.whole("record_orders")
        demand(int(starts[-1]) == len(orders.ids), "order_deltas: not the number that order_lengths says")
        demand(int(chosen.max()) < len(orders.lengths), "record_orders: an order that isn't there")
        self._before = starts[chosen] - 1
        self._ends = offsets(self.entry_counts)

    def records(self, start: int, stop: int) -> Records:
        """See ``Decoder.records``."""
        first_entry = int(self._ends[start])
        entries = int(self._ends[stop]) - first_entry
        ids, logprobs = np.empty(entries, np.int64), np.empty(entries, np.float32)
        for first, last in self._gaps.pieces(start, stop):
            part = slice(int(self._ends[first]) - first_entry, int(self._ends[last]) - first_entry)
            self._decode(first, last, ids[part], logprobs[part])
        return self._values.records(start, stop, self.entry_counts[start:stop], ids, logprobs)

    def _decode(self, first: int, last: int, ids: Array, logprobs: Array) -> None:
        """Write the entries of some records."""
        counts = self.entry_counts[first:last]
        places = self._gaps.rows(first, last)
        places[:, 0] += self._before[first:last]
        np.cumsum(places, axis=1, out=places)
        values, top = self._values.rows(first, last, counts)
        if len(ids) == places.size:
            square = ids.reshape(places.shape)
            square[...] = np.take(self._order_ids, places)
            likeliest_first(square, values, top)
            logprobs[:] = values.ravel()
            return
        inside = np.arange(places.shape[1]) < counts[:, None]
        padded = np.zeros(places.shape, np.int64)
        padded[inside] = self._order_ids[places[inside]]
        likeliest_first(padded, values, top)
        ids[:], logprobs[:] = padded[inside], values[inside]


class CompactFullCodec(Codec):
    """Whole distributions: a row of levels a record, column = token id."""

    def encode(self, records: Records, vocab_size: int) -> dict[str, Stored]:
        """See ``Codec.encode``."""
        check(records, vocab_size)
        values = _Values(records, FOURTH_ROOTS)
        for rows in _parts(len(records), vocab_size):
            entries = slice(rows.start * vocab_size, rows.stop * vocab_size)
            levels = values.quantise(rows, records.entry_logprobs[entries].reshape(-1, vocab_size))
            by_id = np.zeros_like(levels)
            np.put_along_axis(by_id, records.entry_ids[entries].reshape(-1, vocab_size), levels, 1)
            values.levels.put(rows, by_id)
        return values.stored(min(_block_records(vocab_size), len(records)))

    def open(self, store: Store) -> "CompactFullDecoder":
        """See ``Codec.open``."""
        return CompactFullDecoder(store)

    def bytes_bound(self, targets: int, top_k: int, vocab_size: int) -> int:
        """See ``Codec.bytes_bound``."""
        del top_k
        return targets * (_RECORD_BYTES + 3 * vocab_size) + _BLOCK_BYTES * (targets // _BLOCK_RECORDS[0] + 1)


class CompactFullDecoder:
    """Decoder of ``CompactFullCodec``."""

    def __init__(self, store: Store) -> None:
        self._values = _StoredValues(store, FOURTH_ROOTS)
        self.tail_logprobs = self._values.tails
        self.entry_counts: Counts = np.full(len(self.tail_logprobs), store.shape("levels")[1], np.int64)

    def records(self, start: int, stop: int) -> Records:
        """See ``Decoder.records``."""
        counts = self.entry_counts[start:stop]
        logprobs, top = self._values.rows(start, stop, counts)
        ids = np.tile(np.arange(logprobs.shape[1]), (stop - start, 1))
        likeliest_first(ids, logprobs, top)
        return self._values.records(start, stop, counts, ids.ravel(), logprobs.ravel())


class _Values:
    """Everything of a shard's records but the ids, on its way into arrays."""

    def __init__(self, records: Records, scale: Scale) -> None:
        self._scale = scale
        assert len(records), "a shard without targets"
        size, width = len(records), int(records.entry_counts.max())
        self._counts, self._tails = records.entry_counts, records.tail_logprobs
        self._tail_odds = encode_tails(records.tail_logprobs)
        self._decoded = decode_tails(self._tail_odds)
        self._labels = _encode_nats(-records.label_logprobs)
        self._entropies = _encode_nats(records.entropies)
        self._steps, self._floors = np.empty(size, np.uint8), np.empty(size, np.uint8)
        self.levels = _Bytes(size, width, np.uint16)

    def quantise(self, rows: slice, logprobs: FloatArray) -> npt.NDArray[np.int32]:
        """Levels of some rows [n, W], their likeliest entry first."""
        decoded = self._decoded[0][rows], self._decoded[1][rows]
        result = quantise(self._scale, logprobs, self._counts[rows], self._tails[rows], decoded)
        self._steps[rows], self._floors[rows] = result.steps, result.floors
        return result.levels

    def stored(self, block: int) -> dict[str, Stored]:
        """The arrays of all rows, ``block`` of them a chunk of levels."""
        levels = self.levels.low[_by_entropy(self._entropies, block)]
        return {
            "tail_odds": Stored(self._tail_odds, packing="runs"),
            "label_losses": Stored(self._labels, packing="runs"),
            "entropies": Stored(self._entropies, packing="runs"),
            "steps": Stored(self._steps, packing="runs"),
            "floors": Stored(self._floors, packing="runs"),
            "levels": Stored(levels, (block, levels.shape[1]), "runs"),
            "level_excess": Stored(self.levels.excess, packing="runs"),
            "level_excess_counts": Stored(self.levels.excess_counts(block)),
        }


class _StoredValues:
    """The twin of ``_Values``."""

    def __init__(self, store: Store, scale: Scale) -> None:
        self._scale = scale
        self.tails, self._log_kept = decode_tails(store.whole("tail_odds"))
        demand_rows(store, COMPACT_FULL.record_arrays, len(self.tails))
        self._labels = -_decode_nats(store.whole("label_losses"))
        codes, block = store.whole("entropies"), store.chunk_shape("levels")[0]
        self._entropies = _decode_nats(codes)
        self._steps, self._floors = store.whole("steps"), store.whole("floors")
        by_entropy = _by_entropy(codes, block)
        places = np.empty(len(codes), np.int64)
        places[by_entropy] = np.arange(len(codes)) % block
        self._levels = _StoredBytes(store, "levels", "level_excess", places)

    def rows(self, first: int, last: int, counts: Counts) -> tuple[FloatArray, Array]:
        """Logprobs [n, W] of some records, and the column of each one's largest."""
        levels, part = self._levels.rows(first, last), slice(first, last)
        values = dequantise(self._scale, levels, counts, self._steps[part], self._floors[part], self._log_kept[part])
        return values, levels.argmax(1)

    def records(self, start: int, stop: int, counts: Counts, ids: Array, logprobs: Array) -> Records:
        return Records(
            entry_counts=counts,
            entry_ids=ids,
            entry_logprobs=logprobs,
            tail_logprobs=self.tails[start:stop],
            label_logprobs=self._labels[start:stop],
            entropies=self._entropies[start:stop],
        )


def _encode_nats(values: FloatArray) -> npt.NDArray[np.uint16]:
    """Nonnegative values in 1/1024 nat; codes for infinity and for unknown (NaN)."""
    codes = np.clip(np.rint(np.nan_to_num(values, nan=0.0, posinf=0.0) * _NATS), 0, _LARGEST)
    return np.where(np.isnan(values), _UNKNOWN, np.where(np.isposinf(values), _INFINITE, codes)).astype(np.uint16)


def _decode_nats(codes: Array) -> FloatArray:
    values = (codes / _NATS).astype(np.float32)
    values[codes == _INFINITE] = np.inf
    values[codes == _UNKNOWN] = np.nan
    return values


class _Bytes:
    """Values [R, W] as bytes ``low``; what is over ``ESCAPE`` is put aside, row by row."""

    def __init__(self, rows: int, width: int, excess_dtype: npt.DTypeLike) -> None:
        self.low = np.zeros((rows, width), np.uint8)
        self._large = np.zeros(rows, np.int64)
        self._excess = [np.empty(0, excess_dtype)]

    @property
    def excess(self) -> Array:
        """What each 255 lacks."""
        return np.concatenate(self._excess)

    def excess_counts(self, block: int) -> Array:
        """How many of those each block of rows has."""
        return np.add.reduceat(self._large, np.arange(0, len(self._large), block)).astype(np.uint32)

    def put(self, rows: slice, values: Array) -> None:
        """Set some rows; from the first to the last, each once."""
        low = np.minimum(values, ESCAPE).astype(np.uint8)
        large = low == ESCAPE
        excess, dtype = values[large] - ESCAPE, self._excess[0].dtype
        assert not len(excess) or excess.max() <= np.iinfo(dtype).max, "value outside its stored type"
        self.low[rows], self._large[rows] = low, np.count_nonzero(large, axis=1)
        self._excess.append(excess.astype(dtype))


class _StoredBytes:
    """The twin of ``_Bytes``: values [R, W], stored in blocks of records.

    ``places`` says where each record's row stands in its block; without it a block is stored entry by entry.
    """

    def __init__(self, store: Store, name: str, excess: str, places: Array | None) -> None:
        self._store, self._name, self._places = store, name, places
        axis = 0 if places is not None else 1
        rows, self._width = store.shape(name)[axis], store.shape(name)[1 - axis]
        self._block = store.chunk_shape(name)[axis]
        demand(store.chunk_shape(name)[1 - axis] == self._width, f"{name}: chunks that cut a record")
        counts = store.whole(f"{excess}_counts")
        self._excess, self._starts = store.whole(excess), offsets(counts)
        demand(len(counts) == -(-rows // self._block), f"{excess}_counts: not one for each block")
        demand(int(self._starts[-1]) == len(self._excess), f"{excess}: not the number that its counts say")

    def pieces(self, start: int, stop: int) -> list[tuple[int, int]]:
        """The records ``start`` to ``stop`` in pieces of whole blocks, small enough for the processor's cache."""
        size = self._block * max(1, _DECODED_AT_ONCE // (self._block * self._width))
        bounds = range(start // size, -(-stop // size))
        return [(max(start, number * size), min(stop, (number + 1) * size)) for number in bounds]

    def rows(self, first: int, last: int) -> Array:
        """int64 [n, W] of some records: what numpy indexes with."""
        low = np.empty((last - first, self._width), np.uint8)
        blocks = range(first // self._block, -(-last // self._block))
        for number in blocks:
            begin, end = max(first, number * self._block), min(last, (number + 1) * self._block)
            low[begin - first : end - first] = self._cut(number, begin, end)
        values = low.astype(np.int64)
        start, end = (int(self._starts[number]) for number in (blocks.start, blocks.stop))
        if start < end:
            start += int(np.count_nonzero(self._cut(blocks.start, blocks.start * self._block, first) == ESCAPE))
            large = np.flatnonzero(low == ESCAPE)
            values.reshape(-1)[large] += self._excess[start : start + len(large)]
        return values

    def _cut(self, number: int, begin: int, end: int) -> Array:
        """The bytes of records that are all in block ``number``."""
        if self._places is not None:
            rows: Array = self._store.chunk(self._name, (number, 0))[self._places[begin:end]]
            return rows
        start = number * self._block
        columns: Array = self._store.chunk(self._name, (0, number))[:, begin - start : end - start].T
        return columns


def _by_entropy(codes: Array, block: int) -> Array:
    """int64 [R]: the records in the order of their rows of levels, block by block by rising entropy."""
    order: Array = np.lexsort((codes, np.arange(len(codes)) // block))
    return order


def _padded(values: Array, counts: Counts, width: int, fill: float) -> Array:
    """Ragged ``values`` [E] as [R, width]."""
    if len(values) == len(counts) * width:
        return values.reshape(-1, width)
    padded = np.full((len(counts), width), fill, values.dtype)
    padded[np.arange(width) < counts[:, None]] = values
    return padded


def _by_rank(ranks: npt.NDArray[np.int32], levels: npt.NDArray[np.int32]) -> tuple[Array, Array]:
    """Sort each row's entries by rank: the steps from one rank to the next, and the levels.

    The first step is the first rank and one more. Padding has rank -1, goes last, and takes steps of 0.
    """
    small = ranks.max() < (1 << 16) - 1 and levels.max() < 1 << 16
    word = np.dtype(np.uint32 if small else np.uint64)
    bits = word.itemsize * 4
    # The level travels in the low half of a word.
    keys = ranks.astype(word)
    keys <<= bits
    keys |= levels.astype(word)
    keys.sort(axis=1)
    levels = (keys & ((1 << bits) - 1)).astype(np.int32)
    keys >>= bits
    steps = keys.astype(np.int32)
    steps[:, 1:] -= keys[:, :-1].astype(np.int32)
    steps[:, 0] += 1
    padding = ranks < 0
    if padding.any():
        padding.sort(axis=1)
        steps[padding] = 0
        levels[padding] = 0
    return steps, levels


def _block_records(width: int) -> int:
    """A power of two, so that blocks of all widths have about as many entries."""
    fitting = 1 << max(_BLOCK_ENTRIES // width, 1).bit_length() - 1
    return min(max(fitting, _BLOCK_RECORDS[0]), _BLOCK_RECORDS[1])


def _parts(rows: int, width: int) -> list[slice]:
    """Rows in parts whose temporary arrays stay small."""
    size = max(1, _ENCODED_AT_ONCE // width)
    return [slice(start, min(start + size, rows)) for start in range(0, rows, size)]


_VALUE_ROWS = ("tail_odds", "label_losses", "entropies", "steps", "floors")
COMPACT = CompactCodec(_RECORD_TYPES | _ID_TYPES, (*_VALUE_ROWS, "levels", "entry_counts", "record_orders"))
COMPACT_FULL = CompactFullCodec(_RECORD_TYPES, (*_VALUE_ROWS, "levels"))
