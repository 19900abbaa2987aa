"""Records to and from the arrays that a shard stores.

A codec turns ``Records`` into named numpy arrays of fixed dtypes and back. It knows nothing of files, so a denser
encoding is a new codec here and no change elsewhere. What was decoded always is a valid distribution: the kept
entries are shifted so that their mass and the stored tail add up to one (logs of both, never 1 - sum).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from distill.types import FloatArray, Records

Arrays = Mapping[str, npt.NDArray[np.generic]]

# fp16 has no finite value below -65504; a logprob there carries no information either way.
_LOWEST_LOGPROB = -60_000.0
_LARGEST_TAIL = np.float32(-1e-12)


class Codec(Protocol):
    """Encoding of a shard's records.

    ``record_arrays`` have one row a record and ``entry_arrays`` one row an entry, so a reader can slice both.
    """

    @property
    def record_arrays(self) -> tuple[str, ...]: ...  # noqa: D102

    @property
    def entry_arrays(self) -> tuple[str, ...]: ...  # noqa: D102

    def encode(self, records: Records, vocab_size: int) -> dict[str, npt.NDArray[np.generic]]:
        """Arrays to store. Ids must be in [0, vocab_size): HDF5 would clamp them silently."""
        ...

    def decode(self, arrays: Arrays) -> Records:
        """The records of a slice: as many ``entry_arrays`` rows as its entry counts add up to."""
        ...


@dataclass(frozen=True, slots=True)
class ExactCodec:
    """fp16 logprobs and the smallest integer that holds an id; statistics in float32."""

    record_arrays: tuple[str, ...] = ("entry_counts", "tail_logprobs", "label_logprobs", "entropies")
    entry_arrays: tuple[str, ...] = ("entry_ids", "entry_logprobs")

    def encode(self, records: Records, vocab_size: int) -> dict[str, npt.NDArray[np.generic]]:
        """See ``Codec.encode``."""
        _check(records, vocab_size)
        return {
            "entry_counts": records.entry_counts.astype(id_dtype(vocab_size + 1)),
            "entry_ids": records.entry_ids.astype(id_dtype(vocab_size)),
            "entry_logprobs": np.maximum(records.entry_logprobs, _LOWEST_LOGPROB).astype(np.float16),
            "tail_logprobs": records.tail_logprobs.astype(np.float32),
            "label_logprobs": records.label_logprobs.astype(np.float32),
            "entropies": records.entropies.astype(np.float32),
        }

    def decode(self, arrays: Arrays) -> Records:
        """See ``Codec.decode``."""
        counts = arrays["entry_counts"].astype(np.int64)
        tails = arrays["tail_logprobs"].astype(np.float32)
        return Records(
            entry_counts=counts,
            entry_ids=arrays["entry_ids"].astype(np.int64),
            entry_logprobs=agree_with_tail(arrays["entry_logprobs"].astype(np.float32), counts, tails),
            tail_logprobs=tails,
            label_logprobs=arrays["label_logprobs"].astype(np.float32),
            entropies=arrays["entropies"].astype(np.float32),
        )


CODECS: Mapping[str, Codec] = {"exact": ExactCodec()}


def id_dtype(vocab_size: int) -> npt.DTypeLike:
    """The unsigned type that ids below ``vocab_size`` are stored in."""
    return np.uint16 if vocab_size <= 1 << 16 else np.uint32


def log1mexp(x: FloatArray) -> FloatArray:
    """log(1 - exp(x)) for x <= 0, accurate at both ends (Maechler 2012, "Accurately computing log(1 - exp(-|a|))")."""
    x = np.minimum(x, 0.0)
    with np.errstate(divide="ignore"):
        near = np.log(-np.expm1(np.maximum(x, -1.0)))
    return np.where(x > -np.log(2.0), near, np.log1p(-np.exp(np.minimum(x, -0.5)))).astype(np.float32)


def agree_with_tail(logprobs: FloatArray, counts: npt.NDArray[np.int64], tails: FloatArray) -> FloatArray:
    """Shift each record's logprobs [E] so that their mass and its tail [R] sum to one.

    Every record has at least one entry and its first is its largest.
    """
    if not len(counts):
        return logprobs
    starts = np.cumsum(counts) - counts
    largest = logprobs[starts]
    masses = np.add.reduceat(np.exp(logprobs - np.repeat(largest, counts)), starts)
    # A tail of exactly 0 is a kept mass too small for float32 to tell from none; the entries stay finite all the same.
    shift = log1mexp(np.minimum(tails, _LARGEST_TAIL)) - (largest + np.log(masses))
    return logprobs + np.repeat(shift, counts).astype(np.float32)


def _check(records: Records, vocab_size: int) -> None:
    ids = records.entry_ids
    assert (records.entry_counts >= 1).all(), "a record without entries"
    assert records.entry_counts.sum() == len(ids) == len(records.entry_logprobs), "entry counts and entries differ"
    assert not len(ids) or (ids.min() >= 0 and ids.max() < vocab_size), "an entry id outside the vocabulary"
    assert np.isfinite(records.entry_logprobs).all(), "an entry without a finite logprob"
