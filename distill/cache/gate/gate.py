"""The parent's side of the gate: one child that checks file after file, and is replaced when one of them breaks it."""

import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from distill.cache.gate.child import child_environment, printable
from distill.cache.index import shard_info
from distill.cache.shard import ShardInfo
from distill.cache.strict import FileState, check_fields, is_text, parse_json
from distill.errors import InputError, MachineError

WALL_SECONDS = 300.0
"""A backstop for a file whose reading waits instead of computing; the child limits its own processor time."""
_START_SECONDS = 60.0
_REPLY_BYTES = 1 << 16
_STOP_SECONDS = 5.0
_COMMAND = ("-m", "distill.cache.gate")


class RefusedShardError(InputError):
    """A shard that is damaged or hostile: no later try will read it."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What a shard that passed turned out to be: its index entry and the layer that it says it belongs to."""

    info: ShardInfo
    layer: dict[str, Any]


class Gate:
    """Checks shards in a child process with limits on memory and time. Threads may share it.

    The child starts with the first file and ends with ``close``, or by itself when this process ends.
    """

    def __init__(self) -> None:
        self._child: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the child."""
        with self._lock:
            self._end_child()

    def check(self, path: Path) -> Finding:
        """Check every structure and every value of the shard ``path``.

        Raises RefusedShardError, naming the file and the object in it, if it is damaged or hostile; InputError if it is
        of another version or took too long; MachineError if no child can be started or the disk fails.
        """
        with self._lock:
            before = FileState.of(path)
            reply = self._ask(path)
            if FileState.of(path) != before:
                raise InputError(f"{path}: changed while it was checked; start again when nothing writes to it")
        return _finding(path, reply)

    def _ask(self, path: Path) -> bytes:
        question = json.dumps(os.fspath(path.absolute())).encode() + b"\n"
        for _ in range(2):
            child = self._started()
            try:
                _write(child, question)
                return _line(child, WALL_SECONDS)
            except TimeoutError:
                self._end_child(kill=True)
                raise InputError(f"{path}: not checked within {WALL_SECONDS:g} seconds; move it away") from None
            except (EOFError, BrokenPipeError):
                code = self._end_child()
                if code != -signal.SIGKILL:  # which no file does to its reader: tried once more
                    why = f"checking it broke the checker ({_ending(code)})"
                    raise RefusedShardError(f"{path}: refused: {why}") from None
        raise MachineError(f"{path}: the process that checks it is killed again and again; is there enough memory?")

    def _started(self) -> subprocess.Popen[bytes]:
        if self._child is not None and self._child.poll() is None:
            return self._child
        self._end_child()
        try:
            self._child = subprocess.Popen(
                [sys.executable, *_COMMAND],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                cwd="/",
                env=child_environment(),
                start_new_session=True,  # an interrupt at the terminal is ours to handle
            )
            ready = _line(self._child, _START_SECONDS)
        except (OSError, EOFError, TimeoutError) as error:
            self._end_child()
            raise MachineError(f"the process that checks shards cannot start: {error}") from error
        assert ready == b'"ready"', ready
        return self._child

    def _end_child(self, *, kill: bool = False) -> int | None:
        child, self._child = self._child, None
        if child is None:
            return None
        assert child.stdin is not None and child.stdout is not None
        if kill:
            child.kill()
        with suppress(BrokenPipeError):  # it has ended already
            child.stdin.close()
        child.stdout.close()
        try:
            return child.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            child.kill()
            return child.wait()


def _write(child: "subprocess.Popen[bytes]", line: bytes) -> None:
    assert child.stdin is not None
    child.stdin.write(line)
    child.stdin.flush()


def _line(child: subprocess.Popen[bytes], seconds: float) -> bytes:
    """The child's next line; TimeoutError when it doesn't come in time, EOFError when the child has ended."""
    assert child.stdout is not None
    descriptor, deadline = child.stdout.fileno(), time.monotonic() + seconds
    received = b""
    while not received.endswith(b"\n"):
        if not select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))[0]:
            raise TimeoutError("no answer in time")
        part = os.read(descriptor, _REPLY_BYTES)
        received += part
        if not part or len(received) > _REPLY_BYTES:
            raise EOFError("it ended")
    return received.rstrip(b"\n")


def _finding(path: Path, reply: bytes) -> Finding:
    """The child's answer. It read a stranger's file, so it is not trusted either."""
    try:
        value = parse_json(reply, f"{path}: refused: the checker's answer")
    except InputError as error:
        raise RefusedShardError(str(error)) from error
    kind = value.get("kind") if isinstance(value, dict) else None
    if kind == "passed":
        check_fields(value, {"kind": is_text, "info": _is_object, "layer": _is_object}, str(path))
        return Finding(shard_info(value["info"], str(path)), value["layer"])
    reason = printable(str(value.get("reason") if isinstance(value, dict) else None))
    match kind:
        case "other":
            raise InputError(f"{path}: {reason}")
        case "machine":
            raise MachineError(f"{path}: cannot be read: {reason}")
    raise RefusedShardError(f"{path}: refused: {reason}")


def _is_object(value: Any) -> bool:
    return isinstance(value, dict)


def _ending(code: int | None) -> str:
    if code == -signal.SIGXCPU:
        return "it took too long"
    return f"exit code {code}" if code is None or code >= 0 else f"signal {-code}"
