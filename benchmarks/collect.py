"""Collecting against the bare forward pass, over the same batches: how much of the teacher's speed is left.

    python -m benchmarks.collect --teacher DIR --text FILE [FILE ...] [--top_k 200] [--tokens 8192] [--rounds 5]

For each file, on all cores unless --threads says otherwise: "bare" is ``model(input_ids).logits``, "bare + top-k" adds
log_softmax and topk of all positions, "ours" is what a collecting worker does, sealing to disk in its thread included.
The three take turns in every round, so that whatever else the machine does disturbs them alike; ratios are of the
rounds' own times. The last table says where our time goes, each part alone and after the other.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from benchmarks.common import table, write_json
from distill.cache import LayerSpec, build_shard
from distill.collate import collate, token_batches
from distill.dataset import read_samples
from distill.head import find_head, hidden_states
from distill.records import concat
from distill.scoring import CollectSpec, CollectWorker, ShardTask
from distill.teacher import Teacher, TeacherSpec, top_k_statistics
from distill.tokenizer import SampleRules, SampleTokenizer, load_tokenizer, resolve_template, tokenize_dataset
from distill.types import TokenizedSample

LOOPS = ("bare", "bare + top-k", "ours")
PARTS = ("forward", "head", "statistics", "transfer", "encode", "seal")


class Line:
    """The worker's channel, with nobody at the other end."""

    def progress(self, payload: Any) -> None:
        """Nobody listens."""

    def request(self, payload: Any) -> bool:
        """Everybody agrees."""
        return True


def samples_of(teacher: Path, path: Path, context_len: int, tokens: int) -> list[TokenizedSample]:
    """About so many tokens of a text, as the teacher sees it."""
    tokenizer = load_tokenizer(teacher, trust_remote_code=False)
    rules = SampleRules(context_len=context_len, crop=len(tokenizer))
    sample_tokenizer = SampleTokenizer(tokenizer, resolve_template(None, [(teacher, tokenizer)]), rules)
    distinct = {sample.key: sample for sample in tokenize_dataset(read_samples(str(path)), sample_tokenizer).samples}
    samples = list(distinct.values())
    ends = np.cumsum([len(sample.token_ids) for sample in samples])
    return samples[: int(np.searchsorted(ends, tokens)) + 1]


class Bench:
    """One text through one teacher in each way. Shards of 8,192 targets, as by default."""

    def __init__(self, options: argparse.Namespace, samples: list[TokenizedSample]) -> None:
        self.clock: Callable[[], float] = time.process_time if options.cpu_time else time.perf_counter
        folder: Path = options.teacher
        self.k, self.samples = options.top_k, samples
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        vocab_size = len(load_tokenizer(folder, trust_remote_code=False))
        spec = TeacherSpec(folder, "fp32", "cpu", vocab_size, options.top_k, False)
        layer = LayerSpec(
            teacher=folder.name, weights="0" * 64, model_config="0" * 64, dtype="fp32", quantisation="none",
            attention="default", token_map="0" * 64, vocab_size=vocab_size, mode="topk", top_k=options.top_k,
            cache_precision=options.cache_precision,
        ).describe()  # fmt: skip
        self.spec = CollectSpec(spec, layer, options.threads, options.tokens_per_batch)
        self.shards = list(cut(samples, 8192))
        self.batches = [batch for shard in self.shards for batch in batches_of(shard, options.tokens_per_batch)]
        self.padded = [collate(batch).token_ids for batch in self.batches]
        self.worker = CollectWorker(self.spec)
        self.teacher = Teacher(spec)

    def bare(self) -> None:
        """The loop that everybody writes first."""
        for token_ids in self.padded:
            self.model(input_ids=token_ids).logits  # noqa: B018

    def bare_top_k(self) -> None:
        """The loop that everybody writes next."""
        for token_ids in self.padded:
            self.model(input_ids=token_ids).logits.log_softmax(-1).topk(self.k)

    def ours(self) -> None:
        """The worker, its rests in a thread beside the next shard, as in its process."""
        from concurrent.futures import ThreadPoolExecutor

        with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(1) as thread:
            rests = []
            for shard in self.shards:
                rests.append(thread.submit(self.worker(ShardTask(Path(folder), tuple(shard)), Line()).finish))  # type: ignore[arg-type]
            for rest in rests:
                rest.result()

    def breakdown(self) -> dict[str, float]:
        """Seconds of each part alone."""
        seconds, clock = dict.fromkeys(PARTS, 0.0), self.clock

        @contextmanager
        def timed(part: str) -> Iterator[None]:
            began = clock()
            yield
            seconds[part] += clock() - began

        head = find_head(self.teacher._model, self.spec.teacher.vocab_size)
        piece_rows, slice_rows = (self.teacher._rows_of(size) for size in (64 << 20, 3 << 19))
        buffer, scratch = (torch.empty(count, head.vocab_size) for count in (piece_rows, slice_rows))
        scored = []
        for batch in self.batches:
            tokens = collate(batch)
            with timed("forward"):
                hidden = hidden_states(self.teacher._model, tokens.token_ids).flatten(0, 1)[tokens.predict_rows]
            for rows, labels in zip(hidden.split(piece_rows), tokens.labels.split(piece_rows), strict=True):
                with timed("head"):
                    logits = head.logits_into(buffer, rows)
                with timed("statistics"):
                    for part, part_labels in zip(logits.split(slice_rows), labels.split(slice_rows), strict=True):
                        top_k_statistics(part, part_labels, self.k, scratch)
            scored.append(self.teacher.score(batch))
        with timed("transfer"):
            records = [records for part in scored for records in part.records()]
        ordered = [sample for batch in self.batches for sample in batch]
        position = 0
        with tempfile.TemporaryDirectory() as folder:
            for shard in self.shards:
                own, mine = ordered[position : position + len(shard)], records[position : position + len(shard)]
                position += len(shard)
                with timed("encode"):
                    image = build_shard(own, concat(mine), layer=self.spec.layer, vocab_size=head.vocab_size)
                with timed("seal"):
                    image.seal(Path(folder))
        return seconds


def cut(samples: Sequence[TokenizedSample], targets: int) -> Iterator[list[TokenizedSample]]:
    """Shards of about so many targets."""
    shard: list[TokenizedSample] = []
    for sample in samples:
        if shard and sum(len(other.targets) for other in shard) + len(sample.targets) > targets:
            yield shard
            shard = []
        shard.append(sample)
    yield shard


def batches_of(shard: Sequence[TokenizedSample], tokens: int) -> Iterator[list[TokenizedSample]]:
    """The batches that a worker makes of a shard."""
    lengths = np.array([len(sample.token_ids) for sample in shard], np.int64)
    yield from ([shard[row] for row in rows] for rows in token_batches(lengths, tokens))


@torch.inference_mode()
def measure(bench: Bench, rounds: int) -> dict[str, Any]:
    """Seconds of each loop in each round, and what follows from them."""
    loops: dict[str, Callable[[], None]] = dict(zip(LOOPS, (bench.bare, bench.bare_top_k, bench.ours), strict=True))
    seconds: dict[str, list[float]] = {name: [] for name in LOOPS}
    for number in range(rounds + 1):
        for name, loop in loops.items():
            began = bench.clock()
            loop()
            if number:  # the first round warms up
                seconds[name].append(bench.clock() - began)
    tokens = sum(len(sample.token_ids) for sample in bench.samples)
    targets = sum(len(sample.targets) for sample in bench.samples)
    ratios = {
        name: [other / own for other, own in zip(seconds[name], seconds["ours"], strict=True)] for name in LOOPS[:2]
    }
    return {
        "tokens": tokens,
        "targets": targets,
        "batches": len(bench.batches),
        "tokens_per_second": {name: tokens / statistics.median(times) for name, times in seconds.items()},
        "best_tokens_per_second": {name: tokens / min(times) for name, times in seconds.items()},
        "speed_of_ours": {
            name: {"min": min(values), "median": statistics.median(values), "max": max(values)}
            for name, values in ratios.items()
        },
        "breakdown_seconds": bench.breakdown(),
    }


def main() -> None:
    """Measure every file, print the tables, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--teacher", type=Path, required=True)
    parser.add_argument("--text", type=Path, nargs="+", required=True)
    parser.add_argument("--top_k", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=8192, help="tokens of each file")
    parser.add_argument("--tokens_per_batch", type=int, default=4096)
    parser.add_argument("--context_len", type=int, default=512)
    parser.add_argument("--cache_precision", default="compact")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--cpu_time", action="store_true", help="processor seconds, for a machine that others use too")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    results = {}
    for path in options.text:
        bench = Bench(options, samples_of(options.teacher, path, options.context_len, options.tokens))
        result = results[path.name] = measure(bench, options.rounds)
        print(f"\n{path.name}: {result['tokens']:,} tokens, {result['targets']:,} targets, {options.threads} threads\n")
        speeds, ours = result["tokens_per_second"], result["speed_of_ours"]
        rows = [
            (name, round(speeds[name]), *(ours[name][part] for part in ("min", "median", "max")))
            if name in ours
            else (name, round(speeds[name]), "", "", "")
            for name in LOOPS
        ]
        print(table([("loop", "tokens/s", "speed of ours: min", "median", "max"), *rows]))
        parts = result["breakdown_seconds"]
        total = sum(parts.values())
        print("\n" + table([("part", "seconds", "share"), *((name, s, s / total) for name, s in parts.items())]))
    settings = {name: getattr(options, name) for name in ("top_k", "tokens_per_batch", "context_len", "threads")}
    print("\n" + json.dumps(settings))
    write_json("collect", {"settings": settings, "teacher": options.teacher.name, "texts": results})


if __name__ == "__main__":
    main()
