"""Optimizer and learning-rate schedules. A schedule is a function of the step, not an object that steps.

Steps count from 1: ``schedule.lr(s)`` is the rate that optimizer step s is made with, of ``total_steps``. transformers'
schedulers count from 0 and hold their value for the step that follows, so there the first of S steps is often made with
a rate of zero and the end of the decay is never used. Taken at s instead, all of them reach their end at the last step.
"""

import difflib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn

from distill.errors import InputError

State = dict[str, list[float]]
Rate = Callable[[int], float]

# This one of transformers' schedulers already adds the one step itself.
_ALREADY_SHIFTED = ("cosine_warmup_with_min_lr",)
OBSERVING = ("reduce_lr_on_plateau", "greedy")
"""Schedules that react to the validation KL; all others are functions of the step alone."""


def build_optimizer(
    model: nn.Module, *, lr: float, betas: tuple[float, float], eps: float, weight_decay: float
) -> torch.optim.AdamW:
    """AdamW over the parameters that require a gradient, in the model's order, each once (tied weights too).

    Weight decay is for matrices only: norms, biases and other one-dimensional parameters have none.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not parameters:
        raise InputError("freeze_layers: every parameter of the student is frozen; leave some to train")
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=lr, betas=betas, eps=eps, fused=True)


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
    args: Mapping[str, Any] | None = None,
) -> Schedule:
    """The schedule called ``name``: "wsd" (see :func:`wsd_rate`) or a name that transformers' get_scheduler knows.

    decay_start and final_lr belong to wsd; ``args`` (the key lr_scheduler_args) go to transformers' scheduler. Raises
    InputError naming the key for an unknown name or argument and for values that don't fit together.
    """
    args = dict(args or {})
    _check(name, args, total_steps=total_steps, num_warmup_steps=num_warmup_steps)
    if name == "wsd":
        if not 0.0 <= decay_start <= 1.0:
            raise InputError(f"decay_start: {decay_start} is not between 0 and 1, a part of all steps")
        # Decimal, so that 0.29 of 100 steps is 29: in binary it is a little less.
        decay_step = max(int(Decimal(str(decay_start)) * total_steps), num_warmup_steps)
        steps = (num_warmup_steps, decay_step, total_steps)
        return StepSchedule(partial(wsd_rate, lr=lr, final_lr=final_lr, steps=steps))
    if final_lr != 0.0:
        raise InputError(f"final_lr: only wsd has one; {name} takes its end from lr_scheduler_args")
    build = partial(_transformers_scheduler, name, lr, total_steps, num_warmup_steps, args)
    try:
        if name in OBSERVING:
            return ObservingSchedule(build, num_warmup_steps)
        factor, back = build().lr_lambdas[0], int(name in _ALREADY_SHIFTED)
        schedule = StepSchedule(lambda step: lr * float(factor(step - back)))
        for step in (1, total_steps):  # some arguments are only looked at then
            schedule.lr(step)
    except (TypeError, ValueError, ArithmeticError) as error:
        raise InputError(f"lr_scheduler_args: {name} refuses them: {error}") from error
    return schedule


def wsd_rate(step: int, *, lr: float, final_lr: float, steps: tuple[int, int, int]) -> float:
    """Warmup-stable-decay (MiniCPM, arXiv 2404.06395, eq. 1) at ``step``; steps = (W, T, S), W <= T <= S.

    lr s/W below step W; lr up to step T; then on a line from (T, lr) to (S, final_lr). T is decay_start of S, rounded
    down, but not before W. With T = S (decay_start 1) nothing decays.
    """
    warmup, decay, total = steps
    if step < warmup:
        return lr * step / warmup
    if step <= decay:
        return lr
    return final_lr + (lr - final_lr) * max(0, total - step) / (total - decay)


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
