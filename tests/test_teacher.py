"""The teacher's records against its own logits, on many architectures."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from distill.errors import InputError
from distill.placement import Placement
from distill.records import concat
from distill.teacher import Teacher, TeacherSpec, top_k_statistics
from distill.types import Records
from tests.architectures import ARCHITECTURES, VOCAB, make
from tests.helpers import dense_logprobs, make_samples, same_records, top_k_records


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
    if k == 97:  # the whole distribution is by id, but for the likeliest
        assert np.array_equal(got.logprobs.argmax(1).numpy(), np.zeros(6))
        order = got.logprobs.argsort(dim=1, descending=True, stable=True)
        got = replace(got, ids=got.ids.gather(1, order), logprobs=got.logprobs.gather(1, order))
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
    got = top_k_statistics(logits.clone(), torch.tensor([3]), 5)
    assert got.ids[0, :4].tolist() == [2, 0, 3, 5]
    assert torch.isneginf(got.logprobs[0, 4:]).all() and torch.isneginf(got.tail_logprobs).all()
    p = torch.tensor([2.0, 1.0, 1.0, 1.0]).softmax(0)
    for k in (1, 4, 5, 6):
        entropy = top_k_statistics(logits.clone(), torch.tensor([3]), k).entropies.item()
        assert entropy == pytest.approx(-(p * p.log()).sum().item(), abs=1e-6)
    few = top_k_statistics(logits.clone(), torch.tensor([3]), 4)
    assert torch.isneginf(few.tail_logprobs).all()


@settings(deadline=None)
@given(
    seed=st.integers(0, 1 << 30),
    vocab_size=st.integers(2, 3000),
    share=st.floats(0, 1),
    levels=st.integers(1, 400),
    suppressed=st.floats(0, 0.9),
)
def test_ties_at_the_cut_go_to_the_lowest_ids(
    seed: int, vocab_size: int, share: float, levels: int, suppressed: float
) -> None:
    """As coarse a number format as one likes: what is kept is what a stable sort of the whole row keeps."""
    rng = np.random.default_rng(seed)
    k = 1 + int(share * (vocab_size - 2))
    logits = rng.integers(-levels, levels, (5, vocab_size)) / 16
    logits[rng.random(logits.shape) < suppressed] = -np.inf
    logits[:, rng.integers(vocab_size)] = 0.0
    got = top_k_statistics(torch.from_numpy(logits).float(), torch.zeros(5, dtype=torch.long), k)
    assert np.array_equal(got.ids.numpy(), np.argsort(-logits, axis=1, kind="stable")[:, :k])


def test_one_row_with_nan_spoils_no_other() -> None:
    logits = torch.zeros(3, 5000)
    logits[1, 7] = torch.nan
    logits[2, 8] = torch.inf
    got = top_k_statistics(logits, torch.zeros(3, dtype=torch.long), 50)
    assert got.entropies.isfinite().tolist() == [True, False, False]
    assert got.entropies[0].item() == pytest.approx(np.log(5000), abs=1e-4)


def test_the_whole_distribution_is_by_id_but_for_the_likeliest() -> None:
    logits = torch.tensor([[0.0, 3.0, -torch.inf, 1.0], [5.0, 3.0, 2.0, 1.0]])
    got = top_k_statistics(logits.clone(), torch.tensor([3, 0]), 4)
    assert got.ids.tolist() == [[1, 0, 2, 3], [0, 1, 2, 3]]
    assert torch.allclose(got.logprobs, logits.log_softmax(1).gather(1, got.ids))
    assert torch.allclose(got.label_logprobs, logits.log_softmax(1)[[0, 1], [3, 0]])
    assert torch.isneginf(got.tail_logprobs).all()


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_records_are_those_of_the_models_own_logits(name: str, tmp_path: Path) -> None:
    model = make(name)
    model.save_pretrained(tmp_path)
    teacher = Teacher(spec_of(tmp_path))
    assert not teacher.notes, "its head is known"
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
    assert "unusual output head" in teacher.notes[0]
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
    # The widest thing of this model is its MLP of 64. The last tokens predict nothing and aren't run.
    tokens = len(samples) * (max(len(s.token_ids) for s in samples) - 1)
    assert tokens * 64 <= largest.numel < tokens * VOCAB / 2


def test_not_finite_logits_name_the_sample(tmp_path: Path) -> None:
    model = make("llama-tied")
    model.model.norm.weight.data.fill_(torch.nan)
    model.save_pretrained(tmp_path)
    with pytest.raises(InputError, match="not finite at made-up"):
        Teacher(spec_of(tmp_path)).records(make_samples(1))


def same_within_rounding(got: Records, expected: Records) -> None:
    """Entries are compared as dense rows: what two roundings order differently isn't an error."""
    for name in ("tail_logprobs", "label_logprobs", "entropies", "entry_logprobs"):
        assert np.allclose(getattr(got, name), getattr(expected, name), atol=2e-4), name
    assert np.array_equal(got.entry_counts, expected.entry_counts)


@pytest.mark.parametrize(
    ("name", "chunk_len"), [*((name, 5) for name in ARCHITECTURES), *(("gemma3", size) for size in (1, 8, 19, 100))]
)
def test_chunks_give_the_same_records(name: str, chunk_len: int, tmp_path: Path) -> None:
    """Sliding windows of 8 tokens included."""
    make(name).save_pretrained(tmp_path)
    samples = make_samples(4, length=20)
    expected = concat(Teacher(spec_of(tmp_path)).records(samples))
    teacher = Teacher(spec_of(tmp_path, seq_chunk_len=chunk_len))
    assert not teacher.notes
    same_within_rounding(concat(teacher.records(samples)), expected)


def test_chunks_go_through_a_models_own_head_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make("llama-tied").save_pretrained(tmp_path)
    samples = make_samples(4, length=20)
    expected = concat(Teacher(spec_of(tmp_path)).records(samples))
    monkeypatch.setattr("distill.teacher.verified_head", lambda *_: None)
    teacher = Teacher(spec_of(tmp_path))
    same_within_rounding(concat(teacher.score(samples, chunk_len=6).records()), expected)


def test_an_architecture_that_has_no_cache_runs_whole(teacher_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distill.teacher.runs_in_chunks", lambda *_: False)
    teacher = Teacher(spec_of(teacher_folder, seq_chunk_len=4))
    assert teacher.notes == ("toy-teacher: seq_chunk_len has no effect: this architecture can't be run in chunks",)
    samples = make_samples(2)
    assert same_records(concat(teacher.records(samples)), concat(Teacher(spec_of(teacher_folder)).records(samples)))


def test_the_head_has_a_number_format_of_its_own(tmp_path: Path) -> None:
    make("gemma2").save_pretrained(tmp_path)
    samples = make_samples(3, length=20)
    exact = concat(Teacher(spec_of(tmp_path)).records(samples))
    coarse = concat(Teacher(spec_of(tmp_path, head_dtype="bf16")).records(samples))
    errors = np.abs(coarse.label_logprobs - exact.label_logprobs)
    assert 1e-5 < errors.max() < 0.1
    half = concat(Teacher(spec_of(tmp_path, dtype="bf16", head_dtype="fp32")).records(samples))
    assert np.isfinite(half.entropies).all()
    whole = concat(Teacher(spec_of(tmp_path, dtype="bf16")).records(samples))
    assert not same_records(half, whole)


def test_the_whole_distribution_of_a_teacher(teacher_folder: Path) -> None:
    samples = make_samples(3, length=20)
    got = concat(Teacher(spec_of(teacher_folder, top_k=VOCAB)).records(samples))
    assert (got.entry_counts == VOCAB).all() and np.isneginf(got.tail_logprobs).all()
    ids, logprobs = got.entry_ids.reshape(-1, VOCAB), got.entry_logprobs.reshape(-1, VOCAB)
    assert np.array_equal(np.sort(ids, 1), np.broadcast_to(np.arange(VOCAB), ids.shape))
    assert (logprobs.argmax(1) == 0).all()
    few = concat(Teacher(spec_of(teacher_folder)).records(samples))
    assert np.allclose(-np.sort(-logprobs, 1)[:, :9].ravel(), few.entry_logprobs, atol=1e-5)


def test_a_gpus_share_of_memory_is_kept(teacher_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Made-up GPUs: what placement promised is what torch is held to, and what accelerate is told."""
    limits: dict[int, float] = {}
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda index: SimpleNamespace(total_memory=80))
    monkeypatch.setattr("torch.cuda.set_per_process_memory_fraction", lambda part, index: limits.update({index: part}))
    loaded: dict[str, object] = {}

    def load(folder: Path, **options: object) -> object:
        loaded.update(options)
        raise InputError("loaded")

    monkeypatch.setattr("distill.teacher.load_causal_lm", load)
    placement = Placement("cuda:1", ((1, 60), (2, 100)))
    with pytest.raises(InputError, match="loaded"):
        Teacher(spec_of(teacher_folder).on(placement))
    assert limits == {1: 0.75, 2: 1.0}
    assert loaded["device"] == "cuda:1" and loaded["max_memory"] == {1: 60, 2: 100}
