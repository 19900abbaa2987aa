"""``pipeline_config.json`` of a teacher folder: what the ancestor was told of a teacher. Honoured, never asked for."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distill.errors import InputError
from distill.files import read_object

_FILE = "pipeline_config.json"
_KEYS = ("seq_chunk_len", "batch_size", "completion", "add_bos")


@dataclass(frozen=True, slots=True)
class PipelineConfig:
    """What the file says; None where it says nothing.

    seq_chunk_len: most tokens of a sample that are run at once; longer ones are run in chunks, through a key-value
    cache. batch_size: most samples in a batch, beside ``collect_tokens_per_batch``. completion: whether the model
    continues plain text. add_bos: see ``notes``. unknown: keys that are none of these.
    """

    path: Path
    seq_chunk_len: int | None = None
    batch_size: int | None = None
    completion: bool | None = None
    add_bos: bool | None = None
    unknown: tuple[str, ...] = ()

    def notes(self, add_bos: bool | None) -> list[str]:
        """A line for the user on each thing in the file that is not followed. ``add_bos`` is the run's own key.

        Teacher and student see the same tokens, so that the run's key decides for both.
        """
        lines = []
        if self.unknown:
            lines.append(f"{self.path}: not followed: {', '.join(self.unknown)} (known: {', '.join(_KEYS)})")
        if self.add_bos is not None and self.add_bos != add_bos:
            theirs, ours = (_json(value) for value in (self.add_bos, add_bos))
            lines.append(
                f"{self.path}: add_bos {theirs} is not followed; the run's add_bos ({ours}) holds for all models"
            )
        return lines


def read_pipeline_config(folder: Path) -> PipelineConfig:
    """The file in a model's ``folder``; all None where there is none.

    Raises InputError naming the key for a value of the wrong type.
    """
    path = folder / _FILE
    values = read_object(path) if path.exists() else {}
    return PipelineConfig(
        path=path,
        seq_chunk_len=_count(path, values, "seq_chunk_len"),
        batch_size=_count(path, values, "batch_size"),
        completion=_flag(path, values, "completion"),
        add_bos=_flag(path, values, "add_bos"),
        unknown=tuple(name for name in values if name not in _KEYS),
    )


def _count(path: Path, values: Mapping[str, Any], name: str) -> int | None:
    value = values.get(name)
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= 1):
        return value
    raise InputError(f"{path}: {name}: a whole number from 1 on, not {value!r}")


def _flag(path: Path, values: Mapping[str, Any], name: str) -> bool | None:
    value = values.get(name)
    if value is None or isinstance(value, bool):
        return value
    raise InputError(f"{path}: {name}: true or false, not {value!r}")


def _json(value: bool | None) -> str:
    return {True: "true", False: "false", None: "null: as tokenizer or template does"}[value]
