"""Planning and the size cap."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distill.cache import build_shard
from distill.collect import Budget, plan_bytes, plan_shards
from distill.errors import InputError
from tests.helpers import VOCAB, make_records, make_samples, make_spec


@given(count=st.integers(0, 60), shard_targets=st.integers(1, 200))
def test_a_plan_holds_every_sample_once_in_order(count: int, shard_targets: int) -> None:
    samples = make_samples(count)
    plan = plan_shards(samples, shard_targets=shard_targets, top_k=5, vocab_size=VOCAB)
    assert [sample.key for shard in plan for sample in shard] == [sample.key for sample in samples]
    for shard in plan:
        assert len(shard) == 1 or sum(len(sample.targets) for sample in shard) <= shard_targets


def test_more_samples_at_the_end_change_no_earlier_shard() -> None:
    samples = make_samples(50)
    few, many = (plan_shards(s, shard_targets=40, top_k=5, vocab_size=VOCAB) for s in (samples[:30], samples))
    assert [[s.key for s in shard] for shard in few[:-1]] == [[s.key for s in shard] for shard in many[: len(few) - 1]]


def test_a_shard_never_outgrows_what_is_built_in_memory() -> None:
    samples = make_samples(40)
    plan = plan_shards(samples, shard_targets=10**9, top_k=1_000_000, vocab_size=1 << 20)
    assert len(plan) > 1


@pytest.mark.parametrize("seed", range(5))
def test_planned_bytes_are_never_exceeded(seed: int) -> None:
    """Not even by distributions that don't compress."""
    samples = make_samples(int(np.random.default_rng(seed).integers(1, 200)), seed=seed)
    plan = plan_shards(samples, shard_targets=300, top_k=40, vocab_size=VOCAB)
    spec = make_spec(top_k=40).describe()
    images = [build_shard(s, make_records(list(s), k=40, seed=seed), layer=spec, vocab_size=VOCAB) for s in plan]
    assert sum(image.disk_bytes for image in images) <= plan_bytes(plan, top_k=40, vocab_size=VOCAB)


def test_a_budget_counts_a_shard_once_and_refuses_beyond_the_cap() -> None:
    budget = Budget(limit=100, used=40)
    budget.take("a", 30)
    budget.take("a", 30)  # asked again by the worker that redoes it
    budget.take("b", 30)
    with pytest.raises(InputError, match="max_cache_size_gb"):
        budget.take("c", 1)
    budget.take("b", 20)
    budget.take("c", 10)
