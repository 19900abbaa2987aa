"""Stage 1: teacher workers fill a layer with sealed shards.

A worker takes one planned shard at a time and makes its whole file, so a kill costs at most the shards in work. Only
the parent writes the index and says which bytes may still be written.
"""

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from distill.cache import Layer, ShardImage, ShardInfo, build_shard
from distill.cache.shard import bytes_bound
from distill.collate import token_batches
from distill.errors import InputError, MachineError
from distill.files import BLOCK, free_bytes
from distill.records import concat
from distill.report import Console
from distill.teacher import Teacher, TeacherSpec
from distill.types import Records, TokenizedSample
from distill.workers import Channel, WorkerPool

ShardPlan = tuple[TokenizedSample, ...]

# A shard is built in memory, together with the arrays it is made from.
_SHARD_BYTES = 64 << 20
# What the index takes for a shard, twice: it is rewritten sorted at the end.
_INDEX_BYTES = 2 * 512
# Folders and small files of a new layer.
LAYER_BYTES = 8 * BLOCK


@dataclass(frozen=True, slots=True)
class CollectSpec:
    """What a worker has to know; crosses into its process."""

    teacher: TeacherSpec
    layer: Mapping[str, Any]
    threads: int
    tokens_per_batch: int


@dataclass(frozen=True, slots=True, eq=False)
class ShardTask:
    """One planned shard and the folder that it belongs into."""

    folder: Path
    samples: ShardPlan


@dataclass(frozen=True, slots=True)
class CollectReport:
    """What a collection did; ``seconds`` with the teacher's loading, ``tokens`` without padding."""

    seconds: float = 0.0
    tokens: int = 0
    targets: int = 0


class Budget:
    """The bytes that the cache may take on disk: ``limit``, and how many are used or promised to a shard."""

    def __init__(self, limit: int, used: int) -> None:
        self._limit = limit
        self._used = used
        self._promised: dict[str, int] = {}

    def take(self, shard: str, size: int) -> None:
        """Promise ``size`` bytes to a shard, once however often it asks. Raises InputError if the cap forbids it."""
        total = self._used - self._promised.get(shard, 0) + size
        if total > self._limit:
            raise InputError(
                f"max_cache_size_gb: the cache would take {total / 1e9:.3f} of {self._limit / 1e9:g} GB;"
                " raise it or lower save_topK; what was collected is kept"
            )
        self._used, self._promised[shard] = total, size


def plan_shards(
    samples: Sequence[TokenizedSample], *, shard_targets: int, top_k: int, vocab_size: int
) -> list[ShardPlan]:
    """Cut distinct samples, in their order, into shards of about ``shard_targets`` targets and bounded size.

    Depends on the samples and settings alone, never on what is there already: so a shard that is collected again has
    the same bytes.
    """
    plan: list[ShardPlan] = []
    current: list[TokenizedSample] = []
    tokens = targets = 0
    for sample in samples:
        length, count = len(sample.token_ids), len(sample.targets)
        too_large = bytes_bound(tokens + length, targets + count, top_k, vocab_size) > _SHARD_BYTES
        if current and (targets + count > shard_targets or too_large):
            plan.append(tuple(current))
            current, tokens, targets = [], 0, 0
        current.append(sample)
        tokens, targets = tokens + length, targets + count
    return [*plan, tuple(current)] if current else plan


def plan_bytes(plan: Sequence[ShardPlan], *, top_k: int, vocab_size: int) -> int:
    """An upper bound of what the planned shards will take on disk, their share of the index included."""
    sizes = (
        bytes_bound(sum(len(s.token_ids) for s in shard), sum(len(s.targets) for s in shard), top_k, vocab_size)
        + 64 * len(shard)
        + 2 * BLOCK
        + _INDEX_BYTES
        for shard in plan
    )
    return sum(sizes)


class CollectWorker:
    """Lives in a worker process with its teacher; called once a shard."""

    def __init__(self, spec: CollectSpec) -> None:
        torch.set_num_threads(spec.threads)
        self._spec = spec
        self._teacher = Teacher(spec.teacher)
        self._told = False

    def __call__(self, task: ShardTask, channel: Channel) -> ShardInfo:
        """Collect and seal one shard; asks the parent for the bytes before it writes them."""
        if self._teacher.note and not self._told:
            channel.progress(self._teacher.note)
            self._told = True
        image = self._build(task.samples, channel)
        channel.request((image.info.name, image.disk_bytes))
        image.seal(task.folder)
        return image.info

    def _build(self, shard: ShardPlan, channel: Channel) -> ShardImage:
        lengths = np.array([len(sample.token_ids) for sample in shard], np.int64)
        by_row: dict[int, Records] = {}
        for rows in token_batches(lengths, self._spec.tokens_per_batch):
            by_row |= dict(zip(rows, self._teacher.records([shard[row] for row in rows]), strict=True))
            channel.progress(int(lengths[rows].sum()))
        records = concat([by_row[row] for row in range(len(shard))])
        return build_shard(shard, records, layer=self._spec.layer, vocab_size=self._spec.teacher.vocab_size)


def collect(
    work: Sequence[tuple[Layer, Sequence[ShardPlan]]],
    spec: CollectSpec,
    *,
    workers: int,
    budget: Budget,
    console: Console,
) -> CollectReport:
    """Fill each layer with its planned shards, by the same workers. The caller holds the layers' locks.

    Raises InputError if the cap is reached, MachineError if the disk is full or a shard kills its worker twice.
    """
    started = time.monotonic()
    shards = [(layer, shard) for layer, plan in work for shard in plan]
    if not shards:
        return CollectReport()
    names = [f"shard {number} of {len(shards)}" for number in range(1, len(shards) + 1)]
    layer_of = {name: layer for name, (layer, _) in zip(names, shards, strict=True)}
    tasks = [(name, ShardTask(layer.folder, shard)) for name, (layer, shard) in zip(names, shards, strict=True)]
    samples = [sample for _, shard in shards for sample in shard]
    tokens = sum(len(sample.token_ids) for sample in samples)
    with console.progress("collecting", tokens, "tokens") as progress:

        def on_progress(payload: int | str) -> None:
            if isinstance(payload, str):
                console.warn(payload)
            else:
                progress.advance(payload)

        def on_request(request: tuple[str, int]) -> bool:
            name, size = request
            budget.take(name, size + _INDEX_BYTES)
            folder = shards[0][0].folder
            free = free_bytes(folder)
            if free < size + BLOCK:
                raise MachineError(f"{folder}: disk full: {size:,} bytes needed, {free:,} free; free some space")
            return True

        with WorkerPool(CollectWorker, [(spec,)] * workers) as pool:
            for name, info in pool.run(tasks, on_progress=on_progress, on_request=on_request):
                layer_of[str(name)].register(info)
    for layer, _ in work:
        layer.compact()
    targets = sum(len(sample.targets) for sample in samples)
    return CollectReport(time.monotonic() - started, tokens, targets)


def default_threads(workers: int) -> int:
    """Threads a worker gets when nothing is said: an equal share of the processors."""
    return max(1, (os.cpu_count() or 1) // workers)
