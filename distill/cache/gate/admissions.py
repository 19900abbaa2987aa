"""Which shards may be opened without the gate: those written here and those that passed it, by SHA-256."""

import re
import threading
from pathlib import Path
from types import TracebackType
from typing import Self

from distill.cache.gate.gate import Finding, Gate
from distill.cache.strict import file_sha256, read_bounded
from distill.errors import InputError
from distill.files import append_durably, write_durably

_FILE = "admitted.txt"
_FILE_BYTES = 1 << 30
_DIGEST = re.compile(r"[0-9a-f]{64}")


class Admissions:
    """The digests of the shards that may be read, kept in ``<cache_folder>/admitted.txt``, and the gate for the others.

    The list stands outside ``dataset/``, because what is downloaded into that must not vouch for itself; for the same
    reason it counts only in the very file (inode) that this machine wrote: a copied list is ignored, and all is checked
    again. Where it can't be written, or without a ``cache_folder``, it holds for this process alone. Threads may share
    one; close it to end the gate's child.
    """

    def __init__(self, cache_folder: Path | None = None) -> None:
        self.cache_folder = cache_folder
        self._gate = Gate()
        self._lock = threading.Lock()
        self._list = None if cache_folder is None else cache_folder / _FILE
        known = None if self._list is None else _read(self._list)
        self._digests: set[str] = known or set()
        self._started = known is not None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the gate's child process; a later ``inspect`` starts another."""
        self._gate.close()

    def __contains__(self, digest: str) -> bool:
        return digest in self._digests

    def add(self, digest: str) -> None:
        """Admit the shard with this SHA-256: it was written by this machine or has passed the gate."""
        assert _DIGEST.fullmatch(digest), digest
        with self._lock:
            if digest not in self._digests:
                self._digests.add(digest)
                self._keep(digest)

    def _keep(self, digest: str) -> None:
        if self._list is None:
            return
        try:
            if not (self._started and self._list.exists()):
                write_durably(self._list, b"")
                append_durably(self._list, "\n".join([_first_line(self._list), *sorted(self._digests), ""]).encode())
                self._started = True
                return
            append_durably(self._list, f"{digest}\n".encode())
        except InputError:
            self._list = None  # not writable: what was admitted holds for this process

    def inspect(self, path: Path) -> Finding:
        """Have the gate check the shard ``path`` whatever is known of it. Raises as ``Gate.check``."""
        finding = self._gate.check(path)
        if file_sha256(path) != finding.info.sha256:
            raise InputError(f"{path}: changed while it was checked; start again when nothing writes to it")
        self.add(finding.info.sha256)
        return finding

    @property
    def damaged_folder(self) -> Path | None:
        """Where damaged shards are set aside, outside ``dataset/``."""
        return None if self.cache_folder is None else self.cache_folder / "damaged"


def _read(path: Path) -> set[str] | None:
    """The digests of the list, or None if it isn't one that was written where it stands."""
    if not path.exists():
        return None
    lines = read_bounded(path, _FILE_BYTES).decode("ascii", "replace").split("\n")
    if lines[0] != _first_line(path):
        return None
    # A line that a kill tore isn't 64 digits, and that shard is checked again.
    return {line for line in lines if _DIGEST.fullmatch(line)}


def _first_line(path: Path) -> str:
    return f"distill-admitted-1 {path.stat().st_ino}"
