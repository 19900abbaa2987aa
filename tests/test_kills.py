"""SIGKILL at random instants, of a worker, the parent or all: nothing sealed is lost, and nothing is left behind."""

import contextlib
import io
import os
import random
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import fields
from itertools import count, permutations
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from transformers import AutoModelForCausalLM

from distill.config import load_config
from distill.filling import cached_samples
from distill.prepare import prepare
from distill.report import Console
from distill.types import Records, TokenizedSample
from tests.faults import InlinePool, check_sealed, records_of, sealed_shards
from tests.jobs import ROOT, command, distill, same_weights, summary_of, weights_of, write_config
from tests.test_rounds import watched
from tests.toys import make_model_folder

VOCAB_SIZE = 261

SHM = Path("/dev/shm")
VICTIMS = ("worker", "parent", "group")
SMALL_SHARDS = {"shard_targets": 150}


class Command:
    """A command in a process group of its own; all its processes, the cache's gate too, are known by their TMPDIR."""

    def __init__(self, config: Path, *words: str) -> None:
        self._mark = tempfile.mkdtemp(dir=config.parent)
        self._errors = Path(self._mark, "stderr.txt")
        with self._errors.open("wb") as errors:
            self._process = subprocess.Popen(
                command(config, *words),
                stdout=subprocess.DEVNULL,
                stderr=errors,
                env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "TMPDIR": self._mark},
                start_new_session=True,
            )

    @property
    def code(self) -> int | None:
        """The exit code; None while it runs."""
        return self._process.poll()

    @property
    def stderr(self) -> str:
        return self._errors.read_text()

    def workers(self) -> list[int]:
        """The processes that ``multiprocessing`` spawned to work."""
        return [pid for pid in self._members() if b"spawn_main" in cmdline(pid)]

    def wait(self, until: Callable[[], bool], seconds: float = 240.0) -> bool:
        """Wait for something, or for the end; whether it still runs."""
        deadline = time.monotonic() + seconds
        while self.code is None and not until():
            assert time.monotonic() < deadline, self.stderr
            time.sleep(0.01)
        return self.code is None

    def kill(self, victim: str, chooser: random.Random) -> bool:
        """SIGKILL; False if there is no such victim any more."""
        workers = self.workers()
        if self.code is not None or (victim == "worker" and not workers):
            return False
        if victim == "group":
            os.killpg(self._process.pid, signal.SIGKILL)
        else:
            with contextlib.suppress(ProcessLookupError):  # it was just replaced by another one
                os.kill(chooser.choice(workers) if victim == "worker" else self._process.pid, signal.SIGKILL)
        return True

    def end(self, seconds: float = 30.0) -> None:
        """Wait for the end of the parent, and for that of every process of its; there must be no orphan."""
        self._process.wait(timeout=240)
        deadline = time.monotonic() + seconds
        while orphans := self._members():
            assert time.monotonic() < deadline, [cmdline(pid) for pid in orphans]
            time.sleep(0.01)

    def _members(self) -> list[int]:
        """Its living processes: a zombie has no environment."""
        mark = f"TMPDIR={self._mark}".encode()
        found = [
            int(path.parent.name) for path in Path("/proc").glob("[0-9]*/environ") if mark in read(path).split(b"\0")
        ]
        return [pid for pid in found if pid != self._process.pid or self.code is None]


def read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except (FileNotFoundError, ProcessLookupError, PermissionError):  # gone, or somebody else's
        return b""


def cmdline(pid: int) -> bytes:
    return read(Path(f"/proc/{pid}/cmdline"))


@contextlib.contextmanager
def no_shared_memory_left() -> Iterator[None]:
    """Nothing new stays in /dev/shm; others may have theirs there for a while."""
    before = set(SHM.iterdir())
    yield
    deadline = time.monotonic() + 30
    while left := set(SHM.iterdir()) - before:
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


def files_in_work(cache: Path) -> set[Path]:
    """Shards, sealed or just being written."""
    return {path for path in cache.glob("dataset/*/*/*") if ".h5" in path.suffixes or ".keys" in path.suffixes}


class Killer:
    """Kills a collection at random instants, again and again, and checks after each kill what was sealed before it."""

    def __init__(self, config: Path, *words: str, work_seconds: float, chooser: random.Random) -> None:
        self._config, self._words = config, words
        self._cache = config.parent / "cache"
        self._work_seconds, self._chooser = work_seconds, chooser
        self._running: Command | None = None
        self._complete = False
        self.kills: Counter[str] = Counter()

    def finish(self) -> None:
        """Let it run to the end."""
        while not self._complete:
            running = self._running = self._running or Command(self._config, *self._words)
            running.wait(lambda: False)
            self._bury(running)

    def kill_once(self) -> bool:
        """One kill of a random victim at a random instant; False if the collection was complete before."""
        running = self._running = self._running or Command(self._config, *self._words)
        if not self._wait_for_an_instant(running):
            self._bury(running)
            return not self._complete
        victim = self._chooser.choice(VICTIMS)
        sealed = sealed_shards(self._cache)
        if not running.kill(victim, self._chooser):
            return True  # none was there; another time
        self.kills[victim] += 1
        if victim != "worker":  # else the same run goes on by itself
            running.end()
            self._running = None
        check_sealed(self._cache, sealed)
        return True

    def _wait_for_an_instant(self, running: Command) -> bool:
        """Somewhere between the workers' start and the end; False if the command ended before."""
        if not running.wait(lambda: bool(running.workers())):
            return False
        if self._chooser.random() < 0.75:  # else also while they start
            before = files_in_work(self._cache)
            if not running.wait(lambda: files_in_work(self._cache) != before):
                return False
        time.sleep(self._chooser.uniform(0, self._work_seconds))
        return running.code is None

    def _bury(self, running: Command) -> None:
        """What ended by itself is complete, or lost a worker while that started, or two on the same shard."""
        running.end()
        self._running = None
        self._complete = running.code == 0
        if not self._complete:
            last_line = running.stderr.splitlines()[-1]
            assert running.code == 3 and last_line.startswith("error: ") and "killed by SIGKILL" in last_line, last_line
            assert self.kills["worker"]


def work_seconds(config: Path, *words: str) -> float:
    """Run a collection; the time between its first file and its end."""
    running = Command(config, *words)
    running.wait(lambda: bool(files_in_work(config.parent / "cache")))
    started = time.monotonic()
    running.wait(lambda: False)
    running.end()
    assert running.code == 0, running.stderr
    return time.monotonic() - started


@pytest.fixture(scope="module")
def whole(
    tmp_path_factory: pytest.TempPathFactory, teacher_folder: Path, student_folder: Path, text_file: Path
) -> dict[str, str]:
    """What an uninterrupted collection leaves."""
    config = write_config(tmp_path_factory.mktemp("whole"), teacher_folder, student_folder, text_file, **SMALL_SHARDS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("distill.collect.WorkerPool", InlinePool)
        distill(config, "collect")
    return records_of(config.parent / "cache")


def test_a_killed_worker_a_killed_parent_a_killed_group(
    tmp_path: Path, teacher_folder: Path, student_folder: Path, text_file: Path, whole: dict[str, str]
) -> None:
    chooser = random.Random(0)
    config = write_config(tmp_path, teacher_folder, student_folder, text_file, **SMALL_SHARDS)
    cache = tmp_path / "cache"

    def kill_at_work(running: Command, victim: str) -> None:
        before = files_in_work(cache)
        assert running.wait(lambda: files_in_work(cache) != before), running.stderr
        sealed = sealed_shards(cache)
        assert running.kill(victim, chooser)
        check_sealed(cache, sealed)

    with no_shared_memory_left():
        running = Command(config, "collect")
        kill_at_work(running, "worker")
        kill_at_work(running, "parent")  # the same run went on by itself
        running.end()
        running = Command(config, "collect")
        kill_at_work(running, "group")
        running.end()
        sealed = sealed_shards(cache)
        distill(config, "collect")
    check_sealed(cache, sealed)
    assert records_of(cache) == whole


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2, 4])
def test_a_hundred_kills_at_random_instants(
    tmp_path: Path, teacher_folder: Path, student_folder: Path, text_file: Path, whole: dict[str, str], workers: int
) -> None:
    """34 for each number of workers, over as many collections as that takes."""
    chooser = random.Random(workers)
    changes = {**SMALL_SHARDS, "num_inference_workers": workers}

    def new(name: str) -> Path:
        return write_config(tmp_path / name, teacher_folder, student_folder, text_file, **changes)

    seconds = work_seconds(new("timed"), "collect")
    kills: Counter[str] = Counter()
    with no_shared_memory_left():
        for number in count():
            killer = Killer(new(str(number)), "collect", work_seconds=seconds, chooser=chooser)
            while (kills + killer.kills).total() < 34 and killer.kill_once():
                pass
            killer.finish()
            kills += killer.kills
            assert records_of(tmp_path / str(number) / "cache") == whole
            if kills.total() >= 34:
                break
    print(f"{workers} workers: {dict(kills)} in {number + 1} collections")
    assert set(kills) == set(VICTIMS)


# -- several teachers ------------------------------------------------------------------------------------------------

WEIGHTS = {"ada": 1.0, "bob": 2.5, "cid": 0.5}


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Three teachers with different weights."""
    folder = tmp_path_factory.mktemp("three")
    return {
        name: make_model_folder(folder / name, seed=seed, hidden=16 * seed, layers=1)
        for seed, name in enumerate(WEIGHTS, 1)
    }


def named(folder: Path, three: dict[str, Path], order: Sequence[str]) -> tuple[Path, dict[str, float]]:
    """The teachers under names that sort in this order, and their weights by these names."""
    for number, name in enumerate(order):
        shutil.copytree(three[name], folder / f"{number}-{name}")
    return folder, {f"{number}-{name}": WEIGHTS[name] for number, name in enumerate(order)}


def by_hex(cache: Path) -> dict[str, str]:
    """All shards and their keys, by split, hex of the layer and name: whatever the teachers are called."""
    return {
        f"{path.parent.parent.name}/{path.parent.name[-12:]}/{path.name}": digest
        for path, digest in ((Path(name), digest) for name, digest in records_of(cache).items())
        if path.suffix in (".h5", ".keys")
    }


def merged_validation(config: Path) -> tuple[list[TokenizedSample], list[Records]]:
    """The validation samples, and what a training reads of each."""
    job = prepare(load_config(config), Console(io.StringIO(), io.StringIO()))
    with ExitStack() as stack:
        data = cached_samples(job, "validation", stack)
        return list(data.samples), [data._records([sample]) for sample in data.samples]


def dense_reference(three: dict[str, Path], sample: TokenizedSample, top_k: int) -> npt.NDArray[np.float64]:
    """Invariant 3 in float64, [R, V]: averages of probabilities; an unkept id counts its share of the tail."""
    total = np.zeros((len(sample.targets), VOCAB_SIZE))
    labels = sample.token_ids[sample.targets]
    rows = np.arange(len(labels))
    for name, folder in three.items():
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
        with torch.no_grad():
            logits = model(torch.from_numpy(sample.token_ids.astype(np.int64))[None]).logits[0, sample.targets - 1]
        exact = torch.softmax(logits[:, :VOCAB_SIZE], -1).numpy()
        known = np.zeros(exact.shape, np.bool_)
        np.put_along_axis(known, np.argsort(-exact, axis=1)[:, :top_k], True, axis=1)
        known[rows, labels] = True
        left = 1 - np.where(known, exact, 0.0).sum(1)
        even = left / (~known).sum(1)
        total += WEIGHTS[name] / sum(WEIGHTS.values()) * np.where(known, exact, even[:, None])
    return total


def dense(records: Records, labels: npt.NDArray[np.int32]) -> npt.NDArray[np.float64]:
    """The distributions that merged records stand for, [R, V]; a label that is no entry is known apart."""
    result = np.full((len(records), VOCAB_SIZE), np.nan)
    result[np.arange(len(labels)), labels] = np.exp(records.label_logprobs.astype(np.float64))
    rows = np.repeat(np.arange(len(records)), records.entry_counts)
    result[rows, records.entry_ids] = np.exp(records.entry_logprobs.astype(np.float64))
    return result


def check_merged(config: Path, three: dict[str, Path], top_k: int) -> list[Records]:
    samples, merged = merged_validation(config)
    for sample, records in zip(samples, merged, strict=True):
        reference = dense_reference(three, sample, top_k)
        got = dense(records, sample.token_ids[sample.targets])
        known = ~np.isnan(got)
        np.testing.assert_allclose(got[known], reference[known], rtol=5e-3)  # stored in float16
        entries = np.zeros(got.shape, np.bool_)
        entries[np.repeat(np.arange(len(records)), records.entry_counts), records.entry_ids] = True
        tails = np.where(entries, 0.0, reference).sum(1)
        np.testing.assert_allclose(np.exp(records.tail_logprobs.astype(np.float64)), tails, rtol=2e-3)
    return merged


def same_records(a: list[Records], b: list[Records]) -> bool:
    return all(
        getattr(x, field.name).tobytes() == getattr(y, field.name).tobytes()
        for x, y in zip(a, b, strict=True)
        for field in fields(Records)
    )


THREE = {"save_topK": 12, "cache_precision": "exact", "validation_fraction": 0.1, "shard_targets": 300}


def test_three_teachers_in_any_order_are_one_average(
    tmp_path: Path,
    three: dict[str, Path],
    student_folder: Path,
    text_file: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("distill.collect.WorkerPool", InlinePool)
    shards, merged = [], []
    for order in permutations(three):
        folder = tmp_path / "".join(order)
        teachers, weights = named(folder / "teachers", three, order)
        config = write_config(folder, teachers, student_folder, text_file, teacher_weights=weights, **THREE)
        distill(config, "collect")
        shards.append(by_hex(folder / "cache"))
        merged.append(merged_validation(config)[1])
    check_merged(config, three, 12)
    assert len({name.split("/")[1] for name in shards[0]}) == 3
    assert all(found == shards[0] for found in shards)
    assert all(same_records(records, merged[0]) for records in merged)


@pytest.mark.slow
@pytest.mark.parametrize("order", [("ada", "bob", "cid"), ("cid", "bob", "ada"), ("bob", "cid", "ada")])
def test_three_teachers_killed_in_each(
    tmp_path: Path, three: dict[str, Path], student_folder: Path, text_file: Path, order: Sequence[str]
) -> None:
    chooser = random.Random("".join(order))
    configs = []
    for name in ("whole", "killed"):
        teachers, weights = named(tmp_path / name / "teachers", three, order)
        changes = {**THREE, "teacher_weights": weights, "shard_targets": 150}
        configs.append(write_config(tmp_path / name, teachers, student_folder, text_file, **changes))
    whole, killed = configs
    distill(whole, "collect")
    before, after = tmp_path / "whole" / "cache", tmp_path / "killed" / "cache"
    for number, name in enumerate(order):
        layer = f"{number}-{name}-"
        instant = chooser.randrange(1, len(list(files_of(before, layer))) // 2)
        running = Command(killed, "collect")
        assert running.wait(lambda: len(list(files_of(after, layer))) >= instant), running.stderr  # noqa: B023
        sealed = sealed_shards(after)
        assert running.kill("parent", chooser)
        running.end()
        check_sealed(after, sealed)
    distill(killed, "collect")
    assert records_of(after) == records_of(before)
    assert same_records(check_merged(killed, three, 12), check_merged(whole, three, 12))


def files_of(cache: Path, layer: str) -> Iterator[Path]:
    return (path for path in files_in_work(cache) if path.parent.name.startswith(layer))


# -- rounds ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_ten_kills_in_rounds(tmp_path: Path, teacher_folder: Path, student_folder: Path, text_file: Path) -> None:
    """Never above the cap, and the student of a training in rounds that nobody killed."""
    cap = 250_000
    changes = {"max_cache_size_gb": cap / 1e9, "shard_targets": 250, "save_state_every_minutes": 0}

    def train(name: str, kills: int) -> int:
        """One training to its end, killed so often at most; how often it was."""
        config = write_config(tmp_path / name, teacher_folder, student_folder, text_file, **changes)
        killed = 0
        with watched(tmp_path / name / "cache" / "dataset") as peak:
            while True:
                running = Command(config)
                if killed < kills and running.wait(lambda: bool(running.workers())):  # noqa: B023
                    time.sleep(chooser.uniform(0, 0.3) * seconds)
                    killed += running.kill("parent", chooser)
                running.wait(lambda: False)
                running.end()
                if running.code == 0:
                    break
                assert running.code == -signal.SIGKILL, running.stderr
            assert 0 < peak() <= cap
        return killed

    chooser = random.Random(10)
    started = time.monotonic()
    train("whole", 0)
    seconds = time.monotonic() - started
    whole = tmp_path / "whole" / "cache"
    assert summary_of(whole)["cache"]["rounds"] > 1
    kills = 0
    for number in count():
        if kills >= 10:
            break
        kills += train(str(number), 10 - kills)
        summary = summary_of(tmp_path / str(number) / "cache")
        assert summary["status"] == "completed" and summary["train"]["steps"] == summary_of(whole)["train"]["steps"]
        assert parts_of(tmp_path / str(number) / "cache") == parts_of(whole)
        assert same_weights(weights_of(tmp_path / str(number) / "cache"), weights_of(whole))


def parts_of(cache: Path) -> list[str]:
    """Where the parts of a training began, by its log."""
    return sorted(set(re.findall(r"from sample ([\d,]+) of", (cache / "runs/latest/log.txt").read_text())))
