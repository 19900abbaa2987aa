"""Packed rows against padded ones: targets a second of a training step, with as many tokens in a batch.

    python -m benchmarks.packing TEXT TOKENIZER [--layers 6] [--tokens 4096] [--batches 2] [--rounds 3]

TEXT is a file of conversations, such as gsm8k's, and TOKENIZER a model folder with a chat template. The student is a
Llama of SmolLM2's shape with so many layers and random weights; the records are made up, K = 64. Both ways take batches
of ``--tokens`` tokens, padding included, from the same samples in the same random order, and train on them in turns:
forward and backward, without an optimizer, the least processor time that each batch took in any round. "by products" is
what the ratio would be if nothing but the matrix products of weights took time: the output layer works for targets
alone, so that padding costs it nothing. "padded, sorted" is for comparison: batches of samples of about one length,
which have little padding too, but aren't mixed. The gradient of the first samples, packed and padded, is compared
first.
"""

import argparse
import itertools
import math
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from benchmarks.common import llama, table, write_json
from distill.collate import TokenBatch, collate
from distill.config import Config
from distill.dataset import read_samples
from distill.fused import fused_loss
from distill.head import find_head, hidden_states
from distill.losses import SparseTargets, build_loss
from distill.splits import saved_roles
from distill.steps import StepPlan
from distill.tokenizer import (
    SampleRules,
    SampleTokenizer,
    load_tokenizer,
    real_vocab_size,
    resolve_template,
    tokenize_dataset,
)
from distill.types import TokenizedSample

K = 64
CONTEXT = 1024
COMPARED = 12


def tokenised(text: Path, folder: Path) -> tuple[list[TokenizedSample], int]:
    """The samples of a text as a run would have them, and the vocabulary's size."""
    tokenizer = load_tokenizer(folder, trust_remote_code=False)
    vocab = real_vocab_size(tokenizer)
    rules = SampleRules(
        context_len=CONTEXT, crop=vocab, add_bos=None, saved_roles=saved_roles(Config()), train_turn_end=True,
        long_samples="auto",
    )  # fmt: skip
    tokenize = SampleTokenizer(tokenizer, resolve_template(None, [(folder, tokenizer)]), rules)
    return list(tokenize_dataset(read_samples([str(text)]), tokenize).samples), vocab


def made_up_targets(tokens: TokenBatch, vocab: int) -> SparseTargets:
    """Records of K ids each, the real token among them."""
    rng = np.random.default_rng(0)
    ids = torch.from_numpy(rng.integers(0, vocab // K, (len(tokens.labels), K)) + np.arange(K) * (vocab // K))
    logprobs = torch.from_numpy(np.sort(rng.normal(0, 2, (len(ids), K + 1)))[:, ::-1].copy()).float().log_softmax(1)
    return SparseTargets(tokens.labels, ids, logprobs[:, :K].contiguous(), logprobs[:, K].contiguous())


def step(model: LlamaForCausalLM, tokens: TokenBatch, targets: SparseTargets, vocab: int) -> None:
    """Forward and backward, the mean over targets."""
    hidden = tokens.at_targets(hidden_states(model, tokens.token_ids, position_ids=tokens.position_ids))
    fused_loss(hidden, find_head(model, vocab), targets, build_loss("kl"), scale=1 / len(targets)).backward()


def gradient(model: LlamaForCausalLM, tokens: TokenBatch, vocab: int) -> Tensor:
    """The gradient of one step, as one vector."""
    model.zero_grad(set_to_none=True)
    step(model, tokens, made_up_targets(tokens, vocab), vocab)
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])


def gradient_difference(model: LlamaForCausalLM, samples: Sequence[TokenizedSample], vocab: int) -> float:
    """Largest difference of a gradient's element, packed and padded, relative to the largest element."""
    begins = np.arange(len(samples)) % 4 == 0
    packed, padded = gradient(model, collate(samples, begins), vocab), gradient(model, collate(samples), vocab)
    return float((packed - padded).abs().max() / padded.abs().max())


def batches_of(plan: StepPlan, samples: Sequence[TokenizedSample], count: int) -> list[TokenBatch]:
    """The first micro-batches of a plan; of a sorted one, spread over all."""
    steps = (
        plan.steps()
        if plan.data_order == "shuffle"
        else itertools.islice(plan.steps(), 0, None, plan.total_steps // count)
    )
    rows = [batch for _, (batch,) in itertools.islice(steps, count)]
    return [collate([samples[row] for row in batch], plan.begins_row(batch)) for batch in rows]


def main() -> None:
    """Measure, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path)
    parser.add_argument("tokenizer", type=Path)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--batches", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    samples, vocab = tokenised(arguments.text, arguments.tokenizer)
    lengths = np.array([len(sample.token_ids) for sample in samples])
    model = llama(vocab, arguments.layers)
    difference = gradient_difference(model, samples[:COMPARED], vocab)

    def plan(order: str, row_tokens: int | None) -> StepPlan:
        return StepPlan(lengths, 1, 1, 1, order, 0, max_tokens=arguments.tokens, row_tokens=row_tokens)

    plans = {
        "padded": plan("shuffle", None),
        "packed": plan("shuffle", int(lengths.max())),
        "padded, sorted": plan("sorted", None),
    }
    batches = {name: batches_of(plan, samples, arguments.batches) for name, plan in plans.items()}
    seconds = {name: [math.inf] * arguments.batches for name in plans}
    for _ in range(arguments.rounds):
        for index, name in itertools.product(range(arguments.batches), plans):
            tokens = batches[name][index]
            targets = made_up_targets(tokens, vocab)
            model.zero_grad(set_to_none=True)
            began = time.process_time()
            step(model, tokens, targets, vocab)
            seconds[name][index] = min(seconds[name][index], time.process_time() - began)
    rates = {name: sum(len(tokens.labels) for tokens in made) / sum(seconds[name]) for name, made in batches.items()}
    fill = {
        name: sum(t.num_tokens for t in made) / sum(t.token_ids.numel() for t in made) for name, made in batches.items()
    }
    print(f"{len(samples):,} samples of {lengths.mean():.0f} tokens, {lengths.max()} at most")
    head_weights = model.get_output_embeddings().weight.numel()
    body_weights = sum(parameter.numel() for parameter in model.parameters()) - head_weights
    products = {
        name: sum(len(t.labels) for t in made)
        / sum(body_weights * t.token_ids.numel() + head_weights * len(t.labels) for t in made)
        for name, made in batches.items()
    }
    title = f"{arguments.layers} layers, {arguments.tokens} tokens a batch"
    head = (title, "targets/s", "of padded", "by products", "tokens that aren't padding")
    rows = [
        (name, round(rate), rate / rates["padded"], products[name] / products["padded"], fill[name])
        for name, rate in rates.items()
    ]
    print(table([head, *rows]))
    print(f"largest difference of gradients: {difference:.1e} of the largest element")
    write_json(
        f"packing-{arguments.layers}-layers",
        {"targets_per_second": rates, "fill": fill, "gradient_difference": difference},
    )


if __name__ == "__main__":
    main()
