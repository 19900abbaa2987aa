"""One writer at a time: a lock file that names its owner and outlives neither the owner nor its reason.

The kernel's lock (flock) makes taking over atomic and ends with its process. The owner's name in the file is for the
people who wait, and for network disks, where another host's kernel lock may not be seen: a file that names another
host is never presumed free.
"""

import errno
import fcntl
import json
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from distill.errors import InputError, MachineError
from distill.files import make_folder, os_errors


@dataclass(frozen=True, slots=True)
class Owner:
    """A process, told apart from every other on any host and from its own number's earlier holders."""

    host: str
    boot: str
    pid: int
    start: str

    @classmethod
    def of_this_process(cls) -> "Owner":
        """This very process."""
        return cls(socket.gethostname(), _boot_id(), os.getpid(), _start_time(os.getpid()))


@contextmanager
def lock(path: Path, *, waiting: Callable[[], None] | None = None) -> Iterator[None]:
    """Hold the lock file ``path``.

    Raises InputError while another process holds it, MachineError where the file system has no locks. With ``waiting``,
    which is called once if need be, it waits instead.
    """
    make_folder(path.parent)
    with os_errors("open the lock", path):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        if waiting is not None and not _is_free(descriptor):
            waiting()
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        _take(descriptor, path)
        try:
            yield
        finally:
            with os_errors("release", path):
                os.ftruncate(descriptor, 0)
    finally:
        with os_errors("close the lock", path):
            os.close(descriptor)


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Hold ``path`` beside other readers, so that ``lock`` of it fails meanwhile; waits while it is locked.

    Where the folder can't be written to nobody can delete anything either, and nothing is held.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CREAT, 0o644)
    except OSError as error:
        if error.errno not in {errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOENT}:
            raise MachineError(f"{path}: cannot be opened: {error.strerror}") from error
        yield
        return
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH)
        except OSError as error:
            raise MachineError(
                f"{path}: cannot lock ({error.strerror}); set cache_folder to a file system that has locks"
            ) from error
        yield
    finally:
        with os_errors("close the lock", path):
            os.close(descriptor)


def _is_free(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # there are no locks here: ``_take`` says so
        return True
    return True


def _take(descriptor: int, path: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise InputError(f"{path}: in use by {_describe(_read(descriptor))}; wait for it or stop it") from None
    except OSError as error:
        if error.errno not in {errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS}:
            raise MachineError(f"{path}: cannot lock: {error.strerror}") from error
        raise MachineError(f"{path}: this file system has no locks; set cache_folder to one that has") from error
    owner = _read(descriptor)
    # On this host the kernel's lock is the truth: it was free, so the owner that the file names is gone.
    if owner is not None and owner.host != socket.gethostname():
        raise InputError(f"{path}: held by {_describe(owner)}; if that process is gone, delete this file")
    with os_errors("write", path):
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(asdict(Owner.of_this_process())).encode(), 0)


def _read(descriptor: int) -> Owner | None:
    try:
        return Owner(**json.loads(os.pread(descriptor, 4096, 0)))
    except (ValueError, TypeError):  # empty: released; torn: its owner died while writing it
        return None


def _describe(owner: Owner | None) -> str:
    return f"process {owner.pid} on {owner.host}" if owner else "another process"


def _boot_id() -> str:
    path = Path("/proc/sys/kernel/random/boot_id")
    return path.read_text().strip() if path.exists() else ""


def _start_time(pid: int) -> str:
    path = Path(f"/proc/{pid}/stat")
    # Field 22, counted behind the command name, which may itself hold blanks and brackets.
    return path.read_text().rpartition(")")[2].split()[19] if path.exists() else ""
