"""Packed students: a real teacher in 8bit and 4bit as its own student, and what adapters win back.

    python -m benchmarks.lora --teacher DIR --text FILE --work DIR [--samples 50] [--precisions 4bit 8bit]

Validation KL to the teacher (K = 64) of the packed student as it is, after one step of adapters a sample, and of the
merged export in fp32, which should be the student that was validated: with 4bit it is but for the rounding of the sum,
with 8bit LLM.int8's rounding of what goes into each layer is gone. What packing costs in speed is the last column.
"""

import argparse
import itertools
import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.common import distill, latest_summary, table, write_json
from distill.config import Config
from distill.filling import cached_samples
from distill.prepare import prepared
from distill.report import Console
from distill.student import Student
from distill.train import evaluate

CONTEXT, VALIDATION_SAMPLES = 128, 12


def settings(teacher: Path, work: Path) -> dict[str, Any]:
    """The keys of all runs but the precision."""
    return {
        "cache_folder": str(work / "cache"),
        "dataset_path": str(work / "train.jsonl"),
        "validation_dataset_path": str(work / "validation.jsonl"),
        "teacher_models_folder": str(teacher),
        "student_path": str(teacher),
        "context_len": CONTEXT,
        "ignore_model_type": True,
        "save_topK": 64,
        "batch_size": 1,
        "lr": 2e-4,
        "num_warmup_steps": 3,
    }


def validation_kl(keys: dict[str, Any]) -> float:
    """The KL of a student as it is."""
    with prepared(Config.from_flat(keys), Console()) as job, ExitStack() as stack:
        return evaluate(Student(job.student), cached_samples(job, "validation", stack))["kl"]


def measure(keys: dict[str, Any], work: Path, precision: str) -> dict[str, Any]:
    """One training and its export."""
    config = work / f"{precision}.json"
    config.write_text(json.dumps(keys | {"training_precision": precision}, indent=1))
    distill("--config", str(config))
    summary = latest_summary(work / "cache")
    student = max((work / "cache" / "student" / "trained").glob("*_final"), key=lambda path: path.stat().st_mtime)
    return {
        "before": summary["validation"]["before"]["kl"],
        "after": summary["validation"]["after"]["kl"],
        "export": validation_kl(keys | {"student_path": str(student)}),
        "steps": summary["train"]["steps"],
        "tokens_per_second": summary["train"]["tokens_per_second"],
        "peak_memory_bytes": summary["train"]["peak_memory_bytes"],
    }


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--teacher", type=Path, required=True)
    parser.add_argument("--text", type=Path, required=True, help="a .jsonl file, of which the first samples are used")
    parser.add_argument("--work", type=Path, required=True, help="a new folder for everything that is made")
    parser.add_argument("--samples", type=int, default=50)
    parser.add_argument("--precisions", nargs="+", default=["4bit", "8bit"])
    options = parser.parse_args()
    work: Path = options.work
    work.mkdir(parents=True)
    with options.text.open(encoding="utf-8") as file:
        for name, count in (("validation", VALIDATION_SAMPLES), ("train", options.samples)):
            (work / f"{name}.jsonl").write_text("".join(itertools.islice(file, count)), encoding="utf-8")
    keys = settings(options.teacher.resolve(), work.resolve())
    results = {precision: measure(keys, work, precision) for precision in options.precisions}
    head = ("precision", "KL before", "KL after", "KL of the export", "steps", "tokens/s", "peak MB")
    rows = [
        (name, *(f"{row[key]:.6f}" for key in ("before", "after", "export")), row["steps"],
         round(row["tokens_per_second"]), round(row["peak_memory_bytes"] / 1e6))
        for name, row in results.items()
    ]  # fmt: skip
    print(table([head, *rows]))
    write_json("lora", results)


if __name__ == "__main__":
    main()
