"""The cache's encodings on a real teacher's records: bytes, what is lost, and speed.

    python -m benchmarks.codec LAYER [LAYER …]

LAYER is the folder of an exact layer, best with K = 200: `python run.py collect -topk 200 cache_precision=exact …`
makes one under `<cache_folder>/dataset/train/`. Times are processor time of one core, the best of several; run it with
OMP_NUM_THREADS=1 on a machine that does nothing else, because shared caches count as well.
"""

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt

from benchmarks.common import table, write_json
from distill.cache.shard import ShardReader, build_shard, keys_path, shard_path
from distill.cache.source import cut
from distill.codec import CODECS
from distill.records import concat, select
from distill.types import Records, TokenizedSample, sample_key

SHARD_TARGETS = 8192
SIZES = (2048, SHARD_TARGETS, 65_536)
ENTRIES = (50, 128, 200)
LEAST_SHARDS = 20
REPEATS = 5
SEED = 0

Part = tuple[list[TokenizedSample], Records]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Layer:
    """All samples of an exact layer with their records, and its crop."""

    samples: list[TokenizedSample]
    records: Records
    vocab_size: int


def load(folders: Sequence[Path]) -> Layer:
    """Every shard of the folders."""
    samples: list[TokenizedSample] = []
    records, vocab_size = [], 0
    for path in sorted(path for folder in folders for path in folder.glob("*.h5")):
        with ShardReader(path) as reader:
            vocab_size = reader.layer["vocab_size"]
            assert reader.layer["cache_precision"] == "exact", f"{path}: not exact"
            records.append(reader.all_records())
            for row in range(len(reader)):
                ids, spans = reader.token_ids(row), reader.spans(row)
                plain = any(span.role == "completion" for span in spans)
                samples.append(TokenizedSample("", plain, ids, spans, reader.targets(row), sample_key(ids)))
    return Layer(samples, concat(records), vocab_size)


def shards_of(layer: Layer, records: Records, targets: int) -> Iterator[Part]:
    """Whole samples in their order, cut as soon as the next would exceed ``targets``."""
    counts = np.array([len(sample.targets) for sample in layer.samples])
    ends, first = np.cumsum(counts), 0
    while first < len(counts):
        begin = int(ends[first] - counts[first])
        last = max(int(np.searchsorted(ends, begin + targets, side="right")), first + 1)
        yield layer.samples[first:last], select(records, np.arange(begin, int(ends[last - 1])))
        first = last


def write(parts: Iterator[Part], layer: Layer, folder: Path, precision: str) -> list[Path]:
    """Seal a shard for each part."""
    paths = []
    for samples, records in parts:
        header = {"mode": "topk", "cache_precision": precision, "vocab_size": layer.vocab_size}
        image = build_shard(samples, records, layer=header, vocab_size=layer.vocab_size)
        image.seal(folder)
        paths.append(shard_path(folder, image.info.name))
    return paths


def bytes_of(paths: Sequence[Path]) -> dict[str, int]:
    """Bytes by array; ``file`` is what HDF5 adds, ``keys`` the files beside."""
    total: dict[str, int] = {"file": 0, "keys": 0}
    for path in paths:
        with h5py.File(path) as file:
            stored = {name: dataset.id.get_storage_size() for name, dataset in file.items()}
        for name, size in stored.items():
            total[name] = total.get(name, 0) + size
        total["file"] += path.stat().st_size - sum(stored.values())
        total["keys"] += keys_path(path.parent, path.stem).stat().st_size
    return total


def losses(exact: Records, decoded: Records) -> tuple[Floats, Floats]:
    """KL(exact || decoded) of each record over K + 1 outcomes, and 4 m KL at temperature 2 inside what is kept."""
    rows = np.repeat(np.arange(len(exact)), exact.entry_counts)
    order, other = np.lexsort((exact.entry_ids, rows)), np.lexsort((decoded.entry_ids, rows))
    assert np.array_equal(exact.entry_ids[order], decoded.entry_ids[other]), "ids differ"
    p, q = exact.entry_logprobs[order].astype(np.float64), decoded.entry_logprobs[other].astype(np.float64)
    starts = np.cumsum(exact.entry_counts) - exact.entry_counts

    def summed(values: Floats) -> Floats:
        return np.add.reduceat(values, starts)

    tails, decoded_tails = exact.tail_logprobs.astype(np.float64), decoded.tail_logprobs.astype(np.float64)
    plain = summed(np.exp(p) * (p - q)) + np.exp(tails) * (tails - decoded_tails)
    warm_p, warm_q = (values / 2 - np.log(summed(np.exp(values / 2)))[rows] for values in (p, q))
    return plain, 4 * summed(np.exp(p)) * summed(np.exp(warm_p) * (warm_p - warm_q))


def best(run: Callable[[], None]) -> float:
    """Seconds of processor time."""
    times = []
    for _ in range(REPEATS):
        started = time.process_time()
        run()
        times.append(time.process_time() - started)
    return min(times)


def decoding(paths: Sequence[Path]) -> dict[str, float]:
    """Targets a second, read sample by sample: in order, and in a full shuffle over all shards."""
    copies = -(-LEAST_SHARDS // len(paths))
    readers = [ShardReader(path) for path in list(paths) * copies]
    places = [(reader, row) for reader in readers for row in range(len(reader))]
    shuffled = [places[i] for i in np.random.default_rng(SEED).permutation(len(places))]
    targets = sum(len(reader.target_positions) for reader in readers)

    def read(order: list[tuple[ShardReader, int]]) -> None:
        for reader, row in order:
            reader.records(row)

    speeds = {"in order": targets / best(lambda: read(places)), "shuffled": targets / best(lambda: read(shuffled))}
    opening = best(lambda: ShardReader(paths[0]).close())
    for reader in readers:
        reader.close()
    return speeds | {"shards": len(readers), "milliseconds to open": opening * 1e3}


def encoding(part: Part, layer: Layer) -> dict[str, float]:
    """Targets a second: the arrays alone, and the whole file."""
    samples, records = part
    header = {"mode": "topk", "cache_precision": "compact", "vocab_size": layer.vocab_size}

    def whole() -> None:
        build_shard(samples, records, layer=header, vocab_size=layer.vocab_size)

    arrays = best(lambda: void(CODECS["compact"].encode(records, layer.vocab_size)))
    return {"arrays": len(records) / arrays, "whole shard": len(records) / best(whole)}


def void(_: object) -> None:
    """Let go of a value."""


def measure(layer: Layer, k: int, targets: int, precision: str) -> dict[str, Any]:
    """Bytes and, at the default size of shards, what is lost and how fast it is read."""
    records = cut(layer.records, k)
    with tempfile.TemporaryDirectory() as folder:
        paths = write(shards_of(layer, records, targets), layer, Path(folder), precision)
        size = bytes_of(paths)
        result: dict[str, Any] = {
            "k": k,
            "targets a shard": targets,
            "precision": precision,
            "shards": len(paths),
            "bytes per target": sum(size.values()) / len(records),
            "by array": {name: value / len(records) for name, value in sorted(size.items())},
        }
        if targets != SHARD_TARGETS:
            return result
        decoded = concat([_decoded(path) for path in paths])
        plain, warm = losses(records, decoded)
        deciles = np.array_split(plain[np.argsort(records.entropies, kind="stable")], 10)
        result["kl"] = {
            "mean": plain.mean(),
            "by decile of entropy": [float(decile.mean()) for decile in deciles],
            "p99.9": float(np.quantile(plain, 0.999)),
            "largest": plain.max(),
            "at temperature 2": warm.mean(),
        }
        result["targets per second"] = decoding(paths)
        if precision == "compact":
            result["encoded per second"] = encoding(next(shards_of(layer, records, targets)), layer)
        return result


def _decoded(path: Path) -> Records:
    with ShardReader(path) as reader:
        return reader.all_records()


def show(results: Sequence[dict[str, Any]], targets: int) -> None:
    """The tables."""
    print(f"{targets:,} targets\n")
    head = ["K", "precision", "targets a shard", "bytes per target"]
    names = ("k", "precision", "targets a shard", "bytes per target")
    print(table([head, *([result[name] for name in names] for result in results)]), "\n")
    full = [result for result in results if "kl" in result]
    head = ["K", "precision", "KL", "worst decile", "p99.9", "largest", "T = 2", "decode/s", "shuffled/s", "encode/s"]
    rows = [
        [
            result["k"],
            result["precision"],
            result["kl"]["mean"],
            max(result["kl"]["by decile of entropy"]),
            result["kl"]["p99.9"],
            result["kl"]["largest"],
            result["kl"]["at temperature 2"],
            *(f"{result['targets per second'][order]:,.0f}" for order in ("in order", "shuffled")),
            f"{result.get('encoded per second', {}).get('whole shard', 0):,.0f}",
        ]
        for result in full
    ]
    print(table([head, *([f"{cell:.5f}" if isinstance(cell, float) else cell for cell in row] for row in rows)]), "\n")
    compact = [result for result in full if result["precision"] == "compact"]
    arrays = sorted(compact[0]["by array"], key=lambda name: -compact[-1]["by array"][name])
    lines = [[name, *(f"{result['by array'][name]:.2f}" for result in compact)] for name in arrays]
    print(table([["array", *(f"B at K = {result['k']}" for result in compact)], *lines]))


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("layers", type=Path, nargs="+")
    layer = load(parser.parse_args().layers)
    largest = int(layer.records.entry_counts.max())
    kinds = [(k, size, "compact") for k in ENTRIES if k <= largest for size in SIZES]
    kinds += [(k, SHARD_TARGETS, "exact") for k in ENTRIES if k <= largest]
    results = [measure(layer, *kind) for kind in kinds]
    show(results, len(layer.records))
    write_json("codec", {"targets": len(layer.records), "vocab_size": layer.vocab_size, "results": results})


if __name__ == "__main__":
    main()
