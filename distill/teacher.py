"""A teacher on its device: batches of token_ids to records, at target positions only.

No [batch, length, vocabulary] tensor exists: the body's hidden states are gathered at the positions that predict
targets, and the head is applied to pieces of those rows. Statistics are float32.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
import torch
from torch import Tensor

from distill.collate import TokenBatch, collate
from distill.errors import InputError, MachineError
from distill.head import UNKNOWN_HEAD, Head, hidden_states, verified_head
from distill.models import load_causal_lm
from distill.types import Records, TokenizedSample

# Bytes of one piece of float32 logits; small enough to stay near the cache, large enough for full-speed products.
_PIECE_BYTES = 32 << 20


@dataclass(frozen=True, slots=True)
class TeacherSpec:
    """How to load a teacher; crosses into the worker processes. ``vocab_size`` is the crop."""

    folder: Path
    dtype: str
    device: str
    vocab_size: int
    top_k: int
    trust_remote_code: bool


@dataclass(frozen=True, slots=True, eq=False)
class TopK:
    """Statistics of n target rows.

    ids int64 [n, K] and logprobs float32 [n, K] by falling logprob, ties by id; tail_logprobs, label_logprobs and
    entropies float32 [n].
    """

    ids: Tensor
    logprobs: Tensor
    tail_logprobs: Tensor
    label_logprobs: Tensor
    entropies: Tensor

    @classmethod
    def cat(cls, parts: Sequence[Self]) -> Self:
        """The rows of ``parts`` one after the other."""
        names = ("ids", "logprobs", "tail_logprobs", "label_logprobs", "entropies")
        return cls(*(torch.cat([getattr(part, name) for part in parts]) for name in names))


def top_k_statistics(logits: Tensor, labels: Tensor, k: int) -> TopK:
    """Top-K logprobs, the log of the rest, the label's logprob and the entropy of float32 ``logits`` [n, V].

    ``logits`` is overwritten. The tail is logsumexp over the rest itself, never 1 minus the kept mass, which would
    have no digits left where the teacher is sure.
    """
    label_logits = logits.gather(1, labels[:, None]).squeeze(1)
    values, ids = _sorted_top_k(logits, k)
    largest = values[:, :1]
    # Suppressed tokens (-inf) have weight 0 and add nothing to the entropy: 0 * -inf would be NaN.
    shifted = (logits - largest).clamp_min_(-1e30)
    weights = shifted.exp()
    total = weights.sum(1)
    entropies = total.log() - torch.linalg.vecdot(weights, shifted) / total
    normaliser = largest.squeeze(1) + total.log()
    logits.scatter_(1, ids, -torch.inf)
    rest = logits.logsumexp(1) if k < logits.shape[1] else torch.full_like(total, -torch.inf)
    return TopK(
        ids=ids,
        logprobs=values - normaliser[:, None],
        tail_logprobs=(rest - normaliser).clamp_max_(0.0),
        label_logprobs=label_logits - normaliser,
        entropies=entropies.clamp_min_(0.0),
    )


class Teacher:
    """A loaded teacher. ``note`` is a line for the user if its head had to be run in the model's own way."""

    def __init__(self, spec: TeacherSpec) -> None:
        self.spec = spec
        self._model = load_causal_lm(
            spec.folder, dtype=spec.dtype, device=spec.device, trust_remote_code=spec.trust_remote_code
        )
        probe = torch.arange(8, device=spec.device)[None] % spec.vocab_size
        self._head = verified_head(self._model, spec.vocab_size, probe)
        self.note = None if self._head else f"{spec.folder.name}: {UNKNOWN_HEAD}"

    @torch.inference_mode()
    def records(self, samples: Sequence[TokenizedSample]) -> list[Records]:
        """The records of each sample's targets; the samples form one right-padded batch."""
        try:
            parts = self._forward(samples, self._head) if self._head else self._forward_own(samples)
        except torch.cuda.OutOfMemoryError as error:
            raise MachineError("the teacher ran out of GPU memory; lower collect_tokens_per_batch") from error
        top_k = TopK.cat(parts)
        if not bool(torch.isfinite(top_k.entropies).all()):
            raise InputError(
                f"{self.spec.folder}: the teacher's logits are not finite at {samples[0].where} or in its batch;"
                f" try another teacher_dtype than {self.spec.dtype}"
            )
        return _split(top_k, [len(sample.targets) for sample in samples])

    def _forward(self, samples: Sequence[TokenizedSample], head: Head) -> list[TopK]:
        batch = collate(samples).to(self.spec.device)
        hidden = hidden_states(self._model, batch.token_ids).flatten(0, 1)[batch.predict_rows]
        return [
            top_k_statistics(head.logits(hidden[piece]), batch.labels[piece], self.spec.top_k)
            for piece in self._pieces(len(batch.labels))
        ]

    def _forward_own(self, samples: Sequence[TokenizedSample]) -> list[TopK]:
        """One sample at a time through the model's own head, for models whose head ``head.py`` doesn't know."""
        parts = []
        for sample in samples:
            batch: TokenBatch = collate([sample]).to(self.spec.device)
            logits = self._model(input_ids=batch.token_ids, use_cache=False).logits[0, :, : self.spec.vocab_size]
            parts += [
                top_k_statistics(logits[batch.predict_rows[piece]].float(), batch.labels[piece], self.spec.top_k)
                for piece in self._pieces(len(batch.labels))
            ]
        return parts

    def _pieces(self, rows: int) -> list[slice]:
        step = max(1, _PIECE_BYTES // (4 * self.spec.vocab_size))
        return [slice(start, start + step) for start in range(0, rows, step)]


def _sorted_top_k(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    values, ids = logits.topk(k, dim=1, sorted=False)
    # Equal values are ordered by id: sort by id first, then stably by value.
    ids, order = ids.sort(dim=1)
    values, order = values.gather(1, order).sort(dim=1, descending=True, stable=True)
    return values, ids.gather(1, order)


def _split(top_k: TopK, counts: Sequence[int]) -> list[Records]:
    """Ragged records a sample; entries of zero mass (-inf) are not kept."""
    ids, logprobs = top_k.ids.cpu().numpy(), top_k.logprobs.cpu().numpy()
    tails, labels, entropies = (
        part.cpu().numpy() for part in (top_k.tail_logprobs, top_k.label_logprobs, top_k.entropies)
    )
    kept = np.isfinite(logprobs)
    ends = np.cumsum(counts)
    records = []
    for start, end in zip(ends - counts, ends, strict=True):
        mask = kept[start:end]
        records.append(
            Records(
                entry_counts=mask.sum(1, dtype=np.int64),
                entry_ids=ids[start:end][mask],
                entry_logprobs=logprobs[start:end][mask],
                tail_logprobs=tails[start:end],
                label_logprobs=labels[start:end],
                entropies=entropies[start:end],
            )
        )
    return records
