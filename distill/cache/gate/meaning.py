"""The meaning of a shard whose structure is sound: every value of every array is read and compared with the others."""

import math
from collections.abc import Mapping
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt

from distill.cache.gate.rules import require
from distill.cache.shard import ShardReader, shard_name
from distill.cache.storage import arrays_sha256
from distill.codec import Codec, Decoder
from distill.types import ROLES, Records

# Entries that are looked at together: bounds the child's memory whatever the shard's size.
_ENTRIES_AT_ONCE = 1 << 19
# fp16 and the codecs round: logprobs and masses may be off by this much, entropies of float32 sums by more.
_SLACK = 1e-3
_ENTROPY_SLACK = 1e-2

Arrays = Mapping[str, npt.NDArray[Any]]


def check_samples(file: h5py.File, vocab_size: int) -> int:
    """Tokens, spans and targets: counts that add up, values in range. Returns the number of targets.

    After it a reader can be opened: all that it slices by is true.
    """
    arrays = {name: file[name][:] for name in _SAMPLE_ARRAYS}
    check_counts(arrays)
    check_tokens(arrays, vocab_size)
    check_spans(arrays)
    check_targets(arrays)
    return len(arrays["target_positions"])


def check_counts(arrays: Arrays) -> None:
    """As many rows as the counts say."""
    samples = len(arrays["token_counts"])
    require(samples > 0, "token_counts: no samples")
    for counts, rows in _COUNTED:
        require(len(arrays[counts]) == samples, f"{counts}: not one for each of {samples} samples")
        total = int(arrays[counts].sum(dtype=np.int64))
        for name in rows:
            require(len(arrays[name]) == total, f"{name}: {len(arrays[name])} rows where {counts} says {total}")
    require(bool((arrays["token_counts"] > 0).all()), "token_counts: an empty sample")


def check_tokens(arrays: Arrays, vocab_size: int) -> None:
    """Token ids inside the vocabulary."""
    require(int(arrays["tokens"].max()) < vocab_size, f"tokens: an id outside the vocabulary of {vocab_size}")


def check_spans(arrays: Arrays) -> None:
    """Spans inside their samples, of known roles."""
    starts, ends = arrays["span_starts"], arrays["span_ends"]
    lengths = np.repeat(arrays["token_counts"], arrays["span_counts"])
    require(bool(((starts <= ends) & (ends <= lengths)).all()), "span_ends: a span outside its sample")
    require(bool((arrays["span_roles"] < len(ROLES)).all()), "span_roles: an unknown role")


def check_targets(arrays: Arrays) -> None:
    """Target positions inside their samples, rising, never the first token."""
    positions, counts = arrays["target_positions"].astype(np.int64), arrays["target_counts"]
    lengths = np.repeat(arrays["token_counts"], counts)
    require(bool(((positions >= 1) & (positions < lengths)).all()), "target_positions: one outside its sample")
    sample = np.repeat(np.arange(len(counts)), counts)
    rising = (np.diff(positions) > 0) | (np.diff(sample) > 0)
    require(bool(rising.all()), "target_positions: not rising")


def check_lengths(file: h5py.File, codec: Codec, decoder: Decoder, targets: int) -> None:
    """As many records as targets, and as many entries as the records say."""
    for name in codec.record_arrays:
        require(len(file[name]) == targets, f"{name}: {len(file[name])} records of {targets} targets")
    entries = int(decoder.entry_counts.sum())
    for name in codec.entry_arrays:
        require(len(file[name]) == entries, f"{name}: {len(file[name])} rows for {entries} entries")


def check_floats(file: h5py.File) -> None:
    """Stored logprobs of at most 0, before a codec mends them; only a real token's may be unknown (NaN)."""
    for name, dataset in file.items():
        if not name.endswith("_logprobs"):
            continue
        step = max(1, _ENTRIES_AT_ONCE // math.prod(dataset.shape[1:]))
        for start in range(0, len(dataset), step):
            values = dataset[start : start + step]
            unknown = np.isnan(values) & (name == "label_logprobs")
            require(bool((unknown | (values <= _SLACK)).all()), f"{name}: one above 0 or not a number")


def check_records(decoder: Decoder, targets: int, vocab_size: int, top_k: int) -> None:
    """Every record, decoded: a valid distribution over distinct ids of the vocabulary."""
    step = max(1, _ENTRIES_AT_ONCE // top_k)
    for start in range(0, targets, step):
        records = decoder.records(start, min(start + step, targets))
        check_entries(records, vocab_size, top_k)
        check_masses(records)
        check_statistics(records, vocab_size)


def check_entries(records: Records, vocab_size: int, top_k: int) -> None:
    """Ids inside the vocabulary and once a record; at least one entry and at most K, the likeliest first.

    Takes memory for the entries, whatever the vocabulary.
    """
    counts, ids, logprobs = records.entry_counts, records.entry_ids, records.entry_logprobs
    require(bool(((counts >= 1) & (counts <= top_k)).all()), f"entry_counts: not between 1 and {top_k}")
    require(len(ids) == len(logprobs) == int(counts.sum()), "entry_counts: not the number of entries")
    require(int(ids.min()) >= 0 and int(ids.max()) < vocab_size, f"entry_ids: one outside the {vocab_size} tokens")
    places = np.repeat(np.arange(len(counts)) * vocab_size, counts)
    places += ids
    places.sort()
    require(bool((places[1:] != places[:-1]).all()), "entry_ids: one twice in a record")
    starts = np.cumsum(counts) - counts
    largest = np.maximum.reduceat(logprobs, starts)
    require(
        bool((logprobs[starts] >= largest).all()), "entry_logprobs: a record that does not begin with its likeliest"
    )


def check_masses(records: Records) -> None:
    """Finite logprobs of at most 0; with the tail, a mass of at most one."""
    logprobs, tails, counts = records.entry_logprobs, records.tail_logprobs, records.entry_counts
    require(bool(np.isfinite(logprobs).all()), "entry_logprobs: one is not finite")
    require(bool((logprobs <= _SLACK).all()), "entry_logprobs: one above 0")
    require(bool((tails <= _SLACK).all()), "tail_logprobs: one above 0 or not a number")
    kept = np.add.reduceat(np.exp(logprobs), np.cumsum(counts) - counts)
    require(bool((kept + np.exp(tails) <= 1 + _SLACK).all()), "entry_logprobs: a mass above 1")


def check_statistics(records: Records, vocab_size: int) -> None:
    """Entropies that a distribution can have; NaN stands for unknown."""
    entropies = records.entropies
    low, high = -_ENTROPY_SLACK, np.log(vocab_size) + _ENTROPY_SLACK
    known = entropies[~np.isnan(entropies)]
    require(bool(((known >= low) & (known <= high)).all()), "entropies: one that no distribution has")


def check_arrays(file: h5py.File, header: Mapping[str, Any]) -> None:
    """What changed by accident and still means something: whoever means harm can make a digest that fits."""
    require(arrays_sha256(file) == header["arrays_sha256"], "header: arrays_sha256 is not that of the arrays")


def check_name(reader: ShardReader, name: str) -> None:
    """The file is named for its samples and their targets."""
    require(shard_name(reader.key_rows()) == name, "tokens: the file's name does not fit its samples and targets")


_COUNTED = (
    ("token_counts", ("tokens",)),
    ("span_counts", ("span_starts", "span_ends", "span_roles")),
    ("target_counts", ("target_positions",)),
)
_SAMPLE_ARRAYS = tuple(name for counts, rows in _COUNTED for name in (counts, *rows))
