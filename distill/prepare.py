"""From a configuration to a job: whatever can be wrong with the input is found here, before anything is touched."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from distill.adapters import DEFAULT_RANK, AdapterSpec
from distill.cache import Admissions, LayerSpec
from distill.config import Config, memory_bytes
from distill.dataset import read_samples
from distill.errors import InputError
from distill.making import student_folder
from distill.models import (
    FLASH,
    PipelineConfig,
    compute_dtype,
    config_digest,
    quantisation,
    read_model_config,
    read_pipeline_config,
    require_flash_attention,
    resolve_device,
    weight_files,
    weights_digest,
)
from distill.placement import FROZEN_BYTES, TRAINED_BYTES, Spread, plan_spread, visible_gpus
from distill.report import Console
from distill.splits import Split, cached_splits, cut_to_stored, read_splits, saved_roles, warn_of_gaps
from distill.student import StudentSpec
from distill.teacher import TeacherSpec
from distill.teachers import (
    JobTeacher,
    cached_layers,
    check_distinct,
    choose_cached,
    find_teachers,
    serving_layers,
    weigh,
)
from distill.tokenizer import (
    SampleRules,
    SampleTokenizer,
    fit_vocabularies,
    is_completion_model,
    load_tokenizer,
    real_vocab_size,
    resolve_template,
    token_map_digest,
)
from distill.types import Sample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """Everything that the stages need, checked: which teachers score which targets for which student."""

    config: Config
    teachers: tuple[JobTeacher, ...]
    student: StudentSpec
    splits: dict[str, Split]
    admissions: Admissions

    @property
    def dataset_folder(self) -> Path:
        """Where the layers of all splits are; the cap counts what is in here."""
        return Path(self.config.paths.cache_folder) / "dataset"

    @property
    def top_k(self) -> int:
        """Entries of a record, of the teacher that keeps most."""
        return max(teacher.layer.top_k for teacher in self.teachers)

    @property
    def name(self) -> str:
        """The teachers' names, for a folder."""
        return "+".join(teacher.layer.teacher for teacher in self.teachers)

    def identity(self) -> dict[str, str]:
        """Digests of what a training starts from, by the name that a message uses."""
        cache_folder = Path(self.config.paths.cache_folder)
        return {
            "the teachers or their settings": " ".join(sorted(teacher.layer.hex for teacher in self.teachers)),
            "the student": weights_digest(self.student.folder, cache_folder / "digests.json"),
            "the student's configuration": config_digest(self.student.folder),
            "the training samples": self.splits["train"].digest(),
            "the validation samples": self.splits["validation"].digest(),
        }


@contextmanager
def prepared(config: Config, console: Console) -> Iterator[Job]:
    """``prepare``, and the gate's process ended behind it."""
    job = prepare(config, console)
    with job.admissions:
        yield job


def prepare(config: Config, console: Console) -> Job:
    """Read models' descriptions and the text, tokenise it, and check that all fits together.

    Raises InputError for whatever the user has to mend. Loads no weights and writes nothing but digests.
    """
    folder = student_folder(config)
    weight_files(folder)
    if quantisation(folder) != "none":
        raise InputError(
            f"student_path: the weights of {folder} are packed ({quantisation(folder)}) and can't be trained; give the"
            " model that they were made from"
        )
    student_tokenizer = load_tokenizer(folder, trust_remote_code=config.pipeline.trust_remote_code)
    admissions = Admissions(Path(config.paths.cache_folder))
    add_bos = config.student.add_bos
    if config.pipeline.use_teachers:
        folders = find_teachers(_required(config.paths.teacher_models_folder, "teacher_models_folder"), console)
        _required(config.paths.dataset_path, "dataset_path")
        add_bos = _add_bos(config, folders)
        teachers, models = _loaded_teachers(config, student_tokenizer, add_bos, folders, console)
    else:
        teachers, models = _cached_teachers(config, student_tokenizer, admissions, console), []
    crop = teachers[0].layer.vocab_size
    _check_model("student", folder, crop, config.model.context_len, console)
    template = resolve_template(config.student.prompt_format, [(folder, student_tokenizer), *models])
    if config.pipeline.use_teachers or config.paths.dataset_path:
        sample_tokenizer = SampleTokenizer(student_tokenizer, template, _sample_rules(config, crop, add_bos))
        splits = read_splits(config, sample_tokenizer, teachers, console)
        if not config.pipeline.use_teachers:
            splits = cut_to_stored(splits, config, teachers, admissions, console)
    else:
        splits = cached_splits(config, teachers, admissions, console)
    if not config.pipeline.use_teachers:
        warn_of_gaps(splits, config, teachers, admissions, console)
    return Job(
        config=config,
        teachers=tuple(teachers),
        student=_student_spec(config, folder, crop, template.jinja() if template else None, console),
        splits=splits,
        admissions=admissions,
    )


@dataclass(frozen=True, slots=True, eq=False)
class Text:
    """The text dataset for records that come from elsewhere: tokenised for the student alone.

    ``rows`` are the samples as they were read, by their ``where``; ``token_map`` is the digest of the ids below
    ``vocab_size``.
    """

    token_map: str
    vocab_size: int
    splits: dict[str, Split]
    rows: dict[str, Sample]


def prepare_text(config: Config, console: Console) -> Text:
    """Read and tokenise the text dataset without any teacher; InputError as ``prepare``."""
    folder = student_folder(config)
    tokenizer = load_tokenizer(folder, trust_remote_code=config.pipeline.trust_remote_code)
    path = config.paths.dataset_path
    _required(path, "dataset_path")
    crop = min(config.model.crop_distr_to_size or real_vocab_size(tokenizer), real_vocab_size(tokenizer))
    template = resolve_template(config.student.prompt_format, [(folder, tokenizer)])
    sample_tokenizer = SampleTokenizer(tokenizer, template, _sample_rules(config, crop, config.student.add_bos))
    paths = [*_as_list(path), *_as_list(config.paths.validation_dataset_path)]
    downloads = config.pipeline.allow_downloads
    return Text(
        token_map=token_map_digest(tokenizer, crop),
        vocab_size=crop,
        splits=read_splits(config, sample_tokenizer, None, console),
        rows={sample.where: sample for sample in read_samples(paths, allow_downloads=downloads)},
    )


# -- teachers ---------------------------------------------------------------------------------------------------------


def _loaded_teachers(
    config: Config,
    student_tokenizer: "PreTrainedTokenizerBase",
    add_bos: bool | None,
    folders: Sequence[Path],
    console: Console,
) -> tuple[list[JobTeacher], "list[tuple[Path, PreTrainedTokenizerBase]]"]:
    """The teachers in ``folders``, in that order, and their folders with tokenizers."""
    weights = weigh([folder.name for folder in folders], config.collection.teacher_weights)
    folders = [folder for folder, weight in zip(folders, weights, strict=True) if weight]
    weights = [weight for weight in weights if weight]
    if not folders:
        raise InputError("teacher_weights: all teachers weigh 0; at least one has to count")
    trust = config.pipeline.trust_remote_code
    models = [(folder, load_tokenizer(folder, trust_remote_code=trust)) for folder in folders]
    # One crop for all: the smallest, so that every teacher's ids mean the same to the student.
    wanted = config.model.crop_distr_to_size
    crop = min(fit_vocabularies(tokenizer, student_tokenizer, wanted, folder.name) for folder, tokenizer in models)
    token_map = token_map_digest(student_tokenizer, crop)
    teachers = []
    for (folder, tokenizer), weight in zip(models, weights, strict=True):
        _check_model("teacher", folder, crop, config.model.context_len, console)
        own = read_pipeline_config(folder)
        completions = None if config.pipeline.ignore_model_type else is_completion_model(tokenizer, own.completion)
        for note in own.notes(add_bos):
            console.warn(note)
        spec = _teacher_spec(config, folder, own, crop)
        teachers.append(JobTeacher(_layer_spec(config, spec, token_map), weight, completions, spec, own.batch_size))
    check_distinct(teachers)
    return teachers, models


def _teacher_spec(config: Config, folder: Path, own: PipelineConfig, crop: int) -> TeacherSpec:
    device = resolve_device(config.model.device)
    dtype = compute_dtype(folder, config.collection.teacher_dtype, device)
    if config.training.use_flash_attn_2:
        require_flash_attention(device, dtype, "teacher_dtype")
    return TeacherSpec(
        folder=folder,
        dtype=dtype,
        device=device,
        vocab_size=crop,
        top_k=min(config.model.save_topK, crop) if config.model.enable_topK else crop,
        trust_remote_code=config.pipeline.trust_remote_code,
        head_dtype=config.collection.head_dtype,
        seq_chunk_len=config.collection.seq_chunk_len or own.seq_chunk_len,
        attention=FLASH if config.training.use_flash_attn_2 else None,
    )


def _layer_spec(config: Config, spec: TeacherSpec, token_map: str) -> LayerSpec:
    head = "" if spec.head_dtype in ("auto", spec.dtype) else f", head {spec.head_dtype}"
    return LayerSpec(
        teacher=spec.folder.name,
        weights=weights_digest(spec.folder, Path(config.paths.cache_folder) / "digests.json"),
        dtype=f"{spec.dtype}{head}",
        model_config=config_digest(spec.folder),
        quantisation=quantisation(spec.folder),
        attention=spec.attention or "default",
        token_map=token_map,
        vocab_size=spec.vocab_size,
        mode="full" if spec.top_k == spec.vocab_size else "topk",
        top_k=spec.top_k,
        cache_precision=config.cache.cache_precision,
    )


def _add_bos(config: Config, folders: Sequence[Path]) -> bool | None:
    """``add_bos`` of the run; where that is null, what all teachers' own files agree on. One rendering for all."""
    if config.student.add_bos is not None:
        return config.student.add_bos
    told = {read_pipeline_config(folder).add_bos for folder in folders}
    return told.pop() if len(told) == 1 else None


def _cached_teachers(
    config: Config, student_tokenizer: "PreTrainedTokenizerBase", admissions: Admissions, console: Console
) -> list[JobTeacher]:
    """The teachers whose layers the cache holds for the student's tokens; one weighed 0 is left out."""
    dataset_folder = Path(config.paths.cache_folder) / "dataset"
    specs = list(cached_layers(dataset_folder, admissions, console))
    crop = config.model.crop_distr_to_size
    sizes = {spec.vocab_size for spec, _ in specs if crop in (None, spec.vocab_size)}
    layers = serving_layers(
        specs,
        token_maps={size: token_map_digest(student_tokenizer, size) for size in sizes},
        top_k=config.model.save_topK if config.model.enable_topK else None,
        where=dataset_folder,
    )
    chosen = choose_cached(layers, config.collection.teacher_weights)
    if len({layer.vocab_size for layer, _ in chosen}) > 1:
        sizes_named = ", ".join(str(layer.vocab_size) for layer, _ in chosen)
        raise InputError(f"crop_distr_to_size: the cache has layers of {sizes_named} ids; set it to one of these")
    for layer, weight in chosen:
        console.say(f"teacher from the cache: {layer.folder_name}, weight {weight:g}")
    return [JobTeacher(layer, weight, None, None) for layer, weight in chosen]


def _sample_rules(config: Config, crop: int, add_bos: bool | None) -> SampleRules:
    return SampleRules(
        context_len=config.model.context_len,
        crop=crop,
        add_bos=add_bos,
        saved_roles=saved_roles(config),
        train_turn_end=config.model.train_turn_end,
        long_samples=config.model.long_samples,
    )


def _as_list(paths: str | Sequence[str] | None) -> list[str]:
    return [paths] if isinstance(paths, str) else list(paths or ())


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
        # Rotary and relative positions go on behind the trained ones, learned ones end there.
        if not any(word in name for name in description for word in ("rope", "rotary", "alibi")):
            raise InputError(
                f"context_len: {context_len} is beyond the {positions} positions that the {role} {folder} has; set it"
                f" to {positions} at most"
            )
        console.warn(f"context_len {context_len} is beyond the {role}'s {positions} positions")


# -- the student ------------------------------------------------------------------------------------------------------


def _student_spec(config: Config, folder: Path, crop: int, chat_template: str | None, console: Console) -> StudentSpec:
    training = config.training
    device = (
        resolve_device(training.student_device, key="student_device")
        if training.student_device
        else resolve_device(config.model.device)
    )
    spec = StudentSpec(
        folder=folder,
        precision=training.training_precision,
        device=device,
        vocab_size=crop,
        grad_checkpointing=training.grad_checkpointing,
        trust_remote_code=config.pipeline.trust_remote_code,
        chat_template=chat_template,
        freeze_layers=config.student.freeze_layers,
        packing=training.packing,
        adapters=_adapters(config),
        spread=_spread(config, console) if training.multi_gpu else None,
        attention=FLASH if training.use_flash_attn_2 else None,
    )
    if training.use_flash_attn_2:
        require_flash_attention(device, "bf16" if spec.quantise else spec.precision, "training_precision")
    return spec


def _spread(config: Config, console: Console) -> Spread:
    training = config.training
    frozen = _adapters(config) is not None
    spread, notes = plan_spread(
        visible_gpus(),
        strategy=training.device_map,
        max_memory={name: memory_bytes(size) for name, size in (training.max_memory or {}).items()},
        first_layers=training.num_gpu0_layers,
        bytes_per_weight_byte=FROZEN_BYTES if frozen else TRAINED_BYTES,
    )
    for note in notes:
        console.warn(note)
    return spread


def _adapters(config: Config) -> AdapterSpec | None:
    """Adapters where they are asked for, or the student's weights are packed and can't learn themselves."""
    training = config.training
    rank = training.lora_rank
    if rank is None and training.training_precision in ("8bit", "4bit"):
        rank = DEFAULT_RANK
    if rank is None:
        return None
    return AdapterSpec(
        rank=rank,
        alpha=2.0 * rank if training.lora_alpha is None else training.lora_alpha,
        targets=training.lora_targets,
        dropout=training.lora_dropout,
        seed=config.pipeline.seed,
        merge_into=training.merge_into,
    )
