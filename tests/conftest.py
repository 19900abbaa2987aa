"""Tiny models and texts for the tests that run whole stages."""

import json
import os
import random
from pathlib import Path

import pytest
import torch

from tests.toys import make_model_folder

# Tests share the machine with each other; many small products gain nothing from threads. The second is for processes.
torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"

WORDS = [
    *"aeiou",
    "the",
    "cat",
    "dog",
    "bird",
    "sees",
    "likes",
    "finds",
    "red",
    "old",
    "house",
    "tree",
    "river",
    "then",
]


@pytest.fixture(scope="session")
def teacher_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of two layers with a byte-level tokenizer and a ChatML template."""
    return make_model_folder(tmp_path_factory.mktemp("models") / "toy-teacher", seed=1, hidden=32, layers=2)


@pytest.fixture(scope="session")
def student_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A smaller one with the same tokenizer."""
    return make_model_folder(tmp_path_factory.mktemp("models") / "toy-student", seed=2, hidden=16, layers=1)


@pytest.fixture(scope="session")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """40 conversations and 20 completions."""
    chooser = random.Random(0)

    def sentence() -> str:
        return " ".join(chooser.choices(WORDS, k=chooser.randint(3, 9))) + "."

    rows: list[object] = []
    for _ in range(40):
        turns = [{"role": "user", "content": sentence()}, {"role": "assistant", "content": sentence()}]
        rows.append({"messages": turns})
    rows += [{"text": " ".join(sentence() for _ in range(3))} for _ in range(20)]
    chooser.shuffle(rows)
    path = tmp_path_factory.mktemp("text") / "train.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
