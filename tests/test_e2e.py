"""The whole job on toy models: both stages, reuse, kills, and what is left behind."""

import io
import json
import os
import random
import signal
import subprocess
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from distill.checkpoint import saved_step
from distill.config import load_config
from distill.filling import cached_samples
from distill.losses import build_loss
from distill.prepare import prepare
from distill.report import Console
from distill.student import Student
from tests.jobs import ROOT, command, distill, same_weights, shards_of, summary_of, weights_of, write_config


@pytest.fixture(scope="module")
def finished(
    tmp_path_factory: pytest.TempPathFactory, teacher_folder: Path, student_folder: Path, text_file: Path
) -> Path:
    """The folder of one uninterrupted run."""
    folder = tmp_path_factory.mktemp("finished")
    distill(write_config(folder, teacher_folder, student_folder, text_file))
    return folder


def test_a_run_leaves_what_it_promises(finished: Path) -> None:
    cache = finished / "cache"
    summary = summary_of(cache)
    assert summary["version"] == 1 and summary["status"] == "completed"
    before, after = summary["validation"]["before"], summary["validation"]["after"]
    assert set(after) >= {"kl", "ce", "teacher_ce", "top1_agreement", "ece", "acceptance"}
    assert after["kl"] < 0.8 * before["kl"] and after["acceptance"] > before["acceptance"]
    data, stored, training = summary["data"], summary["cache"], summary["train"]
    assert data["train"]["samples"] + data["validation"]["samples"] >= 60  # long completions are cut into several
    assert stored["collected_targets"] == stored["targets"] == data["train"]["targets"] + data["validation"]["targets"]
    assert stored["reused_targets"] == 0 and stored["top_k"] == 20 and 0 < stored["kept_mass_mean"] < 1
    assert training["steps"] == 2 * -(-data["train"]["samples"] // 8) and training["resumed_from_step"] is None
    run_folder = (cache / "runs" / "latest").resolve()
    assert {"config.json", "metrics.jsonl", "summary.json", "log.txt"} <= {p.name for p in run_folder.iterdir()}
    records = [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()]
    steps = [record["step"] for record in records if record["kind"] == "train"]
    assert steps == list(range(1, training["steps"] + 1))
    assert [r["step"] for r in records if r["kind"] == "validation"] == [0, training["steps"] // 2, training["steps"]]
    assert not (cache / "student" / "states" / "toy-student").exists()
    assert not list(cache.rglob("*.tmp"))


def test_the_student_is_an_ordinary_folder(finished: Path) -> None:
    folder = finished / "cache" / "student" / "trained" / "toy-student_final"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    ids = tokenizer("the cat", return_tensors="pt").input_ids
    assert model.generate(ids, max_new_tokens=4, do_sample=False).shape == (1, ids.shape[1] + 4)
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()


def test_a_second_run_reuses_every_record_and_keeps_the_first_student(finished: Path) -> None:
    config = finished / "config.json"
    before = shards_of(finished / "cache")
    distill(config, "-ne", "1", "-bs", "3")
    summary = summary_of(finished / "cache")
    assert summary["cache"]["collected_targets"] == 0 and summary["cache"]["reused_targets"] > 0
    assert shards_of(finished / "cache") == before
    assert (finished / "cache" / "student" / "trained" / "toy-student-2_final").is_dir()
    (finished / "cache" / "student" / "trained" / "toy-student-2_final").rename(finished / "second")


@pytest.mark.parametrize("workers", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_more_workers_make_the_same_bytes(
    finished: Path, tmp_path: Path, teacher_folder: Path, student_folder: Path, text_file: Path, workers: int
) -> None:
    config = write_config(tmp_path, teacher_folder, student_folder, text_file)
    distill(config, "collect", "-niw", str(workers))
    assert shards_of(tmp_path / "cache") == shards_of(finished / "cache")


def test_grown_and_reordered_text_collects_only_what_is_new(
    tmp_path: Path, teacher_folder: Path, student_folder: Path, text_file: Path
) -> None:
    lines = text_file.read_text().splitlines(keepends=True)
    validation = tmp_path / "validation.jsonl"
    validation.write_text("".join(lines[:5]))
    text = tmp_path / "text.jsonl"
    text.write_text("".join(lines[5:40]))
    config = write_config(
        tmp_path, teacher_folder, student_folder, text, validation_dataset_path=str(validation), num_epochs=1
    )
    distill(config, "collect")
    first = summary_of(tmp_path / "cache")
    random.Random(1).shuffle(lines)
    other = tmp_path / "other.jsonl"
    other.write_text("".join(lines))
    distill(config, "collect", "-d", str(other), "--no-save_user_range")
    second = summary_of(tmp_path / "cache")["cache"]
    # The five validation rows and the twenty others are new to the training layer; roles switched off cost nothing.
    assert 0 < second["collected_targets"] < first["cache"]["collected_targets"]
    assert second["reused_targets"] > 0
    distill(config, "train", "-d", str(text), "--no-save_user_range")
    assert summary_of(tmp_path / "cache")["cache"]["collected_targets"] == 0


def test_train_without_records_says_what_to_do(
    tmp_path: Path, teacher_folder: Path, student_folder: Path, text_file: Path
) -> None:
    done = distill(write_config(tmp_path, teacher_folder, student_folder, text_file), "train", code=2)
    assert "targets are not in the cache; run `collect` first" in done.stderr and done.stderr.count("\n") == 1


def test_a_plan_above_the_cap_names_the_ways_out(
    tmp_path: Path, teacher_folder: Path, student_folder: Path, text_file: Path
) -> None:
    config = write_config(tmp_path, teacher_folder, student_folder, text_file, cache_precision="exact")
    done = distill(config, "collect", "-maxgb", "0.0004", code=2)
    assert "max_cache_size_gb" in done.stderr and done.stderr.count("\n") == 1
    assert not (tmp_path / "cache" / "dataset").exists()
    words = done.stderr.split()
    cap, top_k = words[words.index("set") + 3], words[words.index("save_topK") + 1]
    distill(config, "collect", "-maxgb", cap)
    assert sum(p.stat().st_size for p in (tmp_path / "cache" / "dataset").rglob("*")) <= float(cap) * 1e9
    other = write_config(tmp_path / "other", teacher_folder, student_folder, text_file, cache_precision="exact")
    distill(other, "collect", "-maxgb", "0.0004", "-topk", top_k)


@pytest.mark.parametrize("add_bos", [True, False])
def test_a_teacher_as_its_own_student_differs_at_no_target(
    tmp_path: Path, teacher_folder: Path, text_file: Path, add_bos: bool
) -> None:
    """KL <= 1e-4 at every validation target: completions, conversations and the tokens that end turns."""
    config_file = write_config(
        tmp_path,
        teacher_folder,
        teacher_folder,
        text_file,
        add_bos=add_bos,
        validation_fraction=0.5,
        cache_precision="exact",
    )
    distill(config_file, "collect")
    job = prepare(load_config(config_file), Console(io.StringIO(), io.StringIO()))
    samples = job.splits["validation"].samples
    assert {sample.is_completion for sample in samples} == {True, False}
    ends = {2, 4}  # <|eos|> and <|im_end|>
    assert all(
        any(sample.token_ids[t] in ends for t in sample.targets) for sample in samples if len(sample.token_ids) < 96
    )
    student = Student(job.student)
    with ExitStack() as stack, student.evaluating():
        data = cached_samples(job, "validation", stack)
        for row in range(len(samples)):
            batch = data.batch([row])
            statistics = student.statistics(batch.tokens, batch.targets)
            assert build_loss("kl")(statistics.scores, batch.targets).max() <= 1e-4


def seconds_to_start(config: Path) -> float:
    """How long a command takes before it does anything."""
    started = time.monotonic()
    subprocess.run(command(config, "plan"), check=True, capture_output=True, timeout=120)
    return time.monotonic() - started


def kill_and_restart(config: Path, words: list[str], *, delays: list[float], group: bool) -> int:
    """Start the command once a delay and SIGKILL it after that; returns how many starts were killed at work."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    killed = 0
    for delay in delays:
        process = subprocess.Popen(
            command(config, *words),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,
        )
        try:
            process.wait(delay)
        except subprocess.TimeoutExpired:
            (os.killpg if group else os.kill)(process.pid, signal.SIGKILL)
            killed += 1
        process.wait()
    return killed


def test_kills_in_both_stages_change_nothing(
    finished: Path, tmp_path: Path, teacher_folder: Path, student_folder: Path, text_file: Path
) -> None:
    config = write_config(
        tmp_path, teacher_folder, student_folder, text_file, save_state_every_minutes=0, shard_targets=400
    )
    base = seconds_to_start(config)
    killed = kill_and_restart(config, [], delays=[base * 0.5, base + 0.5, base + 2.5, base + 4.0], group=True)
    distill(config)
    assert killed >= 1
    assert shards_of(tmp_path / "cache") == shards_of(finished / "cache")
    assert same_weights(weights_of(tmp_path / "cache"), weights_of(finished / "cache"))


@pytest.mark.slow
def test_ten_kills_of_a_training_change_nothing(
    tmp_path: Path, teacher_folder: Path, student_folder: Path, text_file: Path
) -> None:
    """Of the parent alone and of the whole group; while states and exports are written too."""
    changes = {"save_state_every_minutes": 0, "num_epochs": 150, "save_student_every_n_epochs": 30}
    whole, killed_at = (write_config(tmp_path / n, teacher_folder, student_folder, text_file, **changes) for n in "ab")
    distill(whole)
    distill(killed_at, "collect")
    total = summary_of(tmp_path / "a" / "cache")["train"]["steps"]
    state = tmp_path / "b" / "cache" / "student" / "states" / "toy-student"
    chooser = random.Random("train")
    for number, step in enumerate(sorted(chooser.sample(range(1, total - 50), 10))):
        process = subprocess.Popen(
            command(killed_at), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )
        while (saved_step(state) or 0) < step:
            assert process.poll() is None
            time.sleep(0.005)
        time.sleep(chooser.uniform(0.0, 0.05))
        (os.killpg if number % 2 else os.kill)(process.pid, signal.SIGKILL)
        process.wait()
    distill(killed_at)
    a, b = tmp_path / "a" / "cache", tmp_path / "b" / "cache"
    assert shards_of(a) == shards_of(b)
    assert not list((b / "dataset").rglob("*.tmp"))
    exports = [sorted(path.name for path in (cache / "student" / "trained").iterdir()) for cache in (a, b)]
    assert exports[0] == exports[1]
    assert same_weights(weights_of(a), weights_of(b))


def test_an_unfinished_run_with_other_values_names_both_ways_out(
    finished: Path, tmp_path: Path, teacher_folder: Path, student_folder: Path, text_file: Path
) -> None:
    config = write_config(
        tmp_path, teacher_folder, student_folder, text_file, save_state_every_minutes=0, num_epochs=40
    )
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        command(config), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=environment, text=True
    )
    state = tmp_path / "cache" / "student" / "states" / "toy-student"
    deadline = time.monotonic() + 120
    while not list(state.glob("step_*[0-9]")):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130, stderr
    assert summary_of(tmp_path / "cache")["status"] == "interrupted"
    done = distill(config, "-lr", "0.001", code=2)
    for part in ("lr (was 0.003, now 0.001)", "--resume", "--fresh"):
        assert part in done.stderr
    distill(config, "-lr", "0.001", "-ne", "2", "--fresh")
    assert (tmp_path / "cache" / "student" / "states" / "toy-student.old" / "run.json").exists()
    assert summary_of(tmp_path / "cache")["train"]["resumed_from_step"] is None
