"""A whole layer as one plain HDF5 file: flat arrays of decoded values that any program reads without knowing us.

The arrays are those of a shard (docs/cache-format.md), for all samples of the layer, one shard after the other, with
the records decoded: ``entry_ids`` and float32 ``entry_logprobs``, whose mass adds up to one with the tail's. It is made
for programs and people, not for small disks: a record takes several times what it does in a shard.
"""

import json
from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import h5py
import numpy as np
import numpy.typing as npt

from distill import __version__
from distill.cache.gate import meaning, structure
from distill.cache.gate.rules import RefusedError, require
from distill.cache.layer import Layer
from distill.cache.shard import ShardReader
from distill.cache.spec import LayerSpec
from distill.cache.strict import check_fields, is_count, is_text, parse_json
from distill.codec import id_dtype
from distill.errors import InputError, MachineError, machine_failed
from distill.files import free_bytes, os_errors, sync
from distill.records import concat, select
from distill.types import ROLES, Records, Span, TokenizedSample, sample_key

FORMAT = "distill-plain"
VERSION = 1

_CHUNK_ROWS = 16_384
_SPARE_BYTES = 1 << 20
_ENTRIES_AT_ONCE = 1 << 20  # bounds what a reader holds
_H5_ERRORS = (OSError, KeyError, RuntimeError, ValueError, TypeError)
_TYPES: Mapping[str, tuple[str, ...]] = {
    "tokens": ("uint16", "uint32"),
    "token_counts": ("uint32",),
    "span_counts": ("uint32",),
    "span_starts": ("uint32",),
    "span_ends": ("uint32",),
    "span_roles": ("uint8",),
    "target_counts": ("uint32",),
    "target_positions": ("uint32",),
    "entry_counts": ("uint32",),
    "tail_logprobs": ("float32",),
    "label_logprobs": ("float32",),
    "entropies": ("float32",),
    "entry_ids": ("uint16", "uint32"),
    "entry_logprobs": ("float32",),
}
_RECORD_ARRAYS = ("tail_logprobs", "label_logprobs", "entropies")
_SAMPLE_ARRAYS = {
    "token_counts": ("tokens",),
    "span_counts": ("span_starts", "span_ends", "span_roles"),
    "target_counts": ("target_positions",),
}
_COUNTED = {
    **_SAMPLE_ARRAYS,
    "target_counts": ("target_positions", "entry_counts", *_RECORD_ARRAYS),
    "entry_counts": ("entry_ids", "entry_logprobs"),
}

Arrays = dict[str, npt.NDArray[Any]]


# -- writing ----------------------------------------------------------------------------------------------------------


def write_plain_file(layer: Layer, path: Path) -> None:
    """Write all of ``layer``, shard by shard in the order of their names; the file is there when it is whole.

    Raises InputError for a damaged shard or a path that can't be written, MachineError where the disk has no room.
    """
    temporary = path.with_name(path.name + ".tmp")
    try:
        with os_errors("write", path), h5py.File(temporary, "w", libver=("v110", "v110")) as file:
            _fill(file, layer, path)
        with os_errors("write", path):
            sync(temporary)
            temporary.replace(path)
            sync(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def _fill(file: h5py.File, layer: Layer, path: Path) -> None:
    spec = layer.spec
    header = {"format": FORMAT, "version": VERSION, "made_by": f"distill {__version__}", "teacher": spec.teacher}
    file.attrs["header"] = json.dumps(header | {"layer": spec.describe()}, sort_keys=True)
    for shard in sorted(layer.shards):
        arrays = _arrays_of(layer.reader(shard), spec.vocab_size)
        needed = sum(array.nbytes for array in arrays.values()) + _SPARE_BYTES
        if free_bytes(path.parent) < needed:  # HDF5 itself doesn't survive a full disk
            raise MachineError(f"{path}: disk full: {needed:,} bytes needed; free some space")
        for name, array in arrays.items():
            _append(file, name, array)


def _append(file: h5py.File, name: str, array: npt.NDArray[Any]) -> None:
    if name not in file:
        file.create_dataset(
            name,
            data=array,
            maxshape=(None,),
            chunks=(_CHUNK_ROWS,),
            compression="gzip",
            compression_opts=4,
            shuffle=True,
            fletcher32=True,
            track_times=False,
        )
        return
    dataset = file[name]
    start = len(dataset)
    dataset.resize((start + len(array),))
    dataset[start:] = array


def _arrays_of(reader: ShardReader, vocab_size: int) -> Arrays:
    rows, records = range(len(reader)), reader.all_records()
    spans = [reader.spans(row) for row in rows]
    flat = [span for row in spans for span in row]
    ids = id_dtype(vocab_size)
    return {
        "tokens": reader.tokens.astype(ids),
        "token_counts": np.array([len(reader.token_ids(row)) for row in rows], np.uint32),
        "span_counts": np.array([len(row) for row in spans], np.uint32),
        "span_starts": np.array([span.start for span in flat], np.uint32),
        "span_ends": np.array([span.end for span in flat], np.uint32),
        "span_roles": np.array([ROLES.index(span.role) for span in flat], np.uint8),
        "target_counts": np.array([len(reader.targets(row)) for row in rows], np.uint32),
        "target_positions": reader.target_positions.astype(np.uint32),
        "entry_counts": records.entry_counts.astype(np.uint32),
        "tail_logprobs": records.tail_logprobs,
        "label_logprobs": records.label_logprobs,
        "entropies": records.entropies,
        "entry_ids": records.entry_ids.astype(ids),
        "entry_logprobs": records.entry_logprobs,
    }


# -- reading ----------------------------------------------------------------------------------------------------------


class PlainFile:
    """Reads a plain file in blocks of samples; every value is checked before it is given out.

    Raises InputError naming the file for whatever is wrong with it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with self._told():
            self._file = h5py.File(path, "r", locking=False)
            self.spec = read_header(self._file)
            self._offsets = {name: _offsets(self._file[name][:]) for name in _COUNTED}
            for counts, names in _COUNTED.items():
                total = int(self._offsets[counts][-1])
                for name in names:
                    require(len(self._file[name]) == total, f"{name}: not the {total:,} rows that {counts} says")
            for name in ("span_counts", "target_counts"):
                require(len(self._offsets[name]) - 1 == len(self), f"{name}: not one for each of {len(self)} samples")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._file.close()

    def __len__(self) -> int:
        return len(self._offsets["token_counts"]) - 1

    def samples(self) -> Iterator[TokenizedSample]:
        """All samples in the file's order; ``where`` tells them apart."""
        for first, last in self._blocks():
            yield from self._samples(first, last)

    def read(self, wanted: Container[str] | None = None) -> Iterator[tuple[TokenizedSample, Records]]:
        """The samples, by ``where``, that are ``wanted`` (None: all), in the file's order, with their records."""
        for first, last in self._blocks():
            samples = self._samples(first, last)
            chosen = [wanted is None or sample.where in wanted for sample in samples]
            if not any(chosen):
                continue
            records = concat(list(self._records(*self._offsets["target_counts"][[first, last]].tolist())))
            rows = self._offsets["target_counts"][first : last + 1] - self._offsets["target_counts"][first]
            for number, sample in enumerate(samples):
                if chosen[number]:
                    yield sample, select(records, np.arange(rows[number], rows[number + 1]))

    def check(self) -> None:
        """Look at everything, in memory that doesn't depend on how long a sample is."""
        for first, last in self._blocks():
            self._samples(first, last)
        for _ in self._records(0, int(self._offsets["target_counts"][-1])):
            pass

    def _blocks(self) -> Iterator[tuple[int, int]]:
        """Runs of samples, (first, last + 1), of few entries together or of one sample."""
        entries = self._offsets["entry_counts"][self._offsets["target_counts"]]
        yield from _runs(entries, 0, len(self))

    def _samples(self, first: int, last: int) -> list[TokenizedSample]:
        with self._told():
            arrays: Arrays = {}
            for counts in ("token_counts", "span_counts", "target_counts"):
                offsets = self._offsets[counts][first : last + 1]
                arrays[counts] = np.diff(offsets)
                arrays |= {name: self._file[name][offsets[0] : offsets[-1]] for name in _SAMPLE_ARRAYS[counts]}
            require(bool((arrays["token_counts"] > 0).all()), "token_counts: an empty sample")
            meaning.check_tokens(arrays, self.spec.vocab_size)
            meaning.check_spans(arrays)
            meaning.check_targets(arrays)
        return list(_samples(arrays, self.path.stem, first))

    def _records(self, first: int, last: int) -> Iterator[Records]:
        """The records of targets ``first`` to ``last``, not included, some at a time."""
        offsets = self._offsets["entry_counts"]
        for start, end in _runs(offsets, first, last):
            with self._told():
                entries = slice(*offsets[[start, end]].tolist())
                records = Records(
                    entry_counts=np.diff(offsets[start : end + 1]),
                    entry_ids=self._file["entry_ids"][entries].astype(np.int64),
                    entry_logprobs=self._file["entry_logprobs"][entries],
                    **{name: self._file[name][start:end] for name in _RECORD_ARRAYS},
                )
                meaning.check_entries(records, self.spec.vocab_size, self.spec.top_k)
                meaning.check_masses(records)
                meaning.check_statistics(records, self.spec.vocab_size)
            yield records

    @contextmanager
    def _told(self) -> Iterator[None]:
        """Turn what the block finds wrong into one line."""
        try:
            yield
        except (RefusedError, *_H5_ERRORS) as error:
            if machine_failed(error):
                raise MachineError(f"{self.path}: cannot be read: {error}") from error
            reason = " ".join(str(error).split())[:200]
            raise InputError(f"{self.path}: not a layer in one file, or a damaged one ({reason})") from error


def _offsets(counts: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    return np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])


def _runs(entries: npt.NDArray[np.int64], first: int, end: int) -> Iterator[tuple[int, int]]:
    """Cut ``first`` to ``end`` into runs of at most ``_ENTRIES_AT_ONCE`` entries, or of one; ``entries``: how many come
    before each."""
    while first < end:
        last = int(np.searchsorted(entries, entries[first] + _ENTRIES_AT_ONCE, side="right")) - 1
        last = min(max(last, first + 1), end)
        yield first, last
        first = last


def read_header(file: h5py.File) -> LayerSpec:
    """The layer that a plain file holds. Raises RefusedError or InputError if it is no plain file of this version."""
    require(h5py.h5a.get_num_attrs(file.id) == 1 and "header" in file.attrs, "header: not the only attribute")
    attribute = file.attrs.get_id("header")
    require(h5py.check_string_dtype(attribute.dtype) is not None and attribute.shape == (), "header: not one text")
    text = file.attrs["header"]
    require(isinstance(text, str) and len(text) <= structure.HEADER_BYTES, "header: too large")
    header = parse_json(text.encode(), "header")
    fields = {"format": is_text, "version": is_count, "made_by": is_text, "teacher": is_text, "layer": _is_object}
    check_fields(header, fields, "header")
    require(header["format"] == FORMAT, f"header: not a file of the format {FORMAT}")
    if header["version"] != VERSION:
        raise InputError(f"format version {header['version']}, this program reads {VERSION}; update it")
    return LayerSpec.from_json(header["layer"] | {"teacher": header["teacher"]}, "header: layer")


def check_plain_file(path: Path) -> None:
    """Look at everything in the file; meant for a process with limits. Raises RefusedError naming the object."""
    with h5py.File(path, "r", locking=False) as file:
        read_header(file)
        structure.check_names(file, frozenset(_TYPES))
        for name in _TYPES:
            structure.check_link(file, name)
            structure.check_is_array(file, name)
        datasets = {name: file[name] for name in _TYPES}
        structure.check_overlap(datasets, path.stat().st_size)
        for name, dataset in datasets.items():
            structure.check_attributes(name, dataset)
            structure.check_dtype(name, dataset, _TYPES[name])
            require(dataset.ndim == 1, f"{name}: not a flat array")
            for check in (structure.check_layout, structure.check_external, structure.check_filters):
                check(name, dataset)
            structure.check_chunks(name, dataset)
            size, stored = dataset.size * dataset.dtype.itemsize, dataset.id.get_storage_size()
            # A long column of one number is honest here; what doesn't fit into the process's memory ends there.
            allowed = structure.DEFLATE_COMPRESSION * stored
            require(size <= allowed, f"{name}: {size:,} bytes declared, {stored:,} stored")
    with PlainFile(path) as plain:
        plain.check()


def _samples(arrays: Arrays, stem: str, first: int) -> Iterator[TokenizedSample]:
    ends = {name: np.cumsum(arrays[name]) for name in ("token_counts", "span_counts", "target_counts")}
    for row in range(len(arrays["token_counts"])):
        tokens, spans, targets = (slice(ends[name][row] - arrays[name][row], ends[name][row]) for name in ends)
        token_ids = arrays["tokens"][tokens].astype(np.int32)
        kept = tuple(
            Span(int(start), int(end), ROLES[role])
            for start, end, role in zip(
                arrays["span_starts"][spans], arrays["span_ends"][spans], arrays["span_roles"][spans], strict=True
            )
        )
        yield TokenizedSample(
            where=f"{stem}:{first + row}",
            is_completion=all(span.role == "completion" for span in kept),
            token_ids=token_ids,
            spans=kept,
            targets=arrays["target_positions"][targets].astype(np.int32),
            key=sample_key(token_ids),
        )


def _is_object(value: Any) -> bool:
    return isinstance(value, dict)
