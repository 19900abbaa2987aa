"""Durable file operations: what was written is either whole or not there, and its size is known."""

import errno
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from distill.errors import InputError, MachineError, machine_failed

BLOCK = 4096
TEMPORARY_SUFFIX = ".tmp"


@contextmanager
def os_errors(doing: str, path: Path) -> Iterator[None]:
    """Turn an OSError of the block into one line: MachineError for a full or broken disk, InputError otherwise."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        if machine_failed(error):
            raise MachineError(f"{path}: cannot {doing}: {reason} ({free_bytes(path):,} bytes free)") from error
        raise InputError(f"{path}: cannot {doing}: {reason}") from error


def write_durably(path: Path, data: bytes | memoryview) -> None:
    """Write ``data`` under ``path`` at once or not at all, and make it survive a power cut.

    Raises MachineError (disk full, broken) or InputError (not writable); no temporary file stays behind then.
    """
    # Two processes that write the same path must not write the same temporary file.
    temporary = path.with_name(f"{path.name}.{os.getpid()}{TEMPORARY_SUFFIX}")
    with os_errors("write", path):
        try:
            with temporary.open("wb", buffering=0) as file:
                view = memoryview(data)
                while view:
                    view = view[file.write(view) :]
                os.fsync(file.fileno())
            temporary.replace(path)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise
        sync(path.parent)


@contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """Fill the folder that is yielded; it becomes ``path`` at once when the block ends, and is durable then.

    ``path`` must not exist. After an error nothing is left of it; what a kill leaves is removed by the next try.
    """
    temporary = path.with_name(path.name + TEMPORARY_SUFFIX)
    with os_errors("write", path):
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        try:
            yield temporary
            for file in temporary.rglob("*"):
                sync(file)
            temporary.rename(path)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        sync(path.parent)


def remove_folder(path: Path) -> None:
    """Remove a folder; a kill leaves it whole or under a temporary name, never half."""
    temporary = path.with_name(path.name + TEMPORARY_SUFFIX)
    with os_errors("remove", path):
        shutil.rmtree(temporary, ignore_errors=True)
        path.rename(temporary)
    shutil.rmtree(temporary, ignore_errors=True)


def replace_folder(new: Path, path: Path) -> None:
    """Give the whole folder ``new`` the name ``path``, whose old one is removed then.

    A kill in between leaves no ``path`` but all of ``new``.
    """
    old = path.with_name(f"{path.name}.old{TEMPORARY_SUFFIX}")
    with os_errors("replace", path):
        shutil.rmtree(old, ignore_errors=True)
        if path.exists():
            path.rename(old)
        new.rename(path)
        sync(path.parent)
    shutil.rmtree(old, ignore_errors=True)


def append_durably(path: Path, data: bytes) -> None:
    """Append ``data`` in one write and fsync it."""
    with os_errors("write", path), path.open("ab", buffering=0) as file:
        written = file.write(data)
        if written != len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.fsync(file.fileno())


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a small file of a model folder. InputError if it can't be read as one."""
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{path}: cannot be read as JSON ({error})") from error
    if not isinstance(value, dict):
        raise InputError(f"{path}: not a JSON object")
    return value


def make_folder(path: Path) -> Path:
    """Create ``path`` and its parents; InputError if that isn't allowed."""
    with os_errors("create the folder", path):
        path.mkdir(parents=True, exist_ok=True)
    return path


def sync(path: Path) -> None:
    """fsync a file, or a folder, so that the names in it survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def allocated(size: int) -> int:
    """Bytes that a file of ``size`` takes on disk, in whole blocks."""
    return -(-size // BLOCK) * BLOCK


def disk_bytes(folder: Path) -> int:
    """Bytes that ``folder`` takes on disk: for each entry the larger of its size and its allocated blocks."""
    total = 0
    for root, _, names in os.walk(folder):
        for path in [Path(root), *(Path(root) / name for name in names)]:
            try:
                status = path.lstat()
            except FileNotFoundError:  # a temporary file that was renamed meanwhile
                continue
            total += max(status.st_size, status.st_blocks * 512)
    return total


def disk_size(path: Path) -> int:
    """Bytes that a file takes on disk; 0 if it isn't there."""
    return allocated(path.stat().st_size) if path.exists() else 0


def free_bytes(path: Path) -> int:
    """Free bytes of the file system that ``path`` is or will be on."""
    while not path.exists() and path != path.parent:
        path = path.parent
    statistics = os.statvfs(path)
    return statistics.f_bavail * statistics.f_frsize
