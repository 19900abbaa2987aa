"""Records put together and taken apart."""

import itertools

import numpy as np
import pytest

from distill.records import concat, select
from distill.types import Records
from tests.helpers import same_records


def ragged(rows: int, seed: int = 0) -> Records:
    rng = np.random.default_rng(seed)
    counts = rng.integers(1, 6, rows)
    entries = int(counts.sum())
    return Records(
        entry_counts=counts,
        entry_ids=rng.integers(0, 1000, entries),
        entry_logprobs=rng.normal(size=entries).astype(np.float32),
        tail_logprobs=rng.normal(size=rows).astype(np.float32),
        label_logprobs=rng.normal(size=rows).astype(np.float32),
        entropies=rng.normal(size=rows).astype(np.float32),
    )


def test_selected_rows_are_those_rows() -> None:
    records = ragged(20)
    ends = np.cumsum(records.entry_counts)
    rows = np.array([3, 3, 0, 19, 7])
    chosen = select(records, rows)
    entries = np.concatenate([np.arange(ends[row] - records.entry_counts[row], ends[row]) for row in rows])
    assert np.array_equal(chosen.entry_ids, records.entry_ids[entries])
    assert np.array_equal(chosen.entry_logprobs, records.entry_logprobs[entries])
    assert np.array_equal(chosen.entropies, records.entropies[rows])
    assert len(chosen) == 5


@pytest.mark.parametrize("cuts", [[], [1], [0, 7, 7, 20]])
def test_parts_make_the_whole(cuts: list[int]) -> None:
    records = ragged(20)
    bounds = [0, *cuts, 20]
    parts = [select(records, np.arange(a, b)) for a, b in itertools.pairwise(bounds)]
    assert same_records(concat(parts), records)


def test_nothing_selected_is_empty() -> None:
    assert len(select(ragged(5), np.array([], np.int64))) == 0
