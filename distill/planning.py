"""What a job still has to collect, and whether the size cap allows it."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from distill.cache import Layer
from distill.collect import LAYER_BYTES, ShardPlan, plan_bytes, plan_shards
from distill.config import Config
from distill.errors import InputError
from distill.files import disk_bytes
from distill.lock import lock
from distill.prepare import SPLITS, Job
from distill.report import Console


@dataclass(frozen=True, slots=True, eq=False)
class Work:
    """A split's layer and shards, and which of them have to be collected (whole or in part)."""

    layer: Layer
    plan: list[ShardPlan]
    missing: list[ShardPlan]

    @property
    def targets(self) -> int:
        """Targets of all distinct samples."""
        return _targets(self.plan)

    @property
    def missing_targets(self) -> int:
        """Targets that have to be collected."""
        return _targets(self.missing)


@contextmanager
def planned_work(job: Job, console: Console, *, may_collect: bool = True) -> Iterator[dict[str, Work]]:
    """What has to be collected, with the cap checked and, if that is anything, the cache locked for it.

    One lock for all layers: the cap is one for all of them.
    """
    works = survey(job)
    with ExitStack() as stack:
        if any(work.missing for work in works.values()):
            if not may_collect:
                lacking = sum(work.missing_targets for work in works.values())
                raise InputError(f"{job.dataset_folder}: {lacking:,} targets are not in the cache; run `collect` first")
            stack.enter_context(lock(Path(job.config.paths.cache_folder) / "dataset.lock"))
            works = _recover(job, works, console)
            check_cap(job, works)
        yield works


def survey(job: Job) -> dict[str, Work]:
    """What each split has and lacks."""
    return {split: _survey_split(job, split) for split in SPLITS}


def check_cap(job: Job, works: dict[str, Work]) -> None:
    """Raises InputError, naming the smallest cap and the largest K that would do, if the plan exceeds the cap."""
    limit = cap_bytes(job.config)
    used, needed = disk_bytes(job.dataset_folder), needed_bytes(job, works)
    if used + needed <= limit:
        return

    def fits(top_k: int) -> bool:
        other = replace(job, layer=replace(job.layer, top_k=top_k))
        return used + needed_bytes(other, survey(other)) <= limit

    low, high = 0, job.layer.top_k - 1
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    smaller = f"or save_topK {low} at most" if low else "no smaller save_topK would do"
    raise InputError(
        f"max_cache_size_gb: the cache needs up to {(used + needed) / 1e9:.3f} GB of {limit / 1e9:g};"
        f" set it to {_round_up_gb(used + needed)} at least, {smaller}"
    )


def _survey_split(job: Job, split: str) -> Work:
    config = job.config
    samples = job.splits[split].distinct()
    shards = plan_shards(
        samples, shard_targets=config.cache.shard_targets, top_k=job.layer.top_k, vocab_size=job.layer.vocab_size
    )
    layer = Layer.open(job.dataset_folder / split, job.layer)
    with layer:
        missing = {sample.key for sample in layer.missing(samples)}
    rest = [tuple(sample for sample in shard if sample.key in missing) for shard in shards]
    return Work(layer, shards, [shard for shard in rest if shard])


def _recover(job: Job, works: dict[str, Work], console: Console) -> dict[str, Work]:
    """Before anything is planned: what kills left behind is adopted or removed. The caller holds the lock."""
    for work in works.values():
        if work.missing and work.layer.folder.exists():
            for line in work.layer.prepare():
                console.say(line)
    return survey(job)


def needed_bytes(job: Job, works: dict[str, Work]) -> int:
    """An upper bound of the bytes that the missing shards will add on disk."""
    total = 0
    for work in works.values():
        total += plan_bytes(work.missing, top_k=job.layer.top_k, vocab_size=job.layer.vocab_size)
        # A layer that is there already has its own small files among the used bytes.
        total += LAYER_BYTES if work.missing and not work.layer.folder.exists() else 0
    return total


def cap_bytes(config: Config) -> int:
    """``max_cache_size_gb`` in bytes, 1 GB = 10^9."""
    return int(config.cache.max_cache_size_gb * 1e9)


def _round_up_gb(size: int) -> float:
    return -(-size // 1_000_000) / 1000


def _targets(shards: list[ShardPlan]) -> int:
    return sum(len(sample.targets) for shard in shards for sample in shard)
