"""The configuration: every key is there, every wrong value is refused with its place, every right one round-trips."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from distill.config import (
    Config,
    RunOptions,
    Setting,
    json_schema,
    load_config,
    load_with_origins,
    reference_markdown,
    show,
)

ROOT = Path(__file__).parent.parent
ALL_KEYS = Config.keys()

# The whole list: a new key hurts here once. Name: (short flag, what it decides, default).
KEYS: dict[str, tuple[str, str | None, object]] = {
    "cache_folder": ("-c", None, "cache"),
    "dataset_path": ("-d", None, None),
    "validation_dataset_path": ("-vd", None, None),
    "teacher_models_folder": ("-tm", None, None),
    "student_path": ("-s", "result", None),
    "student_init": ("", "result", None),
    "max_cache_size_gb": ("-maxgb", None, 10.0),
    "cache_precision": ("", "layer", "compact"),
    "shard_targets": ("", None, 8192),
    "epochs_per_round": ("", "result", 1),
    "overlap_rounds": ("", None, None),
    "ignore_model_type": ("", "result", False),
    "rebase_dataset": ("", None, False),
    "use_teachers": ("", None, True),
    "allow_downloads": ("", None, False),
    "validation_fraction": ("", "result", 0.02),
    "seed": ("", "result", 0),
    "trust_remote_code": ("", None, False),
    "context_len": ("-ctx", "result", 2048),
    "save_sys_range": ("", "result", False),
    "save_user_range": ("", "result", False),
    "save_assistant_range": ("", "result", True),
    "train_turn_end": ("", "result", True),
    "long_samples": ("", "result", "auto"),
    "crop_distr_to_size": ("", "layer", None),
    "enable_topK": ("", "layer", True),
    "save_topK": ("-topk", "layer", 64),
    "device": ("", None, None),
    "num_inference_workers": ("-niw", None, 1),
    "reserve_vram": ("", None, None),
    "teacher_weights": ("", "result", {}),
    "teacher_dtype": ("", "layer", "auto"),
    "head_dtype": ("", "layer", "auto"),
    "seq_chunk_len": ("", None, None),
    "threads_per_worker": ("", None, None),
    "collect_tokens_per_batch": ("", None, 4096),
    "num_epochs": ("-ne", "result", 1),
    "max_steps": ("", "result", None),
    "num_warmup_steps": ("-nws", "result", 0),
    "batch_size": ("-bs", "result", 4),
    "max_tokens_per_batch": ("", "result", None),
    "packing": ("", "result", False),
    "grad_accum_batches": ("-g", "result", 1),
    "student_device": ("", None, None),
    "grad_checkpointing": ("", None, False),
    "loss": ("", "result", "kl"),
    "tail": ("", "result", "bucket"),
    "jsd_beta": ("", "result", 0.5),
    "skew_alpha": ("", "result", 0.1),
    "ab_alpha": ("", "result", 0.2),
    "ab_beta": ("", "result", 0.7),
    "ce_weight": ("", "result", 0.0),
    "ce_below_entropy_quantile": ("", "result", 0.0),
    "temperature": ("-t", "result", 1.0),
    "lr": ("-lr", "result", 1e-5),
    "final_lr": ("", "result", 0.0),
    "decay_start": ("", "result", 0.9),
    "decay_form": ("", "result", "linear"),
    "warmup_form": ("", "result", "linear"),
    "alpha": ("", "result", 0.0),
    "lr_scheduler": ("", "result", "wsd"),
    "lr_scheduler_args": ("", "result", {}),
    "optimizer": ("", "result", "adamw"),
    "weight_decay": ("", "result", 0.0),
    "betas": ("", "result", [0.9, 0.999]),
    "eps": ("", "result", 1e-8),
    "momentum": ("", "result", 0.0),
    "rmsprop_alpha": ("", "result", 0.99),
    "max_grad_norm": ("", "result", 1.0),
    "data_order": ("", "result", "shuffle"),
    "training_precision": ("", "result", "fp32"),
    "lora_rank": ("", "result", None),
    "lora_alpha": ("", "result", None),
    "lora_targets": ("", "result", []),
    "lora_dropout": ("", "result", 0.0),
    "merge_into": ("", "result", "dequantised"),
    "validate_every_n_epochs": ("", None, 1.0),
    "early_stop_patience": ("", "result", 0),
    "save_student_every_n_epochs": ("", None, 0.0),
    "keep_students": ("", None, None),
    "save_best_student": ("", "result", False),
    "loader_workers": ("", None, 1),
    "save_state_every_minutes": ("", None, 15.0),
    "num_gpu0_layers": ("", None, None),
    "device_map": ("", None, "auto"),
    "max_memory": ("", None, None),
    "multi_gpu": ("", None, False),
    "save_final_state": ("", None, False),
    "use_flash_attn_2": ("-fa2", "layer", False),
    "wandb_comment": ("-wdb", None, None),
    "freeze_layers": ("-fl", "result", []),
    "add_bos": ("", "result", None),
    "prompt_format": ("", "result", None),
    "debug_run": ("", None, False),
    "eval_table_size": ("", None, 0),
    "eval_max_new_tokens": ("", None, 128),
    "special_tokens": ("", "result", {}),
    "resize_token_embeddings_to_32x": ("", "result", False),
    "tokenizer_config": ("", "result", None),
    "deepspeed": ("", None, None),
    "fsdp": ("", None, None),
    "fsdp_config": ("", None, None),
    "plugins": ("", None, []),
}

# The ancestor's parameters, as its page lists them.
ANCESTOR = {
    "cache_folder", "dataset_path", "validation_dataset_path", "teacher_models_folder", "student_path",
    "max_cache_size_gb", "ignore_model_type", "rebase_dataset", "use_teachers", "context_len", "save_sys_range",
    "save_user_range", "save_assistant_range", "crop_distr_to_size", "enable_topK", "save_topK", "device",
    "num_inference_workers", "reserve_vram", "num_epochs", "num_warmup_steps", "batch_size", "grad_accum_batches",
    "grad_checkpointing", "temperature", "lr", "decay_start", "alpha", "lr_scheduler", "optimizer", "data_order",
    "training_precision", "validate_every_n_epochs", "save_student_every_n_epochs", "num_gpu0_layers", "device_map",
    "max_memory", "multi_gpu", "save_final_state", "use_flash_attn_2", "wandb_comment", "freeze_layers", "add_bos",
    "prompt_format",
}  # fmt: skip

PROMPT = {
    "SYS_START": "<s>",
    "SYS_END": "\\n",
    "USER_START": "U:\\t",
    "USER_END": "\n",
    "ASSISTANT_START": "A:",
    "ASSISTANT_END": "",
}


def write(folder: Path, text: str) -> Path:
    path = folder / "config.json"
    path.write_bytes(text.encode())
    return path


# ---- the schema -----------------------------------------------------------------------------------------------------


def test_the_key_list_is_pinned() -> None:
    known = {key.name: (key.flag, key.decides, key.default) for key in ALL_KEYS}
    assert known == KEYS
    assert list(known) == list(Config.from_flat({}).flat()), "declared in the order in which they are written"


def test_every_parameter_of_the_ancestor_is_a_key() -> None:
    assert set(KEYS) >= ANCESTOR


def test_flags_are_unique_and_every_key_is_documented() -> None:
    flags = [flag for key in ALL_KEYS for flag in key.flags]
    assert len(flags) == len(set(flags))
    assert all(re.fullmatch(r"[A-Za-z].*\.|[A-Z]\w+\.", key.doc) and "\n" not in key.doc for key in ALL_KEYS)


def test_defaults_are_valid_and_available() -> None:
    defaults = {name: default for name, (_, _, default) in KEYS.items()}
    assert Config.from_flat(defaults) == Config.from_flat({})
    for key in ALL_KEYS:
        assert not key.available or show(key.default) in map(show, key.available)


def test_sections_are_frozen_and_refuse_strangers() -> None:
    config = Config.from_flat({})
    with pytest.raises(ValidationError):
        config.training.lr = 1.0
    with pytest.raises(ValidationError):
        Config.model_validate({"nonsense": 1})


def test_deciding() -> None:
    config = Config.from_flat({"save_topK": 7, "betas": [0.5, 0.6]})
    layer, result = config.deciding("layer"), config.deciding("result")
    assert layer == {
        "cache_precision": "compact",
        "crop_distr_to_size": None,
        "enable_topK": True,
        "save_topK": 7,
        "head_dtype": "auto",
        "teacher_dtype": "auto",
        "use_flash_attn_2": False,
    }
    assert layer.items() <= result.items()
    assert list(result) == [name for name, (_, decides, _) in KEYS.items() if decides]
    assert result["betas"] == [0.5, 0.6], "as JSON has it, so a saved copy compares equal"


def test_generated_pages_are_current() -> None:
    renew = 'python -c "import pathlib, distill.config as c; c.write_generated(pathlib.Path())"'
    assert (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8") == reference_markdown(), renew
    assert (ROOT / "config.schema.json").read_text(encoding="utf-8") == json_schema(), renew


def test_editor_schema_allows_every_key_and_null() -> None:
    schema = json.loads(json_schema())
    assert set(KEYS) <= set(schema["properties"])
    for name in KEYS:
        declared = schema["$defs"][name]
        assert None in declared.get("enum", []) or {"type": "null"} in declared.get("anyOf", [])
    assert schema["$defs"]["batch_size"]["anyOf"][0] == {"type": "integer", "minimum": 1, "maximum": 2**31 - 1}
    assert schema["$defs"]["training_precision"]["enum"] == ["fp32", "bf16", "fp16", "8bit", "4bit", None]


def test_run_options_default_to_nothing() -> None:
    assert RunOptions() == RunOptions(fresh=False, resume=False)


# ---- loading --------------------------------------------------------------------------------------------------------


def test_flat_and_sectioned_files_mean_the_same(tmp_path: Path) -> None:
    flat = load_config(write(tmp_path, '{"lr": 1, "save_topK": 9, "cache_folder": "x"}'))
    sectioned = load_config(
        write(tmp_path, '{"training": {"lr": 1}, "model": {"save_topK": 9}, "paths": {"cache_folder": "x"}}')
    )
    mixed = load_config(write(tmp_path, '{"training": {"lr": 1}, "save_topK": 9, "paths": {"cache_folder": "x"}}'))
    assert flat == sectioned == mixed
    assert flat.training.lr == 1.0
    assert isinstance(flat.training.lr, float)


def test_bom_null_and_schema_key(tmp_path: Path) -> None:
    plain = load_config(write(tmp_path, '{"lr": 0.5}'))
    assert load_config(write(tmp_path, '\ufeff{"lr": 0.5}')) == plain
    nulls = dict.fromkeys(KEYS) | {"lr": 0.5, "$schema": "config.schema.json", "training": None}
    assert load_config(write(tmp_path, json.dumps(nulls))) == plain


def test_relative_paths_count_from_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "models" / "s").mkdir(parents=True)
    path = write(tmp_path, '{"dataset_path": ["a", "../b", "/c"], "student_path": "models/s"}')
    monkeypatch.chdir(tmp_path / "elsewhere")
    override = Setting("teacher_models_folder", "t", said="-tm", origin="command line", folder=Path.cwd())
    for file in (path, Path("../config.json")):
        paths = load_config(file, [override]).paths
        assert paths.dataset_path == (str(tmp_path / "a"), str(tmp_path.parent / "b"), "/c")
        assert paths.student_path == str(tmp_path / "models" / "s")
        assert paths.teacher_models_folder == str(tmp_path / "elsewhere" / "t")
        assert paths.cache_folder == str(tmp_path / "cache"), "a default counts from the file as well"
        assert paths.validation_dataset_path is None


def test_home_is_expanded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    assert Config.from_flat({"student_path": "~/s"}).paths.student_path == "/home/somebody/s"


def test_from_flat_takes_paths_and_tuples(tmp_path: Path) -> None:
    config = Config.from_flat({"cache_folder": tmp_path, "dataset_path": (tmp_path / "a",), "betas": (0.1, 0)})
    assert config.paths.cache_folder == str(tmp_path)
    assert config.paths.dataset_path == (str(tmp_path / "a"),)
    assert config.training.betas == (0.1, 0.0)


def test_overrides_win_and_origins_say_so(tmp_path: Path) -> None:
    path = write(tmp_path, '{\n"lr": 0.5,\n"training": {\n"batch_size": 8, "loss": null}}')
    batch, rate = (Setting(key, value, said=key, origin="command line", folder=tmp_path) for key, value in
                   (("batch_size", 16), ("lr", None)))  # fmt: skip
    loaded = load_with_origins([path], [batch])
    assert loaded.config.training.batch_size == 16
    assert loaded.origins["batch_size"] == "command line"
    assert loaded.origins["lr"] == f"{path}:2"
    assert loaded.origins["loss"] == loaded.origins["seed"] == "default"
    assert list(loaded.origins) == list(KEYS)
    assert load_config(path, [rate]).training.lr == 1e-5, "null on the command line means the default, too"


def test_prompt_format_unescapes_typed_escapes() -> None:
    prompt = Config.from_flat({"prompt_format": PROMPT}).student.prompt_format
    assert prompt is not None
    assert (prompt["SYS_END"], prompt["USER_START"], prompt["USER_END"]) == ("\n", "U:\t", "\n")


ROUND_TRIPS: list[dict[str, Any]] = [
    {},
    {"dataset_path": "a b/c", "student_path": "Größe/学生", "cache_folder": "/x"},
    {"dataset_path": ["a", "b"], "prompt_format": PROMPT, "add_bos": False, "betas": [0, 0.5]},
    {"wandb_comment": 'say "hi"\n', "lr": 3, "final_lr": 1e-30, "lr_scheduler_args": {"power": 2, "x": [None, True]}},
    {"seed": 2**31 - 1, "device": "cuda:1", "crop_distr_to_size": 1, "training_precision": "bf16", "loss": "ce"},
]


@pytest.mark.parametrize("flat", ROUND_TRIPS)
def test_dump_loads_to_an_equal_config(flat: dict[str, Any], tmp_path: Path) -> None:
    config = Config.from_flat(flat)
    reloaded = load_config(write(tmp_path, config.dump()))
    assert reloaded == config
    assert reloaded.dump() == config.dump()
    assert list(json.loads(config.dump())) == list(KEYS)
    assert Config.from_flat(config.flat()) == config


@pytest.mark.parametrize("device", ["cpu", "cuda", "cuda:0", "mps"])
def test_devices(device: str) -> None:
    assert Config.from_flat({"device": device}).model.device == device


def test_a_dataset_of_the_hub_is_no_path(tmp_path: Path) -> None:
    path = write(
        tmp_path, '{"dataset_path": ["owner/name", "owner/text.jsonl", "here/there", "owner/name/part:train"]}'
    )
    (tmp_path / "here" / "there").mkdir(parents=True)
    assert load_config(path).paths.dataset_path == (
        "owner/name", str(tmp_path / "owner/text.jsonl"), str(tmp_path / "here/there"), "owner/name/part:train",
    )  # fmt: skip


@pytest.mark.parametrize("text", ["owner/name", "here/there", "./owner/name", "a/b/c", "owner/name:train"])
def test_a_student_of_the_hub_is_no_path(text: str, tmp_path: Path) -> None:
    (tmp_path / "here" / "there").mkdir(parents=True)
    paths = load_config(write(tmp_path, json.dumps({"student_path": text}))).paths
    assert paths.student_path == (text if text == "owner/name" else str(tmp_path / text))


def test_paths_of_a_new_student_count_from_the_file(tmp_path: Path) -> None:
    wanted = {"config": {"model_type": "llama"}, "tokenizer": "models/t", "layers": 2}
    assert load_config(write(tmp_path, json.dumps({"student_init": wanted}))).paths.student_init == wanted | {
        "tokenizer": str(tmp_path / "models/t")
    }
    folder = load_config(write(tmp_path, '{"student_init": {"from": "a/teacher", "layers": 2}}')).paths.student_init
    assert folder == {"from": str(tmp_path / "a/teacher"), "layers": 2}
