"""Every optimizer: what it builds, decays and keeps, and that its state is restored bit for bit."""

import math
from pathlib import Path
from typing import get_args

import pytest
import torch
from torch import Tensor, nn

from distill.checkpoint import newest_state, restore, save_state
from distill.config.sections import Optimizer as OptimizerName
from distill.errors import InputError
from distill.optim import OPTIMIZERS, build_optimizer, check_optimizer, paging_note

# Bytes of state for each parameter of a large matrix, as docs/training.md lists them: in 8 bits, blocks of 256 share a
# 4-byte scale.
STATE_BYTES = {
    "adam": 8, "adamw": 8, "adamw8bit": 2 * (1 + 4 / 256), "adamw32bit": 8, "paged_adamw": 8,
    "paged_adamw8bit": 2 * (1 + 4 / 256), "paged_adamw32bit": 8, "sgd": 0, "rmsprop": 4, "rmsprop8bit": 1 + 4 / 256,
    "rmsprop32bit": 4, "adagrad": 4,
}  # fmt: skip


class Toy(nn.Module):
    """A tied head with a bias, and a norm."""

    def __init__(self, vocab: int = 5, width: int = 4) -> None:
        super().__init__()
        self.embed, self.norm, self.head = nn.Embedding(vocab, width), nn.LayerNorm(width), nn.Linear(width, vocab)
        self.head.weight = self.embed.weight


def test_weight_decay_is_for_matrices_and_every_parameter_is_there_once() -> None:
    model = Toy()
    optimizer = build_optimizer(model, lr=1e-3, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1)
    decayed, others = optimizer.param_groups
    assert [id(p) for p in decayed["params"]] == [id(model.embed.weight)]
    assert {id(p) for p in others["params"]} == {id(p) for p in (*model.norm.parameters(), model.head.bias)}
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.1, 0.0)
    for group in optimizer.param_groups:
        assert (group["lr"], group["betas"], group["eps"]) == (1e-3, (0.8, 0.95), 1e-6)


def test_optimizer_step_is_adamw() -> None:
    model, reference = Toy(), Toy()
    reference.load_state_dict(model.state_dict())
    ours = build_optimizer(model, lr=1e-2, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.0)
    theirs = torch.optim.AdamW(reference.parameters(), lr=1e-2, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.0)
    for net, optimizer in ((model, ours), (reference, theirs)):
        for seed in range(3):
            optimizer.zero_grad()
            ids = torch.randint(5, (6,), generator=torch.Generator().manual_seed(seed))
            net.head(net.norm(net.embed(ids))).logsumexp(1).sum().backward()
            optimizer.step()
    for a, b in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(a, b)


def test_frozen_parameters_are_left_out_and_all_frozen_is_refused() -> None:
    model = Toy()
    model.embed.requires_grad_(False)
    (group,) = build_optimizer(model, lr=1.0, betas=(0.9, 0.9), eps=1.0, weight_decay=0.1).param_groups
    assert len(group["params"]) == 3
    model.requires_grad_(False)
    with pytest.raises(InputError, match="freeze_layers"):
        build_optimizer(model, lr=1.0, betas=(0.9, 0.9), eps=1.0, weight_decay=0.1)


def build_toy(seed: int, name: str, **settings: float) -> tuple[Toy, torch.optim.Optimizer]:
    """A toy whose tied matrix has 8,192 elements."""
    torch.manual_seed(seed)
    model = Toy(vocab=256, width=32)
    return model, build_optimizer(model, name, lr=0.01, weight_decay=0.1, **settings)


def steps(model: Toy, optimizer: torch.optim.Optimizer, first: int, last: int) -> list[float]:
    losses = []
    for step in range(first, last + 1):
        ids = torch.randint(256, (64,), generator=torch.Generator().manual_seed(step))
        loss = nn.functional.cross_entropy(model.head(model.norm(model.embed(ids))), (ids * 7 + 1) % 256)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_every_name_of_the_configuration_is_built() -> None:
    assert list(OPTIMIZERS) == list(get_args(OptimizerName)) == list(STATE_BYTES)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_states_are_as_wide_as_said(name: str) -> None:
    model, optimizer = build_toy(0, name)
    steps(model, optimizer, 1, 1)
    large = {key: t for key, t in optimizer.state[model.embed.weight].items() if isinstance(t, Tensor) and t.ndim}
    large = {key: t for key, t in large.items() if not key.startswith("qmap")}
    size = sum(t.numel() * t.element_size() for t in large.values())
    assert size / model.embed.weight.numel() == STATE_BYTES[name]
    small = [t for t in optimizer.state[model.norm.weight].values() if isinstance(t, Tensor) and t.ndim]
    assert all(t.dtype == torch.float32 for t in small), "below 4,096 elements nothing is quantised"
    kinds = {t.dtype for t in large.values()}
    assert kinds == ({torch.uint8, torch.float32} if name.endswith("8bit") else {torch.float32} if large else set())


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_restored_optimizer_goes_on_bit_for_bit(name: str, tmp_path: Path) -> None:
    settings = {"momentum": 0.9} if "momentum" in OPTIMIZERS[name].settings else {}
    model, optimizer = build_toy(0, name, **settings)
    steps(model, optimizer, 1, 3)
    save_state(tmp_path, step=3, meta={}, model=model, optimizer=optimizer)
    expected = steps(model, optimizer, 4, 8)
    other, other_optimizer = build_toy(9, name, **settings)
    steps(other, other_optimizer, 20, 21)  # a state of its own, to be replaced
    state = newest_state(tmp_path)
    assert state is not None
    restore(state, other, other_optimizer)
    assert steps(other, other_optimizer, 4, 8) == expected
    for a, b in zip(model.state_dict().values(), other.state_dict().values(), strict=True):
        assert torch.equal(a, b)


def test_the_state_of_another_optimizer_is_refused(tmp_path: Path) -> None:
    model, optimizer = build_toy(0, "adamw8bit")
    steps(model, optimizer, 1, 1)
    save_state(tmp_path, step=1, meta={}, model=model, optimizer=optimizer)
    state = newest_state(tmp_path)
    assert state is not None
    for name in ("adamw32bit", "rmsprop8bit"):
        with pytest.raises(InputError, match="another student or optimizer; start again with --fresh"):
            restore(state, *build_toy(0, name))


@pytest.mark.parametrize("name", [name for name, kind in OPTIMIZERS.items() if kind.decoupled])
def test_adamw_in_every_form_is_adamw(name: str) -> None:
    """The first step of AdamW: the weight shrinks by lr x decay, then moves by lr against the gradient's sign."""
    model, optimizer = build_toy(0, name)
    before = model.embed.weight.detach().clone()
    (model.embed.weight * torch.linspace(1, 2, 32)).sum().backward()
    optimizer.step()
    torch.testing.assert_close(model.embed.weight.detach(), before * (1 - 0.01 * 0.1) - 0.01, atol=1e-6, rtol=1e-5)
    if not name.endswith("8bit"):
        twin, reference = build_toy(0, "adamw")
        (twin.embed.weight * torch.linspace(1, 2, 32)).sum().backward()
        reference.step()
        assert steps(model, optimizer, 1, 10) == pytest.approx(steps(twin, reference, 1, 10), rel=1e-5)


def test_the_first_steps_of_the_others() -> None:
    """Gradient 2 on a vector of ones, twice; eps is negligible."""
    moved = {
        "adam": 2.0,
        "sgd": 2.0 + (0.5 * 2.0 + 2.0),
        "adagrad": 1.0 + 2.0 / math.sqrt(8.0),
        "rmsprop32bit": 2.0 / math.sqrt(0.4) + 2.0 / math.sqrt(0.76),
        "rmsprop8bit": 2.0 / math.sqrt(0.4) + 2.0 / math.sqrt(0.76),
        "rmsprop": 2.0 / math.sqrt(0.4) + (0.5 * 2.0 / math.sqrt(0.4) + 2.0 / math.sqrt(0.76)),
    }
    for name, distance in moved.items():
        line = nn.Linear(4096, 1, bias=False)
        nn.init.ones_(line.weight)
        momentum = 0.5 if "momentum" in OPTIMIZERS[name].settings else 0.0
        alpha = 0.9 if "rmsprop_alpha" in OPTIMIZERS[name].settings else 0.99
        optimizer = build_optimizer(line, name, lr=0.01, weight_decay=0.0, momentum=momentum, alpha=alpha)
        for _ in range(2):
            line.weight.grad = torch.full_like(line.weight, 2.0)
            optimizer.step()
        assert 1 - line.weight.mean().item() == pytest.approx(0.01 * distance, rel=1e-3), name


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("adamw8bits", {}, "optimizer: 'adamw8bits' is unknown; did you mean adamw8bit or"),
        ("???", {}, "optimizer: .* adagrad or adam"),
        ("sgd", {"betas": (0.8, 0.9)}, "betas: optimizer sgd has none; .* one of adam, adamw, adamw8bit"),
        ("sgd", {"eps": 1e-6}, "eps: optimizer sgd has none"),
        ("adamw", {"momentum": 0.9}, "momentum: optimizer adamw has none; .* one of sgd, rmsprop$"),
        ("rmsprop8bit", {"momentum": 0.9}, "momentum: optimizer rmsprop8bit has none"),
        (
            "adagrad",
            {"alpha": 0.9},
            "rmsprop_alpha: optimizer adagrad has none; .* rmsprop, rmsprop8bit, rmsprop32bit$",
        ),
    ],
)
def test_settings_that_an_optimizer_lacks_are_refused(name: str, settings: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        check_optimizer(name, **({"betas": (0.9, 0.999), "eps": 1e-8} | settings))  # type: ignore[arg-type]


def test_bitsandbytes_is_asked_only_where_it_runs() -> None:
    model = Toy().to("meta")
    with pytest.raises(InputError, match="optimizer: adamw8bit runs on cpu and cuda, not on meta"):
        build_optimizer(model, "adamw8bit", lr=1.0, weight_decay=0.0)


def test_paging_is_said_to_be_off_on_a_cpu() -> None:
    assert "ordinary memory" in str(paging_note("paged_adamw", "cpu"))
    assert paging_note("paged_adamw", "cuda:0") is None and paging_note("adamw8bit", "cpu") is None
