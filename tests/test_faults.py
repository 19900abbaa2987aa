"""Disks that fail, fill up or can't be written: one line, exit 3 or 2, nothing corrupt, and the next run completes."""

import errno
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch import Tensor

from distill.cache import Admissions
from distill.files import BLOCK, disk_bytes
from distill.tokenizer import load_tokenizer, save_tokenizer
from distill.workers import WorkerPool
from tests.conftest import WORDS
from tests.faults import (
    FaultyDisk,
    InlinePool,
    attempt,
    check_nothing_corrupt,
    check_sealed,
    records_of,
    sealed_shards,
    small_disk,
)
from tests.jobs import distill, same_weights, shards_of, summary_of, weights_of, write_config

FULL, BROKEN = errno.ENOSPC, errno.EIO
# An epoch of two steps, a state after each, a student on the way: every kind of writing, in half a second.
TINY = {
    "num_epochs": 1,
    "shard_targets": 50,
    "save_state_every_minutes": 0,
    "save_student_every_n_epochs": 0.5,
    "validation_fraction": 0.2,
    "batch_size": 2,
}


@pytest.fixture(autouse=True)
def workers_in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distill.collect.WorkerPool", InlinePool)


@pytest.fixture(scope="module")
def admissions() -> Iterator[Admissions]:
    """One gate for all that is looked at."""
    with Admissions() as admissions:
        yield admissions


@pytest.fixture(scope="module")
def small_text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "small.jsonl"
    rows = [{"text": " ".join(WORDS[i % 7 : i % 7 + 5]) + f" {i}."} for i in range(8)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


class Jobs:
    """The same job again and again, each in a folder of its own, and what it leaves when nothing goes wrong."""

    def __init__(self, parent: Path, *folders: Path) -> None:
        self._parent, self._folders = parent, folders
        self._number = 0
        config = self.new()
        self.run(config)
        self.shards: dict[str, str] = records_of(config.parent / "cache")
        self.weights: dict[str, Tensor] = weights_of(config.parent / "cache")
        self.exports = self.exported(config)

    def new(self, **changes: object) -> Path:
        """The configuration in a new folder; that of the job before goes."""
        shutil.rmtree(self._parent / str(self._number), ignore_errors=True)
        self._number += 1
        return write_config(self._parent / str(self._number), *self._folders, **TINY, **changes)

    @staticmethod
    def run(config: Path) -> None:
        distill(config, "collect")
        distill(config, "train")

    @staticmethod
    def exported(config: Path) -> list[str]:
        return sorted(path.name for path in (config.parent / "cache/student/trained").iterdir())

    def finish(self, config: Path) -> None:
        """The next run completes with the same."""
        cache = config.parent / "cache"
        sealed = sealed_shards(cache)
        distill(config, "collect")
        if not self.is_complete(cache):  # else only its last words weren't heard, and a new run makes a second student
            distill(config, "train")
        self.check(config)
        check_sealed(cache, sealed)

    @staticmethod
    def is_complete(cache: Path) -> bool:
        return any(cache.glob("student/trained/*_final")) and not (cache / "student/states/toy-student").exists()

    def check(self, config: Path) -> None:
        assert records_of(config.parent / "cache") == self.shards
        assert same_weights(weights_of(config.parent / "cache"), self.weights)
        assert self.exported(config) == self.exports


@pytest.fixture(scope="module")
def jobs(
    tmp_path_factory: pytest.TempPathFactory, teacher_folder: Path, student_folder: Path, small_text: Path
) -> Iterator[Jobs]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("distill.collect.WorkerPool", InlinePool)
        yield Jobs(tmp_path_factory.mktemp("jobs"), teacher_folder, student_folder, small_text)


def fail_at(jobs: Jobs, admissions: Admissions, at: int, error: int, *, for_ever: bool) -> bool:
    """A run on a disk that fails from its ``at``-th operation on, and the next one. False if it wasn't reached."""
    config = jobs.new()
    disk = FaultyDisk(config.parent, at=at, error=error, for_ever=for_ever)
    with disk.mounted():
        code, stderr = attempt(config, "collect", "train")
    where = f"n={at}, {errno.errorcode[error]}, for ever: {for_ever}, {disk.operations[at - 1 : at]}: {code} {stderr}"
    if code == 0:  # not reached, or something that may fail, such as deleting what is of no use any more
        jobs.check(config)
    else:
        assert code == 3, where
        errors = [line for line in stderr.splitlines() if "error" in line.lower()]
        assert len(errors) == 1 and errors[0].startswith("error: ") and "Traceback" not in stderr, where
        assert str(config.parent) in errors[0], where
    check_nothing_corrupt(config.parent / "cache", admissions)
    if code:
        try:
            jobs.finish(config)
        except AssertionError as failure:
            raise AssertionError(f"{failure}\nafter {where}") from failure
    return disk.failed


@pytest.mark.parametrize(("error", "for_ever"), [(FULL, True), (BROKEN, False)])
def test_a_sample_of_failing_operations(jobs: Jobs, admissions: Admissions, error: int, for_ever: bool) -> None:
    config = jobs.new()
    disk = FaultyDisk(config.parent)
    with disk.mounted():
        jobs.run(config)
    total = len(disk.operations)
    for at in range(3 if for_ever else 9, total, total // 8):
        assert fail_at(jobs, admissions, at, error, for_ever=for_ever)


@pytest.mark.slow
@pytest.mark.parametrize("for_ever", [False, True])
@pytest.mark.parametrize("error", [FULL, BROKEN])
def test_every_failing_operation(jobs: Jobs, admissions: Admissions, error: int, for_ever: bool) -> None:
    """n = 1, 2, … until a run passes without reaching the n-th."""
    at = 1
    while fail_at(jobs, admissions, at, error, for_ever=for_ever):
        at += 1
    assert at > 200


def test_the_next_run_tidies_the_index(jobs: Jobs) -> None:
    """Also where all shards were sealed and only their index is torn: else every later run checks them anew."""
    config = jobs.new()
    distill(config, "collect")
    whole = shards_of(config.parent / "cache")
    (index,) = (config.parent / "cache/dataset/train").glob("*/index.jsonl")
    index.write_bytes(index.read_bytes()[:-20])
    distill(config, "collect")
    assert shards_of(config.parent / "cache") == whole


# -- rounds ----------------------------------------------------------------------------------------------------------


class Rounds:
    """A training in rounds, whole, and again with a disk that breaks at a chosen operation."""

    def __init__(self, folder: Path, *folders: Path) -> None:
        self._folder, self._folders = folder, folders
        self.cap = 250_000
        config = self.new("whole")
        with FaultyDisk(config.parent).mounted() as disk:
            distill(config)
        self.operations = disk.operations
        self.weights = weights_of(config.parent / "cache")
        self.steps = summary_of(config.parent / "cache")["train"]["steps"]

    def new(self, name: str) -> Path:
        changes = {"max_cache_size_gb": self.cap / 1e9, "shard_targets": 250, "save_state_every_minutes": 0}
        return write_config(self._folder / name, *self._folders, **changes)

    def broken_at(self, at: int) -> dict[str, Tensor]:
        """The student of a run whose disk broke for ever, as good as killed, and of the next one."""
        config = self.new(str(at))
        with FaultyDisk(config.parent, at=at, error=BROKEN, for_ever=True).mounted():
            code, stderr = attempt(config, "run")
        assert code == 3 and stderr.count("error: ") == 1, stderr
        assert disk_bytes(config.parent / "cache" / "dataset") <= self.cap
        distill(config)
        assert disk_bytes(config.parent / "cache" / "dataset") <= self.cap
        assert summary_of(config.parent / "cache")["train"]["steps"] == self.steps
        return weights_of(config.parent / "cache")


@pytest.fixture(scope="module")
def rounds(
    tmp_path_factory: pytest.TempPathFactory, teacher_folder: Path, student_folder: Path, text_file: Path
) -> Rounds:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("distill.collect.WorkerPool", InlinePool)
        return Rounds(tmp_path_factory.mktemp("rounds"), teacher_folder, student_folder, text_file)


def test_rounds_go_on_where_they_broke(rounds: Rounds) -> None:
    """While training on the first part, while collecting one again, at the end."""
    saved = [number for number, text in enumerate(rounds.operations, 1) if text.startswith("safetensors cache/student")]
    for at in (saved[0], len(rounds.operations) * 3 // 4, saved[-1]):
        assert same_weights(rounds.broken_at(at), rounds.weights)


def test_a_part_ends_where_it_would_have_if_its_collection_breaks(rounds: Rounds) -> None:
    sealed = [
        number for number, text in enumerate(rounds.operations, 1) if text.startswith("replace") and ".h5" in text
    ]
    assert same_weights(rounds.broken_at(sealed[4]), rounds.weights)


# -- real file systems -----------------------------------------------------------------------------------------------


def check_full_at(jobs: Jobs, admissions: Admissions, size: int) -> bool:
    """The whole cache on a disk of ``size`` bytes, then on a larger one. False if ``size`` was enough."""
    config = jobs.new()
    with small_disk(config.parent / "cache", size) as remount:
        code, stderr = attempt(config, "collect", "train")
        where = f"{size} bytes: {code} {stderr}"
        if code:
            errors = [line for line in stderr.splitlines() if "error" in line.lower()]
            assert code == 3 and len(errors) == 1 and errors[0].startswith("error: "), where
            check_nothing_corrupt(config.parent / "cache", admissions)
            remount("size=64m")
            jobs.finish(config)
    return bool(code)


def test_a_disk_that_fills_up(jobs: Jobs, admissions: Admissions) -> None:
    assert all(check_full_at(jobs, admissions, size) for size in range(BLOCK, 40 * BLOCK, 9 * BLOCK))


@pytest.mark.slow
def test_a_disk_that_fills_up_at_every_block(jobs: Jobs, admissions: Admissions) -> None:
    blocks = 1
    while check_full_at(jobs, admissions, blocks * BLOCK):
        blocks += 1
    assert blocks > 50


def smallest_cap(jobs: Jobs) -> int:
    """The least bytes with which ``collect`` says that they are enough, and makes do with them."""
    low, high = 0, 1 << 20
    while high - low > BLOCK:
        middle = (low + high) // 2 // BLOCK * BLOCK
        code, stderr = attempt(jobs.new(max_cache_size_gb=middle / 1e9), "collect")
        assert code in (0, 2), stderr
        low, high = (low, middle) if code == 0 else (middle, high)
    return high + BLOCK  # a folder that something is mounted on is there, and counts, beforehand


def test_a_file_system_of_the_size_of_the_cap(jobs: Jobs) -> None:
    cap = smallest_cap(jobs)
    config = jobs.new(max_cache_size_gb=cap / 1e9)
    with small_disk(config.parent / "cache" / "dataset", cap):
        assert attempt(config, "collect", "train")[0] == 0
        jobs.check(config)


def test_a_file_system_smaller_than_the_cap(jobs: Jobs) -> None:
    cap = smallest_cap(jobs)
    config = jobs.new(max_cache_size_gb=cap / 1e9)
    with small_disk(config.parent / "cache" / "dataset", cap // 2 // BLOCK * BLOCK) as remount:
        code, stderr = attempt(config, "collect")
        (line,) = [line for line in stderr.splitlines() if "error" in line]
        assert code == 3 and re.fullmatch(r"error: .*: disk full: [\d,]+ bytes needed, [\d,]+ free; free .*", line)
        assert sealed_shards(config.parent / "cache")
        remount(f"size={cap}")
        jobs.finish(config)


def test_a_read_only_cache_trains_and_does_not_collect(jobs: Jobs) -> None:
    config = jobs.new()
    with small_disk(config.parent / "cache" / "dataset", 1 << 20) as remount:
        distill(config, "collect")
        remount("ro")
        distill(config, "collect")
        distill(config, "train")
        jobs.check(config)
        done = distill(config, "collect", "-topk", "21", code=2)
        errors = [line for line in done.stderr.splitlines() if "error" in line]
        assert len(errors) == 1 and "Read-only file system" in errors[0] and "cache/dataset" in errors[0]


def test_a2_a_full_disk_is_one_line_and_the_rerun_goes_on(
    tmp_path: Path, teacher_folder: Path, student_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # PyTables/PyTables#695, h5py/h5py#914
    """Here with workers in processes of their own: it was these that died by a signal."""
    monkeypatch.setattr("distill.collect.WorkerPool", WorkerPool)
    text = tmp_path / "text.jsonl"
    rows = [{"text": " ".join(WORDS[i % 9 : i % 9 + 9]) * 2 + f" {i}."} for i in range(80)]
    text.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = write_config(tmp_path / "job", teacher_folder, student_folder, text, shard_targets=500, save_topK=200)
    with small_disk(config.parent / "cache", 1 << 20) as remount:
        done = distill(config, "collect", code=3)
        (line,) = [line for line in done.stderr.splitlines() if "error" in line]
        assert re.fullmatch(r"error: .*cache/dataset.*: disk full: [\d,]+ bytes needed, [\d,]+ free; free .*", line)
        before = {name: time_of(config, name) for name in sealed_shards(config.parent / "cache")}
        assert before
        remount("size=64m")
        distill(config, "collect")
        assert before == {name: time_of(config, name) for name in before}, "nothing is collected twice"


def time_of(config: Path, shard: str) -> int:
    return (config.parent / "cache" / "dataset" / f"{shard}.h5").stat().st_mtime_ns


def test_a19_a_cap_below_one_sample_names_one_that_works(
    tmp_path: Path, teacher_folder: Path, student_folder: Path
) -> None:  # mosaicml/streaming#417
    text = tmp_path / "text.jsonl"
    text.write_text("".join(json.dumps({"text": f"{i} " + "the cat sees a tree. " * 22}) + "\n" for i in range(16)))
    for verb in ("collect", "run"):
        config = write_config(
            tmp_path / verb, teacher_folder, student_folder, text,
            max_cache_size_gb=0.001, context_len=500, save_topK=200, cache_precision="exact",
            shard_targets=100_000, validation_fraction=0.1, num_epochs=1,
        )  # fmt: skip
        done = distill(config, verb, code=2)
        (line,) = [line for line in done.stderr.splitlines() if "error" in line]
        enough = re.search(r"error: max_cache_size_gb: .* set it to ([\d.]+)", line)
        assert enough, line
        distill(config, verb, "-maxgb", enough[1])


def test_a_disk_that_a_tokenizer_fills(tmp_path: Path, student_folder: Path) -> None:
    """The library that writes it has an error of its own for that."""
    tokenizer = load_tokenizer(student_folder, trust_remote_code=False)
    with small_disk(tmp_path / "small", 2 * BLOCK), pytest.raises(OSError, match="No space left") as raised:
        save_tokenizer(tokenizer, tmp_path / "small")
    assert raised.value.errno == FULL
