"""A configuration from files, the environment and overrides: what counts more comes later."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from distill.config.components import settings_of
from distill.config.compose import Choice, Composer, find_file, group_name
from distill.config.interpolate import resolve_references
from distill.config.keys import suggest
from distill.config.root import Config, LoadedConfig, Setting, keys_by_name, resolve
from distill.config.spelling import Trail, canonical, with_absolute_references
from distill.config.tree import Entry, Tree
from distill.config.words import key_value, value_of_text
from distill.errors import InputError

ENVIRONMENT = "DISTILL_"
# Groups that need no file of their own for a choice: the name says it.
_NAMED_GROUPS = ("student", "model", "loggers")


@dataclass(frozen=True)
class Override:
    """A word NAME=VALUE of the command line whose name isn't simply a key: dotted, a group, +NAME=VALUE or ~NAME."""

    name: str
    text: str
    said: str
    how: Literal["set", "add", "delete"]
    folder: Path

    @property
    def trail(self) -> Trail:
        """The name's parts."""
        return tuple(self.name.split("."))


def load_config(path: Path, overrides: Sequence[Setting | Override] = ()) -> Config:
    """The configuration in the file ``path``; what ``overrides`` say counts more.

    Raises InputError ``FILE:LINE: KEY: problem``, ``FILE:LINE:COLUMN: problem`` for what is neither JSON nor YAML.
    """
    return load_with_origins([path], overrides).config


def load_with_origins(
    paths: Sequence[Path], overrides: Sequence[Setting | Override] = (), environment: Mapping[str, str] | None = None
) -> LoadedConfig:
    """As ``load_config``, of several files, later over earlier, and where each value comes from.

    ``environment`` counts more than files, less than ``overrides``: DISTILL_LR is ``lr``.
    """
    folder = paths[0].absolute().parent
    choices, words = _sorted(overrides, folder)
    composer, tree = Composer(choices), Tree()
    for path in paths:
        for entry in composer.file(path):
            tree.put(entry)
    for entry in (*composer.left_over(), *_environment(environment or {}, composer.layer + 1)):
        tree.put(entry)
    for word in words:
        _apply(word, tree, layer=composer.layer + 2)
    return resolve(settings_of(resolve_references(tree)), folder)


def _sorted(words: Sequence[Setting | Override], folder: Path) -> tuple[dict[str, Choice], list[Setting | Override]]:
    """The choices of groups among ``words``, and the rest. A key's value is a choice where there is such a file."""
    choices: dict[str, Choice] = {}
    rest: list[Setting | Override] = []
    for word in words:
        if isinstance(word, Setting):
            name, text, is_set = word.key, word.value, word.origin == "command line"
            named = False
        else:
            name, text, is_set = word.name, word.text, word.how == "set"
            named = name in _NAMED_GROUPS or "/" in name or (folder / name).is_dir()
        if is_set and isinstance(text, str) and (named or (text and find_file(f"{name}/{text}", folder) is not None)):
            choices[group_name(name)] = Choice(text, word.said, folder)
        else:
            rest.append(word)
    return choices, rest


def _apply(word: Setting | Override, tree: Tree, layer: int) -> None:
    """Lay one word over the tree."""
    if isinstance(word, Setting):
        spelled: Trail = (word.key,)
        trail, value = spelled, word.value
    else:
        spelled, trail = word.trail, canonical(word.trail, word.said)
        if word.how == "delete":
            tree.delete(trail, word.said)
            return
        if word.how == "add":
            tree.check_new(trail, word.said)
        else:
            tree.check_known(trail, word.said)
        value = value_of_text(trail, word.text, word.said)
    origin = word.origin if isinstance(word, Setting) else "command line"
    value = with_absolute_references(value, spelled)
    tree.put(Entry(trail, value, word.said, origin, word.folder, layer, spelled))


def _environment(environment: Mapping[str, str], layer: int) -> Iterator[Entry]:
    known = {f"{ENVIRONMENT}{name.upper()}": key for name, key in keys_by_name().items()}
    for name in sorted(environment):
        if name.startswith(ENVIRONMENT):
            if name not in known:
                raise InputError(f"{name}: unknown key, in the environment{suggest(name, known)}")
            key = known[name]
            value = with_absolute_references(key_value(key, environment[name], name), ())
            yield Entry((key.name,), value, name, "environment", Path.cwd(), layer, (key.name,))
