"""Every optimizer in every precision on the embedded demo: 20 steps each, and what became of the loss.

    python -m benchmarks.optimizers --work DIR

Steps of 4 samples; all trainings share one cache. A cell is the mean loss of the first and of the last four steps, in
nats a target.
"""

import argparse
import contextlib
import io
import json
import statistics
from pathlib import Path

from benchmarks.common import distill, table, write_json
from distill.cli import main as command_line
from distill.optim import OPTIMIZERS

PRECISIONS = ("fp32", "bf16", "fp16", "8bit", "4bit")
RATES = {"sgd": 0.5, "adagrad": 0.02, "rmsprop": 0.002, "rmsprop8bit": 0.002, "rmsprop32bit": 0.002}
STEPS, ENDS = 20, 4
# Few samples are held out: validation is no part of this.
TEXT = {"validation_dataset_path": "null", "validation_fraction": 0.002}


def losses(work: Path, optimizer: str, precision: str) -> list[float]:
    """Of one training's steps."""
    # Adapters of a random student have little to work with: they take larger steps.
    rate = RATES.get(optimizer, 0.003) * (4 if precision in ("8bit", "4bit") else 1)
    keys = {
        "cache_folder": work / "cache", "optimizer": optimizer, "training_precision": precision, "lr": rate,
        "num_warmup_steps": 2, "max_steps": STEPS, "validate_every_n_epochs": 0, "batch_size": 4,
        **TEXT,
    }  # fmt: skip
    with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
        code = command_line(["train", "--fresh", *(f"{key}={value}" for key, value in keys.items())])
    assert code == 0, (optimizer, precision)
    log = (work / "cache" / "runs" / "latest" / "metrics.jsonl").read_text().splitlines()
    return [record["loss"] for record in map(json.loads, log) if record["kind"] == "train"]


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="a folder for everything that is made")
    work: Path = parser.parse_args().work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    distill("collect", "-c", str(work / "cache"), *(f"{key}={value}" for key, value in TEXT.items()))
    results: dict[str, dict[str, list[float]]] = {}
    for optimizer in OPTIMIZERS:
        results[optimizer] = {}
        for precision in PRECISIONS:
            steps = losses(work, optimizer, precision)
            assert len(steps) == STEPS
            results[optimizer][precision] = [statistics.mean(steps[:ENDS]), statistics.mean(steps[-ENDS:])]
    rows = [
        (optimizer, *("{:.2f} → {:.2f}".format(*cells[precision]) for precision in PRECISIONS))
        for optimizer, cells in results.items()
    ]
    print(table([("optimizer", *PRECISIONS), *rows]))
    write_json("optimizers", results)


if __name__ == "__main__":
    main()
