"""Training from a cache against online distillation: the same student, teacher, batch and optimizer, paired in one run.

    python -m benchmarks.online --teacher DIR [--layers 6] [--rounds 5] [--length 512] [--batch 2]

The student has so many of the teacher's layers. "online" runs the teacher for every step and takes the KL over the
whole vocabulary, as trainers without a cache do; "cache" is the fused head on K = 50 records, and "cross-entropy" what
fine-tuning costs. Forward, backward and a step of AdamW each; ratios are of the rounds' own times.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from benchmarks.common import table, write_json
from distill.fused import fused_loss
from distill.head import find_head, hidden_states
from distill.losses import SparseTargets, build_loss
from distill.making import init_student

K = 50


def variants(teacher_folder: Path, student_folder: Path, batch: int, length: int) -> dict[str, Callable[[], None]]:
    """Each way as a function that makes one optimizer step of the one student."""
    teacher = AutoModelForCausalLM.from_pretrained(teacher_folder, dtype=torch.float32).eval()
    student = AutoModelForCausalLM.from_pretrained(student_folder, dtype=torch.float32)
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-6, fused=True)
    vocab_size = student.config.vocab_size
    token_ids = torch.randint(vocab_size, (batch, length))
    with torch.inference_mode():
        logprobs = torch.cat([teacher(row[None]).logits.log_softmax(-1)[0] for row in token_ids])
    top = logprobs.clone().topk(K)
    tails = torch.log1p(-top.values.exp().sum(1)).clamp(min=-80)
    targets = SparseTargets(token_ids.flatten(), top.indices.clone(), top.values.clone(), tails)
    kl = build_loss("kl")

    def made(loss: Callable[[], torch.Tensor]) -> Callable[[], None]:
        def step() -> None:
            loss().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        return step

    def cross_entropy() -> torch.Tensor:
        return student(input_ids=token_ids, labels=token_ids).loss  # type: ignore[no-any-return]

    def cached() -> torch.Tensor:
        hidden = hidden_states(student, token_ids).flatten(0, 1)
        return fused_loss(hidden, find_head(student, vocab_size), targets, kl, scale=1 / len(targets))

    def online() -> torch.Tensor:
        with torch.no_grad():
            wanted = teacher(input_ids=token_ids).logits.flatten(0, 1).log_softmax(-1)
        own = student(input_ids=token_ids).logits.flatten(0, 1).log_softmax(-1)
        return torch.nn.functional.kl_div(own, wanted, reduction="batchmean", log_target=True)

    return {"cross-entropy": made(cross_entropy), "cache": made(cached), "online": made(online)}


def main() -> None:
    """Measure, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--teacher", type=Path, required=True)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--length", type=int, default=512)
    options = parser.parse_args()
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        init_student(options.teacher, options.layers, Path(folder) / "student")
        steps = variants(options.teacher, Path(folder) / "student", options.batch, options.length)
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(options.rounds + 1):
        for name, step in steps.items():
            began = time.perf_counter()
            step()
            if number:  # the first round warms up
                seconds[name].append(time.perf_counter() - began)
    tokens = options.batch * options.length
    results = {
        name: {
            "tokens_per_second": tokens / statistics.median(times),
            "of_online": statistics.median(a / b for a, b in zip(seconds["online"], times, strict=True)),
        }
        for name, times in seconds.items()
    }
    rows = [(name, round(row["tokens_per_second"]), row["of_online"]) for name, row in results.items()]
    print(table([("step", "tokens/s", "times online"), *rows]))
    write_json("online", results)


if __name__ == "__main__":
    main()
