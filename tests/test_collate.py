"""Samples in a batch: padded or packed, every target is predicted from the token before it and from no other sample."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from distill.collate import TokenBatch, collate, token_batches
from tests.helpers import make_samples


def test_the_token_before_a_target_predicts_it() -> None:
    """The only shift: a row of hidden states predicts the token after it."""
    samples = make_samples(9)
    batch = collate(samples)
    flat = batch.token_ids.flatten()
    assert torch.equal(flat[batch.predict_rows + 1], batch.labels)
    assert batch.token_ids.shape == (9, max(len(s.token_ids) for s in samples))
    assert batch.position_ids is None


@given(begins=st.lists(st.booleans(), min_size=1, max_size=12).map(lambda rest: [True, *rest]))
def test_packed_samples_stand_one_after_the_other(begins: list[bool]) -> None:
    samples = make_samples(len(begins), seed=len(begins))
    batch = collate(samples, np.array(begins))
    assert len(batch.token_ids) == sum(begins)
    assert torch.equal(batch.token_ids.flatten()[batch.predict_rows + 1], batch.labels)
    assert batch.num_tokens == sum(len(sample.token_ids) for sample in samples)
    rows: list[list[int]] = []
    for sample, first in zip(samples, begins, strict=True):
        if first:
            rows.append([])
        rows[-1] += sample.token_ids.tolist()
    length = max(map(len, rows))
    assert batch.token_ids.tolist() == [row + [0] * (length - len(row)) for row in rows]


def test_positions_restart_at_each_sample_and_stay_at_0_in_the_padding() -> None:
    samples = make_samples(4, seed=3)
    a, b, c, d = (list(range(len(sample.token_ids))) for sample in samples)
    batch = collate(samples, np.array([True, False, False, True]))
    assert batch.position_ids is not None
    first, second = batch.position_ids.tolist()
    assert first == a + b + c
    assert second == d + [0] * (len(first) - len(d))


def test_a_batch_of_whole_rows_needs_no_positions() -> None:
    samples = make_samples(3)
    assert collate(samples, np.array([True, True, True])).position_ids is None


def test_the_sample_of_each_target() -> None:
    samples = make_samples(5)
    expected = [number for number, sample in enumerate(samples) for _ in sample.targets]
    for begins in (None, np.array([True, False, True, False, False])):
        assert collate(samples, begins).samples.tolist() == expected


def test_a_batch_moves_as_a_whole() -> None:
    batch = collate(make_samples(2), np.array([True, False]))
    moved = batch.to("meta")
    for name in TokenBatch.__slots__:
        value = getattr(moved, name)
        assert not isinstance(value, torch.Tensor) or value.is_meta
    assert moved.position_ids is not None and moved.num_tokens == batch.num_tokens


def test_the_first_sample_needs_a_row() -> None:
    with pytest.raises(AssertionError, match="begins a row"):
        collate(make_samples(2), np.array([False, True]))


@given(st.lists(st.integers(1, 50), min_size=1, max_size=60), st.integers(1, 200))
def test_token_batches_keep_the_budget(lengths: list[int], budget: int) -> None:
    batches = token_batches(np.array(lengths), budget)
    assert sorted(row for batch in batches for row in batch) == list(range(len(lengths)))
    for batch in batches:
        longest = max(lengths[row] for row in batch)
        assert len(batch) == 1 or len(batch) * longest <= budget
