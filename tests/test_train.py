"""The trainer alone: when things are due, how signals stop it, what it reports."""

import json
import os
import signal
from pathlib import Path

import numpy as np
import pytest

from distill.cache import Layer, build_shard
from distill.config import Config
from distill.dataloader import CachedSamples, TeacherShare
from distill.errors import InputError
from distill.progress import TrainPaths, TrainReport
from distill.report import Console, RunFolder
from distill.report.tracker import NoTracker
from distill.student import Student, StudentSpec
from distill.train import Interrupted, Trainer, plan_steps, stop_signal
from tests.helpers import make_records, make_samples, make_spec
from tests.toys import make_model_folder

VOCAB = 261


@pytest.fixture
def data(tmp_path: Path) -> CachedSamples:
    spec = make_spec(vocab_size=VOCAB)
    layer = Layer.open(tmp_path / "cache", spec)
    layer.prepare()
    samples = make_samples(10)
    image = build_shard(samples, make_records(samples), layer=spec.describe(), vocab_size=VOCAB)
    image.seal(layer.folder)
    layer.register(image.info)
    return CachedSamples([TeacherShare(layer, 1.0, layer.locate(samples))], samples)


class Bench:
    """Runs trainings of a toy student in one folder and remembers what was said."""

    def __init__(self, folder: Path, data: CachedSamples) -> None:
        self.folder = folder
        self.data = data
        self.student = make_model_folder(folder / "toy", seed=3, hidden=16, layers=1)
        self.console = Console(open(os.devnull, "w"), open(os.devnull, "w"))  # noqa: SIM115, PTH123
        self.run_folder = RunFolder.create(folder / "runs", "toy", "{}", self.console)

    def train(self, name: str = "toy", **changes: object) -> TrainReport:
        """One training of two epochs of two steps."""
        keys = {"num_epochs": 2, "batch_size": 3, "grad_accum_batches": 2, "lr": 0.01, "validate_every_n_epochs": 0.5}
        config = Config.from_flat(keys | changes).training
        spec = StudentSpec(self.student, "fp32", "cpu", VOCAB, grad_checkpointing=False, trust_remote_code=False)
        paths = TrainPaths(self.folder / "states" / name, self.folder / "trained", name)
        plan = plan_steps(config, self.data.samples, seed=0)
        trainer = Trainer(config, Student(spec), data=self.data, validation=self.data, plan=plan, paths=paths)
        return trainer.run(run_folder=self.run_folder, tracker=NoTracker(), console=self.console)

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


def test_a_loss_that_is_no_number_stops_with_the_step(bench: Bench) -> None:
    with pytest.raises(InputError, match=r"lr: .* at step \d"):
        bench.train(lr=1e30, final_lr=0.0, max_grad_norm=0.0)


def test_the_second_signal_stops_at_once() -> None:
    with pytest.raises(KeyboardInterrupt), stop_signal() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.is_set()
        os.kill(os.getpid(), signal.SIGINT)
