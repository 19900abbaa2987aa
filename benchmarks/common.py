"""What the benchmarks share: running the program as a user does, reading what it leaves, printing tables."""

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def distill(*words: str) -> float:
    """Run the command line and return its seconds; its messages pass through."""
    started = time.monotonic()
    subprocess.run([sys.executable, str(ROOT / "run.py"), *words], check=True, cwd=ROOT)
    return time.monotonic() - started


def latest_summary(cache: Path) -> dict[str, Any]:
    """summary.json of the newest run."""
    return json.loads((cache / "runs" / "latest" / "summary.json").read_text())  # type: ignore[no-any-return]


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
