"""Whatever a user gets wrong: exit 2, one line that says what and where, and the cache untouched."""

import contextlib
import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from distill.cli import main

GOOD = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]}


def line(row: object) -> str:
    return json.dumps(row) + "\n"


def run(folder: Path, config: dict[str, object]) -> tuple[int, str]:
    path = folder / "config.json"
    path.write_text(json.dumps(config, indent=1))
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(["--config", str(path)])
    return code, err.getvalue()


@pytest.fixture
def config(tmp_path: Path, teacher_folder: Path, student_folder: Path) -> dict[str, object]:
    (tmp_path / "text.jsonl").write_text(line(GOOD) * 3 + line({"text": "a completion"}))
    return {
        "cache_folder": "cache",
        "dataset_path": "text.jsonl",
        "teacher_models_folder": str(teacher_folder),
        "student_path": str(student_folder),
        "ignore_model_type": True,
        "context_len": 64,
        "save_topK": 10,
    }


def refused(folder: Path, config: dict[str, object], *parts: str) -> None:
    code, message = run(folder, config)
    assert code == 2, message
    errors = [text for text in message.splitlines() if not text.startswith("warning: ")]
    assert len(errors) == 1, message
    for part in parts:
        assert part in errors[0]
    assert not (folder / "cache" / "dataset").exists()
    assert not (folder / "cache" / "runs").exists()


TEXTS = {
    "broken JSON line": (line(GOOD) + '{"text": "abc\n', ["text.jsonl:2"]),
    "empty file": ("", ["text.jsonl", "no sample"]),
    "blank lines only": ("\n\n", ["text.jsonl", "no sample"]),
    "empty turn": (line(GOOD) + line({"messages": [{"role": "user", "content": " "}]}), ["text.jsonl:2", "empty"]),
    "unknown role": (line({"messages": [{"role": "robot", "content": "x"}]}), ["text.jsonl:1", "robot"]),
    "no turn that is trained": (line({"messages": [{"role": "user", "content": "x"}]}), ["text.jsonl:1", "save_"]),
    "an unknown row": (line({"body": "x"}), ["text.jsonl:1"]),
    "a lone surrogate": ('{"text": "\\ud800"}\n', ["text.jsonl:1"]),
    "not UTF-8": ('{"text": "\\u00e9"}\n', ["text.jsonl:1"]),
    "one sample and no validation set": (line({"text": "alone"}), ["validation_dataset_path"]),
}


@pytest.mark.parametrize("name", TEXTS)
def test_texts(name: str, tmp_path: Path, config: dict[str, object]) -> None:
    text, parts = TEXTS[name]
    (tmp_path / "text.jsonl").write_bytes(
        text.encode().replace(b"\\u00e9", b"\xe9") if "UTF" in name else text.encode()
    )
    refused(tmp_path, config, *parts)


def drop_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def drop_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def swap_tokens(folder: Path) -> None:
    path = folder / "tokenizer.json"
    data = json.loads(path.read_text())
    vocab = data["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    path.write_text(json.dumps(data))


def break_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text('{"version": "1.0"}')


def repeat_contents(folder: Path) -> None:
    template = "{% for m in messages %}{{ m['content'] }} {{ m['content'] }}{% endfor %}"
    (folder / "chat_template.jinja").write_text(template)


def refuse_users(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{{ raise_exception('no users here') }}")


def endless_prefix(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = "x" * 100 + str(tokenizer.chat_template)
    tokenizer.save_pretrained(folder)


MODELS: dict[str, tuple[str, Callable[[Path], None], list[str]]] = {
    "teacher without weights": ("teacher_models_folder", drop_weights, ["broken", "no weights"]),
    "student without weights": ("student_path", drop_weights, ["broken", "no weights"]),
    "teacher without config": ("teacher_models_folder", drop_config, ["broken", "config.json"]),
    "student without config": ("student_path", drop_config, ["broken", "config.json"]),
    "tokenizers that don't fit": ("teacher_models_folder", swap_tokens, ["don't fit", "'a'", "'b'"]),
    "half a tokenizer": ("student_path", break_tokenizer, ["tokenizer.json"]),
    "contents that can't be located": ("student_path", repeat_contents, ["text.jsonl:1", "template"]),
    "a template that refuses": ("student_path", refuse_users, ["text.jsonl:1", "no users here"]),
}


@pytest.mark.parametrize("name", MODELS)
def test_models(
    name: str, tmp_path: Path, config: dict[str, object], teacher_folder: Path, student_folder: Path
) -> None:
    key, damage, parts = MODELS[name]
    broken = tmp_path / "broken"
    shutil.copytree(teacher_folder if key == "teacher_models_folder" else student_folder, broken)
    damage(broken)
    refused(tmp_path, config | {key: str(broken)}, *parts)


def test_a_template_longer_than_the_context(tmp_path: Path, config: dict[str, object], student_folder: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(student_folder, broken)
    endless_prefix(broken)
    (tmp_path / "text.jsonl").write_text(line(GOOD) * 2)
    refused(tmp_path, config | {"student_path": str(broken)}, "text.jsonl:1", "context_len")


SETTINGS: dict[str, tuple[dict[str, object], list[str]]] = {
    "no dataset": ({"dataset_path": None}, ["dataset_path"]),
    "missing dataset": ({"dataset_path": "absent.jsonl"}, ["absent.jsonl"]),
    "missing teacher": ({"teacher_models_folder": "absent"}, ["teacher_models_folder", "absent"]),
    "missing student": ({"student_path": "absent"}, ["absent"]),
    "no student": ({"student_path": None}, ["student_path"]),
    "an empty parquet file": ({"dataset_path": "text.parquet"}, ["text.parquet"]),
    "warm-up longer than the training": ({"num_warmup_steps": 1000}, ["num_warmup_steps"]),
    "warm-up longer than its first steps": ({"max_steps": 1, "num_warmup_steps": 2}, ["num_warmup_steps"]),
    "an unknown optimizer": ({"optimizer": "paged_adam"}, ["optimizer", "did you mean 'paged_adamw'?"]),
    "betas of an optimizer without": ({"optimizer": "sgd", "betas": [0.8, 0.9]}, ["betas", "sgd"]),
    "momentum of an optimizer without": ({"optimizer": "rmsprop8bit", "momentum": 0.5}, ["momentum", "rmsprop"]),
    "a decay that has no end": ({"decay_form": "exponential"}, ["final_lr", "never reaches 0"]),
    "an absent device": ({"device": "cuda:7"}, ["device"]),
    "a crop below the text": ({"crop_distr_to_size": 20}, ["text.jsonl:1", "20"]),
    "a cap below one shard": ({"max_cache_size_gb": 0.00001}, ["max_cache_size_gb"]),
    "a schedule's unknown option": ({"lr_scheduler": "cosine", "lr_scheduler_args": {"cycles": 2}}, ["cycles"]),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_settings(name: str, tmp_path: Path, config: dict[str, object]) -> None:
    changes, parts = SETTINGS[name]
    (tmp_path / "text.parquet").touch()
    refused(tmp_path, config | changes, *parts)


def test_a_cache_folder_that_cannot_be_written(tmp_path: Path, config: dict[str, object]) -> None:
    (tmp_path / "file").write_text("in the way")
    refused(tmp_path, config | {"cache_folder": "file/cache"}, "file")


def test_a_sample_without_a_target_is_counted_and_the_rest_is_used(tmp_path: Path, config: dict[str, object]) -> None:
    """Report A9: truncation took all targets and the run looked fine."""
    long = {"messages": [{"role": "user", "content": "x" * 80}, {"role": "assistant", "content": "y"}]}
    other = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "other"}]}
    (tmp_path / "text.jsonl").write_text(line(GOOD) + line(long) + line(other))
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert main(["plan", "--config", str(path)]) == 0
    assert "1 without a target (first: " in out.getvalue() and "text.jsonl:2" in out.getvalue()
