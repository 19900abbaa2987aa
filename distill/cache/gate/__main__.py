"""The gate's child: ``python -m distill.cache.gate``. Paths come in, verdicts go out.

Before it reads anything it gives up what it doesn't need: it may write no file and use no more memory than said here,
and for each file no more processor time; its working folder is empty and has no name.
"""

import json
import os
import resource
import sys
import tempfile
from pathlib import Path
from typing import Any

from distill.cache.gate import inspect
from distill.cache.gate.child import confine

MEMORY_BYTES = 512 << 20
"""Address space, so also the most of it that can be resident."""
CPU_SECONDS = 3
"""Processor time for a file: for its structure, then again for its values, and more for many of them."""
_BYTES_PER_SECOND = 8 << 20  # a quarter of what is usual


def main() -> None:
    """Answer until the parent closes the pipe."""
    _enter_empty_folder()
    confine(MEMORY_BYTES)
    _say("ready")
    for line in sys.stdin.buffer:
        _limit_processor_time(CPU_SECONDS)
        _say(inspect.inspect(Path(json.loads(line)), _allow))


def _say(value: Any) -> None:
    sys.stdout.buffer.write(json.dumps(value).encode() + b"\n")
    sys.stdout.buffer.flush()


def _enter_empty_folder() -> None:
    folder = tempfile.mkdtemp(prefix="distill-gate-")
    os.chdir(folder)
    Path(folder).rmdir()  # nothing can be made in it and nothing is left behind


def _allow(size: int) -> None:
    _limit_processor_time(CPU_SECONDS + size // _BYTES_PER_SECOND)


def _limit_processor_time(seconds: int) -> None:
    """From now on; only ever a soft limit, because it has to be raised for the next file."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    limit = int(usage.ru_utime + usage.ru_stime) + seconds
    resource.setrlimit(resource.RLIMIT_CPU, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))


if __name__ == "__main__":
    main()
