"""The whole job: plan, both stages, and what a run leaves behind."""

import datetime
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from distill.cache import Layer
from distill.collect import (
    Budget,
    CollectReport,
    CollectSpec,
    default_threads,
)
from distill.collect import collect as collect_shards
from distill.config import Config, RunOptions
from distill.dataloader import CachedSamples
from distill.errors import DistillError, InputError
from distill.files import disk_bytes
from distill.lock import lock
from distill.planning import Work, cap_bytes, check_cap, needed_bytes, planned_work, survey
from distill.prepare import SPLITS, Job, Split, prepare
from distill.report import (
    CacheSummary,
    CollectSummary,
    Console,
    RunFolder,
    SplitSummary,
    Status,
    Summary,
    TrainSummary,
    ValidationSummary,
    open_tracker,
    wandb_run_name,
)
from distill.runs import (
    Run,
    check_identity,
    export_folder,
    finish_run,
    load_run,
    new_run,
    remove_leftovers,
    save_run,
    set_aside,
    settle,
    state_folder,
)
from distill.student import Student
from distill.train import Trainer, TrainPaths, TrainReport, describe, make_schedule, plan_steps
from distill.train import evaluate as evaluate_student


@dataclass(frozen=True, slots=True)
class CacheUse:
    """What the first stage made, and found made."""

    report: CollectReport
    reused_targets: int


# -- verbs -----------------------------------------------------------------------------------------------------------


def run(config: Config, options: RunOptions) -> None:
    """Collect what is missing, train, validate, export."""
    _train(config, options, may_collect=True)


def train(config: Config, options: RunOptions) -> None:
    """The same without a teacher's work: InputError if records are missing."""
    _train(config, options, may_collect=False)


def collect(config: Config, options: RunOptions) -> None:
    """Collect what is missing, and no more."""
    console = Console()
    job = prepare(config, console)
    with planned_work(job, console) as works:
        folder = RunFolder.create(_runs(config), job.layer.teacher, config.dump(), console)
        with _outcome(folder, console, _summary(job)) as outcome:
            outcome.summary = _with_cache(outcome.summary, job, _collect_all(job, works, console))


def plan(config: Config, options: RunOptions) -> None:
    """Say what a run would do, and do none of it; only the digests of the models are remembered."""
    console = Console()
    job = prepare(settle(config, options), console)
    works = survey(job)
    for split, work in works.items():
        console.say(
            f"{split}: {len(job.splits[split].samples):,} samples, {work.targets:,} targets in {len(work.plan)} shards;"
            f" {work.missing_targets:,} targets in {len(work.missing)} shards are to be collected"
        )
    needed, used = needed_bytes(job, works), disk_bytes(job.dataset_folder)
    console.say(f"cache: {used / 1e9:.3f} GB now, {(used + needed) / 1e9:.3f} GB at most after collecting")
    steps = plan_steps(job.config.training, job.splits["train"].samples, job.config.pipeline.seed)
    console.say(f"training: {steps.total_steps:,} steps, {steps.steps_per_epoch:,} an epoch")
    check_cap(job, works)


def evaluate(config: Config, options: RunOptions) -> None:
    """The validation metrics of the student as it is; InputError if validation records are missing."""
    console = Console()
    job = prepare(config, console)
    with ExitStack() as stack:
        data = _cached(job, "validation", stack)
        metrics = evaluate_student(Student(job.student), data)
    console.say(f"{job.student.folder.name}: {describe(metrics)}")


# -- collecting ------------------------------------------------------------------------------------------------------


def _collect_all(job: Job, works: dict[str, Work], console: Console) -> CacheUse:
    """Fill the layers of all splits with one set of workers. The caller holds the lock, if anything is missing."""
    report = CollectReport()
    if any(work.missing for work in works.values()):
        for work in works.values():
            if work.missing:
                work.layer.prepare()
        report = _collect_missing(job, works, console)
    for split, work in works.items():
        reused = work.targets - work.missing_targets
        console.say(f"{split}: {reused:,} targets from the cache, {work.missing_targets:,} collected")
    return CacheUse(report, reused_targets=sum(work.targets - work.missing_targets for work in works.values()))


def _collect_missing(job: Job, works: dict[str, Work], console: Console) -> CollectReport:
    collection = job.config.collection
    workers = min(collection.num_inference_workers, sum(len(work.missing) for work in works.values()))
    spec = CollectSpec(
        teacher=job.teacher,
        layer=job.layer.describe(),
        threads=collection.threads_per_worker or default_threads(collection.num_inference_workers),
        tokens_per_batch=collection.collect_tokens_per_batch,
    )
    budget = Budget(cap_bytes(job.config), disk_bytes(job.dataset_folder))
    work = [(work.layer, work.missing) for work in works.values()]
    return collect_shards(work, spec, workers=workers, budget=budget, console=console)


# -- training --------------------------------------------------------------------------------------------------------


def _train(given: Config, options: RunOptions, *, may_collect: bool) -> None:
    console = Console()
    config = settle(given, options)
    job = prepare(config, console)
    steps = plan_steps(config.training, job.splits["train"].samples, config.pipeline.seed)
    schedule = make_schedule(config.training, steps.total_steps)
    if steps.total_steps == 1 and not schedule.lr(1):
        console.warn(
            "the only step of this training has a learning rate of 0: give more epochs or samples, or a final_lr"
        )
    state = state_folder(config)
    with lock(state.with_name(f"{state.name}.lock")), ExitStack() as collecting:
        if settle(given, options) != config:
            raise InputError(f"{state}: another start came first; start again")
        works = collecting.enter_context(planned_work(job, console, may_collect=may_collect))
        if any(work.missing for work in works.values()):
            Student(job.student)  # what is wrong with it is better known before the teacher's work than after
        if options.fresh:
            set_aside(state)
        this_run, folder = _open_run(job, state, console)
        with _outcome(folder, console, _summary(job)) as outcome:
            outcome.summary = _with_cache(outcome.summary, job, _collect_all(job, works, console))
            collecting.close()  # others may collect from now on
            report = _train_student(job, this_run, state, folder, console)
            outcome.summary = replace(
                outcome.summary, train=_train_summary(report), validation=ValidationSummary(report.before, report.after)
            )
        finish_run(state, this_run, keep_state=config.training.save_final_state)
    console.say(f"student: {report.student}")


def _open_run(job: Job, state: Path, console: Console) -> tuple[Run, RunFolder]:
    """The unfinished run of the student, if it started from the same, or a new one."""
    identity = job.identity()
    unfinished = load_run(state)
    if unfinished is None:
        this_run = new_run(job.config, identity)
    else:
        check_identity(unfinished, identity)
        remove_leftovers(job.config, unfinished)
        this_run = unfinished
        if this_run.folder and Path(this_run.folder).is_dir():
            console.say(f"going on with the unfinished run in {this_run.folder}")
            return this_run, RunFolder.reopen(Path(this_run.folder), console)
    folder = RunFolder.create(_runs(job.config), this_run.name, job.config.dump(), console)
    this_run = replace(this_run, folder=str(folder.path))
    save_run(state, this_run)
    return this_run, folder


def _train_student(job: Job, this_run: Run, state: Path, folder: RunFolder, console: Console) -> TrainReport:
    config = job.config
    with ExitStack() as stack:
        student = Student(job.student)
        if student.note:
            console.warn(student.note)
        trainer = Trainer(
            config.training,
            student,
            data=_cached(job, "train", stack),
            validation=_cached(job, "validation", stack),
            seed=config.pipeline.seed,
            paths=TrainPaths(state, export_folder(config), this_run.name),
        )
        comment = config.training.wandb_comment
        name = None
        if comment is not None:
            name = wandb_run_name(comment, this_run.name, config.training.lr, datetime.datetime.now())
        tracker = stack.enter_context(open_tracker(name, config.flat(), folder, console))
        return trainer.run(run_folder=folder, tracker=tracker, console=console)


def _cached(job: Job, split: str, stack: ExitStack) -> CachedSamples:
    layer = stack.enter_context(Layer.open(job.dataset_folder / split, job.layer))
    samples = job.splits[split].samples
    located = layer.locate(job.splits[split].distinct())
    lacking = sum(sample.key not in located for sample in samples)
    if lacking:
        raise InputError(f"{layer.folder}: the records of {lacking} samples are not in the cache; run `collect` first")
    return CachedSamples(layer, samples, located)


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


def _with_cache(summary: Summary, job: Job, use: CacheUse) -> Summary:
    layers = [Layer.open(job.dataset_folder / split, job.layer) for split in SPLITS]
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
            top_k=job.layer.top_k,
            kept_mass_mean=sum(info.kept_mass_sum for info in infos) / targets,
            reused_targets=use.reused_targets,
            collected_targets=use.report.targets,
            rounds=1,
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
