"""The trainer alone: when things are due, how signals stop it, what it reports."""

import json
import math
import multiprocessing
import os
import random
import signal
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import distill.dataloader
import distill.progress
import distill.train
from distill.adapters import AdapterSpec
from distill.cache import Layer, build_shard
from distill.collate import TokenBatch, collate
from distill.config import Config, Training
from distill.dataloader import CachedSamples, OptimizerStep, TeacherShare
from distill.errors import InputError
from distill.losses import build_loss
from distill.optim import OPTIMIZERS
from distill.progress import TrainPaths, TrainReport
from distill.report import Console, RunFolder
from distill.report.tracker import NoTracker
from distill.steps import StepPlan
from distill.student import Student, StudentSpec
from distill.train import Interrupted, Trainer, evaluate, plan_steps, stop_signal
from distill.types import TokenizedSample
from tests.helpers import make_records, make_samples, make_spec
from tests.toys import make_model_folder

VOCAB = 261


def cached(folder: Path, count: int) -> CachedSamples:
    """``count`` made-up samples with their records in a cache in ``folder``."""
    spec = make_spec(vocab_size=VOCAB)
    layer = Layer.open(folder, spec)
    layer.prepare()
    samples = make_samples(count)
    image = build_shard(samples, make_records(samples), layer=spec.describe(), vocab_size=VOCAB)
    image.seal(layer.folder)
    layer.register(image.info)
    return CachedSamples([TeacherShare(layer, 1.0, layer.locate(samples))], samples)


@pytest.fixture
def data(tmp_path: Path) -> CachedSamples:
    return cached(tmp_path / "cache", 10)


class Bench:
    """Runs trainings of a toy student in one folder and remembers what was said."""

    def __init__(self, folder: Path, data: CachedSamples) -> None:
        self.folder = folder
        self.data = data
        self.identity = ""
        self.student = make_model_folder(folder / "toy", seed=3, hidden=16, layers=1)
        self.console = Console(open(os.devnull, "w"), open(os.devnull, "w"))  # noqa: SIM115, PTH123
        self.run_folder = RunFolder.create(folder / "runs", "toy", "{}", self.console)

    def config(self, **changes: object) -> Training:
        """Two epochs of two steps, and ``changes``."""
        keys = {"num_epochs": 2, "batch_size": 3, "grad_accum_batches": 2, "lr": 0.01, "validate_every_n_epochs": 0.5}
        return Config.from_flat(keys | changes).training

    def plan(self, **changes: object) -> StepPlan:
        """The steps of that."""
        return plan_steps(self.config(**changes), self.data.samples, seed=0)

    def train(
        self,
        name: str = "toy",
        until: int | None = None,
        fp16: bool = False,
        adapters: AdapterSpec | None = None,
        **changes: object,
    ) -> TrainReport:
        """One training of two epochs of two steps. ``fp16`` has the gradient scaled, of fp32 weights."""
        config = self.config(**changes)
        precision = config.training_precision
        if fp16:
            config = config.model_copy(update={"training_precision": "fp16"})
        spec = StudentSpec(self.student, precision, "cpu", VOCAB, False, False, adapters=adapters)
        paths = TrainPaths(self.folder / "states" / name, self.folder / "trained", name, self.identity)
        plan = self.plan(**changes)
        trainer = Trainer(config, Student(spec), data=self.data, validation=self.data, plan=plan, paths=paths)
        return trainer.run(run_folder=self.run_folder, tracker=NoTracker(), console=self.console, until=until)

    def records(self, kind: str) -> list[dict[str, float]]:
        """The records of that kind in metrics.jsonl, without what the clock says."""
        records = [json.loads(line) for line in (self.run_folder.path / "metrics.jsonl").read_text().splitlines()]
        clock = ("kind", "tokens_per_second")
        return [{k: v for k, v in record.items() if k not in clock} for record in records if record["kind"] == kind]

    def exports(self) -> list[str]:
        """Names of all exports."""
        return sorted(path.name for path in (self.folder / "trained").iterdir())

    def weights(self, export: str) -> bytes:
        """The weights of an export."""
        return (self.folder / "trained" / export / "model.safetensors").read_bytes()

    def steps(self, kind: str) -> list[int]:
        """Steps of the records in metrics.jsonl."""
        records = [json.loads(line) for line in (self.run_folder.path / "metrics.jsonl").read_text().splitlines()]
        return [record["step"] for record in records if record["kind"] == kind]


@pytest.fixture
def bench(tmp_path: Path, data: CachedSamples) -> Bench:
    return Bench(tmp_path, data)


def test_validation_and_exports_come_when_they_are_due(bench: Bench) -> None:
    report = bench.train(save_student_every_n_epochs=1.0)
    assert report.steps == 4 and report.after["kl"] < report.before["kl"]
    assert bench.steps("validation") == [0, 1, 2, 3, 4]
    assert sorted(p.name for p in (bench.folder / "trained").iterdir()) == ["toy_final", "toy_step_2"]
    bench.train("rare", validate_every_n_epochs=0)
    assert bench.steps("validation") == [0, 4]


MIXES: list[dict[str, object]] = [
    {"loss": {"kl": 0.7, "skew_reverse_kl": 0.3}, "skew_alpha": 0.2},
    {"loss": "kl", "tail": "to_target", "alpha": 2.0, "temperature": 2.0},
    {"loss": "jsd", "tail": "renormalise", "ce_weight": 0.3},
    {"loss": "ab", "ce_below_entropy_quantile": 0.3},
]


@pytest.mark.parametrize("changes", MIXES)
def test_every_key_of_the_loss_trains_and_resumes_exactly(
    bench: Bench, changes: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = bench.train("whole", **changes)
    assert (
        whole.after["ce" if "ce_weight" in changes else "kl"] < whole.before["ce" if "ce_weight" in changes else "kl"]
    )
    bench.train("plain")
    assert bench.weights("whole_final") != bench.weights("plain_final")
    bench.train("cut", until=2, **changes)
    # What was found once isn't looked for again.
    monkeypatch.setattr(CachedSamples, "entropy_quantile", None)
    bench.train("cut", **changes)
    assert bench.weights("cut_final") == bench.weights("whole_final")


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_optimizer_learns_in_half_precision_and_resumes_exactly(
    bench: Bench, optimizer: str, precision: str
) -> None:
    lr = 0.1 if optimizer == "sgd" else 0.003
    changes: dict[str, object] = {"optimizer": optimizer, "training_precision": precision, "lr": lr, "num_epochs": 5}
    report = bench.train("whole", **changes)
    assert report.after["kl"] < report.before["kl"]
    bench.train("cut", until=3, **changes)
    bench.train("cut", **changes)
    assert bench.weights("cut_final") == bench.weights("whole_final")


def test_the_surest_targets_are_a_part_of_all(bench: Bench, data: CachedSamples) -> None:
    every = np.concatenate([data._records([sample]).entropies for sample in data.samples])
    threshold, at = data.entropy_quantile(0.25)
    assert (every < threshold).sum() + at * (every == threshold).sum() == pytest.approx(0.25 * len(every))
    assert data.entropy_quantile(1.0) == (every.max(), pytest.approx(1.0))
    share = data.teachers[0]
    unknown = CachedSamples([share, replace(share, weight=2.0)], data.samples)  # merged: only bounds are known
    with pytest.raises(InputError, match="ce_below_entropy_quantile"):
        unknown.entropy_quantile(0.25)


def test_a_signal_finishes_the_step_saves_and_the_next_start_goes_on(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = bench.train("whole")
    step = Trainer._train_step

    def interrupted_step(self: Trainer, *args: object) -> object:
        metrics = step(self, *args)  # type: ignore[arg-type]
        if self._progress.step == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return metrics

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_train_step", interrupted_step)
        with pytest.raises(Interrupted, match="step 2 of 4"):
            bench.train("cut")
    assert bench.steps("train") == [1, 2]
    resumed = bench.train("cut")
    assert resumed.resumed_from_step == 2 and bench.steps("train") == [1, 2, 3, 4]
    assert (resumed.after, resumed.targets, resumed.tokens) == (whole.after, whole.targets, whole.tokens)
    weights = [(bench.folder / "trained" / f"{n}_final" / "model.safetensors").read_bytes() for n in ("whole", "cut")]
    assert weights[0] == weights[1]


def test_micro_batches_do_not_change_the_training(bench: Bench) -> None:
    """1 x 6, 2 x 3 and 6 x 1: the loss is divided once by the targets of the whole step."""
    results = [
        bench.train(f"{size}x{accumulate}", batch_size=size, grad_accum_batches=accumulate, data_order="native").after
        for size, accumulate in ((1, 6), (2, 3), (6, 1))
    ]
    assert all(np.isclose(result["kl"], results[0]["kl"], atol=1e-5) for result in results)


def step_gradients(bench: Bench, monkeypatch: pytest.MonkeyPatch, **changes: object) -> list[Tensor]:
    """All parameters' gradients of each step of an epoch, as one vector, while they stay as good as unchanged."""
    found: list[Tensor] = []

    def keep(parameters: Sequence[Tensor], limit: float) -> Tensor:
        found.append(torch.cat([parameter.grad.flatten() for parameter in parameters if parameter.grad is not None]))
        return found[-1].norm()

    with monkeypatch.context() as patch:
        patch.setattr(torch.nn.utils, "clip_grad_norm_", keep)
        bench.train(f"cut-{time.monotonic_ns()}", num_epochs=1, lr=1e-12, max_grad_norm=0.0, **changes)
    return found


def padded(samples: Sequence[TokenizedSample], begins_row: None) -> TokenBatch:
    """As ``collate``, with seven more columns of padding."""
    batch = collate(samples, begins_row)
    width = batch.token_ids.shape[1]
    rows = batch.predict_rows // width * (width + 7) + batch.predict_rows % width
    return replace(batch, token_ids=torch.nn.functional.pad(batch.token_ids, (0, 7)), predict_rows=rows)


@pytest.mark.parametrize("changes", [{}, *MIXES])
def test_the_gradient_is_the_same_however_a_step_is_cut(
    bench: Bench, changes: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batch x accumulation 1 x 8, 2 x 4, 8 x 1, any readers, more padding; of ten samples the second step has two."""

    def gradients(batch_size: int, accumulate: int, readers: int = 1) -> list[Tensor]:
        keys = {"batch_size": batch_size, "grad_accum_batches": accumulate, "loader_workers": readers}
        return step_gradients(bench, monkeypatch, **keys, data_order="native", **changes)

    whole = gradients(8, 1)
    assert len(whole) == 2 and all(gradient.norm() > 1e-2 for gradient in whole)
    others = [gradients(1, 8), gradients(2, 4), gradients(2, 4, readers=0), gradients(2, 4, readers=4)]
    with monkeypatch.context() as patch:
        wider = Mock(wraps=padded)
        patch.setattr(distill.dataloader, "collate", wider)
        others.append(gradients(8, 1))
        assert wider.called
    for other in others:
        torch.testing.assert_close(other, whole, rtol=1e-6, atol=1e-6)


def test_a_loss_that_is_no_number_stops_with_the_step(bench: Bench) -> None:
    with pytest.raises(InputError, match=r"lr: .* at step \d"):
        bench.train(lr=1e30, final_lr=0.0, max_grad_norm=0.0)


def test_the_second_signal_stops_at_once() -> None:
    with pytest.raises(KeyboardInterrupt, match="before the state could be saved"), stop_signal() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.is_set()
        os.kill(os.getpid(), signal.SIGINT)


# -- every optimizer, and kills --------------------------------------------------------------------------------------

RATES = {"sgd": 0.5, "adagrad": 0.05, "rmsprop": 0.003, "rmsprop8bit": 0.003, "rmsprop32bit": 0.003}


class Killed(BaseException):
    """As good as a kill: nothing of ours catches it."""


def kill_at(monkeypatch: pytest.MonkeyPatch, owner: object, name: str, when: Callable[..., bool]) -> None:
    """Have the function die in place of the first call that ``when`` is true of."""
    real, dead = getattr(owner, name), []

    def call(*args: object, **keys: object) -> object:
        if not dead and when(*args):
            dead.append(name)
            raise Killed
        return real(*args, **keys)

    monkeypatch.setattr(owner, name, call)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_optimizer_trains_the_toy(bench: Bench, optimizer: str) -> None:
    lr = RATES.get(optimizer, 0.01)
    report = bench.train(optimizer=optimizer, lr=lr, num_epochs=10, lr_scheduler="constant", validate_every_n_epochs=0)
    losses = [record["loss"] for record in bench.records("train")]
    assert len(losses) == 20 and report.after["kl"] < 0.9 * report.before["kl"]
    assert np.mean(losses[-4:]) < np.mean(losses[8:12]) < np.mean(losses[:4])


@pytest.mark.parametrize("optimizer", ["adamw", "adamw8bit"])
def test_a_kill_at_any_step_costs_nothing(
    bench: Bench, optimizer: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """From the state of every step, and from none: the same losses, rates and bytes as without a stop."""
    keys: dict[str, object] = {"optimizer": optimizer, "num_epochs": 4, "num_warmup_steps": 2, "decay_start": 0.5}
    whole = bench.train("whole", **keys)
    expected, validations = bench.records("train"), bench.records("validation")
    for step in range(1, 9):
        with monkeypatch.context() as patch:
            kill_at(patch, Trainer, "_log", lambda _self, kind, *_: kind == "train" and _self._progress.step == step)  # noqa: B023
            with pytest.raises(Killed):
                bench.train(f"cut{step}", save_state_every_minutes=0, **keys)
        # What a kill inside the next save leaves.
        (tmp_path / "states" / f"cut{step}" / f"step_{step}.tmp").mkdir(parents=True)
        resumed = bench.train(f"cut{step}", **keys)
        assert resumed.resumed_from_step == (step - 1 or None)
        assert bench.records("train") == expected and bench.records("validation") == validations
        assert bench.weights(f"cut{step}_final") == bench.weights("whole_final")
        assert resumed.after == whole.after


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16", "4bit"])
@pytest.mark.parametrize("optimizer", ["adamw", "adamw8bit"])
def test_fifty_kills_at_random_instants(bench: Bench, optimizer: str, precision: str) -> None:
    """Inside steps, saves, exports and swaps alike: losses, rates and every student are those of an unharmed run."""
    keys: dict[str, object] = {
        "optimizer": optimizer, "num_epochs": 10, "num_warmup_steps": 4, "save_state_every_minutes": 0,
        "save_best_student": True, "save_student_every_n_epochs": 0.5, "keep_students": 2,
        "training_precision": precision,
    }  # fmt: skip
    adapters = None
    if precision == "4bit":  # large enough for states of 8 bit, and with dropout
        bench.student = make_model_folder(bench.folder / "wide", seed=3, hidden=64, layers=1)
        adapters = AdapterSpec(rank=64, alpha=8.0, targets=(), dropout=0.1, seed=1, merge_into="dequantised")
    began = time.monotonic()
    bench.train("whole", adapters=adapters, **keys)
    duration, expected = time.monotonic() - began, bench.records("train")
    validations = bench.records("validation")
    chooser, kills, forked = random.Random(7), 0, multiprocessing.get_context("fork")
    while kills < 50:
        start, name = kills, f"cut{kills}"
        while True:
            child = forked.Process(target=bench.train, args=(name,), kwargs={"adapters": adapters, **keys})
            child.start()
            if kills < start + 10:
                child.join(chooser.uniform(0.03, 0.4) * duration)
                if child.is_alive():
                    child.kill()
            child.join(120)
            if child.exitcode == 0:
                break
            assert child.exitcode == -signal.SIGKILL
            kills += 1
        assert kills > start
        assert bench.records("train") == expected and bench.records("validation") == validations
        for export in ("final", "best", "step_18", "step_19"):
            assert bench.weights(f"{name}_{export}") == bench.weights(f"whole_{export}")
        names = [path for path in bench.exports() if path.startswith(f"{name}_") and not path.endswith(".tmp")]
        assert len(names) == 4


def test_a20_a_resumed_epoch_has_the_same_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Report A20: 64 samples, killed at step 3 of epoch 2."""
    bench = Bench(tmp_path, cached(tmp_path / "cache", 64))
    keys: dict[str, object] = {"batch_size": 4, "validate_every_n_epochs": 0, "save_state_every_minutes": 0}
    seen: list[tuple[int, list[str]]] = []
    train_step = Trainer._train_step

    def noted_step(self: Trainer, step: OptimizerStep, began: float) -> object:
        tokens = [batch.tokens.token_ids.tolist() for batch in step.micro_batches]
        seen.append((step.number, tokens))  # type: ignore[arg-type]
        return train_step(self, step, began)

    monkeypatch.setattr(Trainer, "_train_step", noted_step)
    bench.train("whole", **keys)
    whole, expected = list(seen), bench.records("train")
    seen.clear()
    with monkeypatch.context() as patch:
        kill_at(patch, Trainer, "_log", lambda self, kind, *_: kind == "train" and self._progress.step == 11)
        with pytest.raises(Killed):
            bench.train("cut", **keys)
    assert bench.train("cut", **keys).resumed_from_step == 10
    assert len(whole) == 16
    assert seen == [*whole[:11], *whole[10:]], "step 11 is made twice, of the same samples"
    assert bench.records("train") == expected


def test_a11_the_last_window_is_weighted_by_its_own_targets(bench: Bench) -> None:
    """Report A11: 10 samples, batch 1, accumulation 4: the third step is the mean over the targets of 2 samples."""
    keys: dict[str, object] = {"lr_scheduler": "linear", "max_grad_norm": 0.0, "data_order": "native"}
    bench.train(
        num_epochs=1, batch_size=1, grad_accum_batches=4, optimizer="sgd", lr=0.3, save_student_every_n_epochs=2 / 3,
        **keys,
    )  # fmt: skip
    records = bench.records("train")
    assert [record["lr"] for record in records] == pytest.approx([0.2, 0.1, 0.0]), "the schedule steps, too"
    # At a rate of 0 the gradient itself tells: that of the student of step 2 on the last two samples alone.
    student = Student(StudentSpec(bench.folder / "trained" / "toy_step_2", "fp32", "cpu", VOCAB, False, False))
    batch = bench.data.batch([8, 9])
    loss = student.loss(batch.tokens, batch.targets, build_loss("kl", temperature=1.0), scale=1 / len(batch.targets))
    loss.backward()
    norm = torch.stack([p.grad.norm() for p in student.parameters() if p.grad is not None]).norm()
    assert records[2]["loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert records[2]["grad_norm"] == pytest.approx(norm.item(), rel=1e-5)


@pytest.mark.parametrize(("batch_size", "accumulate"), [(1, 8), (2, 4), (8, 1)])
@pytest.mark.parametrize("readers", [0, 1, 4])
def test_the_gradient_is_the_steps_own(bench: Bench, batch_size: int, accumulate: int, readers: int) -> None:
    """Of the same 8 and then 2 samples: however they are cut and padded, and whoever reads them."""
    lengths = [len(sample.token_ids) for sample in bench.data.samples]
    assert len(set(lengths[:8])) > 1, "padding, where samples share a batch"
    # At this rate the weights of a student are its gradient, but for the digits that a difference loses.
    keys: dict[str, object] = {
        "optimizer": "sgd", "lr": 64.0, "lr_scheduler": "constant", "max_grad_norm": 0.0, "num_epochs": 1,
        "validate_every_n_epochs": 0, "save_student_every_n_epochs": 0.5, "data_order": "native",
    }  # fmt: skip
    start = load_file(bench.student / "model.safetensors")
    bench.train("one", batch_size=8, grad_accum_batches=1, loader_workers=0, max_steps=1, **keys)
    expected = load_file(bench.folder / "trained" / "one_final" / "model.safetensors")
    bench.train("cut", batch_size=batch_size, grad_accum_batches=accumulate, loader_workers=readers, **keys)
    assert bench.records("train")[1]["targets"] == len(bench.data.batch([8, 9]).targets), "a window that isn't full"
    weights = load_file(bench.folder / "trained" / "cut_step_1" / "model.safetensors")
    for name, before in start.items():
        gradient, other = ((before - after[name]) / 64 for after in (expected, weights))
        assert gradient.abs().max() > 1e-4
        torch.testing.assert_close(other, gradient, rtol=1e-6, atol=1e-6)


def test_a_state_of_another_training_is_refused(bench: Bench) -> None:
    """Also where the record of the run is gone, or somebody copied the state."""
    bench.train("cut", until=3)
    bench.identity = "another"
    with pytest.raises(InputError, match="of a training of other keys, models or samples; --fresh"):
        bench.train("cut")
    bench.identity = ""
    assert bench.train("cut").resumed_from_step == 3


def test_a_failing_last_export_costs_nothing_but_itself(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = bench.train("whole")
    with monkeypatch.context() as patch:
        kill_at(patch, Student, "export", lambda *_: True)
        with pytest.raises(Killed):
            bench.train("cut")
    assert bench.train("cut").resumed_from_step == whole.steps == 4
    assert bench.weights("cut_final") == bench.weights("whole_final")


def test_a_failing_export_on_the_way_is_made_up_for(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    keys: dict[str, object] = {"save_student_every_n_epochs": 0.5, "validate_every_n_epochs": 0}
    bench.train("whole", **keys)
    with monkeypatch.context() as patch:
        kill_at(patch, Student, "export", lambda _, folder: folder.name == "cut_step_2")
        with pytest.raises(Killed):
            bench.train("cut", **keys)
    assert bench.train("cut", **keys).resumed_from_step == 2
    for export in ("step_1", "step_2", "step_3", "final"):
        assert bench.weights(f"cut_{export}") == bench.weights(f"whole_{export}")


def test_intervals_below_a_step_are_every_step(bench: Bench) -> None:
    bench.train(validate_every_n_epochs=1e-320, save_student_every_n_epochs=5e-324)
    assert bench.steps("validation") == [0, 1, 2, 3, 4]
    assert bench.exports() == ["toy_final", "toy_step_1", "toy_step_2", "toy_step_3"]


def test_a21_a_changed_total_is_refused(bench: Bench) -> None:
    """Report A21: a schedule that is resumed in a training of another length jumps."""
    bench.train("cut", until=3)
    with pytest.raises(InputError, match=r"saved in a training of 4 steps, which now has 6: .*--fresh"):
        bench.train("cut", num_epochs=3)
    assert bench.train("cut").resumed_from_step == 3


# -- ends -------------------------------------------------------------------------------------------------------------


def test_max_steps_ends_training_and_schedule(bench: Bench) -> None:
    report = bench.train(max_steps=3, num_epochs=9)
    assert (report.steps, report.total_steps, report.finished) == (3, 3, True)
    assert bench.records("train")[-1]["lr"] == 0.0
    assert bench.train("longer", max_steps=99).steps == 4, "there are no more"


def validations(monkeypatch: pytest.MonkeyPatch, kls: Sequence[float]) -> None:
    """Have the validation after each step (two an epoch) find these KLs, the first one before training."""
    left = iter(kls)

    def told(student: Student, data: CachedSamples) -> dict[str, float]:
        return evaluate(student, data) | {"kl": next(left)}

    monkeypatch.setattr("distill.train.evaluate", told)


def test_early_stop_counts_validations_without_a_better_one(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    validations(monkeypatch, [0.5, 3.0, 2.0, 2.0, 1.0, 1.5, 1.0, 0.1])
    report = bench.train(early_stop_patience=2, num_epochs=9)
    assert (report.steps, report.total_steps, report.finished) == (6, 18, True)
    assert report.after["kl"] == 1.0 and bench.exports() == ["toy_final"]


def test_patience_is_not_forgotten_by_a_resume(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    keys: dict[str, object] = {"early_stop_patience": 3, "num_epochs": 9}
    validations(monkeypatch, [9.0, 1.0, 2.0, 2.0, 2.0, 0.1])
    assert not bench.train(until=3, **keys).finished
    assert bench.train(**keys).steps == 4
    # Killed between the last state and the export: the next start trains no further.
    validations(monkeypatch, [9.0, 1.0, 2.0, 2.0, 2.0, 0.1])
    with monkeypatch.context() as patch:
        kill_at(patch, Student, "export", lambda *_: True)
        with pytest.raises(Killed):
            bench.train("cut", save_state_every_minutes=0, **keys)
    report = bench.train("cut", **keys)
    assert (report.steps, report.resumed_from_step, report.finished) == (4, 4, True)
    assert bench.weights("cut_final") == bench.weights("toy_final")


def test_the_best_student_is_kept(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    validations(monkeypatch, [0.1, 3.0, 1.0, 2.0, 1.5])
    bench.train(save_best_student=True, save_student_every_n_epochs=0.5)
    assert bench.exports() == ["toy_best", "toy_final", "toy_step_1", "toy_step_2", "toy_step_3"]
    assert bench.weights("toy_best") == bench.weights("toy_step_2")


@pytest.mark.parametrize("where", ["new export", "before the swap", "inside the swap", "the state"])
def test_the_best_student_survives_kills(bench: Bench, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """Step 3 is the best, and the kill comes while it takes the place of step 1."""
    kls = [9.0, 2.0, 3.0, 1.0, 5.0]
    keys: dict[str, object] = {"save_best_student": True}
    validations(monkeypatch, kls)
    bench.train("whole", **keys)
    third, states = (lambda *_: len(list((bench.folder / "states" / "cut").glob("step_3"))) == 1), []
    validations(monkeypatch, kls)
    with monkeypatch.context() as patch:
        if where == "new export":
            kill_at(patch, Student, "export", third)
        elif where == "before the swap":
            kill_at(patch, distill.progress, "replace_folder", third)
        elif where == "inside the swap":
            kill_at(patch, Path, "rename", lambda path, _: path.name == "cut_best.new.tmp" and third())
        else:
            kill_at(patch, distill.train, "save_state", lambda *_: states.append(1) or len(states) == 2)
        with pytest.raises(Killed):
            bench.train("cut", **keys)
    resumed_from = 1 if where == "the state" else 3
    validations(monkeypatch, kls[resumed_from + 1 :])
    assert bench.train("cut", **keys).resumed_from_step == resumed_from
    assert bench.weights("cut_best") == bench.weights("whole_best")
    assert bench.weights("cut_final") == bench.weights("whole_final")
    assert bench.exports() == ["cut_best", "cut_final", "whole_best", "whole_final"]


def test_only_the_newest_students_are_kept(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    keys: dict[str, object] = {"keep_students": 2, "save_student_every_n_epochs": 0.5, "num_epochs": 3}
    bench.train(**keys)
    assert bench.exports() == ["toy_final", "toy_step_4", "toy_step_5"]
    with monkeypatch.context() as patch:
        kill_at(patch, Trainer, "_save", lambda self, _: self._progress.step == 4)
        with pytest.raises(Killed):
            bench.train("cut", until=4, **keys)
    assert [name for name in bench.exports() if name.startswith("cut")] == ["cut_step_2", "cut_step_3"]
    assert bench.train("cut", **keys).resumed_from_step == 3, "a state was saved before each"
    assert [name for name in bench.exports() if name.startswith("cut")] == ["cut_final", "cut_step_4", "cut_step_5"]


# -- numbers that are none ------------------------------------------------------------------------------------------


def test_a_loss_that_is_no_number_names_step_and_samples_and_keeps_the_state(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.train("cut", until=1)
    real, calls = Student.loss, []

    def broken(self: Student, *args: object, **keys: object) -> torch.Tensor:
        calls.append(1)
        return real(self, *args, **keys) * (math.nan if len(calls) == 2 else 1.0)  # type: ignore[arg-type]

    monkeypatch.setattr(Student, "loss", broken)
    with pytest.raises(InputError) as caught:
        bench.train("cut", data_order="native")
    message = str(caught.value)
    assert message.startswith("lr: loss nan and gradient norm nan at step 2 (lr 0.01), in the samples made-up:")
    assert message.endswith("; lower lr or set max_grad_norm; the last saved state, of step 1, is kept")
    # Step 2 has samples 6 to 9, in micro-batches of 3 and 1: the second one was at fault.
    assert bench.data.samples[9].where in message and bench.data.samples[6].where not in message


def test_weights_that_are_no_numbers_are_not_saved(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.train("cut", until=1)
    train_step = Trainer._train_step

    def spoiled(self: Trainer, step: OptimizerStep, began: float) -> object:
        metrics = train_step(self, step, began)
        self._student.parameters()[0].data.fill_(math.nan)
        return metrics

    monkeypatch.setattr(Trainer, "_train_step", spoiled)
    with pytest.raises(InputError, match=r"^lr: weights that aren't finite at step 2 .* of step 1, is kept$"):
        bench.train("cut", validate_every_n_epochs=0, save_state_every_minutes=0)
    with pytest.raises(InputError, match=r"^lr: validation KL nan after step 2; lower lr .* of step 1, is kept$"):
        bench.train("cut")


# -- fp16's scaler ----------------------------------------------------------------------------------------------------


def overflowing(monkeypatch: pytest.MonkeyPatch, steps: Collection[int]) -> None:
    """Have a gradient overflow in these steps."""
    train_step, loss = Trainer._train_step, Student.loss
    current: list[int] = []

    def noted(self: Trainer, step: OptimizerStep, began: float) -> object:
        current[:] = [step.number]
        return train_step(self, step, began)

    def infinite(self: Student, *args: object, **keys: object) -> torch.Tensor:
        value = loss(self, *args, **keys)  # type: ignore[arg-type]
        if current[0] in steps:
            value.register_hook(lambda gradient: gradient * math.inf)
        return value

    monkeypatch.setattr(Trainer, "_train_step", noted)
    monkeypatch.setattr(Student, "loss", infinite)


@pytest.mark.parametrize("optimizer", ["adamw", "adamw8bit", "sgd", "adagrad"])
def test_an_overflow_is_skipped_and_the_scale_falls(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, optimizer: str
) -> None:
    overflowing(monkeypatch, {2})
    keys: dict[str, object] = {"optimizer": optimizer, "fp16": True, "save_student_every_n_epochs": 0.5}
    bench.train("whole", **keys)  # type: ignore[arg-type]
    records = bench.records("train")
    assert [record["loss_scale"] for record in records] == [65536, 65536, 32768, 32768]
    assert [record["grad_norm"] is None for record in records] == [False, True, False, False]
    assert bench.weights("whole_step_1") == bench.weights("whole_step_2") != bench.weights("whole_step_3")
    # The scale is part of the state.
    bench.train("cut", until=2, **keys)  # type: ignore[arg-type]
    bench.train("cut", **keys)  # type: ignore[arg-type]
    assert bench.records("train") == records
    assert bench.weights("cut_final") == bench.weights("whole_final")


def test_a_scale_changes_nothing_where_nothing_overflows(bench: Bench) -> None:
    """A power of two, taken out again before clipping: fp32 weights learn the same, bit for bit."""
    plain, scaled = bench.train("plain"), bench.train("scaled", fp16=True)
    assert scaled.after == plain.after
    assert bench.weights("scaled_final") == bench.weights("plain_final")


def test_an_overflow_at_the_lowest_scale_is_an_error(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    overflowing(monkeypatch, range(1, 5))
    monkeypatch.setattr(torch.amp, "GradScaler", partial(torch.amp.GradScaler, init_scale=4.0))
    with pytest.raises(
        InputError, match=r"^lr: loss \d.* and gradient norm nan at step 3 .*no state was saved so far$"
    ):
        bench.train(fp16=True)
