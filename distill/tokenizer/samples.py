"""Samples to TokenizedSamples: BOS, EOS, targets, and what happens to a sample that is longer than the context."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import numpy as np

from distill.errors import InputError
from distill.tokenizer.encode import Encoded, Encoder
from distill.tokenizer.render import Content, Rendering, Template
from distill.types import Role, Sample, Span, TokenizedSample, sample_key

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_BATCH_CHARACTERS = 1 << 20  # an encoder holds some 50 bytes for each

Fate = Literal["whole", "chunked", "truncated", "dropped", "without_target"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRules:
    """The settings that decide how samples become tokens and targets.

    add_bos: exactly one BOS at the start (True), none there (False), or as the tokenizer (completions and prompt
    formats) or the chat template does it (None). context_len: most tokens a sample may have. saved_roles: roles of
    conversations whose contents are targets; completions always are. train_turn_end: the token that ends a saved turn
    is a target too. long_samples: "auto" chunks completions and truncates conversations; "chunk" does the same.
    crop: ids from here on are refused.
    """

    context_len: int
    crop: int
    add_bos: bool | None = None
    saved_roles: frozenset[Role] = frozenset({"assistant"})
    train_turn_end: bool = True
    long_samples: Literal["auto", "chunk", "truncate", "drop"] = "auto"


@dataclass(frozen=True, slots=True, eq=False)
class TokenizedResult:
    """What became of one sample: none, one or (chunked) several pieces, and why if there is none."""

    pieces: tuple[TokenizedSample, ...]
    fate: Fate
    reason: str = ""


@dataclass(frozen=True, slots=True)
class DatasetCounts:
    """Samples read, by kind, and those of them that weren't used whole, each in one of the last four counts.

    first_without_target: file:line of the first sample that has no target, if there is one.
    """

    samples: int = 0
    completions: int = 0
    conversations: int = 0
    chunked: int = 0
    truncated: int = 0
    dropped: int = 0
    without_target: int = 0
    first_without_target: str | None = None


@dataclass(frozen=True, slots=True, eq=False)
class TokenizedDataset:
    """All pieces in the dataset's order, duplicates included, and the counts to report."""

    samples: list[TokenizedSample]
    counts: DatasetCounts


class SampleTokenizer:
    """Turns samples into token_ids, spans and targets by one tokenizer, one template and one set of rules.

    Raises InputError if add_bos asks for a BOS that the tokenizer hasn't.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", template: Template | None, rules: SampleRules) -> None:
        if rules.add_bos and tokenizer.bos_token_id is None:
            raise InputError("add_bos: the student's tokenizer has no BOS token; set it to null or false")
        self.template = template
        self.rules = rules
        self._tokenizer = tokenizer
        self._encoder = Encoder(tokenizer, template.literals() if template else "")

    def tokenize(self, sample: Sample) -> list[TokenizedSample]:
        """The sample's pieces: several for a chunked completion, none if it is dropped or has no target.

        Raises InputError with file:line for what can't be rendered, located or encoded, or has an id beyond the crop.
        """
        return list(self.explain(sample).pieces)

    def explain(self, sample: Sample) -> TokenizedResult:
        """``tokenize``, and what was done to the sample."""
        [(_, result)] = self.explain_all([sample])
        return result

    def explain_all(self, samples: Iterable[Sample]) -> Iterator[tuple[Sample, TokenizedResult]]:
        """Each sample with what was done to it, in order; encoded many at a time, which is faster.

        Raises InputError with file:line for the first bad sample, when its turn comes.
        """
        for batch in _batches(samples):
            renderings: list[Rendering] = []
            refused: InputError | None = None
            for sample in batch:
                try:
                    renderings.append(self._render(sample))
                except InputError as error:
                    refused = error
                    break
            rendered = batch[: len(renderings)]
            encoded = self._encoder.encode(renderings, [sample.where for sample in rendered])
            for sample, tokens in zip(rendered, encoded, strict=True):
                finish = self._completion if sample.is_completion else self._conversation
                yield sample, finish(sample, tokens)
            if refused is not None:
                raise refused

    def _render(self, sample: Sample) -> Rendering:
        if sample.text is not None:
            return Rendering(sample.text, (Content(0, len(sample.text), "completion"),))
        if self.template is None:
            raise InputError(
                f"{sample.where}: a conversation needs a format, and no model has a chat template; set prompt_format"
            )
        return self.template.render(sample)

    # -- conversations ------------------------------------------------------------------------------------------------

    def _conversation(self, sample: Sample, encoded: Encoded) -> TokenizedResult:
        assert self.template is not None, "it was rendered by it"
        encoded = self._with_bos(encoded, self.template)
        length, limit = len(encoded.token_ids), self.rules.context_len
        if length > limit and self.rules.long_samples == "drop":
            return self._dropped(length)
        saved = [span for span in encoded.spans if span.role in self.rules.saved_roles]
        if not saved:
            return TokenizedResult((), "without_target", "it has no turn of a role whose save_*_range is true")
        targets = [(span.start, span.end) for span in saved]
        if self.rules.train_turn_end:
            targets += self._turn_ends(encoded, saved)
        if length <= limit:
            return self._result([self._piece(sample, encoded.token_ids, encoded.spans, targets)], "whole")
        spans = tuple(replace(span, end=min(span.end, limit)) for span in encoded.spans if span.start < limit)
        return self._result([self._piece(sample, encoded.token_ids[:limit], spans, targets)], "truncated")

    def _with_bos(self, encoded: Encoded, template: Template) -> Encoded:
        """Replace the BOS tokens that the template begins with by those that ``add_bos`` asks for."""
        ids, bos = encoded.token_ids, self._encoder.bos_id
        head = ids[: encoded.spans[0].start] if encoded.spans else ids
        written = next((i for i, token_id in enumerate(head) if token_id != bos), len(head))
        wanted = self._lead()
        if self.rules.add_bos is None and written and bos is not None:
            wanted = [bos]
        elif self.rules.add_bos is None and template.writes_bos:
            wanted = []
        if wanted == ids[:written]:
            return encoded
        shift = len(wanted) - written
        spans = tuple(Span(span.start + shift, span.end + shift, span.role) for span in encoded.spans)
        return Encoded(wanted + ids[written:], spans)

    def _turn_ends(self, encoded: Encoded, saved: Sequence[Span]) -> list[tuple[int, int]]:
        """For each saved span the token after it that ends the turn: a control token, or else simply the next."""
        bos, eos, controls = self._encoder.bos_id, self._encoder.eos_id, self._encoder.control_ids
        starts = [span.start for span in encoded.spans]
        ends = []
        for span in saved:
            stop = next((start for start in starts if start >= span.end), len(encoded.token_ids))
            gap = range(span.end, stop)
            control = [position for position in gap if encoded.token_ids[position] in controls]
            # BOS begins the next turn where a template writes it before each; only as EOS does it end one.
            ending = [position for position in control if encoded.token_ids[position] != bos or bos == eos]
            ends += [(position, position + 1) for position in (ending or control or list(gap))[:1]]
        return ends

    # -- completions --------------------------------------------------------------------------------------------------

    def _completion(self, sample: Sample, encoded: Encoded) -> TokenizedResult:
        content = encoded.token_ids
        end = [] if self._encoder.eos_id is None else [self._encoder.eos_id]
        lead, limit = self._lead(), self.rules.context_len
        length = len(lead) + len(content) + len(end)
        if length <= limit:
            return self._result([self._completion_piece(sample, lead, content, end)], "whole")
        if self.rules.long_samples == "drop":
            return self._dropped(length)
        if self.rules.long_samples == "truncate" or len(lead) >= limit:
            return self._result(
                [self._completion_piece(sample, lead, content[: max(limit - len(lead), 0)], [])], "truncated"
            )
        return self._result(self._cut(sample, lead, content, end), "chunked")

    def _cut(self, sample: Sample, lead: list[int], content: list[int], end: list[int]) -> list[TokenizedSample | None]:
        """Pieces of context_len tokens, each after the lead or, without one, after the last token of the one before."""
        body = content + end
        overlap = 0 if lead else 1
        step = self.rules.context_len - len(lead) - overlap
        starts = list(range(overlap, len(body), step))
        if end and len(body) - starts[-1] == 1 and step > 1:
            starts[-1] -= 1  # The end of a text is not to be learned from nothing but a BOS before it.
        pieces = []
        for start, stop in zip(starts, [*starts[1:], len(body)], strict=True):
            is_last = stop == len(body)
            inner = body[start - overlap : stop - len(end) if is_last else stop]
            pieces.append(self._completion_piece(sample, lead, inner, end if is_last else []))
        return pieces

    def _completion_piece(
        self, sample: Sample, lead: list[int], content: list[int], end: list[int]
    ) -> TokenizedSample | None:
        ids = lead + content + end
        span = Span(len(lead), len(lead) + len(content), "completion")
        stop = len(ids) if self.rules.train_turn_end else span.end
        return self._piece(sample, ids, (span,) if content else (), [(span.start, stop)])

    # -- both ---------------------------------------------------------------------------------------------------------

    def _lead(self) -> list[int]:
        """What stands before a text that has no BOS of its own."""
        if self.rules.add_bos is None:
            return list(self._encoder.prefix)
        bos = self._encoder.bos_id
        return [bos] if self.rules.add_bos and bos is not None else []

    def _piece(
        self, sample: Sample, ids: list[int], spans: tuple[Span, ...], wanted: list[tuple[int, int]]
    ) -> TokenizedSample | None:
        """Freeze one piece, with the positions in the half-open ranges ``wanted`` as targets.

        Positions beyond the piece, and the first, which nothing predicts, are none.
        """
        token_ids = np.array(ids, dtype=np.int32)
        is_target = np.zeros(len(ids), dtype=bool)
        for start, stop in wanted:
            is_target[start:stop] = True
        is_target[:1] = False
        targets = np.flatnonzero(is_target).astype(np.int32)
        if not len(targets):
            return None
        highest = int(token_ids.max())
        if highest >= self.rules.crop:
            token = self._tokenizer.convert_ids_to_tokens(highest)
            raise InputError(
                f"{sample.where}: token {highest} ({token!r}) is in the text, but ids from {self.rules.crop} on are "
                "cropped; take it out, or take models that share it"
            )
        return TokenizedSample(sample.where, sample.is_completion, token_ids, spans, targets, sample_key(token_ids))

    def _result(self, pieces: Sequence[TokenizedSample | None], fate: Fate) -> TokenizedResult:
        with_target = tuple(piece for piece in pieces if piece is not None)
        if with_target:
            return TokenizedResult(with_target, fate)
        limit = self.rules.context_len
        reason = f"context_len {limit} ends before it; raise it" if fate == "truncated" else "no token to predict"
        return TokenizedResult((), "without_target", reason)

    def _dropped(self, length: int) -> TokenizedResult:
        limit = self.rules.context_len
        return TokenizedResult((), "dropped", f"{length} tokens, context_len is {limit} and long_samples drops those")


def tokenize_dataset(samples: Iterable[Sample], sample_tokenizer: SampleTokenizer) -> TokenizedDataset:
    """Tokenize all samples and count what became of them.

    Raises InputError for the first bad sample, and if no sample at all has a target.
    """
    pieces: list[TokenizedSample] = []
    fates: dict[Fate, int] = dict.fromkeys(("whole", "chunked", "truncated", "dropped", "without_target"), 0)
    completions = 0
    first_unused = first_without_target = None
    for sample, result in sample_tokenizer.explain_all(samples):
        pieces += result.pieces
        fates[result.fate] += 1
        completions += sample.is_completion
        if not result.pieces:
            first_unused = first_unused or f"{sample.where}: {result.reason}"
        if result.fate == "without_target":
            first_without_target = first_without_target or sample.where
    if not pieces:
        raise InputError(f"no sample has a target: {first_unused or 'the dataset is empty'}")
    total = sum(fates.values())
    counts = DatasetCounts(
        samples=total,
        completions=completions,
        conversations=total - completions,
        chunked=fates["chunked"],
        truncated=fates["truncated"],
        dropped=fates["dropped"],
        without_target=fates["without_target"],
        first_without_target=first_without_target,
    )
    return TokenizedDataset(pieces, counts)


def _batches(samples: Iterable[Sample]) -> Iterator[list[Sample]]:
    """Samples that are short together, or one that is not."""
    batch: list[Sample] = []
    size = 0
    for sample in samples:
        batch.append(sample)
        size += len(sample.text or "") + sum(len(turn.content) for turn in sample.turns)
        if size >= _BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
