"""Which files and datasets a path names, and how each is read."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from distill.dataset.hub import HubId
from distill.dataset.tables import damaged, decompressed, read_parquet
from distill.dataset.text import read_csv, read_json, read_jsonl, read_txt
from distill.errors import MACHINE_ERRNOS, InputError, MachineError
from distill.types import Sample

_TEXT: dict[str, Callable[[BinaryIO, str], Iterator[Sample]]] = {
    ".jsonl": read_jsonl,
    ".json": read_json,
    ".txt": read_txt,
    ".csv": read_csv,
}
_COMPRESSED = {".gz": "gzip", ".zst": "zstd"}
_KNOWN = f"{', '.join(_TEXT)} (also {' or '.join(_COMPRESSED)}) and .parquet"


def find(name: str) -> list[Path | HubId]:
    """The file, the files of the folder (sorted by name, without hidden ones), or the dataset that ``name`` is.

    Raises InputError if it is none of them.
    """
    path = Path(name)
    if path.is_dir():
        return list(_folder_files(path))
    if path.exists():
        if not _is_known(path):
            raise InputError(f"{_short(path)}: not a kind of file that can be read; known are {_KNOWN}")
        return [path]
    dataset_id = None if _is_known(path) else HubId.parse(name)
    if dataset_id is None:
        raise InputError(f"{_short(path)}: no such file or folder")
    return [dataset_id]


def read_file(path: Path) -> Iterator[Sample]:
    """The samples of a file of a known kind. Raises InputError with file:line, MachineError for a failing disk."""
    name = _short(path)
    try:
        if path.suffix.lower() == ".parquet":
            yield from read_parquet(path, name)
        else:
            with _open(path) as stream:
                yield from _TEXT[_kind(path)](stream, name)
    except OSError as error:
        if error.errno in MACHINE_ERRNOS:
            raise MachineError(f"{name}: can't be read: {error.strerror}; check the disk") from error
        if error.strerror:
            raise InputError(f"{name}: can't be read: {error.strerror}") from error
        raise damaged(name, error) from error


def _folder_files(folder: Path) -> list[Path]:
    try:
        inside = sorted(file for file in folder.iterdir() if file.is_file() and not file.name.startswith("."))
    except OSError as error:
        raise InputError(f"{_short(folder)}: can't be read: {error.strerror}") from error
    files = [file for file in inside if _is_known(file)]
    if not files:
        raise InputError(f"{_short(folder)}: no file in this folder that can be read; known are {_KNOWN}")
    return files


def _is_known(path: Path) -> bool:
    return path.suffix.lower() == ".parquet" or _kind(path) in _TEXT


def _kind(path: Path) -> str:
    """The suffix that says what a file is when it is unpacked."""
    return Path(path.stem).suffix.lower() if path.suffix.lower() in _COMPRESSED else path.suffix.lower()


@contextmanager
def _open(path: Path) -> Iterator[BinaryIO]:
    compression = _COMPRESSED.get(path.suffix.lower())
    with path.open("rb") if compression is None else decompressed(path, compression) as stream:
        yield stream


def _short(path: Path) -> str:
    """The path as people read it: relative to the working directory where it lies below it."""
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_absolute() and path.is_relative_to(here) else path)
