"""Merging of teachers against whole distributions in float64."""

import itertools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distill.merge import merge
from distill.types import Records
from tests.helpers import dense_logprobs, same_records, top_k_records

R = 7


def ragged(full: Records, logprobs: np.ndarray, counts: np.ndarray) -> Records:
    """The first ``counts`` entries of each record, the dropped mass in the tail, in any order behind the first."""
    width = int(full.entry_counts[0])
    keep = (np.arange(width) < counts[:, None]).ravel()
    ids = full.entry_ids.reshape(-1, width)
    others = [np.setdiff1d(np.arange(logprobs.shape[1]), ids[row, :count]) for row, count in enumerate(counts)]
    tails = [np.log(np.exp(logprobs[row, rest]).sum()) if len(rest) else -np.inf for row, rest in enumerate(others)]
    order = np.concatenate(
        [
            start + np.array([0, *range(count - 1, 0, -1)])
            for start, count in zip(np.cumsum(counts) - counts, counts, strict=True)
        ]
    )
    return replace(
        full,
        entry_counts=counts,
        entry_ids=full.entry_ids[keep][order],
        entry_logprobs=full.entry_logprobs[keep][order],
        tail_logprobs=np.array(tails, np.float32),
    )


def make_teacher(seed: int, labels: np.ndarray, *, k: int, vocab: int, vary: bool = True) -> Records:
    rng = np.random.default_rng(seed)
    logprobs = dense_logprobs(rng, len(labels), vocab)
    counts = rng.integers(1, k + 1, len(labels)) if vary else np.full(len(labels), k)
    return ragged(top_k_records(logprobs, labels, k), logprobs, counts)


def make_labels(vocab: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, vocab, R)


def dense(part: Records, labels: np.ndarray, vocab: int) -> np.ndarray:
    """What invariant 3 takes a record for, float64 [R, V]: the entries, the real token, the rest evenly."""
    p = np.zeros((len(part), vocab))
    ends = np.cumsum(part.entry_counts)
    for row, (end, count) in enumerate(zip(ends, part.entry_counts, strict=True)):
        ids = part.entry_ids[end - count : end]
        unkept = np.setdiff1d(np.arange(vocab), ids)
        rest, label = np.exp(np.float64(part.tail_logprobs[row])), np.float64(part.label_logprobs[row])
        if labels[row] in unkept and not np.isnan(label):
            p[row, labels[row]] = min(np.exp(label), rest)
            rest, unkept = rest - p[row, labels[row]], np.setdiff1d(unkept, labels[row])
        p[row, unkept] = rest / max(1, len(unkept))
        p[row, ids] = np.exp(part.entry_logprobs[end - count : end].astype(np.float64))
    return p


def mean(parts: Sequence[Records], weights: Sequence[float], labels: np.ndarray, vocab: int) -> np.ndarray:
    return sum(w * dense(part, labels, vocab) for w, part in zip(weights, parts, strict=True)) / sum(weights)


def kept_ids(part: Records, row: int) -> list[int]:
    end = part.entry_counts[: row + 1].sum()
    return part.entry_ids[end - part.entry_counts[row] : end].tolist()


def entry_logprobs(part: Records, row: int) -> np.ndarray:
    end = part.entry_counts[: row + 1].sum()
    return part.entry_logprobs[end - part.entry_counts[row] : end]


@settings(deadline=None, max_examples=150)
@given(
    seed=st.integers(0, 1 << 30),
    vocab=st.sampled_from([2, 3, 11, 64, 97]),
    weights=st.lists(st.floats(0.01, 100), min_size=2, max_size=5),
    data=st.data(),
)
def test_merged_distributions_equal_the_float64_reference(
    seed: int, vocab: int, weights: list[float], data: st.DataObject
) -> None:
    labels = make_labels(vocab, seed)
    parts = [
        make_teacher(seed + i, labels, k=data.draw(st.integers(1, vocab), label="k"), vocab=vocab)
        for i in range(len(weights))
    ]
    merged, expected = merge(parts, weights, labels, vocab), mean(parts, weights, labels, vocab)
    for row in range(R):
        ids, logprobs = kept_ids(merged, row), entry_logprobs(merged, row)
        assert sorted(ids) == sorted(set().union(*(kept_ids(part, row) for part in parts)))  # never cut
        assert np.abs(np.exp(logprobs.astype(np.float64)) - expected[row, ids]).max() < 1e-6
        assert np.allclose(logprobs, np.log(expected[row, ids]), rtol=1e-6, atol=1e-6)
        assert logprobs[0] == logprobs.max() and np.isfinite(logprobs).all()
        rest = np.delete(expected[row], ids).sum()
        assert abs(np.exp(np.float64(merged.tail_logprobs[row])) - rest) < 1e-6
        assert abs(np.exp(logprobs.astype(np.float64)).sum() + np.exp(np.float64(merged.tail_logprobs[row])) - 1) < 1e-6
    real = np.take_along_axis(expected, labels[:, None], 1)[:, 0]
    assert np.abs(np.exp(merged.label_logprobs.astype(np.float64)) - real).max() < 1e-6
    assert merged.entry_logprobs.dtype == merged.tail_logprobs.dtype == merged.label_logprobs.dtype == np.float32
    assert merged.entry_counts.dtype == merged.entry_ids.dtype == np.int64


@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 1 << 30), weights=st.lists(st.floats(0.01, 100), min_size=3, max_size=4))
def test_every_order_of_teachers_gives_the_same_bits(seed: int, weights: list[float]) -> None:
    labels = make_labels(64, seed)
    parts = [make_teacher(seed + i, labels, k=9, vocab=64) for i in range(len(weights))]
    first = merge(parts, weights, labels, 64)
    for order in itertools.permutations(range(len(weights))):
        other = merge([parts[i] for i in order], [weights[i] for i in order], labels, 64)
        for name in Records.__slots__:
            assert getattr(first, name).tobytes() == getattr(other, name).tobytes()


def test_one_literal_number() -> None:
    """V = 5, label 4. Teacher A keeps 0 (1/2), its label 1/4, so 1/4 among 1, 2, 3; B keeps 1 (3/4), its label 1/16."""
    log = np.log
    records = [
        Records(
            entry_counts=np.array([1]),
            entry_ids=np.array([kept]),
            entry_logprobs=np.array([log(p)], np.float32),
            tail_logprobs=np.array([log(1 - p)], np.float32),
            label_logprobs=np.array([log(label)], np.float32),
            entropies=np.array([1.0], np.float32),
        )
        for kept, p, label in ((0, 1 / 2, 1 / 4), (1, 3 / 4, 1 / 16))
    ]
    merged = merge(records, [3, 1], np.array([4]), 5)
    assert merged.entry_ids.tolist() == [0, 1]
    a, b = 3 / 4, 1 / 4
    assert np.exp(merged.entry_logprobs) == pytest.approx([a / 2 + b / 16, a / 12 + b * 3 / 4])
    assert np.exp(merged.label_logprobs) == pytest.approx([a / 4 + b / 16])
    assert np.exp(merged.tail_logprobs) == pytest.approx([a * (1 / 4 + 1 / 6) + b * (1 / 16 + 1 / 8)])


def test_a_label_that_one_teacher_keeps_counts_exactly_for_all() -> None:
    labels = make_labels(64)
    sure = make_teacher(1, labels, k=64, vocab=64, vary=False)
    others = [make_teacher(seed, labels, k=1, vocab=64) for seed in (2, 3)]
    merged = merge([sure, *others], [1, 2, 3], labels, 64)
    for row in range(R):
        at = kept_ids(merged, row).index(labels[row])
        assert entry_logprobs(merged, row)[at] == pytest.approx(merged.label_logprobs[row], abs=1e-6)


def test_a_single_teacher_comes_back_as_it_is() -> None:
    labels = make_labels(64)
    part = make_teacher(1, labels, k=9, vocab=64)
    assert merge([part], [0.3], labels, 64) is part


def test_a_teacher_merged_with_itself_keeps_its_entries() -> None:
    """A distribution is the average of itself, whatever the weights."""
    labels = make_labels(64)
    part = make_teacher(1, labels, k=9, vocab=64, vary=False)
    merged = merge([part, part, part], [1, 5, 2], labels, 64)
    for name in ("tail_logprobs", "label_logprobs"):
        assert np.allclose(getattr(merged, name), getattr(part, name), rtol=1e-6)
    for row in range(R):
        assert dict(zip(kept_ids(merged, row), entry_logprobs(merged, row), strict=True)) == pytest.approx(
            dict(zip(kept_ids(part, row), entry_logprobs(part, row), strict=True)), rel=1e-6
        )


def test_whole_distributions_merge_to_a_whole_one() -> None:
    labels = make_labels(64)
    parts = [make_teacher(seed, labels, k=64, vocab=64, vary=False) for seed in (1, 2, 3)]
    merged = merge(parts, [1, 1, 2], labels, 64)
    assert np.isneginf(merged.tail_logprobs).all()
    assert (merged.entry_counts == 64).all()
    # One whole distribution is enough to make the union the vocabulary.
    merged = merge([parts[0], make_teacher(4, labels, k=3, vocab=64)], [1, 1], labels, 64)
    assert np.isneginf(merged.tail_logprobs).all() and np.isfinite(merged.entry_logprobs).all()


def test_a_tail_without_mass_counts_nothing() -> None:
    """Both teachers' suppressed ids are in no record; what one suppresses comes from the other alone."""
    labels = make_labels(64)
    first, second = (
        replace(
            part,
            entry_logprobs=np.full(len(part.entry_ids), -np.log(3), np.float32),
            tail_logprobs=np.full(R, -np.inf, np.float32),
            label_logprobs=np.full(R, -np.inf, np.float32),
        )
        for part in (make_teacher(seed, labels, k=3, vocab=64, vary=False) for seed in (1, 2))
    )
    merged = merge([first, second], [1, 3], labels, 64)
    assert np.isneginf(merged.tail_logprobs).all() and np.isneginf(merged.label_logprobs).all()
    assert np.isfinite(merged.entry_logprobs).all()
    both = np.exp(merged.entry_logprobs)
    assert np.isclose(both[:, None], np.array([1, 3, 4]) / 12).any(1).all()


def test_mass_below_what_floats_hold_stays_finite() -> None:
    labels = make_labels(64)
    parts = [make_teacher(seed, labels, k=3, vocab=64) for seed in (1, 2)]
    tiny = [
        replace(part, entry_logprobs=part.entry_logprobs - 50_000, tail_logprobs=part.tail_logprobs - 60_000)
        for part in parts
    ]
    merged = merge(tiny, [1, 1], labels, 64)
    assert np.isfinite(merged.entry_logprobs).all() and np.isfinite(merged.tail_logprobs).all()


def test_what_a_teacher_does_not_know_stays_unknown() -> None:
    labels = make_labels(64)
    known, unknown = (make_teacher(seed, labels, k=3, vocab=64) for seed in (1, 2))
    gaps = unknown.label_logprobs.copy()
    gaps[::2] = np.nan
    merged = merge([known, replace(unknown, label_logprobs=gaps)], [1, 1], labels, 64)
    assert np.isnan(merged.label_logprobs[::2]).all() and np.isfinite(merged.label_logprobs[1::2]).all()
    assert np.isnan(merged.entropies).all()
    assert np.isfinite(merged.entry_logprobs).all() and not np.isnan(merged.tail_logprobs).any()
    expected = mean([known, replace(unknown, label_logprobs=gaps)], [1, 1], labels, 64)
    for row in range(R):
        assert np.allclose(np.exp(entry_logprobs(merged, row)), expected[row, kept_ids(merged, row)], atol=1e-6)


def test_blocks_are_invisible(monkeypatch: pytest.MonkeyPatch) -> None:
    labels = make_labels(64)
    parts = [make_teacher(seed, labels, k=9, vocab=64) for seed in (1, 2, 3)]
    whole = merge(parts, [1, 2, 3], labels, 64)
    for size in (1, 20, 50):
        monkeypatch.setattr("distill.merge._BLOCK_ENTRIES", size)
        merged = merge(parts, [1, 2, 3], labels, 64)
        entropies = np.zeros(R, np.float32)  # unknown: NaN is not equal to itself
        assert same_records(replace(merged, entropies=entropies), replace(whole, entropies=entropies))


def test_mistakes_are_noticed() -> None:
    labels = make_labels(64)
    part = make_teacher(1, labels, k=3, vocab=64)
    with pytest.raises(AssertionError, match="weight"):
        merge([part, part], [1, 0], labels, 64)
    with pytest.raises(AssertionError, match="different targets"):
        merge([part, part], [1, 1], labels[1:], 64)
