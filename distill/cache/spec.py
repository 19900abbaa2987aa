"""What a layer is: everything that decides its records, and the name that follows from it."""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Self

from distill.cache.shard import FORMAT_VERSION
from distill.cache.strict import check_fields, is_count, is_text, parse_json, read_bounded
from distill.errors import InputError

LAYER_FILE = "layer.json"
MODES = ("topk", "full")
PRECISIONS = ("exact", "compact")
_LAYER_FILE_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """Everything that decides what a record holds. Two layers are the same if and only if these are.

    ``weights``, ``model_config`` and ``token_map`` are digests, ``dtype`` is the teacher's compute type, ``vocab_size``
    the crop. ``mode`` is "topk" or "full" (then ``top_k`` is ``vocab_size``); ``cache_precision`` "exact" or "compact".
    """

    teacher: str
    weights: str
    model_config: str
    dtype: str
    quantisation: str
    attention: str
    token_map: str
    vocab_size: int
    mode: str
    top_k: int
    cache_precision: str

    def describe(self) -> dict[str, Any]:
        """The fields that identify the layer, as they stand in ``layer.json`` and in every shard.

        A field that comes later has to be left out at its default, or it would orphan every older cache.
        """
        return {
            "weights": self.weights,
            "model_config": self.model_config,
            "dtype": self.dtype,
            "quantisation": self.quantisation,
            "attention": self.attention,
            "token_map": self.token_map,
            "vocab_size": self.vocab_size,
            "mode": self.mode,
            "top_k": self.top_k,
            "cache_precision": self.cache_precision,
            "version": FORMAT_VERSION,
        }

    @classmethod
    def from_json(cls, value: Any, where: str) -> Self:
        """The spec that ``layer.json`` holds, parsed; ``where`` begins every message.

        InputError if anything is missing, unknown or of the wrong kind, and for a version that is not read here.
        """
        if isinstance(value, dict):
            check_version(value.get("version"), where)
        kinds = {field.name: is_count if field.type is int else is_text for field in fields(cls)}
        given = dict(check_fields(value, kinds | {"version": is_count}, where))
        del given["version"]
        spec = cls(**given)
        if spec.mode not in MODES or spec.cache_precision not in PRECISIONS:
            what = f"mode {spec.mode!r} with precision {spec.cache_precision!r}"
            raise InputError(f"{where}: {what} is not known here; update this program")
        if not 1 <= spec.top_k <= spec.vocab_size or (spec.mode == "full" and spec.top_k != spec.vocab_size):
            raise InputError(f"{where}: top_k {spec.top_k} does not fit vocab_size {spec.vocab_size}")
        return spec

    def to_json(self) -> bytes:
        """The content of ``layer.json``."""
        return json.dumps({"teacher": self.teacher, **self.describe()}, indent=2).encode()

    def serves(self, wanted: "LayerSpec") -> bool:
        """Whether the records of this layer hold all that ``wanted`` asks for: as many entries, as exact."""
        same = replace(
            self,
            teacher=wanted.teacher,
            mode=wanted.mode,
            top_k=wanted.top_k,
            cache_precision=wanted.cache_precision,
        )
        return (
            same == wanted
            and self.cache_precision in {"exact", wanted.cache_precision}
            and self.mode in {"full", wanted.mode}
            and self.top_k >= wanted.top_k
        )

    @property
    def folder_name(self) -> str:
        """``<teacher>-<12 hex>``; the hex alone identifies the layer."""
        safe = re.sub(r"[^A-Za-z0-9._-]+", "-", self.teacher).strip("-.") or "teacher"
        return f"{safe}-{self.hex}"

    @property
    def hex(self) -> str:
        """12 hex digits that stand for ``describe()``."""
        return layer_hex(self.describe())


def layer_hex(description: Mapping[str, Any]) -> str:
    """What ends the name of the folder of a layer that is so described."""
    return hashlib.sha256(json.dumps(description, sort_keys=True).encode()).hexdigest()[:12]


def read_spec(folder: Path) -> LayerSpec:
    """The spec in the ``layer.json`` of ``folder``; InputError if it is damaged or not what the folder is named for."""
    path = folder / LAYER_FILE
    spec = LayerSpec.from_json(parse_json(read_bounded(path, _LAYER_FILE_BYTES), str(path)), str(path))
    if not folder.name.endswith(f"-{spec.hex}"):
        raise InputError(f"{path}: describes {spec.hex}, but its folder is named {folder.name}; rename it back")
    return spec


def find_layers(parent: Path) -> list[Path]:
    """The folders in ``parent`` that are layers, by name."""
    if not parent.is_dir():
        return []
    return sorted(path.parent for path in parent.glob(f"*/{LAYER_FILE}"))


def readable_layers(parent: Path) -> Iterator[tuple[Path, LayerSpec | None, str]]:
    """Each layer in ``parent``, by name, with its spec, or None and a line that says what is wrong with its file.

    For whoever looks at neighbours: what is wrong with one is worth a line, and no reason to end.
    """
    for folder in find_layers(parent):
        try:
            found, problem = read_spec(folder), ""
        except InputError as error:
            found, problem = None, str(error)
        yield folder, found, problem


def check_version(version: Any, where: str, known: int = FORMAT_VERSION) -> None:
    """InputError that says what to do if ``version`` is not the one that is read here."""
    if version != known or type(version) is not int:
        newer = type(version) is int and version > known
        advice = "update this program" if newer else "move it away"
        raise InputError(f"{where}: format version {str(version)[:40]}, this program reads {known}; {advice}")
