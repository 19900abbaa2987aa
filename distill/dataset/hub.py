"""Datasets of the Hugging Face hub. Nothing is downloaded unless that is allowed; the local cache serves without."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from distill.dataset.rows import COLUMNS, check_columns
from distill.dataset.tables import table_samples
from distill.errors import InputError, machine_failed
from distill.types import Sample

if TYPE_CHECKING:
    from datasets import Dataset, DatasetDict

_ID = re.compile(r"(?P<name>[\w-][\w.-]*/[\w-][\w.-]*)(/(?P<config>[\w-][\w.+-]*))?(:(?P<split>\w[\w.:%+\[\]-]*))?")
_ROWS_AT_A_TIME = 256


@dataclass(frozen=True, slots=True)
class HubId:
    """``owner/name[/config][:split]``, split as `datasets` writes it: ``test``, ``train[:1000]``, ``train[:5%]``."""

    name: str
    config: str | None
    split: str | None

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """The id that ``text`` is, or None."""
        match = _ID.fullmatch(text)
        return cls(match["name"], match["config"], match["split"]) if match else None

    def __str__(self) -> str:
        config, split = f"/{self.config}" if self.config else "", f":{self.split}" if self.split else ""
        return f"{self.name}{config}{split}"


def read_hub(dataset_id: HubId, allow_downloads: bool) -> Iterator[Sample]:
    """The rows of a dataset, ``id:row N`` from 1 on. Without a split it is ``train``, or the only one there is.

    Raises InputError if there is none, it may not be downloaded, or a row is bad.
    """
    dataset = _pick_split(dataset_id, _load(dataset_id, allow_downloads))
    check_columns(dataset.column_names, str(dataset_id))
    known = dataset.select_columns([column for column in COLUMNS if column in dataset.column_names])
    yield from table_samples(known.with_format("arrow").iter(_ROWS_AT_A_TIME), str(dataset_id))


def _load(dataset_id: HubId, allow_downloads: bool) -> "Dataset | DatasetDict":
    import httpx
    from datasets import load_dataset
    from datasets.exceptions import DatasetsError
    from datasets.packaged_modules.cache.cache import Cache

    try:
        if allow_downloads:
            return load_dataset(dataset_id.name, dataset_id.config, split=dataset_id.split)
        # What load_dataset does offline, but without the environment variable that has to be set before the import.
        cached = Cache(
            dataset_name=dataset_id.name.split("/")[1],
            repo_id=dataset_id.name,
            config_name=dataset_id.config,
            version="auto",
            hash="auto",
        )
        return cached.as_dataset(split=dataset_id.split)
    except (DatasetsError, OSError, ValueError, RuntimeError, httpx.HTTPError) as error:
        if machine_failed(error):
            raise
        raise _not_loaded(dataset_id, allow_downloads, error) from error


def _not_loaded(dataset_id: HubId, allow_downloads: bool, error: Exception) -> InputError:
    reason = " ".join(str(error).split()) or type(error).__name__
    if allow_downloads:
        return InputError(f"{dataset_id}: no such file or folder, nor a Hugging Face dataset that loads ({reason})")
    return InputError(
        f"{dataset_id}: no such file or folder, nor in the local cache of Hugging Face datasets ({reason}); if it is "
        "one (owner/name/config:split), set allow_downloads"
    )


def _pick_split(dataset_id: HubId, loaded: "Dataset | DatasetDict") -> "Dataset":
    if not isinstance(loaded, dict):
        return loaded
    if "train" in loaded or len(loaded) == 1:
        return loaded["train" if "train" in loaded else next(iter(loaded))]
    raise InputError(f"{dataset_id}: which split? name one as {dataset_id}:SPLIT; it has {', '.join(loaded)}")
