"""The stream of steps: order as a function of seed and epoch, exact continuation, honest padding."""

import hashlib
import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from distill.cache import Admissions, Located, Source, build_shard
from distill.dataloader import (
    Batch,
    CachedSamples,
    OptimizerStep,
    TeacherShare,
    load_steps,
    pad,
)
from distill.errors import InputError, MachineError
from distill.fused import dense_loss
from distill.losses import LOSSES, build_loss
from distill.merge import merge
from distill.records import concat, select
from distill.steps import Segment, StepPlan, epoch_order
from distill.types import Records, TokenizedSample
from tests.helpers import VOCAB, make_records, make_samples, make_spec


class StubSource:
    """A teacher's records in memory, with the interface of the cache's sources."""

    def __init__(self, samples: list[TokenizedSample], *, seed: int = 1, k: int = 5) -> None:
        self.spec = make_spec(top_k=k)
        self.records = {s.key: make_records([s], k=k, seed=seed + i) for i, s in enumerate(samples)}
        self.shards = {s.key: Located(f"shard {i % 3}", i // 3) for i, s in enumerate(samples)}
        self.reads: list[Located] = []

    def read(self, sample: TokenizedSample, located: Located) -> Records:
        assert located == self.shards[sample.key]
        self.reads.append(located)
        return self.records[sample.key]

    def share(self, weight: float = 1.0) -> TeacherShare:
        return TeacherShare(self, weight, self.shards)


@pytest.fixture
def cached() -> CachedSamples:
    """Three shards, and two samples that occur twice."""
    samples = make_samples(30)
    return CachedSamples([StubSource(samples).share()], [*samples, samples[0], samples[15]])


def open_cache(folder: Path, admissions: Admissions, *, collect: bool = False) -> CachedSamples:
    """The same from the disk."""
    spec, samples = make_spec(), make_samples(30)
    source = Source.open(folder, spec, admissions)
    if collect:
        source.own.prepare()
        for part in (samples[:10], samples[10:20], samples[20:]):
            image = build_shard(part, make_records(part), layer=spec.describe(), vocab_size=VOCAB)
            image.seal(source.own.folder)
            source.own.register(image.info)
    return CachedSamples([TeacherShare(source, 1.0, source.locate(samples))], [*samples, samples[0], samples[15]])


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
    (teacher,) = cached.teachers
    expected = concat([teacher.source.read(s, teacher.located[s.key]) for s in samples])
    assert torch.equal(batch.targets.entry_ids.flatten(), torch.from_numpy(expected.entry_ids))
    assert torch.equal(batch.label_logprobs, torch.from_numpy(expected.label_logprobs))


def test_a_batch_is_read_shard_by_shard(cached: CachedSamples) -> None:
    cached.batch([5, 3, 1, 2, 0, 4, 29, 28])
    source = cached.teachers[0].source
    assert isinstance(source, StubSource)
    places = [(place.shard, place.row) for place in source.reads]
    assert places == sorted(places) and len(places) == 8


def digest(steps: Iterable[OptimizerStep]) -> str:
    """SHA-256 of everything that a training sees of a stream."""
    sha = hashlib.sha256()
    for step in steps:
        for batch in step.micro_batches:
            targets = batch.targets
            for tensor in (
                *(batch.tokens.token_ids, batch.tokens.labels, batch.tokens.predict_rows, batch.tokens.samples),
                *(targets.entry_ids, targets.entry_logprobs, targets.tail_logprobs, batch.label_logprobs),
            ):
                sha.update(tensor.numpy().tobytes())
            positions = batch.tokens.position_ids
            sha.update(b"" if positions is None else positions.numpy().tobytes())
    return sha.hexdigest()


READERS = (0, 1, 4)


@pytest.mark.parametrize("budget", [{}, {"max_tokens": 30}, {"row_tokens": 24}, {"row_tokens": 12, "max_tokens": 40}])
def test_a3_any_number_of_readers_sees_the_same_stream(tmp_path: Path, budget: dict[str, int]) -> None:
    """Report A3: loader workers read wrong rows. Read by hand, then by none, one and four threads."""
    admissions = Admissions()
    cached = open_cache(tmp_path, admissions, collect=True)
    plan = plan_of(list(cached.samples), **budget)
    by_hand = [
        OptimizerStep(number, tuple(cached.batch(rows, plan.begins_row(rows)) for rows in batches), 0, 0)
        for number, batches in plan.steps()
    ]
    assert budget.keys() != {"row_tokens"} or any(b.tokens.position_ids is not None for b in by_hand[0].micro_batches)
    for readers in READERS:
        assert digest(load_steps(cached, plan, first=1, readers=readers)) == digest(by_hand)


def test_many_streams_share_one_cache(tmp_path: Path) -> None:
    """Shards are closed and opened under the readers' hands, and none reads another one's rows."""
    admissions = Admissions()
    cached = open_cache(tmp_path, admissions, collect=True)
    plan = plan_of(list(cached.samples))
    expected = digest(load_steps(cached, plan, first=1, readers=0))
    (share,) = cached.teachers
    assert isinstance(share.source, Source)
    share.source.own._readers._most = 1
    with ThreadPoolExecutor(4) as streams:
        digests = streams.map(lambda _: digest(load_steps(cached, plan, first=1, readers=3)), range(8))
        assert set(digests) == {expected}


def test_a20_a_resumed_epoch_keeps_its_order(cached: CachedSamples) -> None:
    """Report A20: 64 samples, seed 5, killed at step 3 of epoch 2; the resumed epoch had another order."""
    samples = [*cached.samples, *cached.samples]
    data, plan = CachedSamples(cached.teachers, samples), plan_of(samples, batch_size=4)
    assert len(samples) == 64 and plan.steps_per_epoch == 8
    whole = list(load_steps(data, plan, first=1))
    for readers in READERS:
        assert digest(load_steps(data, plan, first=8 + 3, readers=readers)) == digest(whole[8 + 3 - 1 :])


@pytest.mark.parametrize("readers", READERS)
def test_a_failure_while_reading_ahead_reaches_the_consumer(tmp_path: Path, readers: int) -> None:
    cached = open_cache(tmp_path, Admissions(), collect=True)
    shard = next(tmp_path.glob("*/*.h5"))
    shard.write_bytes(shard.read_bytes()[:-1] + b"?")
    with pytest.raises(InputError, match=shard.name):
        list(load_steps(cached, plan_of(list(cached.samples)), first=1, readers=readers))
    assert not prefetching()


def test_a_failure_comes_in_the_place_of_its_step(cached: CachedSamples, monkeypatch: pytest.MonkeyPatch) -> None:
    """As it was raised, after all steps before it, and at once though others are being read."""
    plan = plan_of(list(cached.samples))
    batches = dict(plan.steps())
    error, read = InputError("a shard: damaged"), CachedSamples.batch

    def failing(self: CachedSamples, rows: list[int], begins_row: None) -> Batch:
        if rows in batches[5]:
            raise error
        return read(self, rows, begins_row)

    monkeypatch.setattr(CachedSamples, "batch", failing)
    for readers in READERS:
        numbers: list[int] = []
        with pytest.raises(InputError) as caught:
            for step in load_steps(cached, plan, first=1, readers=readers):
                numbers.append(step.number)
        assert caught.value is error and numbers == [1, 2, 3, 4]
        assert not prefetching()


def prefetching() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("prefetch")]


@pytest.mark.parametrize("readers", [1, 4])
def test_no_thread_outlives_the_loop(cached: CachedSamples, readers: int) -> None:
    plan = plan_of(list(cached.samples))
    for _ in load_steps(cached, plan, first=1, readers=readers):
        assert 1 <= len(prefetching()) <= readers
        break
    assert not prefetching()
    with pytest.raises(KeyboardInterrupt):
        for _ in load_steps(cached, plan, first=1, readers=readers):
            raise KeyboardInterrupt
    assert not prefetching()
    list(load_steps(cached, plan, first=1, readers=readers))
    assert not prefetching()


@pytest.mark.parametrize("readers", [1, 3])
def test_no_more_is_read_ahead_than_allowed(
    cached: CachedSamples, monkeypatch: pytest.MonkeyPatch, readers: int
) -> None:
    plan = plan_of(list(cached.samples), batch_size=1, grad_accum_batches=1, num_epochs=1)
    begun = Counter[str]()
    read = CachedSamples.batch

    def counting(self: CachedSamples, rows: list[int], begins_row: None) -> Batch:
        begun["batches"] += 1
        return read(self, rows, begins_row)

    monkeypatch.setattr(CachedSamples, "batch", counting)
    for step in load_steps(cached, plan, first=1, readers=readers):
        assert begun["batches"] <= step.number + 4 * readers
    monkeypatch.setattr("distill.dataloader._AHEAD_BYTES", 0)
    begun.clear()
    for step in load_steps(cached, plan, first=1, readers=readers):
        assert begun["batches"] <= step.number + 1, "of large steps only the next one"


def test_a_read_that_never_ends_is_an_error(cached: CachedSamples, monkeypatch: pytest.MonkeyPatch) -> None:
    forever = threading.Event()

    def stuck(*arguments: object) -> Batch:
        forever.wait(60)
        raise AssertionError

    monkeypatch.setattr(CachedSamples, "batch", stuck)
    monkeypatch.setattr("distill.dataloader._READ_TIMEOUT", 0.05)
    try:
        with pytest.raises(MachineError, match="step 1 could not be read"):
            next(load_steps(cached, plan_of(list(cached.samples)), first=1))
    finally:
        forever.set()


def test_a_damaged_shard_is_set_aside_once(tmp_path: Path) -> None:
    """All readers come upon it; each says what is wrong, and the file is kept outside of the dataset."""
    cached = open_cache(tmp_path / "dataset" / "train", Admissions(tmp_path), collect=True)
    shard = next(tmp_path.glob("dataset/train/*/*.h5"))
    shard.write_bytes(shard.read_bytes()[:-1] + b"?")
    (share,) = cached.teachers
    bad = [sample for sample in cached.samples if share.located[sample.key].shard == shard.stem]

    def message(sample: TokenizedSample) -> str:
        with pytest.raises(InputError, match=f"{shard.name}: damaged shard") as caught:
            share.read([sample])
        return str(caught.value)

    with ThreadPoolExecutor(8) as readers:
        messages = list(readers.map(message, bad))
    assert len(messages) >= 10 and all("set aside" in message for message in messages)
    assert not shard.exists() and list((tmp_path / "damaged").rglob(shard.name))


# -- several teachers -------------------------------------------------------------------------------------------------


def several_teachers() -> CachedSamples:
    """Teachers with different K: the first scored all but 3, 4 and 5, the second 0 to 5, the third every second one."""
    samples = make_samples(12)
    scored = ([*samples[:3], *samples[6:]], samples[:6], samples[::2])
    shares = [StubSource(part, seed=9 * i, k=5 + i).share(i + 1.0) for i, part in enumerate(scored)]
    return CachedSamples(shares, samples)


@pytest.mark.parametrize("rows", [range(12), [7, 0, 5, 2, 11, 0], [1], [7, 9, 11]])
def test_each_sample_is_merged_from_the_teachers_that_scored_it(rows: Sequence[int]) -> None:
    data = several_teachers()
    batch = data.batch(rows)
    samples = [data.samples[row] for row in rows]
    expected = []
    for sample in samples:
        shares = [share for share in data.teachers if sample.key in share.located]
        parts = [share.source.read(sample, share.located[sample.key]) for share in shares]
        labels = sample.token_ids[sample.targets]
        expected.append(merge(parts, [share.weight for share in shares], labels, VOCAB))
    records = concat(expected)
    padded = pad(records, batch.tokens.labels)
    for name in ("labels", "entry_ids", "entry_logprobs", "tail_logprobs"):
        assert torch.equal(getattr(batch.targets, name), getattr(padded, name))
    assert torch.equal(batch.label_logprobs, torch.from_numpy(records.label_logprobs))


def test_the_order_of_teachers_is_invisible() -> None:
    data = several_teachers()
    one, other = data.batch(range(12)), CachedSamples(data.teachers[::-1], data.samples).batch(range(12))
    assert torch.equal(one.targets.entry_ids, other.targets.entry_ids)
    assert torch.equal(one.targets.entry_logprobs, other.targets.entry_logprobs)


def test_a_sample_without_a_teacher_is_noticed() -> None:
    data = several_teachers()
    with pytest.raises(AssertionError, match="no teacher"):
        CachedSamples(data.teachers[1:2], data.samples).batch([7])


def test_unknown_values_never_reach_the_loss() -> None:
    """Imported caches don't know entropies and some labels' logprobs."""
    data = several_teachers()
    for share in data.teachers:
        assert isinstance(share.source, StubSource)
        for key, records in share.source.records.items():
            unknown = np.full(len(records), np.nan, np.float32)
            share.source.records[key] = replace(records, label_logprobs=unknown, entropies=unknown)
    batch = data.batch(range(12))
    assert batch.label_logprobs.isnan().all() and batch.targets.entropies.isnan().all()
    logits = torch.randn(len(batch.targets), VOCAB, generator=torch.Generator().manual_seed(0)).requires_grad_()
    for name in LOSSES:
        loss = dense_loss(logits, batch.targets, build_loss(name), scale=1.0)
        assert loss.isfinite() and torch.autograd.grad(loss, logits)[0].isfinite().all()


def test_one_teachers_records_are_not_touched(cached: CachedSamples, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distill.merge._merge", None)
    assert len(cached.batch([3, 4]).targets) > 0


# -- segments ---------------------------------------------------------------------------------------------------------


PINNED = [(1, [[1, 4], [2, 3]]), (2, [[6, 5], [0]]), (3, [[4, 2], [0, 6]]), (4, [[5, 3], [1]])]


def rounds_of(epochs: int, cuts: list[int], size: int) -> list[Segment]:
    parts = np.split(np.random.default_rng(1).permutation(size), cuts)
    return [Segment(rows, epoch, part) for epoch in range(epochs) for part, rows in enumerate(parts) if len(rows)]


def test_orders_from_before_there_were_segments_are_kept() -> None:
    plan = StepPlan(np.arange(1, 8), 2, 2, 2, "shuffle", 5)
    assert list(plan.steps(1)) == PINNED
    whole = replace(plan, segments=[Segment(np.arange(7), epoch) for epoch in range(2)])
    assert list(whole.steps(1)) == PINNED


@given(
    size=st.integers(1, 40),
    cuts=st.lists(st.integers(0, 40), max_size=4).map(sorted),
    batch_size=st.integers(1, 7),
    order=st.sampled_from(["shuffle", "sorted", "native"]),
)
def test_segments_are_trained_one_after_the_other(size: int, cuts: list[int], batch_size: int, order: str) -> None:
    segments = rounds_of(2, cuts, size)
    plan = StepPlan(np.arange(size), batch_size, 2, 2, order, 5, segments)
    steps = list(plan.steps())
    assert [number for number, _ in steps] == list(range(1, plan.total_steps + 1))
    for index, segment in enumerate(segments):
        numbers = plan.steps_of(index)
        assert {plan.segment_of(number) for number in numbers} == {index}
        own = list(plan.steps(numbers.start, numbers[-1]))
        assert own == steps[numbers.start - 1 : numbers[-1]]
        rows = [row for _, batches in own for batch in batches for row in batch]
        assert sorted(rows) == sorted(segment.rows)
        if order == "native":
            assert rows == segment.rows.tolist()
    assert sum(len(plan.steps_of(index)) for index in range(len(segments))) == plan.total_steps


def test_parts_and_epochs_are_shuffled_differently() -> None:
    rows = np.arange(100)
    segments = [Segment(rows[:50], 0, 0), Segment(rows[50:], 0, 1), Segment(rows[:50], 1, 0), Segment(rows[50:], 1, 1)]
    plan = StepPlan(rows, 50, 1, 2, "shuffle", 5, segments)
    orders = [tuple(np.array(batches[0]) % 50) for _, batches in plan.steps()]
    assert len(set(orders)) == 4


def test_a_segments_data_may_be_all_there_is() -> None:
    """Each round sees a cache that holds no other round's records; together they are one training without rounds."""
    samples = make_samples(20)
    segments = rounds_of(2, [6, 13], 20)
    plan = replace(plan_of(samples), num_epochs=2, segments=segments)
    source = StubSource(samples)
    whole = digest(load_steps(CachedSamples([source.share()], samples), plan, first=1))
    steps: list[OptimizerStep] = []
    for index, segment in enumerate(segments):
        keys = {samples[row].key for row in segment.rows}
        located = {key: place for key, place in source.shards.items() if key in keys}
        data = CachedSamples([TeacherShare(source, 1.0, located)], samples)
        numbers = plan.steps_of(index)
        steps += load_steps(data, plan, first=numbers.start, last=numbers[-1])
    assert [step.number for step in steps] == list(range(1, plan.total_steps + 1))
    assert digest(steps) == whole


def test_plans_that_lose_or_repeat_samples_are_refused() -> None:
    rows = np.arange(4)
    for segments in (
        [Segment(rows[:3], 0)],
        [Segment(rows, 0), Segment(rows[:1], 0, 1)],
        [Segment(rows, 0), Segment(rows, 1)],
        [Segment(rows, 0), Segment(rows[:0], 0, 1)],
    ):
        with pytest.raises(AssertionError):
            StepPlan(rows, 1, 1, 1, "native", 0, segments)


def test_nothing_is_left_to_do_after_the_last_step() -> None:
    plan = StepPlan(np.arange(4), 2, 1, 1, "native", 0)
    assert list(plan.steps(plan.total_steps + 1)) == []
    assert plan.steps_per_epoch == plan.total_steps == 2


# -- batches ----------------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(counts=st.lists(st.integers(1, 6), min_size=1, max_size=8))
def test_padding_repeats_the_first_id_without_mass(counts: list[int]) -> None:
    samples = make_samples(1)
    full = make_records(samples * 10, k=6)
    full = select(full, np.arange(len(counts)))
    keep = (np.arange(6) < np.array(counts)[:, None]).ravel()
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
