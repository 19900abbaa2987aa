"""The whole job: plan, both stages, and what a run leaves behind."""

import datetime
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from distill.cache import Source
from distill.checkpoint import saved_step
from distill.config import Config, RunOptions
from distill.errors import DistillError, InputError
from distill.filling import CacheUse, cached_samples, collect_all
from distill.journal import Journal
from distill.lock import lock
from distill.models import release_memory
from distill.optim import check_optimizer, paging_note
from distill.planning import Work, check_cap, describe_cost, explain, job_steps, planned_work, survey
from distill.prepare import Job, prepared
from distill.progress import TrainPaths, TrainReport
from distill.pruning import describe_unused, prune, unused, unused_bytes
from distill.rebase import rebase
from distill.report import (
    CacheSummary,
    CollectSummary,
    Console,
    RunFolder,
    SplitSummary,
    Status,
    Summary,
    Tracker,
    TrainSummary,
    ValidationSummary,
    open_tracker,
    wandb_run_name,
)
from distill.rounds import Rounds, check_room, exceeds_cap
from distill.runs import (
    Run,
    check_identity,
    deciding,
    export_folder,
    finish_run,
    has_begun,
    load_run,
    new_run,
    remove_leftovers,
    save_run,
    set_aside,
    settle,
    state_folder,
)
from distill.splits import SPLITS, Split
from distill.steps import Segment
from distill.student import Student
from distill.train import Trainer, describe, make_schedule, total_steps
from distill.train import evaluate as evaluate_student

# -- verbs -----------------------------------------------------------------------------------------------------------


def run(config: Config, options: RunOptions) -> None:
    """Collect what is missing, train, validate, export; in rounds where the cap holds only a part of the text."""
    _train(config, options, may_collect=True)


def train(config: Config, options: RunOptions) -> None:
    """The same without a teacher's work: InputError if records are missing."""
    _train(config, options, may_collect=False)


def collect(config: Config, options: RunOptions) -> None:
    """Collect what is missing, and no more."""
    console = Console()
    if not config.pipeline.use_teachers:
        raise InputError("use_teachers: false leaves nothing to collect with; use train")
    with prepared(config, console) as job:
        if options.prune and options.yes:
            check_cap(job, survey(job), freed=unused_bytes(job))
        prune(job, options, console)
        rebase(job, options, console)
        with planned_work(job, console) as works:
            check_cap(job, works)
            folder = RunFolder.create(_runs(config), job.name, config.dump(), console)
            with _outcome(folder, console, _summary(job)) as outcome:
                outcome.summary = _with_cache(outcome.summary, job, collect_all(job, works, console), rounds=1)


def plan(config: Config, options: RunOptions) -> None:
    """Say what a run would do, and do none of it; only the digests of the models are remembered."""
    console = Console()
    with prepared(_settled_for_plan(config, options, console), console) as job:
        _check_training(job, console)
        works = survey(job)
        for work in works:
            console.say(
                f"{work.split}, {work.teacher.layer.teacher}: {work.targets:,} targets in {len(work.plan)} shards;"
                f" {work.missing_targets:,} targets in {len(work.missing)} shards are to be collected"
            )
        for line in (*explain(job), *describe_cost(job, works), *describe_unused(unused(job))):
            console.say(line)
        steps = job_steps(job)
        console.say(f"training: {total_steps(job.config.training, steps):,} steps, {steps.steps_per_epoch:,} an epoch")


def _settled_for_plan(config: Config, options: RunOptions, console: Console) -> Config:
    """A plan only looks: that a run could not start so is worth a line."""
    try:
        return settle(config, options)
    except InputError as error:
        console.warn(str(error))
        return config


def evaluate(config: Config, options: RunOptions) -> None:
    """The validation metrics of the student as it is; InputError if validation records are missing."""
    console = Console()
    with prepared(config, console) as job, ExitStack() as stack:
        data = cached_samples(job, "validation", stack)
        metrics = evaluate_student(Student(job.student), data)
    console.say(f"{job.student.folder.name}: {describe(metrics)}")


# -- training --------------------------------------------------------------------------------------------------------


def _train(given: Config, options: RunOptions, *, may_collect: bool) -> None:
    console = Console()
    config = settle(given, options)
    state = state_folder(config)
    with prepared(config, console) as job, lock(state.with_name(f"{state.name}.lock")), ExitStack() as collecting:
        _check_training(job, console)
        if settle(given, options) != config:
            raise InputError(f"{state}: another start came first; start again")
        going_on = Journal.exists(state) and not options.fresh
        if going_on and not config.pipeline.use_teachers:
            raise InputError(
                "use_teachers: the unfinished run goes in rounds and needs its teachers; --fresh sets it aside"
            )
        if options.prune and options.yes and not going_on and exceeds_cap(job, survey(job), freed=unused_bytes(job)):
            check_room(job, survey(job), set_free=Journal.own_of(state), freed=unused_bytes(job))
        prune(job, options, console)
        rebase(job, options, console)
        works = collecting.enter_context(
            planned_work(job, console, may_collect=may_collect, always_lock=going_on and may_collect)
        )
        in_parts = going_on or exceeds_cap(job, works)
        if in_parts and config.training.ce_below_entropy_quantile:
            raise InputError(
                "ce_below_entropy_quantile: needs all records at once, which max_cache_size_gb doesn't hold; leave it"
                " at 0, or raise max_cache_size_gb"
            )
        if in_parts and not going_on:
            check_room(job, works, set_free=Journal.own_of(state))
        if any(work.missing for work in works):
            Student(job.student)  # what is wrong with it is better known before the teacher's work than after
            release_memory()
        elif not in_parts:
            _check_readable(job)  # a run that can't read its records isn't begun
        inherited = Journal.own_of(state)
        if options.fresh:
            set_aside(state)
        this_run, folder = _open_run(job, state, console)
        with _outcome(folder, console, _summary(job)) as outcome:
            stage = _Stage(job, this_run, state, folder, console)
            if in_parts:
                for line in describe_cost(job, works):
                    console.say(line)
                with stage.tracker() as tracker:
                    report, use, rounds = _train_in_rounds(stage, works, tracker, inherited)
            else:
                use, rounds = collect_all(job, works, console), 1
                outcome.summary = _with_cache(outcome.summary, job, use, rounds)
                collecting.close()  # others may collect from now on
                with stage.tracker() as tracker:
                    report = stage.train(tracker)
            outcome.summary = replace(
                _with_cache(outcome.summary, job, use, rounds),
                train=_train_summary(report),
                validation=ValidationSummary(report.before, report.after),
            )
        finish_run(state, this_run, keep_state=config.training.save_final_state)
    console.say(f"student: {report.student}")


def _check_readable(job: Job) -> None:
    with ExitStack() as stack:
        for split in SPLITS:
            cached_samples(job, split, stack)


def _check_training(job: Job, console: Console) -> None:
    """Optimizer and schedule, before any work is done; InputError if they don't fit."""
    training = job.config.training
    if training.ce_below_entropy_quantile and len(job.teachers) > 1:
        raise InputError(
            "ce_below_entropy_quantile: the entropy of several teachers' average is unknown; leave it at 0, or give all"
            " but one a weight of 0 (teacher_weights)"
        )
    check_optimizer(
        training.optimizer,
        betas=training.betas,
        eps=training.eps,
        momentum=training.momentum,
        alpha=training.rmsprop_alpha,
    )
    note = paging_note(training.optimizer, job.student.device)
    if note:
        console.say(note)
    total = total_steps(training, job_steps(job))
    schedule = make_schedule(training, total)
    if total == 1 and not schedule.lr(1):
        console.warn(
            "the only step of this training has a learning rate of 0: give more epochs or samples, or a final_lr"
        )


def _train_in_rounds(
    stage: "_Stage", works: list[Work], tracker: Tracker, inherited: frozenset[tuple[str, str]]
) -> tuple[TrainReport, CacheUse, int]:
    """Collect, train, make room, and again. The caller holds the cache's lock. Returns the number of rounds, too."""
    log = stage.folder.path / "log.txt"
    rounds = Rounds(stage.job, stage.state, works, stage.console, log=log, inherited=inherited)
    resumed_from = saved_step(stage.state)
    report: TrainReport | None = None
    while report is None or not report.finished:
        visit = rounds.collect_next(report.steps if report else resumed_from or 0)
        with rounds.next_one_meanwhile(visit):
            report = stage.train(tracker, rounds.segments, rows=rounds.rows(visit), until=visit.last)
    rounds.finish()
    return replace(report, resumed_from_step=resumed_from), rounds.use, rounds.count


@dataclass(frozen=True, slots=True, eq=False)
class _Stage:
    """The second stage of one run, ready to be entered once or in rounds."""

    job: Job
    run: Run
    state: Path
    folder: RunFolder
    console: Console

    def train(
        self,
        tracker: Tracker,
        segments: Sequence[Segment] = (),
        *,
        rows: npt.NDArray[np.int64] | None = None,
        until: int | None = None,
    ) -> TrainReport:
        """Train until the end of the training, or on ``rows`` until step ``until``; see ``Trainer.run``."""
        job, config = self.job, self.job.config
        with ExitStack() as stack:
            student = Student(job.student)
            if student.note:
                self.console.warn(student.note)
            trainer = Trainer(
                config.training,
                student,
                data=cached_samples(job, "train", stack, rows),
                validation=cached_samples(job, "validation", stack),
                plan=job_steps(job, segments),
                paths=TrainPaths(self.state, export_folder(config), self.run.name, self.run.digest()),
            )
            report = trainer.run(run_folder=self.folder, tracker=tracker, console=self.console, until=until)
        del trainer, student
        release_memory()  # the teacher of the next round may need the device
        return report

    @contextmanager
    def tracker(self) -> Iterator[Tracker]:
        """Where metrics go besides the run's folder."""
        training = self.job.config.training
        name = None
        if training.wandb_comment is not None:
            name = wandb_run_name(training.wandb_comment, self.run.name, training.lr, datetime.datetime.now())
        with open_tracker(name, self.job.config.flat(), self.folder, self.console) as tracker:
            yield tracker


def _open_run(job: Job, state: Path, console: Console) -> tuple[Run, RunFolder]:
    """The unfinished run of the student, if it started from the same, or a new one."""
    identity = job.identity()
    unfinished = load_run(state)
    if unfinished is None:
        this_run = new_run(job.config, identity)
    else:
        this_run = unfinished
        if not has_begun(state):
            this_run = replace(unfinished, deciding=deciding(job.config), identity=identity)
            if this_run != unfinished:  # its folder tells of other keys
                this_run = replace(this_run, folder="")
        check_identity(this_run, identity)
        remove_leftovers(job.config, this_run)
        if this_run.folder and Path(this_run.folder).is_dir():
            console.say(f"going on with the unfinished run in {this_run.folder}")
            return this_run, RunFolder.reopen(Path(this_run.folder), console)
    folder = RunFolder.create(_runs(job.config), this_run.name, job.config.dump(), console)
    this_run = replace(this_run, folder=str(folder.path))
    save_run(state, this_run)
    return this_run, folder


# -- what a run leaves behind ----------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Outcome:
    summary: Summary


@contextmanager
def _outcome(folder: RunFolder, console: Console, summary: Summary) -> Iterator[_Outcome]:
    """Keep ``summary.json`` true: running, then completed, interrupted or failed."""
    outcome = _Outcome(summary)
    folder.write_summary(replace(summary, status="running"))
    status: Status = "failed"
    try:
        yield outcome
        status = "completed"
    except KeyboardInterrupt:
        status = "interrupted"
        raise
    except DistillError as error:
        console.log(f"error: {error}")
        raise
    finally:
        folder.write_summary(replace(outcome.summary, status=status))
    console.say(f"run folder: {folder.path}")


def _summary(job: Job) -> Summary:
    return Summary(data={split: _split_summary(job.splits[split]) for split in SPLITS})


def _split_summary(split: Split) -> SplitSummary:
    return SplitSummary(samples=len(split.samples), tokens=split.tokens, targets=split.targets)


def _with_cache(summary: Summary, job: Job, use: CacheUse, rounds: int) -> Summary:
    layers = [
        layer
        for split in SPLITS
        for teacher in job.teachers
        for source in [Source.open(job.dataset_folder / split, teacher.layer, job.admissions)]
        for layer in (source.own, *source.larger)
    ]
    infos = [info for layer in layers for info in layer.shards.values()]
    size = sum(layer.bytes() for layer in layers)
    targets = sum(info.targets for info in infos)
    return replace(
        summary,
        cache=CacheSummary(
            bytes=size,
            targets=targets,
            bytes_per_target=size / targets,
            shards=len(infos),
            top_k=job.top_k,
            kept_mass_mean=sum(info.kept_mass_sum for info in infos) / targets,
            reused_targets=use.reused_targets,
            collected_targets=use.report.targets,
            rounds=rounds,
        ),
        collect=CollectSummary(
            seconds=use.report.seconds,
            tokens_per_second=_rate(use.report.tokens, use.report.seconds),
            workers=job.config.collection.num_inference_workers,
        ),
    )


def _train_summary(report: TrainReport) -> TrainSummary:
    return TrainSummary(
        steps=report.steps,
        seconds=report.seconds,
        tokens_per_second=_rate(report.tokens, report.seconds),
        targets=report.targets,
        peak_memory_bytes=report.peak_memory_bytes,
        resumed_from_step=report.resumed_from_step,
    )


def _rate(amount: int, seconds: float) -> float | None:
    return amount / seconds if seconds else None


def _runs(config: Config) -> Path:
    return Path(config.paths.cache_folder) / "runs"
