"""Training states: bit for bit, whole or not there."""

from pathlib import Path

import pytest
import torch
from torch import nn

from distill.checkpoint import newest_state, restore, save_state
from distill.errors import InputError, MachineError


class Tied(nn.Module):
    """A tied head, a buffer and dropout: all that a state has to carry."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, width)
        self.norm = nn.BatchNorm1d(width)
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(width, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.drop(self.norm(self.embed(ids))))  # type: ignore[no-any-return]


def build(seed: int, width: int = 4) -> tuple[Tied, torch.optim.AdamW]:
    torch.manual_seed(seed)
    model = Tied(width)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def train(model: Tied, optimizer: torch.optim.AdamW, steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        loss = model(torch.arange(7)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_a_restored_training_goes_on_bit_for_bit(tmp_path: Path) -> None:
    model, optimizer = build(0)
    train(model, optimizer, 3)
    save_state(tmp_path, step=3, meta={"note": "x"}, model=model, optimizer=optimizer)
    expected = train(model, optimizer, 4)
    other, other_optimizer = build(9)
    state = newest_state(tmp_path)
    assert state is not None and (state.step, state.meta) == (3, {"note": "x"})
    restore(state, other, other_optimizer)
    assert train(other, other_optimizer, 4) == expected
    for a, b in zip(model.state_dict().values(), other.state_dict().values(), strict=True):
        assert torch.equal(a, b)
    assert other.head.weight is other.embed.weight


def test_only_the_newest_whole_state_stays(tmp_path: Path) -> None:
    model, optimizer = build(0)
    for step in (9, 10):
        save_state(tmp_path, step=step, meta={}, model=model, optimizer=optimizer)
    (tmp_path / "step_11.tmp").mkdir()
    (tmp_path / "step_11.tmp" / "model.safetensors").write_bytes(b"half")
    state = newest_state(tmp_path)
    assert state is not None and state.step == 10
    assert [path.name for path in tmp_path.iterdir()] == ["step_10"]
    assert not [path for path in (tmp_path / "step_10").iterdir() if path.suffix not in {".safetensors", ".json"}]


def test_no_state_is_none(tmp_path: Path) -> None:
    assert newest_state(tmp_path) is None
    assert newest_state(tmp_path / "absent") is None


def test_a_failing_save_keeps_the_old_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = build(0)
    save_state(tmp_path, step=1, meta={}, model=model, optimizer=optimizer)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("distill.checkpoint.save_file", full)
    with pytest.raises(MachineError, match="No space left"):
        save_state(tmp_path, step=2, meta={}, model=model, optimizer=optimizer)
    state = newest_state(tmp_path)
    assert state is not None and state.step == 1


def test_damage_and_strangers_are_refused(tmp_path: Path) -> None:
    model, optimizer = build(0)
    save_state(tmp_path, step=1, meta={}, model=model, optimizer=optimizer)
    state = newest_state(tmp_path)
    assert state is not None
    with pytest.raises(InputError, match="belongs to another student"):
        restore(state, *build(0, width=5))
    for path in (tmp_path / "step_1").iterdir():
        whole = path.read_bytes()
        flipped = bytearray(whole)
        flipped[-3] ^= 1
        for damage in (whole[:50], bytes(flipped), b"[]"):
            path.write_bytes(damage)
            with pytest.raises(InputError, match="step_1: damaged training state"):
                newest_state(tmp_path)
        path.write_bytes(whole)
    assert newest_state(tmp_path) is not None
