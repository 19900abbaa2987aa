"""Which worker runs on which devices. A pure function of what the devices have and what a teacher needs.

A teacher that fits on one GPU is placed whole, the workers spread over the GPUs in turn; a larger one takes as many
whole GPUs as it needs, and accelerate spreads its layers over them. Without a GPU every worker is on the CPU.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from distill.errors import InputError

GB = 10**9

# What a worker needs on each of its GPUs besides the weights: CUDA's context, activations, a piece of logits. A batch
# that needs more is halved, so this decides only how many workers are let in.
_WORKING_BYTES = 2 * GB
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
