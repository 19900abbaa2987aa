"""The plan of steps: a function of seed and epoch, exact in its numbers, within its budgets, the same in any rounds."""

import itertools
import math
import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distill.parts import Parts, base_order
from distill.steps import Segment, StepPlan

ORDERS = ["shuffle", "sorted", "native"]


@st.composite
def plans(draw: st.DrawFn) -> StepPlan:
    """Any way of batching any text."""
    lengths = draw(st.lists(st.integers(1, 30), min_size=1, max_size=60))
    return StepPlan(
        lengths=np.array(lengths, np.int64),
        batch_size=draw(st.integers(1, 5)),
        grad_accum_batches=draw(st.integers(1, 4)),
        num_epochs=draw(st.integers(1, 3)),
        data_order=draw(st.sampled_from(ORDERS)),
        seed=draw(st.integers(0, 9)),
        max_tokens=draw(st.none() | st.integers(1, 120)),
        row_tokens=draw(st.none() | st.integers(30, 60)),
    )


def rows_of(plan: StepPlan, samples: list[int]) -> list[list[int]]:
    """The samples of each row of a micro-batch."""
    begins = plan.begins_row(samples)
    if begins is None:
        return [[sample] for sample in samples]
    assert begins[0]
    rows: list[list[int]] = []
    for sample, first in zip(samples, begins.tolist(), strict=True):
        rows += [[]] if first else []
        rows[-1].append(sample)
    return rows


@settings(deadline=None)
@given(plans())
def test_every_epoch_sees_every_sample_once_within_the_budget(plan: StepPlan) -> None:
    steps = list(plan.steps())
    assert [number for number, _ in steps] == list(range(1, plan.total_steps + 1))
    assert plan.total_steps == plan.steps_per_epoch * plan.num_epochs
    for epoch in range(plan.num_epochs):
        batches = [batch for number in plan.steps_of(epoch) for batch in steps[number - 1][1]]
        assert sorted(itertools.chain(*batches)) == list(range(len(plan.lengths)))
        for batch in batches:
            rows = [int(sum(plan.lengths[row])) for row in rows_of(plan, batch)]
            if plan.row_tokens is not None:
                assert max(rows) <= plan.row_tokens
            if plan.max_tokens is None:
                assert len(rows) <= plan.batch_size
            else:
                assert len(batch) == 1 or len(rows) * max(rows) <= plan.max_tokens
    assert all(0 < len(batches) <= plan.grad_accum_batches for _, batches in steps)


@settings(deadline=None)
@given(plans(), st.data())
def test_a_plan_started_anywhere_goes_on_as_the_whole_one(plan: StepPlan, data: st.DataObject) -> None:
    steps = list(plan.steps())
    first = data.draw(st.integers(1, plan.total_steps))
    last = data.draw(st.integers(first, plan.total_steps))
    assert list(replace(plan).steps(first, last)) == steps[first - 1 : last]
    assert {plan.segment_of(number) for number in plan.steps_of(0)} == {0}


@settings(deadline=None)
@given(plans(), st.sets(st.integers(1, 20), max_size=3), st.sampled_from([1, "all"]))
def test_rounds_leave_the_number_of_steps_and_what_is_together(
    plan: StepPlan, cuts: set[int], per_round: int | str
) -> None:
    """Budgets of tokens and packing, too, have the same steps however the cap cuts the text."""
    ends = [cut * plan.units_per_step for cut in sorted(cuts) if cut * plan.units_per_step < len(plan.units)]
    order = base_order(len(plan.units), plan.data_order, plan.seed)
    parts = Parts(order, (*ends, len(order)), plan.units_per_step, plan.num_epochs, per_round)
    in_rounds = replace(plan, segments=parts.segments())
    assert in_rounds.total_steps == plan.total_steps
    for visit in parts.visits():
        assert visit.last is not None
        seen = sorted(
            sample
            for _, batches in in_rounds.steps(visit.first, visit.last)
            for batch in batches
            for row in rows_of(plan, batch)
            for sample in row
        )
        assert seen == sorted(np.tile(plan.units.of(parts.rows(visit.part)), len(visit.epochs)).tolist())


def test_micro_batches_take_as_many_samples_as_fit() -> None:
    lengths = np.array([3, 4, 2, 9, 1, 1, 1, 20, 2])
    plan = StepPlan(lengths, 99, 2, 1, "native", 0, max_tokens=12)
    assert [batches for _, batches in plan.steps()] == [[[0, 1, 2], [3]], [[4, 5, 6], [7]], [[8]]]


def test_a_row_takes_what_fits_best() -> None:
    lengths = np.array([6, 5, 3, 4, 1, 10])
    plan = StepPlan(lengths, 2, 1, 1, "native", 0, row_tokens=10)
    ((_, (batch,)), (_, (last,))) = plan.steps()
    assert rows_of(plan, batch) == [[0, 2, 4], [1, 3]]
    assert rows_of(plan, last) == [[5]]


def test_a_budget_of_tokens_is_one_of_rows_when_packed() -> None:
    plan = StepPlan(np.full(30, 10), 99, 1, 1, "native", 0, max_tokens=45, row_tokens=20)
    assert [len(rows_of(plan, batch)) for _, (batch,) in plan.steps()] == [2] * 7 + [1]
    short = StepPlan(plan.lengths, 99, 1, 1, "native", 0, max_tokens=15, row_tokens=20)
    assert [rows_of(short, batch) for _, (batch,) in short.steps()] == [[[sample]] for sample in range(30)]


def test_packing_wastes_little_and_keeps_neighbours_near() -> None:
    lengths = np.random.default_rng(0).integers(40, 400, 4000)
    plan = StepPlan(lengths, 4, 1, 1, "native", 0, row_tokens=1024)
    rows = [plan.units.of(np.array([unit])) for unit in range(len(plan.units))]
    assert lengths.sum() / (len(rows) * 1024) > 0.97
    assert max(int(row.max() - row.min()) for row in rows) < 1000


def test_epochs_move_whole_units() -> None:
    """What shares a row does so in every epoch; which rows share a step changes."""
    plan = StepPlan(np.random.default_rng(0).integers(1, 30, 200), 3, 2, 2, "shuffle", 1, row_tokens=60)
    epochs = [
        [tuple(row) for number in plan.steps_of(epoch) for _, batches in plan.steps(number, number)
         for batch in batches for row in rows_of(plan, batch)]
        for epoch in range(2)
    ]  # fmt: skip
    assert sorted(epochs[0]) == sorted(epochs[1]) and epochs[0] != epochs[1]


def test_sorted_batches_go_from_long_to_short() -> None:
    lengths = np.random.default_rng(0).integers(1, 30, 100)
    plan = StepPlan(lengths, 1, 1, 1, "sorted", 0, max_tokens=64)
    longest = [max(lengths[batch]) for _, (batch,) in plan.steps()]
    assert longest == sorted(longest, reverse=True)
    padded = sum(len(batch) * max(lengths[batch]) for _, (batch,) in plan.steps())
    assert lengths.sum() / padded > 0.9


@pytest.mark.parametrize("budget", [{"max_tokens": 8192}, {"row_tokens": 2048}, {}])
def test_a_million_samples_are_planned_in_seconds(budget: dict[str, int]) -> None:
    lengths = np.random.default_rng(0).integers(20, 600, 1_000_000)
    plan = StepPlan(lengths, 8, 4, 3, "shuffle", 0, **budget)
    began = time.process_time()
    assert plan.total_steps == math.ceil(len(plan.units) / plan.units_per_step) * 3
    next(plan.steps(plan.total_steps))
    assert time.process_time() - began < 10


def test_a_step_belongs_to_one_segment() -> None:
    rows = np.arange(5)
    plan = StepPlan(np.ones(5, np.int64), 2, 1, 1, "native", 0, [Segment(rows[:3], 0), Segment(rows[3:], 0, 1)])
    assert [batches for _, batches in plan.steps()] == [[[0, 1]], [[2]], [[3, 4]]]
