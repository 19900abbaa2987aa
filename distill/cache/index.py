"""The index of a layer: one line a sealed shard, each with its own checksum. A convenience, never the truth."""

import json
import math
import zlib
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from distill.cache.shard import ShardInfo
from distill.cache.spec import check_version
from distill.cache.strict import check_fields, is_count, is_hex, parse_json, read_bounded

INDEX_FILE = "index.jsonl"
INDEX_VERSION = 1
_INDEX_BYTES = 1 << 30

is_shard_name = is_hex(32)

_FIELDS = {
    "name": is_shard_name,
    "sha256": is_hex(64),
    "bytes": is_count,
    "samples": is_count,
    "tokens": is_count,
    "targets": is_count,
    "entries": is_count,
    "kept_mass_sum": lambda value: type(value) is float and math.isfinite(value),
}


def shard_info(value: Any, where: str) -> ShardInfo:
    """An index entry, checked field by field; InputError that begins with ``where``."""
    return ShardInfo(**check_fields(value, _FIELDS, where))


def same_info(a: ShardInfo, b: ShardInfo) -> bool:
    """Whether two entries tell of the same shard; sums of floats may differ by what another machine rounds."""
    close = math.isclose(a.kept_mass_sum, b.kept_mass_sum, rel_tol=1e-6, abs_tol=1e-6)
    return close and replace(a, kept_mass_sum=b.kept_mass_sum) == b


def index_line(info: ShardInfo) -> bytes:
    """crc32 in 8 hex, a blank, JSON."""
    text = json.dumps({"version": INDEX_VERSION, **info.to_json()}, sort_keys=True).encode()
    return b"%08x %s\n" % (zlib.crc32(text), text)


def index_bytes(infos: Iterable[ShardInfo]) -> bytes:
    """A whole index, sorted by name."""
    return b"".join(index_line(info) for info in sorted(infos, key=lambda info: info.name))


def read_index(path: Path) -> dict[str, ShardInfo]:
    """The entries by shard name. A line that a kill tore or a disk damaged is left out: its shard is adopted again.

    Raises InputError, naming the line, for whole lines of another version or with values that can't be.
    """
    if not path.exists():
        return {}
    shards = {}
    for number, line in enumerate(read_bounded(path, _INDEX_BYTES).split(b"\n"), 1):
        checksum, _, text = line.partition(b" ")
        if not text or checksum != b"%08x" % zlib.crc32(text):
            continue
        where = f"{path}:{number}"
        entry = parse_json(text, where)
        if isinstance(entry, dict):
            check_version(entry.pop("version", None), where, INDEX_VERSION)
        info = shard_info(entry, where)
        shards[info.name] = info
    return shards
