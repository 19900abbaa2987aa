"""What a run says and leaves: text that can't harm a terminal, files that survive kills, wandb kept at a distance."""

import importlib.util
import io
import json
import os
import pty
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from distill.errors import InputError, MachineError
from distill.report import (
    CacheSummary,
    Console,
    Progress,
    RunFolder,
    SplitSummary,
    Summary,
    TrainSummary,
    ValidationSummary,
    WandbTracker,
    open_tracker,
    wandb_run_name,
)
from distill.report import tracker as tracker_module
from distill.report.summary import check_summary
from distill.report.tracker import must_be_offline

DOCS = Path(__file__).parent.parent / "docs"
NOON = datetime(2025, 1, 31, 14, 5, 9)


def quiet_console() -> Console:
    return Console(io.StringIO(), io.StringIO())


def new_folder(tmp_path: Path, console: Console | None = None) -> RunFolder:
    return RunFolder.create(tmp_path / "runs", "student", '{"lr": 1}\n', console or quiet_console(), now=NOON)


# --- Console ---


def test_each_kind_of_line_has_its_stream_and_all_are_logged(tmp_path: Path) -> None:
    out, err = io.StringIO(), io.StringIO()
    console = Console(out, err)
    console.say("early")
    console.log_to(tmp_path / "log.txt")
    console.say("one\ntwo")
    console.warn("careful")
    console.log("secret")
    console.log_to(tmp_path / "second.txt")
    console.say("late")
    assert out.getvalue() == "early\none\ntwo\nlate\n"
    assert err.getvalue() == "warning: careful\n"
    lines = (tmp_path / "log.txt").read_text().splitlines()
    assert [line[20:] for line in lines] == ["early", "one", "two", "warning: careful", "secret"]
    assert [datetime.fromisoformat(line[:19]) for line in lines]
    assert (tmp_path / "second.txt").read_text()[20:] == "late\n"


@given(st.text())
def test_no_control_characters_without_a_terminal(text: str) -> None:
    out, err = io.StringIO(), io.StringIO()
    console = Console(out, err)
    console.say(text)
    console.warn(text)
    with console.progress(text, 10, "tokens") as progress:
        progress.advance(3, text)
    said = out.getvalue() + err.getvalue()
    assert said.endswith("\n")
    assert all(character.isprintable() for character in said.replace("\n", ""))


def test_a_stream_of_few_characters_and_one_that_nobody_reads(tmp_path: Path) -> None:
    narrow = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    read_end, write_end = os.pipe()
    os.close(read_end)
    with os.fdopen(write_end, "w") as broken:
        console = Console(narrow, broken)
        console.log_to(tmp_path / "log.txt")
        console.say("größer")
        console.warn("größer")
        console.warn("still here")
    assert narrow.buffer.getvalue() == b"gr\\xf6\\xdfer\n"
    assert [line[20:] for line in (tmp_path / "log.txt").read_text(encoding="utf-8").splitlines()] == [
        "größer",
        "warning: größer",
        "warning: still here",
    ]


def test_a_full_disk_is_the_machines_fault(tmp_path: Path) -> None:
    console = quiet_console()
    (tmp_path / "log.txt").symlink_to("/dev/full")
    with pytest.raises(MachineError, match="cannot write"):
        console.log_to(tmp_path / "log.txt")
        console.say("x")


# --- Progress ---


def watched(total: int | None, done: int = 0) -> tuple[Progress, list[float], list[str], list[str]]:
    now, shown, told = [100.0], list[str](), list[str]()
    progress = Progress(
        "collecting",
        total,
        "tokens",
        done=done,
        show=lambda done, state: shown.append(state),
        tell=told.append,
        clock=lambda: now[0],
    )
    return progress, now, shown, told


def test_progress_says_rate_and_time_left() -> None:
    progress, now, shown, told = watched(100_000)
    now[0] += 8.0  # loading a model: not part of the rate
    progress.advance(2_000)
    now[0] += 1.0
    progress.advance(2_000, "loss 2.5")
    assert shown == ["2,000 of 100,000 tokens", "4,000 of 100,000 tokens, 2,000 tokens/s, 48 s left, loss 2.5"]
    assert told == []
    now[0] += 1.0
    progress.advance(1_000)
    assert told == ["collecting: 5,000 of 100,000 tokens, 1,500 tokens/s, 1 min left"]
    now[0] += 9.9
    progress.advance(0)
    assert len(told) == 1, "every ten seconds at most"
    now[0] += 0.1
    progress.finish()
    assert told[1] == "collecting: 5,000 of 100,000 tokens in 20 s, 250 tokens/s"


def test_progress_of_a_resumed_run_and_of_an_unknown_total() -> None:
    progress, now, shown, told = watched(1000, done=900)
    progress.advance(1)
    now[0] += 200.0
    progress.advance(50)
    assert shown[-1] == "951 of 1,000 tokens, 0.25 tokens/s, 3 min left"
    progress.finish()
    assert told[-1] == "collecting: 951 of 1,000 tokens in 3 min, 0.26 tokens/s"
    progress, now, shown, told = watched(None)
    progress.advance(5)
    now[0] += 7200.0
    progress.advance(5)
    progress.finish()
    assert told[-1] == "collecting: 10 tokens in 2 h 00 min, 0.0014 tokens/s"


def test_the_rate_is_that_of_the_last_minute() -> None:
    progress, now, shown, _ = watched(10_000)
    for second in range(200):
        now[0] += 1.0
        progress.advance(1 if second < 100 else 20)
    assert "20 tokens/s" in shown[-1]


def read_all(descriptor: int, chunks: list[bytes]) -> None:
    with suppress(OSError):  # so a terminal ends
        while chunk := os.read(descriptor, 65536):
            chunks.append(chunk)


def test_a_bar_on_a_terminal_and_whole_lines_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    leader, follower = pty.openpty()
    chunks: list[bytes] = []
    reader = threading.Thread(target=read_all, args=(leader, chunks))
    reader.start()
    with os.fdopen(follower, "w") as terminal:
        console = Console(terminal, terminal)
        console.log_to(tmp_path / "log.txt")
        with console.progress("training", 20, "steps") as outer, console.progress("validating", 3, "batches") as inner:
            outer.advance(7, "loss 1.5")
            inner.advance(1)
            console.say("[bold]step 7[/bold]: fine")
        console.say("after")
    reader.join()
    os.close(leader)
    shown = b"".join(chunks).decode()
    assert "\x1b[" in shown
    assert "training" in shown
    assert "[bold]step 7[/bold]: fine\r\n" in shown
    assert shown.endswith("after\r\n")
    log = [line[20:] for line in (tmp_path / "log.txt").read_text().splitlines()]
    assert log[0] == "[bold]step 7[/bold]: fine"
    assert [line.split(" in ")[0] for line in log[1:]] == [
        "validating: 1 of 3 batches",
        "training: 7 of 20 steps",
        "after",
    ]


def test_progress_is_told_also_when_the_work_fails() -> None:
    err = io.StringIO()
    with pytest.raises(ZeroDivisionError), Console(io.StringIO(), err).progress("work", 2, "steps") as progress:
        progress.advance()
        progress.advance(1 // 0)
    assert err.getvalue().startswith("work: 1 of 2 steps in ")


# --- Run folder ---


def test_a_new_run_folder(tmp_path: Path) -> None:
    console = quiet_console()
    console.say("before")
    folder = RunFolder.create(tmp_path / "cache" / "runs", "my stu/dent", '{"lr": 1}\n', console, now=NOON)
    assert folder.path == tmp_path / "cache" / "runs" / "2025-01-31T14-05-09-my-stu-dent"
    assert (folder.path / "config.json").read_text() == '{"lr": 1}\n'
    assert (folder.path / "metrics.jsonl").read_text() == ""
    assert "before" in (folder.path / "log.txt").read_text()
    latest = folder.path.parent / "latest"
    assert latest.is_symlink()
    assert latest.resolve() == folder.path


def test_two_runs_in_one_second_and_the_latest(tmp_path: Path) -> None:
    first, second, third = (new_folder(tmp_path) for _ in range(3))
    assert [f.path.name.removeprefix(first.path.name) for f in (first, second, third)] == ["", "-2", "-3"]
    assert (tmp_path / "runs" / "latest").resolve() == third.path
    RunFolder.reopen(first.path, quiet_console())
    assert (tmp_path / "runs" / "latest").resolve() == first.path
    assert len(list((tmp_path / "runs").iterdir())) == 4


def test_latest_is_a_file_where_there_are_no_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(Path, "symlink_to", refuse)
    folder = new_folder(tmp_path)
    assert (tmp_path / "runs" / "latest").read_text() == f"{folder.path.name}\n"


def test_metrics_are_lines_of_json_without_nan(tmp_path: Path) -> None:
    folder = new_folder(tmp_path)
    folder.log({"kind": "train", "step": 1, "loss": float("nan"), "lr": 1e-5, "parts": [1.0, float("inf")]})
    folder.log({"kind": "validation", "step": 1, "kl": 0.5})
    folder.sync()
    lines = (folder.path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line, parse_constant=pytest.fail) for line in lines] == [
        {"kind": "train", "step": 1, "loss": None, "lr": 1e-5, "parts": [1.0, None]},
        {"kind": "validation", "step": 1, "kl": 0.5},
    ]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    steps=st.lists(st.integers(0, 12), max_size=12),
    cut=st.integers(0, 2000),
    keep=st.integers(-1, 13),
    torn=st.sampled_from([b"", b"\0" * 40, b'{"step"', b"\xff\n", b'"text"\n', b'{"step": null}\n']),
)
def test_metrics_are_cut_on_resume(tmp_path: Path, steps: list[int], cut: int, keep: int, torn: bytes) -> None:
    folder = new_folder(tmp_path)
    metrics = folder.path / "metrics.jsonl"
    for number, step in enumerate(steps):
        folder.log({"kind": "train", "step": step, "loss": number / 7})
    written = metrics.read_bytes()
    left = written[: max(0, len(written) - cut)]
    metrics.write_bytes(left + torn)

    again = RunFolder.reopen(folder.path, quiet_console())
    again.cut_metrics(keep)
    whole = [line for line in left.split(b"\n")[:-1] if json.loads(line)["step"] <= keep]
    assert metrics.read_bytes() == b"".join(line + b"\n" for line in whole)
    again.log({"kind": "train", "step": keep + 1})
    assert [json.loads(line)["step"] for line in metrics.read_text().splitlines()][-1] == keep + 1
    assert not list(folder.path.glob("*.tmp"))


def test_disk_trouble(tmp_path: Path) -> None:
    folder = new_folder(tmp_path)
    (folder.path / "metrics.jsonl").unlink()
    (folder.path / "metrics.jsonl").symlink_to("/dev/full")
    with pytest.raises(MachineError, match=r"metrics\.jsonl: cannot write: No space left"):
        folder.log({"kind": "train", "step": 1})
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="file"):
        RunFolder.create(tmp_path / "file", "x", "{}", quiet_console())


# --- summary.json ---


KEYS = """
version status
data.train.samples data.train.tokens data.train.targets
data.validation.samples data.validation.tokens data.validation.targets
cache.bytes cache.targets cache.bytes_per_target cache.shards cache.top_k cache.kept_mass_mean
cache.reused_targets cache.collected_targets cache.rounds
collect.seconds collect.tokens_per_second collect.workers
train.steps train.seconds train.tokens_per_second train.targets train.peak_memory_bytes train.resumed_from_step
validation.before.kl validation.before.ce validation.before.teacher_ce validation.before.top1_agreement
validation.before.ece validation.before.acceptance validation.before.targets
validation.after.kl validation.after.ce validation.after.teacher_ce validation.after.top1_agreement
validation.after.ece validation.after.acceptance validation.after.targets
"""


def flat(document: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in document.items():
        result |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return result


def test_the_keys_are_pinned_documented_and_null_at_first() -> None:
    document = flat(Summary().to_dict())
    assert list(document) == KEYS.split()
    assert document.pop("version") == 1
    assert document.pop("status") == "running"
    assert set(document.values()) == {None}
    text = (DOCS / "summary.md").read_text()
    for key in KEYS.split():
        section, _, name = key.rpartition(".")
        assert (
            f"`{key}`" in text or f"`.{name}`" in text or (section.startswith("validation") and f"`….{name}`" in text)
        )


def test_a_summary_is_written_whole(tmp_path: Path) -> None:
    folder = new_folder(tmp_path)
    folder.write_summary(Summary())
    folder.write_summary(
        Summary(
            status="completed",
            data={"train": SplitSummary(2, 30, 20), "validation": SplitSummary(1, 9, 8)},
            cache=CacheSummary(bytes=100, targets=28, bytes_per_target=100 / 28, kept_mass_mean=float("nan")),
            train=TrainSummary(steps=4, resumed_from_step=2),
            validation=ValidationSummary({"kl": 1.5, "targets": 8}, {"kl": 1}),
        )
    )
    document = json.loads((folder.path / "summary.json").read_text())
    check_summary(document, "summary.json")
    values = {key: value for key, value in flat(document).items() if value is not None}
    assert values == {
        "version": 1,
        "status": "completed",
        "data.train.samples": 2,
        "data.train.tokens": 30,
        "data.train.targets": 20,
        "data.validation.samples": 1,
        "data.validation.tokens": 9,
        "data.validation.targets": 8,
        "cache.bytes": 100,
        "cache.targets": 28,
        "cache.bytes_per_target": 100 / 28,
        "train.steps": 4,
        "train.resumed_from_step": 2,
        "validation.before.kl": 1.5,
        "validation.before.targets": 8,
        "validation.after.kl": 1,
    }


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"version": 2}, "version must be one of 1, not 2"),
        ({"version": True}, "version must be one of 1, not True"),
        ({"status": "fine"}, "status must be one of completed, failed, interrupted, running, not 'fine'"),
        ({"train": None}, "train must be an object"),
        ({"collect": {}}, "collect.seconds is missing"),
        (
            {"collect": {"seconds": "1", "tokens_per_second": 1, "workers": 1}},
            "collect.seconds must be a number or null",
        ),
        ({"collect": {"seconds": 1, "tokens_per_second": 1, "workers": 1.5}}, "collect.workers must be a whole number"),
    ],
)
def test_other_documents_are_refused(change: dict[str, Any], problem: str) -> None:
    with pytest.raises(InputError, match=f"^somewhere: {problem}"):
        check_summary(Summary().to_dict() | change, "somewhere")
    check_summary(Summary().to_dict() | {"later": 1}, "somewhere")


def test_we_write_no_wrong_types() -> None:
    with pytest.raises(AssertionError, match=r"train\.steps must be a whole number"):
        Summary(train=TrainSummary(steps=1.5)).to_dict()  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        Summary(validation=ValidationSummary({"klx": 1.0}, {})).to_dict()


# --- wandb ---

FAKE = """
import os, signal, sys, time
from pathlib import Path
class errors:
    class Error(Exception): pass
def Settings(**options): return options
class Run:
    def log(self, metrics, step):
        {log}
        with open(os.environ["FAKE_LOG"], "a") as file: file.write(f"{{step}} {{metrics}}\\n")
    def finish(self): {finish}
def init(**options):
    mode = options["mode"]
    {init}
    return Run()
{top}
"""


@pytest.fixture
def fake_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Makes a module of that name for the tracker's process, which does what it is told at each point."""

    def make(*, top: str = "", init: str = "pass", log: str = "pass", finish: str = "pass") -> Path:
        (tmp_path / "fake").mkdir()
        (tmp_path / "fake" / "wandb.py").write_text(FAKE.format(top=top, init=init, log=log, finish=finish))
        monkeypatch.setenv("FAKE_LOG", str(tmp_path / "fake.log"))
        monkeypatch.syspath_prepend(tmp_path / "fake")
        return tmp_path / "fake.log"

    return make


def track(tmp_path: Path, steps: int, pause: float = 0.0) -> list[str]:
    """Logs so many steps; the warnings."""
    warnings: list[str] = []
    tracker = WandbTracker("name", {"lr": 1.0}, tmp_path, warn=warnings.append)
    for step in range(steps):
        start = time.monotonic()
        tracker.log({"train/loss": 1.0}, step)
        assert time.monotonic() - start < 5.0  # far above what it takes, far below what wandb would make of it
        time.sleep(pause)
    tracker.close()
    return warnings


def test_the_run_name_is_as_the_ancestors() -> None:
    assert wandb_run_name("my try", "SmolLM2", 1e-5, NOON) == "my try SmolLM2 lr(1e-05) (31.01.2025 / 14:05:09)"
    assert wandb_run_name("", "SmolLM2", 0.5, NOON) == "SmolLM2 lr(0.5) (31.01.2025 / 14:05:09)"


def test_records_arrive_in_order(tmp_path: Path, fake_wandb: Callable[..., Path]) -> None:
    log = fake_wandb()
    assert track(tmp_path, 300) == []
    assert [int(line.split()[0]) for line in log.read_text().splitlines()] == list(range(300))


def test_what_wandb_says_stays_in_its_file(
    tmp_path: Path, fake_wandb: Callable[..., Path], capfd: pytest.CaptureFixture[str]
) -> None:
    fake_wandb(init="print('noise', flush=True); os.system('echo more noise'); input('Key? ')")
    assert track(tmp_path, 1) == ["wandb: EOFError: EOF when reading a line; the run goes on without it"]
    assert capfd.readouterr() == ("", "")
    assert "more noise" in (tmp_path / "wandb" / "output.txt").read_text()


KILL = "os.kill(os.getpid(), signal.SIGKILL)"
FAILURES = {
    "not installed": ({"top": "raise ModuleNotFoundError(\"No module named 'wandb'\")"}, "No module named 'wandb'"),
    "init raises": ({"init": "raise OSError('no network')"}, "OSError: no network"),
    "log raises": ({"log": "raise RuntimeError('a\\nb')"}, "RuntimeError: a; the run goes on"),
    "finish raises": ({"finish": "raise RuntimeError('late')"}, "RuntimeError: late"),
    "exits": ({"log": "sys.exit(4)"}, "exit code 4"),
    "killed in init": ({"init": KILL}, "exit code -9"),
    "killed in log": ({"log": KILL}, "exit code -9"),
    "hangs in init": ({"init": "time.sleep(60)"}, "not finished after 2 s"),
    "hangs in finish": ({"finish": "time.sleep(60)"}, "not finished after 2 s"),
    "ignores SIGTERM": ({"log": "signal.signal(15, signal.SIG_IGN); time.sleep(60)"}, "not finished after 2 s"),
    "frozen": ({"log": "os.kill(os.getpid(), signal.SIGSTOP)"}, "not finished after 2 s"),
}


@pytest.mark.parametrize(("behaviour", "warning"), FAILURES.values(), ids=FAILURES.keys())
def test_nothing_that_wandb_does_ends_a_run(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fake_wandb: Callable[..., Path],
    behaviour: dict[str, str],
    warning: str,
) -> None:
    monkeypatch.setattr(tracker_module, "_FINISH_SECONDS", 2.0)
    monkeypatch.setattr(tracker_module, "_GRACE_SECONDS", 0.5)
    fake_wandb(**behaviour)
    start = time.monotonic()
    [said] = track(tmp_path, 3)
    assert said.startswith("wandb: ")
    assert warning in said
    assert time.monotonic() - start < 10


def test_records_that_a_slow_wandb_misses_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fake_wandb: Callable[..., Path]
) -> None:
    monkeypatch.setattr(tracker_module, "_MOST_WAITING", 10)
    log = fake_wandb(init="time.sleep(0.5)")
    assert track(tmp_path, 110) == ["wandb: too slow, 100 records were dropped; metrics.jsonl has them all"]
    assert len(log.read_text().splitlines()) == 10


def test_without_a_server_it_goes_on_offline(tmp_path: Path, fake_wandb: Callable[..., Path]) -> None:
    log = fake_wandb(init="if mode != 'offline': raise errors.Error('no\\nserver')")
    os_environ = dict(os.environ)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WANDB_API_KEY", "0" * 40)
        [warning] = track(tmp_path, 2)
    assert warning.startswith("wandb: no; it stays offline")
    assert len(log.read_text().splitlines()) == 2
    assert dict(os.environ) == os_environ


def test_offline_means_no_key(tmp_path: Path) -> None:
    netrc = tmp_path / "netrc"
    nowhere = {"NETRC": str(netrc)}
    assert must_be_offline(nowhere)
    assert not must_be_offline(nowhere | {"WANDB_API_KEY": "0" * 40})
    assert not must_be_offline(nowhere | {"WANDB_MODE": "disabled"})
    netrc.write_text("machine api.wandb.ai login user password x\n")
    assert not must_be_offline(nowhere)
    assert must_be_offline(nowhere | {"WANDB_BASE_URL": "https://wandb.example:8080"})
    netrc.write_text("not a netrc")
    assert must_be_offline(nowhere)


def test_no_name_no_tracker(tmp_path: Path) -> None:
    with open_tracker(None, {}, new_folder(tmp_path), quiet_console()) as tracker:
        tracker.log({"a": 1.0}, 1)
    assert not (tmp_path / "wandb").exists()


@pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="wandb isn't installed")
def test_a23_the_real_wandb_stays_offline_without_a_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Report A23: no network, no key and a closed stdin; the log is local and the run unharmed."""
    monkeypatch.setattr("sys.stdin", None)
    monkeypatch.setattr(tracker_module, "_FINISH_SECONDS", 120.0)  # what it takes on a busy machine is not the point
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    folder = new_folder(tmp_path)
    with open_tracker("comment model", {"lr": 0.25}, folder, Console()) as tracker:
        for step in range(5):
            tracker.log({"train/loss": 1.0 / (step + 1)}, step)
    assert capfd.readouterr() == ("", "")
    [written] = folder.path.glob("wandb/offline-run-*/run-*.wandb")
    content = written.read_bytes()
    assert b"train/loss" in content
    assert b"comment model" in content
