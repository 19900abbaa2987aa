"""Distillation against training on the text alone, at equal steps: a real teacher, a student of a few of its layers.

    python -m benchmarks.kd --teacher DIR --work DIR [--seeds 0 1] [--layers 6] [--threads N] TEXT [TEXT ...]

The first samples of each file, 300 kB in all, are trained on for two epochs in packed rows of about 1,024
tokens, each token a target; the next 40 kB are held out. Both arms differ in ``loss`` alone and share one cache of
top-200 records. A run of the same command goes on where the last one ended.
"""

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from benchmarks.common import distill, table, write_json

TRAIN_BYTES, VALIDATION_BYTES = 300_000, 40_000
ARMS = ("ce", "kl")


def split(texts: list[Path], work: Path) -> None:
    """Write train.jsonl and validation.jsonl, with as many bytes of each file."""
    parts: dict[str, list[str]] = {"train": [], "validation": []}
    for path in texts:
        lines = iter(path.read_text(encoding="utf-8").splitlines(keepends=True))
        for name, size in (("train", TRAIN_BYTES), ("validation", VALIDATION_BYTES)):
            left = size / len(texts)
            while left > 0:
                line = next(lines)
                parts[name].append(line)
                left -= len(line)
    for name, chosen in parts.items():
        (work / f"{name}.jsonl").write_text("".join(chosen), encoding="utf-8")


def settings(teacher: Path, work: Path) -> dict[str, Any]:
    """The keys of all runs."""
    return {
        "cache_folder": str(work / "cache"),
        "dataset_path": str(work / "train.jsonl"),
        "validation_dataset_path": str(work / "validation.jsonl"),
        "teacher_models_folder": str(teacher),
        "student_path": str(work / "student"),
        "context_len": 512,
        "ignore_model_type": True,
        "save_sys_range": True,
        "save_topK": 200,
        "packing": True,
        "max_tokens_per_batch": 1024,
        "num_epochs": 2,
        "lr": 5e-4,
        "num_warmup_steps": 20,
        "decay_start": 0.7,
    }


def measure(keys: dict[str, Any], work: Path, arm: str, seed: int) -> dict[str, Any]:
    """One run; its numbers are kept beside its configuration, and taken from there the next time."""
    result, config = work / f"{arm}-{seed}.result.json", work / f"{arm}-{seed}.json"
    if not result.exists():
        config.write_text(json.dumps(keys | {"loss": arm, "seed": seed}, indent=1))
        distill("--config", str(config))
        summary = (work / "cache" / "runs" / "latest" / "summary.json").read_text()
        result.write_text(summary)
    summary = json.loads(result.read_text())
    return {**summary["validation"]["after"], **{key: summary["train"][key] for key in ("steps", "tokens_per_second")}}


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--teacher", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True, help="a folder for everything that is made")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--threads", type=int, help="of the teacher; OMP_NUM_THREADS are those of the student")
    parser.add_argument("texts", type=Path, nargs="+")
    options = parser.parse_args()
    work: Path = options.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    split(options.texts, work)
    teacher, student = options.teacher.resolve(), work / "student"
    if not student.exists():
        distill("init-student", "--from", str(teacher), "--layers", str(options.layers), "--out", str(student))
    keys = settings(teacher, work) | {"threads_per_worker": options.threads}
    results = {arm: [measure(keys, work, arm, seed) for seed in options.seeds] for arm in ARMS}
    names = ("ce", "kl", "ece", "top1_agreement", "acceptance")
    rows = [(arm, *(statistics.mean(run[name] for run in runs) for name in names)) for arm, runs in results.items()]
    spread = [
        (f"{arm}, from each other", *(max(run[n] for run in runs) - min(run[n] for run in runs) for n in names))
        for arm, runs in results.items()
    ]
    print(table([("held out", *names), *rows, *spread]))
    write_json("kd", results)


if __name__ == "__main__":
    main()
