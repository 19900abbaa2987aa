"""Planning and the size cap."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distill.cache import build_shard
from distill.collect import Budget, default_threads, plan_bytes, plan_shards
from distill.errors import InputError
from tests.helpers import VOCAB, make_records, make_samples, make_spec


@given(count=st.integers(0, 60), shard_targets=st.integers(1, 200))
def test_a_plan_holds_every_sample_once_in_order(count: int, shard_targets: int) -> None:
    samples = make_samples(count)
    plan = plan_shards(samples, make_spec(), shard_targets)
    assert [sample.key for shard in plan for sample in shard] == [sample.key for sample in samples]
    for shard in plan:
        assert len(shard) == 1 or sum(len(sample.targets) for sample in shard) <= shard_targets


def test_more_samples_at_the_end_change_no_earlier_shard() -> None:
    samples = make_samples(50)
    few, many = (plan_shards(s, make_spec(), 40) for s in (samples[:30], samples))
    assert [[s.key for s in shard] for shard in few[:-1]] == [[s.key for s in shard] for shard in many[: len(few) - 1]]


def test_a_shard_never_outgrows_what_is_built_in_memory() -> None:
    samples = make_samples(40)
    plan = plan_shards(samples, make_spec(top_k=1_000_000, vocab_size=1 << 20), 10**9)
    assert len(plan) > 1


@pytest.mark.parametrize("seed", range(5))
def test_planned_bytes_are_never_exceeded(seed: int) -> None:
    """Not even by distributions that don't compress."""
    samples = make_samples(int(np.random.default_rng(seed).integers(1, 200)), seed=seed)
    spec = make_spec(top_k=40)
    plan = plan_shards(samples, spec, 300)
    records = [make_records(list(s), k=40, seed=seed) for s in plan]
    images = [build_shard(s, r, layer=spec.describe(), vocab_size=VOCAB) for s, r in zip(plan, records, strict=True)]
    assert sum(image.disk_bytes for image in images) <= plan_bytes(plan, spec)


def test_a_budget_counts_a_shard_once_and_refuses_beyond_the_cap() -> None:
    budget, here, there = Budget(limit=100, used=40), Path("train/layer"), Path("validation/layer")
    budget.take(here, "a", 30)
    budget.take(here, "a", 30)  # asked again by the worker that redoes it
    budget.take(there, "a", 30)  # the same samples in another split are another file
    with pytest.raises(InputError, match="max_cache_size_gb"):
        budget.take(here, "c", 1)
    assert not budget.try_take(here, "c", 1)
    budget.take(there, "a", 20)
    budget.take(here, "c", 10)
    assert budget.left == 0
    budget.give_back(5)
    assert budget.try_take(here, "d", 5)


@pytest.mark.parametrize(("said", "threads"), [(None, 4), ("", 4), ("2", 2), ("16", 4), ("0", 4), ("4,2", 4)])
def test_threads_are_a_share_of_the_processors(monkeypatch: pytest.MonkeyPatch, said: str | None, threads: int) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    if said is None:
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    else:
        monkeypatch.setenv("OMP_NUM_THREADS", said)
    assert default_threads(2) == threads
