"""Orders of the vocabulary, by which the ids of a shard become small numbers.

The ids that a teacher keeps for a target depend on the kind of place: after a digit, inside a word, at the start of a
sentence. So a shard has a few *orders*, each a list of the ids that its records use, the frequent ones first, and each
record names the order in which its ids stand closest to the front: sorted by rank, the gaps between them are small.
The orders are found by a mixture model (a record is the set of its ids, each drawn by the order's own frequency) with
hard assignments, fitted on a sample of the records. All scores are integers, so that the result is the same on every
processor.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from distill.codec.base import Array, Counts, id_dtype, offsets
from distill.types import Records

MAX_ORDERS = 64
_TARGETS_PER_ORDER = 512
_MODEL_IDS = 2048  # the most frequent ids are all that the model looks at
_MODEL_ENTRIES = 48  # of each record, its first
_STAGES = ((32, 3), (128, 2))  # (records in the sample for each order, iterations)
_SCORE_UNIT = 16.0  # a nat in units of the scores
_PRIOR = 2.0  # records' worth of overall frequencies that each order's start from
_RECORDS_AT_ONCE = 64


@dataclass(frozen=True, slots=True, eq=False)
class Orders:
    """The orders of a shard. ``ids``: [sum of lengths], order after order. ``lengths``: int64 [orders]."""

    ids: Array
    lengths: Counts

    @property
    def deltas(self) -> Array:
        """Differences of consecutive ``ids``, wrapping round in their unsigned type: inside a class they are small."""
        deltas = self.ids.copy()
        deltas[1:] -= self.ids[:-1]
        return deltas

    @classmethod
    def from_deltas(cls, deltas: Array, lengths: Array) -> "Orders":
        """The twin of ``deltas``."""
        return cls(np.cumsum(deltas, dtype=deltas.dtype), lengths.astype(np.int64))


def number_of_orders(targets: int) -> int:
    """How many orders pay for themselves in a shard of so many targets."""
    return min(max(targets // _TARGETS_PER_ORDER, 1), MAX_ORDERS)


def choose_orders(records: Records, vocab_size: int) -> npt.NDArray[np.uint8]:
    """uint8 [R]: the number of each record's order."""
    orders = number_of_orders(len(records))
    if orders == 1:
        return np.zeros(len(records), np.uint8)
    frequencies = np.bincount(records.entry_ids, minlength=vocab_size)
    common = np.argsort(-frequencies, kind="stable")[: _MODEL_IDS - 1]
    small = np.full(vocab_size, _MODEL_IDS - 1, np.int64)
    small[common] = np.arange(len(common))
    columns = small[_first_entries(records)]
    # The likeliest id scatters the records; what each group has in common is then found by itself.
    top = records.entry_ids[np.cumsum(records.entry_counts) - records.entry_counts]
    labels = (top.astype(np.uint64) * 2_654_435_761 % (1 << 32) * orders >> 32).astype(np.int64)
    model = None
    for share, iterations in _STAGES:
        every = slice(None, None, max(len(records) // (share * orders), 1))
        sample = np.ascontiguousarray(columns[:, every])
        labels = labels[every] if model is None else model.assign(sample)
        for _ in range(iterations):
            model = _Mixture.fit(sample, labels, orders)
            labels = model.assign(sample)
        model = _Mixture.fit(sample, labels, orders)
    assert model is not None
    return model.assign(columns).astype(np.uint8)


def build_orders(places: Array, orders: int, vocab_size: int) -> tuple[Orders, npt.NDArray[np.int32]]:
    """The orders of entries [E], each given as order * vocab_size + id, and int32 [orders * vocab_size]: their ranks.

    Inside an order ids stand by falling class, floor(log2(times used)), and inside a class by rising id.
    """
    used = np.bincount(places, minlength=orders * vocab_size)
    places = np.flatnonzero(used)
    order, ids = np.divmod(places, vocab_size)
    classes = np.frexp(used[places].astype(np.float64))[1]
    by_class = np.argsort((order * 64 + 63 - classes).astype(np.uint16), kind="stable")
    lengths = np.bincount(order, minlength=orders).astype(np.int64)
    ranks = np.zeros(orders * vocab_size, np.int32)
    ranks[places[by_class]] = np.arange(len(places)) - np.repeat(offsets(lengths)[:-1], lengths)
    return Orders(ids[by_class].astype(id_dtype(vocab_size)), lengths), ranks


def _first_entries(records: Records) -> Array:
    """int64 [width, R]: the ids of each record's first entries; a short record repeats its last."""
    counts = records.entry_counts
    width = min(int(counts.max()), _MODEL_ENTRIES)
    starts = np.cumsum(counts) - counts
    first: Array = records.entry_ids[starts + np.minimum(np.arange(width)[:, None], counts - 1)]
    return first


@dataclass(frozen=True, slots=True, eq=False)
class _Mixture:
    """``weights``: float32 [_MODEL_IDS, orders], what having the id says for each order; ``bias``: float32 [orders]."""

    weights: npt.NDArray[np.float32]
    bias: npt.NDArray[np.float32]

    @classmethod
    def fit(cls, columns: Array, labels: Array, orders: int) -> "_Mixture":
        """The model of records ``columns`` [width, records], given as places among the common ids, by their order."""
        used = np.bincount((columns * orders + labels).ravel(), minlength=_MODEL_IDS * orders)
        used = used.reshape(_MODEL_IDS, orders)
        prior = _PRIOR * used.sum(1, keepdims=True) / len(labels)
        shares = np.minimum((used + prior) / (np.bincount(labels, minlength=orders) + _PRIOR), 0.99)
        absent = np.log1p(-shares)
        weights = np.rint(_SCORE_UNIT * (np.log(shares + 1e-8) - absent))
        weights[-1] = 0.0  # stands for all other ids
        return cls(weights.astype(np.float32), np.rint(_SCORE_UNIT * absent[:-1].sum(0)).astype(np.float32))

    def assign(self, columns: Array) -> Array:
        """int64 [records]: the likeliest order of each."""
        labels = np.empty(columns.shape[1], np.int64)
        for start in range(0, len(labels), _RECORDS_AT_ONCE):
            part = slice(start, start + _RECORDS_AT_ONCE)
            labels[part] = (np.take(self.weights, columns[:, part], axis=0).sum(0) + self.bias).argmax(1)
        return labels
