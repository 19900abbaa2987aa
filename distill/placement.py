"""Which model runs on which devices. Pure functions of what the devices have and what a model needs.

A teacher that fits on one GPU is placed whole, the workers spread over the GPUs in turn; a larger one takes as many
whole GPUs as it needs, and accelerate spreads its layers over them. Without a GPU every worker is on the CPU.
A student is on one device, or spread as its keys say.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from distill.errors import InputError

GB = 10**9

# What a worker needs on each of its GPUs besides the weights: CUDA's context, activations, a piece of logits. A batch
# that needs more is halved, so this decides only how many workers are let in.
_WORKING_BYTES = 2 * GB
_HOST_DEVICES = ("cpu", "disk")
_UNLIMITED = 2**62
# Layers are not divisible: a model spread over GPUs leaves a bit of each unused.
_SPREAD_LOSS = 1.1


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU of this machine: its index, its free and its total memory in bytes."""

    index: int
    free: int
    total: int

    @property
    def name(self) -> str:
        """As torch calls it."""
        return f"cuda:{self.index}"


@dataclass(frozen=True, slots=True)
class Placement:
    """Where one worker's teacher is.

    ``device`` is where its inputs go. ``max_memory`` says, by GPU index, how many bytes of each GPU the worker may
    take; empty off the GPUs. With more than one GPU in it the teacher's layers are spread over them.
    """

    device: str
    max_memory: tuple[tuple[int, int], ...] = ()

    @property
    def spread(self) -> bool:
        """Whether the teacher is on more than one device."""
        return len(self.max_memory) > 1


TRAINED_BYTES = 4.0
"""What training takes for each byte of weights: the weights, their gradients and Adam's two means, all fp32."""
FROZEN_BYTES = 1.0
"""The same where only adapters are trained, which are small beside the weights."""

SpreadStrategy = Literal["auto", "balanced", "balanced_low_0", "sequential", "custom"]


@dataclass(frozen=True, slots=True)
class Spread:
    """How a student is spread over devices.

    ``strategy`` is one of accelerate's device maps, or "custom": the first ``first_layers`` layers on the first GPU
    and the others evenly on the others; None puts as many on it as on each of the others. ``room`` says how many bytes
    of weights a device may hold: GPUs by their index, then "cpu" and "disk" where they may be used.
    """

    strategy: SpreadStrategy
    room: tuple[tuple[int | str, int], ...]
    first_layers: int | None = None


def place(
    gpus: Sequence[Gpu], *, wanted: str | None, reserve_vram: Sequence[float], model_bytes: int, workers: int
) -> list[Placement]:
    """A placement for each of ``workers`` workers that load a teacher of ``model_bytes`` each.

    ``wanted`` is the key ``device``: None or "cuda" uses all GPUs (the CPU if there is none), "cuda:N" only that one,
    anything else is where all workers go. ``reserve_vram`` are GB (10^9 bytes) to leave free on each GPU in their
    order; those without a value are used whole. Raises InputError naming how many workers fit if these don't, or if
    the wanted GPU isn't there.
    """
    candidates = _candidates(gpus, wanted)
    if not candidates:
        return [Placement(wanted or "cpu")] * workers
    reserved = dict(zip((gpu.index for gpu in gpus), reserve_vram, strict=False))
    room = {gpu.index: max(0, gpu.free - int(reserved.get(gpu.index, 0) * GB)) for gpu in candidates}
    groups = _groups(room, model_bytes, workers)
    if len(groups) < workers:
        raise InputError(_refusal(candidates, room, model_bytes, workers, len(groups)))
    users = {index: sum(index in group for group in groups) for index in room}
    return [
        Placement(f"cuda:{group[0]}", tuple((index, room[index] // users[index]) for index in group))
        for group in groups
    ]


def plan_spread(
    gpus: Sequence[Gpu],
    *,
    strategy: SpreadStrategy,
    max_memory: Mapping[str, int],
    first_layers: int | None,
    bytes_per_weight_byte: float,
) -> tuple[Spread, list[str]]:
    """How to spread a student over ``gpus``, and lines for the user on what can't be as was asked.

    max_memory: bytes by device, "0", "1", ... (0 bytes leave one out), "cpu", "disk"; a GPU without an entry may be
    filled, main memory and disk are used only if they have one. bytes_per_weight_byte: what training takes in all for
    each byte of weights. Without a GPU the student is on the CPU. Raises InputError if no device is left.
    """
    known = {str(gpu.index) for gpu in gpus}
    absent = [name for name in max_memory if name not in known and name not in _HOST_DEVICES]
    notes = [
        f"max_memory: GPU {name} is not on this machine ({len(gpus)} GPUs); its entry isn't used" for name in absent
    ]
    if not gpus:
        notes.append("multi_gpu: there is no GPU on this machine; the student is on the CPU")
        return Spread(strategy, (("cpu", max_memory.get("cpu", _UNLIMITED)),)), notes
    free = {gpu.index: min(gpu.free, max_memory.get(str(gpu.index), gpu.free)) for gpu in gpus}
    room: dict[int | str, int] = {index: int(size / bytes_per_weight_byte) for index, size in free.items() if size}
    if not room:
        raise InputError("max_memory: it leaves no GPU to the student; switch multi_gpu off, or raise an entry")
    room |= {name: int(max_memory[name] / bytes_per_weight_byte) for name in _HOST_DEVICES if name in max_memory}
    return Spread(strategy, tuple(room.items()), first_layers), notes


def visible_gpus() -> list[Gpu]:
    """The GPUs of this machine with what is free on them now."""
    import torch

    if not torch.cuda.is_available():
        return []
    return [Gpu(index, *torch.cuda.mem_get_info(index)) for index in range(torch.cuda.device_count())]


def _candidates(gpus: Sequence[Gpu], wanted: str | None) -> list[Gpu]:
    if wanted in (None, "cuda"):
        return list(gpus)
    if not wanted.startswith("cuda:"):
        return []
    named = [gpu for gpu in gpus if gpu.name == wanted]
    if not named:
        raise InputError(f"device: {wanted} is not on this machine ({len(gpus)} GPUs); use cpu, or null")
    return named


def _groups(room: dict[int, int], model_bytes: int, workers: int) -> list[tuple[int, ...]]:
    """The GPUs of as many workers as fit, at most ``workers``: first one GPU each, in turn, then several each."""
    need = model_bytes + _WORKING_BYTES
    left = dict(room)
    groups: list[tuple[int, ...]] = []
    while fitting := [index for index in left if left[index] >= need]:
        for index in fitting:
            left[index] -= need
            groups.append((index,))
    # What is left of a GPU that already has a worker is too small for another share of a model.
    unused = [index for index in room if left[index] == room[index]]
    while group := _smallest_group(unused, room, model_bytes):
        groups.append(group)
        unused = [index for index in unused if index not in group]
    return groups[:workers]


def _smallest_group(indices: Sequence[int], room: dict[int, int], model_bytes: int) -> tuple[int, ...]:
    """The first of ``indices`` that hold a spread model together; empty if all of them don't."""
    total = 0
    for count, index in enumerate(indices, 1):
        total += max(0, room[index] - _WORKING_BYTES)
        if total >= model_bytes * _SPREAD_LOSS:
            return tuple(indices[:count])
    return ()


def _refusal(gpus: Sequence[Gpu], room: dict[int, int], model_bytes: int, workers: int, fit: int) -> str:
    free = ", ".join(f"{gpu.name} {room[gpu.index] / GB:.1f}" for gpu in gpus)
    need = (
        f"the teacher needs {(model_bytes + _WORKING_BYTES) / GB:.1f} GB a worker; free after reserve_vram: {free} GB"
    )
    if not fit:
        return f"device: {need}; lower reserve_vram, free some memory, or use a smaller teacher or device cpu"
    return f"num_inference_workers: {workers}, but {fit} fit: {need}; set it to {fit} at most"
