"""Training on more text than the cache may hold: collect a part of it, train on the part, make room, go on.

Which samples make a part is decided once, by what the cap really holds, and kept in a journal beside the training's
state, so that a start after a kill goes on with the same parts. The journal also names every shard that the rounds
collected: these alone are ever deleted.
"""

import math
import os
import signal
import threading
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from io import StringIO
from pathlib import Path

import numpy as np
import numpy.typing as npt

from distill.allowance import MARGIN, RoundAllowance
from distill.cache import Layer
from distill.collect import LAYER_BYTES, Budget, Stopped
from distill.errors import InputError
from distill.files import allocated, disk_bytes, disk_size
from distill.filling import collect_all, collect_teacher
from distill.journal import Journal
from distill.lock import lock
from distill.parts import Parts, Visit, base_order, part_end
from distill.planning import (
    Work,
    cap_bytes,
    count_targets,
    expected_bytes,
    job_steps,
    most_bytes,
    open_budget,
    readers_lock,
    round_up_gb,
    survey_samples,
)
from distill.prepare import Job
from distill.report import Console
from distill.steps import Segment
from distill.teachers import JobTeacher
from distill.train import total_steps
from distill.types import TokenizedSample

Units = npt.NDArray[np.int64]
"""What the training's order moves as one (see ``steps``), by number."""


@dataclass(frozen=True, slots=True, eq=False)
class _Voice:
    """Where a collection says how it goes, and what ends it early."""

    console: Console
    stop: threading.Event


class Rounds:
    """The rounds of one training. The caller holds the cache's lock and the training's.

    ``use`` sums up what was collected. ``log`` is the file that a collection in the background writes to. ``inherited``
    are shards of rounds that this training replaces.
    """

    def __init__(
        self,
        job: Job,
        state: Path,
        works: Sequence[Work],
        console: Console,
        *,
        log: Path,
        inherited: frozenset[tuple[str, str]] = frozenset(),
    ) -> None:
        config = job.config
        self._job, self._voice, self._log = job, _Voice(console, threading.Event()), log
        self._journal = Journal.open(state)
        for layer, shard in sorted(inherited):
            self._journal.promise(layer, shard)
        self._forget_what_is_gone()
        self._samples = job.splits["train"].samples
        self._plan = job_steps(job)
        self._parts = Parts(
            order=base_order(len(self._plan.units), config.training.data_order, config.pipeline.seed),
            ends=tuple(self._journal.ends),
            units_per_step=self._plan.units_per_step,
            num_epochs=self._plan.num_epochs,
            epochs_per_round=config.cache.epochs_per_round,
        )
        self._overlaps = _overlaps(job)
        validation = [work for work in works if work.split == "validation"]
        if any(work.missing for work in validation):
            self._make_room(self._parts.order[self._parts.start(0) : 0], want=expected_bytes(validation))
        self.use = collect_all(job, validation, console)

    @property
    def segments(self) -> list[Segment]:
        """All that is trained, in order."""
        return self._parts.segments()

    @property
    def count(self) -> int:
        """Turns of the whole training, as far as they are known."""
        return len(list(self._parts.visits()))

    def rows(self, visit: Visit) -> npt.NDArray[np.int64]:
        """The rows of the dataset that are trained in ``visit``."""
        return self._plan.units.of(self._parts.rows(visit.part))

    def collect_next(self, step: int) -> Visit:
        """Collect what is trained when ``step`` optimizer steps are done. InputError if the cap holds no part."""
        nothing = self._parts.order[:0]
        self._make_room_after(step, nothing)
        return self._collect_next(step, nothing, self._voice)

    def finish(self) -> None:
        """The training is done. Shards of a text that never fits whole are of no use to the next one."""
        if len(self._parts.ends) > 1:
            self._make_room(self._parts.order[:0], want=cap_bytes(self._job.config))

    @contextmanager
    def next_one_meanwhile(self, visit: Visit) -> Iterator[None]:
        """Collect the part after ``visit`` while the block trains on this one, where the devices are others.

        What goes wrong with it ends the block as a signal would, and is raised here.
        """
        assert visit.last is not None, "only a collected part is trained on"
        if not self._overlaps or visit.last >= self._total_steps():
            yield
            return
        rows = self._parts.rows(visit.part)
        self._make_room_after(visit.last, rows)  # before the block opens what is there
        quiet = Console(StringIO(), StringIO())
        quiet.log_to(self._log)
        voice = _Voice(quiet, threading.Event())
        training = threading.Event()

        def told(ahead: Future[Visit]) -> None:
            if training.is_set() and ahead.exception() is not None:
                os.kill(os.getpid(), signal.SIGINT)

        with ThreadPoolExecutor(1, thread_name_prefix="next-round") as pool:
            training.set()
            ahead = pool.submit(self._collect_next, visit.last, rows, voice)
            ahead.add_done_callback(told)
            try:
                yield
            except BaseException:
                training.clear()
                voice.stop.set()
                error = ahead.exception()
                if error is not None and not isinstance(error, Stopped):
                    raise error from None
                raise
            training.clear()
            ahead.result()

    # -- collecting ---------------------------------------------------------------------------------------------------

    def _collect_next(self, step: int, keep: Units, voice: _Voice) -> Visit:
        """``keep``: rows whose shards take their part of the cap beside those of the next visit."""
        visit = self._parts.visit_after(step)
        if visit.last is not None:
            self._collect_again(visit, voice)
        else:
            self._collect_new(visit, keep, voice)
        return self._parts.visit_after(step)

    def _collect_again(self, visit: Visit, voice: _Voice) -> None:
        rows = self._parts.positions(visit.part)
        works = [self._survey(teacher, rows) for teacher in self._job.teachers]
        if any(work.missing for work in works):
            voice.console.say(f"round: collecting part {visit.part + 1} of {len(self._parts.ends)} again")
            budget = self._budget()
            for work in works:
                self._collect(work, budget, budget.left, voice, must=True, try_first=True)

    def _collect_new(self, visit: Visit, keep: Units, voice: _Voice) -> None:
        """As much of what no part has yet as there is room for: the next part."""
        start = self._parts.start(visit.part)
        rest = self._parts.order[start:]
        works = [self._survey(teacher, rest) for teacher in self._job.teachers]
        budget = self._budget()
        room = budget.left
        if self._overlaps and not len(keep) and MARGIN * expected_bytes(works) > room:
            room //= 2  # the other half is for the part that is collected while this one is trained on
        reach = len(rest)
        if any(work.missing for work in works):
            first = len(self._samples) - len(self._at(rest)) + 1
            voice.console.say(
                f"round: collecting part {visit.part + 1}, from sample {first:,} of {len(self._samples):,}"
            )
        for number, teacher in enumerate(self._job.teachers):
            work, *later = [self._survey(other, rest[:reach]) for other in self._job.teachers[number:]]
            expected = expected_bytes([work])
            share = room * expected // max(expected + expected_bytes(later), 1)
            few = self._reach(teacher, rest[:reach]) < self._parts.units_per_step
            room -= self._collect(work, budget, share, voice, must=False, try_first=few)
            reach = self._reach(teacher, rest[:reach])
        end = part_end(start, reach, units_per_step=self._parts.units_per_step, total=len(self._parts.order))
        if end == start:
            raise self._no_room(budget)
        self._journal.end_part(end)
        self._parts = replace(self._parts, ends=(*self._parts.ends, end))

    def _collect(self, work: Work, budget: Budget, share: int, voice: _Voice, *, must: bool, try_first: bool) -> int:
        """Collect what ``work`` misses within ``share`` bytes, and return those that it took."""
        before = budget.left
        layer = work.source.own
        allowance = RoundAllowance(
            budget,
            layer,
            share=share,
            bytes_per_target=work.bytes_per_target,
            must=must,
            try_first=try_first,
            promise=lambda shard: self._journal.promise(self._relative(layer), shard),
        )
        report = collect_teacher(self._job, [work], allowance, voice.console, stop=voice.stop)
        self.use = self.use.plus(report, reused_targets=0)
        return before - budget.left

    def _survey(self, teacher: JobTeacher, rows: Units) -> Work:
        return survey_samples(self._job, teacher, "train", self._at(rows))

    def _at(self, rows: Units) -> list[TokenizedSample]:
        return [self._samples[row] for row in self._plan.units.of(rows).tolist()]

    def _reach(self, teacher: JobTeacher, rows: Units) -> int:
        """How many of ``rows`` come before the first one of which ``teacher`` should have scored more than it has."""
        lacking = {sample.key for shard in self._survey(teacher, rows).missing for sample in shard}
        found = next((index for index, sample in enumerate(self._at(rows)) if sample.key in lacking), None)
        return (
            len(rows) if found is None else int(np.searchsorted(self._plan.units.sizes(rows).cumsum(), found, "right"))
        )

    # -- making room --------------------------------------------------------------------------------------------------

    def _make_room_after(self, step: int, keep: Units) -> None:
        """Room for what is trained after ``step``, beside the rows ``keep``."""
        visit = self._parts.visit_after(step)
        known = visit.last is not None
        rows = self._parts.positions(visit.part) if known else self._parts.order[self._parts.start(visit.part) :]
        works = [self._survey(teacher, rows) for teacher in self._job.teachers]
        if any(work.missing for work in works):
            self._make_room(np.union1d(rows, keep), want=int(MARGIN * expected_bytes(works)), step=step)

    def _make_room(self, keep: Units, *, want: int, step: int = 0) -> None:
        """Delete own shards that hold no sample of the rows ``keep``, those needed last first, until ``want`` fits."""
        needed = {sample.key for sample in self._at(keep)}
        next_use = self._next_uses(step)
        budget = self._budget()
        idle: list[tuple[float, Layer, str]] = []
        for teacher in self._job.teachers:
            layer = self._own_layer(teacher)
            for name in sorted(layer.shards):
                if (self._relative(layer), name) in self._journal.own:
                    keys = layer.keys(name)
                    if needed.isdisjoint(keys):
                        idle.append((min(next_use.get(key, math.inf) for key in keys), layer, name))
        idle.sort(key=lambda item: -item[0])
        doomed: dict[Path, tuple[Layer, list[str]]] = {}
        for _, layer, name in idle:
            if budget.left >= want:
                break
            info = layer.shards[name]
            budget.give_back(allocated(info.bytes) + allocated(64 * info.samples))
            doomed.setdefault(layer.folder, (layer, []))[1].append(name)
        if doomed:
            waiting = "waiting for other trainings that read the cache, to make room in it"
            with lock(readers_lock(self._job.config), waiting=lambda: self._voice.console.say(waiting)):
                for layer, names in doomed.values():
                    layer.drop(names)
                    self._journal.forget(self._relative(layer), names)

    def _next_uses(self, step: int) -> dict[bytes, float]:
        """By key, how many turns after ``step`` a sample is trained again; what no part has yet comes last."""
        visits = [visit for visit in self._parts.visits() if visit.last is not None and visit.last > step]
        uses: dict[bytes, float] = {}
        for distance, visit in enumerate(visits):
            for sample in self._at(self._parts.positions(visit.part)):
                uses.setdefault(sample.key, distance)
        for sample in self._at(self._parts.order[self._parts.start(len(self._parts.ends)) :]):
            uses.setdefault(sample.key, len(visits))
        return uses

    def _forget_what_is_gone(self) -> None:
        present = {
            (self._relative(layer), name) for layer in map(self._own_layer, self._job.teachers) for name in layer.shards
        }
        for layer_name, shard in sorted(self._journal.own - present):
            self._journal.forget(layer_name, [shard])

    def _own_layer(self, teacher: JobTeacher) -> Layer:
        return Layer.open(self._job.dataset_folder / "train", teacher.layer, self._job.admissions)

    def _relative(self, layer: Layer) -> str:
        return layer.folder.relative_to(self._job.dataset_folder).as_posix()

    def _budget(self) -> Budget:
        return open_budget(self._job.config, [self._own_layer(teacher) for teacher in self._job.teachers])

    def _total_steps(self) -> int:
        return total_steps(self._job.config.training, self._plan)

    def _no_room(self, budget: Budget) -> InputError:
        cap = cap_bytes(self._job.config)
        works = [self._survey(teacher, self._parts.order) for teacher in self._job.teachers]
        needed = cap - budget.left + smallest_round(self._job, works)
        return InputError(
            f"max_cache_size_gb: {cap / 1e9:g} GB have no room for the samples of one optimizer step; set it to"
            f" {round_up_gb(needed)} at least, lower save_topK or batch_size, or remove what this run doesn't use with"
            " --prune --yes"
        )


def exceeds_cap(job: Job, works: Sequence[Work], *, freed: int = 0) -> bool:
    """Whether what is missing surely or perhaps exceeds the cap: then a training goes in rounds.

    ``freed``: bytes that are going to be removed.
    """
    used = disk_bytes(job.dataset_folder) - freed
    return used + most_bytes(works) > cap_bytes(job.config) and any(work.missing for work in works)


def smallest_round(job: Job, works: Sequence[Work]) -> int:
    """About how many bytes a part needs at least: the shards of one optimizer step."""
    size = 0.0
    for work in works:
        if work.split == "train" and work.plan:
            shard = max(count_targets([shard]) for shard in work.plan)
            size += work.bytes_per_target * (_step_targets(job, work) + shard) + LAYER_BYTES
    return int(MARGIN * size)


def _step_targets(job: Job, work: Work) -> float:
    """About how many targets the samples of an optimizer step have."""
    plan = job_steps(job)
    return min(1.0, plan.units_per_step / len(plan.units)) * work.targets


def check_room(job: Job, works: Sequence[Work], *, set_free: Collection[tuple[str, str]], freed: int = 0) -> None:
    """Raises InputError, naming the smallest workable cap, if it surely has no room for validation and one shard.

    ``set_free``: shards, by layer and name, that may be deleted; ``freed``: bytes that are going to be removed.
    """
    cap, used = cap_bytes(job.config), disk_bytes(job.dataset_folder) - freed
    used -= sum(disk_size(job.dataset_folder / layer / f"{shard}.h5") for layer, shard in set_free)
    validation = expected_bytes([work for work in works if work.split == "validation"])
    shard = sum(
        work.bytes_per_target * max(_step_targets(job, work), min(count_targets([shard]) for shard in work.missing))
        for work in works
        if work.split == "train" and work.missing
    )
    # Estimates: half of them is surely needed.
    if used + (validation + shard) / 2 > cap:
        needed = used + int(MARGIN * validation) + smallest_round(job, works)
        raise InputError(
            f"max_cache_size_gb: {cap / 1e9:g} GB are below the validation records and the shards of one optimizer"
            f" step; set it to {round_up_gb(needed)} at least, lower save_topK, shard_targets or batch_size, or remove"
            " what this run doesn't use with --prune --yes"
        )


def _overlaps(job: Job) -> bool:
    wanted = job.config.cache.overlap_rounds
    if wanted is not None:
        return wanted
    # Without a named device the workers take all GPUs, the student's too.
    return job.config.model.device is not None and all(
        teacher.spec is not None and teacher.spec.device != job.student.device for teacher in job.teachers
    )
