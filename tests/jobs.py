"""Whole jobs on toy models, as the command line runs them."""

import contextlib
import hashlib
import io
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from distill.cli import main

ROOT = Path(__file__).parent.parent
COMMON = {
    "ignore_model_type": True,
    "save_user_range": True,
    "context_len": 96,
    "save_topK": 20,
    "num_epochs": 2,
    "batch_size": 4,
    "grad_accum_batches": 2,
    "lr": 0.003,
    "threads_per_worker": 1,
    "shard_targets": 400,
    "collect_tokens_per_batch": 512,
}


def write_config(folder: Path, teacher: Path, student: Path, text: Path, **changes: object) -> Path:
    keys = {
        **COMMON,
        "cache_folder": str(folder / "cache"),
        "dataset_path": str(text),
        "teacher_models_folder": str(teacher),
        "student_path": str(student),
        **changes,
    }
    path = folder / "config.json"
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(keys, indent=1))
    return path


def command(config: Path, *words: str) -> list[str]:
    return [sys.executable, str(ROOT / "run.py"), "--config", str(config), *words]


@dataclass(frozen=True)
class Finished:
    """What a command said."""

    stdout: str
    stderr: str


def distill(config: Path, *words: str, code: int = 0) -> Finished:
    """The command in this process; its workers are processes all the same."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        got = main(["--config", str(config), *words])
    assert got == code, f"exit {got}\n{out.getvalue()}\n{err.getvalue()}"
    return Finished(out.getvalue(), err.getvalue())


def summary_of(cache: Path) -> dict[str, Any]:
    return json.loads((cache / "runs" / "latest" / "summary.json").read_text())  # type: ignore[no-any-return]


def shards_of(cache: Path) -> dict[str, str]:
    """Everything that a collection leaves: name and digest of each file, locks (empty) included."""
    files = [path for path in (cache / "dataset").rglob("*") if path.is_file()]
    return {str(p.relative_to(cache)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


def weights_of(cache: Path) -> dict[str, torch.Tensor]:
    (folder,) = (cache / "student" / "trained").glob("*_final")
    return AutoModelForCausalLM.from_pretrained(folder).state_dict()  # type: ignore[no-any-return]


def same_weights(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
