"""Records to and from the arrays that a shard stores.

A codec turns ``Records`` into named numpy arrays of fixed dtypes and back. It knows nothing of files, so another
encoding is a new codec here and no change elsewhere.
"""

from collections.abc import Mapping

from distill.codec.base import (
    Array,
    ArrayType,
    Codec,
    Decoder,
    MemoryStore,
    Packing,
    Store,
    Stored,
    agree_with_tail,
    cut_chunk,
    id_dtype,
    log1mexp,
)
from distill.codec.compact import COMPACT, COMPACT_FULL
from distill.codec.exact import EXACT, EXACT_FULL
from distill.codec.levels import KL_BUDGET

CODECS: Mapping[str, Codec] = {"exact": EXACT, "compact": COMPACT}
"""By a layer's cache_precision, for records of some entries."""

FULL_CODECS: Mapping[str, Codec] = {"exact": EXACT_FULL, "compact": COMPACT_FULL}
"""The same for whole distributions."""


def codec_for(mode: str, precision: str) -> Codec | None:
    """The codec of a layer's mode and cache_precision; None if this version has none."""
    return {"topk": CODECS, "full": FULL_CODECS}.get(mode, {}).get(precision)


__all__ = [
    "CODECS",
    "FULL_CODECS",
    "KL_BUDGET",
    "Array",
    "ArrayType",
    "Codec",
    "Decoder",
    "MemoryStore",
    "Packing",
    "Store",
    "Stored",
    "agree_with_tail",
    "codec_for",
    "cut_chunk",
    "id_dtype",
    "log1mexp",
]
