"""The wrong configurations of bad_configs/: each one line, exit code 2, before anything heavy is imported."""

import resource
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from distill.cli import main

ROOT = Path(__file__).parent.parent
FOLDER = Path(__file__).parent / "bad_configs"
FILES = [path for path in sorted(FOLDER.iterdir()) if path.read_text(encoding="utf-8").startswith(("// ", "# "))]


def expected(path: Path) -> str:
    """The line that a file says of itself on its first line, in a comment."""
    return path.read_text(encoding="utf-8").splitlines()[0].removeprefix("//").removeprefix("#").strip()


def test_there_are_sixty_at_least() -> None:
    assert len(FILES) >= 60


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_one_line(path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(FOLDER)
    assert main(["--config", path.name]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err == expected(path) + "\n"
    assert printed.err.startswith("error: ") and path.name in printed.err


def test_the_process_says_it_within_a_second() -> None:
    # Processor time, not the clock's: other tests run beside this one.
    seconds = []
    for path in FILES[::15]:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        words = [sys.executable, str(ROOT / "run.py"), "--config", path.name]
        done = subprocess.run(words, cwd=FOLDER, capture_output=True, text=True, check=False)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        assert (done.returncode, done.stdout, done.stderr) == (2, "", expected(path) + "\n")
    assert statistics.median(seconds) < 1.0
