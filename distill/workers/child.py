"""What runs inside a worker process, and the events it reports.

The main thread works. One thread sends heartbeats, so that the parent notices a frozen process; one listens, so that
the parent can always send, and ends the process the moment the parent is gone.
"""

import multiprocessing
import os
import pickle
import queue
import signal
import threading
import traceback
from collections.abc import Hashable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any, Protocol

from distill.errors import DistillError, MachineError, machine_failed

_ANSWER_TIMEOUT = 600.0  # seconds


class WorkerError(DistillError):
    """An unexpected exception or exit of a worker. Its cause, if there is one, holds the worker's own traceback."""


class ChildTraceback(Exception):  # noqa: N818 - it carries a text and is never raised
    """The traceback of a worker's exception, as text."""


class Worker(Protocol):
    """What a factory builds inside the process."""

    def __call__(self, task: Any, channel: "Channel", /) -> Any:
        """Does one task and returns its result. Both cross the pipe, so both must be picklable."""
        ...


# --- Events ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Ready:
    """The worker is built and waits for its first task."""

    worker: int


@dataclass(frozen=True, slots=True)
class Progress:
    """Something the worker says without waiting for an answer."""

    worker: int
    payload: Any


@dataclass(frozen=True, slots=True)
class Request:
    """The worker waits for an answer."""

    worker: int
    payload: Any


@dataclass(frozen=True, slots=True)
class Done:
    """The result of one task."""

    worker: int
    task_id: Hashable
    result: Any


@dataclass(frozen=True, slots=True)
class Failed:
    """The worker raised; the process ends. Travels as text, because many exceptions don't survive pickling."""

    kind: type[DistillError]
    message: str
    trace: str

    @classmethod
    def describing(cls, error: Exception) -> "Failed":
        """Keeps class and message of our own errors; makes of any other a WorkerError in one line."""
        trace = "".join(traceback.format_exception(error))
        if isinstance(error, DistillError):
            return cls(type(error), str(error), trace)
        first_line = next(iter(str(error).splitlines()), "")
        return cls(
            MachineError if machine_failed(error) else WorkerError, f"{type(error).__name__}: {first_line}", trace
        )

    def error(self) -> DistillError:
        """The exception to raise in the parent."""
        error = self.kind(self.message)
        error.__cause__ = ChildTraceback(self.trace)
        return error


@dataclass(frozen=True, slots=True)
class Died:
    """The worker's process ended: by itself (exitcode >= 0) or by the signal -exitcode. ``task`` is what it had."""

    worker: int
    exitcode: int
    started: bool
    task: tuple[Hashable, Any] | None


Event = Ready | Progress | Request | Done | Died


# --- The process ----------------------------------------------------------------------------------------------------


class Channel:
    """A worker's line to its parent."""

    def __init__(self, worker: int, connection: "Connection[Any, Any]", beat_seconds: float) -> None:
        self._worker = worker
        self._connection = connection
        self._sending = threading.Lock()
        self._inbox: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._beating = threading.Thread(target=self._beat, args=(beat_seconds,), daemon=True)
        self._beating.start()
        threading.Thread(target=self._listen, daemon=True).start()

    def progress(self, payload: Any) -> None:
        """Tells the parent something picklable, without waiting."""
        self.send(Progress(self._worker, payload))

    def request(self, payload: Any) -> Any:
        """Asks the parent and returns its answer. Raises MachineError if none comes within ten minutes."""
        self.send(Request(self._worker, payload))
        return self.receive(_ANSWER_TIMEOUT)

    def send(self, event: Ready | Progress | Request | Done | Failed) -> None:
        """Sends one event. By plain pickle: multiprocessing's own would put tensors into shared memory."""
        self._send_bytes(pickle.dumps(event, pickle.HIGHEST_PROTOCOL))

    def receive(self, timeout: float | None = None) -> Any:
        """The parent's next message. Safe without a timeout: the listener ends the process if the parent is gone."""
        try:
            return pickle.loads(self._inbox.get(timeout=timeout))
        except queue.Empty:
            raise MachineError(f"worker {self._worker} got no answer for {timeout:.0f} s; start again") from None

    def close(self) -> None:
        """Stops the heartbeats, so that nothing writes while the interpreter shuts down."""
        self._closing.set()
        self._beating.join()

    def _send_bytes(self, data: bytes) -> None:
        try:
            with self._sending:
                self._connection.send_bytes(data)
        except OSError:
            _end_this_process()

    def _beat(self, seconds: float) -> None:
        while not self._closing.wait(seconds):
            self._send_bytes(b"")

    def _listen(self) -> None:
        parent = multiprocessing.parent_process()
        assert parent is not None, "a channel lives in a child"
        while True:
            # No timeout: the sentinel fires when the parent ends, however it ends.
            if parent.sentinel in wait([self._connection, parent.sentinel]):
                _end_this_process()
            try:
                self._inbox.put(self._connection.recv_bytes())
            except (EOFError, OSError):
                _end_this_process()


def _end_this_process() -> None:
    """The parent is gone. Nobody wants the work, and no clean-up may hold memory or device any longer."""
    os.kill(os.getpid(), signal.SIGKILL)


def child_main(worker: int, connection: "Connection[Any, Any]", beat_seconds: float) -> None:
    """The life of a worker process. Its messages: (factory, arguments), then (task_id, task) each, then None."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process; the parent decides
    channel = Channel(worker, connection, beat_seconds)
    try:
        factory, arguments = channel.receive()
        work: Worker = factory(*arguments)
        channel.send(Ready(worker))
        while (message := channel.receive()) is not None:
            task_id, task = message
            channel.send(Done(worker, task_id, work(task, channel)))
    except Exception as error:
        channel.send(Failed.describing(error))
        raise SystemExit(1) from error
    finally:
        channel.close()
