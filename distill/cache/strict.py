"""Reading small files that a stranger may have written: regular files only, of bounded size, strictly parsed."""

import hashlib
import json
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any

from distill.errors import InputError
from distill.files import os_errors


@dataclass(frozen=True, slots=True)
class FileState:
    """Tells a file from every other and from its own earlier contents, as far as the kernel can."""

    device: int
    inode: int
    size: int
    modified_ns: int
    changed_ns: int

    @classmethod
    def of(cls, path: Path) -> "FileState":
        """The state of the regular file ``path``; InputError if it is anything else, a symbolic link included."""
        with os_errors("read", path):
            status = path.lstat()
        return cls._of(path, status)

    @classmethod
    def _of(cls, path: Path, status: os.stat_result) -> "FileState":
        if not stat.S_ISREG(status.st_mode):
            raise InputError(f"{path}: not a regular file; put the file itself here, not a link to it")
        return cls(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


@contextmanager
def open_regular(path: Path) -> Iterator[BufferedReader]:
    """The regular file ``path``, open for reading; never blocks on a pipe and never follows a link."""
    FileState.of(path)
    with os_errors("read", path):
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        FileState._of(path, os.fstat(file.fileno()))
        yield file


def read_bounded(path: Path, limit: int) -> bytes:
    """The whole content of a regular file; InputError if it has more than ``limit`` bytes."""
    with open_regular(path) as file, os_errors("read", path):
        data = file.read(limit + 1)
    if len(data) > limit:
        raise InputError(f"{path}: larger than {limit:,} bytes; not a file of this program, move it away")
    return data


def file_sha256(path: Path) -> str:
    """64 hex digits of SHA-256 over a regular file."""
    with open_regular(path) as file, os_errors("read", path):
        return hashlib.file_digest(file, "sha256").hexdigest()


def parse_json(text: bytes, where: str) -> Any:
    """JSON from a stranger: whatever is wrong with it is an InputError that begins with ``where``."""
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where}: not JSON ({' '.join(str(error).split())[:100]})") from error


Check = Callable[[Any], bool]


def check_fields(value: Any, fields: Mapping[str, Check], where: str) -> dict[str, Any]:
    """``value`` if it is an object of exactly these ``fields`` and each passes its check; InputError otherwise."""
    if not isinstance(value, dict):
        raise InputError(f"{where}: not a JSON object")
    for name in fields:
        if name not in value:
            raise InputError(f"{where}: {name} is missing")
    for name, item in value.items():
        if name not in fields:
            raise InputError(f"{where}: unknown field {name[:40]!r}")
        if not fields[name](item):
            raise InputError(f"{where}: {name} cannot be {str(item)[:40]!r}")
    return value


def is_count(value: Any) -> bool:
    """Whether ``value`` is an integer that a 63-bit counter holds."""
    return type(value) is int and 0 <= value < 1 << 62


def is_text(value: Any) -> bool:
    """Whether ``value`` is a short string that can stand in a message."""
    return type(value) is str and 0 < len(value) <= 255 and value.isprintable()


def is_hex(digits: int) -> Check:
    """A check for that many lower-case hex digits."""
    return lambda value: type(value) is str and len(value) == digits and set(value) <= set("0123456789abcdef")


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
