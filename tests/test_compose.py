"""Layered configurations: what is laid over what, references between values, and slips told in one line."""

import re
import tempfile
import textwrap
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from distill.cli import main
from distill.config import Config, LoadedConfig, Setting, load_with_origins
from distill.config.files import Override
from distill.config.interpolate import evaluate_expression
from distill.errors import InputError


def files(folder: Path, **texts: str) -> Path:
    """Write the files (``a__b`` is a/b.yaml), and return the first."""
    paths = [folder / f"{name.replace('__', '/')}.yaml" for name in texts]
    for path, text in zip(paths, texts.values(), strict=True):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text), encoding="utf-8")
    return paths[0]


def loaded(path: Path, *words: str, environment: dict[str, str] | None = None) -> LoadedConfig:
    overrides = [override(word, path.parent) for word in words]
    return load_with_origins([path], overrides, environment)


def override(word: str, folder: Path) -> Override:
    name, _, text = word.lstrip("+~").partition("=")
    how = {"+": "add", "~": "delete"}.get(word[0], "set")
    return Override(name, text, word.partition("=")[0], how, folder)  # type: ignore[arg-type]


def value(key: str, path: Path, *words: str) -> Any:
    return loaded(path, *words).config.flat()[key]


def refusal(path: Path, *words: str) -> str:
    with pytest.raises(InputError) as caught:
        loaded(path, *words)
    assert "\n" not in str(caught.value)
    return str(caught.value).replace(f"{path.parent}/", "")


def test_report_a16_comments_and_trailing_commas_are_read(tmp_path: Path) -> None:
    """Report A16 of the reliability notes: such a file was ignored silently."""
    path = tmp_path / "config.json"
    path.write_text('{\n  // note\n  "lr": 0.5, // and here\n  "betas": [0.1, 0.2,],\n}\n')
    training = loaded(path).config.training
    assert (training.lr, training.betas) == (0.5, (0.1, 0.2))


# ---- files ----------------------------------------------------------------------------------------------------------


def test_yaml_and_json_mean_the_same(tmp_path: Path) -> None:
    yaml = files(tmp_path, a="lr: 1e-4\ntraining:\n  batch_size: 2\nbetas: [0.5, 0.6]\nadd_bos: true\nseed: ~\n")
    json = tmp_path / "b.json"
    json.write_text(
        '\ufeff{"lr": 0.0001, // a comment\n"training": {"batch_size": 2,},\n /* one\n more */ "betas": [0.5, 0.6,],'
        ' "add_bos": true, # and one\n "seed": null}'
    )
    assert loaded(yaml).config == loaded(json).config
    assert value("lr", yaml) == 1e-4


def test_later_files_count_more_key_by_key(tmp_path: Path) -> None:
    one = files(tmp_path, one="lr: 1\nseed: 1\nteacher_weights: {a: 1}\noptimizer: {_name: sgd, momentum: 0.5}\n")
    two = files(tmp_path, two="lr: 2\nteacher_weights: {b: 1}\noptimization: {optimizer: {momentum: 0.25}}\n")
    both = load_with_origins([one, two])
    training = both.config.training
    assert (training.lr, both.config.pipeline.seed, training.optimizer, training.momentum) == (2, 1, "sgd", 0.25)
    assert both.config.collection.teacher_weights == {"b": 1}, "an object is one value, not laid over another"
    assert both.origins["lr"] == f"{two}:1"
    assert both.origins["seed"] == f"{one}:2"


def test_precedence_of_files_environment_and_words(tmp_path: Path) -> None:
    path = files(tmp_path, a="lr: 1\nseed: 1\nbatch_size: 1\n")
    environment = {"DISTILL_SEED": "2", "DISTILL_BATCH_SIZE": "2", "DISTILL_SAVE_TOPK": "9", "HOME": "x"}
    word = Setting("batch_size", 3, said="-bs", origin="command line", folder=tmp_path)
    result = load_with_origins([path], [word], environment)
    assert [result.config.flat()[key] for key in ("lr", "seed", "batch_size", "save_topK")] == [1, 2, 3, 9]
    assert result.origins["seed"] == "environment"
    for name, problem in (("DISTILL_LRR", "unknown key, in the environment; did you mean 'DISTILL_LR'?"),
                          ("DISTILL_LR", 'must be a number, not "fast"')):  # fmt: skip
        with pytest.raises(InputError) as caught:
            load_with_origins([path], (), {name: "fast"})
        assert str(caught.value) == f"{name}: {problem}"


# ---- defaults -------------------------------------------------------------------------------------------------------


def test_defaults_are_laid_in_their_order(tmp_path: Path) -> None:
    base = "lr: 1\nseed: 1\nbatch_size: 1\n"
    path = files(tmp_path, top="defaults: [base, more]\nlr: 3\n", base=base, more="lr: 2\nseed: 2\n")
    assert [value(key, path) for key in ("lr", "seed", "batch_size")] == [3, 2, 1]
    path = files(tmp_path, top="defaults: [base, _self_, more]\nlr: 3\n")
    assert value("lr", path) == 2
    path = files(tmp_path, top="defaults: base.yaml\n")
    assert value("lr", path) == 1


def test_groups_and_their_swap(tmp_path: Path) -> None:
    path = files(
        tmp_path,
        top="defaults:\n  - optimizer: small\n  - lr_scheduler: cosine\n  - optional optimizer: none\nseed: 4\n",
        optimizer__small="_name: sgd\nlr: 0.5\nmomentum: 0.9\n",
        optimizer__large="_name: adamw\nlr: 0.1\nbetas: [0.5, 0.6]\n",
        experiment__one="# @package _global_\nseed: 7\ntraining: {batch_size: 3}\n",
    )
    training = loaded(path).config.training
    assert (training.optimizer, training.lr, training.momentum, training.lr_scheduler) == ("sgd", 0.5, 0.9, "cosine")
    swapped = loaded(path, "optimizer=large").config.training
    assert (swapped.optimizer, swapped.lr, swapped.momentum) == ("adamw", 0.1, 0.0), "nothing of the other is left"
    swapped = loaded(path, "experiment=one").config
    assert (swapped.pipeline.seed, swapped.training.batch_size) == (7, 3)


def test_students_by_name(tmp_path: Path) -> None:
    path = files(tmp_path, top="defaults: [{student: tiny-llama}]\nteacher_models_folder: t\nmodel: {n_layer: 2}\n")
    init = {"config": {"model_type": "llama"}, "layers": 2, "heads": 6, "kv_heads": 6, "hidden": 384,
            "intermediate": 1024, "tokenizer": str(tmp_path / "t")}  # fmt: skip
    assert value("student_init", path) == init
    assert value("student_init", path, "model=gpt2-small")["config"] == {"model_type": "gpt2"}
    assert value("student_init", path, "student=gpt2-small", "student.n_layer=3")["layers"] == 3
    path = files(tmp_path, flat="student_path: here\nmodel: {save_topK: 3}\nteacher_models_folder: t\n")
    assert value("student_path", path).endswith("here")
    swapped = loaded(path, "model=gpt2").config
    assert (swapped.paths.student_path, swapped.model.save_topK) == (None, 3)
    path = files(tmp_path, both="student_path: here\nstudent: llama\nteacher_models_folder: t\n")
    assert "student_path is given as well" in refusal(path)


def test_the_demo_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "more.yaml").write_text("seed: 5\n")
    assert main(["config", "--config", "demo", "--config", "more.yaml"]) == 0
    printed = capsys.readouterr().out
    assert "examples/demo/train.jsonl" in printed
    assert '"seed": {"value": 5, "origin": "more.yaml:1"}' in printed
    assert main(["--config", "dmo"]) == 2
    assert capsys.readouterr().err == "error: --config: neither a file nor bundled: dmo; did you mean 'demo'?\n"


# ---- references -----------------------------------------------------------------------------------------------------


def test_references(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_LR", "1e-3")
    path = files(
        tmp_path,
        top="""
        args: {batch: 64, devices: 8, name: mine, list: [0.5, 0.6]}
        batch_size: ${eval:"int(${args.batch} / ${args.devices})"}
        lr: ${oc.env:SOME_LR}
        training:
          final_lr: ${.lr}
          betas: ${args.list}
          lr_scheduler: ${oc.env:NOT_THERE,cosine}
        optimization: {optimizer: {weight_decay: "${training.final_lr}"}}
        cache_folder: caches/${args.name}
        wandb_comment: '\\${not.a.reference}'
        freeze_layers: ["${args.name}", "x"]
        """,
    )
    config = loaded(path).config
    training = config.training
    assert (training.batch_size, training.lr, training.final_lr, training.weight_decay) == (8, 1e-3, 1e-3, 1e-3)
    assert (training.betas, training.lr_scheduler) == ((0.5, 0.6), "cosine")
    assert config.paths.cache_folder == str(tmp_path / "caches/mine")
    assert config.student.freeze_layers == ("mine", "x")
    assert training.wandb_comment == "${not.a.reference}"
    assert value("batch_size", path, "args.batch=32") == 4
    assert value("final_lr", path, "optimization.optimizer.lr=0.25") == 0.25, "a reference finds every spelling"
    again = tmp_path / "again.json"
    again.write_text(config.dump())
    assert loaded(again).config == config


def test_open_values_are_to_be_given(tmp_path: Path) -> None:
    path = files(tmp_path, top="lr: ???\nseed: 1\n")
    assert refusal(path) == "top.yaml:1: lr: is left open (???): give it a value, lr=… say"
    assert value("lr", path, "lr=1") == 1


@pytest.mark.parametrize(
    ("text", "result"),
    [("int(7 / 2)", 3), ("max(1, 2) * 3", 6), ("2 ** 10", 1024), ("round(1.26, 1)", 1.3),
     ("'a' if 1 > 2 else len('bc')", 2)],
)  # fmt: skip
def test_arithmetic(text: str, result: object) -> None:
    assert evaluate_expression(text) == result


@pytest.mark.parametrize(
    "text",
    ["().__class__", "open('x')", "__import__('os')", "[].append(1)", "9 ** 9 ** 9", "(lambda: 1)()", "1 / 0", "x",
     "1 +",
     "'ab'[0]", "int.real", "[i for i in (1, 2)]", "'a' * 10 ** 9", "int('x')", "1; 2", "x = 1", "9" * 501],
)  # fmt: skip
def test_nothing_but_arithmetic(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        evaluate_expression(text)


# ---- overrides ------------------------------------------------------------------------------------------------------


def test_words_over_a_tree(tmp_path: Path) -> None:
    path = files(tmp_path, top="args: {a: 1}\nmulti_gpu: true\nmax_memory: {'0': 24GB}\nseed: ${args.a}\neps: 1e-6\n")
    assert value("max_memory", path, "max_memory.cpu=64GB") == {"0": "24GB", "cpu": "64GB"}
    assert value("seed", path, "+args.b=5", "seed=${args.b}") == 5
    assert value("seed", path, "args.a=${eval:'2 + 1'}") == 3
    assert value("eps", path, "~optimization.optimizer.eps") == 1e-8
    assert value("betas", path, "optimizer.betas=[0.1, 0.2]") == [0.1, 0.2]
    assert value("lr_scheduler_args", path, "lr_scheduler=polynomial", "lr_scheduler.power=2") == {"power": 2}
    assert value("num_warmup_steps", path, "warmup_steps=7") == 7


# ---- slips ----------------------------------------------------------------------------------------------------------

SLIPS: list[tuple[str, tuple[str, ...], str]] = [
    ("lr: 1\n", ("args.a=1",), "args.a: nothing is called so; a new name is written with + before it"),
    ("args: {batch: 1}\n", ("args.bach=1",), "args.bach: nothing is called so; did you mean 'args.batch'?"),
    ("lr: 1\n", ("+lr=2",), "+lr: is set already, by top.yaml:1; leave out the +"),
    ("lr: 1\n", ("~eps",), "~eps: nothing to take away, it is not set"),
    ("lr: ${args.x}\n", (), "top.yaml:1: lr: ${args.x}: nothing is called 'args.x'"),
    ("args: {xs: 1}\nlr: ${args.x}\n", (),
     "top.yaml:2: lr: ${args.x}: nothing is called 'args.x'; did you mean 'args.xs'?"),
    ("lr: ${eps}\neps: ${lr}\n", (), "top.yaml:1: lr: ${eps}: recursive interpolation detected"),
    ("lr: ${oc.env:NOT_THERE}\n", (),
     "top.yaml:1: lr: ${oc.env:NOT_THERE}: environment variable 'NOT_THERE' not found"),
    ("lr: ${eval:'1 / 0'}\n", (), "top.yaml:1: lr: ${eval:'1 / 0'}: cannot be computed: division by zero"),
    ("defaults: [nope]\n", (), "top.yaml:1: defaults: no file 'nope' beside it or bundled"),
    ("defaults: [baze]\n", (), "top.yaml:1: defaults: no file 'baze' beside it or bundled; did you mean 'base'?"),
    ("defaults:\n- base\n- experiment: x\n", (),
     "top.yaml:3: defaults: no file experiment/x.yaml beside it or bundled"),
    ("defaults: [loop]\n", (), "loop.yaml:1: defaults: files include each other: top.yaml:1 → loop.yaml:1"),
    ("defaults: [far]\n", (), "far.yaml:2: defaults: no file 'gone' beside it or bundled (included by top.yaml:1)"),
    ("defaults: [3]\n", (), "top.yaml:1: defaults: an entry is a file's name, {group: name} or _self_"),
    ("defaults: [broken]\n", (), "broken.yaml:2: a: given twice, first on line 1"),
    ("optimizer: {_name: sgd, betas: [0, 0]}\n", (),
     "top.yaml:1: betas: optimizer sgd has no option 'betas' (options: lr, momentum, weight_decay)"),
    ("optimizer: {_name: sgd, learnrate: 1}\n", (),
     "top.yaml:1: optimizer.learnrate: unknown key; did you mean 'optimizer.lr'?"),
    ("loss: {_name: kl, jsd_beta: 0.5}\n", (),
     "top.yaml:1: jsd_beta: loss kl has no option 'jsd_beta' (options: tail, temperature)"),
    ("evals_per_epoch: 4\nvalidate_every_n_epochs: 1\n", (),
     "top.yaml:1: evals_per_epoch: contradicts validate_every_n_epochs of top.yaml:2; give one of them"),
    ("evals_per_epoch: often\n", (), 'top.yaml:1: evals_per_epoch: must be a number, at least 0, not "often"'),
    ("loggers: [wandbb]\n", (),
     'top.yaml:1: loggers: must be basic or wandb, or a list of them, not "wandbb"; did you mean \'wandb\'?'),
    ("student: {n_layer: 3}\n", (),
     "top.yaml:1: student.n_layer: of which architecture? name it by _name (llama, gpt2, qwen2, …)"),
    ("student: llama\n", (),
     "top.yaml:1: student._name: needs a tokenizer, the folder of one, where no teacher_models_folder is given"),
    ("args: 3\n", (), "top.yaml:1: args: is a group, must be an object of keys and values"),
    ("optimization: 3\n", (), "top.yaml:1: optimization: is a group, must be an object of keys and values"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "words", "message"), SLIPS)
def test_slips(text: str, words: tuple[str, ...], message: str, tmp_path: Path) -> None:
    others = {
        "base": "lr: 1\n",
        "loop": "defaults: [top]\n",
        "far": "seed: 1\ndefaults: [gone]\n",
        "broken": "a: 1\na: 2\n",
    }
    path = files(tmp_path, top=text, **others)
    assert refusal(path, *words) == message


def test_axolotl_times_an_epoch(tmp_path: Path) -> None:
    path = files(tmp_path, top="evals_per_epoch: 4\nsaves_per_epoch: 0\nwarmup_steps: 10\nweight_decay: 0.0\n")
    training = loaded(path).config.training
    assert (training.validate_every_n_epochs, training.save_student_every_n_epochs) == (0.25, 0.0)
    assert training.num_warmup_steps == 10
    assert value("validate_every_n_epochs", path, "validate_every_n_epochs=2") == 2, "what comes later counts"


def test_components_and_shorthands_mean_the_same(tmp_path: Path) -> None:
    long = "optimizer: {_name: adamw, lr: 1}\nlr_scheduler: {_name: cosine}\nloss: {_name: ce}\n"
    long += "optimization: {amp: {dtype: torch.bfloat16}}\n"
    short = "optimizer: adamw\nlr: 1\nlr_scheduler: cosine\ncriterion: cross_entropy\noptimization: {amp: bfloat16}\n"
    flat = Config.from_flat({"lr": 1, "lr_scheduler": "cosine", "loss": "ce", "training_precision": "bf16"}).training
    assert loaded(files(tmp_path, a=long)).config.training == flat == loaded(files(tmp_path, b=short)).config.training
    path = files(tmp_path, c="loggers: [basic, {_name: wandb, comment: hey}]\n")
    assert value("wandb_comment", path) == "hey"
    assert value("wandb_comment", path, "loggers=basic") is None


def test_a_student_named_later_counts(tmp_path: Path) -> None:
    path = files(tmp_path, top="defaults: [{student: tiny-llama}]\nteacher_models_folder: t\n")
    word = Setting("student_path", "there", said="-s", origin="command line", folder=tmp_path)
    paths = load_with_origins([path], [word]).config.paths
    assert (paths.student_init, paths.student_path) == (None, str(tmp_path / "there"))


def test_other_names_are_flags_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = files(tmp_path, top="seed: 1\n")
    assert main(["config", "--config", str(path), "--warmup_steps", "5", "--evals_per_epoch=4"]) == 0
    printed = capsys.readouterr().out
    assert '"num_warmup_steps": {"value": 5, "origin": "command line"}' in printed
    assert '"validate_every_n_epochs": {"value": 0.25, "origin": "command line"}' in printed


# ---- anything at all ------------------------------------------------------------------------------------------------

words = st.sampled_from(
    "lr|batch_size|training|model|student|optimizer|optimization|lr_scheduler|loss|criterion|amp|data|args|loggers|defaults"
    "|train_datasets|source|transform|_name|llama|adamw|sgd|kl|jsd|cosine|wandb|basic|loop|inner|files|paths|compose"
    "|transforms|shuffle|n_layer|evals_per_epoch|validate_every_n_epochs|iterations|dtype|max_memory|extra|debug|a b"
    "|${lr}|${args.lr}|${.lr}|${..lr}|${eval:'1 + 1'}|${data}|${|???|_self_|$schema|".split("|")
)
anything = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 5) | st.floats(allow_nan=False, allow_infinity=False) | words,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=4),
    max_leaves=12,
)


@settings(deadline=None, max_examples=300)
@given(st.dictionaries(words, anything, max_size=5))
def test_anything_loads_or_is_refused_in_one_line(document: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "top.yaml"
        path.write_text(yaml.safe_dump(document, sort_keys=False))
        again = Path(folder) / "again.json"
        try:
            config = loaded(path).config
        except InputError as error:
            assert re.match(rf"{re.escape(str(path))}:\d+(:\d+)?: \S", str(error)), str(error)
            assert "\n" not in str(error)
        else:
            again.write_text(config.dump())
            assert loaded(again).config == config
