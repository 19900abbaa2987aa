"""Optimizers by name: torch's, and bitsandbytes' where it alone has them (8-bit states, paged states).

What a name means is one row of :data:`OPTIMIZERS`. States are read and written as plain tensors and numbers, so that a
checkpoint needs no pickle and a restored optimizer goes on bit for bit.
"""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from distill.errors import InputError

Family = Literal["adam", "sgd", "rmsprop", "adagrad"]

BETAS, EPS, MOMENTUM, ALPHA = (0.9, 0.999), 1e-8, 0.0, 0.99
"""Values that an optimizer without such a setting may be given: those that configurations have by default."""

# bitsandbytes' tables from codes to values: the same in every state, and made anew with it.
_CONSTANT = frozenset({"qmap1", "qmap2"})


@dataclass(frozen=True, slots=True)
class Kind:
    """What a name stands for.

    ``torch_name`` or ``bnb_name`` is the class; ``bits`` those of a state's number where a tensor has at least 4,096
    elements; a ``paged`` state moves between GPU and host by itself. ``decoupled``: weight decay acts on the weights
    and not through the gradient.
    """

    family: Family
    torch_name: str = ""
    bnb_name: str = ""
    bits: int = 32
    paged: bool = False
    decoupled: bool = False

    @property
    def settings(self) -> frozenset[str]:
        """Those of betas, eps, momentum and rmsprop_alpha that it has. bitsandbytes' RMSprop has no momentum."""
        if self.family == "rmsprop":
            return frozenset({"eps", "rmsprop_alpha"} | ({"momentum"} if self.torch_name else set()))
        return frozenset({"adam": {"betas", "eps"}, "sgd": {"momentum"}, "adagrad": {"eps"}}[self.family])


OPTIMIZERS: Mapping[str, Kind] = {
    "adam": Kind("adam", torch_name="Adam"),
    "adamw": Kind("adam", torch_name="AdamW", decoupled=True),
    "adamw8bit": Kind("adam", bnb_name="AdamW8bit", bits=8, decoupled=True),
    "adamw32bit": Kind("adam", bnb_name="AdamW32bit", decoupled=True),
    "paged_adamw": Kind("adam", bnb_name="AdamW", paged=True, decoupled=True),
    "paged_adamw8bit": Kind("adam", bnb_name="AdamW8bit", bits=8, paged=True, decoupled=True),
    "paged_adamw32bit": Kind("adam", bnb_name="AdamW32bit", paged=True, decoupled=True),
    "sgd": Kind("sgd", torch_name="SGD"),
    "rmsprop": Kind("rmsprop", torch_name="RMSprop"),
    "rmsprop8bit": Kind("rmsprop", bnb_name="RMSprop8bit", bits=8),
    "rmsprop32bit": Kind("rmsprop", bnb_name="RMSprop32bit"),
    "adagrad": Kind("adagrad", torch_name="Adagrad"),
}
"""Every name of the key ``optimizer``."""


def check_optimizer(
    name: str, *, betas: tuple[float, float], eps: float, momentum: float = MOMENTUM, alpha: float = ALPHA
) -> Kind:
    """What ``name`` stands for. InputError for an unknown name, or a setting other than the default that it lacks."""
    if name not in OPTIMIZERS:
        near = difflib.get_close_matches(name, OPTIMIZERS, n=3) or sorted(OPTIMIZERS)
        raise InputError(f"optimizer: {name!r} is unknown; did you mean {' or '.join(near)}?")
    kind = OPTIMIZERS[name]
    given = {
        "betas": betas != BETAS, "eps": eps != EPS, "momentum": momentum != MOMENTUM, "rmsprop_alpha": alpha != ALPHA,
    }  # fmt: skip
    for key, changed in given.items():
        if changed and key not in kind.settings:
            having = ", ".join(other for other, its in OPTIMIZERS.items() if key in its.settings)
            raise InputError(f"{key}: optimizer {name} has none; leave it out or use one of {having}")
    return kind


def build_optimizer(
    model: nn.Module,
    name: str = "adamw",
    *,
    lr: float,
    betas: tuple[float, float] = BETAS,
    eps: float = EPS,
    weight_decay: float,
    momentum: float = MOMENTUM,
    alpha: float = ALPHA,
) -> Optimizer:
    """The optimizer ``name`` over the parameters that require a gradient, in the model's order, tied ones once.

    Weight decay is for matrices only: norms, biases and other one-dimensional parameters have none. Raises InputError
    naming the key: as :func:`check_optimizer`, if nothing is left to train, or if ``name`` doesn't run on the device.
    """
    kind = check_optimizer(name, betas=betas, eps=eps, momentum=momentum, alpha=alpha)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not parameters:
        raise InputError("freeze_layers: every parameter of the student is frozen; leave some to train")
    matrices, others = [p for p in parameters if p.ndim >= 2], [p for p in parameters if p.ndim < 2]
    groups: list[dict[str, Any]] = [
        {"params": matrices, "weight_decay": weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    values: dict[str, Any] = {"betas": betas, "eps": eps, "momentum": momentum, "rmsprop_alpha": alpha}
    settings = {key.removeprefix("rmsprop_"): values[key] for key in kind.settings}
    device = parameters[0].device.type
    if kind.paged and device != "cpu":
        settings["is_paged"] = True
    elif kind.torch_name in ("Adam", "AdamW", "SGD"):
        settings["fused"] = True
    build = getattr(_library(kind, name, device), kind.torch_name or kind.bnb_name)
    optimizer: Optimizer = build([group for group in groups if group["params"]], lr=lr, **settings)
    return optimizer


def paging_note(name: str, device: str) -> str | None:
    """A line for the user where a paged optimizer isn't paged."""
    if OPTIMIZERS[name].paged and device == "cpu":
        return f"optimizer: {name} keeps its states in ordinary memory on a CPU, where there is nothing to page to"
    return None


def optimizer_state(optimizer: Optimizer) -> tuple[dict[str, Tensor], dict[str, float]]:
    """All that ``optimizer`` has gathered: tensors and numbers under ``<parameter>.<key>``, parameters counted from 0.

    Parameters without a state have none here; learning rates and other settings aren't part of it.
    """
    tensors: dict[str, Tensor] = {}
    numbers: dict[str, float] = {}
    for index, parameter in enumerate(_parameters(optimizer)):
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                if key not in _CONSTANT:
                    tensors[f"{index}.{key}"] = value
            else:
                assert isinstance(value, int | float), f"a state of type {type(value).__name__}"
                numbers[f"{index}.{key}"] = value
    return tensors, numbers


def load_optimizer_state(optimizer: Optimizer, tensors: Mapping[str, Tensor], numbers: Mapping[str, float]) -> None:
    """Go on from the :func:`optimizer_state` of an optimizer built alike. InputError if it is another's."""
    states: dict[int, dict[str, Any]] = {}
    for name, value in {**tensors, **numbers}.items():
        index, _, key = name.partition(".")
        states.setdefault(int(index), {})[key] = value
    if states and max(states) >= len(_parameters(optimizer)):
        raise _another()
    if hasattr(optimizer, "init_state"):
        _fill_bitsandbytes(optimizer, states)
    else:
        optimizer.load_state_dict({"state": states, "param_groups": optimizer.state_dict()["param_groups"]})


def _fill_bitsandbytes(optimizer: Any, states: Mapping[int, Mapping[str, Any]]) -> None:
    """Fill states that it makes itself: they hold its constant tables, and paged ones are paged again."""
    places = [(i, j) for i, group in enumerate(optimizer.param_groups) for j in range(len(group["params"]))]
    optimizer.state.clear()
    for index, saved in states.items():
        i, j = places[index]
        group = optimizer.param_groups[i]
        parameter = group["params"][j]
        optimizer.init_state(group, parameter, i, j)
        state = optimizer.state[parameter]
        if set(state) - _CONSTANT != set(saved):
            raise _another()
        for key, value in saved.items():
            if isinstance(value, Tensor):
                if state[key].shape != value.shape or state[key].dtype != value.dtype:
                    raise _another()
                state[key].copy_(value)
            else:
                state[key] = value


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _library(kind: Kind, name: str, device: str) -> Any:
    """The module that has the optimizer."""
    if kind.torch_name:
        return torch.optim
    if device not in ("cpu", "cuda"):
        raise InputError(f"optimizer: {name} runs on cpu and cuda, not on {device}; use adamw")
    try:
        import bitsandbytes
    except (ImportError, OSError, RuntimeError) as error:
        why = " ".join(str(error).split())
        raise InputError(f"optimizer: {name} needs bitsandbytes, which can't be loaded ({why})") from error
    return bitsandbytes.optim


def _another() -> InputError:
    return InputError("the training state belongs to another student or optimizer; start again with --fresh")
