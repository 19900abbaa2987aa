"""Stage 1 for a whole job: each teacher in turn fills its layers; stage 2 reads all of them as one."""

import threading
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from distill.cache import Source
from distill.collect import Allowance, CollectReport, collect, default_threads
from distill.dataloader import CachedSamples, TeacherShare
from distill.errors import InputError
from distill.lock import reading
from distill.models import loaded_bytes
from distill.placement import place, visible_gpus
from distill.planning import Work, open_budget, readers_lock
from distill.prepare import Job
from distill.report import Console
from distill.scoring import CollectSpec
from distill.splits import SPLITS, distinct


@dataclass(frozen=True, slots=True)
class CacheUse:
    """What the first stage made, over all teachers, and found made."""

    report: CollectReport = field(default_factory=CollectReport)
    reused_targets: int = 0

    def plus(self, report: CollectReport, reused_targets: int) -> "CacheUse":
        """With what else was made and found."""
        mine = self.report
        total = CollectReport(mine.seconds + report.seconds, mine.tokens + report.tokens, mine.targets + report.targets)
        return CacheUse(total, self.reused_targets + reused_targets)


def collect_all(job: Job, works: Sequence[Work], console: Console) -> CacheUse:
    """Fill the layers of all ``works``, one teacher after the other. The caller holds the lock if any is missing."""
    budget = open_budget(job.config, [work.source.own for work in works if work.missing])
    use = CacheUse()
    for teacher in job.teachers:
        own = [work for work in works if work.teacher is teacher]
        report = collect_teacher(job, own, budget, console)
        use = use.plus(report, sum(work.targets - work.missing_targets for work in own if teacher.spec))
    for work in works:
        if work.teacher.spec is None:
            continue
        reused = work.targets - work.missing_targets
        who = f", {work.teacher.layer.teacher}" if len(job.teachers) > 1 else ""
        console.say(f"{work.split}{who}: {reused:,} targets from the cache, {work.missing_targets:,} collected")
    return use


def collect_teacher(
    job: Job, works: Sequence[Work], allowance: Allowance, console: Console, *, stop: threading.Event | None = None
) -> CollectReport:
    """Fill the layers of one teacher's ``works``, by one set of workers, as far as ``allowance`` lets it."""
    missing = [work for work in works if work.missing]
    if not missing:
        return CollectReport()
    spec = missing[0].teacher.spec
    assert spec is not None, "nothing is missing of a teacher that isn't here"
    for work in missing:
        work.source.own.prepare()
    collection = job.config.collection
    workers = collection.num_inference_workers
    placements = place(
        visible_gpus(),
        wanted=job.config.model.device,
        reserve_vram=collection.reserve_vram or (),
        model_bytes=loaded_bytes(spec.folder, spec.dtype),
        workers=workers,
    )
    common = CollectSpec(
        teacher=spec,
        layer=missing[0].teacher.layer.describe(),
        threads=collection.threads_per_worker or default_threads(workers),
        tokens_per_batch=collection.collect_tokens_per_batch,
        batch_size=missing[0].teacher.batch_size,
    )
    specs = [common.on(placement) for placement in placements]
    label = f"collecting from {spec.folder.name}" if len(job.teachers) > 1 else "collecting"
    shards = [(work.source.own, work.missing) for work in missing]
    return collect(shards, specs, allowance=allowance, console=console, label=label, stop=stop)


def cached_samples(job: Job, split: str, stack: ExitStack, rows: npt.NDArray[np.int64] | None = None) -> CachedSamples:
    """A split as the loader reads it; only ``rows`` of it have to be in the cache (None: all).

    InputError if one of them isn't.
    """
    stack.enter_context(reading(readers_lock(job.config)))
    samples = job.splits[split].samples
    wanted = samples if rows is None else [samples[row] for row in rows.tolist()]
    shares = []
    lacking: dict[bytes, str] = {}
    served: set[bytes] = set()
    for teacher in sorted(job.teachers, key=lambda teacher: teacher.layer.hex):
        rest = distinct([sample for sample in wanted if teacher.scores(sample)])
        # What is held out of a cache that somebody else made is where it was for them.
        places = [split] if teacher.spec is not None else [split, *(other for other in SPLITS if other != split)]
        for where in places:
            source = stack.enter_context(Source.open(job.dataset_folder / where, teacher.layer, job.admissions))
            located = source.locate(rest)
            served |= located.keys()
            shares.append(TeacherShare(source, teacher.weight, located))
            rest = [sample for sample in rest if sample.key not in located]
        if teacher.spec is not None:
            lacking |= {sample.key: sample.where for sample in rest}
    lacking |= {sample.key: sample.where for sample in wanted if sample.key not in served}
    if lacking:
        alone = not job.config.pipeline.use_teachers
        advice = "give the text that it was made from, as it was rendered then" if alone else "run `collect` first"
        raise InputError(
            f"{job.dataset_folder / split}: the records of {len(lacking):,} samples are not in the cache"
            f" (first: {next(iter(lacking.values()))}); {advice}"
        )
    return CachedSamples(shares, samples)
