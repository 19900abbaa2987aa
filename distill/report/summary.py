"""summary.json, version 1: the interface for whoever compares runs; docs/summary.md says what each key means.

Every key is always there; what is unknown is null. Within a version keys may be added, none is removed or changed.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from types import NoneType
from typing import Any, Literal, get_args, get_type_hints

from distill.errors import InputError

VERSION = 1

Status = Literal["running", "completed", "interrupted", "failed"]
_SPLITS = ("train", "validation")
_WHEN = ("before", "after")


@dataclass(frozen=True, slots=True)
class SplitSummary:
    """A split of the text dataset, as it is trained or validated on."""

    samples: int | None = None
    tokens: int | None = None
    targets: int | None = None


@dataclass(frozen=True, slots=True)
class CacheSummary:
    """The layers that serve the run, those of both splits together."""

    bytes: int | None = None
    targets: int | None = None
    bytes_per_target: float | None = None
    shards: int | None = None
    top_k: int | None = None
    kept_mass_mean: float | None = None
    reused_targets: int | None = None
    collected_targets: int | None = None
    rounds: int | None = None


@dataclass(frozen=True, slots=True)
class CollectSummary:
    """The teacher's work."""

    seconds: float | None = None
    tokens_per_second: float | None = None
    workers: int | None = None


@dataclass(frozen=True, slots=True)
class TrainSummary:
    """The student's training."""

    steps: int | None = None
    seconds: float | None = None
    tokens_per_second: float | None = None
    targets: int | None = None
    peak_memory_bytes: int | None = None
    resumed_from_step: int | None = None


@dataclass(frozen=True, slots=True)
class _Metrics:
    kl: float | None = None
    ce: float | None = None
    teacher_ce: float | None = None
    top1_agreement: float | None = None
    ece: float | None = None
    acceptance: float | None = None
    targets: int | None = None


@dataclass(frozen=True, slots=True)
class ValidationSummary:
    """The validation metrics by name, before and after training."""

    before: Mapping[str, float] = field(default_factory=dict)
    after: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """All of it. ``data`` is by split: train, validation."""

    status: Status = "running"
    data: Mapping[str, SplitSummary] = field(default_factory=dict)
    cache: CacheSummary = CacheSummary()
    collect: CollectSummary = CollectSummary()
    train: TrainSummary = TrainSummary()
    validation: ValidationSummary = ValidationSummary()

    def to_dict(self) -> dict[str, Any]:
        """The document, ready for JSON: plain numbers, text and None, nothing that isn't finite."""
        document: dict[str, Any] = finite(
            {
                "version": VERSION,
                "status": self.status,
                "data": {split: asdict(self.data.get(split, SplitSummary())) for split in _SPLITS},
                "cache": asdict(self.cache),
                "collect": asdict(self.collect),
                "train": asdict(self.train),
                "validation": {when: asdict(_Metrics(**getattr(self.validation, when))) for when in _WHEN},
            }
        )
        problems = list(_problems(document, _shape(), ""))
        assert not problems, problems
        return document


def check_summary(document: object, where: str) -> None:
    """Raises InputError, naming ``where`` and the key, unless ``document`` is a summary of this version."""
    for problem in _problems(document, _shape(), ""):
        raise InputError(f"{where}: {problem}; not a summary of version {VERSION}")


def finite(value: Any) -> Any:
    """``value`` with None for each NaN and infinity in it, which JSON doesn't have."""
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _shape() -> dict[str, Any]:
    """What a document looks like: for each key the types or the values it may have, or a shape in turn."""
    return {
        "version": {VERSION},
        "status": set(get_args(Status)),
        "data": dict.fromkeys(_SPLITS, _types(SplitSummary)),
        "cache": _types(CacheSummary),
        "collect": _types(CollectSummary),
        "train": _types(TrainSummary),
        "validation": dict.fromkeys(_WHEN, _types(_Metrics)),
    }


def _types(section: type) -> dict[str, tuple[type, ...]]:
    return {
        name: (int, float, NoneType) if float in get_args(hint) else (int, NoneType)
        for name, hint in get_type_hints(section).items()
    }


def _problems(value: object, shape: Any, key: str) -> Iterator[str]:
    if isinstance(shape, dict):
        if not isinstance(value, Mapping):
            yield f"{key or 'the document'} must be an object"
            return
        for name, inner in shape.items():
            path = f"{key}.{name}".lstrip(".")
            if name in value:
                yield from _problems(value[name], inner, path)
            else:
                yield f"{path} is missing"
    elif isinstance(shape, set):
        if isinstance(value, bool) or not isinstance(value, str | int) or value not in shape:
            yield f"{key} must be one of {', '.join(sorted(map(str, shape)))}, not {value!r}"
    elif isinstance(value, bool) or not isinstance(value, shape):
        yield f"{key} must be {'a number' if float in shape else 'a whole number'} or null, not {value!r}"
