"""Learning-rate schedules. A schedule is a function of the step, not an object that steps.

Steps count from 1: ``schedule.lr(s)`` is the rate that optimizer step s is made with, of ``total_steps``. transformers'
schedulers count from 0 and hold their value for the step that follows, so there the first of S steps is often made with
a rate of zero and the end of the decay is never used. Taken at s instead, all of them reach their end at the last step.
"""

import difflib
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from functools import partial
from typing import Any, Protocol

import torch

from distill.config import OBSERVING
from distill.errors import InputError

State = dict[str, list[float]]
Rate = Callable[[int], float]

# This one of transformers' schedulers already adds the one step itself.
_ALREADY_SHIFTED = ("cosine_warmup_with_min_lr",)

DECAY_FORMS: Mapping[str, Callable[[float], float]] = {
    "linear": lambda u: 1.0 - u,
    "cosine": lambda u: (1.0 + math.cos(math.pi * u)) / 2.0,
    "1-sqrt": lambda u: 1.0 - math.sqrt(u),
}
"""f(u) of wsd's decay, from f(0) = 1 to f(1) = 0, u being the part of the decay that is done.

linear: D2Z (arXiv 2502.15938); cosine and 1-sqrt: Hägele et al. (arXiv 2405.18392), where 1-sqrt was best.
"""

WARMUP_FORMS: Mapping[str, Callable[[float], float]] = {
    "linear": lambda u: u,
    "cosine": lambda u: (1.0 - math.cos(math.pi * u)) / 2.0,
}
"""g(u) of wsd's warm-up, from g(0) = 0 to g(1) = 1; cosine is that of transformers' get_wsd_schedule."""


class Schedule(Protocol):
    """What training knows of a schedule."""

    def lr(self, step: int) -> float:
        """The learning rate of optimizer step ``step``, from 1."""

    def observe(self, validation_kl: float) -> None:
        """Takes the KL of a validation, in nats per target."""

    def state_dict(self) -> State:
        """What can't be told from the configuration, for JSON."""

    def load_state_dict(self, state: State) -> None:
        """Goes on from the :meth:`state_dict` of a schedule built alike."""


@dataclass(frozen=True)
class StepSchedule:
    """A function of the step alone; observing changes nothing and there is no state."""

    rate: Rate

    def lr(self, step: int) -> float:
        """The learning rate of optimizer step ``step``, from 1."""
        assert step >= 1, "steps count from 1"
        return self.rate(step)

    def observe(self, validation_kl: float) -> None:
        """Nothing: this schedule doesn't look."""

    def state_dict(self) -> State:
        """Empty."""
        return {}

    def load_state_dict(self, state: State) -> None:
        """Nothing to load."""
        assert not state, "a schedule without state is given one"


@dataclass
class ObservingSchedule:
    """A scheduler that steps on the validation KL, after a linear warm-up.

    Its state is the list of what it has observed: loading replays it on a new scheduler, so a resumed rate is exact
    whatever the scheduler keeps inside.
    """

    build: Callable[[], Any]
    num_warmup_steps: int
    observed: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.load_state_dict({"observed": self.observed})

    def lr(self, step: int) -> float:
        """The learning rate of optimizer step ``step``, from 1, after what has been observed."""
        assert step >= 1, "steps count from 1"
        rate: float = self._scheduler.optimizer.param_groups[0]["lr"]
        return rate * min(1.0, step / max(1, self.num_warmup_steps))

    def observe(self, validation_kl: float) -> None:
        """Steps the scheduler."""
        self.observed.append(validation_kl)
        self._scheduler.step(validation_kl)

    def state_dict(self) -> State:
        """All values observed so far."""
        return {"observed": list(self.observed)}

    def load_state_dict(self, state: State) -> None:
        """Replays the values observed."""
        self._scheduler, self.observed = self.build(), []
        for value in state["observed"]:
            self.observe(value)


def build_schedule(
    name: str,
    *,
    lr: float,
    total_steps: int,
    num_warmup_steps: int = 0,
    decay_start: float = 0.9,
    final_lr: float = 0.0,
    forms: tuple[str, str] = ("linear", "linear"),
    args: Mapping[str, Any] | None = None,
) -> Schedule:
    """The schedule called ``name``: "wsd" (see :class:`Wsd`) or a name that transformers' get_scheduler knows.

    decay_start, final_lr and ``forms`` (of warm-up and decay) belong to wsd; ``args`` (the key lr_scheduler_args) go to
    transformers' scheduler. Raises InputError naming the key for an unknown name or argument and for values that don't
    fit together.
    """
    args = dict(args or {})
    warmup_form, decay_form = forms
    _check(name, args, total_steps=total_steps, num_warmup_steps=num_warmup_steps)
    if name == "wsd":
        if not 0.0 <= decay_start <= 1.0:
            raise InputError(f"decay_start: {decay_start} is not between 0 and 1, a part of all steps")
        _check_forms(decay_form, warmup_form, lr=lr, final_lr=final_lr)
        # Decimal, so that 0.29 of 100 steps is 29: in binary it is a little less.
        decay_step = max(int(Decimal(str(decay_start)) * total_steps), num_warmup_steps)
        steps = (num_warmup_steps, decay_step, total_steps)
        return StepSchedule(Wsd(lr=lr, final_lr=final_lr, steps=steps, decay_form=decay_form, warmup_form=warmup_form))
    if final_lr != 0.0:
        raise InputError(f"final_lr: only wsd has one; {name} takes its end from lr_scheduler_args")
    for key, form in (("decay_form", decay_form), ("warmup_form", warmup_form)):
        if form != "linear":
            raise InputError(f"{key}: only wsd has one; {name} takes its form from lr_scheduler_args")
    build = partial(_transformers_scheduler, name, lr, total_steps, num_warmup_steps, args)
    try:
        if name in OBSERVING:
            tried = ObservingSchedule(build, num_warmup_steps)
            for kl in (1.0, 2.0, 2.0):  # some arguments are only looked at then
                tried.observe(kl)
            return ObservingSchedule(build, num_warmup_steps)
        factor, back = build().lr_lambdas[0], int(name in _ALREADY_SHIFTED)
        schedule = StepSchedule(lambda step: lr * float(factor(step - back)))
        _check_rates(name, [schedule.lr(step) for step in _looked_at(total_steps)], lr)
    except (TypeError, ValueError, ArithmeticError) as error:
        raise InputError(f"lr_scheduler_args: {name} refuses them: {error}") from error
    return schedule


def _looked_at(total_steps: int) -> list[int]:
    """Up to a thousand steps, the first and the last among them."""
    return sorted({1 + index * (total_steps - 1) // 999 for index in range(1000)})


def _check_rates(name: str, rates: Sequence[float], lr: float) -> None:
    """Raises InputError if rates aren't between 0 and lr, or never come near lr: arguments that don't fit the steps."""
    lowest, highest = min(rates), max(rates)
    if not (lowest >= 0 and 0.3 * lr <= highest <= lr * (1 + 1e-6)) and len(rates) > 2:
        raise InputError(
            f"lr_scheduler_args: with them {name} goes from {lowest:g} to {highest:g} in {len(rates)} steps, not up to"
            f" lr {lr:g} and not below 0"
        )


@dataclass(frozen=True, slots=True)
class Wsd:
    """Warmup-stable-decay (MiniCPM, arXiv 2404.06395, eq. 1); steps = (W, T, S), W <= T <= S.

    lr g(s/W) below step W; lr up to step T; then final_lr + (lr - final_lr) f((s-T)/(S-T)), so that step S has
    final_lr. T is decay_start of S, rounded down, but not before W; with T = S (decay_start 1) nothing decays. The
    forms g and f are in WARMUP_FORMS and DECAY_FORMS. The exponential decay is MiniCPM's, 0.5^((s-T)/h) with the
    half-life h that ends at final_lr: lr (final_lr/lr)^u.
    """

    lr: float
    final_lr: float
    steps: tuple[int, int, int]
    decay_form: str = "linear"
    warmup_form: str = "linear"

    def __call__(self, step: int) -> float:
        """The rate of step ``step``, from 1."""
        warmup, decay, total = self.steps
        if step < warmup:
            return self.lr * WARMUP_FORMS[self.warmup_form](step / warmup)
        if step <= decay:
            return self.lr
        if step >= total:
            return self.final_lr
        done = (step - decay) / (total - decay)
        if self.decay_form == "exponential":
            return float(self.lr * (self.final_lr / self.lr) ** done)
        return self.final_lr + (self.lr - self.final_lr) * DECAY_FORMS[self.decay_form](done)


def _check_forms(decay_form: str, warmup_form: str, *, lr: float, final_lr: float) -> None:
    forms = (("decay_form", decay_form, (*DECAY_FORMS, "exponential")), ("warmup_form", warmup_form, (*WARMUP_FORMS,)))
    for key, form, known in forms:
        if form not in known:
            raise InputError(f"{key}: {form!r} is unknown; it is one of {', '.join(known)}")
    if decay_form == "exponential" and final_lr == 0.0:
        raise InputError(f"final_lr: an exponential decay never reaches 0; set it to a tenth of lr, {lr / 10:g}, say")


def _check(name: str, args: Mapping[str, Any], *, total_steps: int, num_warmup_steps: int) -> None:
    allowed = _arguments()
    if name not in allowed:
        near = difflib.get_close_matches(name, allowed, n=3) or sorted(allowed)
        raise InputError(f"lr_scheduler: {name!r} is unknown; did you mean {' or '.join(near)}?")
    for key in args:
        if key not in allowed[name]:
            known = ", ".join(allowed[name]) or "none"
            raise InputError(f"lr_scheduler_args: {name} has no argument {key!r}; it takes: {known}")
    if num_warmup_steps > total_steps:
        raise InputError(f"num_warmup_steps: {num_warmup_steps} steps of warm-up in a training of {total_steps} steps")
    if name == "constant" and num_warmup_steps:
        raise InputError("num_warmup_steps: lr_scheduler constant has no warm-up; use constant_with_warmup")


def _arguments() -> dict[str, tuple[str, ...]]:
    """The names of all schedules, each with what lr_scheduler_args may hold for it."""
    from transformers.optimization import TYPE_TO_SCHEDULER_FUNCTION, GreedyLR

    builders: dict[str, Any] = {kind.value: builder for kind, builder in TYPE_TO_SCHEDULER_FUNCTION.items()}
    builders |= {"reduce_lr_on_plateau": torch.optim.lr_scheduler.ReduceLROnPlateau, "greedy": GreedyLR}
    # Given by us, meaningless here, or writing to the console.
    ours = {"optimizer", "num_warmup_steps", "num_training_steps", "num_stable_steps", "last_epoch", "verbose", "_"}
    allowed: dict[str, tuple[str, ...]] = {"wsd": ()}
    for name, builder in builders.items():
        allowed[name] = tuple(key for key in inspect.signature(builder).parameters if key not in ours)
    return allowed


def _transformers_scheduler(name: str, lr: float, total_steps: int, num_warmup_steps: int, args: dict[str, Any]) -> Any:
    """transformers' scheduler on an optimizer that optimizes nothing: some take the rate from there, some keep it."""
    from transformers import get_scheduler

    # GreedyLR's own lower bound, 0.001, is above usual learning rates: the rate could never fall.
    defaults = {"min_lr": 0.0} if name == "greedy" else {}
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=lr)
    return get_scheduler(name, optimizer, num_warmup_steps, total_steps, {**defaults, **args})
