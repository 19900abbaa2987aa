"""The configurations that the seed documents show, nearly word for word, and the ancestor's own.

docs/seeds.md has a row for every line of those documents; here its rows are held to the schema.
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from distill.config import Config, canonical, load_with_origins
from distill.config.files import Override
from distill.errors import InputError

ROOT = Path(__file__).parent.parent

LAYERED = """
defaults:
  - defaults.yaml
  - lr_scheduler: wsd
  - model: llama2
  - criterion: cross_entropy
  - loggers: basic
  - optimization/amp: bfloat16
  - _self_

args:
  name: llama-finetune
  batch_size: 64
  seq_len: 1024
  vocab_size: 32000
  iterations: 500
  global_batch_size: 128
  num_devices: 8

teacher_models_folder: teacher
grad_accum_batches: ${eval:"int(${args.global_batch_size} / ${args.num_devices})"}

model:
  vocab_size: ${args.vocab_size}
  n_layer: 12
  n_head: 12
  hidden_dim: 768

data:
  scratch:
    my_transform:
      _name: compose
      transforms:
        - _name: tokenize
        - _name: chunk_tokens
          max_seq_len: ${args.seq_len}
        - _name: shuffle
          buffer_size: 8096
        - _name: flat_batcher
          batch_size: ${args.batch_size}
          seq_len: ${args.seq_len}
        - _name: prefetch
        - _name: to_device
  train_datasets:
    source:
      _name: loop
      inner:
        _name: preset_slimpajama6b
        split: train
    transform: ${data.scratch.my_transform}

optimization:
  iterations: ${args.iterations}
  clip_grad_norm: 5.0
  optimizer:
    _name: adamw
    lr: 5e-4
    weight_decay: 1e-1
    betas: [0.9, 0.99]
    eps: 1e-8
"""

HYPERPARAMETERS = """
warmup_steps: 10
evals_per_epoch: 4
eval_table_size:
eval_max_new_tokens: 128
saves_per_epoch: 1
debug:
deepspeed:
weight_decay: 0.0
fsdp:
fsdp_config:
"""

# The ancestor's file, key by key in its order. Paths and devices are as a user would change them.
ANCESTOR: dict[str, Any] = {
    "max_cache_size_gb": 320, "cache_folder": "cache", "dataset_path": "train.jsonl",
    "validation_dataset_path": "validation.jsonl", "teacher_models_folder": "teacher", "student_path": "student",
    "ignore_model_type": True, "rebase_dataset": False, "use_teachers": True, "context_len": 2048,
    "save_sys_range": True, "save_user_range": True, "save_assistant_range": True, "crop_distr_to_size": 32000,
    "enable_topK": True, "save_topK": 400, "device": "cpu", "num_inference_workers": 1, "reserve_vram": [0.5, 0.5],
    "num_epochs": 1, "num_warmup_steps": 200, "batch_size": 4, "grad_accum_batches": 4, "grad_checkpointing": False,
    "temperature": 1, "lr": 1e-5, "decay_start": 0.9, "alpha": 2, "lr_scheduler": "wsd", "optimizer": "adamw",
    "data_order": "sorted", "training_precision": "bf16", "validate_every_n_epochs": 0.5,
    "save_student_every_n_epochs": 4, "num_gpu0_layers": 9, "device_map": "custom",
    "max_memory": {"0": "40GB", "cpu": "200GB"}, "multi_gpu": True, "save_final_state": False,
    "use_flash_attn_2": True, "wandb_comment": "FFT", "freeze_layers": [".block_sparse_moe.gate"], "add_bos": True,
    "prompt_format": {
        "SYS_START": "#System:\\n", "USER_START": "#User:\\n", "ASSISTANT_START": "#AI:\\n", "SYS_END": "\\n\\n",
        "USER_END": "\\n\\n", "ASSISTANT_END": "\\n\\n",
    },
}  # fmt: skip


def load(folder: Path, text: str, *words: str) -> Config:
    path = folder / "train.yaml"
    path.write_text(text, encoding="utf-8")
    overrides = [Override(*word.split("=", 1), said=word, how="set", folder=folder) for word in words]
    return load_with_origins([path], overrides).config


def test_the_layered_document(tmp_path: Path) -> None:
    config = load(tmp_path, LAYERED)
    training = config.training
    assert config.paths.dataset_path == "DKYoon/SlimPajama-6B:train"
    assert config.paths.student_init == {
        "config": {"model_type": "llama", "vocab_size": 32000}, "layers": 12, "heads": 12, "hidden": 768,
        "tokenizer": str(tmp_path / "teacher"),
    }  # fmt: skip
    assert (training.lr_scheduler, training.loss, training.training_precision) == ("wsd", "ce", "bf16")
    assert (config.model.context_len, config.model.long_samples) == (1024, "chunk")
    assert (training.packing, training.batch_size, training.data_order) == (True, 64, "shuffle")
    assert (training.max_steps, training.num_epochs, training.grad_accum_batches) == (500, "auto", 16)
    assert (training.optimizer, training.lr, training.weight_decay) == ("adamw", 5e-4, 0.1)
    assert (training.betas, training.eps, training.max_grad_norm) == ((0.9, 0.99), 1e-8, 5.0)


def test_its_words_on_the_command_line(tmp_path: Path) -> None:
    training = load(tmp_path, LAYERED, "optimization.optimizer.lr=0.01", "args.batch_size=32").training
    assert (training.lr, training.batch_size) == (0.01, 32)
    init = load(tmp_path, LAYERED, "model=gpt2").paths.student_init
    assert init is not None and init["config"] == {"model_type": "gpt2", "vocab_size": 32000}


def test_another_tokenizer_is_refused_by_name(tmp_path: Path) -> None:
    text = LAYERED.replace(
        "_name: tokenize\n", "_name: tokenize\n          tokenizer_config: {_name: tiktoken, name: gpt2}\n"
    )
    with pytest.raises(InputError, match=r"tokenizer_config.*not available yet"):
        load(tmp_path, text)


def test_what_a_chain_decides(tmp_path: Path) -> None:
    """Order and batches never change what is collected; chunks do."""
    config = load(tmp_path, LAYERED)
    batches = load(
        tmp_path, LAYERED.replace("_name: shuffle\n          buffer_size: 8096", "prefetch"), "args.batch_size=2"
    )
    chunks = load(tmp_path, LAYERED, "args.seq_len=512")
    text_keys = ("context_len", "long_samples", "train_turn_end", "add_bos", "prompt_format")

    def collected(config: Config) -> dict[str, Any]:
        return config.deciding("layer") | {key: config.flat()[key] for key in text_keys}

    assert collected(batches) == collected(config)
    assert batches.deciding("result") != config.deciding("result")
    assert collected(chunks) != collected(config)


DATA_SLIPS = [
    ("{train_datasets: {source: {_name: lop, inner: x}}}",
     "\"lop\" is no source (files, hub, loop, mix, preset_slimpajama6b)"),
    ("{train_datasets: {source: {_name: loop, inner: x}}}", "a source that loops needs optimization.iterations"),
    ("{train_datasets: {source: x, transform: {_name: shufle}}}", "\"shufle\" is no transform"),
    ("{train_datasets: {source: x, transform: {_name: prefetch, size: 3}}}", "transform prefetch has no option 'size'"),
    ("{train_datasets: {source: x, transforms: []}}", "a dataset has no 'transforms', only source and transform"),
    ("{train_datasets: {source: {_name: mix, sources: [a, b], weights: [1, 2]}}}",
     "weights of a mix are not available yet"),
    ("{train_dataset: {source: x}}", "unknown key; did you mean 'train_datasets'?"),
    ("{train_datasets: {source: x, transform: [{_name: chunk_tokens, max_seq_len: 8},"
     " {_name: flat_batcher, seq_len: 9}]}}",
     "context_len is 8 in one transform, 9 in another"),
]  # fmt: skip


@pytest.mark.parametrize(("data", "problem"), DATA_SLIPS)
def test_slips_in_data(data: str, problem: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=re.escape(problem)) as caught:
        load(tmp_path, f"seed: 1\ndata: {data}\n")
    assert "train.yaml:2: " in str(caught.value)


def test_sources(tmp_path: Path) -> None:
    data = "data:\n  train_datasets: {source: {_name: mix, sources: [a.jsonl, {_name: files, paths: [b.txt]}]}}\n"
    data += "  eval_datasets: {one: {source: {_name: hub, id: owner/name, split: test}}, two: {source: c.jsonl}}\n"
    paths = load(tmp_path, data).paths
    assert paths.dataset_path == (str(tmp_path / "a.jsonl"), str(tmp_path / "b.txt"))
    assert paths.validation_dataset_path == ("owner/name:test", str(tmp_path / "c.jsonl"))


def test_the_hyperparameters(tmp_path: Path) -> None:
    training = load(tmp_path, HYPERPARAMETERS).training
    assert (training.num_warmup_steps, training.weight_decay) == (10, 0.0)
    assert (training.validate_every_n_epochs, training.save_student_every_n_epochs) == (0.25, 1.0)


@pytest.mark.parametrize(
    "line",
    ["special_tokens: {pad_token: <|end_of_text|>}", "resize_token_embeddings_to_32x: true", "eval_table_size: 5",
     "eval_max_new_tokens: 64", "debug: true", "deepspeed: zero2.json", "fsdp: [full_shard]", "fsdp_config: {a: 1}",
     "plugins: [mine]"],
)  # fmt: skip
def test_what_is_not_there_yet_is_refused_by_name(line: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=rf"train.yaml:1: {line.partition(':')[0]}: .* is not available yet"):
        load(tmp_path, line + "\n")


def test_the_ancestors_own_file(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text("\ufeff" + json.dumps(ANCESTOR, indent=4), encoding="utf-8")
    config = load_with_origins([path]).config
    flat = config.flat()
    paths = set(config.paths.model_dump())
    for name in ANCESTOR.keys() - paths - {"prompt_format"}:
        assert flat[name] == ANCESTOR[name], name
    assert flat["prompt_format"]["USER_END"] == "\n\n", "backslash-letter means the character"


def test_every_row_of_the_table_is_filled_and_true() -> None:
    page = (ROOT / "docs" / "seeds.md").read_text(encoding="utf-8")
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| ") and "---" not in line]
    rows = [row for row in rows if row[0] != "line"]
    assert len(rows) > 90
    for row in rows:
        assert len(row) == 3 and all(cell.strip() for cell in row), row
    for name in ANCESTOR:
        assert any(row[0].startswith(f"`{name}`") for row in rows), name
    spelled = re.findall(r"key `([\w.]+)`", page)
    assert len(spelled) > 60
    for name in spelled:
        assert canonical(tuple(name.split(".")), name)
    for module, test in re.findall(r"`(test_\w+)::(test_\w+)`", page):
        assert f"def {test}(" in (ROOT / "tests" / f"{module}.py").read_text(encoding="utf-8"), test
