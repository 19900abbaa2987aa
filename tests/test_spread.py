"""Students on made-up devices, and on a CPU that is taken for two."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from distill.collate import collate
from distill.dataloader import pad
from distill.errors import InputError
from distill.losses import build_loss
from distill.models import load_causal_lm, require_flash_attention
from distill.models.spread import connect, device_map
from distill.placement import GB, Gpu, Spread, SpreadStrategy, plan_spread
from distill.student import Student, StudentSpec
from tests.architectures import ARCHITECTURES, VOCAB, make
from tests.helpers import make_records, make_samples
from tests.toys import make_tokenizer

LAYERS = 6
PLAN = Spread("custom", ((0, GB), (1, GB)))


def gpus(*free_gb: float) -> list[Gpu]:
    return [Gpu(index, int(free * GB), 80 * GB) for index, free in enumerate(free_gb)]


def planned(devices: list[Gpu], *, factor: float = 1.0, **max_memory: int) -> tuple[dict[int | str, int], list[str]]:
    limits = {name.lstrip("g"): size for name, size in max_memory.items()}
    plan, notes = plan_spread(
        devices, strategy="auto", max_memory=limits, first_layers=None, bytes_per_weight_byte=factor
    )
    return dict(plan.room), notes


def skeleton(*, tied: bool) -> PreTrainedModel:
    with torch.device("meta"):
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=1000, hidden_size=64, intermediate_size=128, num_hidden_layers=LAYERS,
                num_attention_heads=4, tie_word_embeddings=tied,
            )
        )  # fmt: skip
    model.tie_weights()
    return model


def holds(module: str, name: str) -> bool:
    return not module or f"{name}.".startswith(f"{module}.")


def layers_of(devices: dict[str, int | str]) -> list[int | str]:
    names = [f"model.layers.{index}" for index in range(LAYERS)]
    return [place for name in names for module, place in devices.items() if holds(module, name)]


def test_all_gpus_are_filled_and_main_memory_only_if_it_is_named() -> None:
    assert planned(gpus(24, 80)) == ({0: 24 * GB, 1: 80 * GB}, [])
    assert planned(gpus(24, 80), g0=10 * GB) == ({0: 10 * GB, 1: 80 * GB}, [])
    assert planned(gpus(24, 80), g0=30 * GB, cpu=GB, disk=2 * GB) == (
        {0: 24 * GB, 1: 80 * GB, "cpu": GB, "disk": 2 * GB}, [],
    )  # fmt: skip
    assert planned(gpus(24, 80), g0=0) == ({1: 80 * GB}, [])


def test_training_takes_more_than_the_weights() -> None:
    assert planned(gpus(24), factor=4, cpu=8 * GB) == ({0: 6 * GB, "cpu": 2 * GB}, [])


def test_absent_devices_warn() -> None:
    room, notes = planned(gpus(24), g3=GB)
    assert room == {0: 24 * GB}
    assert notes == ["max_memory: GPU 3 is not on this machine (1 GPUs); its entry isn't used"]
    room, notes = planned([], g0=GB)
    assert list(room) == ["cpu"]
    assert len(notes) == 2 and notes[1] == "multi_gpu: there is no GPU on this machine; the student is on the CPU"


def test_no_gpu_left_is_refused() -> None:
    with pytest.raises(InputError, match="max_memory: it leaves no GPU to the student"):
        planned(gpus(24), g0=0)


@pytest.mark.parametrize("strategy", ["auto", "balanced", "balanced_low_0", "sequential", "custom"])
def test_without_gpus_all_is_on_the_cpu(strategy: SpreadStrategy) -> None:
    plan, _ = plan_spread([], strategy=strategy, max_memory={}, first_layers=3, bytes_per_weight_byte=1.0)
    assert device_map(skeleton(tied=True), plan) == {"": "cpu"}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("strategy", ["auto", "balanced", "balanced_low_0", "sequential", "custom"])
def test_every_weight_has_one_device_and_layers_keep_their_order(strategy: SpreadStrategy, tied: bool) -> None:
    model = skeleton(tied=tied)
    devices = device_map(model, Spread(strategy, ((0, 10**7), (1, 10**7), (2, 10**7))))
    for name, _ in model.named_parameters():
        assert len([module for module in devices if holds(module, name)]) == 1, name
    places = layers_of(devices)
    assert places == sorted(places)
    if tied and "" not in devices:
        assert devices["lm_head"] == devices["model.embed_tokens"]
    used = set(devices.values())
    if strategy == "balanced_low_0":
        assert used == {1, 2}
    elif strategy == "sequential":
        assert used == {0}, "the first ones are filled"
    else:
        assert used == {0, 1, 2}


@pytest.mark.parametrize(
    ("gpu_count", "first", "expected"),
    [
        (3, None, [0, 0, 1, 1, 2, 2]),
        (3, 0, [1, 1, 1, 2, 2, 2]),
        (3, 1, [0, 1, 1, 1, 2, 2]),
        (3, 5, [0, 0, 0, 0, 0, 1]),
        (2, 6, [0, 0, 0, 0, 0, 0]),
        (1, None, [0, 0, 0, 0, 0, 0]),
        (1, 6, [0, 0, 0, 0, 0, 0]),
    ],
)
def test_custom_puts_so_many_layers_on_the_first_gpu(gpu_count: int, first: int | None, expected: list[int]) -> None:
    plan = Spread("custom", tuple((index, GB) for index in range(gpu_count)), first)
    devices = device_map(skeleton(tied=False), plan)
    assert layers_of(devices) == expected
    assert devices["model.embed_tokens"] == devices["model.rotary_emb"] == 0
    assert devices["model.norm"] == devices["lm_head"] == gpu_count - 1
    tied = device_map(skeleton(tied=True), plan)
    assert tied["model.embed_tokens"] == tied["lm_head"] == 0 and tied["model.norm"] == gpu_count - 1


@pytest.mark.parametrize(
    ("gpu_count", "first", "allowed"), [(2, 7, "7, but the student has 6 layers and 2 GPUs; 0 to 6"), (1, 3, "GPUs; 6")]
)
def test_layers_that_are_not_there_are_refused(gpu_count: int, first: int, allowed: str) -> None:
    plan = Spread("custom", tuple((index, GB) for index in range(gpu_count)), first)
    with pytest.raises(InputError, match=f"num_gpu0_layers: .*{allowed}"):
        device_map(skeleton(tied=True), plan)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_custom_covers_every_architecture(name: str) -> None:
    model = make(name)
    devices = device_map(model, Spread("custom", ((0, GB), (1, GB))))
    for parameter, _ in model.named_parameters():
        assert len([module for module in devices if holds(module, parameter)]) == 1, parameter


@given(gpu_count=st.integers(1, 8), first=st.integers(0, LAYERS))
def test_custom_is_even_on_the_others(gpu_count: int, first: int) -> None:
    plan = Spread("custom", tuple((index, GB) for index in range(gpu_count)), first if gpu_count > 1 else LAYERS)
    places = layers_of(device_map(skeleton(tied=True), plan))
    others = [places.count(index) for index in range(1, gpu_count)]
    assert places == sorted(places) and (gpu_count == 1 or places.count(0) == first)
    assert not others or max(others) - min(others) <= 1


def test_what_fits_on_no_gpu_goes_to_main_memory_and_nowhere_else() -> None:
    model = skeleton(tied=True)
    devices = device_map(model, Spread("sequential", ((0, 700_000), ("cpu", 10**9))))
    assert set(devices.values()) == {0, "cpu"} and layers_of(devices)[-1] == "cpu"
    for host in ((), (("disk", 10**9),)):
        with pytest.raises(InputError, match=r"max_memory: .* fit nowhere \(on disk nothing can be trained\)"):
            device_map(model, Spread("sequential", ((0, 700_000), *host)))


def test_packed_weights_take_less_room() -> None:
    model = skeleton(tied=False)
    plan = Spread("sequential", ((0, 900_000), (1, 10**9)))
    first = [layers_of(device_map(model, plan, quantise)).count(0) for quantise in (None, "8bit", "4bit")]
    assert first[0] < first[1] <= first[2]


@pytest.mark.parametrize("name", ["llama-tied", "qwen3", "gpt2", "gemma2"])
def test_a_spread_student_learns_and_is_saved_like_a_whole_one(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU, but through all that moves tensors between devices."""
    make(name).save_pretrained(tmp_path)
    samples = make_samples(3, length=20)
    tokens = collate(samples)
    targets = pad(make_records(samples), tokens.labels)

    def connected(spec: StudentSpec) -> PreTrainedModel:
        model = load_causal_lm(spec.folder, dtype="fp32", device="cpu", trust_remote_code=False)
        return connect(model, dict.fromkeys(device_map(model, PLAN), "cpu"))

    spec = StudentSpec(tmp_path, "fp32", "cpu", VOCAB, False, trust_remote_code=False)
    whole = Student(spec)
    monkeypatch.setattr("distill.student._load", connected)
    parted = Student(replace(spec, spread=PLAN))
    hooked = [name for name, module in parted.model.named_modules() if hasattr(module, "_hf_hook")]
    assert len(hooked) > 6 and parted.spec.device == "cpu"
    losses = [student.loss(tokens, targets, build_loss("kl"), scale=0.1) for student in (whole, parted)]
    for loss in losses:
        loss.backward()
    assert losses[0].item() == losses[1].item()
    for (parameter, a), b in zip(whole.model.named_parameters(), parted.model.parameters(), strict=True):
        assert (a.grad is None and b.grad is None) or torch.equal(a.grad, b.grad), parameter
    statistics = [student.statistics(tokens, targets) for student in (whole, parted)]
    assert torch.equal(statistics[0].top_logprobs, statistics[1].top_logprobs)
    make_tokenizer().save_pretrained(tmp_path)
    for student, folder in ((whole, "whole"), (parted, "parted")):
        student.export(tmp_path / folder)
    a, b = (load_file(tmp_path / folder / "model.safetensors") for folder in ("whole", "parted"))
    assert a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


@pytest.mark.parametrize(("places", "main"), [((0, 1), None), ((0, "cpu"), "cpu")])
def test_layers_in_main_memory_are_computed_there(
    places: tuple[int | str, int | str], main: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """accelerate would bring their weights to a GPU for a moment each time, where nothing can be trained."""
    asked: list[Any] = []

    def dispatch_model(model: PreTrainedModel, devices: dict[str, int | str], **how: Any) -> None:
        model.hf_device_map = devices
        asked.append((devices, how["main_device"]))

    monkeypatch.setattr("accelerate.dispatch_model", dispatch_model)
    devices = {"model": places[0], "lm_head": places[1]}
    connect(make("llama-tied"), devices)
    assert asked == [(devices, main)]


def test_flash_attention_says_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match=r"use_flash_attn_2: needs a CUDA GPU, not cpu; .* sdpa"):
        require_flash_attention("cpu", "bf16", "training_precision")
    monkeypatch.setattr("distill.models.attention.find_spec", lambda name: None)
    with pytest.raises(InputError, match="use_flash_attn_2: needs: pip install flash-attn"):
        require_flash_attention("cuda:0", "bf16", "training_precision")
    monkeypatch.setattr("distill.models.attention.find_spec", lambda name: name)
    with pytest.raises(InputError, match="use_flash_attn_2: computes in bf16 or fp16 only, but teacher_dtype is fp32"):
        require_flash_attention("cuda:0", "fp32", "teacher_dtype")
    require_flash_attention("cuda:0", "fp16", "training_precision")
