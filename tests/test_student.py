"""The student: loss on any architecture, export."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AttentionInterface, AutoModelForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from distill.collate import collate
from distill.dataloader import pad
from distill.errors import InputError
from distill.losses import build_loss
from distill.models import torch_dtype
from distill.student import Student, StudentSpec
from tests.architectures import ARCHITECTURES, VOCAB, make
from tests.helpers import make_records, make_samples
from tests.toys import make_model_folder


def spec_of(folder: Path, precision: str = "fp32", grad_checkpointing: bool = False) -> StudentSpec:
    return StudentSpec(folder, precision, "cpu", VOCAB, grad_checkpointing, trust_remote_code=False)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_loss_and_gradients_are_those_of_the_models_own_logits(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(name).save_pretrained(tmp_path)
    samples = make_samples(3, length=20)
    tokens = collate(samples)
    targets = pad(make_records(samples), tokens.labels)
    gradients = []
    for known in (True, False):
        if not known:
            monkeypatch.setattr("distill.student.verified_head", lambda *_: None)
        student = Student(spec_of(tmp_path))
        assert (student.note is None) == known
        loss = student.loss(tokens, targets, build_loss("kl"), scale=0.1)
        loss.backward()
        gradients.append((loss.item(), {n: p.grad for n, p in student.model.named_parameters()}))
    (fused, ours), (dense, theirs) = gradients
    assert fused == pytest.approx(dense, rel=1e-5)
    for parameter, gradient in theirs.items():
        if gradient is not None:
            assert torch.allclose(ours[parameter], gradient, atol=1e-5, rtol=1e-3), parameter


def test_checkpointing_gives_the_same_gradients(student_folder: Path) -> None:
    samples = make_samples(3, length=20)
    tokens = collate(samples)
    targets = pad(make_records(samples), tokens.labels)
    results = []
    for checkpointing in (False, True):
        student = Student(spec_of(student_folder, grad_checkpointing=checkpointing))
        student.model.train()
        student.loss(tokens, targets, build_loss("kl"), scale=1.0).backward()
        results.append([p.grad for p in student.parameters()])
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_computes_close_to_fp32_and_keeps_fp32_weights(student_folder: Path, precision: str) -> None:
    samples = make_samples(3, length=20)
    tokens = collate(samples)
    targets = pad(make_records(samples), tokens.labels)
    fp32, half = Student(spec_of(student_folder)), Student(spec_of(student_folder, precision))
    a, b = (s.loss(tokens, targets, build_loss("kl"), scale=1 / len(tokens.labels)) for s in (fp32, half))
    assert a.dtype == b.dtype == torch.float32 and 0 < abs(a.item() - b.item()) < 0.05
    b.backward()
    assert {p.dtype for p in half.parameters()} == {p.grad.dtype for p in half.parameters()} == {torch.float32}


def test_frozen_parts_stay_and_the_others_learn(student_folder: Path) -> None:
    samples = make_samples(3, length=20)
    tokens = collate(samples)
    targets = pad(make_records(samples), tokens.labels)
    student = Student(replace(spec_of(student_folder), freeze_layers=(".mlp.", "layers.0.self_attn", "lm_head")))
    frozen = {name for name, p in student.model.named_parameters(remove_duplicate=False) if not p.requires_grad}
    assert any(".mlp." in name for name in frozen) and "lm_head.weight" in frozen
    assert not any("norm" in name for name in frozen)
    student.loss(tokens, targets, build_loss("kl"), scale=1.0).backward()
    for parameter in student.model.parameters():
        assert (parameter.grad is not None) == parameter.requires_grad
    assert len(student.parameters()) == sum(p.requires_grad for p in student.model.parameters())


def test_nothing_left_to_train_is_refused(student_folder: Path) -> None:
    with pytest.raises(InputError, match="freeze_layers: it leaves nothing of the student to train"):
        Student(replace(spec_of(student_folder), freeze_layers=("weight",)))


def test_a_part_of_no_name_is_refused_with_near_ones(student_folder: Path) -> None:
    with pytest.raises(InputError, match=r"freeze_layers: 'embed_token_' is in no .*did you mean .*embed_tokens"):
        Student(replace(spec_of(student_folder), freeze_layers=("lm_head", "embed_token_")))
    with pytest.raises(InputError, match=r"freeze_layers: '42' .*they look like model"):
        Student(replace(spec_of(student_folder), freeze_layers=("42",)))


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_an_export_is_whole_and_gives_equal_logits(student_folder: Path, tmp_path: Path, precision: str) -> None:
    student = Student(spec_of(student_folder, precision))
    (tmp_path / "out_final.tmp").mkdir()
    (tmp_path / "out_final.tmp" / "leftover").touch()
    student.export(tmp_path / "out_final")
    assert [p.name for p in tmp_path.iterdir()] == ["out_final"]
    assert not (tmp_path / "out_final" / "leftover").exists()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out_final")
    ids = torch.arange(10)[None]
    assert loaded.dtype == torch_dtype(precision)
    assert student.model.config.tie_word_embeddings, "and saved once"
    with safe_open(tmp_path / "out_final" / "model.safetensors", "pt") as file:
        assert set(file.keys()) == set(dict(student.model.named_parameters()))
    assert torch.allclose(loaded.float()(ids).logits, student.model(ids).logits, atol=0 if precision == "fp32" else 0.1)
    assert {p.dtype for p in student.parameters()} == {torch.float32}


def test_an_attention_of_half_precision_alone_is_met_in_half_precision(student_folder: Path) -> None:
    """As FlashAttention: the model's own type is fp32, but under autocast it gets what it takes."""

    def half(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *rest: Any, **named: Any) -> Any:
        assert torch.is_autocast_enabled("cpu"), "it takes its type from there"
        return sdpa_attention_forward(module, query, key, value, *rest, **named)

    AttentionInterface.register("half_alone", half)
    AttentionMaskInterface.register("half_alone", sdpa_mask)
    student = Student(replace(spec_of(student_folder, "bf16"), attention="half_alone", packing=True))
    assert student.note is None, "its head is known"


def test_a_folder_without_weights_is_named(tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path / "m", seed=0, hidden=16, layers=1)
    (folder / "model.safetensors").unlink()
    with pytest.raises(InputError, match="no weights"):
        Student(spec_of(folder))
    (folder / "model.safetensors").write_bytes(b"half a download")
    with pytest.raises(InputError, match="not a whole safetensors file"):
        Student(spec_of(folder))
