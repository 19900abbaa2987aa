"""What the benchmarks share: running the program as a user does, reading what it leaves, printing tables."""

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

ROOT = Path(__file__).resolve().parent.parent


def distill(*words: str) -> float:
    """Run the command line and return its seconds; its messages pass through."""
    started = time.monotonic()
    subprocess.run([sys.executable, str(ROOT / "run.py"), *words], check=True, cwd=ROOT)
    return time.monotonic() - started


def latest_summary(cache: Path) -> dict[str, Any]:
    """summary.json of the newest run."""
    return json.loads((cache / "runs" / "latest" / "summary.json").read_text())  # type: ignore[no-any-return]


def llama(vocab_size: int, layers: int = 6) -> "LlamaForCausalLM":
    """A Llama of SmolLM2's shape and random weights."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab_size, hidden_size=576, intermediate_size=1536, num_hidden_layers=layers, num_attention_heads=9,
        num_key_value_heads=3, tie_word_embeddings=True,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def table(rows: Sequence[Sequence[object]]) -> str:
    """Rows as a Markdown table, the first one its head."""
    cells = [[f"{cell:.4f}" if isinstance(cell, float) else str(cell) for cell in row] for row in rows]
    lines = ["| " + " | ".join(row) + " |" for row in cells]
    return "\n".join([lines[0], "|" + " --- |" * len(cells[0]), *lines[1:]])


def write_json(name: str, result: dict[str, Any]) -> None:
    """Keep the numbers beside the script's other results."""
    path = ROOT / "benchmarks" / "results" / f"{name}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")
