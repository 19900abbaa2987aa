"""Rounds: inside the cap at any moment, every sample trained the planned number of times, and nothing else deleted."""

import json
import random
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from distill.allowance import RoundAllowance
from distill.cache import Layer, ShardInfo
from distill.collect import Budget
from distill.dataloader import CachedSamples
from distill.errors import InputError
from distill.files import disk_bytes
from distill.journal import Journal
from tests.helpers import make_samples, make_spec
from tests.jobs import distill, shards_of, summary_of, write_config

# A cap below what the toy text needs (about 400 kB in small shards), but well above its validation records.
CAP_GB = 0.00025


def info(targets: int, size: int) -> ShardInfo:
    return ShardInfo("n", "s", size, 1, targets, targets, targets, 0.5)


def allowance(budget: Budget, told: list[str], *, share: int, must: bool = False) -> RoundAllowance:
    layer = Layer.open(Path("nowhere"), make_spec())
    return RoundAllowance(
        budget, layer, share=share, bytes_per_target=10.0, must=must, try_first=True, promise=told.append
    )


def test_an_allowance_learns_what_shards_take() -> None:
    shards = [tuple(make_samples(5, seed=seed, length=40)) for seed in range(8)]
    targets = [sum(len(s.targets) for s in shard) for shard in shards]
    told: list[str] = []
    budget = Budget(limit=10**6, used=0)
    room = allowance(budget, told, share=sum(targets[:4]) * 20)
    assert room.wants(shards[0])
    assert room.take(Path("a"), "first", targets[0] * 20)
    room.sealed(info(targets[0], targets[0] * 20), 1.0)
    begun = [room.wants(shard) for shard in shards[1:]]
    assert begun == sorted(begun, reverse=True) and 0 < sum(begun) < 5, "twice as large as expected: fewer fit"
    assert told == ["first"] and budget.left == 10**6 - targets[0] * 20


def test_the_first_shard_is_always_tried_and_a_refusal_is_the_end() -> None:
    (shard,) = [tuple(make_samples(5))]
    told: list[str] = []
    room = allowance(Budget(limit=100, used=0), told, share=50)
    assert room.wants(shard)
    assert not room.take(Path("a"), "x", 51) and not told
    assert not room.wants(shard)
    with pytest.raises(InputError, match="max_cache_size_gb"):
        allowance(Budget(limit=100, used=0), told, share=50, must=True).take(Path("a"), "x", 101)


def test_a_journal_survives_any_cut(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path)
    journal.promise("train/layer", "a" * 32)
    journal.promise("train/layer", "a" * 32)
    journal.end_part(8)
    journal.promise("train/layer", "b" * 32)
    data = journal.path.read_bytes()
    assert data.count(b"\n") == 4
    for cut in range(data.index(b"\n") + 1, len(data) + 1):
        journal.path.write_bytes(data[:cut])
        opened = Journal.open(tmp_path)
        assert opened.own <= {("train/layer", "a" * 32), ("train/layer", "b" * 32)} and opened.ends in ([], [8])
        opened.end_part(9)
        assert Journal.open(tmp_path).ends[-1] == 9
        opened.forget("train/layer", ["a" * 32, "c" * 32])
        assert ("train/layer", "a" * 32) not in Journal.own_of(tmp_path)
    journal.path.write_text('{"version": 2}\n')
    with pytest.raises(InputError, match="version 2"):
        Journal.open(tmp_path)
    journal.path.write_text("[]\n")
    with pytest.raises(InputError, match="damaged"):
        Journal.open(tmp_path)


@contextmanager
def watched(folder: Path) -> Iterator[Callable[[], int]]:
    """The most bytes that were ever seen under ``folder``."""
    peak, stop = [0], threading.Event()

    def look() -> None:
        while not stop.is_set():
            if folder.exists():
                peak[0] = max(peak[0], disk_bytes(folder))
            time.sleep(0.002)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield lambda: peak[0]
    finally:
        stop.set()
        thread.join()


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> Counter[int]:
    """How often each sample of a training text was put into a batch for training."""
    counts: Counter[int] = Counter()
    batch = CachedSamples.batch

    def counting(self: CachedSamples, rows: list[int], begins_row: object = None) -> object:
        if threading.current_thread().name.startswith("prefetch"):
            counts.update(rows)
        return batch(self, rows, begins_row)  # type: ignore[arg-type]

    monkeypatch.setattr(CachedSamples, "batch", counting)
    return counts


@pytest.mark.parametrize("per_round", [1, pytest.param("all", marks=pytest.mark.slow)])
def test_a_small_cap_trains_all_of_the_text(
    tmp_path: Path,
    teacher_folder: Path,
    student_folder: Path,
    text_file: Path,
    trained: Counter[int],
    per_round: object,
) -> None:
    config = write_config(
        tmp_path, teacher_folder, student_folder, text_file,
        max_cache_size_gb=CAP_GB, epochs_per_round=per_round, shard_targets=250,
    )  # fmt: skip
    with watched(tmp_path / "cache" / "dataset") as peak:
        distill(config)
        assert 0 < peak() <= CAP_GB * 1e9
    summary = summary_of(tmp_path / "cache")
    assert summary["status"] == "completed" and summary["cache"]["rounds"] > 1
    rows = summary["data"]["train"]["samples"]
    assert trained == dict.fromkeys(range(rows), 2)
    steps = [json.loads(line)["step"] for line in (tmp_path / "cache/runs/latest/metrics.jsonl").open()]
    assert max(steps) == summary["train"]["steps"] == -(-rows // 8) * 2
    assert summary["validation"]["after"]["kl"] < summary["validation"]["before"]["kl"]


@pytest.mark.slow
@pytest.mark.parametrize("keys", [{"packing": True, "batch_size": 2}, {"max_tokens_per_batch": 200}])
def test_rounds_of_units_of_several_samples(
    tmp_path: Path,
    teacher_folder: Path,
    student_folder: Path,
    text_file: Path,
    trained: Counter[int],
    keys: dict[str, object],
) -> None:
    """Packed or batched by tokens: every sample as often, and the steps that are planned without rounds."""
    config = write_config(
        tmp_path, teacher_folder, student_folder, text_file, max_cache_size_gb=CAP_GB, shard_targets=250, **keys
    )
    planned = re.search(r"training: (\d+) steps", distill(config, "plan").stdout)
    distill(config)
    summary = summary_of(tmp_path / "cache")
    assert summary["cache"]["rounds"] > 1
    assert trained == dict.fromkeys(range(summary["data"]["train"]["samples"]), 2)
    assert planned is not None and summary["train"]["steps"] == int(planned[1])


def test_a_cap_that_holds_all_makes_the_same_student(
    tmp_path: Path, teacher_folder: Path, student_folder: Path, text_file: Path
) -> None:
    """A bound above the cap, real bytes below it: one part, and the same training but for how batches were padded."""
    plain = write_config(tmp_path / "plain", teacher_folder, student_folder, text_file)
    distill(plain)
    needed = disk_bytes(tmp_path / "plain" / "cache" / "dataset")
    tight = write_config(
        tmp_path / "tight", teacher_folder, student_folder, text_file, max_cache_size_gb=1.3 * needed / 1e9
    )
    distill(tight)
    assert (tmp_path / "tight/cache/runs/latest/log.txt").read_text().count("round: collecting part") == 1
    plain_end, tight_end = (summary_of(tmp_path / n / "cache")["validation"]["after"] for n in ("plain", "tight"))
    assert plain_end["kl"] == pytest.approx(tight_end["kl"], rel=1e-3)


def test_what_was_there_before_stays_and_counts(
    tmp_path: Path, teacher_folder: Path, student_folder: Path, text_file: Path
) -> None:
    """Another layer fills the cap: exit 2 names the way out, and --prune --yes is it."""
    changes = {"max_cache_size_gb": CAP_GB, "shard_targets": 250}
    other = write_config(
        tmp_path, teacher_folder, student_folder, text_file, save_topK=19, validation_fraction=0.5,
        context_len=60, max_cache_size_gb=1.0,
    )  # fmt: skip
    distill(other, "collect")
    before = shards_of(tmp_path / "cache")
    config = write_config(tmp_path, teacher_folder, student_folder, text_file, **changes)
    done = distill(config, code=2)
    assert "--prune --yes" in done.stderr and done.stderr.count("error:") == 1
    assert before.items() <= shards_of(tmp_path / "cache").items()
    done = distill(config, "collect", "--prune", code=2)
    assert "--yes" in done.stderr and before.items() <= shards_of(tmp_path / "cache").items()
    distill(config, "--prune", "--yes", "--fresh")
    assert summary_of(tmp_path / "cache")["status"] == "completed"
    assert disk_bytes(tmp_path / "cache" / "dataset") <= CAP_GB * 1e9


@pytest.mark.slow
def test_a_second_training_follows_one_in_rounds(
    tmp_path: Path, teacher_folder: Path, student_folder: Path, text_file: Path
) -> None:
    """A finished training leaves the cap to the next one, and so does one that --fresh sets aside."""
    changes = {"max_cache_size_gb": CAP_GB, "shard_targets": 250, "num_epochs": 1}
    config = write_config(tmp_path, teacher_folder, student_folder, text_file, **changes)
    distill(config)
    distill(config, "-lr", "0.001")
    assert summary_of(tmp_path / "cache")["status"] == "completed"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("distill.pipeline._Stage.train", interrupt)
        distill(config, code=130)
    distill(config, "-lr", "0.002", "--fresh")
    assert summary_of(tmp_path / "cache")["status"] == "completed"
    assert disk_bytes(tmp_path / "cache" / "dataset") <= CAP_GB * 1e9


def interrupt(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


def test_a_cap_below_a_shard_is_one_line(
    tmp_path: Path, teacher_folder: Path, student_folder: Path, text_file: Path
) -> None:
    config = write_config(
        tmp_path, teacher_folder, student_folder, text_file, max_cache_size_gb=0.00005, shard_targets=100_000
    )
    done = distill(config, code=2)
    assert "max_cache_size_gb" in done.stderr and done.stderr.count("error:") == 1


@pytest.mark.slow
def test_random_caps(
    tmp_path: Path, teacher_folder: Path, student_folder: Path, text_file: Path, trained: Counter[int]
) -> None:
    """20 random runs: never above the cap, every sample as often as planned."""
    chooser = random.Random(5)
    for number in range(20):
        trained.clear()
        cap = chooser.uniform(0.00022, 0.0005)  # from about what the largest step needs
        epochs = chooser.randint(1, 3)
        config = write_config(
            tmp_path / str(number), teacher_folder, student_folder, text_file,
            max_cache_size_gb=cap, epochs_per_round=chooser.choice([1, "all"]), num_epochs=epochs,
            shard_targets=chooser.choice([100, 200, 300]), overlap_rounds=chooser.choice([None, None, True]),
            cache_precision=chooser.choice(["exact", "compact"]), num_inference_workers=chooser.choice([1, 2]),
            batch_size=chooser.choice([1, 2, 4]),
        )  # fmt: skip
        dataset = tmp_path / str(number) / "cache" / "dataset"
        with watched(dataset) as peak:
            distill(config)
            assert peak() <= cap * 1e9
        summary = summary_of(tmp_path / str(number) / "cache")
        assert trained == dict.fromkeys(range(summary["data"]["train"]["samples"]), epochs)


@pytest.mark.parametrize(
    ("changes", "steps", "said"),
    [
        pytest.param({"max_steps": 3}, 3, "", marks=pytest.mark.slow),
        # Nothing is learned, so no validation is better than the first one: two later ones end it.
        ({"lr": 1e-30, "early_stop_patience": 2, "validate_every_n_epochs": 0.1}, None, "stopped early at step"),
    ],
)
def test_rounds_end_with_a_training_that_ends_early(
    tmp_path: Path, teacher_folder: Path, student_folder: Path, text_file: Path, changes: dict[str, object],
    steps: int | None, said: str,
) -> None:  # fmt: skip
    config = write_config(
        tmp_path, teacher_folder, student_folder, text_file, max_cache_size_gb=CAP_GB, shard_targets=250, **changes
    )
    told = distill(config).stdout
    summary = summary_of(tmp_path / "cache")
    assert summary["status"] == "completed" and said in told
    assert summary["train"]["steps"] == steps if steps else summary["train"]["steps"] > 2
    assert not [path for path in (tmp_path / "cache" / "student" / "states").iterdir() if path.is_dir()]
