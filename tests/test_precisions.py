"""Every precision, with all weights and with adapters: it learns, goes on exactly, and its export is what it is."""

import json
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from distill.adapters import AdapterSpec
from distill.config import Config
from distill.models import torch_dtype
from distill.report.tracker import NoTracker
from distill.student import Student, StudentSpec
from distill.train import Trainer, TrainPaths, plan_steps
from tests.architectures import make
from tests.test_train import VOCAB, Bench, cached
from tests.toys import make_model_folder, make_tokenizer

# With dropout: what is drawn for it has to be the same after a resume.
ADAPTERS = AdapterSpec(rank=4, alpha=8.0, targets=(), dropout=0.1, seed=1, merge_into="dequantised")
CASES = [
    ("fp32", "full"), ("bf16", "full"), ("fp16", "full"),
    ("fp32", "lora"), ("bf16", "lora"), ("fp16", "lora"), ("8bit", "lora"), ("4bit", "lora"),
]  # fmt: skip
STEPS, CUT = 20, 7
# What the export may differ by, as a part of the largest logit: nothing from the trained weights in its own type; if it
# is merged, the rounding of a sum; in half precision and with LLM.int8 what goes into a layer is rounded as well.
SLACK = {"fp32-full": 0.0, "bf16-full": 0.0, "fp16-full": 0.0, "fp32-lora": 1e-5, "4bit-lora": 1e-5}
ROUNDED = 0.05

FRESH = """
import json, sys, torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM
ids = torch.arange(5, 25)[None]
found = {}
for name, folder in json.loads(sys.argv[1]).items():
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert str(model.dtype).removeprefix("torch.") == {"bf16": "bfloat16", "fp16": "float16"}.get(name[:4], "float32")
    tied = model.lm_head.weight.data_ptr() == model.get_input_embeddings().weight.data_ptr()
    assert tied == model.config.tie_word_embeddings, name
    found[name] = model.float()(ids).logits.detach()
save_file(found, sys.argv[2])
assert not any(name.startswith(("distill", "peft", "bitsandbytes")) for name in sys.modules)
"""


@dataclass(frozen=True)
class Trained:
    """One case: its losses and its weights, trained whole and cut in two, its own logits and those of its export."""

    losses: list[float]
    whole: dict[str, Tensor]
    resumed: dict[str, Tensor]
    logits: Tensor
    exported: Tensor
    untrained: Tensor
    state_bytes: int


class Precisions(Bench):
    """Trains a student in any precision."""

    def trainer(self, spec: StudentSpec, name: str) -> tuple[Trainer, Student]:
        keys = {"num_epochs": 10, "batch_size": 3, "grad_accum_batches": 2, "lr": 0.01, "validate_every_n_epochs": 0}
        config = Config.from_flat(keys | {"training_precision": spec.precision}).training
        paths = TrainPaths(self.folder / "states" / name, self.folder / "trained", name)
        plan, student = plan_steps(config, self.data.samples, seed=0), Student(spec)
        return Trainer(config, student, data=self.data, validation=self.data, plan=plan, paths=paths), student

    def run(self, spec: StudentSpec, name: str, until: int | None = None) -> Student:
        trainer, student = self.trainer(spec, name)
        trainer.run(run_folder=self.run_folder, tracker=NoTracker(), console=self.console, until=until)
        return student

    def losses(self) -> list[float]:
        return [record["loss"] for record in self.records("train")]


def spec_of(folder: Path, precision: str, how: str) -> StudentSpec:
    spec = StudentSpec(folder, precision, "cpu", VOCAB, grad_checkpointing=False, trust_remote_code=False)
    return replace(spec, adapters=ADAPTERS) if how == "lora" else spec


def own_logits(student: Student) -> Tensor:
    """As validated; if all weights are saved in a smaller type, what they give in that type."""
    if student.spec.adapters is None:
        for parameter in student.model.parameters():
            parameter.data = parameter.data.to(torch_dtype(student.spec.precision)).float()
    with student.evaluating(), nullcontext() if student.spec.adapters is None else student._autocast():
        return student.model(torch.arange(5, 25)[None]).logits.float()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Trained]:
    folder = tmp_path_factory.mktemp("precisions")
    bench = Precisions(folder, cached(folder / "cache", 10))
    toy = make_model_folder(folder / "wide", seed=3, hidden=32, layers=2)
    untrained = own_logits(Student(spec_of(toy, "fp32", "full")))
    results: dict[str, dict[str, Any]] = {}
    for precision, how in CASES:
        name, spec = f"{precision}-{how}", spec_of(toy, precision, how)
        student = bench.run(spec, name)
        losses = bench.losses()[-STEPS:]
        bench.run(spec, f"{name}-cut", until=CUT)
        (state,) = (folder / "states" / f"{name}-cut").glob("step_*")
        results[name] = {
            "losses": losses,
            "whole": {n: p.detach().clone() for n, p in student.model.named_parameters() if p.requires_grad},
            "logits": own_logits(student),
            "untrained": untrained,
            "state_bytes": (state / "model.safetensors").stat().st_size,
        }
        resumed = bench.run(spec, f"{name}-cut")
        results[name]["resumed"] = {n: p.detach() for n, p in resumed.model.named_parameters() if p.requires_grad}
    make("mistral").save_pretrained(folder / "untied")
    make_tokenizer().save_pretrained(folder / "untied")
    for precision, how in (("bf16", "full"), ("4bit", "lora")):
        name, student = f"{precision}-{how}-untied", Student(spec_of(folder / "untied", precision, how))
        student.export(folder / "trained" / f"{name}_final")
        results[name] = {"logits": own_logits(student)}
    exports = {name: str(folder / "trained" / f"{name}_final") for name in results}
    fresh = subprocess.run(
        [sys.executable, "-c", FRESH, json.dumps(exports), str(folder / "logits.safetensors")],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert fresh.returncode == 0, fresh.stderr
    exported = load_file(folder / "logits.safetensors")
    for name in [name for name in results if "untied" in name]:
        own = results.pop(name)["logits"]
        assert (exported[name] - own).abs().max() <= 1e-5 * own.abs().max(), name
    return {name: Trained(exported=exported[name], **result) for name, result in results.items()}


@pytest.mark.parametrize("case", [f"{precision}-{how}" for precision, how in CASES])
class TestEveryPrecision:
    """One training of each, and the same cut in two."""

    def test_the_loss_falls(self, case: str, trained: dict[str, Trained]) -> None:
        losses = trained[case].losses
        assert len(losses) == STEPS and sum(losses[-3:]) < 0.7 * sum(losses[:3])

    def test_a_resume_is_bit_equal(self, case: str, trained: dict[str, Trained]) -> None:
        whole, resumed = trained[case].whole, trained[case].resumed
        assert whole.keys() == resumed.keys() and all(torch.equal(whole[name], resumed[name]) for name in whole)

    def test_the_export_is_the_student_in_a_fresh_process(self, case: str, trained: dict[str, Trained]) -> None:
        own, exported = trained[case].logits, trained[case].exported
        slack = SLACK.get(case, ROUNDED) * own.abs().max()
        assert (own - exported).abs().max() <= slack
        assert (trained[case].untrained - exported).abs().max() > 5 * slack, "any student would do"

    def test_a_state_has_what_is_trained(self, case: str, trained: dict[str, Trained]) -> None:
        size = sum(4 * weight.numel() for weight in trained[case].whole.values())
        assert size <= trained[case].state_bytes < size + 8192
