"""The parent's side: starting, feeding, watching and ending worker processes.

Two threads a worker keep its pipe moving: neither a full pipe nor a frozen process can block the parent.
"""

import multiprocessing
import pickle
import queue
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import resource_tracker
from multiprocessing.connection import wait
from typing import Any, Self

from distill.errors import MachineError
from distill.workers.child import (
    ANSWER,
    MESSAGE,
    Died,
    Done,
    Event,
    Failed,
    Free,
    Progress,
    Ready,
    Request,
    Worker,
    WorkerError,
    child_main,
)

_POLL = 0.5  # seconds
_BEATS = 60  # heartbeats in one silence timeout
_REAP_SECONDS = 10.0  # between a process closing its files and being gone

Task = tuple[Hashable, Any]  # task_id, which stands in messages, and what the worker gets


class _Handle:
    """One worker as the parent sees it. Only its threads touch the pipe, only the pool's user touches the process."""

    def __init__(
        self, index: int, beat_seconds: float, inbox: "queue.SimpleQueue[tuple[_Handle, bytes | None]]"
    ) -> None:
        context = multiprocessing.get_context("spawn")
        self.index = index
        self.started = False
        self.ended = False
        self.task: Task | None = None
        self.rest: Task | None = None  # the task before, if its end was left for later
        self.heard = False
        self.silence = 0.0  # seconds
        self._connection, child_end = context.Pipe()
        self.process = context.Process(target=child_main, args=(index, child_end, beat_seconds), daemon=True)
        with _interrupts_held():
            self.process.start()
        child_end.close()
        self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._threads = (
            threading.Thread(target=self._read, args=(inbox,), daemon=True),
            threading.Thread(target=self._write, daemon=True),
        )
        for thread in self._threads:
            thread.start()

    @property
    def idle(self) -> bool:
        """Whether it waits for a task, as far as its events tell."""
        return self.started and self.task is None and not self.ended

    @property
    def busy(self) -> bool:
        """Whether it has something to finish."""
        return self.task is not None or self.rest is not None

    def send(self, kind: bytes, data: bytes) -> None:
        """Queues a pickled message or answer; never waits."""
        self._outbox.put(kind + data)

    def dismiss(self) -> None:
        """Asks an idle worker to end; what a busy one is doing is of no use any more."""
        if self.idle and not self.busy:
            self.send(MESSAGE, _pickled(None))
        else:
            self.process.terminate()

    def close(self) -> None:
        """Ends the threads and frees the pipe, once the process has ended."""
        self._outbox.put(None)
        for thread in self._threads:
            thread.join(timeout=5.0)
        self._connection.close()

    def _read(self, inbox: "queue.SimpleQueue[tuple[_Handle, bytes | None]]") -> None:
        sources: list[Any] = [self._connection, self.process.sentinel]
        # No timeout: the sentinel fires when the process ends. What it said before is read first.
        while self._connection in wait(sources):
            try:
                data = self._connection.recv_bytes()
            except (EOFError, OSError):
                sources.remove(self._connection)
                continue
            self.heard = True
            if data:  # else a heartbeat
                inbox.put((self, data))
        inbox.put((self, None))

    def _write(self) -> None:
        while (data := self._outbox.get()) is not None:
            try:
                self._connection.send_bytes(data)
            except OSError:
                return  # the process is gone, as the reader reports


class _Waiting:
    """The tasks that nobody works on: those that have to be done again, then those that were never asked for."""

    def __init__(self, tasks: Iterable[Task]) -> None:
        self._again: deque[Task] = deque()
        self._tasks = iter(tasks)
        self._exhausted = False

    @property
    def more(self) -> bool:
        """Whether there may be another one."""
        return bool(self._again) or not self._exhausted

    def redo(self, task: Task) -> None:
        self._again.append(task)

    def take(self) -> Task | None:
        if self._again:
            return self._again.popleft()
        task = next(self._tasks, None)
        self._exhausted = task is None
        return task


class WorkerPool:
    """Worker processes, one for each entry of ``init_args``, each built by ``factory(*entry)`` inside its process.

    Factory and arguments must be picklable. On leaving the context idle workers are told to stop and busy ones are
    terminated; what is left after ``grace`` seconds is killed; all are joined.
    """

    def __init__(
        self,
        factory: Callable[..., Worker],
        init_args: Sequence[tuple[Any, ...]],
        *,
        silence_timeout: float = 120.0,
        grace: float = 5.0,
    ) -> None:
        self._starts = [_pickled((factory, arguments)) for arguments in init_args]
        self._silence_timeout = silence_timeout
        self._grace = grace
        self._inbox: queue.SimpleQueue[tuple[_Handle, bytes | None]] = queue.SimpleQueue()
        self._handles: list[_Handle] = []
        self._watched = time.monotonic()

    def __enter__(self) -> Self:
        try:
            for worker in range(len(self._starts)):
                self._handles.append(self._spawn(worker))
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self._close()

    # --- All tasks --------------------------------------------------------------------------------------------------

    def run(
        self,
        tasks: Iterable[Task],
        *,
        on_progress: Callable[[Any], None] | None = None,
        on_request: Callable[[Any], Any] | None = None,
        on_wait: Callable[[], None] | None = None,
    ) -> Iterator[tuple[Hashable, Any]]:
        """Yields (task_id, result) of every task once, as they finish; they are started in the order given.

        ``tasks`` is asked for the next one only when a worker is free, so a generator can decide by what came back.

        What a worker had when it was killed by a signal, its task and perhaps the rest of the one before, is done again
        in a new worker. Raises what a worker raised (see
        ``next_event``); MachineError if a worker is killed while starting, or twice on one task; WorkerError if a
        worker ends by itself. The callbacks run in the caller's thread; those for progress and requests get the
        payloads, ``on_wait`` is called twice a second at least.
        """
        assert self._handles, "no workers"
        waiting = _Waiting(tasks)
        killers: set[Hashable] = set()
        for handle in [handle for handle in self._handles if handle.ended]:
            self.respawn(handle.index)
        while waiting.more or any(handle.busy for handle in self._handles):
            self._hand_out(waiting)
            event = self.next_event()
            if on_wait is not None:
                on_wait()
            match event:
                case Done():
                    self._hand_out(waiting)  # before the caller takes its time over the result
                    yield event.task_id, event.result
                case Progress() if on_progress is not None:
                    on_progress(event.payload)
                case Request():
                    assert on_request is not None, "the workers ask, but nobody answers"
                    self.reply(event.worker, on_request(event.payload))
                case Died():
                    _check_worth_redoing(event, killers)
                    killers |= {task[0] for task in _suspects(event)}
                    for task in (event.rest, event.task):
                        if task is not None:
                            waiting.redo(task)
                    if waiting.more:
                        self.respawn(event.worker)

    def _hand_out(self, waiting: "_Waiting") -> None:
        for worker in self.idle():
            task = waiting.take()
            if task is not None:
                self.submit(worker, *task)

    # --- One event at a time ----------------------------------------------------------------------------------------

    def next_event(self, timeout: float = _POLL) -> Event | None:
        """What a worker reports next; None if there is nothing within ``timeout`` seconds.

        Raises what a worker raised, a DistillError with its class and message, anything else as WorkerError; and
        MachineError if a worker gave no sign of life for ``silence_timeout`` seconds.
        """
        self._watch_silence()
        try:
            handle, data = self._inbox.get(timeout=timeout)
        except queue.Empty:
            return None
        if data is None:
            return self._bury(handle)
        event: Ready | Progress | Request | Free | Done | Failed = pickle.loads(data)
        if isinstance(event, Failed):
            raise event.error()
        if isinstance(event, Ready):
            handle.started = True
        elif isinstance(event, Free):
            handle.task, handle.rest = None, handle.task
        elif isinstance(event, Done) and handle.rest is not None and handle.rest[0] == event.task_id:
            handle.rest = None
        elif isinstance(event, Done):
            handle.task = None
        return event

    def idle(self) -> list[int]:
        """The workers that wait for a task; they may have the rest of the one before to finish."""
        return [handle.index for handle in self._handles if handle.idle]

    def submit(self, worker: int, task_id: Hashable, task: Any) -> None:
        """Gives an idle worker its next task."""
        handle = self._handles[worker]
        assert handle.idle, f"worker {worker} isn't idle"
        handle.send(MESSAGE, _pickled((task_id, task)))
        handle.task = (task_id, task)

    def reply(self, worker: int, answer: Any) -> None:
        """Answers a worker's request."""
        self._handles[worker].send(ANSWER, _pickled(answer))

    def respawn(self, worker: int) -> None:
        """Starts a worker anew in place of one that died."""
        self._handles[worker].close()
        self._handles[worker] = self._spawn(worker)

    # --- Processes --------------------------------------------------------------------------------------------------

    def _spawn(self, worker: int) -> _Handle:
        handle = _Handle(worker, self._silence_timeout / _BEATS, self._inbox)
        handle.send(MESSAGE, self._starts[worker])
        return handle

    def _bury(self, handle: _Handle) -> Died:
        handle.process.join(_REAP_SECONDS)
        assert handle.process.exitcode is not None, "the sentinel said that it ended"
        handle.ended = True
        died = Died(handle.index, handle.process.exitcode, handle.started, handle.task, handle.rest)
        handle.task = handle.rest = None
        return died

    def _watch_silence(self) -> None:
        now = time.monotonic()
        # At most a second a look: while the parent itself was stopped, a worker's silence says nothing.
        elapsed, self._watched = min(now - self._watched, 1.0), now
        for handle in self._handles:
            handle.silence = 0.0 if handle.heard or handle.ended else handle.silence + elapsed
            handle.heard = False
            if handle.silence > self._silence_timeout:
                handle.process.kill()
                task = handle.task or handle.rest
                during = f" in {task[0]}" if task else ""
                raise MachineError(
                    f"worker {handle.index} gave no sign of life for {handle.silence:.0f} s{during}: it is frozen, "
                    "or the machine is overloaded; start again"
                )

    def _close(self) -> None:
        for end in (_Handle.dismiss, lambda handle: handle.process.terminate(), lambda handle: handle.process.kill()):
            living = [handle for handle in self._handles if handle.process.exitcode is None]
            deadline = time.monotonic() + self._grace
            for handle in living:
                end(handle)
            for handle in living:
                handle.process.join(max(0.0, deadline - time.monotonic()))
        for handle in self._handles:
            handle.close()


def _suspects(death: Died) -> list[Task]:
    """The tasks that may have killed a worker: the one that it worked on, else the one that it was finishing."""
    return [task for task in (death.task, death.rest) if task is not None][:1]


def _check_worth_redoing(death: Died, killers: set[Hashable]) -> None:
    """Raises unless the dead worker's tasks should be done once more."""
    suspects = [task[0] for task in _suspects(death)]
    during = "".join(f"{task_id}: " for task_id in suspects)
    while_starting = "" if death.started else " while starting"
    if death.exitcode >= 0:
        raise WorkerError(
            f"{during}worker {death.worker} ended by itself with exit code {death.exitcode}{while_starting}"
        )
    name = _signal_name(-death.exitcode)
    advice = "out of memory? free some or run fewer workers, then start again" if name == "SIGKILL" else "start again"
    if not death.started:
        raise MachineError(f"worker {death.worker} was killed by {name}{while_starting}; {advice}")
    if killers.intersection(suspects):
        raise MachineError(f"{during}worker {death.worker} was killed by {name}, the second death on it; {advice}")


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _pickled(message: Any) -> bytes:
    """Plain pickle: multiprocessing's own would put tensors into shared memory."""
    return pickle.dumps(message, pickle.HIGHEST_PROTOCOL)


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """Holds Ctrl-C back while a child starts: the child inherits the mask and never sees one, not even early."""
    if sys.platform == "win32":
        yield
        return
    resource_tracker.ensure_running()  # started later, it would lift the mask
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
