"""Parts: every sample the planned number of times, whatever the cap cut, and the same number of steps."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distill.parts import Parts, base_order, part_end
from distill.steps import StepPlan


@st.composite
def cut_texts(draw: st.DrawFn) -> tuple[int, int, int, list[int]]:
    """(samples, samples a step, epochs, ends of the parts)."""
    rows, per_step, epochs = draw(st.integers(1, 60)), draw(st.integers(1, 7)), draw(st.integers(1, 4))
    whole = rows // per_step
    inner = draw(st.sets(st.integers(1, max(whole - 1, 1)), max_size=5)) if whole > 1 else set()
    return rows, per_step, epochs, [*sorted(step * per_step for step in inner if step * per_step < rows), rows]


@settings(deadline=None)
@given(cut_texts(), st.sampled_from([1, "all"]))
def test_every_sample_is_trained_once_an_epoch(text: tuple[int, int, int, list[int]], per_round: int | str) -> None:
    rows, per_step, epochs, ends = text
    parts = Parts(base_order(rows, "shuffle", 3), tuple(ends), per_step, epochs, per_round)
    plan = StepPlan(np.ones(rows, np.int64), per_step, 1, epochs, "shuffle", 3, parts.segments())
    assert plan.total_steps == math.ceil(rows / per_step) * epochs
    seen = np.zeros(rows, np.int64)
    for _, micro_batches in plan.steps():
        for batch in micro_batches:
            seen[batch] += 1
    assert (seen == epochs).all()
    visits = list(parts.visits())
    assert [visit.first for visit in visits] == [1, *(visit.last + 1 for visit in visits[:-1] if visit.last)]
    assert visits[-1].last == plan.total_steps
    for visit in visits:
        assert visit.last is not None
        trained = {row for _, batches in plan.steps(visit.first, visit.last) for batch in batches for row in batch}
        assert trained == set(parts.rows(visit.part).tolist())


@given(cut_texts(), st.sampled_from([1, "all"]))
def test_what_is_known_of_a_plan_never_changes(text: tuple[int, int, int, list[int]], per_round: int | str) -> None:
    """A start that knows fewer parts trains the same steps up to the end of those."""
    rows, per_step, epochs, ends = text
    whole = Parts(base_order(rows, "shuffle", 3), tuple(ends), per_step, epochs, per_round)
    for known in range(len(ends)):
        some = Parts(whole.order, tuple(ends[:known]), per_step, epochs, per_round)
        *visits, unknown = some.visits()
        assert unknown.last is None
        assert visits == list(whole.visits())[: len(visits)]
        assert len(some.segments()) >= len(visits)
        for mine, theirs in zip(some.segments(), whole.segments(), strict=False):
            if mine.part >= known:
                break
            assert (mine.rows == theirs.rows).all()
            assert (mine.epoch, mine.part) == (theirs.epoch, theirs.part)


def test_one_part_is_a_training_without_rounds() -> None:
    parts = Parts(base_order(11, "shuffle", 0), (11,), 4, 2, 1)
    plain = StepPlan(np.ones(11, np.int64), 2, 2, 2, "shuffle", 0)
    in_rounds = StepPlan(np.ones(11, np.int64), 2, 2, 2, "shuffle", 0, parts.segments())
    assert list(plain.steps()) == list(in_rounds.steps())


def test_every_other_epoch_goes_backwards() -> None:
    parts = Parts(base_order(12, "native", 0), (4, 8, 12), 2, 3, 1)
    assert [(visit.part, visit.epochs) for visit in parts.visits()] == [
        (0, (0,)), (1, (0,)), (2, (0,)), (2, (1,)), (1, (1,)), (0, (1,)), (0, (2,)), (1, (2,)), (2, (2,)),
    ]  # fmt: skip
    all_at_once = Parts(parts.order, parts.ends, 2, 3, "all")
    assert [(visit.part, visit.epochs) for visit in all_at_once.visits()] == [
        (0, (0, 1, 2)), (1, (0, 1, 2)), (2, (0, 1, 2)),
    ]  # fmt: skip


def test_the_visit_after_a_step() -> None:
    parts = Parts(base_order(12, "native", 0), (4, 8), 2, 1, 1)
    assert [parts.visit_after(step).part for step in range(5)] == [0, 0, 1, 1, 2]
    complete = Parts(parts.order, (4, 8, 12), 2, 1, 1)
    assert complete.visit_after(6) == complete.visit_after(5), "all steps done: the last one, to be exported"


@pytest.mark.parametrize(
    ("start", "reach", "end"),
    [(0, 0, 0), (0, 3, 0), (0, 4, 4), (0, 7, 4), (4, 6, 10), (4, 5, 8), (8, 2, 10)],
)
def test_parts_end_between_steps_or_at_the_end(start: int, reach: int, end: int) -> None:
    assert part_end(start, reach, units_per_step=4, total=10) == end
