"""Durable writes: whole or not there, whatever fails on the way."""

import errno
import os
from pathlib import Path

import pytest

from distill.errors import InputError, MachineError
from distill.files import allocated, append_durably, disk_bytes, make_folder, write_durably


class FailingAt:
    """Makes the n-th of the watched system calls fail, whichever it is."""

    def __init__(self, number: int, code: int) -> None:
        self.left = number
        self.code = code

    def tick(self) -> None:
        self.left -= 1
        if self.left == 0:
            raise OSError(self.code, os.strerror(self.code))


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_every_failing_call_leaves_the_old_content_and_no_leftover(
    tmp_path: Path, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "index"
    path.write_bytes(b"old")
    real_open, real_fsync, real_replace = Path.open, os.fsync, Path.replace
    for number in range(1, 10):
        failing = FailingAt(number, code)

        def watched_open(self: Path, *args: object, failing: FailingAt = failing, **kwargs: object) -> object:
            failing.tick()
            return real_open(self, *args, **kwargs)  # type: ignore[call-overload]

        def watched_fsync(descriptor: int, failing: FailingAt = failing) -> None:
            failing.tick()
            real_fsync(descriptor)

        def watched_replace(self: Path, target: Path, failing: FailingAt = failing) -> Path:
            failing.tick()
            return real_replace(self, target)

        with monkeypatch.context() as patch:
            patch.setattr(Path, "open", watched_open)
            patch.setattr(os, "fsync", watched_fsync)
            patch.setattr(Path, "replace", watched_replace)
            try:
                write_durably(path, b"new")
            except MachineError as error:
                assert str(path) in str(error) and "\n" not in str(error)
            else:
                break
        assert path.read_bytes() in (b"old", b"new")
        assert [p.name for p in tmp_path.iterdir()] == ["index"]
        path.write_bytes(b"old")
    assert number == 5, "open, fsync, replace and fsync of the folder fail once each, then it passes"
    assert path.read_bytes() == b"new"


def test_an_append_that_does_not_fit_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    append_durably(path, b"one\n")
    append_durably(path, b"two\n")
    assert path.read_bytes() == b"one\ntwo\n"
    with pytest.raises(MachineError, match="No space left"):
        append_durably(Path("/dev/full"), b"x")


def test_a_folder_that_cannot_be_made_names_itself(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(InputError, match="cannot create the folder"):
        make_folder(tmp_path / "file" / "cache")


def test_disk_bytes_counts_what_the_file_system_does(tmp_path: Path) -> None:
    empty = disk_bytes(tmp_path)
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "b").write_bytes(b"x" * 5000)
    (tmp_path / "sparse").touch()
    os.truncate(tmp_path / "sparse", 100_000)
    assert disk_bytes(tmp_path) >= empty + 8192 + 100_000
    assert allocated(1) == 4096 and allocated(4096) == 4096 and allocated(0) == 0
