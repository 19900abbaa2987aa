"""Messages and progress: results to stdout, warnings and progress to stderr, everything to the run's log as well.

On a terminal progress is a bar, elsewhere a plain line now and then. Control characters never get through.
"""

import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from distill.files import os_errors

if TYPE_CHECKING:
    import rich.progress

_LINE_SECONDS = 10.0
_RATE_SECONDS = 60.0  # the rate shown is the mean over so long


class Progress:
    """Counts up to ``total``: how far it is, how fast, how long it will still take.

    ``show`` gets (done, state) at every advance, ``tell`` a whole line every ten seconds and one at the end.
    """

    def __init__(
        self,
        label: str,
        total: int | None,
        unit: str,
        *,
        done: int = 0,
        show: Callable[[int, str], None],
        tell: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._label, self._total, self._unit = label, total, unit
        self._show, self._tell, self._clock = show, tell, clock
        self._done = self._first = done
        self._start = self._told = clock()
        # (time, done) of the last minute. What comes before the first advance is start-up and says nothing of the rate.
        self._seen: deque[tuple[float, int]] = deque()

    def advance(self, count: int = 1, note: str = "") -> None:
        """Counts ``count`` more; ``note`` is shown behind: a loss, a name."""
        now = self._clock()
        self._done += count
        self._seen.append((now, self._done))
        while now - self._seen[0][0] > _RATE_SECONDS and len(self._seen) > 2:
            self._seen.popleft()
        state = self._state(note)
        self._show(self._done, state)
        if now - self._told >= _LINE_SECONDS:
            self._told = now
            self._tell(f"{self._label}: {state}")

    def finish(self) -> None:
        """Tells what became of it."""
        seconds = self._clock() - self._start
        rate = f", {_rate((self._done - self._first) / seconds)} {self._unit}/s" if seconds else ""
        self._tell(f"{self._label}: {self._count()} in {_duration(seconds)}{rate}")

    def _count(self) -> str:
        of_total = f" of {self._total:,}" if self._total is not None else ""
        return f"{self._done:,}{of_total} {self._unit}"

    def _state(self, note: str) -> str:
        parts = [self._count()]
        (then, before), (now, done) = self._seen[0], self._seen[-1]
        if now > then and done > before:
            rate = (done - before) / (now - then)
            parts.append(f"{_rate(rate)} {self._unit}/s")
            if self._total is not None:
                parts.append(f"{_duration(max(0, self._total - done) / rate)} left")
        return ", ".join([*parts, note] if note else parts)


class Console:
    """Says things. A stream that nobody reads any more is given up; the log goes on."""

    def __init__(self, out: TextIO | None = None, err: TextIO | None = None) -> None:
        self._out = out or sys.stdout
        self._err = err or sys.stderr
        self._log_path: Path | None = None
        self._early: list[str] = []  # what was said before there is a log
        self._bar: rich.progress.Progress | None = None

    def say(self, text: str) -> None:
        """A result or a milestone, to stdout."""
        self._print(self._out, text)
        self.log(text)

    def warn(self, text: str) -> None:
        """Something the user should know, to stderr; the run goes on."""
        self._print(self._err, f"warning: {text}")
        self.log(f"warning: {text}")

    def log(self, text: str) -> None:
        """Only to the log, each line with its time. Raises MachineError if the disk is full."""
        now = datetime.now().isoformat(timespec="seconds")
        lines = [f"{now} {line}\n" for line in _clean_lines(text)]
        if self._log_path is None:
            self._early += lines
        else:
            with os_errors("write", self._log_path), self._log_path.open("a", encoding="utf-8") as file:
                file.writelines(lines)

    def log_to(self, path: Path) -> None:
        """From now on the log is appended to this file; what was said before its first file comes first."""
        self._log_path = path
        with os_errors("write", path), path.open("a", encoding="utf-8") as file:
            file.writelines(self._early)
        self._early.clear()

    @contextmanager
    def progress(self, label: str, total: int | None, unit: str, *, done: int = 0) -> Iterator[Progress]:
        """Yields the Progress to advance, from ``done`` to ``total`` (None: unknown). They may nest."""
        outermost = self._bar is None and self._err.isatty()
        if outermost:
            self._bar = _start_bar(self._err)
        bar = self._bar
        task = bar.add_task(label, total=total, completed=done, state="") if bar is not None else None

        def show(done: int, state: str) -> None:
            if bar is not None and task is not None:
                bar.update(task, completed=done, state=state)

        def tell(line: str) -> None:
            if bar is None:
                self._print(self._err, line)
            self.log(line)

        progress = Progress(label, total, unit, done=done, show=show, tell=tell)
        try:
            yield progress
        finally:
            if bar is not None and task is not None:
                bar.remove_task(task)
            if bar is not None and outermost:
                bar.stop()
                self._bar = None
            progress.finish()

    def _print(self, stream: TextIO, text: str) -> None:
        encoding = stream.encoding or "utf-8"
        lines = [line.encode(encoding, "backslashreplace").decode(encoding) for line in _clean_lines(text)]
        try:
            if self._bar is not None and stream.isatty():
                for line in lines:
                    self._bar.console.print(line, markup=False, highlight=False, emoji=False, soft_wrap=True)
            else:
                stream.write("".join(f"{line}\n" for line in lines))
                stream.flush()
        except OSError:
            # A closed pipe or a lost terminal is no reason to end a long run. What is still buffered goes nowhere too.
            with Path(os.devnull).open("w") as nowhere:
                os.dup2(nowhere.fileno(), stream.fileno())


def _start_bar(stream: TextIO) -> "rich.progress.Progress":
    from rich.console import Console as Terminal
    from rich.progress import BarColumn, TextColumn
    from rich.progress import Progress as Bar

    bar = Bar(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.fields[state]}", markup=False),
        console=Terminal(file=stream),
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
    )
    bar.start()
    return bar


def _clean_lines(text: str) -> list[str]:
    """The lines, with whatever could move a cursor or ring a bell escaped."""
    return [
        "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in line)
        for line in text.splitlines()
    ]


def _rate(rate: float) -> str:
    return f"{rate:,.0f}" if rate >= 10 else f"{rate:.2g}"


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02} min"
