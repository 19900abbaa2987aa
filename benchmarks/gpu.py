"""What only a GPU can say: steps in bf16 with sdpa and FlashAttention 2, their memory, collecting, and the whole job.

    python -m benchmarks.gpu [--device cuda] [--rounds 9] [--small]

Three parts, some minutes in all: a training step of each variant of ``benchmarks.step`` in bf16, for every attention
that is there, with the peak of allocated memory above what stands before the step; a teacher's scoring against the bare
forward pass, in bf16, K = 200; 20 steps of the embedded demo in every precision, collected and trained on the device.
What can't be checked where it runs is said at the end. ``--small --device cpu`` proves the script itself.
"""

import argparse
import importlib.util
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.common import distill, latest_summary, table, write_json
from benchmarks.step import VARIANTS, Shape, make_steps
from distill.teacher import Teacher, TeacherSpec
from distill.types import TokenizedSample, sample_key

PRECISIONS = ("fp32", "bf16", "fp16", "8bit", "4bit")
LARGE = Shape(hidden=2048, intermediate=5632, layers=16, heads=32, kv_heads=8, batch=8, length=1024, bf16=True)
SMALL = Shape(vocab_size=512, hidden=64, intermediate=128, layers=2, heads=4, kv_heads=2, length=64, bf16=True)
TOP_K = 200


def timed(action: Callable[[], object], device: str) -> float:
    """Seconds until the device is done."""
    began = time.perf_counter()
    action()
    if device != "cpu":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began


def steps(shape: Shape, rounds: int) -> dict[str, dict[str, float]]:
    """Tokens a second, the ratio of times to cross-entropy's, and peak bytes above the model, a variant."""
    made = make_steps(shape)
    times: dict[str, list[float]] = {name: [] for name in VARIANTS}
    peaks = dict.fromkeys(VARIANTS, 0)
    for number in range(rounds + 2):
        for name, step in made.items():
            if shape.device != "cpu":
                torch.cuda.reset_peak_memory_stats(shape.device)
                before = torch.cuda.memory_allocated(shape.device)
            seconds = timed(step, shape.device)
            if number > 1:  # the first rounds warm up
                times[name].append(seconds)
            if shape.device != "cpu":
                peaks[name] = torch.cuda.max_memory_allocated(shape.device) - before
    tokens = shape.batch * shape.length
    return {
        name: {
            "tokens_per_second": tokens / statistics.median(times[name]),
            "paired_ratio": statistics.median(a / b for a, b in zip(times[name], times["ce"], strict=True)),
            "peak_bytes": peaks[name],
        }
        for name in VARIANTS
    }


def collecting(shape: Shape, rounds: int, folder: Path) -> dict[str, float]:
    """Tokens a second of a bare forward pass, of it with log_softmax and topk, and of a teacher's scoring."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=shape.vocab_size, hidden_size=shape.hidden, intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers, num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads,
    )  # fmt: skip
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(folder)
    model = model.to(torch.device(shape.device)).eval()
    teacher = Teacher(TeacherSpec(folder, "bf16", shape.device, shape.vocab_size, TOP_K, trust_remote_code=False))
    token_ids = torch.randint(shape.vocab_size, (shape.batch, shape.length))
    samples = [
        TokenizedSample(f"row {number}", True, row, (), np.arange(1, shape.length, dtype=np.int32), sample_key(row))
        for number, row in enumerate(token_ids.to(torch.int32).numpy())
    ]
    on_device = token_ids.to(shape.device)
    loops: dict[str, Callable[[], object]] = {
        "bare": lambda: model(input_ids=on_device).logits,
        "bare + top-k": lambda: model(input_ids=on_device).logits.float().log_softmax(-1).topk(TOP_K),
        "ours": lambda: teacher.score(samples).records(),
    }
    times: dict[str, list[float]] = {name: [] for name in loops}
    with torch.inference_mode():
        for number in range(rounds + 2):
            for name, loop in loops.items():
                seconds = timed(loop, shape.device)
                if number > 1:
                    times[name].append(seconds)
    return {name: token_ids.numel() / statistics.median(values) for name, values in times.items()}


def demo(device: str, precision: str, cache: Path) -> dict[str, Any]:
    """The embedded demo's first steps, collected and trained on the device."""
    keys = {"cache_folder": cache, "device": device, "training_precision": precision, "max_steps": 20}
    distill("--fresh", *(f"{key}={value}" for key, value in keys.items()))
    summary = latest_summary(cache)
    return {
        "before": summary["validation"]["before"]["kl"],
        "after": summary["validation"]["after"]["kl"],
        "tokens_per_second": summary["train"]["tokens_per_second"],
    }


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--small", action="store_true")
    options = parser.parse_args()
    shape = replace(SMALL if options.small else LARGE, device=options.device)
    flash = importlib.util.find_spec("flash_attn") is not None and shape.device != "cpu"
    results: dict[str, Any] = {"device": shape.device, "steps": {}}
    if shape.device != "cpu":
        results["device"] = torch.cuda.get_device_name(shape.device)
    for attention in ("sdpa", "flash_attention_2") if flash else ("sdpa",):
        rows = results["steps"][attention] = steps(replace(shape, attention=attention), options.rounds)
        head = (attention, "tokens/s", "time, of ce", "peak MB")
        print(table([head, *((n, round(r["tokens_per_second"]), r["paired_ratio"], round(r["peak_bytes"] / 1e6))
                             for n, r in rows.items())]))  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        speeds = results["collecting"] = collecting(shape, options.rounds, Path(folder) / "teacher")
        print(table([("collecting, K = 200", "tokens/s"), *((name, round(speed)) for name, speed in speeds.items())]))
        runs = results["demo"] = {
            precision: demo(options.device, precision, Path(folder) / "cache") for precision in PRECISIONS
        }
    rows = [(name, row["before"], row["after"], round(row["tokens_per_second"])) for name, row in runs.items()]
    print(table([("demo, 20 steps", "KL before", "KL after", "tokens/s"), *rows]))
    unchecked = [
        *(["a GPU"] if shape.device == "cpu" else []),
        *([] if flash else ["FlashAttention 2: the package flash-attn isn't there, or no GPU"]),
        *(["several GPUs"] if torch.cuda.device_count() < 2 else []),
    ]
    print("not checked here: " + ("; ".join(unchecked) or "nothing"))
    if not options.small:
        write_json("gpu", results | {"unchecked": unchecked})


if __name__ == "__main__":
    main()
