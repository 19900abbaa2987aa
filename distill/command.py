"""The words of a command line: read, checked, and understood as a verb, settings, switches and options.

Read here rather than by argparse, of which nothing would remain: it reads `-sgd` as `-s gd`, lets a bare boolean eat a
verb, takes `-1e-5` for a flag, and knows neither pairs nor the nearest flag. All that is known about keys comes from
the schema.
"""

import functools
import re
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from distill.config import NUMBER, Config, Key, Override, Setting, find_key, key_value, other_names, show, suggest
from distill.errors import InputError

VERBS = {
    "run": "collect what is missing, then train: the default",
    "plan": "say what a run would do, and do nothing",
    "collect": "only fill the cache",
    "train": "only train, from the cache",
    "evaluate": "measure the student on the validation text",
    "inspect": "print what the cache holds, and a sample of it",
    "verify": "check every byte of the cache",
    "import": "bring an ancestor's distributions.hdf5, or an exported file, into the cache",
    "export": "write the cache as one HDF5 file or as a folder to share",
    "config": "print every key with its value and where that comes from",
    "init-student": "make a student of some of a teacher's layers",
}
LATER_VERBS = ("report",)
SWITCHES = {
    "-m": "sweep: one run for each combination of the values in key=a,b pairs, and a table at the end",
    "--fresh": "set the state of an unfinished run aside and begin anew",
    "--resume": "go on with an unfinished run, with its old values",
    "--prune": "first remove what of the cache this run doesn't use (needs --yes)",
    "--yes": "allow what destroys data collected earlier",
    "--debug": "show the traceback of an error",
    "--version": "print the version",
    "--help": "print this (also -h)",
}
# What each option takes, what it is, and the verbs that it belongs to (none: all).
OPTIONS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "--config": ("PATH", "a file, or an example's name; repeated, later over earlier; else config.json", ()),
    "--explain": ("KEY", "print what a key is, and do nothing else", ()),
    "--from": ("PATH", "init-student: the teacher's folder; import: the file", ("init-student", "import")),
    "--layers": ("N", "init-student: how many layers to keep", ("init-student",)),
    "--out": ("PATH", "init-student: the folder to make; export: a folder, or a .h5 file", ("init-student", "export")),
    "--teacher": ("NAME", "import: whose distributions an ancestor's file holds", ("import",)),
    "--split": ("NAME", "import: train or validation, for a plain file", ("import",)),
    "--layer": ("NAME", "inspect, export: one layer alone, by its folder's name", ("inspect", "export")),
    "--sample": ("N", "inspect: which sample to show, from 0", ("inspect",)),
}
# The verbs for which a switch has a meaning; all others refuse it.
_SWITCH_VERBS = {
    "--fresh": ("run", "train", "plan"),
    "--resume": ("run", "train", "plan"),
    "--prune": ("run", "collect"),
    "--yes": ("run", "train", "collect"),
}

_STUDENT_OPTIONS = ("--from", "--layers", "--out")
_PAIR = re.compile(r"(~|\+{0,2})([A-Za-z_$][\w./-]*)(?:=(.*))?", re.DOTALL)


@dataclass
class Command:
    """What the words ask for.

    ``configs`` are the files, in order; ``options`` has the text of each other of OPTIONS that was given.
    """

    verb: str = ""
    configs: list[str] = field(default_factory=list)
    settings: list[Setting | Override] = field(default_factory=list)
    switches: set[str] = field(default_factory=set)
    options: dict[str, str] = field(default_factory=dict)


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
        elif equals or word.startswith("~"):
            command.settings.append(_pair(word))
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
    elif flag == "--config":
        command.configs.append(text or _value_word(flag, rest if text is None else deque()))
    elif flag in OPTIONS:
        command.options[flag] = text or _value_word(flag, rest if text is None else deque())
    elif flag in _flags():
        key = _flags()[flag]
        if text is None:
            text = _boolean_word(rest) if "boolean" in key.types else _value_word(flag, rest)
        command.settings.append(_setting(key, text, said=flag))
    elif flag.removeprefix("--") in other_names() and flag.startswith("--"):
        value = _value_word(flag, rest) if text is None else text
        command.settings.append(Override(flag.removeprefix("--"), value, flag, "set", Path.cwd()))
    else:
        _refuse_flag(flag)


def _refuse_flag(flag: str) -> None:
    hint = suggest(flag, [*_flags(), *_negations(), *SWITCHES, *OPTIONS]) or "; `--help` lists all"
    glued = "" if flag.startswith("--") else max(filter(flag.startswith, _flags()), key=len, default="")
    note = f" (a value does not stick to its flag: write {glued} {flag.removeprefix(glued)})" if glued else ""
    raise InputError(f"{flag}: unknown flag{hint}{note}")


def _value_word(flag: str, rest: deque[str]) -> str:
    if not rest or (rest[0].startswith("-") and not NUMBER.fullmatch(rest[0])):
        raise InputError(f"{flag}: needs a value (one that begins with a dash is written {flag}=-VALUE)")
    return rest.popleft()


def _boolean_word(rest: deque[str]) -> str:
    """The word after a bare boolean, unless that is a word of its own: a flag, a pair or a verb."""
    if not rest or rest[0].startswith("-") or "=" in rest[0] or rest[0] in (*VERBS, *LATER_VERBS):
        return "true"
    return rest.popleft()


def _setting(key: Key, text: str, *, said: str) -> Setting:
    """The value that ``text`` stands for. What fits no type of the key stays text, and is refused with the file's."""
    return Setting(key.name, key_value(key, text, said), said=said, origin="command line", folder=Path.cwd())


def _pair(word: str) -> Setting | Override:
    """A word KEY=VALUE, +KEY=VALUE or ~KEY. A key may have its section before it; other dotted names come later."""
    match = _PAIR.fullmatch(word)
    if match is None:
        raise InputError(f"{word}: is neither a verb, a flag nor key=value")
    sign, name, text = match[1], match[2], match[3]
    if sign == "~":
        return Override(name, "", f"~{name}", "delete", Path.cwd())
    section, _, inner = name.rpartition(".")
    key = next((key for key in _flags().values() if key.name == inner and section in ("", key.section)), None)
    if key is not None and sign != "+":
        return _setting(key, text, said=name)
    return Override(name, text, f"{sign}{name}", "add" if sign == "+" else "set", Path.cwd())


def _check_combination(command: Command) -> None:
    """Refuse what makes no sense together, and let -topk switch top-K on."""
    verb = command.verb or "run"
    for switch, verbs in _SWITCH_VERBS.items():
        if switch in command.switches and verb not in verbs and verb != "init-student":
            raise InputError(f"{switch}: has no meaning for {verb}, only for {_and(verbs)}")
    if {"--fresh", "--resume"} <= command.switches:
        raise InputError("--fresh: contradicts --resume; give one of them")
    told = {setting.key: setting for setting in command.settings if isinstance(setting, Setting)}
    if "save_topK" in told and told["save_topK"].value is not None:
        top_k, enable = told["save_topK"], told.get("enable_topK")
        if enable is None:
            command.settings.append(_setting(find_key("enable_topK", top_k.said), "true", said=top_k.said))
        elif enable.value is False:
            raise InputError(f"{top_k.said}: contradicts {enable.said}; give one of them")
    for option in command.options:
        verbs = OPTIONS[option][2]
        if verbs and verb not in verbs and verb != "init-student":
            raise InputError(f"{option}: belongs to {_and(verbs)}")
    if verb == "init-student":
        _check_init_student(command)
    for needed, option in (("import", "--from"), ("export", "--out")):
        if verb == needed and option not in command.options:
            raise InputError(f"{option}: missing ({verb} {option} {OPTIONS[option][0]})")


def _check_init_student(command: Command) -> None:
    strangers = (command.switches | command.options.keys()) - {*_STUDENT_OPTIONS, "--debug", "--version"}
    for stranger in [*(setting.said for setting in command.settings), *sorted(strangers)]:
        raise InputError(f"{stranger}: init-student takes only {', '.join(_STUDENT_OPTIONS)}")
    for option in _STUDENT_OPTIONS:
        if option not in command.options:
            raise InputError(f"{option}: missing (init-student --from DIR --layers N --out DIR)")


def _and(words: Sequence[str]) -> str:
    return " and ".join(filter(None, [", ".join(words[:-1]), words[-1]]))


@functools.cache
def _flags() -> dict[str, Key]:
    keys = Config.keys()
    return {flag: key for key in keys for flag in key.flags}


@functools.cache
def _negations() -> dict[str, Key]:
    return {f"--no-{key.name}": key for key in _flags().values() if "boolean" in key.types}
