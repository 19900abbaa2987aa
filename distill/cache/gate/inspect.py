"""One file's verdict, as the child gives it: structure first, then meaning, then what the index should say of it."""

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py

from distill.cache.gate.meaning import (
    check_arrays,
    check_floats,
    check_lengths,
    check_name,
    check_records,
    check_samples,
)
from distill.cache.gate.rules import OtherVersionError, RefusedError
from distill.cache.gate.structure import check_file, check_structure
from distill.cache.shard import ShardReader
from distill.cache.storage import H5_ERRORS, FileStore
from distill.codec import codec_for
from distill.errors import MachineError

# All that h5py and numpy were seen to raise on mutated files, and what running into the child's limits looks like.
_FAILURES = (
    RefusedError,
    *H5_ERRORS,
    LookupError,
    ArithmeticError,
    MemoryError,
    AssertionError,
    EOFError,
)


def inspect(path: Path, allow: Callable[[int], None] = lambda size: None) -> dict[str, Any]:
    """The verdict on a file as the parent reads it: ``kind`` with ``reason``, or with ``info`` and ``layer``.

    ``allow`` is told how many bytes of arrays will be looked at, once the structure shows that they may be.
    """
    try:
        size = check_file(path)
        with h5py.File(path, "r", locking=False) as file:
            header = check_structure(file, size)
            layer = header["layer"]
            allow(sum(dataset.size * dataset.dtype.itemsize for dataset in file.values()))
            vocab_size, codec = layer["vocab_size"], codec_for(layer["mode"], layer["cache_precision"])
            assert codec is not None, "checked with the header"
            targets = check_samples(file, vocab_size)
            check_floats(file)
            decoder = codec.open(FileStore(file))
            check_lengths(file, codec, decoder, targets)
            check_records(decoder, targets, vocab_size, layer["top_k"])
            check_arrays(file, header)
        with ShardReader(path) as reader:
            check_name(reader, path.stem)
            return {"kind": "passed", "info": reader.info().to_json(), "layer": reader.layer}
    except OtherVersionError as error:
        return _verdict("other", path, error)
    except MachineError as error:
        return _verdict("machine", path, error)
    except _FAILURES as error:
        broken_disk = isinstance(error, OSError) and error.errno == errno.EIO
        return _verdict("machine" if broken_disk else "refused", path, error)


def _verdict(kind: str, path: Path, error: Exception) -> dict[str, Any]:
    reason = " ".join((str(error) or type(error).__name__).split())
    return {"kind": kind, "reason": reason.removeprefix(f"{path}: ")[:300]}
