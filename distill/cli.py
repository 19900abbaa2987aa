"""The command line: `python run.py [verb] [flags] [key=value ...]`, in any order.

The words are read here rather than by argparse, of which nothing would remain: it reads `-sgd` as `-s gd`, lets a bare
boolean eat a verb, takes `-1e-5` for a flag, and knows neither pairs nor the nearest flag. All that is known about keys
comes from the schema.
"""

import contextlib
import functools
import json
import os
import re
import shutil
import signal
import sys
import textwrap
import threading
import traceback
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from distill import __version__
from distill.config import (
    Config,
    JsonError,
    Key,
    LoadedConfig,
    RunOptions,
    Setting,
    find_key,
    keys_by_section,
    load_with_origins,
    read_json,
    section_model,
    show,
    suggest,
    value_text,
)
from distill.errors import DistillError, InputError, machine_failed

VERBS = {
    "run": "collect what is missing, then train: the default",
    "plan": "say what a run would do, and do nothing",
    "collect": "only fill the cache",
    "train": "only train, from the cache",
    "evaluate": "measure the student on the validation text",
    "config": "print every key with its value and where that comes from",
    "init-student": "make a student of some of a teacher's layers",
}
LATER_VERBS = ("inspect", "verify", "import", "export", "report")
SWITCHES = {
    "--fresh": "set the state of an unfinished run aside and begin anew",
    "--resume": "go on with an unfinished run, with its old values",
    "--yes": "allow what destroys data collected earlier",
    "--debug": "show the traceback of an error",
    "--version": "print the version",
    "--help": "print this (also -h)",
}
OPTIONS = {
    "--config": ("PATH", "the configuration file; else config.json here, else the one beside run.py"),
    "--from": ("DIR", "init-student: the teacher's folder"),
    "--layers": ("N", "init-student: how many layers to keep"),
    "--out": ("DIR", "init-student: the folder to make"),
}

_STUDENT_OPTIONS = ("--from", "--layers", "--out")
_BOOLEANS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")
_EXIT_MACHINE, _EXIT_INTERRUPTED, _EXIT_PIPE = 3, 130, 141
_ROOT = Path(__file__).resolve().parent.parent


class _ReaderIsGone(Exception):  # noqa: N818 - not an error: whoever read our output has had enough
    """Standard output is a pipe that nobody reads any more."""


@dataclass
class Command:
    """What the words ask for. ``options`` has the text of each of OPTIONS that was given."""

    verb: str = ""
    settings: list[Setting] = field(default_factory=list)
    switches: set[str] = field(default_factory=set)
    options: dict[str, str] = field(default_factory=dict)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that ``argv`` (default: the process's) asks for, and return the exit code; never raises.

    0 done; 2 the user's input is to be mended; 3 the machine failed; 1 a fault of ours; 130 interrupted; 141 the reader
    of the output is gone. An error is one line on stderr, with --debug after its traceback.
    """
    words = sys.argv[1:] if argv is None else list(argv)
    try:
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
            return f"interrupted: {error}" if str(error) else "interrupted", _EXIT_INTERRUPTED
        case MemoryError():
            return f"error: out of memory {error}", _EXIT_MACHINE
        case _ if machine_failed(error):
            return f"error: {error}", _EXIT_MACHINE
    return f"internal error: {type(error).__name__}: {error} (run with --debug for the traceback)", 1


def parse(words: Sequence[str]) -> Command:
    """Read the words. Raises InputError ``FLAG: problem``; values are checked later, with the file's."""
    command, rest = Command(), deque(words)
    if "--help" in words or "-h" in words:
        command.switches.add("--help")
        return command
    while rest:
        word = rest.popleft()
        name, equals, text = word.partition("=")
        if word.startswith("-"):
            _take_flag(command, name, text if equals else None, rest)
        elif equals:
            command.settings.append(_setting(find_key(name, name), text, said=name))
        else:
            _take_verb(command, word)
    _check_combination(command)
    return command


def _take_verb(command: Command, word: str) -> None:
    if word in LATER_VERBS:
        raise InputError(f"{word}: is not available yet (available: {', '.join(VERBS)})")
    if word not in VERBS:
        raise InputError(f"{word}: is neither a verb, a flag nor key=value{suggest(word, VERBS)}")
    if command.verb:
        raise InputError(f"{word}: one verb at a time, {command.verb} was given already")
    command.verb = word


def _take_flag(command: Command, flag: str, text: str | None, rest: deque[str]) -> None:
    """Add what ``flag`` says; its value is ``text`` where glued with '=', else the next word in ``rest``."""
    if text is not None and (flag in SWITCHES or flag in _negations()):
        raise InputError(f"{flag}: takes no value, not {show(text)}")
    if flag in SWITCHES:
        command.switches.add(flag)
    elif flag in _negations():
        command.settings.append(_setting(_negations()[flag], "false", said=flag))
    elif flag in OPTIONS:
        command.options[flag] = text or _value_word(flag, rest if text is None else deque())
    elif flag in _flags():
        key = _flags()[flag]
        if text is None:
            text = _boolean_word(rest) if "boolean" in key.types else _value_word(flag, rest)
        command.settings.append(_setting(key, text, said=flag))
    else:
        _refuse_flag(flag)


def _refuse_flag(flag: str) -> None:
    hint = suggest(flag, [*_flags(), *_negations(), *SWITCHES, *OPTIONS]) or "; `--help` lists all"
    glued = "" if flag.startswith("--") else max(filter(flag.startswith, _flags()), key=len, default="")
    note = f" (a value does not stick to its flag: write {glued} {flag.removeprefix(glued)})" if glued else ""
    raise InputError(f"{flag}: unknown flag{hint}{note}")


def _value_word(flag: str, rest: deque[str]) -> str:
    if not rest or (rest[0].startswith("-") and not _NUMBER.fullmatch(rest[0])):
        raise InputError(f"{flag}: needs a value (one that begins with a dash is written {flag}=-VALUE)")
    return rest.popleft()


def _boolean_word(rest: deque[str]) -> str:
    """The word after a bare boolean, unless that is a word of its own: a flag, a pair or a verb."""
    if not rest or rest[0].startswith("-") or "=" in rest[0] or rest[0] in (*VERBS, *LATER_VERBS):
        return "true"
    return rest.popleft()


def _setting(key: Key, text: str, *, said: str) -> Setting:
    """The value that ``text`` stands for. What fits no type of the key stays text, and is refused with the file's."""
    value: Any = text
    if text == "null":
        value = None
    elif "boolean" in key.types:
        value = _BOOLEANS.get(text.lower(), text)
    elif key.types & {"integer", "number"} and _NUMBER.fullmatch(text):
        value = int(text) if re.fullmatch(r"[+-]?\d{1,18}", text) else float(text)
    elif key.types & {"array", "object"} and ("string" not in key.types or text.startswith("[")):
        try:
            value = read_json(text).value
        except JsonError as error:
            raise InputError(f"{said}: must be {key.describe()} in JSON: {error.problem} ({error.where})") from None
    return Setting(key.name, value, said=said, origin="command line", folder=Path.cwd())


def _check_combination(command: Command) -> None:
    """Refuse what makes no sense together, and let -topk switch top-K on."""
    if "--yes" in command.switches and command.verb != "init-student":
        raise InputError("--yes: is not available yet (nothing that a run does needs it)")
    idle = {"--fresh", "--resume"} & command.switches
    if idle and command.verb not in ("", "run", "train", "plan", "init-student"):
        raise InputError(f"{min(idle)}: has no meaning for {command.verb}, only for run, train and plan")
    if {"--fresh", "--resume"} <= command.switches:
        raise InputError("--fresh: contradicts --resume; give one of them")
    told = {setting.key: setting for setting in command.settings}
    if "save_topK" in told and told["save_topK"].value is not None:
        top_k, enable = told["save_topK"], told.get("enable_topK")
        if enable is None:
            command.settings.append(_setting(find_key("enable_topK", top_k.said), "true", said=top_k.said))
        elif enable.value is False:
            raise InputError(f"{top_k.said}: contradicts {enable.said}; give one of them")
    if command.verb != "init-student":
        for option in command.options.keys() & set(_STUDENT_OPTIONS):
            raise InputError(f"{option}: belongs to the verb init-student")
        return
    strangers = (command.switches | command.options.keys()) - {*_STUDENT_OPTIONS, "--debug", "--version"}
    for stranger in [*(setting.said for setting in command.settings), *sorted(strangers)]:
        raise InputError(f"{stranger}: init-student takes only {', '.join(_STUDENT_OPTIONS)}")
    for option in _STUDENT_OPTIONS:
        if option not in command.options:
            raise InputError(f"{option}: missing (init-student --from DIR --layers N --out DIR)")


def _execute(command: Command) -> None:
    """Do what was asked for. Heavy modules are imported only here, once it is clear that they are needed."""
    if "--help" in command.switches:
        _say("\n".join(_help_lines()) + "\n")
        return
    if "--version" in command.switches:
        _say(f"distill {__version__}\n")
        return
    if command.verb == "init-student":
        _init_student(command)
        return
    verb = command.verb or "run"
    loaded = load_with_origins(_config_path(command), command.settings)
    if verb == "config":
        _say(_resolved(loaded))
        return
    _warn_of_foreign_validation(loaded)
    from distill import pipeline

    commands = {
        "run": pipeline.run,
        "plan": pipeline.plan,
        "collect": pipeline.collect,
        "train": pipeline.train,
        "evaluate": pipeline.evaluate,
    }
    given = command.switches
    options = RunOptions(fresh="--fresh" in given, resume="--resume" in given)
    with _termination_as_interrupt():
        commands[verb](loaded.config, options)


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
    from distill.student import init_student

    init_student(Path(command.options["--from"]).absolute(), int(layers), Path(command.options["--out"]).absolute())


def _config_path(command: Command) -> Path:
    if "--config" in command.options:
        return Path(command.options["--config"])
    for path in (Path("config.json"), _ROOT / "config.json"):
        if path.exists():
            return path
    raise InputError("config.json: neither here nor beside run.py; name the file with --config PATH")


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
    yield from _help_group("Options", [(f"{name} {word}", doc) for name, (word, doc) in OPTIONS.items()])
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


@functools.cache
def _flags() -> dict[str, Key]:
    keys = Config.keys()
    return {flag: key for key in keys for flag in key.flags}


@functools.cache
def _negations() -> dict[str, Key]:
    return {f"--no-{key.name}": key for key in _flags().values() if "boolean" in key.types}
