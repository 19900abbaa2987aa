"""Does distillation do what it should on the embedded demo? Validation KL of three students, and the time of a run.

    python -m benchmarks.demo

unigram: no student at all, just the training targets' token frequencies. cross-entropy: the same student, data, order
and steps, trained on the real tokens only. distilled: the default run.
"""

import tempfile
from pathlib import Path

import numpy as np

from benchmarks.common import distill, latest_summary, table, write_json
from distill.cache.shard import ShardReader


def unigram_kl(dataset: Path) -> float:
    """KL(teacher || token frequencies of the training targets) over K + 1 outcomes, mean over validation targets."""
    counts = None
    for path in sorted((dataset / "train").rglob("*.h5")):
        with ShardReader(path) as shard:
            counts = np.zeros(shard.layer["vocab_size"]) if counts is None else counts
            for row in range(len(shard)):
                np.add.at(counts, shard.token_ids(row)[shard.targets(row)], 1)
    assert counts is not None
    unigram = (counts + 0.5) / (counts + 0.5).sum()
    total = targets = 0.0
    for path in sorted((dataset / "validation").rglob("*.h5")):
        with ShardReader(path) as shard:
            records = shard.all_records()
        starts = np.cumsum(records.entry_counts) - records.entry_counts
        p = np.exp(records.entry_logprobs.astype(np.float64))
        q = unigram[records.entry_ids]
        tail = np.exp(records.tail_logprobs.astype(np.float64))
        rest = 1 - np.add.reduceat(q, starts)
        total += (p * (records.entry_logprobs - np.log(q))).sum() + (tail * (np.log(tail) - np.log(rest))).sum()
        targets += len(records)
    return total / targets


def main() -> None:
    """Run both trainings over one cache and print the table."""
    with tempfile.TemporaryDirectory() as folder:
        cache = Path(folder) / "cache"
        seconds = distill("-c", str(cache))
        distilled = latest_summary(cache)
        again = distill("-c", str(cache), "loss=ce")
        supervised = latest_summary(cache)
        assert supervised["cache"]["collected_targets"] == 0
        baseline = unigram_kl(cache / "dataset")
    rows: list[list[object]] = [["student", "kl", "ce", "top-1", "acceptance", "ece"]]
    rows.append(["unigram", baseline, "", "", "", ""])
    result = {"seconds": seconds, "seconds_from_cache": again, "unigram": {"kl": baseline}}
    for name, summary in (("before", distilled), ("cross-entropy", supervised), ("distilled", distilled)):
        metrics = summary["validation"]["before" if name == "before" else "after"]
        rows.append([name, *(metrics[key] for key in ("kl", "ce", "top1_agreement", "acceptance", "ece"))])
        result[name] = metrics
    print(table(rows))
    kl = distilled["validation"]["after"]["kl"]
    print(f"\nKL {1 - kl / baseline:.1%} below the unigram's; the default run took {seconds:.0f} s")
    write_json(
        "demo", result | {"cache": distilled["cache"], "collect": distilled["collect"], "train": distilled["train"]}
    )


if __name__ == "__main__":
    main()
