"""Stage 2: the cache trains the student, one optimizer step at a time, and any kill costs nothing but time."""

import math
import resource
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

import numpy as np
import torch

from distill.checkpoint import newest_state, restore, save_state
from distill.collate import token_batches
from distill.config import Training
from distill.dataloader import CachedSamples, OptimizerStep, Segment, StepPlan, load_steps
from distill.errors import InputError
from distill.evaluate import MetricSums, batch_metrics
from distill.losses import build_loss
from distill.optim import Schedule, build_optimizer, build_schedule
from distill.report import Console, RunFolder, Tracker
from distill.student import Student
from distill.types import TokenizedSample

_VALIDATION_TOKENS = 4096


@dataclass(frozen=True, slots=True)
class TrainPaths:
    """Where a run keeps its state and puts its students: ``exports/<name>_step_<n>`` and ``…_final``."""

    state: Path
    exports: Path
    name: str

    def export(self, what: str) -> Path:
        """The folder of an export."""
        return self.exports / f"{self.name}_{what}"


@dataclass(frozen=True, slots=True)
class TrainReport:
    """What a training did, over all its starts; ``seconds`` are those of its steps, without validation and saving."""

    steps: int
    total_steps: int
    seconds: float
    tokens: int
    targets: int
    peak_memory_bytes: int
    resumed_from_step: int | None
    before: dict[str, float]
    after: dict[str, float]
    student: Path


@dataclass(slots=True)
class Progress:
    """Everything that grows during a training and survives a kill; ``step`` counts finished optimizer steps."""

    step: int = 0
    seconds: float = 0.0
    tokens: int = 0
    targets: int = 0
    before: dict[str, float] = field(default_factory=dict)
    after: dict[str, float] = field(default_factory=dict)


class Interrupted(KeyboardInterrupt):
    """Stopped by a signal at a step's end, with the state saved."""


def evaluate(student: Student, data: CachedSamples) -> dict[str, float]:
    """The validation metrics of ``student`` over all of ``data``, at temperature 1."""
    lengths = np.array([len(sample.token_ids) for sample in data.samples], np.int64)
    total = MetricSums.zero()
    with student.evaluating():
        for rows in token_batches(lengths, _VALIDATION_TOKENS):
            batch = data.batch(rows).to(student.spec.device)
            total = total + batch_metrics(
                student.statistics(batch.tokens, batch.targets), batch.targets, batch.label_logprobs
            )
    return total.metrics()


class Trainer:
    """Owns one training from its first or saved step to the exported student, or to the end of a round.

    ``plan`` says which samples make which step, ``data`` has those of the steps that this trainer makes.
    """

    def __init__(
        self,
        config: Training,
        student: Student,
        *,
        data: CachedSamples,
        validation: CachedSamples,
        plan: StepPlan,
        paths: TrainPaths,
    ) -> None:
        self._config = config
        self._student = student
        self._data = data
        self._validation = validation
        self._paths = paths
        self._plan = plan
        self._schedule = make_schedule(config, self._plan.total_steps)
        self._optimizer = build_optimizer(
            student.model, lr=config.lr, betas=config.betas, eps=config.eps, weight_decay=config.weight_decay
        )
        self._loss = build_loss(config.loss, temperature=config.temperature)
        self._progress = Progress()

    def run(
        self, *, run_folder: RunFolder, tracker: Tracker, console: Console, until: int | None = None
    ) -> TrainReport:
        """Train to the end, from the newest saved state if there is one, and export the final student.

        With ``until``, a step before the end, the state is saved there instead. Raises
        Interrupted after a signal (the state is saved), InputError if the loss is no longer finite.
        """
        resumed = self._resume(console)
        run_folder.cut_metrics(-1 if resumed is None else resumed)
        student, progress, total = self._student, self._progress, self._plan.total_steps
        until = total if until is None else until
        if resumed is None:
            progress.before = self._validate(run_folder, tracker, console)
        student.model.train()
        last_save = time.monotonic()
        first = progress.step + 1
        with stop_signal() as stop, console.progress("training", total, "steps", done=progress.step) as bar:
            for step in load_steps(self._data, self._plan, first=first, last=until):
                metrics = self._train_step(step)
                bar.advance(1, f"loss {metrics['loss']:.4f} lr {metrics['lr']:.2e}")
                self._log("train", metrics, run_folder, tracker)
                if self._due(self._config.validate_every_n_epochs) or progress.step == total:
                    progress.after = self._validate(run_folder, tracker, console)
                if self._due(self._config.save_student_every_n_epochs) and progress.step < total:
                    student.export(self._paths.export(f"step_{progress.step}"))
                minutes, stopping = (time.monotonic() - last_save) / 60, stop.is_set()
                if stopping or minutes >= self._config.save_state_every_minutes:
                    self._save(run_folder)
                    last_save = time.monotonic()
                if stopping and progress.step < total:
                    raise Interrupted(f"stopped at step {progress.step} of {total}; the state is saved")
        final = self._paths.export("final")
        if until < total:
            self._save(run_folder)
            return self._report(final, resumed)
        student.export(final)
        if self._config.save_final_state:
            self._save(run_folder)
        return self._report(final, resumed)

    def _train_step(self, step: OptimizerStep) -> dict[str, float]:
        """One optimizer step: the mean loss over all targets of all its micro-batches."""
        lr = self._schedule.lr(step.number)
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        began = time.monotonic()
        loss = torch.zeros((), device=self._student.spec.device)
        for micro_batch in step.micro_batches:
            batch = micro_batch.to(self._student.spec.device)
            value = self._student.loss(batch.tokens, batch.targets, self._loss, scale=1.0 / step.num_targets)
            value.backward()
            loss += value.detach()
        # A norm of 0 means no clipping; the norm itself is worth knowing all the same.
        limit = self._config.max_grad_norm or math.inf
        grad_norm = torch.nn.utils.clip_grad_norm_(self._student.parameters(), limit)
        if not bool(torch.isfinite(loss + grad_norm)):
            raise InputError(
                f"lr: loss {float(loss)} and gradient norm {float(grad_norm)} at step {step.number}"
                f" (lr {lr:g}); lower lr or set max_grad_norm; the last saved state is kept"
            )
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        seconds = time.monotonic() - began
        self._progress.step = step.number
        self._progress.seconds += seconds
        self._progress.tokens += step.num_tokens
        self._progress.targets += step.num_targets
        return {
            "loss": float(loss),
            "lr": lr,
            "grad_norm": float(grad_norm),
            "targets": step.num_targets,
            "tokens_per_second": step.num_tokens / max(seconds, 1e-9),
        }

    def _due(self, every_epochs: float) -> bool:
        """Whether something that happens every ``every_epochs`` epochs (0: never) is due after this step."""
        if not every_epochs:
            return False
        interval = every_epochs * self._plan.steps_per_epoch
        step = self._progress.step
        return math.floor(step / interval + 1e-9) > math.floor((step - 1) / interval + 1e-9)

    def _validate(self, run_folder: RunFolder, tracker: Tracker, console: Console) -> dict[str, float]:
        metrics = evaluate(self._student, self._validation)
        self._schedule.observe(metrics["kl"])
        self._log("validation", metrics, run_folder, tracker)
        console.say(f"step {self._progress.step}: validation {describe(metrics)}")
        return metrics

    def _log(self, kind: str, metrics: Mapping[str, float], run_folder: RunFolder, tracker: Tracker) -> None:
        step = self._progress.step
        epoch = step / self._plan.steps_per_epoch
        run_folder.log({"kind": kind, "step": step, "epoch": epoch, **metrics})
        tracker.log({f"{kind}/{name}": value for name, value in metrics.items()}, step)

    def _save(self, run_folder: RunFolder) -> None:
        p = self._progress
        meta = {
            "seconds": p.seconds,
            "tokens": p.tokens,
            "targets": p.targets,
            "before": p.before,
            "after": p.after,
            "schedule": self._schedule.state_dict(),
        }
        run_folder.sync()
        save_state(self._paths.state, step=p.step, meta=meta, model=self._student.model, optimizer=self._optimizer)

    def _resume(self, console: Console) -> int | None:
        state = newest_state(self._paths.state)
        if state is None:
            torch.manual_seed(self._plan.seed)
            return None
        restore(state, self._student.model, self._optimizer)
        meta = dict(state.meta)
        self._schedule.load_state_dict(meta.pop("schedule"))
        self._progress = Progress(step=state.step, **meta)
        console.say(f"going on from step {state.step} of {self._plan.total_steps}")
        return state.step

    def _report(self, student: Path, resumed: int | None) -> TrainReport:
        p = self._progress
        return TrainReport(
            steps=p.step,
            total_steps=self._plan.total_steps,
            seconds=p.seconds,
            tokens=p.tokens,
            targets=p.targets,
            peak_memory_bytes=peak_memory(self._student.spec.device),
            resumed_from_step=resumed,
            before=p.before,
            after=p.after,
            student=student,
        )


def plan_steps(
    config: Training, samples: Sequence[TokenizedSample], seed: int, segments: Sequence[Segment] = ()
) -> StepPlan:
    """Which samples make which optimizer step; without ``segments`` an epoch is all samples."""
    return StepPlan(
        lengths=np.array([len(sample.token_ids) for sample in samples], np.int64),
        batch_size=config.batch_size,
        grad_accum_batches=config.grad_accum_batches,
        num_epochs=config.num_epochs,
        data_order=config.data_order,
        seed=seed,
        segments=segments,
    )


def make_schedule(config: Training, total_steps: int) -> Schedule:
    """The schedule of a training with ``total_steps`` optimizer steps. InputError naming the key that doesn't fit."""
    return build_schedule(
        config.lr_scheduler,
        lr=config.lr,
        total_steps=total_steps,
        num_warmup_steps=config.num_warmup_steps,
        decay_start=config.decay_start,
        final_lr=config.final_lr,
        args=config.lr_scheduler_args,
    )


def describe(metrics: Mapping[str, float]) -> str:
    """Metrics on one line for people."""
    return ", ".join(f"{name} {value:.4f}" for name, value in metrics.items() if name != "targets")


def peak_memory(device: str) -> int:
    """Largest memory this process used so far: on the GPU, or resident on the host for the CPU. Bytes."""
    if device.startswith("cuda"):
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@contextmanager
def stop_signal() -> Iterator[threading.Event]:
    """An event that the first SIGINT or SIGTERM sets, so that a step is finished and saved; the second one stops."""
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def handle(number: int, frame: FrameType | None) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
