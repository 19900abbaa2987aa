"""Training states: everything that an exact resume needs, there whole or not at all.

``<states>/<name>/run.json`` says which run this is; ``step_<n>/`` beside it holds the newest state as safetensors and
JSON. A new state is written under another name, fsynced and renamed before the old one goes.
"""

import hashlib
import json
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.optim import Optimizer

from distill.errors import InputError
from distill.files import TEMPORARY_SUFFIX
from distill.models import saved_folder
from distill.optim import load_optimizer_state, optimizer_state

_MODEL, _OPTIMIZER, _META = "model.safetensors", "optimizer.safetensors", "state.json"
_CPU_RNG, _CUDA_RNG = "rng.cpu", "rng.cuda"


@dataclass(frozen=True, slots=True)
class TrainState:
    """A saved state. ``meta`` is whatever JSON the trainer keeps beside the tensors, ``numbers`` the optimizer's."""

    step: int
    meta: dict[str, Any]
    model: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    numbers: dict[str, float]


def save_state(folder: Path, *, step: int, meta: Mapping[str, Any], model: nn.Module, optimizer: Optimizer) -> None:
    """Write ``folder/step_<step>`` and remove older ones. MachineError if the disk has no room; the old one stays."""
    final = folder / f"step_{step}"
    if final.exists():
        return  # the state that this run resumed from
    with saved_folder(final) as temporary:
        save_file(_model_tensors(model), temporary / _MODEL)
        tensors, numbers = optimizer_state(optimizer)
        save_file(tensors | _rng_tensors(), temporary / _OPTIMIZER)
        files = {name: _digest(temporary / name) for name in (_MODEL, _OPTIMIZER)}
        body = {"step": step, "meta": dict(meta), "numbers": numbers, "files": files}
        (temporary / _META).write_text(json.dumps({"body": body, "sha256": _json_digest(body)}))
    for path in _states(folder):
        if path != final:
            shutil.rmtree(path, ignore_errors=True)


def newest_state(folder: Path) -> TrainState | None:
    """The newest whole state under ``folder``; leftovers of a killed save are removed. InputError if it is damaged."""
    for path in folder.glob(f"step_*{TEMPORARY_SUFFIX}"):
        shutil.rmtree(path, ignore_errors=True)
    states = _states(folder)
    if not states:
        return None
    path = states[-1]
    try:
        document = json.loads((path / _META).read_text())
        body = document["body"]
        if _json_digest(body) != document["sha256"]:
            raise ValueError(f"{_META} isn't what was saved")
        for name, digest in body["files"].items():
            if _digest(path / name) != digest:
                raise ValueError(f"{name} isn't what was saved")
        model, optimizer = load_file(path / _MODEL), load_file(path / _OPTIMIZER)
        return TrainState(body["step"], body["meta"], model, optimizer, body["numbers"])
    except (OSError, ValueError, LookupError, TypeError, SafetensorError) as error:
        raise InputError(f"{path}: damaged training state ({error}); start again with --fresh") from error


def saved_step(folder: Path) -> int | None:
    """Optimizer steps of the newest state under ``folder``, without reading it; None if there is none."""
    states = _states(folder)
    return int(states[-1].name.removeprefix("step_")) if states else None


def restore(state: TrainState, model: nn.Module, optimizer: Optimizer) -> None:
    """Put ``state`` into ``model``, ``optimizer`` and the random generators. InputError if they don't fit."""
    tensors = dict(state.optimizer)
    torch.set_rng_state(tensors.pop(_CPU_RNG))
    for index in range(torch.cuda.device_count()):
        if f"{_CUDA_RNG}.{index}" in tensors:
            torch.cuda.set_rng_state(tensors.pop(f"{_CUDA_RNG}.{index}"), index)
    tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith(_CUDA_RNG)}
    targets = _model_tensors(model)
    if {name: t.shape for name, t in targets.items()} != {name: t.shape for name, t in state.model.items()}:
        raise InputError("the training state belongs to another student; start again with --fresh")
    with torch.no_grad():
        for name, tensor in targets.items():
            tensor.copy_(state.model[name])
    load_optimizer_state(optimizer, tensors, state.numbers)


def _model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters that are trained and stored buffers, tied ones once: the rest is as the student's folder has it."""
    buffers = {id(buffer) for buffer in model.buffers()}
    seen: set[int] = set()
    tensors = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        changes = tensor.requires_grad if isinstance(tensor, nn.Parameter) else id(tensor) in buffers
        if changes and id(tensor) not in seen:
            seen.add(id(tensor))
            tensors[name] = tensor.detach()
    return tensors


def _rng_tensors() -> dict[str, Tensor]:
    cuda = {f"{_CUDA_RNG}.{i}": torch.cuda.get_rng_state(i) for i in range(torch.cuda.device_count())}
    return {_CPU_RNG: torch.get_rng_state(), **cuda}


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _json_digest(body: object) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _states(folder: Path) -> list[Path]:
    found = [path for path in folder.glob("step_*") if re.fullmatch(r"step_[0-9]+", path.name)]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step_")))
