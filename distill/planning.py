"""What a job still has to collect, what that costs, and whether the size cap allows it."""

import math
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from distill.cache import Layer, LayerSpec, Source, readable_layers
from distill.collect import INDEX_GROWTH, LAYER_BYTES, SHARD_OVERHEAD, Budget, ShardPlan, plan_bytes, plan_shards
from distill.config import Config
from distill.errors import InputError
from distill.files import allocated, disk_bytes
from distill.lock import lock
from distill.prepare import Job
from distill.report import Console
from distill.splits import SPLITS, distinct
from distill.steps import Segment, StepPlan
from distill.teachers import JobTeacher
from distill.train import plan_steps
from distill.types import TokenizedSample


def job_steps(job: Job, segments: Sequence[Segment] = ()) -> StepPlan:
    """Which samples make which optimizer step of the job's training; see ``plan_steps``."""
    return plan_steps(job.config.training, job.splits["train"].samples, job.config.pipeline.seed, segments)


@dataclass(frozen=True, slots=True, eq=False)
class Work:
    """What one teacher has of a split, and which planned shards it has to make (whole or in part)."""

    teacher: JobTeacher
    split: str
    source: Source
    plan: list[ShardPlan]
    missing: list[ShardPlan]

    @property
    def targets(self) -> int:
        """Targets of all distinct samples."""
        return count_targets(self.plan)

    @property
    def missing_targets(self) -> int:
        """Targets that have to be collected."""
        return count_targets(self.missing)

    @property
    def bytes_per_target(self) -> float:
        """What a target takes in its shard: as measured in the layer, else as the codec is known to do."""
        shards = self.source.own.shards.values()
        targets = sum(info.targets for info in shards)
        if targets:
            return sum(info.bytes for info in shards) / targets
        return estimated_bytes_per_target(self.teacher.layer)

    def expected_bytes(self, top_k: int | None = None) -> int:
        """About how many bytes the missing shards will add on disk, with ``top_k`` entries where that is given."""
        layer = self.teacher.layer
        if top_k is None:
            per_target = self.bytes_per_target
        else:
            per_target = estimated_bytes_per_target(replace(layer, top_k=min(top_k, layer.top_k), mode="topk"))
        shards = int(per_target * self.missing_targets) + SHARD_OVERHEAD * len(self.missing)
        return min(shards, plan_bytes(self.missing, layer)) + _folder_bytes(self)


@contextmanager
def planned_work(
    job: Job, console: Console, *, may_collect: bool = True, always_lock: bool = False
) -> Iterator[list[Work]]:
    """What has to be collected, with the cache locked for it if that is anything, or ``always_lock``.

    One lock for all layers: the cap is one for all of them.
    """
    works = survey(job)
    # What was adopted without the index's help would be checked again by every start.
    untidy = any(work.source.own.notes for work in works) and may_collect and os.access(job.dataset_folder, os.W_OK)
    with ExitStack() as stack:
        if any(work.missing for work in works) or always_lock or untidy:
            if not may_collect and any(work.missing for work in works):
                lacking = sum(work.missing_targets for work in works)
                hint = "; ".join(["", *explain(job)])
                raise InputError(
                    f"{job.dataset_folder}: {lacking:,} targets are not in the cache; run `collect` first{hint}"
                )
            stack.enter_context(lock(cache_lock(job.config)))
            _recover(works, console)
            works = survey(job)
            for line in explain(job):
                console.say(line)
        for work in works:
            for layer in (work.source.own, *work.source.larger):
                for note in layer.notes:
                    console.warn(note)
        yield works


def cache_lock(config: Config) -> Path:
    """The lock of whoever changes the cache."""
    return Path(config.paths.cache_folder) / "dataset.lock"


def readers_lock(config: Config) -> Path:
    """Held by whoever trains from the cache, beside others; alone by whoever deletes something of it."""
    return Path(config.paths.cache_folder) / "dataset.readers"


def open_budget(config: Config, layers: Iterable[Layer]) -> Budget:
    """What the cap leaves, less what folders and small files of ``layers``, which are to be filled, may grow by."""
    dataset_folder = Path(config.paths.cache_folder) / "dataset"
    growth = sum(_growth(layer) for layer in layers)
    return Budget(cap_bytes(config), disk_bytes(dataset_folder) + growth)


def survey(job: Job) -> list[Work]:
    """What each teacher, by name, has and lacks of each split."""
    return [
        survey_samples(job, teacher, split, job.splits[split].samples) for teacher in job.teachers for split in SPLITS
    ]


def survey_samples(job: Job, teacher: JobTeacher, split: str, samples: Iterable[TokenizedSample]) -> Work:
    """What ``teacher`` has and lacks of these samples of a split; nothing is missing of one that isn't here."""
    scored = distinct([sample for sample in samples if teacher.scores(sample)])
    shards = plan_shards(scored, shard_targets=job.config.cache.shard_targets, layer=teacher.layer)
    source = Source.open(job.dataset_folder / split, teacher.layer, job.admissions)
    missing: set[bytes] = set()
    if teacher.spec is not None:
        with source:
            missing = {sample.key for sample in source.missing(scored)}
    rest = [tuple(sample for sample in shard if sample.key in missing) for shard in shards]
    return Work(teacher, split, source, shards, [shard for shard in rest if shard])


def check_cap(job: Job, works: Sequence[Work], *, freed: int = 0) -> None:
    """Raises InputError, naming the smallest cap and the largest K that would do, if the whole won't fit the cap.

    ``freed``: bytes that are going to be removed.
    """
    limit = cap_bytes(job.config)
    used, expected = disk_bytes(job.dataset_folder) - freed, expected_bytes(works)
    if used + expected <= limit:
        return
    fits = largest_top_k(job, works, limit - used)
    smaller = f"or save_topK {fits} at most" if fits else "no smaller save_topK would do"
    hint = "" if freed else "; --prune --yes removes what this run doesn't use"
    raise InputError(
        f"max_cache_size_gb: the cache needs about {(used + expected) / 1e9:.3g} GB of {limit / 1e9:g};"
        f" set it to {round_up_gb(used + expected)} at least, {smaller}{hint}"
    )


def largest_top_k(job: Job, works: Sequence[Work], room: int) -> int:
    """The largest K below the job's with which everything missing would take ``room`` bytes at most; 0 if none."""
    low, high = 0, job.top_k - 1
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if expected_bytes(works, middle) <= room else (low, middle - 1)
    return low


def most_bytes(works: Iterable[Work]) -> int:
    """An upper bound of the bytes that the missing shards will add on disk."""
    return sum(plan_bytes(work.missing, work.teacher.layer) + _folder_bytes(work) for work in works)


def expected_bytes(works: Iterable[Work], top_k: int | None = None) -> int:
    """About how many bytes the missing shards will add on disk."""
    return sum(work.expected_bytes(top_k) for work in works)


def estimated_bytes_per_target(layer: LayerSpec) -> float:
    """What a target takes before anything is measured: rules of thumb from benchmarks/codec, for plans."""
    exact = layer.cache_precision == "exact"
    if layer.mode == "full":  # no id has to be stored
        return 25.0 + layer.top_k * (1.6 if exact else 0.65)
    return 25.0 + 2.7 * layer.top_k if exact else 16.0 + 1.6 * layer.top_k**0.9


def cap_bytes(config: Config) -> int:
    """``max_cache_size_gb`` in bytes, 1 GB = 10^9."""
    return int(config.cache.max_cache_size_gb * 1e9)


def round_up_gb(size: int) -> float:
    """``size`` in GB with three digits, rounded up."""
    return -(-size // 1_000_000) / 1000


def explain(job: Job) -> Iterator[str]:
    """A line for each layer beside those of the job: what makes it another one. They are left as they are."""
    for folder, other, problem in readable_layers(job.dataset_folder / "train"):
        if other is None:
            yield f"layer {folder.name} is left as it is: {problem}"
            continue
        for teacher in job.teachers:
            changed = list(_differences(teacher.layer, other))
            if other.teacher == teacher.layer.teacher and changed:
                yield f"layer {folder.name} is left as it is; it has {', '.join(changed)}"


def describe_cost(job: Job, works: Sequence[Work]) -> Iterator[str]:
    """What the missing records will take, and where they exceed the cap, what each way out costs."""
    cap, used, expected = cap_bytes(job.config), disk_bytes(job.dataset_folder), expected_bytes(works)
    yield (
        f"cache: {used / 1e9:.3g} GB now, about {(used + expected) / 1e9:.3g} GB with all that is missing,"
        f" {(used + most_bytes(works)) / 1e9:.3g} GB at most; max_cache_size_gb {cap / 1e9:g}"
    )
    if used + expected <= cap:
        return
    train = [work for work in works if work.split == "train"]
    room = cap - used - expected_bytes([work for work in works if work.split != "train"])
    targets = sum(work.missing_targets for work in train)
    parts = math.ceil(expected_bytes(train) / room) if room > 0 else 0
    epochs = job_steps(job).num_epochs
    if not parts:
        yield "the cap has no room for any part of the training text beside the validation records"
        return
    again = (epochs - 1) * (parts - 1) / parts
    yield (
        f"about {parts} rounds an epoch: epochs_per_round 1 collects some {int(targets * (1 + again)):,} targets over"
        f" {epochs} epochs, epochs_per_round all {targets:,} (but repeats a part before it goes on to the next)"
    )
    smaller = largest_top_k(job, works, cap - used)
    yield f"one round would do with max_cache_size_gb {round_up_gb(used + expected)}" + (
        f" or save_topK {smaller}" if smaller else ""
    )


def count_targets(shards: Iterable[ShardPlan]) -> int:
    """Targets of planned shards."""
    return sum(len(sample.targets) for shard in shards for sample in shard)


def _differences(wanted: LayerSpec, other: LayerSpec) -> Iterator[str]:
    if wanted.weights != other.weights:
        yield "other teacher weights"
    if wanted.model_config != other.model_config:
        yield "another config.json of the teacher"
    if wanted.token_map != other.token_map and wanted.vocab_size == other.vocab_size:
        yield "another tokenizer"
    if wanted.vocab_size != other.vocab_size:
        yield f"crop {other.vocab_size}, not {wanted.vocab_size}"
    if wanted.top_k != other.top_k:
        yield f"K {other.top_k}, not {wanted.top_k}"
    for name, label in (
        ("dtype", "teacher_dtype"),
        ("cache_precision", "cache_precision"),
        ("quantisation", "weights in"),
    ):
        if getattr(wanted, name) != getattr(other, name):
            yield f"{label} {getattr(other, name)}, not {getattr(wanted, name)}"


def _recover(works: Iterable[Work], console: Console) -> None:
    """Before anything is planned: what kills left behind is adopted or removed. The caller holds the lock."""
    for work in works:
        if (work.missing or work.source.own.notes) and work.source.own.folder.exists():
            for line in work.source.own.prepare():
                console.say(line)


def _growth(layer: Layer) -> int:
    """The index is copied when it is put in order."""
    index = layer.folder / "index.jsonl"
    return INDEX_GROWTH + allocated(index.stat().st_size) if index.exists() else LAYER_BYTES


def _folder_bytes(work: Work) -> int:
    """A layer that is there already has its own small files among the used bytes."""
    return LAYER_BYTES if work.missing and not work.source.own.folder.exists() else 0
