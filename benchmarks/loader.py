"""The loader alone: targets a second at K = 200, in random order, for several numbers of readers, against a step.

    python -m benchmarks.loader [--shards 24] [--readers 0 1 2]

A made-up compact cache of shards of 8,192 targets is read through one epoch, as a training would read it but without
a student. The step is that of ``benchmarks.step``: forward and backward of a Llama of SmolLM2's shape with 6 layers,
2 x 512 tokens, all of them targets, K = 200. Every number of readers has the same order, and its rate is the best of
two epochs: the first one may have to fetch the files.
"""

import argparse
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from benchmarks.common import llama, table, write_json
from distill.cache import Admissions, Layer, LayerSpec, build_shard
from distill.dataloader import CachedSamples, StepPlan, TeacherShare, load_steps
from distill.fused import fused_loss
from distill.head import find_head, hidden_states
from distill.losses import SparseTargets, build_loss
from distill.types import Records, TokenizedSample, sample_key

VOCAB, K, SHARD_TARGETS, SAMPLE_TARGETS = 49_152, 200, 8192, 128
STEP_BATCH, STEP_LENGTH = 2, 512

SPEC = LayerSpec(
    teacher="made-up", weights="w" * 64, model_config="c" * 64, dtype="fp32", quantisation="none",
    attention="default", token_map="t" * 64, vocab_size=VOCAB, mode="topk", top_k=K, cache_precision="compact",
)  # fmt: skip


def made_up_samples(shards: int) -> Iterator[list[TokenizedSample]]:
    """The samples of each shard: half prompt, half targets."""
    rng = np.random.default_rng(0)
    for _ in range(shards):
        samples = []
        for _ in range(SHARD_TARGETS // SAMPLE_TARGETS):
            token_ids = rng.integers(0, VOCAB, 2 * SAMPLE_TARGETS).astype(np.int32)
            targets = np.arange(SAMPLE_TARGETS, 2 * SAMPLE_TARGETS, dtype=np.int32)
            samples.append(TokenizedSample("made-up", True, token_ids, (), targets, sample_key(token_ids)))
        yield samples


def made_up_records(rng: np.random.Generator, rows: int) -> Records:
    """Peaked distributions over ids of which a few are in most records, like those of text."""
    pool = np.unique((VOCAB ** rng.random(16 * K)).astype(np.int64) - 1)
    chosen = np.argpartition(rng.random((rows, len(pool))), K, axis=1)[:, :K]
    logits = -np.sort(rng.gamma(2.0, 3.0, (rows, K + 1)))
    logprobs = (logits - np.logaddexp.reduce(logits, axis=1, keepdims=True)).astype(np.float32)
    return Records(
        entry_counts=np.full(rows, K, np.int64),
        entry_ids=pool[chosen].ravel(),
        entry_logprobs=logprobs[:, :K].ravel(),
        tail_logprobs=logprobs[:, K],
        label_logprobs=logprobs[:, 0],
        entropies=-(np.exp(logprobs) * logprobs).sum(1),
    )


def made_up_cache(folder: Path, shards: int) -> list[TokenizedSample]:
    """Seal a layer of so many shards under ``folder``; its samples in the order of a text."""
    layer, rng, samples = Layer.open(folder, SPEC), np.random.default_rng(1), []
    layer.prepare()
    for part in made_up_samples(shards):
        image = build_shard(part, made_up_records(rng, SHARD_TARGETS), layer=SPEC.describe(), vocab_size=VOCAB)
        image.seal(layer.folder)
        layer.register(image.info)
        samples += part
    return samples


def epoch_rate(folder: Path, samples: list[TokenizedSample], readers: int, admissions: Admissions) -> float:
    """Targets a second of one epoch in steps of eight samples."""
    plan = StepPlan(np.array([len(s.token_ids) for s in samples]), 4, 2, 1, "shuffle", 0)
    with Layer.open(folder, SPEC, admissions) as layer:
        data = CachedSamples([TeacherShare(layer, 1.0, layer.locate(samples))], samples)
        began = time.perf_counter()
        targets = sum(step.num_targets for step in load_steps(data, plan, first=1, readers=readers))
        return targets / (time.perf_counter() - began)


def step_rate(repeats: int) -> float:
    """Targets a second that the student learns, at most."""
    model, loss = llama(VOCAB), build_loss("kl")
    token_ids = torch.randint(VOCAB, (STEP_BATCH, STEP_LENGTH))
    records = made_up_records(np.random.default_rng(2), STEP_BATCH * STEP_LENGTH)
    targets = SparseTargets(
        labels=token_ids.flatten(),
        entry_ids=torch.from_numpy(records.entry_ids).view(-1, K),
        entry_logprobs=torch.from_numpy(records.entry_logprobs).view(-1, K),
        tail_logprobs=torch.from_numpy(records.tail_logprobs),
        entropies=torch.from_numpy(records.entropies),
    )
    times = []
    for _ in range(repeats + 1):
        model.zero_grad(set_to_none=True)
        began = time.perf_counter()
        hidden = hidden_states(model, token_ids).flatten(0, 1)
        fused_loss(hidden, find_head(model, VOCAB), targets, loss, scale=1 / len(targets)).backward()
        times.append(time.perf_counter() - began)
    return len(targets) / min(times[1:])


def main() -> None:
    """Measure, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shards", type=int, default=24)
    parser.add_argument("--readers", type=int, nargs="+", default=[0, 1, 2])
    arguments = parser.parse_args()
    rates: dict[int, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        samples, admissions = made_up_cache(Path(folder), arguments.shards), Admissions()
        for name in Path(folder).glob("*/*.h5"):
            admissions.add(Layer.open(Path(folder), SPEC, admissions).shards[name.stem].sha256)
        for readers in [*arguments.readers, *arguments.readers]:
            rates[readers] = max(rates.get(readers, 0.0), epoch_rate(Path(folder), samples, readers, admissions))
    step = step_rate(5)
    head = (f"readers ({arguments.shards} shards)", "targets/s", "of a step's")
    rows = [(readers, round(rate), f"{rate / step:.1f}") for readers, rate in rates.items()]
    print(table([head, *rows, ("a training step", round(step), "1.0")]))
    write_json("loader", {"shards": arguments.shards, "readers": rates, "step": step})


if __name__ == "__main__":
    main()
