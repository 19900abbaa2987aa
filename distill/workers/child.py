"""What runs inside a worker process, and the events it reports.

The main thread works. One thread sends heartbeats, so that the parent notices a frozen process; one listens, so that
the parent can always send, and ends the process the moment the parent is gone; one does what a task left for later.
"""

import multiprocessing
import os
import pickle
import queue
import signal
import threading
import traceback
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any, Protocol

from distill.errors import DistillError, MachineError, machine_failed

_ANSWER_TIMEOUT = 600.0  # seconds

# The first byte of what the parent sends: a task or the like, or the answer to a request.
MESSAGE = b"m"
ANSWER = b"a"


class WorkerError(DistillError):
    """An unexpected exception or exit of a worker. Its cause, if there is one, holds the worker's own traceback."""


class ChildTraceback(Exception):  # noqa: N818 - it carries a text and is never raised
    """The traceback of a worker's exception, as text."""


class Worker(Protocol):
    """What a factory builds inside the process."""

    def __call__(self, task: Any, channel: "Channel", /) -> Any:
        """Does one task and returns its result. Both cross the pipe, so both must be picklable.

        Or it returns a ``Later``, and the next task may begin before this one is done.
        """
        ...


@dataclass(frozen=True, slots=True)
class Later:
    """The rest of a task: ``finish`` returns its result.

    It runs in a thread beside the next task, never beside the rest of another one.
    """

    finish: Callable[[], Any]


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
class Free:
    """The worker left the rest of its task for later and waits for the next one."""

    worker: int


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
    def describing(cls, error: BaseException) -> "Failed":
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
    """The worker's process ended: by itself (exitcode >= 0) or by the signal -exitcode.

    ``task`` is what it worked on, ``rest`` the one before, if that wasn't finished.
    """

    worker: int
    exitcode: int
    started: bool
    task: tuple[Hashable, Any] | None
    rest: tuple[Hashable, Any] | None = None


Event = Ready | Progress | Request | Free | Done | Died


# --- The process ----------------------------------------------------------------------------------------------------


class Channel:
    """A worker's line to its parent."""

    def __init__(self, worker: int, connection: "Connection[Any, Any]", beat_seconds: float) -> None:
        self._worker = worker
        self._connection = connection
        self._sending = threading.Lock()
        self._asking = threading.Lock()
        self._messages: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._beating = threading.Thread(target=self._beat, args=(beat_seconds,), daemon=True)
        self._beating.start()
        threading.Thread(target=self._listen, daemon=True).start()

    def progress(self, payload: Any) -> None:
        """Tells the parent something picklable, without waiting."""
        self.send(Progress(self._worker, payload))

    def request(self, payload: Any) -> Any:
        """Asks the parent and returns its answer. Raises MachineError if none comes within ten minutes."""
        with self._asking:
            self.send(Request(self._worker, payload))
            try:
                return pickle.loads(self._answers.get(timeout=_ANSWER_TIMEOUT))
            except queue.Empty:
                raise MachineError(
                    f"worker {self._worker} got no answer for {_ANSWER_TIMEOUT:.0f} s; start again"
                ) from None

    def send(self, event: Ready | Progress | Request | Free | Done | Failed) -> None:
        """Sends one event. By plain pickle: multiprocessing's own would put tensors into shared memory."""
        self._send_bytes(pickle.dumps(event, pickle.HIGHEST_PROTOCOL))

    def receive(self) -> Any:
        """The parent's next message. Safe without a timeout: the listener ends the process if the parent is gone."""
        return pickle.loads(self._messages.get())

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
                data = self._connection.recv_bytes()
            except (EOFError, OSError):
                _end_this_process()
            (self._answers if data[:1] == ANSWER else self._messages).put(data[1:])


def _end_this_process() -> None:
    """The parent is gone. Nobody wants the work, and no clean-up may hold memory or device any longer."""
    os.kill(os.getpid(), signal.SIGKILL)


class _Rests:
    """Does the rests of tasks in a thread, one at a time."""

    def __init__(self, worker: int, channel: Channel) -> None:
        self._worker = worker
        self._channel = channel
        self._thread = ThreadPoolExecutor(1)
        self._pending: Future[None] | None = None

    def begin(self, task_id: Hashable, rest: Later) -> None:
        """Starts with the rest of a task, once the one before is done. Raises what that one raised."""
        self.wait()
        self._channel.send(Free(self._worker))
        self._pending = self._thread.submit(self._finish, task_id, rest)
        self._pending.add_done_callback(self._report)

    def wait(self) -> None:
        """Returns when nothing is left. Raises what the rest raised."""
        if self._pending is not None:
            self._pending.result()

    def _finish(self, task_id: Hashable, rest: Later) -> None:
        self._channel.send(Done(self._worker, task_id, rest.finish()))

    def _report(self, done: "Future[None]") -> None:
        """At once: the main thread may be busy with the next task for long."""
        error = done.exception()
        if error is not None:
            self._channel.send(Failed.describing(error))


def child_main(worker: int, connection: "Connection[Any, Any]", beat_seconds: float) -> None:
    """The life of a worker process. Its messages: (factory, arguments), then (task_id, task) each, then None."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process; the parent decides
    channel = Channel(worker, connection, beat_seconds)
    try:
        factory, arguments = channel.receive()
        work: Worker = factory(*arguments)
        channel.send(Ready(worker))
        rests = _Rests(worker, channel)
        while (message := channel.receive()) is not None:
            task_id, task = message
            result = work(task, channel)
            if isinstance(result, Later):
                rests.begin(task_id, result)
            else:
                channel.send(Done(worker, task_id, result))
        rests.wait()
    except Exception as error:
        channel.send(Failed.describing(error))
        raise SystemExit(1) from error
    finally:
        channel.close()
