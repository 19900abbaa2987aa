"""From a configuration to a job: whatever can be wrong with the input is found here, before anything is touched."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from distill.cache import LayerSpec
from distill.config import Config
from distill.dataset import read_samples
from distill.errors import InputError
from distill.models import compute_dtype, config_digest, read_model_config, resolve_device, weight_files, weights_digest
from distill.report import Console
from distill.student import StudentSpec
from distill.teacher import TeacherSpec
from distill.tokenizer import (
    DatasetCounts,
    SampleRules,
    SampleTokenizer,
    fit_vocabularies,
    is_completion_model,
    load_tokenizer,
    resolve_template,
    token_map_digest,
    tokenize_dataset,
)
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


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """Everything that the stages need, checked. ``layer`` says which records, ``splits`` for which targets."""

    config: Config
    layer: LayerSpec
    teacher: TeacherSpec
    student: StudentSpec
    splits: dict[str, Split]

    @property
    def dataset_folder(self) -> Path:
        """Where the layers of all splits are; the cap counts what is in here."""
        return Path(self.config.paths.cache_folder) / "dataset"

    def identity(self) -> dict[str, str]:
        """Digests of what a training starts from, by the name that a message uses."""
        cache_folder = Path(self.config.paths.cache_folder)
        return {
            "the teacher or its settings": self.layer.hex,
            "the student": weights_digest(self.student.folder, cache_folder / "digests.json"),
            "the student's configuration": config_digest(self.student.folder),
            "the training samples": self.splits["train"].digest(),
            "the validation samples": self.splits["validation"].digest(),
        }


def prepare(config: Config, console: Console) -> Job:
    """Read models' descriptions and the text, tokenise it, and check that all fits together.

    Raises InputError for whatever the user has to mend. Loads no weights and writes nothing but digests.
    """
    teacher_folder = find_teacher(_required(config.paths.teacher_models_folder, "teacher_models_folder"))
    student_folder = Path(_required(config.paths.student_path, "student_path"))
    _required(config.paths.dataset_path, "dataset_path")
    device = resolve_device(config.model.device)
    trust = config.pipeline.trust_remote_code
    weight_files(teacher_folder)
    weight_files(student_folder)
    teacher_tokenizer = load_tokenizer(teacher_folder, trust_remote_code=trust)
    student_tokenizer = load_tokenizer(student_folder, trust_remote_code=trust)
    crop = fit_vocabularies(teacher_tokenizer, student_tokenizer, config.model.crop_distr_to_size)
    for role, folder in (("teacher", teacher_folder), ("student", student_folder)):
        _check_model(role, folder, crop, config.model.context_len, console)
    models = [(student_folder, student_tokenizer), (teacher_folder, teacher_tokenizer)]
    template = resolve_template(config.student.prompt_format, models)
    rules = SampleRules(
        context_len=config.model.context_len,
        crop=crop,
        add_bos=config.student.add_bos,
        saved_roles=saved_roles(config),
        train_turn_end=config.model.train_turn_end,
        long_samples=config.model.long_samples,
    )
    sample_tokenizer = SampleTokenizer(student_tokenizer, template, rules)
    splits = _read_splits(config, sample_tokenizer, is_completion_model(teacher_folder, teacher_tokenizer), console)
    dtype = compute_dtype(teacher_folder, config.collection.teacher_dtype, device)
    top_k = min(config.model.save_topK, crop)
    return Job(
        config=config,
        layer=LayerSpec(
            teacher=teacher_folder.name,
            weights=weights_digest(teacher_folder, Path(config.paths.cache_folder) / "digests.json"),
            dtype=dtype,
            model_config=config_digest(teacher_folder),
            quantisation="none",
            attention="default",
            token_map=token_map_digest(student_tokenizer, crop),
            vocab_size=crop,
            mode="topk",
            top_k=top_k,
            cache_precision=config.cache.cache_precision,
        ),
        teacher=TeacherSpec(teacher_folder, dtype, device, crop, top_k, trust),
        student=StudentSpec(
            folder=student_folder,
            precision=config.training.training_precision,
            device=device,
            vocab_size=crop,
            grad_checkpointing=config.training.grad_checkpointing,
            trust_remote_code=trust,
            chat_template=template.jinja() if template else None,
        ),
        splits=splits,
    )


def find_teacher(path: str) -> Path:
    """The one teacher that ``path`` is or holds."""
    folder = Path(path)
    if not folder.is_dir():
        raise InputError(f"teacher_models_folder: {folder} is not a folder")
    if (folder / "config.json").is_file():
        return folder
    teachers = sorted(child for child in folder.iterdir() if (child / "config.json").is_file())
    if not teachers:
        raise InputError(f"teacher_models_folder: {folder} holds no model (a folder with config.json and weights)")
    if len(teachers) > 1:
        names = ", ".join(teacher.name for teacher in teachers[:3])
        raise InputError(f"teacher_models_folder: several teachers ({names}) are not available yet; name one of them")
    return teachers[0]


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


def _required(value: str | Sequence[str] | None, key: str) -> str:
    if not value:
        raise InputError(f"{key}: not given; set it in the configuration file or with --{key}")
    return value if isinstance(value, str) else ""


def _check_model(role: str, folder: Path, crop: int, context_len: int, console: Console) -> None:
    description = read_model_config(folder)
    rows = description.get("vocab_size")
    if isinstance(rows, int) and rows < crop:
        raise InputError(
            f"{folder}: its head has {rows} rows for {crop} tokens; set crop_distr_to_size to {rows} at most"
        )
    positions = description.get("max_position_embeddings") or description.get("n_positions")
    if isinstance(positions, int) and positions < context_len:
        console.warn(f"context_len {context_len} is beyond the {role}'s {positions} positions")


def _read_splits(
    config: Config, tokenizer: SampleTokenizer, completion_teacher: bool, console: Console
) -> dict[str, Split]:
    train = _tokenize("train", config.paths.dataset_path, config, tokenizer, completion_teacher, console)
    if config.paths.validation_dataset_path:
        path = config.paths.validation_dataset_path
        validation = _tokenize("validation", path, config, tokenizer, completion_teacher, console)
    else:
        train, validation = hold_out(train, config.pipeline.validation_fraction)
        console.say(f"held out {len(validation)} of {len(train) + len(validation)} samples for validation, by key")
    known = {sample.key for sample in train}
    overlap = sum(sample.key in known for sample in validation)
    if overlap:
        console.warn(f"{overlap} of {len(validation)} validation samples are also trained on; their metrics flatter")
    return {"train": Split(tuple(train)), "validation": Split(tuple(validation))}


def _tokenize(
    split: str,
    path: str | Sequence[str] | None,
    config: Config,
    tokenizer: SampleTokenizer,
    completion_teacher: bool,
    console: Console,
) -> list[TokenizedSample]:
    assert path is not None
    skipped: list[str] = []

    def scored() -> Iterator[Sample]:
        for sample in read_samples(path):
            if config.pipeline.ignore_model_type or sample.is_completion == completion_teacher:
                yield sample
            else:
                skipped.append(sample.where)

    samples = list(scored())
    if skipped:
        kind, other = ("a completion", "conversations") if completion_teacher else ("an instruct", "completions")
        what = f"{len(skipped)} {other} ({skipped[0]} first): the teacher is {kind} model"
        if not samples:
            raise InputError(
                f"{split}: nothing left to score, {what}; set ignore_model_type to score them all the same"
            )
        console.warn(f"{split}: skipped {what}")
    tokenized = tokenize_dataset(samples, tokenizer)
    targets = sum(len(sample.targets) for sample in tokenized.samples)
    console.say(f"{split}: {describe_counts(tokenized.counts)}, {targets:,} targets")
    return list(tokenized.samples)


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
