"""The command line: `python run.py [verb] [flags] [key=value ...]`, in any order; ``command`` reads the words."""

import contextlib
import json
import os
import re
import shutil
import signal
import sys
import textwrap
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType

from distill import __version__
from distill.command import OPTIONS, SWITCHES, VERBS, Command, parse
from distill.config import (
    Config,
    LoadedConfig,
    RunOptions,
    explain,
    keys_by_section,
    load_with_origins,
    section_model,
    show,
    suggest,
    value_text,
)
from distill.errors import DistillError, InputError, machine_failed
from distill.sweep import read_row, sweep_points, sweep_table

_EXIT_MACHINE, _EXIT_INTERRUPTED, _EXIT_PIPE = 3, 130, 141
_ROOT = Path(__file__).resolve().parent.parent


class _ReaderIsGone(Exception):  # noqa: N818 - not an error: whoever read our output has had enough
    """Standard output is a pipe that nobody reads any more."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that ``argv`` (default: the process's) asks for, and return the exit code; never raises.

    0 done; 2 the user's input is to be mended; 3 the machine failed; 1 a fault of ours; 130 interrupted; 141 the reader
    of the output is gone. An error is one line on stderr, with --debug after its traceback.
    """
    words = sys.argv[1:] if argv is None else list(argv)
    try:
        if "-m" in words:
            _sweep(words)
        else:
            _execute(parse(words))
        return 0
    except _ReaderIsGone:
        return _EXIT_PIPE
    # The one boundary where every run ends: also what nobody expected is told in a line, with its exit code.
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001
        trace = traceback.format_exc() if "--debug" in words else ""
        message, code = _verdict(error)
    sys.stderr.write(f"{trace}{' '.join(message.split())}\n")
    return code


def _verdict(error: BaseException) -> tuple[str, int]:
    """The line and the exit code for an error."""
    match error:
        case DistillError():
            return f"error: {error}", error.exit_code
        case KeyboardInterrupt():
            return f"interrupted: {error}" if str(error) else "interrupted; the same command goes on", _EXIT_INTERRUPTED
        case MemoryError():
            return f"error: out of memory {error}", _EXIT_MACHINE
        case _ if machine_failed(error):
            return f"error: {error}", _EXIT_MACHINE
    return f"internal error: {type(error).__name__}: {error} (run with --debug for the traceback)", 1


def _execute(command: Command) -> None:
    """Do what was asked for. Heavy modules are imported only here, once it is clear that they are needed."""
    if "--help" in command.switches:
        _say("\n".join(_help_lines()) + "\n")
        return
    if "--version" in command.switches:
        _say(f"distill {__version__}\n")
        return
    if "--explain" in command.options:
        _say(explain(command.options["--explain"]))
        return
    if command.verb == "init-student":
        _init_student(command)
        return
    verb = command.verb or "run"
    loaded = _load(command)
    if verb == "config":
        _say(_resolved(loaded))
        return
    _warn_of_foreign_validation(loaded)
    given = command.switches
    options = RunOptions(**{name: f"--{name}" in given for name in ("fresh", "resume", "prune", "yes")})
    with _termination_as_interrupt():
        _command(verb, command.options)(loaded.config, options)


def _sweep(words: Sequence[str]) -> None:
    """One run after the other, and a table of them: also of those before one that fails."""
    points = sweep_points(words)
    commands = [(point.label, parse(point.words)) for point in points]
    if commands[0][1].verb not in ("", "run", "train"):
        raise InputError(f"-m: has no meaning for {commands[0][1].verb}, only for run and train")
    for _, command in commands:  # a slip in the last one is better known before the first one's work
        _load(command)
    if "--help" in words or "--version" in words:
        _execute(commands[0][1])
        return
    rows = []
    try:
        for number, (label, command) in enumerate(commands, 1):
            _say(f"run {number} of {len(commands)}: {label}\n")
            _execute(command)
            rows.append(read_row(label, Path(_load(command).config.paths.cache_folder)))
    finally:
        _say(sweep_table(rows))


def _load(command: Command) -> LoadedConfig:
    return load_with_origins(_config_paths(command), command.settings, os.environ)


def _command(verb: str, texts: Mapping[str, str]) -> Callable[[Config, RunOptions], None]:
    """What does the work of ``verb``; ``texts`` are the options' values."""
    if verb in ("inspect", "verify", "import", "export"):
        return _cache_command(verb, texts)
    from distill import pipeline

    commands = {
        "run": pipeline.run,
        "plan": pipeline.plan,
        "collect": pipeline.collect,
        "train": pipeline.train,
        "evaluate": pipeline.evaluate,
    }
    return commands[verb]


def _cache_command(verb: str, texts: Mapping[str, str]) -> Callable[[Config, RunOptions], None]:
    from distill import cacheverbs

    layer, number = texts.get("--layer"), _number("--sample", texts.get("--sample", "0"))
    teacher, split = texts.get("--teacher"), texts.get("--split")
    source, target = (Path(texts.get(option, "")).absolute() for option in ("--from", "--out"))
    commands: dict[str, Callable[[Config, RunOptions], None]] = {
        "inspect": lambda config, _: cacheverbs.inspect(config, layer, number),
        "verify": lambda config, _: cacheverbs.verify(config),
        "import": lambda config, _: cacheverbs.import_file(config, source, teacher, split),
        "export": lambda config, _: cacheverbs.export(config, target, layer),
    }
    return commands[verb]


def _number(option: str, text: str) -> int:
    if not re.fullmatch(r"\d{1,9}", text):
        raise InputError(f"{option}: must be a whole number, not {show(text)}")
    return int(text)


@contextlib.contextmanager
def _termination_as_interrupt() -> Iterator[None]:
    """SIGTERM and SIGHUP end a run as Ctrl-C does: workers stopped, the summary written, exit code 130."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _warn_of_foreign_validation(loaded: LoadedConfig) -> None:
    """A dataset of the command line, validated on one of the file: seldom what was meant."""
    train, validation = (loaded.origins[key] for key in ("dataset_path", "validation_dataset_path"))
    if train == "command line" and validation not in ("default", train):
        sys.stderr.write(f"warning: dataset_path is new, but validation_dataset_path is still that of {validation}\n")


def _init_student(command: Command) -> None:
    layers = command.options["--layers"]
    if not re.fullmatch(r"[1-9]\d{0,8}", layers):
        raise InputError(f"--layers: must be a whole number, at least 1, not {show(layers)}")
    from distill.making import init_student

    init_student(Path(command.options["--from"]).absolute(), int(layers), Path(command.options["--out"]).absolute())


def _config_paths(command: Command) -> list[Path]:
    if command.configs:
        return [_config_path(text) for text in command.configs]
    for path in (Path("config.json"), _ROOT / "config.json"):
        if path.exists():
            return [path]
    raise InputError("config.json: neither here nor beside run.py; name the file with --config PATH")


def _config_path(text: str) -> Path:
    """The file, or what comes with the program under that name: the configuration of an example."""
    if "." in text or "/" in text or Path(text).is_file():
        return Path(text)
    bundled = {path.parent.name: path for path in sorted(_ROOT.glob("examples/*/config.*"))}
    if text not in bundled:
        raise InputError(f"--config: neither a file nor bundled: {text}{suggest(text, bundled)}")
    return bundled[text]


def _resolved(loaded: LoadedConfig) -> str:
    """The resolved configuration as JSON: a line a key, each with its value and where that comes from."""
    rows = [
        f"  {json.dumps(name)}: {json.dumps({'value': value, 'origin': loaded.origins[name]}, ensure_ascii=False)}"
        for name, value in loaded.config.flat().items()
    ]
    return "{\n" + ",\n".join(rows) + "\n}\n"


def _help_lines() -> Iterator[str]:
    yield "usage: python run.py [verb] [flags] [key=value ...]"
    yield ""
    yield "Distils teacher models into a small student, through a cache of the teachers' distributions."
    yield from _help_group("Verbs", VERBS.items())
    yield from _help_group("Options", [(f"{name} {word}", doc) for name, (word, doc, _) in OPTIONS.items()])
    yield from _help_group("Switches", SWITCHES.items())
    for section, keys in keys_by_section().items():
        rows = [(", ".join(key.flags), f"{key.doc} [{value_text(key)}; default {show(key.default)}]") for key in keys]
        yield from _help_group(section_model(section).title, rows)
    yield ""
    yield "A boolean is --KEY, --no-KEY or --KEY true|false; lists and objects are JSON. config.json has them too."


def _help_group(title: str, rows: Iterable[tuple[str, str]]) -> Iterator[str]:
    width = min(max(shutil.get_terminal_size().columns, 60), 120)
    yield ""
    yield f"{title}:"
    for head, doc in rows:
        yield from textwrap.wrap(
            f"  {head:<32}  {doc}", width, subsequent_indent=" " * 36, break_on_hyphens=False, break_long_words=False
        )


def _say(text: str) -> None:
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        # The interpreter flushes once more at its end: to nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise _ReaderIsGone from None
