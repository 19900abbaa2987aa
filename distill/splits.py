"""The samples of a job, by split: from text, or from a cache that was made elsewhere."""

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from distill.cache import Admissions, Source
from distill.config import Config
from distill.dataset import read_samples
from distill.errors import InputError
from distill.report import Console
from distill.sharing import samples_of
from distill.teachers import JobTeacher
from distill.tokenizer import DatasetCounts, SampleTokenizer, tokenize_dataset
from distill.types import Role, Sample, TokenizedSample

SPLITS = ("train", "validation")


@dataclass(frozen=True, slots=True, eq=False)
class Split:
    """The samples of a split in dataset order, duplicates included."""

    samples: tuple[TokenizedSample, ...]

    @property
    def tokens(self) -> int:
        """Tokens of all samples."""
        return sum(len(sample.token_ids) for sample in self.samples)

    @property
    def targets(self) -> int:
        """Targets of all samples."""
        return sum(len(sample.targets) for sample in self.samples)

    def distinct(self) -> list[TokenizedSample]:
        """Each sample once, with the targets of all its duplicates."""
        return distinct(self.samples)

    def digest(self) -> str:
        """Stands for the samples, their order and their targets."""
        total = hashlib.sha256()
        for sample in self.samples:
            total.update(sample.key)
            total.update(len(sample.targets).to_bytes(8, "little"))
            total.update(sample.targets.tobytes())
        return total.hexdigest()


def read_splits(
    config: Config, tokenizer: SampleTokenizer, teachers: Sequence[JobTeacher] | None, console: Console
) -> dict[str, Split]:
    """The samples of the configured text, tokenised; those of no teacher's kind are skipped, and counted aloud.

    All samples are taken if ``teachers`` is None.
    """
    train = _tokenize("train", config.paths.dataset_path, config, tokenizer, teachers, console)
    if config.paths.validation_dataset_path:
        path = config.paths.validation_dataset_path
        validation = _tokenize("validation", path, config, tokenizer, teachers, console)
    else:
        train, validation = _held_out(train, config, console)
    _warn_of_overlap(train, validation, console)
    return {"train": Split(tuple(train)), "validation": Split(tuple(validation))}


def _tokenize(
    split: str,
    path: str | Sequence[str] | None,
    config: Config,
    tokenizer: SampleTokenizer,
    teachers: Sequence[JobTeacher] | None,
    console: Console,
) -> list[TokenizedSample]:
    assert path is not None
    skipped: list[Sample] = []

    def scored() -> Iterator[Sample]:
        for sample in read_samples(path, allow_downloads=config.pipeline.allow_downloads):
            if teachers is None or any(teacher.scores(sample) for teacher in teachers):
                yield sample
            else:
                skipped.append(sample)

    samples = list(scored())
    if skipped:
        assert teachers, "somebody didn't want them"
        kind, other = ("instruct", "completions") if skipped[0].is_completion else ("completion", "conversations")
        who = "the teacher is" if len(teachers) == 1 else "all teachers are"
        what = f"{len(skipped)} {other} ({skipped[0].where} first): {who} of the {kind} kind"
        if not samples:
            raise InputError(
                f"{split}: nothing left to score, {what}; set ignore_model_type to score them all the same"
            )
        console.warn(f"{split}: skipped {what}")
    tokenized = tokenize_dataset(samples, tokenizer)
    targets = sum(len(sample.targets) for sample in tokenized.samples)
    console.say(f"{split}: {describe_counts(tokenized.counts)}, {targets:,} targets")
    return list(tokenized.samples)


def cached_splits(
    config: Config, teachers: Sequence[JobTeacher], admissions: Admissions, console: Console
) -> dict[str, Split]:
    """The samples that a cache itself holds, with those of their targets that the configuration asks for."""
    dataset_folder = Path(config.paths.cache_folder) / "dataset"
    splits: dict[str, list[TokenizedSample]] = {}
    for split in SPLITS:
        found: dict[bytes, TokenizedSample] = {}
        for teacher in teachers:
            with Source.open(dataset_folder / split, teacher.layer, admissions) as source:
                for layer in (source.own, *source.larger):
                    for sample in samples_of(layer):
                        found.setdefault(sample.key, sample)
        wanted = [_restrict(sample, config) for sample in found.values()]
        splits[split] = [s for s in wanted if len(s.targets) and len(s.token_ids) <= config.model.context_len]
        targets = sum(len(sample.targets) for sample in splits[split])
        left_out = len(wanted) - len(splits[split])
        note = f", {left_out:,} left out: without a wanted target or over context_len" if left_out else ""
        console.say(f"{split}: {len(splits[split]):,} samples from the cache itself{note}, {targets:,} targets")
    if not splits["train"]:
        raise InputError(f"{dataset_folder}: the cache holds no samples to train on; give a dataset_path or another")
    if not splits["validation"]:
        splits["train"], splits["validation"] = _held_out(splits["train"], config, console)
    _warn_of_overlap(splits["train"], splits["validation"], console)
    return {split: Split(tuple(samples)) for split, samples in splits.items()}


def cut_to_stored(
    splits: dict[str, Split], config: Config, teachers: Sequence[JobTeacher], admissions: Admissions, console: Console
) -> dict[str, Split]:
    """For records that can't be collected: samples of which a cache holds only some targets keep just those.

    An imported cache lacks for example the first token of a completion. What was left out is said.
    """
    dataset_folder = Path(config.paths.cache_folder) / "dataset"
    return {
        split: Split(tuple(_cut_split(split, dataset_folder / split, whole.samples, teachers, admissions, console)))
        for split, whole in splits.items()
    }


def _cut_split(
    split: str,
    folder: Path,
    samples: Sequence[TokenizedSample],
    teachers: Sequence[JobTeacher],
    admissions: Admissions,
    console: Console,
) -> list[TokenizedSample]:
    lacking = {sample.key for sample in samples}
    stored: dict[bytes, npt.NDArray[np.int32]] = {}
    with ExitStack() as stack:
        sources = [stack.enter_context(Source.open(folder, t.layer, admissions)) for t in teachers]
        for source in sources:
            lacking -= source.locate(distinct(samples)).keys()
        for layer in (layer for source in sources for layer in (source.own, *source.larger)):
            for name in layer.shards if lacking else ():
                for row, key in enumerate(layer.keys(name)):
                    if key in lacking:
                        targets = layer.reader(name).targets(row)
                        stored[key] = max(stored.get(key, targets), targets, key=len)
    cut = [
        replace(sample, targets=np.intersect1d(sample.targets, stored[sample.key])) if sample.key in stored else sample
        for sample in samples
    ]
    lost = sum(len(sample.targets) for sample in samples) - sum(len(sample.targets) for sample in cut)
    if lost:
        console.warn(f"{split}: {lost:,} targets are left out: the cache holds their samples, but not them")
    return [sample for sample in cut if len(sample.targets)]


def _restrict(sample: TokenizedSample, config: Config) -> TokenizedSample:
    """The sample with those targets that ``save_*_range`` and ``train_turn_end`` leave.

    A target outside all spans ends the turn of the last span before it.
    """
    roles = saved_roles(config)
    wanted = np.zeros(len(sample.token_ids), bool)
    for span in sorted(sample.spans, key=lambda span: span.start):
        wanted[span.start : span.end] = span.role in roles
        wanted[span.end :] = span.role in roles and config.model.train_turn_end
    return replace(sample, targets=sample.targets[wanted[sample.targets]])


def warn_of_gaps(
    splits: dict[str, Split], config: Config, teachers: Sequence[JobTeacher], admissions: Admissions, console: Console
) -> None:
    """Say which cached teachers lack samples that others have: they drop out of them."""
    for split, whole in splits.items():
        for teacher in teachers:
            folder = Path(config.paths.cache_folder) / "dataset" / split
            with Source.open(folder, teacher.layer, admissions) as source:
                samples = whole.distinct()
                lacking = len(samples) - len(source.locate(samples))
            if len(teachers) > 1 and lacking:
                name = teacher.layer.folder_name
                console.warn(f"{split}: {name} lacks {lacking:,} of {len(samples):,} samples; others serve them alone")


def _held_out(
    train: list[TokenizedSample], config: Config, console: Console
) -> tuple[list[TokenizedSample], list[TokenizedSample]]:
    train, validation = hold_out(train, config.pipeline.validation_fraction)
    console.say(f"held out {len(validation)} of {len(train) + len(validation)} samples for validation, by key")
    return train, validation


def _warn_of_overlap(train: list[TokenizedSample], validation: list[TokenizedSample], console: Console) -> None:
    known = {sample.key for sample in train}
    overlap = sum(sample.key in known for sample in validation)
    if overlap:
        console.warn(f"{overlap} of {len(validation)} validation samples are also trained on; their metrics flatter")


def describe_counts(counts: DatasetCounts) -> str:
    """The counts on one line; what wasn't used whole is named only where there is some."""
    parts = [f"{counts.samples:,} samples ({counts.conversations:,} conversations, {counts.completions:,} completions)"]
    for name in ("chunked", "truncated", "dropped"):
        if number := getattr(counts, name):
            parts.append(f"{number:,} {name}")
    if counts.without_target:
        parts.append(f"{counts.without_target:,} without a target (first: {counts.first_without_target})")
    return ", ".join(parts)


def hold_out(
    samples: Sequence[TokenizedSample], fraction: float
) -> tuple[list[TokenizedSample], list[TokenizedSample]]:
    """Split off about ``fraction`` of the samples by their keys, so that no other sample changes a sample's side.

    The pieces of a long sample stay together: the first one's key decides. At least one distinct sample goes to each
    side; InputError if there is only one.
    """
    deciding: dict[str, bytes] = {}
    for sample in samples:
        deciding.setdefault(sample.where, sample.key)
    keys = sorted(set(deciding.values()))
    if len(keys) < 2:
        raise InputError("dataset_path: one sample can't be split; give a validation_dataset_path")
    limit = int(fraction * (1 << 64)).to_bytes(9, "big")[1:]
    held = {key for key in keys if key[:8] < limit} or {keys[0]}
    held -= {keys[-1]}
    sides: tuple[list[TokenizedSample], list[TokenizedSample]] = ([], [])
    for sample in samples:
        sides[deciding[sample.where] in held].append(sample)
    return sides


def distinct(samples: Sequence[TokenizedSample]) -> list[TokenizedSample]:
    """Each sample once, by key, at its first place; its targets are those of all its duplicates."""
    first: dict[bytes, TokenizedSample] = {}
    for sample in samples:
        known = first.setdefault(sample.key, sample)
        if known is not sample and not np.array_equal(known.targets, sample.targets):
            first[sample.key] = replace(known, targets=np.union1d(known.targets, sample.targets))
    return list(first.values())


def saved_roles(config: Config) -> frozenset[Role]:
    """The roles whose contents are targets; a completion's text always is."""
    model = config.model
    flags: dict[Role, bool] = {
        "system": model.save_sys_range,
        "user": model.save_user_range,
        "assistant": model.save_assistant_range,
        "completion": True,
    }
    return frozenset(role for role, saved in flags.items() if saved)
