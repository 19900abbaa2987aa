"""The teachers of a job: models in a folder, or layers that a cache already holds when ``use_teachers`` is false."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from distill.cache import Admissions, Layer, LayerSpec, find_layers
from distill.config import suggest
from distill.errors import InputError
from distill.models import weight_files
from distill.report import Console
from distill.teacher import TeacherSpec
from distill.types import Sample, TokenizedSample

_SMALLEST_WEIGHT = 1e-6
_MODEL_FILES = ("config.json", "*.safetensors", "*.bin", "*.gguf", "tokenizer.json")


@dataclass(frozen=True, slots=True, eq=False)
class JobTeacher:
    """One teacher of a job.

    ``layer`` says which records are its, ``weight`` how much they count. ``completions``: it scores only completions
    (True), only conversations (False), or both (None). ``spec`` loads it; None if it isn't here and its records are
    only read, wherever there are some. ``batch_size``: most samples in one of its batches; None: as many as fit.
    """

    layer: LayerSpec
    weight: float
    completions: bool | None
    spec: TeacherSpec | None
    batch_size: int | None = None

    def scores(self, sample: Sample | TokenizedSample) -> bool:
        """Whether it is meant to score ``sample``."""
        return self.completions in (None, sample.is_completion)


def find_teachers(path: str, console: Console) -> list[Path]:
    """The model folders that ``path`` is or holds, by name; what else lies there is named and ignored.

    Raises InputError if there is none, or if one of them isn't whole.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise InputError(f"teacher_models_folder: {folder} is not a folder")
    inside = sorted(child for child in folder.iterdir() if not child.name.startswith("."))
    teachers = [child for child in inside if child.is_dir() and _is_model(child)]
    # A model may have folders of its own beside its weights; a folder of models a stray file.
    whole = (folder / "config.json").is_file() and any(folder.glob("*.safetensors"))
    if whole or (_is_model(folder) and not teachers):
        weight_files(folder)
        return [folder]
    strays = [child.name for child in inside if child not in teachers]
    if not teachers:
        raise InputError(f"teacher_models_folder: {folder} holds no model (a folder with config.json and weights)")
    if strays:
        shown = ", ".join(strays[:5]) + (" …" if len(strays) > 5 else "")
        console.warn(f"teacher_models_folder: ignored what is no model: {shown}")
    for teacher in teachers:
        weight_files(teacher)
    return teachers


def weigh(names: Sequence[str], weights: Mapping[str, float]) -> list[float]:
    """The weight of each named teacher; 1 where none is given. InputError for a name that isn't there."""
    for name in weights:
        if name not in names:
            raise InputError(f"teacher_weights: no teacher is named {name!r}{suggest(name, names)}")
    for name, weight in weights.items():
        if 0 < weight < _SMALLEST_WEIGHT:
            raise InputError(
                f"teacher_weights: {name!r} weighs {weight:g}; 0 leaves it out, {_SMALLEST_WEIGHT:g} is least"
            )
    return [weights.get(name, 1.0) for name in names]


def check_distinct(teachers: Iterable[JobTeacher]) -> None:
    """Raises InputError if two teachers are the same model under the same settings."""
    names: dict[str, str] = {}
    for teacher in teachers:
        other = names.setdefault(teacher.layer.hex, teacher.layer.teacher)
        if other != teacher.layer.teacher:
            raise InputError(
                f"teacher_models_folder: {other} and {teacher.layer.teacher} are the same model; keep one of them"
            )


def cached_layers(dataset_folder: Path, admissions: Admissions, console: Console) -> Iterator[tuple[LayerSpec, int]]:
    """The layers of a cache's training split and their samples; one that can't be read is named and left out."""
    for folder in find_layers(dataset_folder / "train"):
        try:
            with Layer.load(folder, admissions) as layer:
                if layer.shards:
                    yield layer.spec, sum(info.samples for info in layer.shards.values())
        except InputError as error:
            console.warn(f"left out: {error}")


def choose_cached(layers: Sequence[LayerSpec], weights: Mapping[str, float]) -> list[tuple[LayerSpec, float]]:
    """The layers to merge with their weights, which are by the teacher's name or the layer's folder; 0 leaves one out.

    InputError if two of them have one teacher's name: they would be merged as if they were two.
    """
    folders = [layer.folder_name for layer in layers]
    for name in weights:
        if name not in folders and name not in [layer.teacher for layer in layers]:
            raise InputError(f"teacher_weights: no layer is of {name!r}{suggest(name, folders)}")
    weighed = [(layer, weights.get(layer.folder_name, weights.get(layer.teacher, 1.0))) for layer in layers]
    chosen = [(layer, weight) for layer, weight in weighed if weight]
    if not chosen:
        raise InputError("teacher_weights: all teachers weigh 0; at least one has to count")
    for layer, _ in chosen:
        twins = [other.folder_name for other, _ in chosen if other.teacher == layer.teacher]
        if len(twins) > 1:
            raise InputError(
                f"teacher_weights: the cache has several layers of {layer.teacher}: {', '.join(twins)}; give all but"
                " one of them the weight 0, or remove them"
            )
    return chosen


def serving_layers(
    layers: Iterable[tuple[LayerSpec, int]], *, token_maps: Mapping[int, str], top_k: int | None, where: Path
) -> list[LayerSpec]:
    """One layer a teacher, of those in a cache that fit the student, as it serves ``top_k`` entries (None: all).

    ``layers`` are specs with their numbers of samples: of a teacher's the one with most counts, of equal ones the
    richer; what richer ones hold beside it serves as well. ``token_maps`` has the digest of the student's ids below
    each crop in question. Raises InputError if none fits.
    """
    largest: dict[LayerSpec, tuple[int, int, bool, LayerSpec]] = {}
    unfit = []
    for spec, samples in layers:
        if token_maps.get(spec.vocab_size) != spec.token_map:
            unfit.append(spec.folder_name)
            continue
        same = replace(spec, teacher="", mode="topk", top_k=0, cache_precision="exact")
        rank = (samples, spec.top_k, spec.cache_precision == "exact")
        if same not in largest or rank > largest[same][:3]:
            largest[same] = (*rank, spec)
    if not largest:
        why = f"those of {', '.join(unfit[:3])} are for other tokens than the student's" if unfit else "it holds none"
        raise InputError(f"use_teachers: false needs a cache with layers for this student in {where}; {why}")
    return [_cut(spec, top_k) for *_, spec in largest.values()]


def _is_model(folder: Path) -> bool:
    return any(next(folder.glob(pattern), None) for pattern in _MODEL_FILES)


def _cut(spec: LayerSpec, top_k: int | None) -> LayerSpec:
    if top_k is None or top_k >= spec.top_k:
        return spec
    return replace(spec, mode="topk", top_k=top_k)
