"""Checking a whole cache: every byte of every shard, whoever wrote it, against everything that is known of it."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from distill.cache.gate import Admissions
from distill.cache.index import INDEX_FILE, read_index
from distill.cache.layer import Layer
from distill.cache.shard import shard_path
from distill.cache.spec import LAYER_FILE
from distill.errors import InputError


@dataclass(frozen=True, slots=True)
class Verdict:
    """What was found in one folder: the sound shards, counted, and a line for everything that is amiss."""

    folder: Path
    shards: int
    targets: int
    problems: tuple[str, ...]


def verify(dataset_folder: Path, admissions: Admissions) -> Iterator[Verdict]:
    """Check all layers of all splits under ``dataset_folder``, one verdict each, in the order of their names.

    Every shard is compared with the index by SHA-256 and decoded whole by the gate, which compares all of it with its
    name, its counts and its layer; key rows and ``layer.json`` are checked too. Damaged shards are set aside. Nothing
    else is changed, and only a failing machine (MachineError) ends it early.
    """
    for split in sorted(path for path in dataset_folder.glob("*") if path.is_dir()):
        for folder in sorted(path for path in split.glob("*") if path.is_dir()):
            if (folder / LAYER_FILE).exists() or any(folder.glob("*.h5")):
                yield _verify_layer(folder, admissions)


def _verify_layer(folder: Path, admissions: Admissions) -> Verdict:
    try:
        listed = read_index(folder / INDEX_FILE)
        gone = [path for path in (shard_path(folder, name) for name in sorted(listed)) if not path.exists()]
        layer = Layer.load(folder, admissions)
    except InputError as error:
        return Verdict(folder, 0, 0, (str(error),))
    with layer:
        problems = [f"{path}: in the index, but gone; the next run collects it again" for path in gone] + layer.notes
        sound = targets = 0
        for name, info in sorted(layer.shards.items()):
            try:
                layer.check(name)
            except InputError as error:
                problems.append(str(error))
                continue
            sound, targets = sound + 1, targets + info.targets
            if not layer.has_key_rows(name):
                problems.append(f"{shard_path(folder, name)}: its .keys file is missing or damaged; it is made anew")
    return Verdict(folder, sound, targets, tuple(problems))
