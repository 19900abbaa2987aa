"""One training step on the CPU: sparse distillation through the fused head against Hugging Face's cross-entropy.

    python -m benchmarks.step [--rounds 9] [--threads 2]

A Llama of SmolLM2's shape with 6 layers, 2 x 512 tokens, K = 64; forward and backward, without an optimizer. All
variants take turns within each round of one process. "of ce" is the ratio of the medians, "paired" the median of the
rounds' own ratios, which says the same on a quiet machine and is the one to trust on a busy one. "body" is the model
without any head. Memory is the peak resident size of a process of its own for each variant, two steps long, above that
of "body": buffers, activations and gradients of the head alone, and what freeing leaves unused.
"""

import argparse
import multiprocessing
import resource
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.common import table, write_json
from distill.fused import fused_loss
from distill.head import find_head, hidden_states
from distill.losses import SparseTargets, build_loss

K = 64
VARIANTS = ("body", "ce", "kl", "kl, half the targets")


@dataclass(frozen=True, slots=True)
class Shape:
    """A Llama and a batch for it, and how they are run: in fp32, or in bf16 by autocast."""

    vocab_size: int = 49_152
    hidden: int = 576
    intermediate: int = 1536
    layers: int = 6
    heads: int = 9
    kv_heads: int = 3
    batch: int = 2
    length: int = 512
    device: str = "cpu"
    attention: str = "sdpa"
    bf16: bool = False


def make_steps(shape: Shape) -> dict[str, Callable[[], None]]:
    """Each variant as a function that does one forward and backward pass."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=shape.vocab_size, hidden_size=shape.hidden, intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers, num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads,
        tie_word_embeddings=True, attn_implementation=shape.attention,
    )  # fmt: skip
    device = torch.device(shape.device)
    model = LlamaForCausalLM(config).to(device)
    token_ids = torch.randint(shape.vocab_size, (shape.batch, shape.length), device=device)
    kl = build_loss("kl")

    def body() -> None:
        hidden_states(model, token_ids).sum().backward()

    def ce() -> None:
        model(input_ids=token_ids, labels=token_ids).loss.backward()

    def distill(rows: torch.Tensor, targets: SparseTargets) -> None:
        hidden = hidden_states(model, token_ids).flatten(0, 1)[rows]
        fused_loss(hidden, find_head(model, shape.vocab_size), targets, kl, scale=1 / len(targets)).backward()

    def with_targets(every: int) -> Callable[[], None]:
        rows = torch.arange(0, shape.batch * shape.length, every, device=device)
        ids = torch.stack([torch.randperm(shape.vocab_size)[:K] for _ in rows])
        logprobs = torch.randn(len(rows), K + 1).sort(1, descending=True).values.log_softmax(1)
        targets = SparseTargets(ids[:, 0], ids, logprobs[:, :K].contiguous(), logprobs[:, K]).to(shape.device)
        return lambda: distill(rows, targets)

    steps = dict(zip(VARIANTS, (body, ce, with_targets(1), with_targets(2)), strict=True))

    def clean(step: Callable[[], None]) -> Callable[[], None]:
        def run() -> None:
            model.zero_grad(set_to_none=True)
            with torch.autocast(device.type, torch.bfloat16, enabled=shape.bf16):
                step()

        return run

    return {name: clean(step) for name, step in steps.items()}


def peak_memory(name: str, threads: int) -> int:
    """Peak resident bytes of this process after two steps of one variant."""
    torch.set_num_threads(threads)
    step = make_steps(Shape())[name]
    step()
    step()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measure(rounds: int, threads: int) -> dict[str, dict[str, float]]:
    """Seconds, both ratios to cross-entropy, extra bytes over the body and their ratio, a variant."""
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        tasks = [(name, threads) for name in VARIANTS]
        peaks = dict(zip(VARIANTS, pool.starmap(peak_memory, tasks, chunksize=1), strict=True))
    torch.set_num_threads(threads)
    steps = make_steps(Shape())
    times: dict[str, list[float]] = {name: [] for name in VARIANTS}
    for number in range(rounds + 1):
        for name, step in steps.items():
            began = time.perf_counter()
            step()
            if number:  # the first round warms up
                times[name].append(time.perf_counter() - began)
    extra = {name: peaks[name] - peaks["body"] for name in VARIANTS}
    return {
        name: {
            "seconds": statistics.median(times[name]),
            "time_ratio": statistics.median(times[name]) / statistics.median(times["ce"]),
            "paired_ratio": statistics.median(a / b for a, b in zip(times[name], times["ce"], strict=True)),
            "extra_bytes": extra[name],
            "memory_ratio": extra[name] / extra["ce"],
        }
        for name in VARIANTS
    }


def main() -> None:
    """Measure, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    results = measure(options.rounds, options.threads)
    head = (f"{options.threads} threads", "seconds", "of ce", "paired", "extra MB", "of ce")
    rows = [
        (
            name,
            row["seconds"],
            row["time_ratio"],
            row["paired_ratio"],
            round(row["extra_bytes"] / 1e6),
            row["memory_ratio"],
        )
        for name, row in results.items()
    ]
    print(table([head, *rows]))
    write_json("step", {"threads": options.threads, "rounds": options.rounds, "variants": results})


if __name__ == "__main__":
    main()
