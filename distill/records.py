"""Ragged records, put together and taken apart."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from distill.types import Records


def select(records: Records, rows: npt.NDArray[np.int64]) -> Records:
    """The given rows of ``records``."""
    ends = np.cumsum(records.entry_counts)
    starts = ends - records.entry_counts
    counts = records.entry_counts[rows]
    # Positions of the chosen records' entries: each record's start, repeated, plus a ramp inside the record.
    ramp = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    entries = np.repeat(starts[rows], counts) + ramp
    return Records(
        entry_counts=counts,
        entry_ids=records.entry_ids[entries],
        entry_logprobs=records.entry_logprobs[entries],
        tail_logprobs=records.tail_logprobs[rows],
        label_logprobs=records.label_logprobs[rows],
        entropies=records.entropies[rows],
    )


def concat(parts: Sequence[Records]) -> Records:
    """Records one after the other."""
    return Records(
        entry_counts=np.concatenate([p.entry_counts for p in parts]),
        entry_ids=np.concatenate([p.entry_ids for p in parts]),
        entry_logprobs=np.concatenate([p.entry_logprobs for p in parts]),
        tail_logprobs=np.concatenate([p.tail_logprobs for p in parts]),
        label_logprobs=np.concatenate([p.label_logprobs for p in parts]),
        entropies=np.concatenate([p.entropies for p in parts]),
    )
