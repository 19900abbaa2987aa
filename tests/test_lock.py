"""Locks: one owner at a time, the dead don't hold, another host is never presumed dead."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from distill.errors import InputError, MachineError
from distill.lock import lock

HOLDER = """
import sys, time
from pathlib import Path
from distill.lock import lock
with lock(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


def start_holder(path: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, "-c", HOLDER, str(path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    return process


def test_a_second_owner_is_told_who_the_first_is(tmp_path: Path) -> None:
    path = tmp_path / "layer" / "layer.lock"
    holder = start_holder(path)
    with pytest.raises(InputError, match=f"in use by process {holder.pid}"), lock(path):
        pass
    os.kill(holder.pid, signal.SIGKILL)
    holder.wait()
    time.sleep(0.05)
    with lock(path):  # the dead hold nothing
        owner = json.loads(path.read_text())
        assert owner["pid"] == os.getpid() and set(owner) == {"host", "boot", "pid", "start"}
    assert path.read_text() == ""


def test_a_lock_is_given_back_after_an_error(tmp_path: Path) -> None:
    path = tmp_path / "l"
    with pytest.raises(RuntimeError), lock(path):
        raise RuntimeError
    with lock(path):
        pass


def test_another_host_is_never_presumed_dead(tmp_path: Path) -> None:
    path = tmp_path / "l"
    path.write_text(json.dumps({"host": "elsewhere", "boot": "b", "pid": 1, "start": "2"}))
    with pytest.raises(InputError, match="held by process 1 on elsewhere"), lock(path):
        pass
    path.write_text('{"host": "torn')
    with lock(path):
        pass


def test_a_file_system_without_locks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Report A4: on network disks locking failed with errno 37."""

    def refuse(*_: object) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr("fcntl.flock", refuse)
    with pytest.raises(MachineError, match="no locks; set cache_folder"), lock(tmp_path / "l"):
        pass
