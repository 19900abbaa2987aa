"""Text to tokens, and the contents' characters to spans of tokens.

Control tokens count as such only where the template wrote them. To have that by construction, samples are encoded by a
copy of the tokenizer in which every control token goes by a private name of the same length: in the template's part of
a text they are renamed too, in contents they aren't, and so are plain text there. Ids and offsets stay what they were.
"""

import json
import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from distill.errors import InputError
from distill.tokenizer.render import Content, Rendering
from distill.types import Span

if TYPE_CHECKING:
    from tokenizers import Encoding, Tokenizer
    from transformers import PreTrainedTokenizerBase

# Private names are made of characters from the private use plane 16, far from the few that fonts have taken there.
_FIRST_PRIVATE = 0x104000
_START, _END = itemgetter(0), itemgetter(1)


@dataclass(frozen=True, slots=True)
class Encoded:
    """token_ids of a whole rendering, and the spans of its contents: rising, not overlapping, none empty."""

    token_ids: list[int]
    spans: tuple[Span, ...]


class Encoder:
    """Encodes renderings with a tokenizer, adding nothing: no BOS, no EOS, no truncation, no padding.

    ``control_ids``: ids of the special tokens (but the unknown token, which stands for text) and of other added tokens
    that the template writes. ``bos_id``, ``eos_id``: those of the tokenizer. ``prefix``: ids that the tokenizer by
    itself puts before a text.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", template_text: str) -> None:
        added = tokenizer.added_tokens_decoder
        self._ids = {
            token.content: token_id
            for token_id, token in added.items()
            if token.special or (token.content.strip() and token.content in template_text)
        }
        self._names = names = {token: chr(_FIRST_PRIVATE + i) * len(token) for i, token in enumerate(self._ids)}
        longest_first = sorted(names, key=len, reverse=True)
        self._controls = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        self._private = re.compile(f"[{''.join(name[0] for name in names.values())}]" if names else "(?!)")
        self._backend = _with_names(tokenizer.backend_tokenizer, names)
        assert all(self._backend.token_to_id(names.get(t.content, t.content)) == i for i, t in added.items())
        self.bos_id: int | None = tokenizer.bos_token_id
        self.eos_id: int | None = tokenizer.eos_token_id
        self.control_ids = frozenset(self._ids.values()) - ({tokenizer.unk_token_id} - {self.bos_id, self.eos_id})
        self.prefix = _prefix(tokenizer)

    def encode(self, renderings: Sequence[Rendering], wheres: Sequence[str]) -> Iterator[Encoded]:
        """Tokens and spans of each rendering, all encoded in one call; a completion is a rendering that is all content.

        Raises InputError with file:line, when its turn comes, for the first rendering with a token that is part of a
        content and of something else than white space, or with a character that control tokens are renamed to.
        """
        controls = [self._find_controls(rendering) for rendering in renderings]
        texts = [self._renamed(rendering.text, found) for rendering, found in zip(renderings, controls, strict=True)]
        encodings = self._backend.encode_batch(texts, add_special_tokens=False)
        for rendering, where, found, encoding in zip(renderings, wheres, controls, encodings, strict=True):
            private = None if rendering.text.isascii() else self._private.search(rendering.text)
            if private:
                character = f"U+{ord(private[0]):X}"
                raise InputError(f"{where}: the private character {character} can't be used in a text; replace it")
            yield _located(rendering, *self._settled(rendering.text, found, encoding), where)

    def _settled(
        self, text: str, controls: list[re.Match[str]], encoding: "Encoding"
    ) -> tuple[list[int], list[tuple[int, int]]]:
        """token_ids and their offsets, once each renamed control token was read as the one token that it is."""
        while True:
            ids, offsets = encoding.ids, encoding.offsets
            at = [bisect_right(offsets, control.start(), key=_END) for control in controls]
            read = [
                control
                for control, i in zip(controls, at, strict=True)
                if i < len(ids) and ids[i] == self._ids[control[0]]
            ]
            if len(read) == len(controls):
                return ids, offsets
            # By its flags (single_word, normalized) this tokenizer reads some of them as plain text: so do we.
            controls = read
            encoding = self._backend.encode(self._renamed(text, controls), add_special_tokens=False)

    def _renamed(self, text: str, controls: list[re.Match[str]]) -> str:
        pieces, position = [], 0
        for control in controls:
            pieces += [text[position : control.start()], self._names[control[0]]]
            position = control.end()
        return "".join(pieces) + text[position:]

    def _find_controls(self, rendering: Rendering) -> list[re.Match[str]]:
        starts = [0, *(content.end for content in rendering.contents)]
        ends = [*(content.start for content in rendering.contents), len(rendering.text)]
        gaps = zip(starts, ends, strict=True)
        return [match for start, end in gaps for match in self._controls.finditer(rendering.text, start, end)]


def _prefix(tokenizer: "PreTrainedTokenizerBase") -> tuple[int, ...]:
    encoding = tokenizer.backend_tokenizer.encode("a", add_special_tokens=True)
    own = takewhile(lambda pair: pair[1] is None, zip(encoding.ids, encoding.sequence_ids, strict=True))
    prefix = tuple(token_id for token_id, _ in own)
    return prefix if len(prefix) < len(encoding.ids) else ()


def _with_names(backend: "Tokenizer", names: dict[str, str]) -> "Tokenizer":
    """A copy of ``backend`` with control tokens renamed; it keeps honest offsets and adds, cuts and drops nothing."""
    from tokenizers import Tokenizer

    state: dict[str, Any] = json.loads(backend.to_str())
    # Post-processors add BOS and EOS, and the byte-level one trims white space off the offsets.
    state["post_processor"] = state["truncation"] = state["padding"] = None
    for token in state["added_tokens"]:
        token["content"] = names.get(token["content"], token["content"])
    model = state["model"]
    if "dropout" in model:
        model["dropout"] = None
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    if isinstance(model["vocab"], dict):
        model["vocab"] = {names.get(token, token): token_id for token, token_id in model["vocab"].items()}
    else:
        model["vocab"] = [[names.get(token, token), score] for token, score in model["vocab"]]
    if "merges" in model:
        model["merges"] = [pair for pair in model["merges"] if not _merges_to_control(pair, names)]
    return Tokenizer.from_str(json.dumps(state))


def _merges_to_control(pair: Sequence[str], names: dict[str, str]) -> bool:
    return pair[0] in names or pair[1] in names or pair[0] + pair[1] in names


def _located(rendering: Rendering, ids: list[int], offsets: list[tuple[int, int]], where: str) -> Encoded:
    spans: list[Span] = []
    for content in rendering.contents:
        span = _span(rendering.text, offsets, content, where)
        if span is None:
            continue
        if spans and span.start < spans[-1].end:
            raise _shared(where, content, rendering.text[slice(*offsets[span.start])])
        spans.append(span)
    return Encoded(ids, tuple(spans))


def _span(text: str, offsets: list[tuple[int, int]], content: Content, where: str) -> Span | None:
    """The tokens that cover a content; None if the tokenizer leaves nothing of it. Offsets rise, start and end."""
    first = bisect_right(offsets, content.start, key=_END)
    stop = bisect_left(offsets, content.end, key=_START)
    if first >= stop:
        return None
    start, end = offsets[first][0], offsets[stop - 1][1]
    template_part = text[start : content.start] + text[content.end : end]
    if template_part.strip():
        raise _shared(where, content, text[start:end] if stop - first == 1 else template_part)
    return Span(first, stop, content.role)


def _shared(where: str, content: Content, piece: str) -> InputError:
    return InputError(
        f"{where}: a token takes in both the {content.role} turn and the template's text around it (near {piece!r}); "
        "put white space or a control token between them in prompt_format"
    )
