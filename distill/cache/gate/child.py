"""What a child process that opens strangers' files gets, gives up and says; for who starts one and for the child."""

import os
import resource
import sys
from pathlib import Path

_PACKAGE_ROOT = Path(__file__).parents[3]
# What the child may know of our environment: enough to start an interpreter, no tokens.
_KEPT_VARIABLES = ("PATH", "LD_LIBRARY_PATH", "PYTHONHOME", "LANG", "LC_ALL", "TMPDIR")


def child_environment() -> dict[str, str]:
    """What a process that opens strangers' files gets: this interpreter's modules, no secrets and no HDF5 plugins."""
    kept = {name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ}
    return kept | {
        "PYTHONPATH": os.pathsep.join(str(Path(path).absolute()) for path in (str(_PACKAGE_ROOT), *sys.path)),
        "HDF5_PLUGIN_PRELOAD": "::",  # HDF5 loads no shared object by itself
        "OPENBLAS_NUM_THREADS": "1",
        "OMP_NUM_THREADS": "1",
    }


def confine(memory_bytes: int) -> None:
    """From now on this process writes no file, holds few open, and has ``memory_bytes`` of address space at most."""
    limit(resource.RLIMIT_AS, memory_bytes)
    limit(resource.RLIMIT_CORE, 0)
    limit(resource.RLIMIT_FSIZE, 0)
    limit(resource.RLIMIT_NOFILE, 32)


def limit(what: int, most: int) -> None:
    """Set a resource's soft and hard limit, no higher than the hard one is."""
    _, hard = resource.getrlimit(what)
    most = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(what, (most, most))


def printable(reason: str) -> str:
    """What a child said, fit for a message: it read a stranger's file, so it is not trusted either."""
    return "".join(letter if letter.isprintable() else "?" for letter in reason[:300])
