"""Removing from a cache what a job doesn't use: only when asked to, and only when that was confirmed."""

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from distill.cache import Layer, Source, readable_layers
from distill.config import RunOptions
from distill.errors import InputError
from distill.files import os_errors
from distill.lock import lock
from distill.planning import cache_lock, readers_lock
from distill.prepare import Job
from distill.report import Console
from distill.splits import SPLITS, distinct


@dataclass(frozen=True, slots=True)
class Unused:
    """Shards of a layer that hold no sample of the job; ``whole`` if those are all that it has."""

    folder: Path
    shards: tuple[str, ...]
    bytes: int
    whole: bool


def unused(job: Job) -> list[Unused]:
    """What of the cache the job doesn't use: shards without a sample of it, and layers that serve no teacher of it."""
    used = _used_shards(job)
    found = []
    for split in SPLITS:
        for folder, spec, _ in readable_layers(job.dataset_folder / split):
            if spec is None or folder.is_symlink():  # of a newer program, damaged, or elsewhere: not ours to judge
                continue
            with Layer.load(folder, job.admissions) as layer:
                idle = [name for name in sorted(layer.shards) if (folder, name) not in used]
                if idle or not layer.shards:
                    size = sum(layer.shards[name].bytes for name in idle)
                    found.append(Unused(folder, tuple(idle), size, whole=len(idle) == len(layer.shards)))
    return found


def unused_bytes(job: Job) -> int:
    """About what pruning would free."""
    return sum(item.bytes for item in unused(job))


def describe_unused(items: Sequence[Unused]) -> Iterator[str]:
    """A line for each layer that could be pruned."""
    for item in items:
        what = "the whole layer" if item.whole else f"{len(item.shards)} shards"
        yield f"unused: {what} {item.folder.parent.name}/{item.folder.name}, {item.bytes / 1e9:.3g} GB"


def prune(job: Job, options: RunOptions, console: Console) -> None:
    """Remove what the job doesn't use, if ``--prune`` asks for it. InputError without ``--yes``: nothing is removed."""
    if not options.prune:
        return
    with lock(cache_lock(job.config)), lock(readers_lock(job.config)):
        items = unused(job)
        for line in describe_unused(items):
            console.say(line)
        if not items:
            console.say("nothing to prune: all of the cache is used")
            return
        size = sum(item.bytes for item in items)
        if not options.yes:
            raise InputError(
                f"--prune: would remove {size / 1e9:.3g} GB of records that were collected earlier; --yes allows it"
            )
        for item in items:
            _remove(job, item)
        console.say(f"removed {size / 1e9:.3g} GB")


def _used_shards(job: Job) -> set[tuple[Path, str]]:
    used = set()
    for split in SPLITS:
        for teacher in job.teachers:
            scored = distinct([sample for sample in job.splits[split].samples if teacher.scores(sample)])
            with Source.open(job.dataset_folder / split, teacher.layer, job.admissions) as source:
                layers = (source.own, *source.larger)
                used |= {(layers[place.layer].folder, place.shard) for place in source.locate(scored).values()}
    return used


def _remove(job: Job, item: Unused) -> None:
    with Layer.load(item.folder, job.admissions) as layer:
        layer.drop(item.shards)
        empty = not layer.shards
    if empty:
        with os_errors("remove", item.folder):
            shutil.rmtree(item.folder)
