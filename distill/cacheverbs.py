"""The verbs that look at a cache, check it, bring one in and give one away."""

from contextlib import ExitStack
from pathlib import Path

from distill.ancestor import ancestor_spec, import_splits
from distill.cache import Admissions, Layer
from distill.cache.ancestor_file import AncestorFile
from distill.cache.foreign import admit_foreign_file, open_foreign_file
from distill.cache.plain_file import PlainFile
from distill.cache.verify import verify as verify_layers
from distill.config import Config
from distill.errors import InputError
from distill.lock import lock
from distill.making import student_folder
from distill.planning import cache_lock, open_budget
from distill.prepare import prepare_text
from distill.report import Console
from distill.sharing import (
    choose_layers,
    describe_cache,
    describe_sample,
    export_file,
    export_folder,
    import_plain,
)
from distill.splits import SPLITS, distinct
from distill.tokenizer import load_tokenizer


def inspect(config: Config, layer: str | None, sample: int) -> None:
    """Say what the cache holds, layer by layer, and show one sample with the teacher's candidates."""
    console = Console()
    with _admissions(config) as admissions:
        for line in describe_cache(_dataset(config), admissions):
            console.say(line)
        if config.paths.student_path is None and config.paths.student_init is None:
            console.say("set student_path to see a sample decoded")
            return
        tokenizer = load_tokenizer(student_folder(config), trust_remote_code=config.pipeline.trust_remote_code)
        folders = choose_layers(_dataset(config), [layer] if layer else [])
        chosen = next((folder for folder in folders if any(folder.glob("*.h5"))), folders[0])
        with Layer.load(chosen, admissions) as opened:
            console.say(f"sample {sample} of {chosen.parent.name}/{chosen.name}:")
            for line in describe_sample(opened, sample, tokenizer):
                console.say(line)


def verify(config: Config) -> None:
    """Check all of the cache. InputError at the end if anything was amiss."""
    console, problems, layers = Console(), 0, 0
    with _admissions(config) as admissions:
        for verdict in verify_layers(_dataset(config), admissions):
            where = f"{verdict.folder.parent.name}/{verdict.folder.name}"
            console.say(f"{where}: {verdict.shards:,} shards with {verdict.targets:,} targets are sound")
            for problem in verdict.problems:
                console.warn(problem)
            problems, layers = problems + len(verdict.problems), layers + 1
    if not layers:
        raise InputError(f"{_dataset(config)}: no layer in it; give the folder that is the cache_folder")
    if problems:
        raise InputError(
            f"{_dataset(config)}: {problems} problems, listed above; a run that collects mends what it needs"
        )


def export(config: Config, out: Path, layer: str | None) -> None:
    """Write a layer as one plain HDF5 file (``out`` ends in .h5), or the layers as a folder ready to share."""
    folders = choose_layers(_dataset(config), [layer] if layer else [])
    if out.resolve().is_relative_to(_dataset(config).resolve()):
        raise InputError(
            f"--out: {out} is inside the cache's dataset, which holds nothing but layers; name another place"
        )
    with _admissions(config) as admissions:
        if out.suffix in (".h5", ".hdf5"):
            if len(folders) != 1:
                names = ", ".join(f"{folder.parent.name}/{folder.name}" for folder in folders)
                raise InputError(f"--layer: one file holds one layer; name one of {names}")
            report = export_file(folders[0], out, admissions)
        else:
            report = export_folder(folders, out, admissions)
    Console().say(
        f"{report.path}: {report.layers} layers, {report.samples:,} samples, {report.targets:,} targets,"
        f" {report.bytes:,} bytes; it contains the text as token ids"
    )


def import_file(config: Config, path: Path, teacher: str | None, split: str | None) -> None:
    """Bring a foreign file into the cache: an ancestor's distributions.hdf5, or a layer that was exported as one file.

    An ancestor's needs text and tokenizer of the configuration, and fills both splits; ``teacher`` is its layer's name.
    A plain file needs nothing; ``split`` says where it goes (None: train).
    """
    console = Console()
    with _admissions(config) as admissions:
        lines = _import(config, path, teacher, split, admissions, console)
    for line in lines:
        console.say(line)


def _import(
    config: Config, path: Path, teacher: str | None, split: str | None, admissions: Admissions, console: Console
) -> list[str]:
    digest = admit_foreign_file(path, admissions)
    with open_foreign_file(path) as file:
        if isinstance(file, PlainFile):
            if teacher is not None:
                raise InputError(f"--teacher: {path} says itself whose distributions it holds")
            return _import_plain(config, file, split or "train", admissions)
        if split is not None:
            raise InputError("--split: an ancestor's file is matched with the text of both splits")
        return _import_ancestor(config, file, teacher or path.stem, digest, admissions, console)


def _import_plain(config: Config, file: PlainFile, split: str, admissions: Admissions) -> list[str]:
    if split not in SPLITS:
        raise InputError(f"--split: must be one of {', '.join(SPLITS)}, not {split!r}")
    with lock(cache_lock(config)), Layer.open(_dataset(config) / split, file.spec, admissions) as layer:
        budget = open_budget(config, [layer])
        samples, targets = import_plain(file, layer, budget=budget, shard_targets=config.cache.shard_targets)
    return [f"{samples:,} samples with {targets:,} targets imported into {split}/{layer.folder.name}"]


def _import_ancestor(
    config: Config, file: AncestorFile, teacher: str, digest: str, admissions: Admissions, console: Console
) -> list[str]:
    text = prepare_text(config, console)
    spec = ancestor_spec(
        file,
        teacher=teacher,
        weights=digest,
        token_map=text.token_map,
        vocab_size=text.vocab_size,
        cache_precision=config.cache.cache_precision,
    )
    with lock(cache_lock(config)), ExitStack() as stack:
        splits = [
            (stack.enter_context(Layer.open(_dataset(config) / split, spec, admissions)), distinct(samples.samples))
            for split, samples in text.splits.items()
        ]
        report = import_splits(
            file,
            splits,
            texts=text.rows,
            budget=open_budget(config, [layer for layer, _ in splits]),
            shard_targets=config.cache.shard_targets,
        )
    return list(report.lines())


def _dataset(config: Config) -> Path:
    return Path(config.paths.cache_folder) / "dataset"


def _admissions(config: Config) -> Admissions:
    return Admissions(Path(config.paths.cache_folder))
