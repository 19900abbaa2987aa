"""The teacher's records against its own logits, on many architectures."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from distill.errors import InputError
from distill.records import concat
from distill.teacher import Teacher, TeacherSpec, top_k_statistics
from tests.architectures import ARCHITECTURES, VOCAB, make
from tests.helpers import dense_logprobs, make_samples, top_k_records


def spec_of(folder: Path, **changes: object) -> TeacherSpec:
    spec = TeacherSpec(folder, "fp32", "cpu", vocab_size=VOCAB, top_k=9, trust_remote_code=False)
    return replace(spec, **changes)  # type: ignore[arg-type]


@settings(deadline=None)
@given(seed=st.integers(0, 1 << 30), k=st.sampled_from([1, 5, 96, 97]))
def test_statistics_equal_float64(seed: int, k: int) -> None:
    rng = np.random.default_rng(seed)
    logprobs, labels = dense_logprobs(rng, 6), rng.integers(0, 97, 6)
    expected = top_k_records(logprobs, labels, k)
    got = top_k_statistics(torch.from_numpy(logprobs + rng.normal(0, 30, (6, 1))).float(), torch.from_numpy(labels), k)
    # float32 may swap what float64 tells apart by less than a rounding error: the values at the ids are what counts.
    assert np.allclose(np.take_along_axis(logprobs, got.ids.numpy(), 1).ravel(), expected.entry_logprobs, atol=3e-5)
    for mine, theirs in (
        (got.logprobs.flatten(), expected.entry_logprobs),
        (got.label_logprobs, expected.label_logprobs),
        (got.entropies, expected.entropies),
        (got.tail_logprobs, expected.tail_logprobs),
    ):
        assert np.allclose(mine.numpy(), theirs, atol=3e-5)


def test_a_sure_teacher_keeps_an_exact_tail() -> None:
    """1 - kept mass is 0 in float32; the tail itself is not."""
    logits = torch.zeros(1, 1000)
    logits[0, 7] = 60.0
    got = top_k_statistics(logits.clone(), torch.tensor([7]), 1)
    assert got.logprobs.item() == 0.0
    assert got.tail_logprobs.item() == pytest.approx(np.log(999) - 60, abs=1e-4)


def test_suppressed_tokens_and_ties() -> None:
    """Report A7: -inf logits gave NaN. Ties are ordered by id."""
    logits = torch.tensor([[1.0, -torch.inf, 2.0, 1.0, -torch.inf, 1.0]])
    got = top_k_statistics(logits.clone(), torch.tensor([3]), 6)
    assert got.ids[0, :4].tolist() == [2, 0, 3, 5]
    assert torch.isneginf(got.logprobs[0, 4:]).all() and torch.isneginf(got.tail_logprobs).all()
    p = torch.tensor([2.0, 1.0, 1.0, 1.0]).softmax(0)
    assert got.entropies.item() == pytest.approx(-(p * p.log()).sum().item(), abs=1e-6)
    few = top_k_statistics(logits.clone(), torch.tensor([3]), 4)
    assert torch.isneginf(few.tail_logprobs).all()


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_records_are_those_of_the_models_own_logits(name: str, tmp_path: Path) -> None:
    model = make(name)
    model.save_pretrained(tmp_path)
    teacher = Teacher(spec_of(tmp_path))
    assert teacher.note is None, "its head is known"
    samples = make_samples(5, length=20)
    records = teacher.records(samples)
    for sample, got in zip(samples, records, strict=True):
        with torch.no_grad():
            logits = model(input_ids=torch.from_numpy(sample.token_ids).long()[None]).logits[0].double()
        rows = logits[torch.from_numpy(sample.targets).long() - 1].log_softmax(1).numpy()
        expected = top_k_records(rows, sample.token_ids[sample.targets], 9)
        assert np.allclose(got.entry_logprobs, expected.entry_logprobs, atol=1e-4)
        assert np.allclose(got.tail_logprobs, expected.tail_logprobs, atol=1e-4)
        assert np.allclose(got.label_logprobs, expected.label_logprobs, atol=1e-4)
        assert np.allclose(got.entropies, expected.entropies, atol=1e-4)
        at_ids = np.take_along_axis(rows, got.entry_ids.reshape(-1, 9), 1).ravel()
        assert np.allclose(at_ids, expected.entry_logprobs, atol=1e-4)


def test_a_padded_head_is_cropped_before_any_softmax(tmp_path: Path) -> None:
    """Report A6: mass on rows beyond the tokenizer."""
    model = make("qwen2")
    model.lm_head.weight.data[90] *= 40
    model.save_pretrained(tmp_path)
    samples = make_samples(3, length=20)
    for sample in samples:
        sample.token_ids[:] %= 77
    got = concat(Teacher(spec_of(tmp_path, vocab_size=77)).records(samples))
    assert got.entry_ids.max() < 77
    model.resize_token_embeddings(77)
    trimmed = tmp_path / "trimmed"
    model.save_pretrained(trimmed)
    expected = concat(Teacher(spec_of(trimmed, vocab_size=77)).records(samples))
    assert np.allclose(got.entry_logprobs, expected.entry_logprobs, atol=1e-5)
    assert np.allclose(got.tail_logprobs, expected.tail_logprobs, atol=1e-4)


def test_an_unknown_head_is_run_as_the_model_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make("llama-tied")
    model.save_pretrained(tmp_path)
    samples = make_samples(4, length=20)
    expected = concat(Teacher(spec_of(tmp_path)).records(samples))
    monkeypatch.setattr("distill.teacher.verified_head", lambda *_: None)
    teacher = Teacher(spec_of(tmp_path))
    assert teacher.note is not None and "unusual output head" in teacher.note
    got = concat(teacher.records(samples))
    assert np.array_equal(got.entry_ids, expected.entry_ids)
    assert np.allclose(got.entry_logprobs, expected.entry_logprobs, atol=1e-5)


def test_no_tensor_over_batch_length_and_vocabulary(teacher_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        numel = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            out = func(*args, **(kwargs or {}))
            for tensor in out if isinstance(out, tuple | list) else [out]:
                if isinstance(tensor, torch.Tensor):
                    self.numel = max(self.numel, tensor.numel())
            return out

    monkeypatch.setattr("distill.teacher._PIECE_BYTES", 4 * VOCAB * 8)
    teacher = Teacher(spec_of(teacher_folder, top_k=5))
    samples = make_samples(6, length=120)
    with Largest() as largest:
        teacher.records(samples)
    # 6 * 20 rows of tokens; the widest thing of this model is its MLP of 64.
    tokens = len(samples) * max(len(s.token_ids) for s in samples)
    assert tokens * 64 <= largest.numel < tokens * VOCAB / 2


def test_not_finite_logits_name_the_sample(tmp_path: Path) -> None:
    model = make("llama-tied")
    model.model.norm.weight.data.fill_(torch.nan)
    model.save_pretrained(tmp_path)
    with pytest.raises(InputError, match="not finite at made-up"):
        Teacher(spec_of(tmp_path)).records(make_samples(1))
