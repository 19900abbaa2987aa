"""The records of several teachers for the same targets as those of one: the weighted average of their distributions.

A teacher's record stands for one whole distribution over the V ids: the K ids that it kept, the real token, whose
logprob is stored and exact even where it wasn't kept, and all others, which share what is left of the tail evenly. So
an id that a teacher didn't keep counts tail / (V - K) for it, or, where the real token is one of these and known apart,
(tail - p(real token)) / (V - K - 1). Averages of such distributions are distributions again, so nothing has to be
clipped or normalised: the entries are the union of all kept ids, never cut, and the tail is the mass of all others.

Everything is added as logs in float64, and exactly, so the order of the teachers leaves no trace.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from distill.records import concat, select
from distill.types import IntArray, Records

_BLOCK_ENTRIES = 1 << 17
"""Records are merged in blocks of about so many entries of all teachers: enough for numpy, and little memory."""

Logs = npt.NDArray[np.float64]


def merge(parts: Sequence[Records], weights: Sequence[float], labels: IntArray, vocab_size: int) -> Records:
    """The records of the average teacher; those of a single teacher come back as they are.

    parts: each teacher's records of the same R targets. weights: > 0, any sum. labels: [R], the real tokens.
    vocab_size: V, the number of ids that the distributions are over.

    The label's logprob is the average of the stored ones, and that of its entry too, to the precision in which the
    teachers' entries are stored. It is unknown (NaN) where a teacher's is. Entropies are unknown: those of the parts
    only bound the average's. The result is the same, bit for bit, for every order of the teachers.
    """
    assert len(parts) == len(weights) > 0 and min(weights) > 0, "each teacher has a weight above zero"
    assert len(parts) < 64, "more teachers than sums are exact for"
    assert all(len(part) == len(labels) for part in parts), "records of different targets"
    if len(parts) == 1 or not len(labels):
        return parts[0]
    total = math.fsum(weights)  # exact, and so the same for every order
    log_weights = np.array([math.log(weight / total) for weight in weights])[:, None]
    return concat(
        [
            _merge([select(part, rows) for part in parts], log_weights, np.asarray(labels, np.int64)[rows], vocab_size)
            for rows in _blocks(parts)
        ]
    )


def _blocks(parts: Sequence[Records]) -> Iterator[npt.NDArray[np.int64]]:
    """Consecutive rows with about ``_BLOCK_ENTRIES`` entries."""
    ends = np.cumsum(np.sum([part.entry_counts for part in parts], axis=0))
    cuts = np.flatnonzero(np.diff((ends - 1) // _BLOCK_ENTRIES)) + 1
    yield from np.split(np.arange(len(ends)), cuts)


def _merge(parts: Sequence[Records], log_weights: Logs, labels: npt.NDArray[np.int64], vocab_size: int) -> Records:
    union = _Union.of(parts, vocab_size)
    unkept = _Unkept.of(parts, labels, vocab_size)
    slots, label_kept = union.find(labels)

    terms = unkept.share.take(union.rows, axis=1)  # [T, U]: what each id of the union has of each teacher
    which, record = np.nonzero(unkept.label_apart & label_kept)
    terms[which, slots[record]] = unkept.label[which, record]
    terms[union.sources, union.targets] = union.logprobs
    logprobs = _log_sum(terms + log_weights).astype(np.float32)

    # The tail: the ids outside the union, and the label if it is one of them and known apart.
    others = vocab_size - union.counts - (unkept.label_apart & ~label_kept)
    label_outside = np.where(label_kept, -np.inf, unkept.label)
    tails = np.concatenate([unkept.share + _log(others) + log_weights, label_outside + log_weights])
    known = np.stack([part.label_logprobs for part in parts]).astype(np.float64)
    ids = union.ids
    _likeliest_first(ids, logprobs, union.counts)
    return Records(
        entry_counts=union.counts,
        entry_ids=ids,
        entry_logprobs=logprobs,
        tail_logprobs=np.minimum(_log_sum(tails), 0.0).astype(np.float32),
        label_logprobs=_log_sum(np.where(unkept.label_apart, unkept.label, known) + log_weights).astype(np.float32),
        entropies=np.full(len(labels), np.nan, np.float32),
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Union:
    """The U ids that any teacher kept, record by record and by rising id, and where each of the E entries belongs.

    rows, ids: int64 [U]. counts: int64 [R], ids of each record. sources, targets: int64 [E], teacher of each entry and
    its place in the union. logprobs: float32 [E]. keys: int64 [U], rising, row and id in one number.
    """

    rows: npt.NDArray[np.int64]
    ids: npt.NDArray[np.int64]
    counts: npt.NDArray[np.int64]
    sources: npt.NDArray[np.int64]
    targets: npt.NDArray[np.int64]
    logprobs: npt.NDArray[np.float32]
    keys: npt.NDArray[np.int64]
    id_bits: int

    @staticmethod
    def of(parts: Sequence[Records], vocab_size: int) -> "_Union":
        records = len(parts[0])
        ids = np.concatenate([part.entry_ids for part in parts])
        rows = np.concatenate([np.repeat(np.arange(records), part.entry_counts) for part in parts])
        sources = np.repeat(np.arange(len(parts)), [len(part.entry_ids) for part in parts])
        # Row, id and position in one number: sorting plain numbers is several times as fast as sorting indices.
        id_bits, position_bits = (vocab_size - 1).bit_length(), len(ids).bit_length()
        assert records.bit_length() + id_bits + position_bits < 64, "too many entries in a block"
        packed = np.sort((rows << id_bits | ids) << position_bits | np.arange(len(ids)))
        positions, keys = packed & ((1 << position_bits) - 1), packed >> position_bits
        is_new = np.diff(keys, prepend=-1) > 0
        union = keys[is_new]
        rows = union >> id_bits
        return _Union(
            rows=rows,
            ids=union & ((1 << id_bits) - 1),
            counts=np.bincount(rows, minlength=records),
            sources=sources[positions],
            targets=np.cumsum(is_new) - 1,
            logprobs=np.concatenate([part.entry_logprobs for part in parts])[positions],
            keys=union,
            id_bits=id_bits,
        )

    def find(self, ids: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
        """Place of one id a record, [R], and whether it is there at all, [R]."""
        keys = np.arange(len(ids)) << self.id_bits | ids
        places = np.minimum(np.searchsorted(self.keys, keys), len(self.keys) - 1)
        return places, self.keys[places] == keys


@dataclass(frozen=True, slots=True, eq=False)
class _Unkept:
    """What each of T teachers says of ids that it didn't keep, all [T, R].

    label_apart: whether the label is such an id and its logprob known. label: that logprob, else -inf. share: logprob
    of each other one, -inf if there is none.
    """

    label_apart: npt.NDArray[np.bool_]
    label: Logs
    share: Logs

    @staticmethod
    def of(parts: Sequence[Records], labels: npt.NDArray[np.int64], vocab_size: int) -> "_Unkept":
        tails, known = (
            np.stack(arrays).astype(np.float64)
            for arrays in ([part.tail_logprobs for part in parts], [part.label_logprobs for part in parts])
        )
        apart = ~np.stack([_keeps(part, labels) for part in parts]) & ~np.isnan(known)
        # Rounding may have left the label more than the tail that it is in.
        label = np.where(apart, np.minimum(known, tails), -np.inf)
        others = vocab_size - np.stack([part.entry_counts for part in parts]) - apart
        share = np.where(others > 0, _log_difference(tails, label) - _log(np.maximum(others, 1)), -np.inf)
        return _Unkept(apart, label, share)


def _keeps(part: Records, labels: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """bool [R]: whether the label is an entry."""
    is_label = part.entry_ids == np.repeat(labels, part.entry_counts)
    return np.logical_or.reduceat(is_label, np.cumsum(part.entry_counts) - part.entry_counts)


def _likeliest_first(
    ids: npt.NDArray[np.int64], logprobs: npt.NDArray[np.float32], counts: npt.NDArray[np.int64]
) -> None:
    """Swap each record's likeliest entry, of equal ones the first, with its first one, in place."""
    starts = np.cumsum(counts) - counts
    is_largest = logprobs == np.repeat(np.maximum.reduceat(logprobs, starts), counts)
    best = np.minimum.reduceat(np.where(is_largest, np.arange(len(ids)), len(ids)), starts)
    for array in (ids, logprobs):
        array[starts], array[best] = array[best], array[starts]


def _log(numbers: npt.NDArray[np.int64] | Logs) -> Logs:
    """Natural logs; -inf for 0."""
    with np.errstate(divide="ignore"):
        logs: Logs = np.log(numbers)
    return logs


def _log_sum(terms: Logs) -> Logs:
    """Log of the sum of exp over the first axis, the same for every order of the terms.

    The exps, relative to the largest, are rounded to multiples of 2^-46: far below what float32 shows, and sums of up
    to 127 such numbers are exact.
    """
    top = terms.max(0)
    shift = np.where(np.isneginf(top), 0.0, top)
    exps = np.exp(terms - shift)
    exps *= 2.0**46
    total: Logs = shift + _log(np.rint(exps, out=exps).sum(0)) - 46 * math.log(2.0)
    return total


def _log_difference(a: Logs, b: Logs) -> Logs:
    """log(exp(a) - exp(b)) for b <= a."""
    with np.errstate(invalid="ignore", divide="ignore"):
        difference: Logs = np.where(np.isneginf(b), a, a + np.log(-np.expm1(b - a)))
    return difference
