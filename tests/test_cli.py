"""The command line: a word is understood, or refused in one line with its exit code; the right command is called."""

import errno
import json
import resource
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import distill
from distill import cli, command
from distill.config import Config, RunOptions
from distill.errors import InputError, MachineError

ROOT = Path(__file__).parent.parent
ALL_KEYS = Config.keys()
PIPELINE_VERBS = ("run", "plan", "collect", "train", "evaluate")

Calls = list[tuple[Any, ...]]


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Calls:
    """What the commands were called with. The working directory has an empty configuration."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    made: Calls = []

    def record(verb: str) -> Callable[..., None]:
        return lambda *args: made.append((verb, *args))

    replace_module(monkeypatch, "pipeline", **{verb: record(verb) for verb in PIPELINE_VERBS})
    names = {"inspect": "inspect", "verify": "verify", "import_file": "import", "export": "export"}
    replace_module(monkeypatch, "cacheverbs", **{name: record(verb) for name, verb in names.items()})
    replace_module(monkeypatch, "making", init_student=record("init-student"))
    return made


def replace_module(monkeypatch: pytest.MonkeyPatch, name: str, **functions: Callable[..., None]) -> None:
    module = types.ModuleType(f"distill.{name}")
    vars(module).update(functions)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(distill, name, module, raising=False)


def configured(calls: Calls, *words: str) -> Config:
    """The configuration with which the words call a command."""
    assert cli.main(words) == 0
    config = calls[-1][1]
    assert isinstance(config, Config)
    return config


# ---- verbs and options ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", PIPELINE_VERBS)
def test_verbs_call_the_pipeline(verb: str, calls: Calls) -> None:
    assert cli.main([verb, "-bs", "2"]) == 0
    assert calls == [(verb, Config.from_flat({"batch_size": 2}), RunOptions())]


def test_cache_verbs_get_their_options(calls: Calls, tmp_path: Path) -> None:
    config = Config.from_flat({})
    for words, made in (
        ("inspect", ("inspect", config, None, 0)),
        ("inspect --layer here --sample 7", ("inspect", config, "here", 7)),
        ("verify", ("verify", config)),
        ("import --from a.h5", ("import", config, tmp_path / "a.h5", None, None)),
        ("import --from a.h5 --teacher t --split train", ("import", config, tmp_path / "a.h5", "t", "train")),
        ("export --out x --layer here", ("export", config, tmp_path / "x", "here")),
    ):
        assert cli.main(words.split()) == 0
        assert calls.pop() == made
    assert cli.main(["--prune", "--yes"]) == 0
    assert calls.pop() == ("run", config, RunOptions(prune=True, yes=True))


def test_run_is_the_default_and_order_is_free(calls: Calls) -> None:
    words = [
        ["--fresh", "lr=0.5"],
        ["lr=0.5", "--fresh", "run"],
        ["run", "--fresh", "--lr=0.5"],
        ["--lr", ".5", "run", "--fresh"],
    ]
    for line in words:
        assert cli.main(line) == 0
    assert calls == [("run", Config.from_flat({"lr": 0.5}), RunOptions(fresh=True))] * 4


def test_options_reach_the_pipeline(calls: Calls) -> None:
    assert cli.main(["train", "--resume", "--debug"]) == 0
    assert cli.main(["train", "--fresh"]) == 0
    assert [call[2] for call in calls] == [RunOptions(resume=True), RunOptions(fresh=True)]


def test_init_student(calls: Calls, tmp_path: Path) -> None:
    assert cli.main(["--layers", "6", "init-student", "--from=a", "--out", "/b"]) == 0
    assert calls == [("init-student", tmp_path / "a", 6, Path("/b"))]


def test_the_configuration_file(
    calls: Calls, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for folder, batch_size in (("beside", 2), ("other", 3)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "config.json").write_text(f'{{"batch_size": {batch_size}}}')
    monkeypatch.setattr(cli, "_ROOT", tmp_path / "beside")
    assert configured(calls).training.batch_size == 4, "config.json here comes first"
    assert configured(calls, "--config", "other/config.json").training.batch_size == 3
    (tmp_path / "config.json").unlink()
    assert configured(calls).training.batch_size == 2, "else the one beside run.py"
    (tmp_path / "beside" / "config.json").unlink()
    assert cli.main([]) == 2
    problem = "config.json: neither here nor beside run.py; name the file with --config PATH"
    assert capsys.readouterr().err == f"error: {problem}\n"


def test_config_verb_prints_values_and_origins(
    calls: Calls, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text('{\n"seed": 3,\n"lr": 1}')
    assert cli.main(["config", "-lr", "2"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert list(printed) == [key.name for key in ALL_KEYS]
    assert printed["seed"] == {"value": 3, "origin": "config.json:2"}
    assert printed["lr"] == {"value": 2.0, "origin": "command line"}
    assert printed["cache_folder"] == {"value": str(tmp_path / "cache"), "origin": "default"}
    assert calls == []


def test_version(calls: Calls, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"distill {distill.__version__}\n"


# ---- values ---------------------------------------------------------------------------------------------------------

RIGHT: list[tuple[list[str], dict[str, Any]]] = [
    (["--add_bos"], {"add_bos": True}),
    (["--no-add_bos"], {"add_bos": False}),
    (["--add_bos", "false"], {"add_bos": False}),
    (["--add_bos=True"], {"add_bos": True}),
    (["--add_bos", "null"], {}),
    (["add_bos=0"], {"add_bos": False}),
    (["--multi_gpu=0"], {"multi_gpu": False}),
    (["--add_bos", "train"], {"add_bos": True}),
    (["--add_bos", "lr=1"], {"add_bos": True, "lr": 1}),
    (["--add_bos", "-lr", "1"], {"add_bos": True, "lr": 1}),
    (["-lr", "1", "--lr", "2", "lr=3"], {"lr": 3}),
    (["-lr", "1e-4", "-ne=2"], {"lr": 1e-4, "num_epochs": 2}),
    (["-wdb", "-3"], {"wandb_comment": "-3"}),
    (["-wdb", "train"], {"wandb_comment": "train"}),
    (["--wandb_comment=--x=y"], {"wandb_comment": "--x=y"}),
    (["wandb_comment=a=b"], {"wandb_comment": "a=b"}),
    (["-wdb", "3"], {"wandb_comment": "3"}),
    (["-wdb", "null"], {}),
    (["-fl", "[]"], {"freeze_layers": []}),
    (["--betas", "[0.5, 0.6]"], {"betas": [0.5, 0.6]}),
    (["--lr_scheduler_args", '{"power": 2}'], {"lr_scheduler_args": {"power": 2}}),
    (["-topk", "9"], {"save_topK": 9, "enable_topK": True}),
    (["-topk", "9", "--enable_topK"], {"save_topK": 9}),
    (["-d", "text"], {"dataset_path": "text"}),
    (["-d", '["a", "/b"]'], {"dataset_path": ["a", "/b"]}),
    (["-d", "./[a"], {"dataset_path": "./[a"}),
]


@pytest.mark.parametrize(("words", "flat"), RIGHT)
def test_right_words(words: list[str], flat: dict[str, Any], calls: Calls) -> None:
    assert configured(calls, *words) == Config.from_flat(flat)


def test_every_flag_of_every_key_works(calls: Calls) -> None:
    for key in ALL_KEYS:
        default = "null" if key.default is None else json.dumps(key.default).strip('"')
        for flag in key.flags:
            assert configured(calls, flag, default) == Config.from_flat({}), flag


def test_top_k_overrides_what_the_file_says(calls: Calls, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"enable_topK": false}')
    assert configured(calls, "-topk", "5").model.enable_topK is True
    assert configured(calls).model.enable_topK is False
    assert configured(calls, "-topk", "null").model.enable_topK is False, "the default is no wish"


def test_booleans_of_report_a14(calls: Calls, capsys: pytest.CaptureFixture[str]) -> None:
    assert configured(calls, "--use_teachers", "False").pipeline.use_teachers is False
    assert configured(calls, "--multi_gpu=0").training.multi_gpu is False
    assert cli.main(["--add_bos", "maybe"]) == 2
    assert capsys.readouterr().err == 'error: --add_bos: must be true or false, not "maybe"\n'


LOSSES = '"kl", "reverse_kl", "jsd", "skew_kl", "skew_reverse_kl", "tvd", "ab", "ce"'
STUCK = "(a value does not stick to its flag: write"
WRONG: list[tuple[str, str]] = [
    ("-sgd", f"-sgd: unknown flag; `--help` lists all {STUCK} -s gd)"),
    ("-steps", f"-steps: unknown flag; did you mean '--eps'? {STUCK} -s teps)"),
    ("-lr1e-4", f"-lr1e-4: unknown flag; `--help` lists all {STUCK} -lr 1e-4)"),
    ("-bs4", f"-bs4: unknown flag; did you mean '-bs'? {STUCK} -bs 4)"),
    ("--batch-size 4", "--batch-size: unknown flag; did you mean '--batch_size'?"),
    ("--batch 4", "--batch: unknown flag; did you mean '--batch_size'?"),
    ("--learnrate", "--learnrate: unknown flag; `--help` lists all"),
    ("--bogus", "--bogus: unknown flag; `--help` lists all"),
    ("--no-lr", "--no-lr: unknown flag; `--help` lists all"),
    ("--no-add_bos=true", '--no-add_bos: takes no value, not "true"'),
    ("--fresh=1", '--fresh: takes no value, not "1"'),
    ("-", "-: unknown flag; `--help` lists all"),
    ("lrr=3", "lrr: unknown key; did you mean 'lr'?"),
    ("batch_size", "batch_size: is neither a verb, a flag nor key=value"),
    ("trian", "trian: is neither a verb, a flag nor key=value; did you mean 'train'?"),
    ("collect train", "train: one verb at a time, collect was given already"),
    ("--fresh --resume", "--fresh: contradicts --resume; give one of them"),
    ("-topk 3 --no-enable_topK", "-topk: contradicts --no-enable_topK; give one of them"),
    ("save_topK=3 enable_topK=false", "save_topK: contradicts enable_topK; give one of them"),
    ("-bs", "-bs: needs a value (one that begins with a dash is written -bs=-VALUE)"),
    ("-bs -lr 1", "-bs: needs a value (one that begins with a dash is written -bs=-VALUE)"),
    ("--config=", "--config: needs a value (one that begins with a dash is written --config=-VALUE)"),
    ("-bs 0", "-bs: must be at least 1, not 0"),
    ("-bs 2.0", "-bs: must be a whole number, not 2.0"),
    ("-bs two", '-bs: must be a whole number, not "two"'),
    ("batch_size=", 'batch_size: must be a whole number, not ""'),
    ("-bs 99999999999999999999", "-bs: must be a whole number, not 1e+20"),
    ("--lr -1e-5", "--lr: must be above 0, not -1e-05"),
    ("--lr nan", '--lr: must be a number, not "nan"'),
    ("--lr 1e999", "--lr: must be a finite number, not Infinity"),
    ("--final_lr 1", "--final_lr: 1.0 is above lr, 1e-05"),
    ("--add_bos=", '--add_bos: must be true or false, not ""'),
    ("-fl a", "-fl: must be a list of strings in JSON: expected a value (1:1)"),
    ("--max_memory {0:1}", "--max_memory: must be an object of strings in JSON: expected a key in double quotes (1:2)"),
    ('--max_memory {"0":"24GB"}', "--max_memory: needs multi_gpu, which is false"),
    ("-s=", "-s: must not be empty (null means the default)"),
    ("--loss klx", f"--loss: must be one of {LOSSES} or an object of numbers, not \"klx\"; did you mean 'kl'?"),
    ('--loss {"kl":1,"ab":1} --tail drop', "--tail: drop is of kl alone; ab takes bucket or renormalise"),
    ("--config no.json", "no.json: cannot be read (No such file or directory); name the file with --config PATH"),
    ("--from a", "--from: belongs to init-student and import"),
    ("--layer a", "--layer: belongs to inspect and export"),
    ("import", "--from: missing (import --from PATH)"),
    ("export", "--out: missing (export --out PATH)"),
    ("inspect --sample one", '--sample: must be a whole number, not "one"'),
    ("verify --yes", "--yes: has no meaning for verify, only for run, train and collect"),
    ("plan --prune", "--prune: has no meaning for plan, only for run and collect"),
    ("evaluate --fresh", "--fresh: has no meaning for evaluate, only for run, train and plan"),
    ("init-student --from a", "--layers: missing (init-student --from DIR --layers N --out DIR)"),
    ("init-student --from a --layers 0 --out b", '--layers: must be a whole number, at least 1, not "0"'),
    ("init-student --from a --layers 2 --out b lr=1", "lr: init-student takes only --from, --layers, --out"),
    ("init-student --from a --layers 2 --out b --yes", "--yes: init-student takes only --from, --layers, --out"),
    ("report", f"report: is not available yet (available: {', '.join(command.VERBS)})"),
]


@pytest.mark.parametrize(("words", "problem"), WRONG)
def test_wrong_words(words: str, problem: str, calls: Calls, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(words.split()) == 2
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("", f"error: {problem}\n")
    assert calls == []


# ---- errors ---------------------------------------------------------------------------------------------------------

ENDS: list[tuple[BaseException, int, str]] = [
    (InputError("data.jsonl:3: broken"), 2, "error: data.jsonl:3: broken"),
    (MachineError("worker 1 was killed\nby signal 9"), 3, "error: worker 1 was killed by signal 9"),
    (MemoryError("1 GB"), 3, "error: out of memory 1 GB"),
    (
        OSError(errno.ENOSPC, "No space left on device", "x.tmp"),
        3,
        "error: [Errno 28] No space left on device: 'x.tmp'",
    ),
    (OSError(errno.EIO, "Input/output error"), 3, "error: [Errno 5] Input/output error"),
    (KeyboardInterrupt(), 130, "interrupted; the same command goes on"),
    (KeyError("k"), 1, "internal error: KeyError: 'k' (run with --debug for the traceback)"),
    (
        BrokenPipeError(32, "pipe"),
        1,
        "internal error: BrokenPipeError: [Errno 32] pipe (run with --debug for the traceback)",
    ),
]


@pytest.mark.parametrize(("error", "code", "line"), ENDS)
def test_ends(
    error: BaseException,
    code: int,
    line: str,
    calls: Calls,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(sys.modules["distill.pipeline"], "run", fail)
    assert cli.main([]) == code
    assert capsys.readouterr().err == f"{line}\n"
    assert cli.main(["--debug"]) == code
    shown = capsys.readouterr().err
    assert shown.startswith("Traceback (most recent call last)")
    assert shown.endswith(f"\n{line}\n")


# ---- the real process -----------------------------------------------------------------------------------------------


def run_py(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "run.py"), *words],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        check=False,
    )


def test_help_is_quick_and_complete() -> None:
    # Processor time, not the clock's: other tests run beside this one.
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = run_py("--help")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 1.0
    assert (done.returncode, done.stderr) == (0, "")
    sections = (
        "Paths",
        "Cache Settings",
        "Pipeline Settings",
        "Model Settings",
        "Collection Settings",
        "Training Settings",
    )
    for text in (*sections, "Student Settings", *command.VERBS, *command.SWITCHES, *command.OPTIONS):
        assert text in done.stdout
    for key in ALL_KEYS:
        assert f"  {', '.join(key.flags)}  " in done.stdout or f"  {', '.join(key.flags)}\n" in done.stdout


def test_nothing_heavy_is_imported_before_it_is_needed() -> None:
    heavy = "{'torch', 'transformers', 'h5py', 'numpy', 'rich'}"
    code = f"import sys, distill.cli; distill.command.parse(['-bs', '2']); print({heavy} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout == "set()\n"


def test_a_refusal_is_one_line_from_the_process() -> None:
    done = run_py("-sgd")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: -sgd: ")
    assert done.stderr.count("\n") == 1


def test_a_reader_that_goes_away_is_no_error() -> None:
    with subprocess.Popen(
        [sys.executable, str(ROOT / "run.py"), "--help"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(timeout=30) == 141
