"""Packed rows are a matter of speed alone: losses and gradients are those of the same samples in rows of their own."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers as tf
from transformers import PreTrainedModel

from distill.collate import TokenBatch, collate
from distill.dataloader import pad
from distill.errors import InputError
from distill.fused import fused_loss
from distill.head import find_head, hidden_states, own_logits, packs
from distill.losses import SparseTargets, Weighing, build_loss
from distill.student import Student, StudentSpec
from distill.types import TokenizedSample
from tests.architectures import ARCHITECTURES, VOCAB, make
from tests.helpers import make_records, make_sample
from tests.test_train import Bench, cached
from tests.toys import make_model_folder, make_tokenizer

LENGTHS = (12, 2, 25, 7, 18, 3, 9)  # sliding windows are of 8
BEGINS = np.array([True, False, False, True, False, True, False])

WHOLE_ROWS: dict[str, Callable[[], PreTrainedModel]] = {
    "bloom": lambda: tf.BloomForCausalLM(tf.BloomConfig(vocab_size=VOCAB, hidden_size=32, n_layer=2, n_head=4)),
    "mpt": lambda: tf.MptForCausalLM(tf.MptConfig(vocab_size=VOCAB, d_model=32, n_heads=4, n_layers=2)),
    "mamba": lambda: tf.MambaForCausalLM(
        tf.MambaConfig(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, state_size=4)
    ),
    "lfm2": lambda: tf.Lfm2ForCausalLM(
        tf.Lfm2Config(
            vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, layer_types=["conv", "full_attention"],
        )
    ),
}  # fmt: skip
"""Positions by distance with no regard to position ids, a state, a convolution: they look at a row as a whole."""


def samples_of(lengths: tuple[int, ...] = LENGTHS) -> list[TokenizedSample]:
    rng = np.random.default_rng(4)
    return [make_sample(rng, length=length) for length in lengths]


def targets_of(samples: list[TokenizedSample], tokens: TokenBatch) -> SparseTargets:
    return pad(make_records(samples), tokens.labels)


def loss_and_gradients(
    model: PreTrainedModel, tokens: TokenBatch, targets: SparseTargets
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    hidden = tokens.at_targets(hidden_states(model, tokens.token_ids, position_ids=tokens.position_ids))
    loss = fused_loss(hidden, find_head(model, VOCAB), targets, build_loss("kl"), scale=1 / len(targets))
    parameters = list(model.parameters())
    gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
    return loss, [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, gradients, strict=True)]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_packed_rows_have_the_losses_and_gradients_of_single_ones(name: str) -> None:
    model, samples = make(name), samples_of()
    packed, padded = collate(samples, BEGINS), collate(samples)
    assert packed.token_ids.shape == (3, 39) and padded.token_ids.shape == (7, 25)
    targets = targets_of(samples, packed)
    loss, gradients = loss_and_gradients(model, packed, targets)
    expected, expected_gradients = loss_and_gradients(model, padded, targets)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)
    largest = max(float(gradient.abs().max()) for gradient in expected_gradients)
    assert largest > 1e-3
    for gradient, other in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(gradient, other, rtol=0, atol=1e-5 * largest)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_what_packs_is_found_out(name: str) -> None:
    assert packs(make(name), torch.arange(3, 27)[None])


@pytest.mark.parametrize("name", WHOLE_ROWS)
def test_what_looks_at_a_row_as_a_whole_is_found_out(name: str) -> None:
    torch.manual_seed(0)
    model = WHOLE_ROWS[name]().train()
    assert not packs(model, torch.arange(3, 27)[None]) and model.training


def test_a_model_that_ignores_positions_is_found_out() -> None:
    """Its samples see each other though their positions restart."""
    model = make("llama-tied")
    assert packs(model, torch.arange(3, 27)[None])
    forward = model.forward
    model.forward = lambda **inputs: forward(**{k: v for k, v in inputs.items() if k != "position_ids"})
    assert not packs(model, torch.arange(3, 27)[None])


def test_flash_attention_is_given_one_row() -> None:
    """It tells samples apart in a batch of one row only."""
    shapes = []

    class Model(torch.nn.Module):
        base_model = None
        config = tf.LlamaConfig(attn_implementation="flash_attention_2")

        def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor, use_cache: bool) -> object:
            shapes.append((input_ids.shape, position_ids.shape))
            return tf.modeling_outputs.CausalLMOutput(logits=torch.zeros(*input_ids.shape, 5))

    tokens = collate(samples_of(), BEGINS)
    logits = own_logits(Model(), tokens.token_ids, position_ids=tokens.position_ids)  # type: ignore[arg-type]
    assert shapes == [((1, 3 * 39), (1, 3 * 39))] and logits.shape == (3, 39, 5)


# -- the student ------------------------------------------------------------------------------------------------------


def spec_of(folder: Path, packing: bool = True) -> StudentSpec:
    return StudentSpec(folder, "fp32", "cpu", VOCAB, False, False, packing=packing)


def test_a_student_that_cannot_pack_is_refused_by_name(tmp_path: Path) -> None:
    torch.manual_seed(0)
    WHOLE_ROWS["bloom"]().save_pretrained(tmp_path / "blossom")
    make_tokenizer().save_pretrained(tmp_path / "blossom")
    with pytest.raises(InputError, match=r"^packing: blossom \(BloomForCausalLM\) [^\n]+ false$"):
        Student(spec_of(tmp_path / "blossom"))
    Student(spec_of(tmp_path / "blossom", packing=False))


@pytest.mark.parametrize("known_head", [True, False])
def test_a_student_weighs_targets_by_their_own_sample(tmp_path: Path, known_head: bool) -> None:
    """The largest divergence is that of the sample, not of the row; whichever head is used."""
    student = Student(spec_of(make_model_folder(tmp_path / "toy", seed=1, hidden=16, layers=2)))
    student._known_head = known_head
    samples, loss = samples_of(), build_loss("kl")
    weighing = Weighing(loss, 2.0)
    packed, padded = collate(samples, BEGINS), collate(samples)
    targets = targets_of(samples, packed)
    results = [student.loss(tokens, targets, loss, scale=1.0, weighing=weighing) for tokens in (packed, padded)]
    torch.testing.assert_close(results[0], results[1], rtol=1e-5, atol=0)
    statistics = [student.statistics(tokens, targets) for tokens in (packed, padded)]
    torch.testing.assert_close(statistics[0].top_logprobs, statistics[1].top_logprobs)


# -- whole trainings --------------------------------------------------------------------------------------------------


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path, cached(tmp_path / "cache", 10))


ONE_STEP = {"batch_size": 10, "grad_accum_batches": 10, "optimizer": "sgd", "lr": 0.3, "max_grad_norm": 0.0}


@pytest.mark.parametrize(
    "keys", [{"packing": True}, {"max_tokens_per_batch": 30}, {"packing": True, "max_tokens_per_batch": 24}]
)
def test_how_samples_are_batched_does_not_change_the_training(bench: Bench, keys: dict[str, object]) -> None:
    """Steps of all samples, in other micro-batches, however full the last one is."""
    whole = bench.train("whole", **ONE_STEP)
    expected = bench.records("train")
    other = bench.train("other", **ONE_STEP, **keys)
    assert other.steps == whole.steps == 2
    assert (other.targets, other.tokens) == (whole.targets, whole.tokens)
    for record, old in zip(bench.records("train"), expected, strict=True):
        assert record["loss"] == pytest.approx(old["loss"], rel=1e-5)
        assert record["grad_norm"] == pytest.approx(old["grad_norm"], rel=1e-5)
    assert other.after["kl"] == pytest.approx(whole.after["kl"], rel=1e-5)


def test_a_last_window_of_rows_is_weighted_by_its_own_targets(bench: Bench) -> None:
    """Report A11 with packed rows: two steps, of which the second one has fewer rows."""
    keys = {**ONE_STEP, "batch_size": 1, "grad_accum_batches": 4, "num_epochs": 1, "data_order": "native"}
    bench.train("toy", **keys, packing=True, lr_scheduler="constant", save_student_every_n_epochs=0.5)
    first, last = bench.records("train")
    assert first["targets"] > 2 * last["targets"] > 0
    student = Student(StudentSpec(bench.folder / "trained" / "toy_step_1", "fp32", "cpu", VOCAB, False, False))
    plan = bench.plan(**keys, packing=True)
    ((_, micro_batches),) = plan.steps(2, 2)
    batch = bench.data.batch([row for rows in micro_batches for row in rows])
    loss = student.loss(batch.tokens, batch.targets, build_loss("kl"), scale=1 / len(batch.targets))
    loss.backward()
    assert last["loss"] == pytest.approx(loss.item(), rel=1e-5)
    norm = torch.stack([p.grad.norm() for p in student.parameters() if p.grad is not None]).norm()
    assert last["grad_norm"] == pytest.approx(norm.item(), rel=1e-5)


@pytest.mark.parametrize("readers", [0, 1, 4])
def test_a_packed_training_is_resumed_exactly(bench: Bench, readers: int) -> None:
    """Cut anywhere, with any number of readers, the same parameters bit for bit."""
    keys: dict[str, object] = {"packing": True, "batch_size": 2, "grad_accum_batches": 1}
    whole = bench.train("whole", **keys)
    assert whole.steps > 4
    for step in (1, whole.steps // 2, whole.steps - 1):
        name = f"cut at {step}"
        bench.train(name, until=step, **keys, loader_workers=readers)
        assert bench.train(name, **keys, loader_workers=readers).resumed_from_step == step
        assert bench.weights(f"{name}_final") == bench.weights("whole_final")
