"""Files that hold caches but aren't shards of ours: the ancestor's, and a layer in one plain file.

They are strangers'. A child process with limits looks at everything in one before anybody opens it here:
``python -m distill.cache.foreign PATH SECONDS``, exit code 0 if the file passes, else 1 and the reason on standard
output. The rules are those for shards (``gate``), with each format's own names, types and attributes.
"""

import os
import resource
import subprocess
import sys
from pathlib import Path

import h5py

from distill.cache.ancestor_file import AncestorFile, check_ancestor_file
from distill.cache.gate import Admissions
from distill.cache.gate.child import child_environment, confine, limit, printable
from distill.cache.gate.rules import RefusedError
from distill.cache.plain_file import PlainFile, check_plain_file
from distill.cache.strict import FileState, file_sha256
from distill.errors import InputError, MachineError
from distill.files import os_errors

_MEMORY_BYTES = 2 << 30  # of address space; a block of whole distributions is large
# Reading deflated arrays makes some 50 MB a second; groups cost half a millisecond each.
_SECONDS = 30
_BYTES_PER_SECOND = 1 << 20
_FAILURES = (
    *(RefusedError, OSError, LookupError, RuntimeError, ValueError, TypeError),
    *(ArithmeticError, MemoryError, AssertionError, EOFError),
)


def open_foreign_file(path: Path) -> AncestorFile | PlainFile:
    """An admitted file, opened as what it is. Raises InputError naming the file if it can't be read."""
    with os_errors("read", path), h5py.File(path, "r", locking=False) as file:
        is_plain = "header" in file.attrs
    return PlainFile(path) if is_plain else AncestorFile(path)


def admit_foreign_file(path: Path, admissions: Admissions) -> str:
    """The SHA-256 of a file that has passed the gate, now or earlier.

    Raises InputError naming the file, and the object in it, if it is damaged, hostile or of another kind;
    MachineError if no child can be started.
    """
    state, digest = FileState.of(path), file_sha256(path)
    if digest in admissions:
        return digest
    seconds = _SECONDS + state.size // _BYTES_PER_SECOND
    try:
        child = subprocess.run(
            [sys.executable, "-m", "distill.cache.foreign", str(path.absolute()), str(seconds)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd="/",
            env=child_environment(),
            timeout=4 * seconds,
            check=False,
            start_new_session=True,  # an interrupt at the terminal is ours to handle
        )
    except subprocess.TimeoutExpired as error:
        raise InputError(f"{path}: not checked within {4 * seconds} seconds; it is damaged or hostile") from error
    except OSError as error:
        raise MachineError(f"the process that checks {path} cannot start: {error}") from error
    if child.returncode:
        reason = child.stdout.decode("utf-8", "replace") or f"checking it broke the checker ({child.returncode})"
        raise InputError(f"{path}: refused: {printable(reason)}")
    if FileState.of(path) != state:
        raise InputError(f"{path}: changed while it was checked; start again when nothing writes to it")
    admissions.add(digest)
    return digest


def _main(path: Path, seconds: int) -> int:
    confine(_MEMORY_BYTES)
    limit(resource.RLIMIT_CPU, seconds)
    try:
        with h5py.File(path, "r", locking=False) as file:
            is_plain = "header" in file.attrs
        (check_plain_file if is_plain else check_ancestor_file)(path)
    except _FAILURES as error:
        reason = " ".join((str(error) or type(error).__name__).split()).removeprefix(f"{path}: ")
        os.write(1, reason.encode("utf-8", "replace")[:300])
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(_main(Path(sys.argv[1]), int(sys.argv[2])))
