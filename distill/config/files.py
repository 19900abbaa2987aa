"""Configuration files: JSON, flat or in sections, every value with the line it stands on."""

import errno
from collections.abc import Iterator, Sequence
from pathlib import Path

from distill.config.reader import Document, JsonError, read_json
from distill.config.root import Config, LoadedConfig, Setting, find_key, resolve
from distill.errors import InputError


def load_config(path: Path, overrides: Sequence[Setting] = ()) -> Config:
    """The configuration in the file ``path``; what ``overrides`` say counts more.

    Raises InputError ``FILE:LINE: KEY: problem``, ``FILE:LINE:COLUMN: problem`` for what is not JSON.
    """
    return load_with_origins(path, overrides).config


def load_with_origins(path: Path, overrides: Sequence[Setting] = ()) -> LoadedConfig:
    """As ``load_config``, and where each value comes from."""
    folder = path.absolute().parent
    return resolve([*_settings(_read(path), path, folder), *overrides], folder)


def _read(path: Path) -> Document:
    try:
        data = path.read_bytes()
    except OSError as error:
        if error.errno == errno.EIO:
            raise  # the disk's fault, not the user's
        raise InputError(f"{path}: cannot be read ({error.strerror}); name the file with --config PATH") from None
    try:
        return read_json(data.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise InputError(f"{path}:{line}: is not UTF-8 text; save it as UTF-8") from None
    except JsonError as error:
        raise InputError(f"{path}:{error.where}: {error.problem}") from None


def _settings(document: Document, path: Path, folder: Path) -> Iterator[Setting]:
    """Flatten the document. A key may stand at the top or in its section, but only once."""
    if not isinstance(document.value, dict):
        raise InputError(f"{path}:1: must be an object of keys and values")
    seen: dict[str, int] = {}
    for trail, value in _members(document, path):
        name, line = trail[-1], document.lines[trail]
        said = f"{path}:{line}: {name}"
        section = find_key(name, said, more=tuple(Config.model_fields)).section
        if trail[:-1] not in ((), (section,)):
            raise InputError(f"{said}: belongs in the section {section!r}, not {trail[0]!r}")
        if name in seen:
            raise InputError(f"{said}: given twice, first on line {seen[name]}")
        seen[name] = line
        yield Setting(name, value, said=said, origin=f"{path}:{line}", folder=folder)


def _members(document: Document, path: Path) -> Iterator[tuple[tuple[str, ...], object]]:
    """The keys at the top and in the sections, each with its trail. ``$schema`` is for editors."""
    for name, value in document.value.items():
        said = f"{path}:{document.lines[name,]}: {name}"
        if name in Config.model_fields and isinstance(value, dict):
            yield from (((name, inner), item) for inner, item in value.items())
        elif name in Config.model_fields and value is not None:
            raise InputError(f"{said}: is a section, must be an object of keys and values")
        elif name not in Config.model_fields and name != "$schema":
            yield (name,), value
