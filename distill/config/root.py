"""The configuration as a whole: its sections, the rules across keys, and the one way from given values to it."""

import functools
import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ValidationError, model_validator
from pydantic_core import ErrorDetails, PydanticCustomError

from distill.config.extra import Extra
from distill.config.keys import STRICT, Decides, Key, Section, section_keys, show, suggest
from distill.config.kinds import OBSERVING
from distill.config.sections import Cache, Collection, Model, Paths, Pipeline, Student, Training
from distill.errors import InputError

_LOSSES_OF = {
    "jsd_beta": ("jsd",), "skew_alpha": ("skew_kl", "skew_reverse_kl"), "ab_alpha": ("ab",), "ab_beta": ("ab",),
}  # fmt: skip
# Of an exponent that isn't 0: fp32 loses the differences that the loss divides by it.
_SMALLEST_EXPONENT = 0.01
_HUB_KEYS = ("dataset_path", "validation_dataset_path", "student_path")
_TEXT_SUFFIXES = (".jsonl", ".json", ".txt", ".csv", ".parquet", ".gz", ".zst")

# By pydantic's error type: the bound's name in its context, and our words for it.
_BOUNDS = {
    "greater_than_equal": ("ge", "at least"),
    "greater_than": ("gt", "above"),
    "less_than_equal": ("le", "at most"),
    "less_than": ("lt", "below"),
}


@dataclass(frozen=True)
class RunOptions:
    """What a command may do to what is there.

    ``fresh`` sets the state of an unfinished run aside, ``resume`` keeps its old values; ``prune`` removes what of the
    cache the job doesn't use, and ``yes`` allows what destroys data collected earlier.
    """

    fresh: bool = False
    resume: bool = False
    prune: bool = False
    yes: bool = False


@dataclass(frozen=True)
class Setting:
    """One value that a user gave. ``value`` is JSON; null stands for the default.

    ``said`` names it in messages ("config.json:12: lr", "-lr"), ``origin`` in the resolved configuration
    ("config.json:12", "command line"); a relative path counts from ``folder``.
    """

    key: str
    value: Any
    said: str
    origin: str
    folder: Path


class Config(BaseModel):
    """The resolved configuration: every key has a value. ``load_config`` and ``from_flat`` make it, paths absolute."""

    model_config = STRICT

    paths: Paths = Paths()
    cache: Cache = Cache()
    pipeline: Pipeline = Pipeline()
    model: Model = Model()
    collection: Collection = Collection()
    training: Training = Training()
    student: Student = Student()
    extra: Extra = Extra()

    @model_validator(mode="after")
    def _check_rules(self) -> Self:
        training = self.training
        if training.final_lr > training.lr:
            raise _broken_rule("final_lr", f"{show(training.final_lr)} is above lr, {show(training.lr)}")
        _check_loss(training)
        _check_adapters(training, self.student)
        _check_student_place(self.paths, training)
        _check_times(training)
        return self

    @classmethod
    def from_flat(cls, flat: Mapping[str, Any]) -> "Config":
        """A configuration of these keys and the defaults of all others. Raises InputError ``KEY: problem``.

        Relative paths count from the working directory.
        """
        folder = Path.cwd()
        given = [Setting(name, value, said=name, origin="given", folder=folder) for name, value in flat.items()]
        return resolve(given, folder).config

    @classmethod
    def keys(cls) -> tuple[Key, ...]:
        """What is declared about every key, in order."""
        return tuple(keys_by_name().values())

    def flat(self) -> dict[str, Any]:
        """Every key with its value as JSON has it (lists, not tuples), in order."""
        return {name: value for section in self.model_dump(mode="json").values() for name, value in section.items()}

    def deciding(self, what: Decides) -> dict[str, Any]:
        """The flat keys that decide the teacher's records ("layer"), or the trained student ("result", a superset)."""
        flat = self.flat()
        return {
            key.name: flat[key.name]
            for key in self.keys()
            if key.decides is not None and what in (key.decides, "result")
        }

    def dump(self) -> str:
        """The whole configuration as a JSON text that loads to an equal one."""
        return json.dumps(_without_references(self.flat()), indent=2, ensure_ascii=False) + "\n"


@dataclass(frozen=True)
class LoadedConfig:
    """A configuration, and for every key where its value comes from: "default", FILE:LINE or "command line"."""

    config: Config
    origins: Mapping[str, str]


def _without_references(value: Any) -> Any:
    """``value`` with its texts so written that a file's ``${`` is read as just that."""
    if isinstance(value, str):
        return re.sub(r"(\\*)\$\{", r"\1\1\\${", value)
    if isinstance(value, list):
        return [_without_references(item) for item in value]
    return {name: _without_references(item) for name, item in value.items()} if isinstance(value, dict) else value


def section_model(name: str) -> type[Section]:
    """The class of the section that ``config`` has under that name."""
    model = Config.model_fields[name].annotation
    assert isinstance(model, type) and issubclass(model, Section), "a configuration has sections only"
    return model


def find_key(name: str, said: str, more: tuple[str, ...] = ()) -> Key:
    """The key of that name. Raises InputError that says ``said`` and the nearest key or a word in ``more``."""
    if name not in keys_by_name():
        hint = suggest(name, [*keys_by_name(), *more]) or "; `python run.py --help` lists all"
        raise InputError(f"{said}: unknown key{hint}")
    return keys_by_name()[name]


def resolve(settings: Iterable[Setting], folder: Path) -> LoadedConfig:
    """The configuration of ``settings``, of which the last on a key counts; default paths count from ``folder``.

    Raises InputError in one line that begins with the ``said`` of the setting at fault.
    """
    given: dict[str, Setting] = {}
    nested: dict[str, dict[str, Any]] = {name: {} for name in Config.model_fields}
    for setting in settings:
        find_key(setting.key, setting.said)
        given[setting.key] = setting
    for name, setting in list(given.items()):
        if setting.value is None:
            del given[name]
        else:
            nested[keys_by_name()[name].section][name] = _plain(setting)
    try:
        # JSON rather than Python mode: only there is a list, as files have it, a strict tuple.
        config = Config.model_validate_json(json.dumps(nested))
    except ValidationError as error:
        raise InputError(_message(error, given)) from None
    origins = {key.name: given[key.name].origin if key.name in given else "default" for key in keys_by_name().values()}
    return LoadedConfig(_with_absolute_paths(config, given, folder), origins)


@functools.cache
def keys_by_name() -> dict[str, Key]:
    """Every key by name. No two sections share a name, so files and flags are flat."""
    keys = [key for name in Config.model_fields for key in section_keys(name, section_model(name))]
    assert len({key.name for key in keys}) == len(keys), "a key is declared in two sections"
    return {key.name: key for key in keys}


def _plain(setting: Setting) -> Any:
    """The value in JSON's types: from Python a path or a tuple may come as well."""
    try:
        text = json.dumps(setting.value, ensure_ascii=False, default=os.fspath)
        return json.loads(text.encode())
    except UnicodeEncodeError:
        raise InputError(f"{setting.said}: {setting.value!a} holds characters that are not Unicode text") from None


def _with_absolute_paths(config: Config, given: Mapping[str, Setting], folder: Path) -> Config:
    def absolute(name: str, value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(absolute(name, item) for item in value)
        if isinstance(value, dict):
            return {part: absolute(name, item) if isinstance(item, str) else item for part, item in value.items()}
        base = given[name].folder if name in given else folder
        if name in _HUB_KEYS and value is not None and _may_be_hub_id(name, value) and not (base / value).exists():
            return value
        # Path.expanduser raises where there is no home; os.path's leaves the text.
        return value if value is None else os.path.normpath(base / os.path.expanduser(value))  # noqa: PTH111

    paths = {name: absolute(name, value) for name, value in config.paths}
    return config.model_copy(update={"paths": config.paths.model_copy(update=paths)})


def _may_be_hub_id(key: str, text: str) -> bool:
    """Whether ``text`` looks like something of the Hugging Face hub, ``owner/name…``, and not like a text file."""
    more = "" if key == "student_path" else r"(/[\w-][\w.+-]*)?(:\S+)?"
    pattern = rf"[\w-][\w.-]*/[\w-][\w.+-]*{more}"
    return bool(re.fullmatch(pattern, text)) and not text.endswith(_TEXT_SUFFIXES)


def _check_loss(training: Training) -> None:
    names = [training.loss] if isinstance(training.loss, str) else list(training.loss)
    if not isinstance(training.loss, str) and not sum(training.loss.values()):
        raise _broken_rule("loss", "a mix without weights; give at least one loss a weight above 0")
    if training.tail in ("drop", "to_target") and (others := [name for name in names if name not in ("kl", "ce")]):
        raise _broken_rule("tail", f"{training.tail} is of kl alone; {others[0]} takes bucket or renormalise")
    for key, losses in _LOSSES_OF.items():
        if getattr(training, key) != Training.model_fields[key].default and not set(losses) & set(names):
            raise _broken_rule(key, f"belongs to {' and '.join(losses)}; loss is {show(training.loss)}")
    if names == ["ce"] and not training.alpha:
        for key in ("temperature", "tail"):
            if getattr(training, key) != Training.model_fields[key].default:
                raise _broken_rule(key, "has no effect on ce, which looks at the text alone")
    for key in ("ab_alpha", "ab_beta"):
        if 0 < getattr(training, key) < _SMALLEST_EXPONENT:
            raise _broken_rule(key, f"below {_SMALLEST_EXPONENT} it is lost in rounding; 0 is its limit")


def _check_adapters(training: Training, student: Student) -> None:
    if training.lora_rank is None and training.training_precision not in ("8bit", "4bit"):
        for key in ("lora_alpha", "lora_targets", "lora_dropout"):
            if getattr(training, key):
                raise _broken_rule(key, "there are no adapters; set lora_rank")
        if training.merge_into != "dequantised":
            raise _broken_rule("merge_into", "there are no adapters; set lora_rank")
    elif student.freeze_layers:
        raise _broken_rule("freeze_layers", "adapters leave all of the student as it is; choose lora_targets")


def _check_times(training: Training) -> None:
    """How long it takes; and what looks at validations, or at students on the way, has some to look at."""
    if training.num_epochs == "auto" and training.max_steps is None:
        raise _broken_rule("num_epochs", "auto needs max_steps")
    if not training.validate_every_n_epochs:
        if training.lr_scheduler in OBSERVING:
            told = f"{training.lr_scheduler} looks at validations; set validate_every_n_epochs above 0"
            raise _broken_rule("lr_scheduler", told)
        for key in ("early_stop_patience", "save_best_student"):
            if getattr(training, key):
                raise _broken_rule(key, "needs validations; set validate_every_n_epochs above 0")
    if training.keep_students is not None and not training.save_student_every_n_epochs:
        raise _broken_rule("keep_students", "there are none to keep; set save_student_every_n_epochs above 0")


def _check_student_place(paths: Paths, training: Training) -> None:
    """Where the student comes from, and which devices it is on."""
    if paths.student_init is not None and paths.student_path is not None:
        raise _broken_rule("student_init", "student_path is given as well; set one of them to null")
    for key in () if training.multi_gpu else ("max_memory", "num_gpu0_layers"):
        if getattr(training, key) is not None:
            raise _broken_rule(key, "needs multi_gpu, which is false")
    if training.multi_gpu and training.student_device is not None:
        raise _broken_rule("student_device", "is one device, but multi_gpu uses all; max_memory leaves out single ones")
    if not training.multi_gpu and training.device_map != "auto":
        raise _broken_rule("device_map", "needs multi_gpu, which is false")
    if training.num_gpu0_layers is not None and training.device_map != "custom":
        raise _broken_rule("num_gpu0_layers", f"belongs to device_map custom, not {training.device_map}")


def _broken_rule(key: str, problem: str) -> PydanticCustomError:
    return PydanticCustomError("rule", "{problem}", {"key": key, "problem": problem})


def _message(invalid: ValidationError, given: Mapping[str, Setting]) -> str:
    """The first problem in our words. Of a union's, the one that a value of nearly the right type has."""
    errors = invalid.errors(include_url=False)
    if errors[0]["type"] == "rule":
        name, problem = errors[0]["ctx"]["key"], errors[0]["ctx"]["problem"]
    else:
        name = str(errors[0]["loc"][1])
        problems = [_problem(error) for error in errors if error["loc"][1] == name]
        problem = next(filter(None, problems), _wrong_type(keys_by_name()[name], given[name].value))
    return f"{given[name].said if name in given else name}: {problem}"


def _problem(error: ErrorDetails) -> str:
    """What is wrong with a value of the right type; "" if the type itself is wrong."""
    kind, context, value = error["type"], error.get("ctx", {}), show(error["input"])
    if kind == "value_error":
        return str(context["error"])
    if kind in _BOUNDS:
        name, words = _BOUNDS[kind]
        return f"must be {words} {context[name]:.15g}, not {value}"
    if kind == "finite_number":
        return f"must be a finite number, not {value}"
    if kind == "string_too_short" or (kind == "too_short" and context["min_length"] == 1):
        return "must not be empty (null means the default)"
    return ""


def _wrong_type(key: Key, value: Any) -> str:
    choices = [choice for schema in key.schema.get("anyOf", [key.schema]) for choice in schema.get("enum", ())]
    hint = suggest(value, choices) if isinstance(value, str) else ""
    return f"must be {key.describe()}, not {show(value)}{hint}"
