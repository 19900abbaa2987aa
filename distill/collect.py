"""Stage 1: teacher workers fill a layer with sealed shards.

A worker takes one planned shard at a time and makes its whole file, so a kill costs at most the shards in work. Only
the parent writes the index and says which bytes may still be written.
"""

import os
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from distill.cache import Layer, LayerSpec, ShardImage, ShardInfo
from distill.cache.shard import bytes_bound
from distill.errors import InputError, MachineError
from distill.files import BLOCK, free_bytes
from distill.report import Console
from distill.scoring import CollectSpec, CollectWorker, ShardTask
from distill.types import TokenizedSample
from distill.workers import Task, WorkerPool

ShardPlan = tuple[TokenizedSample, ...]

# A shard is built in memory, together with the arrays it is made from.
_SHARD_BYTES = 64 << 20
# What the index takes for a shard, twice: it is rewritten sorted at the end.
_INDEX_BYTES = 2 * 512
# What a shard costs however little is in it: HDF5's own, half a block at the end, its key rows and its index line.
SHARD_OVERHEAD = 4 * BLOCK
# Folders and small files of a new layer; and what those of one that is there may grow by, the index's copy included.
LAYER_BYTES = 8 * BLOCK
INDEX_GROWTH = 3 * BLOCK


@dataclass(frozen=True, slots=True)
class CollectReport:
    """What a collection did; ``seconds`` with the teacher's loading, ``tokens`` without padding."""

    seconds: float = 0.0
    tokens: int = 0
    targets: int = 0


class Stopped(Exception):  # noqa: N818 - not an error: whoever set the event wants it
    """The collection was told to stop."""


class Allowance(Protocol):
    """Says what may still be collected and written."""

    def wants(self, shard: ShardPlan) -> bool:
        """Whether to begin with ``shard``; after the first no, nothing more is begun."""
        ...

    def take(self, folder: Path, shard: str, size: int) -> bool:
        """Promise ``size`` bytes on disk to a shard of the layer in ``folder``, once however often it asks."""
        ...

    def sealed(self, info: ShardInfo, seconds: float) -> None:
        """Told of every shard that was sealed, ``seconds`` after the collection began."""
        ...


class Budget:
    """The bytes that the cache may take on disk: ``limit``, and how many are used or promised to a shard."""

    def __init__(self, limit: int, used: int) -> None:
        self._limit = limit
        self._used = used
        self._promised: dict[tuple[Path, str], int] = {}

    @property
    def left(self) -> int:
        """Bytes that nobody was promised."""
        return self._limit - self._used

    def wants(self, shard: ShardPlan) -> bool:
        """Everything: the plan was compared with the cap beforehand."""
        return True

    def take(self, folder: Path, shard: str, size: int) -> bool:
        """See ``Allowance.take``. Raises InputError if the cap forbids it."""
        if not self.try_take(folder, shard, size):
            total = self._used + size - self._promised.get((folder, shard), 0)
            raise InputError(
                f"max_cache_size_gb: the cache would take {total / 1e9:.3g} of {self._limit / 1e9:g} GB;"
                " raise it or lower save_topK; what was collected is kept"
            )
        return True

    def try_take(self, folder: Path, shard: str, size: int) -> bool:
        """The same, but False where the cap forbids it."""
        total = self._used - self._promised.get((folder, shard), 0) + size
        if total > self._limit:
            return False
        self._used, self._promised[folder, shard] = total, size
        return True

    def give_back(self, size: int) -> None:
        """``size`` bytes were freed on disk."""
        self._used -= size

    def sealed(self, info: ShardInfo, seconds: float) -> None:
        """Nothing to learn from it."""


def plan_shards(samples: Sequence[TokenizedSample], layer: LayerSpec, shard_targets: int) -> list[ShardPlan]:
    """Cut distinct samples, in their order, into shards of about ``shard_targets`` targets and bounded size.

    Depends on the samples and settings alone, never on what is there already: so a shard that is collected again has
    the same bytes.
    """
    plan: list[ShardPlan] = []
    current: list[TokenizedSample] = []
    tokens = targets = 0
    for sample in samples:
        length, count = len(sample.token_ids), len(sample.targets)
        too_large = _bound(layer, tokens + length, targets + count, len(current) + 1) > _SHARD_BYTES
        if current and (targets + count > shard_targets or too_large):
            plan.append(tuple(current))
            current, tokens, targets = [], 0, 0
        current.append(sample)
        tokens, targets = tokens + length, targets + count
    return [*plan, tuple(current)] if current else plan


def plan_bytes(plan: Sequence[ShardPlan], layer: LayerSpec) -> int:
    """An upper bound of what the planned shards will take on disk, their share of the index included."""
    return sum(shard_bytes(shard, layer) for shard in plan)


def shard_bytes(shard: ShardPlan, layer: LayerSpec) -> int:
    """The same for one shard."""
    tokens, targets = sum(len(s.token_ids) for s in shard), sum(len(s.targets) for s in shard)
    return _bound(layer, tokens, targets, len(shard)) + 64 * len(shard) + 2 * BLOCK + _INDEX_BYTES


def _bound(layer: LayerSpec, tokens: int, targets: int, samples: int) -> int:
    return bytes_bound(
        tokens,
        targets,
        layer.top_k,
        layer.vocab_size,
        samples=samples,
        precision=layer.cache_precision,
        mode=layer.mode,
    )


def collect(
    work: Sequence[tuple[Layer, Sequence[ShardPlan]]],
    specs: Sequence[CollectSpec],
    *,
    allowance: Allowance,
    console: Console,
    label: str = "collecting",
    stop: threading.Event | None = None,
) -> CollectReport:
    """Fill each layer with its planned shards, by workers of one teacher, one for each of ``specs``.

    Ends early where ``allowance`` says so, or with Stopped soon after ``stop`` is set. The caller holds the cache's
    lock. Raises InputError if the cap is reached against the plan, MachineError if the disk is full or a shard kills
    its worker twice.
    """
    started = time.monotonic()
    shards = [(layer, shard) for layer, plan in work for shard in plan]
    if not shards:
        return CollectReport()
    layer_of = {f"shard {number} of {len(shards)}": layer for number, (layer, _) in enumerate(shards, 1)}
    total = sum(len(sample.token_ids) for _, shard in shards for sample in shard)
    tokens = targets = 0
    with console.progress(label, total, "tokens") as progress:

        def tasks() -> Iterator[Task]:
            for name, (layer, shard) in zip(layer_of, shards, strict=True):
                if not allowance.wants(shard):
                    return
                yield name, ShardTask(layer.folder, shard)

        def on_progress(payload: int | str) -> None:
            if isinstance(payload, str):
                console.warn(payload)
            else:
                progress.advance(payload)

        def on_wait() -> None:
            if stop is not None and stop.is_set():
                raise Stopped

        def on_request(request: tuple[Path, str, int]) -> bool:
            folder, name, size = request
            if not allowance.take(folder, name, size + _INDEX_BYTES):
                return False
            _check_disk(folder, size)
            return True

        with WorkerPool(CollectWorker, [(spec,) for spec in specs[: len(shards)]]) as pool:
            for name, info in pool.run(tasks(), on_progress=on_progress, on_request=on_request, on_wait=on_wait):
                if info is None:  # there was no room for it
                    continue
                layer_of[str(name)].register(info)
                allowance.sealed(info, time.monotonic() - started)
                tokens, targets = tokens + info.tokens, targets + info.targets
    for layer, _ in work:
        layer.compact()
    return CollectReport(time.monotonic() - started, tokens, targets)


def seal_image(layer: Layer, image: ShardImage, budget: Budget) -> None:
    """Write and register one shard inside the cap; InputError if that, MachineError if the disk has no room for it."""
    budget.take(layer.folder, image.info.name, image.disk_bytes + _INDEX_BYTES)
    _check_disk(layer.folder, image.disk_bytes)
    image.seal(layer.folder)
    layer.register(image.info)


def _check_disk(folder: Path, size: int) -> None:
    free = free_bytes(folder)
    if free < size + BLOCK:
        raise MachineError(f"{folder}: disk full: {size:,} bytes needed, {free:,} free; free some space")


def default_threads(workers: int) -> int:
    """Threads a worker gets when nothing is said: its share of the processors, and not more than OMP_NUM_THREADS."""
    share = max(1, (os.cpu_count() or 1) // workers)
    said = os.environ.get("OMP_NUM_THREADS", "")
    return min(share, int(said)) if said.isdecimal() and int(said) else share
