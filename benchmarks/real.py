"""The whole job on a real teacher and real text.

    python -m benchmarks.real --teacher DIR --conversations FILE --completions FILE --work DIR

300 conversations and 100 completions, a student of six of the teacher's layers, top-50, context 512. Prints metrics
before and after, bytes a target, speeds, memory, and three continuations by the student.
"""

import argparse
import itertools
import json
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.common import distill, latest_summary, table, write_json

PROMPTS = (
    [{"role": "user", "content": "Tom has 12 apples and buys 5 more. He gives 4 away. How many are left?"}],
    [{"role": "user", "content": "A train goes 60 miles in an hour. How far does it go in 3 hours?"}],
    "First Citizen:\nBefore we proceed any further,",
)


def head(path: Path, lines: int) -> str:
    """The first lines of a file."""
    with path.open(encoding="utf-8") as file:
        return "".join(itertools.islice(file, lines))


def continuations(folder: Path) -> list[str]:
    """What the student makes of the prompts, sampled with a fixed seed."""
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    torch.manual_seed(0)
    texts = []
    for prompt in PROMPTS:
        if isinstance(prompt, str):
            ids = tokenizer(prompt, return_tensors="pt").input_ids
        else:
            rendered = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
            ids = tokenizer(rendered, return_tensors="pt", add_special_tokens=False).input_ids
        out = model.generate(ids, max_new_tokens=60, do_sample=True, temperature=0.7, top_p=0.9)
        texts.append(tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True))
    return texts


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--teacher", type=Path, required=True)
    parser.add_argument("--conversations", type=Path, required=True)
    parser.add_argument("--completions", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True, help="a new folder for everything that is made")
    parser.add_argument("flags", nargs="*", help="further key=value for the run")
    options = parser.parse_args()
    work: Path = options.work
    work.mkdir(parents=True)
    text = work / "text.jsonl"
    text.write_text(head(options.conversations, 300) + head(options.completions, 100), encoding="utf-8")
    student = work / "student"
    distill("init-student", "--from", str(options.teacher), "--layers", "6", "--out", str(student))
    with tempfile.TemporaryDirectory() as folder:
        empty = Path(folder) / "config.json"
        empty.write_text("{}")
        words = ["--config", str(empty), "-c", str(work / "cache"), "-d", str(text), "-tm", str(options.teacher)]
        settings = ["-topk", "50", "-ctx", "512", "--ignore_model_type", "-lr", "3e-4", "-nws", "5", "-ne", "2"]
        distill(*words, "-s", str(student), *settings, *options.flags)
    summary = latest_summary(work / "cache")
    before, after = summary["validation"]["before"], summary["validation"]["after"]
    print(table([["metric", "before", "after"], *([name, before[name], after[name]] for name in after)]))
    cache, training = summary["cache"], summary["train"]
    print(
        f"\n{cache['bytes_per_target']:.1f} bytes a target of {cache['targets']:,}; {cache['kept_mass_mean']:.1%} kept"
    )
    for stage in ("collect", "train"):
        print(f"{stage}: {summary[stage]['tokens_per_second']:.0f} tokens/s")
    print(f"peak memory of training: {training['peak_memory_bytes'] / 1e9:.2f} GB\n")
    texts = continuations(next((work / "cache" / "student" / "trained").glob("*_final")))
    for prompt, continued in zip(PROMPTS, texts, strict=True):
        print(f"{json.dumps(prompt)}\n  -> {continued!r}")
    write_json("real", summary | {"continuations": texts})


if __name__ == "__main__":
    main()
