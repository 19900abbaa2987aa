"""Conversations to text, and where in that text their contents stand.

A prompt format puts fixed strings around each turn. A chat template is a program that may trim, move or drop contents,
so it is run a second time with a marker in place of each content: what lies between the markers is the template's part.
Refilling the markers has to give the real text, character by character; contents are never searched for.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from jinja2 import TemplateError

from distill.errors import InputError
from distill.files import read_object
from distill.types import Role, Sample, Turn

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_FORMAT_KEYS: dict[Role, tuple[str, str]] = {
    "system": ("SYS_START", "SYS_END"),
    "user": ("USER_START", "USER_END"),
    "assistant": ("ASSISTANT_START", "ASSISTANT_END"),
}
# Templates may ask for today's date; a sample's tokens, and with them its key, must not depend on the day of the run.
_FIXED_DATE = (
    "{% macro strftime_now(format) %}{{ format|replace('%d', '26')|replace('%b', 'Jul')|replace('%B', 'July')"
    "|replace('%m', '07')|replace('%Y', '2024')|replace('%y', '24') }}{% endmacro %}\n"
)
# What a chat template may raise, besides what it refuses itself: errors in its expressions.
_TEMPLATE_ERRORS = (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)


@dataclass(frozen=True, slots=True)
class Content:
    """Half-open range [start, end) of characters that a turn's content has in the rendering."""

    start: int
    end: int
    role: Role


@dataclass(frozen=True, slots=True)
class Rendering:
    """A sample as text. ``contents`` rise and don't overlap; a turn that the template drops has none."""

    text: str
    contents: tuple[Content, ...]


@dataclass(frozen=True)
class PromptFormat:
    """Strings before and after each role's content."""

    around: Mapping[Role, tuple[str, str]]

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, object], where: str) -> "PromptFormat":
        """Read SYS_START, SYS_END, USER_START …, each as it stands.

        Raises InputError naming ``where`` and the key that is missing, unknown or no string.
        """
        known = [key for keys in _FORMAT_KEYS.values() for key in keys]
        for key in [*known, *mapping]:
            if key not in known:
                raise InputError(f"{where}: unknown key {key!r}; a prompt format has {', '.join(known)}")
            if not isinstance(mapping.get(key), str):
                raise InputError(f"{where}: {key} is missing or no string; a prompt format has {', '.join(known)}")
        return cls({role: (str(mapping[start]), str(mapping[end])) for role, (start, end) in _FORMAT_KEYS.items()})

    @property
    def writes_bos(self) -> bool:
        """Whether it is the template's business to write BOS: no, the tokenizer's."""
        return False

    def literals(self) -> str:
        """All that is ever written around contents."""
        return "\n".join(part for parts in self.around.values() for part in parts)

    def jinja(self) -> str:
        """The same format as a chat template, for the exported student."""
        turns = "".join(
            f"{'if' if not number else 'elif'} message['role'] == '{role}' %}}{{{{ {_quoted(start)}"
            f" + message['content'] + {_quoted(end)} }}}}{{% "
            for number, (role, (start, end)) in enumerate(self.around.items())
        )
        prompt = _quoted(self.around["assistant"][0])
        return (
            f"{{% for message in messages %}}{{% {turns}endif %}}{{% endfor %}}"
            f"{{% if add_generation_prompt %}}{{{{ {prompt} }}}}{{% endif %}}"
        )

    def render(self, sample: Sample) -> Rendering:
        """The turns one after another."""
        text, contents = "", []
        for turn in sample.turns:
            start, end = self.around[turn.role]
            text += start
            contents.append(Content(len(text), len(text) + len(turn.content), turn.role))
            text += turn.content + end
        return Rendering(text, tuple(contents))


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _unescaped(mapping: Mapping[str, object]) -> dict[str, object]:
    """A file of the ancestor's may write backslash-n and backslash-t for the characters, as configurations do."""
    return {
        key: value.replace("\\n", "\n").replace("\\t", "\t") if isinstance(value, str) else value
        for key, value in mapping.items()
    }


@dataclass(frozen=True, slots=True)
class _Skeleton:
    """A rendering without contents: that of turn ``turns[i]`` stands between ``parts[i]`` and ``parts[i + 1]``."""

    parts: tuple[str, ...]
    turns: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class ChatTemplate:
    """The chat template of a tokenizer, rendered with that tokenizer's special tokens."""

    tokenizer: "PreTrainedTokenizerBase"
    source: str
    _skeletons: dict[tuple[Role, ...], _Skeleton] = field(default_factory=dict, init=False, repr=False)

    @classmethod
    def of(cls, tokenizer: "PreTrainedTokenizerBase", where: str) -> "ChatTemplate":
        """Take the tokenizer's template; of several, the one named default. Raises InputError if none is."""
        try:
            source = tokenizer.get_chat_template()
        except ValueError as error:
            raise InputError(f"{where}: several chat templates and none named default; set prompt_format") from error
        return cls(tokenizer, _FIXED_DATE + source if "strftime_now" in source else source)

    @property
    def writes_bos(self) -> bool:
        """Whether it is the template's business to write BOS: yes."""
        return True

    def jinja(self) -> str:
        """The template itself, for the exported student."""
        return self.source.removeprefix(_FIXED_DATE)

    def literals(self) -> str:
        """What is written around the contents of a short conversation, with and without a system turn."""
        parts: list[str] = []
        for roles in (("user", "assistant"), ("system", "user", "assistant")):
            try:
                parts += self._skeleton(roles, "chat template").parts
            except InputError:  # This template takes no such conversation; a sample that has it is refused.
                continue
        return "\n".join(parts)

    def render(self, sample: Sample) -> Rendering:
        """Apply the template and locate the contents.

        Raises InputError with the sample's file:line if the template fails, writes a content twice, or changes one by
        more than white space at its ends.
        """
        text = self._apply(sample.turns, sample.where)
        skeleton = self._skeleton(tuple(turn.role for turn in sample.turns), sample.where)
        if not text.startswith(skeleton.parts[0]):
            raise _unlocatable(sample, 0)
        position, contents = len(skeleton.parts[0]), []
        for index, part in zip(skeleton.turns, skeleton.parts[1:], strict=True):
            turn = sample.turns[index]
            ways = (turn.content, turn.content.strip(), turn.content.lstrip(), turn.content.rstrip())
            content = next((way for way in ways if text.startswith(way + part, position)), None)
            if content is None:
                raise _unlocatable(sample, index)
            contents.append(Content(position, position + len(content), turn.role))
            position += len(content) + len(part)
        if position != len(text):
            raise _unlocatable(sample, len(sample.turns) - 1)
        return Rendering(text, tuple(contents))

    def _apply(self, turns: Sequence[Turn], where: str) -> str:
        messages = [{"role": turn.role, "content": turn.content} for turn in turns]
        try:
            text = self.tokenizer.apply_chat_template(messages, chat_template=self.source, tokenize=False)
        except _TEMPLATE_ERRORS as error:
            reason = " ".join(str(error).split())
            raise InputError(f"{where}: the chat template refuses this conversation: {reason}") from error
        return str(text)

    def _skeleton(self, roles: tuple[Role, ...], where: str) -> _Skeleton:
        if roles not in self._skeletons:
            self._skeletons[roles] = self._make_skeleton(roles, where)
        return self._skeletons[roles]

    def _make_skeleton(self, roles: tuple[Role, ...], where: str) -> _Skeleton:
        markers = [f"\ue000{index}\ue001" for index in range(len(roles))]
        text = self._apply([Turn(role, marker) for role, marker in zip(roles, markers, strict=True)], where)
        for index, marker in enumerate(markers):
            if text.count(marker) > 1:
                raise InputError(
                    f"{where}: cannot locate turn {index + 1} ({roles[index]}) in the chat template, which writes it "
                    "more than once; set prompt_format"
                )
        turns = sorted((text.index(marker), index) for index, marker in enumerate(markers) if marker in text)
        parts, position = [], 0
        for start, index in turns:
            parts.append(text[position:start])
            position = start + len(markers[index])
        return _Skeleton((*parts, text[position:]), tuple(index for _, index in turns))


def _unlocatable(sample: Sample, index: int) -> InputError:
    return InputError(
        f"{sample.where}: cannot locate turn {index + 1} ({sample.turns[index].role}) in the chat template, which "
        "changes its text; set prompt_format or mend the turn"
    )


Template = PromptFormat | ChatTemplate


def resolve_template(
    prompt_format: Mapping[str, object] | None, models: Sequence[tuple[Path, "PreTrainedTokenizerBase"]]
) -> Template | None:
    """The one rendering for teacher and student: ``prompt_format`` where given, else the first that a model has.

    ``models`` are folders with their tokenizers, the student first; in each a ``prompt_format.json`` goes before the
    tokenizer's chat template. None if there is neither anywhere, which is enough for completions.
    """
    if prompt_format is not None:
        return PromptFormat.from_mapping(prompt_format, "prompt_format")
    for folder, tokenizer in models:
        path = folder / "prompt_format.json"
        if path.exists():
            return PromptFormat.from_mapping(_unescaped(read_object(path)), str(path))
        if tokenizer.chat_template:
            return ChatTemplate.of(tokenizer, str(folder))
    return None
