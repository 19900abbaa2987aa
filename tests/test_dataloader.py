"""The stream of steps: order as a function of seed and epoch, exact continuation, honest padding."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from distill.cache import Layer, build_shard
from distill.collate import collate, token_batches
from distill.dataloader import CachedSamples, StepPlan, epoch_order, load_steps, pad
from distill.records import concat, select
from distill.types import TokenizedSample
from tests.helpers import VOCAB, make_records, make_samples, make_spec


@pytest.fixture
def cached(tmp_path: Path) -> CachedSamples:
    """Three shards, and two samples that occur twice."""
    spec = make_spec()
    layer = Layer.open(tmp_path, spec)
    layer.prepare()
    samples = make_samples(30)
    for part in (samples[:10], samples[10:20], samples[20:]):
        image = build_shard(part, make_records(part), layer=spec.describe(), vocab_size=VOCAB)
        image.seal(layer.folder)
        layer.register(image.info)
    return CachedSamples(layer, [*samples, samples[0], samples[15]], layer.locate(samples))


def plan_of(samples: list[TokenizedSample], **changes: object) -> StepPlan:
    lengths = np.array([len(s.token_ids) for s in samples], np.int64)
    fields = {"batch_size": 3, "grad_accum_batches": 2, "num_epochs": 3, "data_order": "shuffle", "seed": 5}
    return StepPlan(lengths, **(fields | changes))  # type: ignore[arg-type]


@given(
    samples=st.integers(1, 40),
    batch_size=st.integers(1, 7),
    accumulate=st.integers(1, 4),
    order=st.sampled_from(["shuffle", "sorted", "native"]),
)
def test_every_epoch_sees_every_sample_once(samples: int, batch_size: int, accumulate: int, order: str) -> None:
    plan = plan_of(make_samples(samples), batch_size=batch_size, grad_accum_batches=accumulate, data_order=order)
    steps = list(plan.steps(1))
    assert [number for number, _ in steps] == list(range(1, plan.total_steps + 1))
    for epoch in range(3):
        of_epoch = steps[epoch * plan.steps_per_epoch : (epoch + 1) * plan.steps_per_epoch]
        rows = [row for _, batches in of_epoch for batch in batches for row in batch]
        assert sorted(rows) == list(range(samples))
        assert all(0 < len(batch) <= batch_size for _, batches in of_epoch for batch in batches)


def test_orders() -> None:
    lengths = np.array([3, 9, 5, 9])
    assert epoch_order(lengths, "native", seed=0, epoch=1).tolist() == [0, 1, 2, 3]
    assert epoch_order(lengths, "sorted", seed=0, epoch=1).tolist() == [1, 3, 2, 0]
    big = np.ones(100, np.int64)
    first, second = (epoch_order(big, "shuffle", seed=0, epoch=epoch).tolist() for epoch in (0, 1))
    assert first != second
    assert epoch_order(big, "shuffle", seed=0, epoch=0).tolist() == first
    assert epoch_order(big, "shuffle", seed=1, epoch=0).tolist() != first


def test_a_stream_started_at_step_n_goes_on_exactly(cached: CachedSamples) -> None:
    """Report A20: the order after a resume was another."""
    plan = plan_of(list(cached.samples))
    whole = list(load_steps(cached, plan, first=1))
    assert [step.number for step in whole] == list(range(1, plan.total_steps + 1))
    for first in (2, plan.steps_per_epoch + 1, plan.total_steps):
        for a, b in zip(whole[first - 1 :], load_steps(cached, plan, first=first), strict=True):
            assert a.number == b.number and a.num_targets == b.num_targets
            for x, y in zip(a.micro_batches, b.micro_batches, strict=True):
                assert torch.equal(x.tokens.token_ids, y.tokens.token_ids)
                assert torch.equal(x.targets.entry_logprobs, y.targets.entry_logprobs)


def test_batches_hold_each_sample_and_its_own_records(cached: CachedSamples) -> None:
    batch = cached.batch([31, 0, 7, 29])
    samples = [cached.samples[row] for row in (31, 0, 7, 29)]
    assert torch.equal(
        batch.tokens.labels, torch.cat([torch.from_numpy(s.token_ids[s.targets]) for s in samples]).long()
    )
    expected = concat([cached.layer.read(s, cached.located[s.key]) for s in samples])
    assert torch.equal(batch.targets.entry_ids.flatten(), torch.from_numpy(expected.entry_ids))
    assert torch.equal(batch.label_logprobs, torch.from_numpy(expected.label_logprobs))


def test_a_failure_while_reading_ahead_reaches_the_consumer(cached: CachedSamples) -> None:
    (cached.layer.folder / f"{next(iter(cached.layer.shards))}.h5").unlink()
    with pytest.raises(ValueError, match="damaged shard"):
        list(load_steps(cached, plan_of(list(cached.samples)), first=1))


def test_the_token_before_a_target_predicts_it() -> None:
    """The only shift: a row of hidden states predicts the token after it."""
    samples = make_samples(9)
    batch = collate(samples)
    flat = batch.token_ids.flatten()
    assert torch.equal(flat[batch.predict_rows + 1], batch.labels)
    assert batch.token_ids.shape == (9, max(len(s.token_ids) for s in samples))


@settings(deadline=None)
@given(counts=st.lists(st.integers(1, 6), min_size=1, max_size=8))
def test_padding_repeats_the_first_id_without_mass(counts: list[int]) -> None:
    samples = make_samples(1)
    full = make_records(samples * 10, k=6)
    full = select(full, np.arange(len(counts)))
    keep = (np.arange(6) < np.array(counts)[:, None]).ravel()
    from dataclasses import replace

    ragged = replace(
        full,
        entry_counts=np.array(counts),
        entry_ids=full.entry_ids[keep],
        entry_logprobs=full.entry_logprobs[keep],
    )
    padded = pad(ragged, torch.zeros(len(counts), dtype=torch.int64))
    assert padded.entry_ids.shape == (len(counts), max(counts))
    for row, count in enumerate(counts):
        assert (padded.entry_ids[row, count:] == padded.entry_ids[row, 0]).all()
        assert (padded.entry_logprobs[row, count:] == -torch.inf).all()
        assert torch.isfinite(padded.entry_logprobs[row, :count]).all()


@given(st.lists(st.integers(1, 50), min_size=1, max_size=60), st.integers(1, 200))
def test_token_batches_keep_the_budget(lengths: list[int], budget: int) -> None:
    batches = token_batches(np.array(lengths), budget)
    assert sorted(row for batch in batches for row in batch) == list(range(len(lengths)))
    for batch in batches:
        longest = max(lengths[row] for row in batch)
        assert len(batch) == 1 or len(batch) * longest <= budget
