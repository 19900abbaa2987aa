"""Wrong configurations: each is refused in one line that says where and why; and the JSON reader behind that."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distill.config import Config, JsonError, load_config, read_json
from distill.errors import InputError

ALL_KEYS = Config.keys()


def write(folder: Path, text: str) -> Path:
    path = folder / "config.json"
    path.write_bytes(text.encode())
    return path


def refusal(path: Path) -> str:
    """The refusal of the file, named by its name alone."""
    with pytest.raises(InputError) as caught:
        load_config(path)
    message = str(caught.value)
    assert "\n" not in message
    return message.replace(str(path), path.name)


# ---- wrong values: the exact line -----------------------------------------------------------------------------------

BACKSLASH = r'write backslashes doubled ("C:\\data") or forward slashes ("C:/data")'
NO_VALIDATION = "needs validations; set validate_every_n_epochs above 0"
LOSSES = '"kl", "reverse_kl", "jsd", "skew_kl", "skew_reverse_kl", "tvd", "ab", "ce"'
PARTS = "SYS_START, SYS_END, USER_START, USER_END, ASSISTANT_START, ASSISTANT_END"
WRONG_VALUES: list[tuple[str, str]] = [
    ('"batch_size": 0', "batch_size: must be at least 1, not 0"),
    ('"batch_size": true', "batch_size: must be a whole number, not true"),
    ('"batch_size": "3"', 'batch_size: must be a whole number, not "3"'),
    ('"batch_size": 3.0', "batch_size: must be a whole number, not 3.0"),
    ('"batch_size": 1e2', "batch_size: must be a whole number, not 100.0"),
    ('"batch_size": [4]', "batch_size: must be a whole number, not [4]"),
    ('"batch_size": 99999999999', "batch_size: must be at most 2147483647, not 99999999999"),
    ('"lr": "fast"', 'lr: must be a number, not "fast"'),
    ('"lr": true', "lr: must be a number, not true"),
    ('"lr": 0', "lr: must be above 0, not 0"),
    ('"lr": NaN', "lr: NaN is not a finite number"),
    ('"lr": -Infinity', "lr: -Infinity is not a finite number"),
    ('"lr": 1e999', "lr: 1e999 is not a finite number"),
    ('"lr_scheduler_args": {"power": NaN}', "power: NaN is not a finite number"),
    ('"final_lr": 1', "final_lr: 1.0 is above lr, 1e-05"),
    ('"decay_start": 1.5', "decay_start: must be at most 1, not 1.5"),
    ('"decay_start": -0.1', "decay_start: must be at least 0, not -0.1"),
    ('"validation_fraction": 0.6', "validation_fraction: must be at most 0.5, not 0.6"),
    ('"max_cache_size_gb": 0', "max_cache_size_gb: must be above 0, not 0"),
    ('"context_len": 1', "context_len: must be at least 2, not 1"),
    ('"num_inference_workers": 65', "num_inference_workers: must be at most 64, not 65"),
    ('"num_warmup_steps": -1', "num_warmup_steps: must be at least 0, not -1"),
    ('"betas": [0.9]', "betas: must be a list of 2 numbers, not [0.9]"),
    ('"betas": [0.9, 1]', "betas: must be below 1, not 1"),
    ('"betas": 0.9', "betas: must be a list of 2 numbers, not 0.9"),
    ('"add_bos": 1', "add_bos: must be true or false, not 1"),
    ('"add_bos": "false"', 'add_bos: must be true or false, not "false"'),
    ('"loss": "klx"', f"loss: must be one of {LOSSES} or an object of numbers, not \"klx\"; did you mean 'kl'?"),
    ('"loss": 3', f"loss: must be one of {LOSSES} or an object of numbers, not 3"),
    ('"device": "gpu"', 'device: must be "cpu", "cuda", "cuda:N" or "mps", not "gpu"'),
    ('"dataset_path": 3', "dataset_path: must be a path or a list of paths, not 3"),
    ('"dataset_path": ["a", 3]', 'dataset_path: must be a path or a list of paths, not ["a", 3]'),
    ('"dataset_path": []', "dataset_path: must not be empty (null means the default)"),
    ('"dataset_path": ["a", ""]', "dataset_path: must not be empty (null means the default)"),
    ('"student_path": ""', "student_path: must not be empty (null means the default)"),
    ('"cache_folder": "a\\u0000"', rf"cache_folder: the path holds the control character '\x00': {BACKSLASH}"),
    ('"freeze_layers": "a"', 'freeze_layers: must be a list of strings, not "a"'),
    ('"lr_scheduler_args": []', "lr_scheduler_args: must be an object, not []"),
    ('"prompt_format": {"SYS_START": ""}', f"prompt_format: SYS_END is missing (needed: {PARTS})"),
    ('"prompt_format": "x"', 'prompt_format: must be an object of strings, not "x"'),
    ('"wandb_comment": 1', "wandb_comment: must be a string, not 1"),
    ('"wandb_comment": "\\ud800"', r"wandb_comment: '\ud800' holds characters that are not Unicode text"),
    ('"learning_rate": 1', "learning_rate: unknown key; `python run.py --help` lists all"),
    ('"batchsize": 1', "batchsize: unknown key; did you mean 'batch_size'?"),
    ('"save_topk": 1', "save_topk: unknown key; did you mean 'save_topK'?"),
    ('"trainig": {"lr": 1}', "trainig: unknown key; did you mean 'training'?"),
    ('"training": {"lrs": 1}', "lrs: unknown key; did you mean 'lr'?"),
    ('"training": 3', "training: is a section, must be an object of keys and values"),
    ('"cache": {"lr": 1}', "lr: belongs in the section 'training', not 'cache'"),
    ('"epochs_per_round": 2', 'epochs_per_round: must be 1 or "all", not 2'),
    ('"epochs_per_round": "All"', 'epochs_per_round: must be 1 or "all", not "All"'),
    ('"teacher_weights": {"a": -1}', "teacher_weights: must be at least 0, not -1"),
    ('"reserve_vram": [-1]', "reserve_vram: must be at least 0, not -1"),
    ('"alpha": -1', "alpha: must be at least 0, not -1"),
    ('"loss": {}', "loss: a mix without weights; give at least one loss a weight above 0"),
    ('"loss": {"kl": 0}', "loss: a mix without weights; give at least one loss a weight above 0"),
    ('"loss": {"kl": -1}', "loss: must be at least 0, not -1"),
    ('"jsd_beta": 0', "jsd_beta: must be above 0, not 0"),
    ('"skew_alpha": 1', "skew_alpha: must be below 1, not 1"),
    ('"ce_below_entropy_quantile": 2', "ce_below_entropy_quantile: must be at most 1, not 2"),
    ('"loss": "jsd", "tail": "drop"', "tail: drop is of kl alone; jsd takes bucket or renormalise"),
    (
        '"loss": {"kl": 1, "ab": 1}, "tail": "to_target"',
        "tail: to_target is of kl alone; ab takes bucket or renormalise",
    ),
    ('"early_stop_patience": 2, "validate_every_n_epochs": 0', f"early_stop_patience: {NO_VALIDATION}"),
    ('"save_best_student": true, "validate_every_n_epochs": 0', f"save_best_student: {NO_VALIDATION}"),
    (
        '"lr_scheduler": "greedy", "validate_every_n_epochs": 0',
        f"lr_scheduler: greedy looks at validations; {NO_VALIDATION[19:]}",
    ),
    ('"jsd_beta": 0.4', 'jsd_beta: belongs to jsd; loss is "kl"'),
    ('"skew_alpha": 0.2, "loss": {"kl": 1}', 'skew_alpha: belongs to skew_kl and skew_reverse_kl; loss is {"kl": 1.0}'),
    ('"loss": "ce", "temperature": 2', "temperature: has no effect on ce, which looks at the text alone"),
    ('"loss": "ab", "ab_beta": 100', "ab_beta: must be at most 10, not 100"),
    ('"loss": "ab", "ab_alpha": 0.001', "ab_alpha: below 0.01 it is lost in rounding; 0 is its limit"),
    ('"keep_students": 2', "keep_students: there are none to keep; set save_student_every_n_epochs above 0"),
    (
        '"decay_form": "sqrt"',
        'decay_form: must be one of "linear", "cosine", "1-sqrt", "exponential", not "sqrt"; did you mean \'1-sqrt\'?',
    ),
    ('"lora_alpha": 8', "lora_alpha: there are no adapters; set lora_rank"),
    ('"lora_targets": ["q_proj"]', "lora_targets: there are no adapters; set lora_rank"),
    ('"merge_into": "none"', "merge_into: there are no adapters; set lora_rank"),
    ('"lora_dropout": 1', "lora_dropout: must be below 1, not 1"),
    (
        '"training_precision": "4bit", "freeze_layers": ["mlp"]',
        "freeze_layers: adapters leave all of the student as it is; choose lora_targets",
    ),
    ('"num_gpu0_layers": 3', "num_gpu0_layers: needs multi_gpu, which is false"),
    ('"device_map": "custom"', "device_map: needs multi_gpu, which is false"),
    ('"max_memory": {"0": "24GB"}', "max_memory: needs multi_gpu, which is false"),
    ('"multi_gpu": true, "num_gpu0_layers": 3', "num_gpu0_layers: belongs to device_map custom, not auto"),
    (
        '"multi_gpu": true, "student_device": "cuda:1"',
        "student_device: is one device, but multi_gpu uses all; max_memory leaves out single ones",
    ),
    (
        '"device_map": "balance"',
        'device_map: must be one of "auto", "balanced", "balanced_low_0", "sequential", "custom", not "balance"; '
        "did you mean 'balanced'?",
    ),
    (
        '"max_memory": {"0": "24"}',
        'max_memory: must be an amount of memory such as "24GB" or "1.5GiB", not "24"',
    ),
    (
        '"max_memory": {"cuda:0": "24GB"}',
        'max_memory: "cuda:0" is no device; write GPUs by their number ("0"), "cpu" or "disk"',
    ),
    ('"max_memory": {"0": 24}', 'max_memory: must be an object of strings, not {"0": 24}'),
    (
        '"student_init": {"layers": 3}',
        'student_init: needs either "from" (a model folder to keep layers of) or "config" (a new architecture)',
    ),
    (
        '"student_init": {"from": "a", "config": "b"}',
        'student_init: needs either "from" (a model folder to keep layers of) or "config" (a new architecture)',
    ),
    (
        '"student_init": {"from": "a", "layer": 3}',
        "student_init: 'layer' is not a part of it (parts: from, heads, hidden, intermediate, kv_heads, layers)",
    ),
    ('"student_init": {"from": "a", "layers": 0}', "student_init: layers must be a whole number from 1 on, not 0"),
    ('"student_init": {"from": 3}', "student_init: from must be a path, not 3"),
    (
        '"student_init": {"config": {"model_type": "llama"}}',
        'student_init: a "config" that is an object needs "tokenizer", the folder of one',
    ),
    (
        '"student_init": {"from": "a"}, "student_path": "b"',
        "student_init: student_path is given as well; set one of them to null",
    ),
]


@pytest.mark.parametrize(("member", "problem"), WRONG_VALUES)
def test_wrong_values(member: str, problem: str, tmp_path: Path) -> None:
    path = write(tmp_path, '{\n  "seed": 1,\n  ' + member + "\n}")
    assert refusal(path) == f"config.json:3: {problem}"


@pytest.mark.parametrize(
    "flat", [{"batch_size": 0}, {"batchsize": 4}, {"lr": 1e-9, "final_lr": 1e-8}, {"lr": float("nan")}, {"lr": 10**400}]
)
def test_from_flat_refuses_alike(flat: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=r"^(batch_size|batchsize|final_lr|lr): [^\n]+$"):
        Config.from_flat(flat)


def test_wrong_optimizer_names_the_nearest(tmp_path: Path) -> None:
    message = refusal(write(tmp_path, '{"optimizer": "paged_adam"}'))
    assert message.startswith('config.json:1: optimizer: must be one of "adam", "adamw"')
    assert message.endswith("not \"paged_adam\"; did you mean 'paged_adamw'?")


WRONG_FILES: list[tuple[str, str]] = [
    ('{"lr": 1,\n"lr": 2}', "config.json:2: lr: given twice, first on line 1"),
    ('{"lr": 1,\n\n"training": {"lr": 2}}', "config.json:3: lr: given twice, first on line 1"),
    ('{"training": {},\n"training": {}}', "config.json:2: training: given twice, first on line 1"),
    ('{"lr": 1, /* fast\n"seed": 1}', "config.json:1:11: a comment without its end (*/)"),
    ('{"lr": 1,,\n}', "config.json:1:10: expected a key in double quotes"),
    ("{,}", "config.json:1:2: expected a key in double quotes"),
    ('{"betas": [,]}', "config.json:1:12: expected a value"),
    ('{"lr" 1}', "config.json:1:7: expected ':' after the key"),
    ("{lr: 1}", "config.json:1:2: expected a key in double quotes"),
    ("{'lr': 1}", "config.json:1:2: expected a key in double quotes"),
    ('{"lr": 1\n "seed": 1}', "config.json:2:2: expected ',' or '}'"),
    ('{"lr": True}', "config.json:1:8: expected a value"),
    ('{"lr": 01}', "config.json:1:9: expected ',' or '}'"),
    ('{"lr": }', "config.json:1:8: expected a value"),
    ('{"lr": 1', "config.json:1:9: expected ',' or '}', but the text ends here"),
    ('{"lr": 1} x', "config.json:1:11: expected the end of the text"),
    ("", "config.json:1:1: expected a value, but the text ends here"),
    ("[1]", "config.json:1: must be an object of keys and values"),
    ('{"device": "cpu}', "config.json:1:12: device: a string without its closing quote"),
    ('{"device": "c\npu"}', "config.json:1:14: device: a line break or tab inside a string: write \\n or \\t"),
    ('{"seed": ' + "9" * 5000 + "}", "config.json:1:10: a number with too many digits"),
    ('{"betas": ' + "[" * 100000, "config.json:1:75: nested deeper than 64 levels"),
    (
        '{"cache_folder":\n "C:\\data"}',
        rf"config.json:2:5: cache_folder: \d is not an escape that JSON knows: {BACKSLASH}",
    ),
    (
        '{"cache_folder": "C:\\users"}',
        rf"config.json:1:21: cache_folder: \u is not an escape that JSON knows: {BACKSLASH}",
    ),
]


@pytest.mark.parametrize(("text", "message"), WRONG_FILES)
def test_wrong_files(text: str, message: str, tmp_path: Path) -> None:
    assert refusal(write(tmp_path, text)) == message


def test_backslash_path_that_parses_silently(tmp_path: Path) -> None:
    """Report A15 of the reliability notes."""
    message = refusal(write(tmp_path, '{"cache_folder": "C:\\new\\temp"}'))
    assert message == rf"config.json:1: cache_folder: the path holds the control character '\n': {BACKSLASH}"


def test_unreadable_files(tmp_path: Path) -> None:
    hint = "name the file with --config PATH"
    assert refusal(tmp_path / "no.json") == f"no.json: cannot be read (No such file or directory); {hint}"
    assert refusal(tmp_path).endswith(f"cannot be read (Is a directory); {hint}")
    path = tmp_path / "config.json"
    path.write_bytes('{"lr": 1,\n"wandb_comment": "é"}'.encode("latin-1"))
    assert refusal(path) == "config.json:2: is not UTF-8 text; save it as UTF-8"
    path.write_text("{}", encoding="utf-16")
    assert refusal(path) == "config.json:1: is not UTF-8 text; save it as UTF-8"


# ---- the JSON reader ------------------------------------------------------------------------------------------------

documents = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


@settings(deadline=None)
@given(documents, st.sampled_from([None, 0, 2, "\t"]), st.booleans())
def test_reader_agrees_with_the_standard_library(value: object, indent: int | str | None, ascii_only: bool) -> None:
    text = json.dumps(value, indent=indent, ensure_ascii=ascii_only)
    document = read_json(f" \r\n{text}\n ")
    assert document.value == json.loads(text)
    assert repr(document.value) == repr(json.loads(text)), "types and order as well"


@settings(deadline=None)
@given(documents, st.data())
def test_reader_accepts_no_more_than_the_standard_library(value: object, data: st.DataObject) -> None:
    text = json.dumps(value)
    at = data.draw(st.integers(0, len(text)))
    damaged = text[:at] + data.draw(st.sampled_from([*'{}[],:"0\\ /', ""])) + text[at + 1 :]
    try:
        accepted = read_json(damaged).value
    except JsonError as error:
        assert re.fullmatch(r"\d+(:\d+)?", error.where)
    else:
        assert repr(accepted) == repr(json.loads(damaged))


@settings(deadline=None)
@given(st.dictionaries(st.sampled_from([key.name for key in ALL_KEYS]), documents, max_size=4))
def test_any_values_load_or_are_refused_in_one_line(flat: dict[str, Any]) -> None:
    try:
        config = Config.from_flat(flat)
    except InputError as error:
        assert re.match(rf"({'|'.join(flat)}): .", str(error))
        assert "\n" not in str(error)
    else:
        assert Config.from_flat(json.loads(config.dump())) == config


def test_reader_knows_the_lines() -> None:
    document = read_json('{"a": 1,\n\n "b": [\n{"c": 2}],\n"d"\n:\n3}')
    assert document.lines == {("a",): 1, ("b",): 3, ("b", 0, "c"): 4, ("d",): 5}
