"""Stage 2: the cache trains the student, one optimizer step at a time, and any kill costs nothing but time."""

import math
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from types import FrameType

import numpy as np
import torch
from torch import Tensor

from distill.checkpoint import newest_state, restore, save_state, saved_step
from distill.collate import token_batches
from distill.config import Training
from distill.dataloader import CachedSamples, OptimizerStep, load_steps
from distill.errors import InputError
from distill.evaluate import MetricSums, batch_metrics
from distill.losses import LossFunction, LossParameters, Weighing, build_loss
from distill.optim import Schedule, build_optimizer, build_schedule
from distill.progress import Progress, TrainPaths, TrainReport, peak_memory
from distill.report import Console, RunFolder, Tracker
from distill.steps import Segment, StepPlan
from distill.student import Student
from distill.types import TokenizedSample

_VALIDATION_TOKENS = 4096
_NAMED_SAMPLES = 8


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
        self._total = total_steps(config, plan)
        self._schedule = make_schedule(config, self._total)
        self._optimizer = build_optimizer(
            student.model,
            config.optimizer,
            lr=config.lr,
            betas=config.betas,
            eps=config.eps,
            weight_decay=config.weight_decay,
            momentum=config.momentum,
            alpha=config.rmsprop_alpha,
        )
        # Small gradients would be zero in fp16: they are made larger until just before they are used.
        scaled, device = config.training_precision == "fp16", torch.device(student.spec.device)
        self._scaler = torch.amp.GradScaler(device.type, enabled=scaled)
        self._progress = Progress()

    def run(
        self, *, run_folder: RunFolder, tracker: Tracker, console: Console, until: int | None = None
    ) -> TrainReport:
        """Train to the end, from the newest saved state if there is one, and export the final student.

        With ``until``, a step before the end, the state is saved there instead. Raises
        Interrupted after a signal (the state is saved), InputError if the loss is no longer finite or the saved
        training had another number of steps.
        """
        resumed = self._resume(console)
        run_folder.cut_metrics(-1 if resumed is None else resumed)
        student, progress, total = self._student, self._progress, self._total
        if resumed is None:
            progress.before = self._validate(run_folder, tracker, console)
        else:
            self._export_due()  # a kill may have come between the state and this
        self._loss, self._weighing = self._build_loss()
        student.model.train()
        last_save = began = time.monotonic()
        first, last = progress.step + 1, progress.step if self._done() else min(total, until or total)
        with stop_signal() as stop, console.progress("training", total, "steps", done=progress.step) as bar:
            readers = self._config.loader_workers
            for step in load_steps(self._data, self._plan, first=first, last=last, readers=readers):
                metrics = self._train_step(step, began)
                bar.advance(1, f"loss {metrics['loss']:.4f} lr {metrics['lr']:.2e}")
                self._log("train", metrics, run_folder, tracker)
                if self._due(self._config.validate_every_n_epochs) or progress.step == total:
                    progress.after = self._validate(run_folder, tracker, console)
                minutes, stopping = (time.monotonic() - last_save) / 60, stop.is_set()
                # Before every export: none that fails costs more than itself.
                exporting = self._is_best() or self._is_kept() or self._done()
                if stopping or exporting or minutes >= self._config.save_state_every_minutes:
                    self._save(run_folder)
                    last_save = time.monotonic()
                self._export_due()
                if self._done():
                    break
                if stopping:
                    raise Interrupted(f"stopped at step {progress.step} of {total}; the state is saved")
                began = time.monotonic()
        if not self._done():
            self._save(run_folder)
            return self._report(resumed)
        if progress.step < total:
            best = f"no validation was better than that of step {progress.best_step}"
            console.say(f"stopped early at step {progress.step}: {best}")
        student.export(self._paths.export("final"))
        return self._report(resumed)

    def _build_loss(self) -> tuple[LossFunction, Weighing | None]:
        """What is minimised. The entropy below which the text alone is learned is found once, and then saved."""
        config, progress = self._config, self._progress
        if config.ce_below_entropy_quantile and progress.ce_below_entropy is None:
            quantile = self._data.entropy_quantile(config.ce_below_entropy_quantile)
            progress.ce_below_entropy, progress.ce_at_entropy = quantile
        named = {config.loss: 1.0} if isinstance(config.loss, str) else config.loss
        mix: dict[str, float] = dict(named.items())
        if config.ce_weight:
            mix["ce"] = mix.get("ce", 0.0) + config.ce_weight
        parameters = LossParameters(config.jsd_beta, config.skew_alpha, config.ab_alpha, config.ab_beta)
        loss = build_loss(
            mix,
            temperature=config.temperature,
            tail=config.tail,
            parameters=parameters,
            ce_below_entropy=progress.ce_below_entropy,
            ce_at_entropy=progress.ce_at_entropy,
        )
        by = build_loss("kl", temperature=config.temperature, tail=config.tail)
        return loss, Weighing(by, config.alpha) if config.alpha else None

    def _train_step(self, step: OptimizerStep, began: float) -> dict[str, float]:
        """One optimizer step: the mean loss over all targets of all its micro-batches.

        ``began``: since when it was waited for. In fp16 a step whose gradient overflows is left out, and the next ones
        are scaled less.
        """
        device = self._student.spec.device
        lr = self._schedule.lr(step.number)
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        factor = float(self._scaler.scale(torch.ones((), device=device))) if self._scaler.is_enabled() else 1.0
        losses = []
        for micro_batch in step.micro_batches:
            batch = micro_batch.to(device)
            scale = factor / step.num_targets
            value = self._student.loss(batch.tokens, batch.targets, self._loss, scale=scale, weighing=self._weighing)
            value.backward()
            losses.append(value.detach() / factor)
        self._scaler.unscale_(self._optimizer)
        # A norm of 0 means no clipping; the norm itself is worth knowing all the same.
        limit = self._config.max_grad_norm or math.inf
        norm = torch.nn.utils.clip_grad_norm_(self._student.parameters(), limit).to(device)
        loss, grad_norm = torch.stack([sum(losses, torch.zeros_like(norm)), norm]).tolist()
        overflow = factor > 1.0 and math.isfinite(loss) and not math.isfinite(grad_norm)
        if not (overflow or math.isfinite(loss + grad_norm)):
            raise self._not_finite(f"loss {loss} and gradient norm {grad_norm}", step.number, losses)
        self._scaler.step(self._optimizer)
        self._scaler.update()
        self._optimizer.zero_grad(set_to_none=True)
        seconds = time.monotonic() - began
        self._progress.step = step.number
        self._progress.seconds += seconds
        self._progress.tokens += step.num_tokens
        self._progress.targets += step.num_targets
        metrics = {
            "loss": loss,
            "lr": lr,
            "grad_norm": grad_norm,
            "targets": step.num_targets,
            "tokens_per_second": step.num_tokens / max(seconds, 1e-9),
        }
        if self._scaler.is_enabled():
            metrics["loss_scale"] = factor
        return metrics

    def _not_finite(self, what: str, number: int, losses: Sequence[Tensor]) -> InputError:
        """The error of step ``number``, with the samples of micro-batches whose loss is no number, or of all."""
        _, micro_batches = next(self._plan.steps(number, number))
        bad = [rows for rows, loss in zip(micro_batches, losses, strict=False) if not bool(torch.isfinite(loss))]
        places = [self._data.samples[row].where for rows in bad or micro_batches for row in rows]
        more = f" and {len(places) - _NAMED_SAMPLES} more" if len(places) > _NAMED_SAMPLES else ""
        named = f"{', '.join(places[:_NAMED_SAMPLES])}{more}"
        where = f"at step {number} (lr {self._schedule.lr(number):g}), in the samples {named}"
        if number == 1:  # no update so far
            return InputError(
                f"loss: {what} {where}; are the parameters of the loss (temperature, alpha, exponents, weights) too"
                " extreme, or is the student damaged?"
            )
        way_out = "lower lr or set max_grad_norm"
        return InputError(f"lr: {what} {where}; {way_out}; {self._kept()}")

    def _kept(self) -> str:
        step = saved_step(self._paths.state)
        return "no state was saved so far" if step is None else f"the last saved state, of step {step}, is kept"

    # -- what is due ---------------------------------------------------------------------------------------------------

    def _done(self) -> bool:
        """Whether there is nothing left to train: all steps made, or too many validations without a better one."""
        patience = self._config.early_stop_patience
        return self._progress.step == self._total or 0 < patience <= self._progress.stale

    def _is_best(self) -> bool:
        """Whether the student as it is now is the best so far and to be kept as that."""
        return self._config.save_best_student and 0 < self._progress.best_step == self._progress.step

    def _is_kept(self) -> bool:
        """Whether the student as it is now is to be exported as that of its step."""
        return self._due(self._config.save_student_every_n_epochs) and not self._done()

    def _export_due(self) -> None:
        """What is to be exported of the student as it is now, but for the final one. Its state has been saved."""
        if self._is_kept():
            self._paths.export_step(self._student, self._progress.step, keep=self._config.keep_students)
        if self._is_best():
            self._paths.export_best(self._student)

    def _due(self, every_epochs: float) -> bool:
        """Whether something that happens every ``every_epochs`` epochs (0: never) is due after this step."""
        if not every_epochs:
            return False
        interval = every_epochs * self._plan.steps_per_epoch
        if interval <= 1:
            return True
        step = self._progress.step
        return math.floor(step / interval + 1e-9) > math.floor((step - 1) / interval + 1e-9)

    def _validate(self, run_folder: RunFolder, tracker: Tracker, console: Console) -> dict[str, float]:
        metrics = evaluate(self._student, self._validation)
        step, kl = self._progress.step, metrics["kl"]
        if not math.isfinite(kl):
            way_out = f"lower lr or set max_grad_norm; {self._kept()}" if step else "is the student damaged?"
            raise InputError(f"{'lr' if step else 'student_path'}: validation KL {kl} after step {step}; {way_out}")
        if step:
            self._progress.validated(kl)
        self._schedule.observe(kl)
        self._log("validation", metrics, run_folder, tracker)
        console.say(f"step {self._progress.step}: validation {describe(metrics)}")
        return metrics

    def _log(self, kind: str, metrics: Mapping[str, float], run_folder: RunFolder, tracker: Tracker) -> None:
        step = self._progress.step
        epoch = step / self._plan.steps_per_epoch
        run_folder.log({"kind": kind, "step": step, "epoch": epoch, **metrics})
        tracker.log({f"{kind}/{name}": value for name, value in metrics.items()}, step)

    def _save(self, run_folder: RunFolder) -> None:
        progress = asdict(self._progress)
        step = progress.pop("step")
        if not all(bool(torch.isfinite(parameter).all()) for parameter in self._student.parameters()):
            raise self._not_finite("weights that aren't finite", step, ())
        meta = {
            "identity": self._paths.identity,
            "total_steps": self._total,
            "progress": progress,
            "schedule": self._schedule.state_dict(),
            "scaler": self._scaler.state_dict(),
        }
        run_folder.sync()
        save_state(self._paths.state, step=step, meta=meta, model=self._student.model, optimizer=self._optimizer)

    def _resume(self, console: Console) -> int | None:
        state = newest_state(self._paths.state)
        if state is None:
            torch.manual_seed(self._plan.seed)
            return None
        if state.meta["total_steps"] != self._total:
            raise InputError(
                f"{self._paths.state}: saved in a training of {state.meta['total_steps']} steps, which now has"
                f" {self._total}: give it back what it had, or set it aside with --fresh"
            )
        if state.meta["identity"] != self._paths.identity:
            raise InputError(
                f"{self._paths.state}: the state in it is of a training of other keys, models or samples; --fresh sets"
                " it aside"
            )
        restore(state, self._student.model, self._optimizer)
        self._schedule.load_state_dict(state.meta["schedule"])
        self._scaler.load_state_dict(state.meta["scaler"])
        self._progress = Progress(step=state.step, **state.meta["progress"])
        console.say(f"going on from step {state.step} of {self._total}")
        return state.step

    def _report(self, resumed: int | None) -> TrainReport:
        p = self._progress
        return TrainReport(
            steps=p.step,
            total_steps=self._total,
            finished=self._done(),
            seconds=p.seconds,
            tokens=p.tokens,
            targets=p.targets,
            peak_memory_bytes=peak_memory(self._student.spec.device),
            resumed_from_step=resumed,
            before=p.before,
            after=p.after,
            student=self._paths.export("final"),
        )


def plan_steps(
    config: Training, samples: Sequence[TokenizedSample], seed: int, segments: Sequence[Segment] = ()
) -> StepPlan:
    """Which samples make which optimizer step; without ``segments`` an epoch is all samples.

    Packed rows are as long as the longest sample: a batch takes no more memory than one of the longest, padded.
    """
    lengths = np.array([len(sample.token_ids) for sample in samples], np.int64)
    once = StepPlan(
        lengths=lengths,
        batch_size=config.batch_size,
        grad_accum_batches=config.grad_accum_batches,
        num_epochs=1,
        data_order=config.data_order,
        seed=seed,
        max_tokens=config.max_tokens_per_batch,
        row_tokens=int(lengths.max()) if config.packing else None,
    )
    epochs = config.num_epochs
    if epochs == "auto":
        assert config.max_steps is not None, "the configuration's rules see to it"
        epochs = -(-config.max_steps // once.total_steps)
    return replace(once, num_epochs=epochs, segments=segments)


def total_steps(config: Training, plan: StepPlan) -> int:
    """Optimizer steps of the whole training: those of ``plan``, or max_steps of them."""
    return min(plan.total_steps, config.max_steps or plan.total_steps)


def make_schedule(config: Training, total_steps: int) -> Schedule:
    """The schedule of a training with ``total_steps`` optimizer steps. InputError naming the key that doesn't fit."""
    return build_schedule(
        config.lr_scheduler,
        lr=config.lr,
        total_steps=total_steps,
        num_warmup_steps=config.num_warmup_steps,
        decay_start=config.decay_start,
        final_lr=config.final_lr,
        forms=(config.warmup_form, config.decay_form),
        args=config.lr_scheduler_args,
    )


def describe(metrics: Mapping[str, float]) -> str:
    """Metrics on one line for people."""
    return ", ".join(f"{name} {value:.4f}" for name, value in metrics.items() if name != "targets")


@contextmanager
def stop_signal() -> Iterator[threading.Event]:
    """An event that the first SIGINT or SIGTERM sets, so that a step is finished and saved; the second one stops."""
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def handle(number: int, frame: FrameType | None) -> None:
        if stop.is_set():
            raise KeyboardInterrupt("before the state could be saved; the same command goes on from the last one saved")
        stop.set()

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
