"""The worker pool under everything that can happen to a process: nothing hangs, nothing is lost, nothing stays."""

import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import pytest

from distill.errors import DistillError, InputError, MachineError
from distill.workers import Channel, Died, Later, Progress, Ready, WorkerError, WorkerPool

ROOT = Path(__file__).parent.parent

Order = tuple[Any, ...]


class Doer:
    """A worker that does as its task says: ('add', 1, 2) calls ``self.add(channel, 1, 2)``."""

    def __init__(self, *orders: Order) -> None:
        for order in orders:
            self(order, None)  # type: ignore[arg-type]

    def __call__(self, task: Order, channel: Channel) -> Any:
        name, *arguments = task
        return getattr(self, name)(channel, *arguments)

    def add(self, channel: Channel, a: Any, b: Any) -> Any:
        return a + b

    def who(self, channel: Channel) -> int:
        return os.getpid()

    def echo(self, channel: Channel, payload: bytes) -> Any:
        channel.progress(payload)
        return channel.request(payload)

    def error(self, channel: Channel, kind: type[Exception], message: str) -> None:
        raise kind(message)

    def leave(self, channel: Channel, code: int) -> None:
        sys.exit(code)

    def die(self, channel: Channel, number: int) -> None:
        os.kill(os.getpid(), number)
        time.sleep(60)

    def die_until(self, channel: Channel, folder: str, deaths: int, number: int) -> int:
        """Dies ``deaths`` times, then succeeds."""
        count = len(list(Path(folder).iterdir()))
        if count < deaths:
            Path(folder, str(count)).touch()
            self.die(channel, number)
        return count

    def sleep(self, channel: Channel, seconds: float) -> float:
        time.sleep(seconds)
        return seconds

    def unpicklable(self, channel: Channel) -> Any:
        return lambda: None

    def later(self, channel: Channel, order: Order) -> Later:
        """Leaves all of an order for later."""
        return Later(lambda: self(order, channel))

    def span(self, channel: Channel, seconds: float) -> tuple[float, float]:
        start = time.monotonic()
        time.sleep(seconds)
        return start, time.monotonic()

    def die_later(self, channel: Channel, folder: str) -> Later:
        """Dies in its rest the first time, when the next task has begun."""
        return Later(lambda: time.sleep(0.3) or self.die_until(channel, folder, 1, signal.SIGKILL))


@pytest.fixture(autouse=True)
def ends_soon_and_leaves_no_process(request: pytest.FixtureRequest) -> Iterator[None]:
    start = time.monotonic()
    yield
    assert time.monotonic() - start < (30 if "[16]" in request.node.name else 10)  # sixteen interpreters start slowly
    assert multiprocessing.active_children() == []


def outcome(
    *tasks: Order, workers: int = 1, orders: tuple[Any, ...] = (), **options: Callable[[Any], Any]
) -> dict[Any, Any]:
    """The results of the tasks by id, in the order they came."""
    with WorkerPool(Doer, [orders] * workers) as pool:
        return dict(pool.run(enumerate(tasks), **options))


# --- Ordinary work ---


def test_every_task_exactly_once() -> None:
    with WorkerPool(Doer, [()] * 8) as pool:
        results = list(pool.run([(f"task-{n}", ("add", n, n)) for n in range(200)]))
        assert sorted(results) == sorted((f"task-{n}", 2 * n) for n in range(200))
        assert list(pool.run([])) == []
        again = dict(pool.run([(n, ("who",)) for n in range(40)]))
        assert set(again.values()) <= {handle.process.pid for handle in pool._handles}


@pytest.mark.parametrize("workers", [1, 2, 4, 16])
def test_any_number_of_workers(workers: int) -> None:
    """The ancestor hung with three or more. More workers than tasks is no matter either."""
    seen: list[bytes] = []
    tasks = [("echo", b"%d" % number) for number in range(10)] + [("later", ("add", number, 1)) for number in range(10)]
    results = outcome(*tasks, workers=workers, on_progress=seen.append, on_request=lambda asked: asked + b"!")
    assert results == {number: b"%d!" % number for number in range(10)} | {10 + n: n + 1 for n in range(10)}
    assert sorted(seen) == [b"%d" % number for number in range(10)]


def test_tasks_start_in_order_and_one_worker_keeps_it() -> None:
    assert list(outcome(*[("add", n, 1) for n in range(50)]).items()) == [(n, n + 1) for n in range(50)]


def test_big_payloads_both_ways() -> None:
    payload = os.urandom(10_000_000)
    seen: list[bytes] = []
    results = outcome(
        *[("echo", payload)] * 3, workers=2, on_progress=seen.append, on_request=lambda asked: asked + b"!"
    )
    assert seen == [payload] * 3
    assert list(results.values()) == [payload + b"!"] * 3


def test_a_slow_caller_blocks_no_worker() -> None:
    with WorkerPool(Doer, [()]) as pool:
        while not isinstance(pool.next_event(), Ready):
            pass
        pool.submit(0, "first", ("echo", bytes(3_000_000)))
        time.sleep(0.5)  # nobody looks, and yet the worker has come as far as its request
        assert isinstance(pool.next_event(0), Progress)
        assert pool.next_event(0) is not None
        assert pool.next_event(0) is None


# --- Exceptions ---


@pytest.mark.parametrize(("kind", "where"), [(InputError, "start"), (MachineError, "task")])
def test_our_errors_keep_class_and_message(kind: type[DistillError], where: str) -> None:
    order = ("error", kind, "data.jsonl:3: mend it")
    with pytest.raises(kind, match=r"^data.jsonl:3: mend it$") as caught:
        outcome(
            *([order] if where == "task" else [("add", 1, 2)] * 50), workers=2, orders=(order,) * (where == "start")
        )
    assert caught.value.exit_code == kind.exit_code


@pytest.mark.parametrize("where", ["start", "task"])
def test_other_exceptions_become_worker_errors_with_the_childs_traceback(where: str) -> None:
    order = ("error", KeyError, "first line\nsecond")
    with pytest.raises(WorkerError, match=r"^KeyError: 'first line\\nsecond'$") as caught:
        outcome(*([order] if where == "task" else [("add", 1, 2)]), orders=(order,) * (where == "start"))
    assert caught.value.exit_code == 1
    assert isinstance(caught.value, DistillError)
    assert "in error" in str(caught.value.__cause__)
    assert "raise kind(message)" in str(caught.value.__cause__)


def test_only_the_first_line_of_a_long_message() -> None:
    with pytest.raises(WorkerError, match=r"^RuntimeError: first$"):
        outcome(("error", RuntimeError, "first\nsecond"))


def test_results_and_tasks_that_cannot_be_pickled() -> None:
    with pytest.raises(WorkerError, match="pickle"):
        outcome(("unpicklable",))
    with pytest.raises((pickle.PicklingError, AttributeError)):
        outcome(("add", lambda: None, 1))
    with pytest.raises((pickle.PicklingError, AttributeError)):
        outcome(orders=(lambda: None,))


def test_an_error_does_not_wait_for_busy_workers() -> None:
    with pytest.raises(InputError):
        outcome(("sleep", 60), ("sleep", 60), ("error", InputError, "no"), workers=3)


def test_leaving_early_and_errors_of_the_caller_end_the_workers() -> None:
    with WorkerPool(Doer, [()] * 2) as pool:
        for _ in pool.run([("a", ("add", 1, 2)), ("b", ("sleep", 60))]):
            break
    with pytest.raises(ZeroDivisionError), WorkerPool(Doer, [()] * 2) as pool:
        for _ in pool.run([("a", ("add", 1, 2)), ("b", ("sleep", 60))]):
            1 / 0  # noqa: B018


# --- What a task leaves for later ---


def test_the_rest_of_a_task_runs_beside_the_next_one_and_beside_no_other_rest() -> None:
    results = outcome(*[("later", ("span", 0.3)), ("span", 0.2)] * 2, ("later", ("span", 0.1)))
    rests, works = [results[n] for n in (0, 2, 4)], [results[n] for n in (1, 3)]
    assert works[0][0] < rests[0][1] and works[1][0] < rests[1][1], "the next task didn't wait"
    assert all(first[1] <= second[0] for first, second in pairwise(rests)), "one rest at a time"


def test_a_rest_may_ask_while_the_worker_waits_for_a_task() -> None:
    tasks = [("later", ("echo", b"%d" % number)) for number in range(6)]
    assert outcome(*tasks, on_request=lambda asked: asked * 2) == {n: b"%d" % n * 2 for n in range(6)}


@pytest.mark.parametrize("after", [("sleep", 60), ("add", 1, 2)])
def test_an_error_in_a_rest_ends_the_run_at_once(after: Order) -> None:
    with pytest.raises(MachineError, match=r"^disk full$") as caught:
        outcome(("later", ("error", MachineError, "disk full")), after, ("sleep", 60))
    assert "in error" in str(caught.value.__cause__)
    with pytest.raises(WorkerError, match="pickle"):
        outcome(("later", ("unpicklable",)), after)


def test_a_kill_redoes_the_task_and_the_rest_before_it(tmp_path: Path) -> None:
    results = outcome(("add", 1, 1), ("die_later", str(tmp_path)), ("span", 0.6), ("add", 2, 2))
    assert results.keys() == {0, 1, 2, 3} and results[1] == 1 and results[3] == 4


def test_a_rest_that_always_kills_ends_the_run() -> None:
    with pytest.raises(MachineError, match="killed by SIGKILL, the second death on it"):
        outcome(("later", ("die", signal.SIGKILL)))
    with pytest.raises(MachineError, match="killed by SIGKILL, the second death on it"):
        outcome(("later", ("die", signal.SIGKILL)), ("sleep", 0.5), ("sleep", 0.5))


def test_leaving_early_ends_a_worker_that_has_a_rest() -> None:
    with WorkerPool(Doer, [()]) as pool:
        for _ in pool.run([("a", ("add", 1, 2)), ("b", ("later", ("sleep", 60))), ("c", ("add", 1, 2))]):
            break


# --- Exits and kills ---


@pytest.mark.parametrize(("where", "code"), [("start", 7), ("task", 0)])
def test_a_worker_that_ends_by_itself(where: str, code: int) -> None:
    order = ("leave", code)
    with pytest.raises(WorkerError, match=f"worker 0 ended by itself with exit code {code}"):
        outcome(*([order] if where == "task" else [("add", 1, 2)]), orders=(order,) * (where == "start"))


def test_a_kill_while_starting_ends_the_run() -> None:
    with pytest.raises(MachineError, match="worker 0 was killed by SIGKILL while starting; out of memory"):
        outcome(("add", 1, 2), orders=(("die", signal.SIGKILL),))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGABRT])
def test_a_killed_workers_task_is_done_again(tmp_path: Path, number: int) -> None:
    results = outcome(*[("add", n, 0) for n in range(5)], ("die_until", str(tmp_path), 1, number), ("add", 6, 0))
    assert results == {0: 0, 1: 1, 2: 2, 3: 3, 4: 4, 5: 1, 6: 6}


def test_two_kills_on_one_task_end_the_run(tmp_path: Path) -> None:
    with (
        pytest.raises(MachineError, match=r"^shard-7: worker \d was killed by SIGKILL.*out of memory") as caught,
        WorkerPool(Doer, [()] * 2) as pool,
    ):
        list(pool.run([("shard-7", ("die_until", str(tmp_path), 2, signal.SIGKILL))]))
    assert caught.value.exit_code == 3
    assert "\n" not in str(caught.value)
    with pytest.raises(MachineError, match="SIGSEGV, the second death on it; start again"):
        outcome(("die", signal.SIGSEGV))


def test_one_kill_on_each_of_many_tasks_is_survived(tmp_path: Path) -> None:
    folders = [tmp_path / str(n) for n in range(3)]
    for folder in folders:
        folder.mkdir()
    assert outcome(*[("die_until", str(f), 1, signal.SIGKILL) for f in folders], workers=2) == {0: 1, 1: 1, 2: 1}


def test_a_worker_killed_while_idle_is_replaced_when_needed() -> None:
    with WorkerPool(Doer, [()]) as pool:
        [(_, first)] = pool.run([("who", ("who",))])
        os.kill(first, signal.SIGKILL)
        [(_, second)] = pool.run([("who", ("who",))])
        assert second != first
        os.kill(second, signal.SIGKILL)
        event = pool.next_event(5.0)
        assert event == Died(0, -signal.SIGKILL, True, None)
        [(_, third)] = pool.run([("who", ("who",))])
        assert third != second


def test_a_worker_killed_while_another_works() -> None:
    with WorkerPool(Doer, [()] * 2) as pool:
        run = pool.run([("long", ("sleep", 1.0)), ("short", ("who",))])
        _, short = next(run)
        os.kill(short, signal.SIGKILL)
        assert list(run) == [("long", 1.0)]


@pytest.mark.parametrize("where", ["start", "task"])
def test_a_frozen_worker_is_noticed(where: str) -> None:
    order = ("die", signal.SIGSTOP)
    tasks: list[Any] = [("shard-3", ("add", 1, 2) if where == "start" else order)]
    # The big second task must not block the parent either.
    big: list[Any] = [("big", ("add", bytes(10_000_000), b""))]
    with (
        pytest.raises(MachineError, match="gave no sign of life for 3 s" + " in shard-3" * (where == "task")),
        WorkerPool(Doer, [(order,) * (where == "start")], silence_timeout=3.0, grace=1.0) as pool,
    ):
        list(pool.run(tasks + big))


def test_a_frozen_worker_can_be_sent_to() -> None:
    with WorkerPool(Doer, [()], grace=0.5) as pool:
        [(_, pid)] = pool.run([("who", ("who",))])
        os.kill(pid, signal.SIGSTOP)
        pool.submit(0, "big", ("add", bytes(10_000_000), b""))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100))
def test_random_kills_never_hang_or_lose_a_task(seed: int) -> None:
    random = Random(seed)
    workers = random.randint(1, 8)
    with WorkerPool(Doer, [()] * workers) as pool:

        def kill_some() -> None:
            for _ in range(random.randint(1, 3)):
                time.sleep(random.uniform(0.0, 2.0))
                random.choice(pool._handles).process.kill()

        killer = threading.Thread(target=kill_some)
        killer.start()
        try:
            results = dict(pool.run([(n, ("sleep", 0.02 + n * 1e-6)) for n in range(40)]))
            assert results == {n: 0.02 + n * 1e-6 for n in range(40)}
        except MachineError as error:
            assert "while starting" in str(error) or "second death" in str(error)
        finally:
            killer.join()


# --- The parent's end ---

PARENT = """
import os, sys, time
sys.path.insert(0, {root!r})
from tests.test_workers import Doer
from distill.workers import WorkerPool

if __name__ == "__main__":
    try:
        with WorkerPool(Doer, [()] * 3) as pool:
            print(*[handle.process.pid for handle in pool._handles], flush=True)
            if sys.argv[1] == "run":
                next(pool.run([("a", ("add", 1, 1)), ("b", ("sleep", 60)), ("c", ("sleep", 60))]))
            print("ready", flush=True)
            time.sleep(60)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
        sys.exit(130)
"""


def started_parent(tmp_path: Path, stage: str) -> tuple[subprocess.Popen[str], list[int]]:
    script = tmp_path / "parent.py"
    script.write_text(PARENT.format(root=str(ROOT)))
    parent = subprocess.Popen(
        [sys.executable, str(script), stage],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert parent.stdout is not None
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    assert len(pids) == 3
    assert parent.stdout.readline() == "ready\n"
    return parent, pids


def gone(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return True
    return state == "Z"  # ended, and waiting for whoever inherited it


def assert_all_gone(pids: list[int], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not all(map(gone, pids)):
        assert time.monotonic() < deadline, "workers outlive their parent"
        time.sleep(0.02)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
@pytest.mark.parametrize("stage", ["start", "run"])
def test_workers_end_when_the_parent_is_killed(tmp_path: Path, stage: str) -> None:
    parent, pids = started_parent(tmp_path, stage)
    parent.kill()
    assert_all_gone(pids, 2.0 if stage == "run" else 5.0)  # a process that still imports notices afterwards
    parent.communicate()


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
@pytest.mark.parametrize("stage", ["start", "run"])
def test_ctrl_c_leaves_no_worker_and_no_noise(tmp_path: Path, stage: str) -> None:
    parent, pids = started_parent(tmp_path, stage)
    os.killpg(parent.pid, signal.SIGINT)  # as a terminal does: the workers get it too
    out, err = parent.communicate(timeout=8)
    assert (out, err, parent.returncode) == ("interrupted\n", "", 130)
    assert all(map(gone, pids))
