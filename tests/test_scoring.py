"""A collecting worker without its process: batches, memory that runs out, and what it seals."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from distill.cache import ShardInfo
from distill.cache.shard import ShardReader, shard_path
from distill.errors import MachineError
from distill.models import out_of_memory
from distill.placement import Placement
from distill.records import concat
from distill.scoring import CollectSpec, CollectWorker, ShardTask
from distill.teacher import Scored, Teacher, TeacherSpec
from distill.types import TokenizedSample
from tests.architectures import VOCAB
from tests.helpers import make_samples, make_spec


class Line:
    """Stands for the channel: says yes or no to requests and keeps what was told."""

    def __init__(self, room: bool = True) -> None:
        self.room = room
        self.told: list[Any] = []
        self.asked: list[Any] = []

    def progress(self, payload: Any) -> None:
        self.told.append(payload)

    def request(self, payload: Any) -> bool:
        self.asked.append(payload)
        return self.room

    @property
    def lines(self) -> list[str]:
        return [payload for payload in self.told if isinstance(payload, str)]


def spec_of(folder: Path, **changes: Any) -> CollectSpec:
    teacher = TeacherSpec(folder, "fp32", "cpu", vocab_size=VOCAB, top_k=5, trust_remote_code=False)
    layer = make_spec(vocab_size=VOCAB).describe()
    return replace(CollectSpec(teacher, layer, threads=1, tokens_per_batch=256), **changes)


def collected(spec: CollectSpec, samples: list[TokenizedSample], folder: Path, line: Line) -> ShardInfo:
    folder.mkdir()
    info = CollectWorker(spec)(ShardTask(folder, tuple(samples)), line).finish()  # type: ignore[arg-type]
    assert isinstance(info, ShardInfo)
    return info


@pytest.fixture
def samples() -> list[TokenizedSample]:
    return make_samples(24, length=64)


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, int | None]]:
    """(samples, longest, chunk length) of every batch that a teacher scores."""
    seen: list[tuple[int, int, int | None]] = []
    score = Teacher.score

    def watched(self: Teacher, part: Any, chunk_len: int | None = None) -> Scored:
        seen.append((len(part), max(len(sample.token_ids) for sample in part), chunk_len))
        return score(self, part, chunk_len)

    monkeypatch.setattr(Teacher, "score", watched)
    return seen


def test_a_shard_holds_the_teachers_records_in_the_samples_order(
    teacher_folder: Path, samples: list[TokenizedSample], tmp_path: Path
) -> None:
    line = Line()
    info = collected(spec_of(teacher_folder), samples, tmp_path / "layer", line)
    assert line.asked[0][:2] == (tmp_path / "layer", info.name) and not line.lines
    assert sum(line.told) == sum(len(sample.token_ids) for sample in samples) == info.tokens
    expected = concat(Teacher(spec_of(teacher_folder).teacher).records(samples))
    with ShardReader(shard_path(tmp_path / "layer", info.name)) as shard:
        got = shard.all_records()
        assert [shard.token_ids(row).tolist() for row in range(len(shard))] == [s.token_ids.tolist() for s in samples]
    assert np.allclose(got.label_logprobs, expected.label_logprobs, atol=1e-4)
    assert np.allclose(got.tail_logprobs, expected.tail_logprobs, atol=1e-2)


def test_without_room_nothing_is_written(teacher_folder: Path, samples: list[TokenizedSample], tmp_path: Path) -> None:
    worker = CollectWorker(spec_of(teacher_folder))
    assert worker(ShardTask(tmp_path, tuple(samples)), Line(room=False)).finish() is None  # type: ignore[arg-type]
    assert not any(tmp_path.iterdir())


def test_batches_keep_to_both_limits(
    teacher_folder: Path, samples: list[TokenizedSample], tmp_path: Path, batches: list[tuple[int, int, int | None]]
) -> None:
    collected(spec_of(teacher_folder, batch_size=3), samples, tmp_path / "layer", Line())
    assert max(size for size, _, _ in batches) == 3
    assert all(size * longest <= 256 or size == 1 for size, longest, _ in batches)
    assert sum(size for size, _, _ in batches) == len(samples)


FAILURES = (
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory"),
    MemoryError(),
)


def fail_above(tokens: int, error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine whose memory holds activations of so many tokens."""
    score = Teacher.score

    def limited(self: Teacher, part: Any, chunk_len: int | None = None) -> Scored:
        longest = max(len(sample.token_ids) for sample in part)
        if len(part) * min(longest, chunk_len or longest) > tokens:
            raise error
        return score(self, part, chunk_len)

    monkeypatch.setattr(Teacher, "score", limited)


@pytest.mark.parametrize("error", FAILURES, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("tokens", [130, 64, 40, 20])
def test_out_of_memory_halves_the_batch_and_goes_on(
    teacher_folder: Path,
    samples: list[TokenizedSample],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    tokens: int,
    error: Exception,
) -> None:
    whole = collected(spec_of(teacher_folder), samples, tmp_path / "whole", Line())
    line = Line()
    fail_above(tokens, error, monkeypatch)
    info = collected(spec_of(teacher_folder), samples, tmp_path / "halved", line)
    assert info.name == whole.name and info.targets == whole.targets
    assert 1 <= len(line.lines) <= 5
    assert all("out of memory" in text and "last bits" in text and "\n" not in text for text in line.lines)
    assert any("in chunks of" in text for text in line.lines) == (tokens < max(len(s.token_ids) for s in samples))
    assert sum(payload for payload in line.told if isinstance(payload, int)) == info.tokens
    got, expected = (ShardReader(shard_path(tmp_path / name, info.name)).all_records() for name in ("halved", "whole"))
    assert np.allclose(got.label_logprobs, expected.label_logprobs, atol=1e-4)


def test_a_worker_remembers_what_fits(
    teacher_folder: Path, samples: list[TokenizedSample], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_above(130, FAILURES[0], monkeypatch)
    worker, line = CollectWorker(spec_of(teacher_folder)), Line()
    for _ in range(3):
        worker(ShardTask(tmp_path, tuple(samples)), line)  # type: ignore[arg-type]
    assert len(line.lines) == 1


def test_nothing_left_to_halve_is_the_machines_fault(
    teacher_folder: Path, samples: list[TokenizedSample], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_above(3, FAILURES[1], monkeypatch)
    with pytest.raises(MachineError, match=r"toy-teacher: out of memory with one sample of \d+ tokens; free some"):
        collected(spec_of(teacher_folder), samples, tmp_path / "layer", Line())


def test_other_errors_are_not_taken_for_it(
    teacher_folder: Path, samples: list[TokenizedSample], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_above(0, RuntimeError("CUDA error: an illegal memory access was encountered"), monkeypatch)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        collected(spec_of(teacher_folder), samples, tmp_path / "layer", Line())


def test_what_torch_says_when_the_cpu_has_no_memory() -> None:
    with pytest.raises(RuntimeError) as error:
        torch.empty(1 << 55)
    assert out_of_memory(error.value)
    assert not out_of_memory(ValueError("DefaultCPUAllocator"))


def test_notes_of_the_teacher_are_told_once(
    teacher_folder: Path, samples: list[TokenizedSample], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("distill.teacher.runs_in_chunks", lambda *_: False)
    spec = spec_of(teacher_folder)
    worker, line = CollectWorker(replace(spec, teacher=replace(spec.teacher, seq_chunk_len=8))), Line()
    for _ in range(2):
        worker(ShardTask(tmp_path, tuple(samples)), line)  # type: ignore[arg-type]
    assert line.lines == ["toy-teacher: seq_chunk_len has no effect: this architecture can't be run in chunks"]


def test_a_worker_goes_where_it_is_placed(teacher_folder: Path) -> None:
    spec = spec_of(teacher_folder).on(Placement("cuda:1", ((1, 10), (2, 20))))
    assert (spec.teacher.device, spec.teacher.max_memory) == ("cuda:1", ((1, 10), (2, 20)))
