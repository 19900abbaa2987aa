"""Giving a cache away: as a folder that is a cache folder again, with a card; or a layer as one plain file."""

import hashlib
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from distill.cache import Admissions, Layer
from distill.cache.index import INDEX_FILE, index_bytes
from distill.cache.plain_file import write_plain_file
from distill.cache.shard import keys_path, shard_path
from distill.cache.spec import LAYER_FILE
from distill.errors import InputError, MachineError
from distill.files import BLOCK, disk_bytes, free_bytes, os_errors, whole_folder
from distill.sharing.card import CardEntry, card
from distill.sharing.describe import layer_folders, totals

_PART = 1 << 20


@dataclass(frozen=True, slots=True)
class ExportReport:
    """What was written: where, how many layers, samples and targets, and the bytes that it takes."""

    path: Path
    layers: int
    samples: int
    targets: int
    bytes: int


def choose_layers(dataset_folder: Path, names: Sequence[str] = ()) -> list[Path]:
    """The folders of the layers that ``names`` mean, all of them if there are none.

    A name is a split, the layer's folder or its 12 hex digits, or split/one of these.

    Raises InputError for a name that means none, and if there is none at all.
    """
    folders = layer_folders(dataset_folder)
    known = ", ".join(f"{folder.parent.name}/{folder.name}" for folder in folders) or "none"
    if not folders:
        raise InputError(f"{dataset_folder}: no layer in it")

    def means(name: str, folder: Path) -> bool:
        split, hex_digits = folder.parent.name, folder.name.rpartition("-")[2]
        return name in {f"{split}/{folder.name}", folder.name, split, hex_digits, f"{split}/{hex_digits}"}

    for name in names:
        if not any(means(name, folder) for folder in folders):
            raise InputError(f"{name!r}: no such layer in {dataset_folder}; there are {known}")
    return [folder for folder in folders if not names or any(means(name, folder) for name in names)]


def export_folder(folders: Sequence[Path], out: Path, admissions: Admissions) -> ExportReport:
    """Copy the layers in ``folders`` to ``out``/dataset/<split>/ as they are, each byte checked, with a README.md.

    ``out`` is a ``cache_folder`` for whoever gets it. It is there at once when it is whole. Raises InputError if it
    exists already or a shard is damaged, MachineError if the disk has no room.
    """
    _refuse_existing(out)
    with ExitStack() as stack:
        layers = [stack.enter_context(Layer.load(folder, admissions)) for folder in folders]
        needed = sum(layer.bytes() for layer in layers)
        entries = []
        with whole_folder(out) as temporary:
            free = free_bytes(temporary)  # of a place that can be written: others have none either
            if free < needed + 16 * BLOCK:
                raise MachineError(f"{out}: disk full: {needed:,} bytes needed, {free:,} free; free some space")
            for layer in layers:
                where = f"dataset/{layer.folder.parent.name}/{layer.folder.name}"
                _copy_layer(layer, temporary / where)
                size = disk_bytes(temporary / where)
                entries.append(CardEntry(where, layer.spec, len(layer.shards), totals(layer), size))
            (temporary / "README.md").write_text(card(entries), encoding="utf-8")
    return _report(out, layers, disk_bytes(out))


def export_file(folder: Path, out: Path, admissions: Admissions) -> ExportReport:
    """Write the layer in ``folder`` as one plain HDF5 file (``cache.plain_file``). Raises as ``export_folder``."""
    _refuse_existing(out)
    with Layer.load(folder, admissions) as layer:
        if not layer.shards:
            raise InputError(f"{folder}: no shard in it")
        with os_errors("create the folder", out.parent):
            out.parent.mkdir(parents=True, exist_ok=True)
        write_plain_file(layer, out)
        return _report(out, [layer], out.stat().st_size)


def _copy_layer(layer: Layer, target: Path) -> None:
    target.mkdir(parents=True)
    (target / LAYER_FILE).write_bytes(layer.spec.to_json())
    for name, info in sorted(layer.shards.items()):
        # Opened first: that is where a damaged shard is set aside and a stranger's passes the gate.
        (keys_path(target, name)).write_bytes(layer.reader(name).key_rows())
        path = shard_path(layer.folder, name)
        if _copy(path, shard_path(target, name)) != info.sha256:
            raise InputError(f"{path}: changed while it was copied; start again when nothing writes to it")
    (target / INDEX_FILE).write_bytes(index_bytes(layer.shards.values()))


def _copy(source: Path, target: Path) -> str:
    """Copy a file and return its SHA-256."""
    digest = hashlib.sha256()
    with source.open("rb") as reader, target.open("wb") as writer:
        while part := reader.read(_PART):
            digest.update(part)
            writer.write(part)
    return digest.hexdigest()


def _refuse_existing(out: Path) -> None:
    with os_errors("look for", out):
        there = out.exists() or out.is_symlink()
    if there:
        raise InputError(f"{out}: exists already, and nothing is overwritten; name another place")


def _report(out: Path, layers: Sequence[Layer], size: int) -> ExportReport:
    sums = [totals(layer) for layer in layers]
    return ExportReport(out, len(layers), sum(s.samples for s in sums), sum(s.targets for s in sums), size)
