"""Adapters and packed weights: what learns, what is saved, and that the export is what was validated."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from distill.adapters import AdapterSpec
from distill.collate import collate
from distill.dataloader import pad
from distill.errors import InputError
from distill.losses import build_loss
from distill.student import Student, StudentSpec
from tests.architectures import ARCHITECTURES, VOCAB, make
from tests.helpers import make_records, make_samples
from tests.toys import make_tokenizer

ADAPTERS = AdapterSpec(rank=4, alpha=8.0, targets=(), dropout=0.0, seed=1, merge_into="dequantised")
# Where one computation is as good as another, all architectures have to be equal; else a usual and an unusual one near.
CASES = [(p, name) for p in ("fp32", "4bit") for name in ARCHITECTURES]
CASES += [(p, name) for p in ("bf16", "8bit") for name in ("llama-tied", "gpt2")]


def make_student(name: str, folder: Path, precision: str, adapters: AdapterSpec = ADAPTERS) -> Student:
    if not folder.exists():
        make(name).save_pretrained(folder)
        make_tokenizer().save_pretrained(folder)
    return Student(StudentSpec(folder, precision, "cpu", VOCAB, False, False, adapters=adapters))


def train(student: Student, steps: int = 8) -> list[float]:
    samples = make_samples(3, length=20)
    tokens = collate(samples)
    targets = pad(make_records(samples), tokens.labels)
    optimizer = torch.optim.AdamW(student.parameters(), lr=0.01)
    losses = []
    for _ in range(steps):
        loss = student.loss(tokens, targets, build_loss("kl"), scale=1 / len(targets))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(("precision", "name"), CASES)
def test_adapters_learn_and_the_export_is_the_student(name: str, precision: str, tmp_path: Path) -> None:
    student = make_student(name, tmp_path / "base", precision)
    before = {n: p.detach().clone() for n, p in student.model.named_parameters() if not p.requires_grad}
    losses = train(student)
    assert losses[-1] < losses[0]
    assert all("lora_" in n for n, p in student.model.named_parameters() if p.requires_grad)
    assert all(torch.equal(p, before[n]) for n, p in student.model.named_parameters() if n in before)
    student.model.eval()
    student.export(tmp_path / "out")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    ids = torch.arange(12)[None]
    with torch.no_grad(), student._autocast():
        own = student.model(ids).logits.float()
    with torch.no_grad():
        exported = plain(ids).logits
    # LLM.int8 rounds what goes into a layer, too; half precision all that is computed.
    slack = {"fp32": 1e-4, "4bit": 1e-3}.get(precision, 0.1)
    assert (own - exported).abs().max() < slack * own.abs().max().clamp(min=1.0)
    assert "quantization_config" not in plain.config.to_dict()


def test_weights_before_quantisation_or_the_adapters_alone(tmp_path: Path) -> None:
    ids = torch.arange(12)[None]
    logits = {}
    for into in ("dequantised", "original", "none"):
        student = make_student("llama-tied", tmp_path / "base", "4bit", replace(ADAPTERS, merge_into=into))
        train(student, 5)
        student.export(tmp_path / into)
        if into != "none":
            logits[into] = AutoModelForCausalLM.from_pretrained(tmp_path / into)(ids).logits
    assert not (tmp_path / "none" / "model.safetensors").exists()
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    adapted = PeftModel.from_pretrained(base, str(tmp_path / "none" / "adapter"))
    assert torch.allclose(adapted(ids).logits, logits["original"], atol=1e-4)
    assert (logits["original"] - logits["dequantised"]).abs().max() > 1e-3


def test_the_same_seed_makes_the_same_adapters_and_leaves_the_generator(tmp_path: Path) -> None:
    torch.manual_seed(5)
    students = [make_student("llama-tied", tmp_path / "base", "fp32", replace(ADAPTERS, seed=n)) for n in (1, 1, 2)]
    state = torch.get_rng_state()
    first, again, other = (torch.cat([p.flatten() for p in student.parameters()]) for student in students)
    assert torch.equal(first, again) and not torch.equal(first, other)
    make_student("llama-tied", tmp_path / "base", "fp32")
    assert torch.equal(torch.get_rng_state(), state)


def test_targets_are_linear_layers_by_the_end_of_their_names(tmp_path: Path) -> None:
    student = make_student(
        "llama-tied", tmp_path / "base", "fp32", replace(ADAPTERS, targets=("q_proj", "mlp.up_proj"))
    )
    layers = {n.split(".lora_")[0].rpartition(".")[2] for n, p in student.model.named_parameters() if p.requires_grad}
    assert layers == {"q_proj", "up_proj"}
    with pytest.raises(InputError, match=r"lora_targets: 'q_prj' is no linear layer .*q_proj"):
        make_student("llama-tied", tmp_path / "base", "fp32", replace(ADAPTERS, targets=("q_prj",)))
    with pytest.raises(InputError, match=r"lora_targets: 'lm_head' is the output layer"):
        make_student("llama-tied", tmp_path / "base", "fp32", replace(ADAPTERS, targets=("lm_head",)))


@pytest.mark.parametrize("name", ["llama-tied", "mistral"])
@pytest.mark.parametrize("precision", ["8bit", "4bit"])
def test_head_and_embeddings_stay_as_they_are(name: str, precision: str, tmp_path: Path) -> None:
    model = make_student(name, tmp_path / "base", precision).model
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    for ours, theirs in (
        (model.get_output_embeddings(), base.get_output_embeddings()),
        (model.get_input_embeddings(), base.get_input_embeddings()),
    ):
        assert torch.equal(ours.weight, theirs.weight) and ours.weight.dtype == torch.float32
    assert model.model.layers[0].mlp.up_proj.base_layer.weight.dtype in (torch.int8, torch.uint8)


def test_checkpointing_gives_adapters_the_same_gradients(tmp_path: Path) -> None:
    gradients = []
    samples = make_samples(3, length=20)
    tokens = collate(samples)
    targets = pad(make_records(samples), tokens.labels)
    for checkpointing in (False, True):
        spec = make_student("llama-tied", tmp_path / "base", "4bit").spec
        student = Student(replace(spec, grad_checkpointing=checkpointing))
        train(student, 2)
        student.model.train()
        student.loss(tokens, targets, build_loss("kl"), scale=1.0).backward()
        gradients.append([parameter.grad for parameter in student.parameters()])
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(*gradients, strict=True))
