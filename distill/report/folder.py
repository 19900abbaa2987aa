"""A run's folder: ``runs/<time>-<name>/`` with config.json, metrics.jsonl, summary.json and log.txt."""

import json
import os
import re
from collections.abc import Mapping
from datetime import datetime
from itertools import chain, count
from pathlib import Path
from typing import Any

from distill.files import make_folder, os_errors, write_durably
from distill.report.console import Console
from distill.report.summary import Summary, finite


class RunFolder:
    """What a run leaves for people and programs. Writing raises MachineError if the disk is full.

    metrics.jsonl has one JSON object a line, at least {"kind": "train" | "validation", "step": optimizer steps done}
    and the numbers of that kind (docs/summary.md lists them); what isn't finite is null.
    """

    def __init__(self, path: Path, console: Console) -> None:
        self.path = path
        self._metrics = path / "metrics.jsonl"
        with os_errors("write", self._metrics):
            self._metrics.touch()
        _point_latest(path)
        console.log_to(path / "log.txt")

    @classmethod
    def create(
        cls, runs: Path, name: str, config_text: str, console: Console, *, now: datetime | None = None
    ) -> "RunFolder":
        """A new folder under ``runs``, to which ``console`` logs from now on; ``config_text`` becomes config.json."""
        time = (now or datetime.now()).strftime("%Y-%m-%dT%H-%M-%S")
        safe_name = re.sub(r"[^A-Za-z0-9._-]+", "-", name)[:100]
        path = _make_unique(make_folder(runs) / f"{time}-{safe_name}")
        write_durably(path / "config.json", config_text.encode())
        return cls(path, console)

    @classmethod
    def reopen(cls, path: Path, console: Console) -> "RunFolder":
        """The folder of a run that goes on; ``cut_metrics`` then says from where."""
        return cls(path, console)

    def log(self, record: Mapping[str, Any]) -> None:
        """Appends one record to metrics.jsonl; a kill after this returns doesn't lose it."""
        assert isinstance(record["step"], int)
        line = json.dumps(finite(record), allow_nan=False)
        with os_errors("write", self._metrics), self._metrics.open("a", encoding="utf-8") as file:
            file.write(f"{line}\n")

    def sync(self) -> None:
        """Makes the records so far survive a power cut, before a state is saved that counts on them."""
        with os_errors("write", self._metrics), self._metrics.open("ab") as file:
            os.fsync(file.fileno())

    def cut_metrics(self, step: int) -> None:
        """Keeps the records up to ``step``: what came later will come again. A torn line goes too."""
        with os_errors("read", self._metrics):
            lines = self._metrics.read_bytes().splitlines(keepends=True)
        write_durably(self._metrics, b"".join(line for line in lines if _is_record_until(step, line)))

    def write_summary(self, summary: Summary) -> None:
        """Replaces summary.json."""
        text = json.dumps(summary.to_dict(), indent=2, allow_nan=False)
        write_durably(self.path / "summary.json", f"{text}\n".encode())


def _is_record_until(step: int, line: bytes) -> bool:
    try:
        record = json.loads(line) if line.endswith(b"\n") else None
    except ValueError:
        return False
    return isinstance(record, dict) and isinstance(record.get("step"), int) and record["step"] <= step


def _make_unique(path: Path) -> Path:
    """Creates ``path``, with ``-2``, ``-3`` … behind it if need be: two runs may start in the same second."""
    candidates = chain([path], (path.with_name(f"{path.name}-{number}") for number in count(2)))
    with os_errors("create the folder", path):
        return next(candidate for candidate in candidates if _make(candidate))


def _make(path: Path) -> bool:
    try:
        path.mkdir()
    except FileExistsError:
        return False
    return True


def _point_latest(path: Path) -> None:
    """Makes ``latest`` beside ``path`` a link to it; where there are no links, a text file that holds its name."""
    latest = path.with_name("latest")
    new = path.with_name(f".latest-{os.getpid()}.tmp")
    with os_errors("write", latest):
        new.unlink(missing_ok=True)
        try:
            new.symlink_to(path.name)
        except OSError:
            new.write_text(f"{path.name}\n")
        new.replace(latest)
