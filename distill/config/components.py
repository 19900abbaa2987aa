"""From the tree of what was said to the settings of keys: components and their options, twins, and what is left open.

A component is a part that is swapped by its name: ``optimizer``, ``lr_scheduler``, ``loss``, ``student``, ``loggers``.
Its options are keys (the aliases in sections.py say which), so they are checked as keys are; here is only which of them
each component has.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from distill.config.data import data_settings
from distill.config.keys import show, suggest
from distill.config.root import Setting, keys_by_name
from distill.config.spelling import STUDENT, Trail, inverses, option_of
from distill.config.tree import Entry, as_setting, nested
from distill.errors import InputError

_ADAM = frozenset({"lr", "weight_decay", "betas", "eps"})
_WARMUP = frozenset({"num_warmup_steps"})
_WSD = frozenset({"final_lr", "decay_start", "decay_form", "warmup_form"}) | _WARMUP
_KL = frozenset({"tail", "temperature"})
# By component and name, the keys that are its options; "" stands for every name that isn't there.
OPTIONS: dict[str, dict[str, frozenset[str]]] = {
    "optimizer": {
        "": _ADAM,
        "sgd": frozenset({"lr", "weight_decay", "momentum"}),
        "rmsprop": frozenset({"lr", "weight_decay", "eps", "momentum", "rmsprop_alpha"}),
        "rmsprop8bit": frozenset({"lr", "weight_decay", "eps", "rmsprop_alpha"}),
        "rmsprop32bit": frozenset({"lr", "weight_decay", "eps", "rmsprop_alpha"}),
        "adagrad": frozenset({"lr", "weight_decay", "eps"}),
    },
    "lr_scheduler": {"": _WARMUP, "wsd": _WSD, "constant": frozenset()},
    "loss": {
        "": _KL,
        "jsd": _KL | {"jsd_beta"},
        "skew_kl": _KL | {"skew_alpha"},
        "skew_reverse_kl": _KL | {"skew_alpha"},
        "ab": _KL | {"ab_alpha", "ab_beta"},
        "ce": frozenset(),
    },
}
# Other names of values, where a key stands under another name of its own.
_VALUES = {
    "training_precision": {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"},
    "loss": {"cross_entropy": "ce", "kl_div": "kl"},
}
# By name, transformers' model_type. All others are made by student_init.
_ARCHITECTURES = {
    "llama": "llama", "llama2": "llama", "llama3": "llama", "gpt2": "gpt2", "gpt_neox": "gpt_neox", "qwen": "qwen2",
    "qwen2": "qwen2", "qwen3": "qwen3", "mistral": "mistral", "gemma2": "gemma2", "phi3": "phi3", "olmo2": "olmo2",
}  # fmt: skip
_STUDENT_SIZES = {
    "n_layer": "layers", "n_head": "heads", "n_kv_head": "kv_heads", "hidden_dim": "hidden",
    "intermediate_dim": "intermediate",
}  # fmt: skip
_QUIET_LOGGERS = ("basic", "console", "jsonl")
_OPEN = "???"


def settings_of(entries: Sequence[Entry]) -> Iterator[Setting]:
    """The settings of keys that the resolved ``entries`` come to. InputError says what no key can take."""
    entries = [replace(entry, value=_value(entry)) for entry in entries]
    for entry in entries:
        if entry.value == _OPEN:
            raise InputError(f"{entry.said}: is left open (???): give it a value, {_dotted(entry)}=… say")
    by_trail = {entry.trail: entry for entry in entries}
    _check_options(entries, by_trail)
    architecture = _architecture(entries, by_trail.get(("student_path",)))
    replaced = {entry.trail for entry in entries if _is_replaced(entry, by_trail, architecture)}
    for entry in entries:
        if entry.trail in replaced:
            continue
        if entry.trail[0] in keys_by_name():
            yield as_setting(entry)
        elif entry.trail[0] in inverses():
            yield _inverse(entry)
    yield from _epochs(by_trail.get(("max_steps",)), by_trail.get(("num_epochs",)))
    if architecture:
        yield _student(architecture, by_trail.get(("teacher_models_folder",)))
    yield from data_settings([entry for entry in entries if entry.trail[0] == "data"], by_trail)
    yield from _loggers([entry for entry in entries if entry.trail[0] == "loggers"])


def _value(entry: Entry) -> Any:
    """The value under the key's own name for it."""
    value = entry.value
    if isinstance(value, str) and entry.spelled and entry.spelled[-1] != entry.trail[-1]:
        return _VALUES.get(entry.trail[0], {}).get(value.removeprefix("torch."), value)
    return value


def _dotted(entry: Entry) -> str:
    return ".".join(entry.trail)


def _check_options(entries: Sequence[Entry], by_trail: dict[Trail, Entry]) -> None:
    """Refuse options that the component, as it is called in the end, doesn't have."""
    for entry in entries:
        component = option_of(entry.spelled)
        if component not in OPTIONS or entry.trail == (component,):
            continue
        chosen = by_trail.get((component,))
        name = keys_by_name()[component].default if chosen is None else chosen.value
        if not isinstance(name, str):
            continue  # a mix of losses has the options of all
        kinds = OPTIONS[component]
        known = kinds.get(name, kinds[""])
        key = entry.trail[0]
        if key == "lr_scheduler_args" and name != "wsd":
            continue  # the schedule itself knows its arguments
        if key not in known:
            options = ", ".join(sorted(known)) or "none"
            raise InputError(
                f"{entry.said}: {component} {name} has no option {entry.spelled[-1]!r} (options: {options})"
            )


def _is_replaced(entry: Entry, by_trail: dict[Trail, Entry], architecture: Sequence[Entry]) -> bool:
    """Whether a twin that was said later counts in place of ``entry``. InputError if both stand in one file."""
    twins = [by_trail[name,] for name, key in inverses().items() if entry.trail == (key,) and (name,) in by_trail]
    if entry.trail[0] in inverses() and (inverses()[entry.trail[0]],) in by_trail:
        twins.append(by_trail[inverses()[entry.trail[0]],])
    twins = [twin for twin in twins if twin.value is not None and entry.value is not None]
    for twin in twins:
        if twin.layer == entry.layer:
            raise InputError(f"{entry.said}: contradicts {_dotted(twin)} of {twin.origin}; give one of them")
    if entry.trail == ("student_path",) and architecture:
        return max(part.layer for part in architecture) > entry.layer
    return entry.value is None or any(twin.layer > entry.layer for twin in twins)


def _inverse(entry: Entry) -> Setting:
    """Times an epoch, as the epochs between two times; 0 is never in both."""
    times = entry.value
    if isinstance(times, bool) or not isinstance(times, int | float) or times < 0:
        raise InputError(f"{entry.said}: must be a number, at least 0, not {show(times)}")
    return replace(as_setting(entry), key=inverses()[entry.trail[0]], value=1 / times if times else 0.0)


def _architecture(entries: Sequence[Entry], path: Entry | None) -> list[Entry]:
    """What describes a new student, unless a later file or word names one that is there."""
    parts = [entry for entry in entries if entry.trail[0] == STUDENT]
    named_later = path is not None and path.value is not None and path.layer > max((e.layer for e in parts), default=0)
    return [] if named_later else parts


def _epochs(steps: Entry | None, epochs: Entry | None) -> Iterator[Setting]:
    """``optimization.iterations`` alone says how long a training takes, unless epochs are given with it or later."""
    if steps is None or steps.value is None or steps.spelled[-1] != "iterations":
        return
    if epochs is None or epochs.layer < steps.layer:
        yield replace(as_setting(steps), key="num_epochs", value="auto")


def _student(parts: Sequence[Entry], teacher: Entry | None) -> Setting:
    """The architecture of a new student as student_init has it; its tokenizer is the teacher's, if none is named."""
    said = {entry.trail[1]: entry for entry in parts}
    last = parts[-1]
    name = said.get("_name")
    if name is None:
        raise InputError(f"{last.said}: of which architecture? name it by _name (llama, gpt2, qwen2, …)")
    if not isinstance(name.value, str) or name.value not in _ARCHITECTURES:
        hint = suggest(str(name.value), _ARCHITECTURES) or "; student_init takes any of transformers"
        known = ", ".join(_ARCHITECTURES)
        raise InputError(f"{name.said}: {show(name.value)} is no file of that group, nor one of {known}{hint}")
    config: dict[str, Any] = {"model_type": _ARCHITECTURES[name.value]}
    init: dict[str, Any] = {"config": config}
    for option, entry in said.items():
        if option in (*_STUDENT_SIZES, "vocab_size") and entry.value is not None:
            if isinstance(entry.value, bool) or not isinstance(entry.value, int) or entry.value < 1:
                raise InputError(f"{entry.said}: must be a whole number, at least 1, not {show(entry.value)}")
            if option == "vocab_size":
                config[option] = entry.value
            else:
                init[_STUDENT_SIZES[option]] = entry.value
    own, folder = said.get("tokenizer"), name.folder
    if own is not None and isinstance(own.value, str):
        init["tokenizer"], folder = own.value, own.folder
    elif teacher is not None and isinstance(teacher.value, str):
        init["tokenizer"], folder = teacher.value, teacher.folder
    else:
        raise InputError(f"{name.said}: needs a tokenizer, the folder of one, where no teacher_models_folder is given")
    init["tokenizer"] = _absolute(init["tokenizer"], folder)
    return replace(as_setting(name), key="student_init", value=init)


def _absolute(path: str, folder: Path) -> str:
    return os.path.normpath(folder / os.path.expanduser(path))  # noqa: PTH111 - as the paths of keys are


def _loggers(entries: Sequence[Entry]) -> Iterator[Setting]:
    """The trackers that a run logs to besides its own folder, where it always logs."""
    if not entries:
        return
    first = entries[0]
    said = nested(entries)["loggers"]
    for logger in said if isinstance(said, list) else [said]:
        options = {"_name": logger} if isinstance(logger, str) else logger
        name = options.get("_name") if isinstance(options, dict) else None
        known = {"wandb": {"_name", "comment"}, **{quiet: {"_name"} for quiet in _QUIET_LOGGERS}}
        if not isinstance(name, str) or name not in known:
            hint = suggest(str(name), known)
            raise InputError(f"{first.said}: must be basic or wandb, or a list of them, not {show(logger)}{hint}")
        for option in options.keys() - known[name]:
            raise InputError(f"{first.said}: {name} has no option {option!r} (options: comment of wandb)")
        if name == "wandb":
            yield replace(as_setting(first), key="wandb_comment", value=options.get("comment", ""))
