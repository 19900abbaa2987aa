"""Schedules at literal numbers and against transformers' own."""

import itertools
import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import get_scheduler
from transformers.optimization import get_wsd_schedule
from transformers.trainer_utils import SchedulerType

from distill.config import OBSERVING
from distill.errors import InputError
from distill.optim import build_schedule

PEAK, S, W = 2e-3, 40, 5
# What transformers itself demands.
NEEDED = {
    "cosine_with_min_lr": {"min_lr": 1e-4},
    "cosine_warmup_with_min_lr": {"min_lr": 1e-4},
    "warmup_stable_decay": {"num_decay_steps": 10},
}
PURE = sorted({kind.value for kind in SchedulerType} - set(OBSERVING))


def own(name: str, args: dict[str, object]):
    """transformers' scheduler on an optimizer of its own."""
    return get_scheduler(name, torch.optim.SGD([torch.zeros(1)], lr=PEAK), W, S, args)


def test_wsd_literal_numbers() -> None:
    schedule = build_schedule("wsd", lr=1.0, total_steps=20, num_warmup_steps=4, decay_start=0.8)
    rates = [schedule.lr(step) for step in range(1, 21)]
    assert rates == [0.25, 0.5, 0.75, *[1.0] * 13, 0.75, 0.5, 0.25, 0.0]
    schedule = build_schedule("wsd", lr=1e-3, total_steps=100, num_warmup_steps=10, decay_start=0.29, final_lr=1e-5)
    assert schedule.lr(1) == pytest.approx(1e-4)
    assert schedule.lr(10) == schedule.lr(29) == 1e-3
    assert schedule.lr(30) == pytest.approx(1e-5 + 99e-5 * 70 / 71)
    assert schedule.lr(100) == 1e-5


# lr 1, 10 steps: warm-up to step 2, decay from step 6, the end at final_lr. (1 + cos(pi/4))/2 = 0.853553...
FORMS: dict[str, tuple[float, list[float]]] = {
    "linear": (0.0, [0.75, 0.5, 0.25, 0.0]),
    "cosine": (0.0, [0.8535533905932737, 0.5, 0.14644660940672627, 0.0]),
    "1-sqrt": (0.0, [0.5, 0.2928932188134524, 0.1339745962155614, 0.0]),
    "exponential": (0.0001, [0.1, 0.01, 0.001, 0.0001]),
}


@pytest.mark.parametrize("form", FORMS)
def test_decay_forms_literal_numbers(form: str) -> None:
    final_lr, expected = FORMS[form]
    schedule = build_schedule("wsd", lr=1.0, total_steps=10, num_warmup_steps=2, decay_start=0.6, final_lr=final_lr,
                              forms=("linear", form))  # fmt: skip
    rates = [schedule.lr(step) for step in range(1, 11)]
    assert rates == pytest.approx([0.5, 1, 1, 1, 1, 1, *expected], abs=1e-15)
    assert rates[-1] == final_lr


def test_decays_end_at_final_lr_and_never_below() -> None:
    """f is over what lies above final_lr: no form is cut off at it, or jumps to it."""
    for form in FORMS:
        schedule = build_schedule("wsd", lr=1.0, total_steps=100, decay_start=0.5, final_lr=0.1, forms=("linear", form))
        rates = [schedule.lr(step) for step in range(50, 101)]
        assert rates[0] == 1.0 and rates[-1] == 0.1
        assert all(a > b for a, b in itertools.pairwise(rates))


def test_warmup_forms_literal_numbers() -> None:
    for form, expected in {
        "linear": [0.25, 0.5, 0.75, 1],
        "cosine": [0.14644660940672627, 0.5, 0.8535533905932737, 1],
    }.items():
        schedule = build_schedule("wsd", lr=1.0, total_steps=10, num_warmup_steps=4, forms=(form, "linear"))
        assert [schedule.lr(step) for step in range(1, 5)] == pytest.approx(expected, abs=1e-15)


# lr 1, 10 steps, warm-up of 2: the rates of steps 1, 2, 4, 6, 8 and 10, worked out by hand from each formula.
LITERAL: dict[str, tuple[dict[str, object], list[float]]] = {
    "linear": ({}, [0.5, 1, 0.75, 0.5, 0.25, 0]),
    "cosine": ({}, [0.5, 1, 0.8535533905932737, 0.5, 0.14644660940672627, 0]),
    "cosine_with_restarts": ({"num_cycles": 2}, [0.5, 1, 0.5, 1, 0.5, 0]),
    "polynomial": ({"power": 2.0, "lr_end": 0.0}, [0.5, 1, 0.5625, 0.25, 0.0625, 0]),
    "constant_with_warmup": ({}, [0.5, 1, 1, 1, 1, 1]),
    "inverse_sqrt": ({}, [0.5, 1, 0.7071067811865475, 0.5773502691896258, 0.5, 0.4472135954999579]),
    "cosine_with_min_lr": ({"min_lr": 0.2}, [0.5, 1, 0.882842712474619, 0.6, 0.317157287525381, 0.2]),
    "cosine_warmup_with_min_lr": ({"min_lr": 0.2}, [0.5, 1, 0.882842712474619, 0.6, 0.317157287525381, 0.2]),
    "warmup_stable_decay": ({"num_decay_steps": 4, "decay_type": "linear"}, [0.5, 1, 1, 1, 0.5, 0]),
    "wsd": ({}, [0.5, 1, 1, 1, 1, 0]),
}


@pytest.mark.parametrize("name", [*PURE, "wsd"])
def test_every_schedule_literal_numbers(name: str) -> None:
    if name == "constant":
        assert build_schedule(name, lr=1.0, total_steps=10).lr(7) == 1.0
        return
    args, expected = LITERAL[name]
    schedule = build_schedule(name, lr=1.0, total_steps=10, num_warmup_steps=2, args=args)
    assert [schedule.lr(step) for step in (1, 2, 4, 6, 8, 10)] == pytest.approx(expected, abs=1e-12)


def test_observing_schedules_literal_numbers() -> None:
    plateau = build_schedule("reduce_lr_on_plateau", lr=1.0, total_steps=10, args={"patience": 1, "factor": 0.5})
    rates = []
    for kl in (3.0, 2.0, 2.0, 2.0, 2.0, 2.0, 1.0):
        plateau.observe(kl)
        rates.append(plateau.lr(5))
    assert rates == [1.0, 1.0, 1.0, 0.5, 0.5, 0.25, 0.25]  # two validations without a better one halve it


def test_a21_the_decay_goes_on_after_a_resume_bit_for_bit() -> None:
    """10 steps of warm-up, 70 stable, 20 of decay: whoever asks at step 91 needs to have asked for none before."""
    for form, (final_lr, _) in FORMS.items():
        whole, resumed = (
            build_schedule("wsd", lr=1.0, total_steps=100, num_warmup_steps=10, decay_start=0.8, final_lr=final_lr,
                           forms=("linear", form))
            for _ in range(2)
        )  # fmt: skip
        rates = [whole.lr(step) for step in range(1, 101)]
        assert [resumed.lr(step) for step in range(91, 101)] == rates[90:]
        assert rates[79] == 1.0 > rates[80] > rates[90] > rates[99] == final_lr


@pytest.mark.parametrize("final_lr", [0.0, 1e-4])
def test_wsd_is_transformers_wsd_shifted_by_one(final_lr: float) -> None:
    ours = build_schedule("wsd", lr=PEAK, total_steps=S, num_warmup_steps=W, decay_start=0.75, final_lr=final_lr)
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=PEAK)
    theirs = get_wsd_schedule(optimizer, W, 10, S, decay_type="linear", min_lr_ratio=final_lr / PEAK)
    optimizer.step()
    for step in range(1, S + 1):
        theirs.step()
        if step >= W or final_lr == 0.0:  # theirs warms up from the final rate, MiniCPM's from 0
            assert ours.lr(step) == pytest.approx(theirs.get_last_lr()[0], rel=1e-12, abs=1e-18)


@given(
    total=st.integers(1, 300),
    warmup=st.floats(0, 1),
    decay_start=st.floats(0, 1),
    final=st.sampled_from([0.0, 1e-6, PEAK]),
)
def test_wsd_never_jumps_and_ends_at_its_end(total: int, warmup: float, decay_start: float, final: float) -> None:
    num_warmup_steps = int(warmup * total)
    schedule = build_schedule(
        "wsd",
        lr=PEAK,
        total_steps=total,
        num_warmup_steps=num_warmup_steps,
        decay_start=decay_start,
        final_lr=final,
    )
    rates = [schedule.lr(step) for step in range(1, total + 1)]
    assert all(0.0 <= rate <= PEAK for rate in rates)
    top = max(num_warmup_steps, 1) - 1
    assert rates[:top] == sorted(rates[:top])
    assert rates[top:] == sorted(rates[top:], reverse=True)
    if num_warmup_steps < total and decay_start < 1:
        assert rates[-1] == final
    falls = [a - b for a, b in zip(rates[top:], rates[top + 1 :], strict=False)]
    decaying = [fall for fall in falls if fall > 0]
    assert not decaying or max(decaying) - min(decaying) < 1e-9 * PEAK  # one straight line


@pytest.mark.parametrize("name", PURE)
def test_transformers_schedules_are_taken_one_step_on(name: str) -> None:
    args, warmup = NEEDED.get(name, {}), 0 if name == "constant" else W
    ours = build_schedule(name, lr=PEAK, total_steps=S, num_warmup_steps=warmup, args=args)
    theirs = own(name, args)
    theirs.optimizer.step()
    rates = []
    for step in range(1, S + 1):
        if step > 1 or name != "cosine_warmup_with_min_lr":  # which counts from 1 itself
            theirs.step()
        rates.append(ours.lr(step))
        assert rates[-1] == pytest.approx(theirs.get_last_lr()[0], rel=1e-12)
    assert rates[0] > 0.0
    assert [ours.lr(step) for step in reversed(range(1, S + 1))] == rates[::-1]  # no memory
    assert ours.state_dict() == {}
    ours.observe(1.0)
    assert ours.lr(S) == rates[-1]


def test_ends_of_transformers_schedules() -> None:
    ends = {"linear": 0.0, "cosine": 0.0, "polynomial": 1e-7, "constant": PEAK, "constant_with_warmup": PEAK}
    ends |= {"cosine_with_min_lr": 1e-4, "cosine_warmup_with_min_lr": 1e-4, "warmup_stable_decay": 0.0}
    for name, end in ends.items():
        schedule = build_schedule(name, lr=PEAK, total_steps=S, args=NEEDED.get(name))
        assert schedule.lr(S) == pytest.approx(end, abs=1e-12)
    cosine = build_schedule("cosine", lr=1.0, total_steps=10, num_warmup_steps=2)
    assert [cosine.lr(step) for step in (1, 2, 6, 10)] == pytest.approx([0.5, 1.0, 0.5, 0.0])


@pytest.mark.parametrize("name", OBSERVING)
def test_observing_schedules_follow_their_scheduler_and_resume(name: str) -> None:
    args = {"patience": 1, "factor": 0.5, "min_lr": 1e-5}
    values = [3.0, 2.0, 1.0, 1.0, 1.5, 1.5, 1.5, 0.5, 0.7, 0.7, 0.7]
    ours, theirs = build_schedule(name, lr=PEAK, total_steps=S, num_warmup_steps=4, args=args), own(name, args)
    assert ours.lr(1) == PEAK / 4
    seen = set()
    for value in values:
        ours.observe(value)
        theirs.step(value)
        assert ours.lr(S) == theirs.optimizer.param_groups[0]["lr"]
        seen.add(ours.lr(S))
    assert len(seen) > 1
    resumed = build_schedule(name, lr=PEAK, total_steps=S, num_warmup_steps=4, args=args)
    resumed.load_state_dict(json.loads(json.dumps(ours.state_dict(), allow_nan=False)))
    for value in values:
        assert resumed.lr(S) == ours.lr(S)
        ours.observe(value)
        resumed.observe(value)


def test_greedy_can_go_below_its_default_bound() -> None:
    schedule = build_schedule("greedy", lr=1e-5, total_steps=S, args={"patience": 0})
    for _ in range(3):
        schedule.observe(1.0)
    assert 0.0 < schedule.lr(1) < 1e-5


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("wds", {}, "lr_scheduler: 'wds' is unknown; did you mean wsd"),
        ("cosin", {}, "lr_scheduler: .* cosine"),
        ("???", {}, "lr_scheduler: .* linear"),
        ("cosine", {"args": {"cycles": 2}}, "lr_scheduler_args: cosine has no argument 'cycles'; .*: num_cycles"),
        ("wsd", {"args": {"min_lr": 0.1}}, "lr_scheduler_args: wsd has no argument 'min_lr'; it takes: none"),
        ("greedy", {"args": {"verbose": True}}, "lr_scheduler_args: greedy has no argument 'verbose'"),
        ("cosine", {"args": {"num_cycles": "two"}}, "lr_scheduler_args: cosine refuses them"),
        ("polynomial", {"args": {"lr_end": 1.0}}, "lr_scheduler_args: polynomial refuses them: lr_end"),
        ("warmup_stable_decay", {}, "lr_scheduler_args: warmup_stable_decay refuses them: .*num_decay_steps"),
        ("greedy", {"args": {"factor": 2.0}}, "lr_scheduler_args: greedy refuses them"),
        ("greedy", {"args": {"window_size": 0, "smooth": True}}, "lr_scheduler_args: greedy refuses them"),
        ("greedy", {"args": {"patience": "a"}}, "lr_scheduler_args: greedy refuses them"),
        ("warmup_stable_decay", {"args": {"num_decay_steps": 1000}}, "lr_scheduler_args: with them .* not up to lr"),
        ("cosine_with_min_lr", {"args": {"min_lr": -1.0}}, "lr_scheduler_args: with them .* not below 0"),
        ("cosine_warmup_with_min_lr", {"args": {"min_lr_rate": 5.0}}, "lr_scheduler_args: with them"),
        ("wsd", {"num_warmup_steps": 41}, "num_warmup_steps: 41 steps of warm-up in a training of 40 steps"),
        ("linear", {"num_warmup_steps": 41}, "num_warmup_steps: 41"),
        ("constant", {"num_warmup_steps": 1}, "num_warmup_steps: .* constant_with_warmup"),
        ("wsd", {"decay_start": 1.01}, "decay_start: 1.01 is not between 0 and 1"),
        ("wsd", {"decay_start": -0.1}, "decay_start"),
        ("wsd", {"decay_start": float("nan")}, "decay_start"),
        ("cosine", {"final_lr": 1e-6}, "final_lr: only wsd has one"),
        ("cosine", {"forms": ("linear", "cosine")}, "decay_form: only wsd has one"),
        ("linear", {"forms": ("cosine", "linear")}, "warmup_form: only wsd has one"),
        (
            "wsd",
            {"forms": ("linear", "sqrt")},
            "decay_form: 'sqrt' is unknown; it is one of linear, cosine, 1-sqrt, exp",
        ),
        ("wsd", {"forms": ("exp", "linear")}, "warmup_form: 'exp' is unknown"),
        ("wsd", {"forms": ("linear", "exponential")}, "final_lr: an exponential decay never reaches 0; .* 0.0002"),
    ],
)
def test_what_does_not_fit_is_refused(name: str, settings: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        build_schedule(name, lr=PEAK, total_steps=S, **settings)
    assert "\n" not in str(caught.value)
