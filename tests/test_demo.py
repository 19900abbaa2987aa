"""The embedded demo: what is committed is what the script makes, and its teacher is worth listening to."""

import itertools
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from distill.config import Config, load_config
from distill.dataset import read_samples

ROOT = Path(__file__).parent.parent
DEMO = ROOT / "examples" / "demo"


@pytest.fixture
def build(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script that makes the demo."""
    monkeypatch.syspath_prepend(str(DEMO))
    import build

    yield build
    for name in ("build", "grammar", "words"):
        sys.modules.pop(name, None)


def test_the_text_is_what_the_script_writes(build: ModuleType) -> None:
    training, validation, further = build.split()
    assert (DEMO / "train.jsonl").read_text() == build.grammar.jsonl(training)
    assert (DEMO / "validation.jsonl").read_text() == build.grammar.jsonl(validation)
    assert not {str(sample) for sample in validation} & {str(sample) for sample in training + further}


def test_there_is_enough_of_both_kinds_and_it_is_small() -> None:
    samples = list(read_samples(str(DEMO / "train.jsonl")))
    completions = sum(sample.is_completion for sample in samples)
    assert len(samples) >= 2000 and 0.3 < completions / len(samples) < 0.7
    assert sum(path.stat().st_size for path in DEMO.rglob("*") if path.is_file()) <= 12_000_000


def test_the_teacher_is_uncertain_where_the_text_is(build: ModuleType) -> None:
    tokenizer = AutoTokenizer.from_pretrained(DEMO / "teacher")
    teacher = AutoModelForCausalLM.from_pretrained(DEMO / "teacher", dtype=torch.float32)
    assert 1e6 <= sum(parameter.numel() for parameter in teacher.parameters()) <= 4e6
    _, validation, _ = build.split()
    figures = build.uncertainty(
        teacher, [build.encode(tokenizer, sample) for sample in itertools.islice(validation, 40)]
    )
    assert figures["entropy"] >= 1.0 and figures["top50_mass"] <= 0.98
    assert figures["cross_entropy"] < figures["entropy"] + 0.3, "it knows what it knows"


def test_the_default_configuration_is_the_demo_with_every_key() -> None:
    config = load_config(ROOT / "config.json")
    keys = Config.keys()
    assert set(json.loads((ROOT / "config.json").read_text())) == {"$schema", *(key.name for key in keys)}
    assert config.paths.teacher_models_folder == str(DEMO / "teacher")
    assert config.pipeline.ignore_model_type
