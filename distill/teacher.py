"""A teacher on its device: batches of token_ids to records, at target positions only.

No [batch, length, vocabulary] tensor exists: the body's hidden states are gathered at the positions that predict
targets, and the head is applied to pieces of those rows. Statistics are float32.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import numpy as np
import torch
from torch import Tensor
from transformers import Cache, DynamicCache

from distill.collate import collate
from distill.errors import InputError
from distill.head import NOT_CAUSAL, UNKNOWN_HEAD, hidden_states, is_causal, own_logits, runs_in_chunks, verified_head
from distill.models import load_causal_lm, torch_dtype
from distill.placement import Placement
from distill.types import Records, TokenizedSample

# Bytes of a piece of float32 logits that one product makes: large enough for a product at full speed.
_PIECE_BYTES = 64 << 20
_GPU_PIECE_BYTES = 512 << 20
# Bytes of it that the statistics are taken of at a time on a CPU: its caches still hold them from one pass to the next.
_SLICE_BYTES = 3 << 19
# Below any logprob, and finite: a weight of zero times this is zero.
_LOWEST = -1e30


@dataclass(frozen=True, slots=True)
class TeacherSpec:
    """How to load a teacher; crosses into the worker processes. ``vocab_size`` is the crop.

    top_k: entries a record; vocab_size of them are the whole distribution. head_dtype: the type that the head's product
    is computed in; "auto" is ``dtype``. seq_chunk_len: samples longer than this are run in chunks of it. max_memory:
    bytes it may take by GPU index, see ``placement``. attention: one of transformers' kinds; None takes its choice.
    """

    folder: Path
    dtype: str
    device: str
    vocab_size: int
    top_k: int
    trust_remote_code: bool
    head_dtype: str = "auto"
    seq_chunk_len: int | None = None
    max_memory: tuple[tuple[int, int], ...] = ()
    attention: str | None = None

    def on(self, placement: Placement) -> Self:
        """The same teacher where ``placement`` says."""
        return replace(self, device=placement.device, max_memory=placement.max_memory)


@dataclass(frozen=True, slots=True, eq=False)
class TopK:
    """Statistics of n target rows.

    ids int64 [n, K] and logprobs float32 [n, K], the likeliest first; tail_logprobs, label_logprobs and entropies
    float32 [n].
    """

    ids: Tensor
    logprobs: Tensor
    tail_logprobs: Tensor
    label_logprobs: Tensor
    entropies: Tensor

    @classmethod
    def cat(cls, parts: Sequence[Self]) -> Self:
        """The rows of ``parts`` one after the other."""
        return cls(*(torch.cat(tensors) for tensors in zip(*(part._tensors() for part in parts), strict=True)))

    def rows(self, index: Tensor) -> Self:
        """The rows of ``index`` int64 [m]."""
        return type(self)(*(tensor[index.to(tensor.device)] for tensor in self._tensors()))

    def cpu(self) -> Self:
        """The same in main memory; waits for the device if it isn't there yet."""
        return type(self)(*(tensor.cpu() for tensor in self._tensors()))

    def _tensors(self) -> tuple[Tensor, ...]:
        return self.ids, self.logprobs, self.tail_logprobs, self.label_logprobs, self.entropies


# --- Statistics -----------------------------------------------------------------------------------------------------


def top_k_statistics(logits: Tensor, labels: Tensor, k: int, scratch: Tensor | None = None) -> TopK:
    """Top-K logprobs, the log of the rest, the label's logprob and the entropy of float32 ``logits`` [n, V].

    ``labels`` int64 [n]. ``logits`` and ``scratch``, float32 [>= n, V], are overwritten. Entries are by falling
    logprob, ties by id, at the cut as well; with k = V they are by id, but for the likeliest, which has changed places
    with the first. The tail is logsumexp over the rest itself, never 1 minus the kept mass, which would have no digits
    left where the teacher is sure.
    """
    if k == logits.shape[1]:
        return _full_statistics(logits, labels)
    label_logits = logits.gather(1, labels[:, None]).squeeze(1)
    values, ids, largest_rest = _likeliest(logits, k)
    largest = values[:, :1]
    # Suppressed tokens (-inf) have weight 0 and add nothing to the entropy: 0 * -inf would be NaN.
    kept = (values - largest).clamp_min_(_LOWEST)
    kept_weights = kept.exp()
    reference = largest_rest.clamp_min(_LOWEST)
    rest = logits.scatter_(1, ids, -torch.inf).sub_(reference).clamp_min_(_LOWEST)
    rest_weights = rest.exp() if scratch is None else torch.exp(rest, out=scratch[: len(rest)])
    rest_total, distance = rest_weights.sum(1), (reference - largest).squeeze(1)
    # Sums of w and w * log w over all V tokens, w relative to the likeliest one.
    total = kept_weights.sum(1) + distance.exp() * rest_total
    mean = torch.linalg.vecdot(kept_weights, kept)
    mean += distance.exp() * (torch.linalg.vecdot(rest_weights, rest) + distance * rest_total)
    normaliser = largest.squeeze(1) + total.log()
    return TopK(
        ids=ids,
        logprobs=values - normaliser[:, None],
        tail_logprobs=(reference.squeeze(1) + rest_total.log() - normaliser).clamp_max_(0.0),
        label_logprobs=label_logits - normaliser,
        entropies=(total.log() - mean / total).clamp_min_(0.0),
    )


def _full_statistics(logits: Tensor, labels: Tensor) -> TopK:
    """The whole distribution: nothing to choose, so nothing is sorted."""
    logprobs = logits.sub_(logits.logsumexp(1, keepdim=True))
    label_logprobs = logprobs.gather(1, labels[:, None]).squeeze(1)
    entropies = -torch.linalg.vecdot(logprobs.exp(), logprobs.clamp_min(_LOWEST))
    ids = torch.arange(logits.shape[1], device=logits.device).repeat(len(logits), 1)
    largest, first = logprobs.max(1, keepdim=True)
    for tensor, value in ((logprobs, largest), (ids, first)):
        tensor.scatter_(1, first, tensor[:, :1].clone())
        tensor[:, :1] = value
    return TopK(
        ids, logprobs.clone(), torch.full_like(entropies, -torch.inf), label_logprobs, entropies.clamp_min_(0.0)
    )


def _likeliest(logits: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """The k largest values [n, k] and their ids, by falling value and then by id, and the largest of the rest [n, 1].

    Of equal values at the cut the lowest ids are kept. k < V.
    """
    ids = _candidates(logits, k + 1)
    ids = ids.gather(1, _order(logits.gather(1, ids), ids, k + 1))
    values = logits.gather(1, ids)
    cut, following = values[:, k - 1 : k], values[:, k:]
    ids = ids[:, :k]
    # Equals of the cut may stand outside of the candidates as well.
    tied = ((cut == following) & values[:, :1].isfinite()).squeeze(1)
    if bool(tied.any()):
        chosen = _ids_to_the_cut(logits[tied], cut[tied], k)
        ids[tied] = chosen.gather(1, _order(logits[tied].gather(1, chosen), chosen, k))
    return logits.gather(1, ids), ids, following


def _candidates(logits: Tensor, k: int) -> Tensor:
    """Ids int64 [n, >= k] among which k largest values are: all of the k blocks that have the largest maxima.

    A block is every ``width``-th token, so that the maxima are elementwise operations on whole rows. Blocks of
    sqrt(V / k) tokens leave the fewest numbers to look at twice.
    """
    rows, vocab_size = logits.shape
    size = math.isqrt(vocab_size // k)
    width = vocab_size // size
    left_over = torch.arange(size * width, vocab_size, device=logits.device).expand(rows, -1)
    maxima = logits[:, : size * width].unflatten(1, (size, width)).amax(1)
    blocks = maxima.topk(k, dim=1, sorted=False).indices
    members = width * torch.arange(size, device=logits.device)
    return torch.cat([(blocks[:, None] + members[:, None]).flatten(1), left_over], dim=1)


def _order(values: Tensor, ids: Tensor, k: int) -> Tensor:
    """The places [n, k] of the k largest of ``values`` float32 [n, m], by falling value and then by id.

    Both in one integer: a float's bits, those of a negative one turned round, are in the order of the floats.
    """
    bits = (values + 0.0).view(torch.int32)  # -0.0 becomes 0.0
    rising = bits ^ ((bits >> 31) & 0x7FFF_FFFF)
    return ((rising.long() << 32) - ids).topk(k, dim=1).indices


def _ids_to_the_cut(logits: Tensor, cut: Tensor, k: int) -> Tensor:
    """The ids [n, k] of all values above ``cut`` [n, 1] and of as many equal to it, lowest ids first, as make k."""
    above, equal = logits > cut, logits == cut
    wanted = k - above.sum(1, keepdim=True)
    chosen = above | (equal & (equal.cumsum(1) <= wanted))
    return chosen.nonzero()[:, 1].view(len(logits), k)


# --- The teacher ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Scored:
    """The statistics of some samples' targets, perhaps still being made on their device."""

    samples: tuple[TokenizedSample, ...]
    top_k: TopK
    spec: TeacherSpec

    def records(self) -> list[Records]:
        """The records of each sample. Raises InputError if the teacher's logits weren't finite."""
        top_k = self.top_k.cpu()
        if not bool(torch.isfinite(top_k.entropies).all()):
            raise InputError(
                f"{self.spec.folder}: the teacher's logits are not finite at {self.samples[0].where} or in its batch;"
                f" try another teacher_dtype than {self.spec.dtype}"
            )
        return _split(top_k, [len(sample.targets) for sample in self.samples])


class Teacher:
    """A loaded teacher. ``notes`` are lines for the user on what isn't done as it is usually done or was asked for."""

    def __init__(self, spec: TeacherSpec) -> None:
        self.spec = spec
        _limit_memory(spec.max_memory)
        self._model = load_causal_lm(
            spec.folder,
            dtype=spec.dtype,
            device=spec.device,
            trust_remote_code=spec.trust_remote_code,
            quantised=True,
            max_memory=dict(spec.max_memory),
            attention=spec.attention,
        )
        self._probe = torch.arange(8, device=spec.device)[None] % spec.vocab_size
        if not is_causal(self._model, self._probe):
            raise InputError(f"{spec.folder}: {type(self._model).__name__} {NOT_CAUSAL}")
        self._head = verified_head(self._model, spec.vocab_size, self._probe)
        notes = []
        if self._head is None:
            notes.append(UNKNOWN_HEAD if spec.head_dtype == "auto" else f"{UNKNOWN_HEAD}; head_dtype has no effect")
        elif spec.head_dtype != "auto":
            self._head = self._head.in_dtype(torch_dtype(spec.head_dtype))
        self._chunk_len = spec.seq_chunk_len
        if self._chunk_len is not None and not self.can_chunk():
            notes.append("seq_chunk_len has no effect: this architecture can't be run in chunks")
            self._chunk_len = None
        self.notes = tuple(f"{spec.folder.name}: {note}" for note in notes)
        # Memory that is written anew for each piece, and for each slice of one.
        self._buffer: Tensor | None = None
        self._scratch: Tensor | None = None

    def can_chunk(self) -> bool:
        """Whether long samples can be run in chunks."""
        return runs_in_chunks(self._model, self._probe)

    def free_memory(self) -> None:
        """Gives back to the device what no teacher needs between two batches."""
        self._buffer = self._scratch = None
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def records(self, samples: Sequence[TokenizedSample]) -> list[Records]:
        """The records of each sample's targets; the samples form one right-padded batch."""
        return self.score(samples).records()

    @torch.inference_mode()
    def score(self, samples: Sequence[TokenizedSample], chunk_len: int | None = None) -> Scored:
        """The same, without waiting for the device to finish. ``chunk_len`` in place of the spec's, if it is smaller.

        Runs out of memory with whatever torch raises then.
        """
        lengths = [length for length in (chunk_len, self._chunk_len) if length is not None]
        # A model's own head makes logits of all positions: one sample at a time is enough of them.
        batches = [samples] if self._head else [[sample] for sample in samples]
        parts = [self._score_batch(batch, min(lengths, default=None)) for batch in batches]
        return Scored(tuple(samples), TopK.cat(parts), self.spec)

    def _score_batch(self, samples: Sequence[TokenizedSample], chunk_len: int | None) -> TopK:
        batch = collate(samples)
        length = batch.token_ids.shape[1]
        rows, columns = batch.predict_rows // length, batch.predict_rows % length
        length = int(columns.max()) + 1  # what comes later predicts nothing
        step = chunk_len or length
        cache = DynamicCache(config=self._model.config.get_text_config()) if step < length else None
        parts, order = [], []
        for start in range(0, length, step):
            token_ids = batch.token_ids[:, start : min(start + step, length)].to(self.spec.device)
            outputs = self._outputs(token_ids, cache).flatten(0, 1)
            inside = ((columns >= start) & (columns < start + step)).nonzero().squeeze(1)
            places = rows[inside] * token_ids.shape[1] + columns[inside] - start
            parts += self._statistics(outputs[places.to(outputs.device)], batch.labels[inside])
            order.append(inside)
        top_k = TopK.cat(parts)
        return top_k if len(order) == 1 else top_k.rows(torch.cat(order).argsort())

    def _outputs(self, token_ids: Tensor, cache: Cache | None) -> Tensor:
        """Hidden states [B, L, H], or logits [B, L, V] if the model's own head has to make them."""
        if self._head:
            return hidden_states(self._model, token_ids, cache)
        return own_logits(self._model, token_ids, cache)[..., : self.spec.vocab_size]

    def _statistics(self, outputs: Tensor, labels: Tensor) -> list[TopK]:
        """Statistics of rows of :meth:`_outputs` [n, H or V] and their labels int64 [n], in pieces."""
        piece_rows = self._rows_of(_PIECE_BYTES if outputs.device.type == "cpu" else _GPU_PIECE_BYTES)
        parts = []
        for start in range(0, len(outputs), piece_rows):
            logits = self._logits(outputs[start : start + piece_rows], piece_rows)
            piece_labels = labels[start : start + piece_rows].to(logits.device)
            slice_rows = min(piece_rows, self._rows_of(_SLICE_BYTES)) if logits.device.type == "cpu" else piece_rows
            if self._scratch is None:
                self._scratch = logits.new_empty(slice_rows, self.spec.vocab_size)
            parts += [
                top_k_statistics(part, part_labels, self.spec.top_k, self._scratch)
                for part, part_labels in zip(logits.split(slice_rows), piece_labels.split(slice_rows), strict=True)
            ]
        return parts

    def _logits(self, outputs: Tensor, piece_rows: int) -> Tensor:
        if self._head is None:
            return outputs.float()
        if self._buffer is None:
            self._buffer = self._head.weight.new_empty(piece_rows, self.spec.vocab_size, dtype=torch.float32)
        return self._head.logits_into(self._buffer, outputs)

    def _rows_of(self, size: int) -> int:
        return max(1, size // (4 * self.spec.vocab_size))


def _limit_memory(max_memory: Sequence[tuple[int, int]]) -> None:
    """Keeps torch from taking more of a GPU than was said: what is reserved stays free, and too large a batch fails."""
    for index, size in max_memory:
        total = torch.cuda.get_device_properties(index).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, size / total), index)


def _split(top_k: TopK, counts: Sequence[int]) -> list[Records]:
    """Ragged records a sample; entries of zero mass (-inf) are not kept."""
    ids, logprobs, tails, labels, entropies = (tensor.numpy() for tensor in top_k._tensors())
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
