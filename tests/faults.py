"""A disk that fails where a test wants it to, and workers inside the test's process, so that it fails in their work."""

import builtins
import contextlib
import io
import os
import subprocess
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import pytest
import safetensors.torch
from safetensors import SafetensorError

from distill.cache import Admissions
from distill.cache.index import INDEX_FILE, read_index
from distill.cache.strict import file_sha256
from distill.cache.verify import verify
from distill.cli import main
from distill.workers import Later
from distill.workers.child import Failed
from tests.jobs import shards_of


class InlinePool:
    """``WorkerPool`` without processes: one worker, in the caller's thread, one task after the other."""

    def __init__(self, factory: Callable[..., Any], init_args: Sequence[tuple[Any, ...]]) -> None:
        self._factory, self._arguments = factory, init_args[0]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def run(
        self,
        tasks: Iterable[tuple[Hashable, Any]],
        *,
        on_progress: Callable[[Any], None],
        on_request: Callable[[Any], Any],
        on_wait: Callable[[], None] | None = None,
    ) -> Iterator[tuple[Hashable, Any]]:
        class Channel:
            progress = staticmethod(on_progress)
            request = staticmethod(on_request)

        worker = self._factory(*self._arguments)
        for name, task in tasks:
            if on_wait is not None:
                on_wait()
            try:
                result = worker(task, Channel())
                result = result.finish() if isinstance(result, Later) else result
            except Exception as error:  # as a worker's process tells its parent
                raise Failed.describing(error).error() from error
            yield name, result


class FaultyDisk:
    """Below ``root`` the ``at``-th operation that changes the disk fails, and, if ``for_ever``, every later one.

    A write that fails writes half of its bytes first, a close that fails closes. ``operations`` are those seen so far.
    """

    def __init__(self, root: Path, *, at: int | None = None, error: int = 0, for_ever: bool = False) -> None:
        self._root = f"{root.resolve()}{os.sep}"
        self._at, self._error, self._for_ever = at, error, for_ever
        self._descriptors: dict[int, str] = {}
        self.operations: list[str] = []

    @property
    def failed(self) -> bool:
        """Whether it came to it."""
        return self._at is not None and len(self.operations) >= self._at

    def fails(self, what: str, path: Any) -> bool:
        """Count an operation on ``path``; whether it is to fail."""
        name = os.path.abspath(os.fsdecode(path))  # noqa: PTH100 - no links are followed
        if not name.startswith(self._root):
            return False
        self.operations.append(f"{what} {name.removeprefix(self._root)}")
        number = len(self.operations)
        return self._at is not None and (number == self._at or (self._for_ever and number > self._at))

    def check(self, what: str, path: Any) -> None:
        if self.fails(what, path):
            raise self.failure()

    def failure(self) -> OSError:
        """As the kernel tells it of a descriptor: without a name."""
        return OSError(self._error, os.strerror(self._error))

    @contextlib.contextmanager
    def mounted(self) -> Iterator[Self]:
        """This process's file operations, those of Rust's safetensors included, go to this disk."""
        with pytest.MonkeyPatch.context() as patch:
            for name in ("replace", "rename", "mkdir", "unlink", "rmdir", "symlink"):
                patch.setattr(os, name, self._checked(name, getattr(os, name)))
            for name in ("open", "close", "fsync", "ftruncate", "pwrite"):
                patch.setattr(os, name, getattr(self, f"_{name}")(getattr(os, name)))
            opener = self._file_opener(io.open)
            patch.setattr(io, "open", opener)
            patch.setattr(builtins, "open", opener)
            patch.setattr(safetensors.torch, "serialize_file", self._serialize(safetensors.torch.serialize_file))
            yield self

    def _checked(self, what: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Any, *rest: Any, **named: Any) -> Any:
            if named.get("dir_fd") is None:  # rmtree's own, whose faults it ignores
                self.check(what, rest[0] if what == "symlink" else path)
            return real(path, *rest, **named)

        return call

    def _open(self, real: Callable[..., int]) -> Callable[..., int]:
        def call(path: Any, flags: int, *rest: Any, **named: Any) -> int:
            if named.get("dir_fd") is not None:
                return real(path, flags, *rest, **named)
            writing = flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
            if writing:
                self.check("open", path)
            descriptor = real(path, flags, *rest, **named)
            self._descriptors[descriptor] = os.fsdecode(path) if writing else ""
            return descriptor

        return call

    def _close(self, real: Callable[[int], None]) -> Callable[[int], None]:
        def call(descriptor: int) -> None:
            path = self._descriptors.pop(descriptor, "")
            real(descriptor)
            if path:
                self.check("close", path)

        return call

    def _fsync(self, real: Callable[[int], None]) -> Callable[[int], None]:
        def call(descriptor: int) -> None:
            self.check("fsync", Path(f"/proc/self/fd/{descriptor}").readlink())
            real(descriptor)

        return call

    def _ftruncate(self, real: Callable[[int, int], None]) -> Callable[[int, int], None]:
        def call(descriptor: int, size: int) -> None:
            self.check("truncate", Path(f"/proc/self/fd/{descriptor}").readlink())
            real(descriptor, size)

        return call

    def _pwrite(self, real: Callable[[int, bytes, int], int]) -> Callable[[int, bytes, int], int]:
        def call(descriptor: int, data: bytes, offset: int) -> int:
            self.check("write", Path(f"/proc/self/fd/{descriptor}").readlink())
            return real(descriptor, data, offset)

        return call

    def _serialize(self, real: Callable[..., None]) -> Callable[..., None]:
        def call(tensors: Any, path: Any, *rest: Any, **named: Any) -> None:
            if self.fails("safetensors", path):
                reason = os.strerror(self._error)
                raise SafetensorError(f"Error while serializing: I/O error: {reason} (os error {self._error})")
            real(tensors, path, *rest, **named)

        return call

    def _file_opener(self, real: Callable[..., Any]) -> Callable[..., Any]:
        disk = self

        class File(io.FileIO):
            def write(self, data: Any) -> int:
                if disk.fails("write", self.name):
                    super().write(memoryview(data)[: len(data) // 2])
                    raise disk.failure()
                return super().write(data)

            def close(self) -> None:
                was_closed = self.closed
                super().close()
                if not was_closed:
                    disk.check("close", self.name)

        def call(
            file: Any,
            mode: str = "r",
            buffering: int = -1,
            encoding: str | None = None,
            errors: str | None = None,
            newline: str | None = None,
            closefd: bool = True,
            opener: Any = None,
        ) -> Any:
            if isinstance(file, int) or not set(mode) & set("wax+"):
                return real(file, mode, buffering, encoding, errors, newline, closefd, opener)
            disk.check("open", file)
            raw = File(os.fspath(file), mode.replace("b", "").replace("t", ""), closefd, opener)
            if buffering == 0:
                return raw
            buffer: Any = io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)
            return buffer if "b" in mode else io.TextIOWrapper(buffer, encoding, errors, newline)

        return call


def attempt(config: Path, *verbs: str) -> tuple[int, str]:
    """Exit code and stderr of the verbs, one after the other, up to the first that fails."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        codes = (main(["--config", str(config), verb]) for verb in verbs)
        code = next((code for code in codes if code), 0)
    return code, err.getvalue()


@contextlib.contextmanager
def small_disk(folder: Path, size: int) -> Iterator[Callable[[str], None]]:
    """``folder`` as a file system of ``size`` bytes; what is yielded mounts it anew with other options.

    Skips the test where this process may not mount.
    """
    folder.mkdir(parents=True, exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    try:
        subprocess.run(mount, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"mounting a file system isn't permitted here: {error}")
    try:
        yield lambda options: subprocess.run(["mount", "-o", f"remount,{options}", str(folder)], check=True) and None
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def sealed_shards(cache: Path) -> dict[str, str]:
    """SHA-256 of every shard that an index names, by layer and name, read as a program beside the run reads it."""
    found = {}
    for index in (cache / "dataset").glob(f"*/*/{INDEX_FILE}"):
        layer = index.parent.relative_to(cache / "dataset")
        found |= {f"{layer}/{name}": info.sha256 for name, info in read_index(index).items()}
    return found


def records_of(cache: Path) -> dict[str, str]:
    """Name and digest of all that a collection leaves but the index, whose lines are in the order of the sealing."""
    return {name: digest for name, digest in shards_of(cache).items() if INDEX_FILE not in name}


def check_sealed(cache: Path, sealed: dict[str, str]) -> None:
    """These shards are there, with the bytes that the index promised."""
    for name, digest in sealed.items():
        assert file_sha256(cache / "dataset" / f"{name}.h5") == digest, name


def check_nothing_corrupt(cache: Path, admissions: Admissions) -> None:
    """Whatever stands under a final name is whole: shards, index, exports. Changes nothing."""
    check_sealed(cache, sealed_shards(cache))
    for verdict in verify(cache / "dataset", admissions):
        # A shard that was sealed, but not yet reported, is sound.
        amiss = [line for line in verdict.problems if "adopted" not in line and ".keys file" not in line]
        assert not amiss, amiss
    for export in (cache / "student" / "trained").glob("*"):
        if export.is_dir() and export.suffix != ".tmp":
            names = {path.name for path in export.iterdir()}
            assert {"model.safetensors", "config.json", "tokenizer.json"} <= names, export
