"""Passes metrics on to Weights & Biases, from a process of its own: nothing that happens there can touch the run."""

import functools
import netrc
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from distill.errors import DistillError
from distill.report.console import Console
from distill.report.folder import RunFolder
from distill.workers import Channel, Died, Progress, WorkerPool

_MOST_WAITING = 10_000  # records
_FINISH_SECONDS = 20.0
_GRACE_SECONDS = 2.0

_Record = tuple[dict[str, float], int]


class Tracker(Protocol):
    """Somewhere else where metrics go."""

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Passes on the metrics after ``step`` optimizer steps."""

    def close(self) -> None:
        """Ends it; whatever is still under way has its last chance."""


class NoTracker:
    """Nowhere."""

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Does nothing."""

    def close(self) -> None:
        """Does nothing."""


@contextmanager
def open_tracker(name: str | None, config: Mapping[str, Any], folder: RunFolder, console: Console) -> Iterator[Tracker]:
    """The tracker of a run: wandb under the run's ``name``, or nowhere if that is None."""
    tracker = NoTracker() if name is None else WandbTracker(name, config, folder.path, warn=console.warn)
    try:
        yield tracker
    finally:
        tracker.close()


def wandb_run_name(comment: str, model_name: str, lr: float, now: datetime) -> str:
    """``{comment} ModelName lr(lr) (Date/Time)``."""
    return f"{comment} {model_name} lr({lr}) ({now:%d.%m.%Y / %H:%M:%S})".strip()


class WandbTracker:
    """Hands records to a process that runs wandb. Never waits but in ``close``, and then 20 seconds at most.

    The first failure is told in one warning and ends the tracking, not the run. Records that wandb is too slow for are
    dropped and counted. wandb's files and output go into ``folder``/wandb.
    """

    def __init__(self, name: str, config: Mapping[str, Any], folder: Path, *, warn: Callable[[str], None]) -> None:
        self._warn = warn
        self._waiting: deque[_Record | None] = deque()
        self._dropped = 0
        self._stack = ExitStack()
        self._pool: WorkerPool | None = None
        try:
            pool = WorkerPool(_WandbSink, [(name, dict(config), folder)], grace=_GRACE_SECONDS)
            self._pool = self._stack.enter_context(pool)
        except OSError as error:
            self._give_up(f"no process: {error.strerror}")

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Queues a record."""
        if self._pool is None:
            return
        if len(self._waiting) < _MOST_WAITING:
            self._waiting.append((dict(metrics), step))
        else:
            self._dropped += 1
        self._pump(0.0)

    def close(self) -> None:
        """Gives wandb its time to finish."""
        self._waiting.append(None)
        deadline = time.monotonic() + _FINISH_SECONDS
        with self._stack:
            while self._pool is not None and (self._waiting or not self._pool.idle()):
                if time.monotonic() > deadline:
                    self._give_up(f"not finished after {_FINISH_SECONDS:g} s")
                self._pump(0.1)
        if self._dropped:
            self._warn(f"wandb: too slow, {self._dropped:,} records were dropped; metrics.jsonl has them all")

    def _pump(self, timeout: float) -> None:
        """Hands over what waits if the process is idle, and hears what it says, until it says nothing more."""
        try:
            while self._pool is not None:
                if self._waiting and self._pool.idle():
                    self._pool.submit(0, "records", list(self._waiting))
                    self._waiting.clear()
                event = self._pool.next_event(timeout)
                if isinstance(event, Died):
                    self._give_up(f"its process ended with exit code {event.exitcode}")
                elif isinstance(event, Progress):
                    self._warn(f"wandb: {event.payload}")
                elif event is None:
                    return
        except DistillError as error:
            self._give_up(str(error))

    def _give_up(self, why: str) -> None:
        self._pool = None
        self._waiting.clear()
        self._stack.close()
        self._warn(f"wandb: {why}; the run goes on without it")


class _WandbSink:
    """Lives in the process of its own: one wandb run."""

    def __init__(self, name: str, config: dict[str, Any], folder: Path) -> None:
        (folder / "wandb").mkdir(exist_ok=True)
        # wandb and what it starts have nothing to ask and, but in a file, nothing to say.
        with Path(os.devnull).open("rb") as nothing, (folder / "wandb" / "output.txt").open("ab") as output:
            for descriptor, file in ((0, nothing), (1, output), (2, output)):
                os.dup2(file.fileno(), descriptor)
        import wandb

        self._note = ""
        settings = wandb.Settings(silent=True, console="off", disable_git=True, save_code=False, init_timeout=60.0)
        begin = functools.partial(
            wandb.init, project="distill", name=name, config=config, dir=folder, settings=settings
        )
        try:
            self._run = begin(mode="offline" if must_be_offline(os.environ) else None)
        except wandb.errors.Error as error:
            reason = str(error).partition("\n")[0].rstrip(".")
            self._note = f"{reason}; it stays offline, `wandb sync` can send {folder / 'wandb'} later"
            self._run = begin(mode="offline")

    def __call__(self, records: list[_Record | None], channel: Channel) -> None:
        """Logs the records; None finishes the run."""
        if self._note:
            channel.progress(self._note)
            self._note = ""
        for record in records:
            if record is None:
                self._run.finish()
            else:
                self._run.log(record[0], step=record[1])


def must_be_offline(environment: Mapping[str, str]) -> bool:
    """Whether wandb would ask for a key: there is none for its server, and the user said nothing else by WANDB_MODE."""
    if environment.get("WANDB_API_KEY") or "WANDB_MODE" in environment:
        return False
    host = urlsplit(environment.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    try:
        return netrc.netrc(Path(environment.get("NETRC", "~/.netrc")).expanduser()).authenticators(host) is None
    except (OSError, RuntimeError, netrc.NetrcParseError):  # no such file, no home, not readable as one
        return True
