"""Divergences between a teacher's sparse record and a student, as pure functions of a few numbers a target.

A record knows K ids and the mass of all others together, so a loss over these K + 1 outcomes sees the student only
through its logits at the K ids, the logsumexp of its logits everywhere else, and its logit of the real token. That is
what :class:`StudentScores` holds, and why a loss is a small function here while the work on [targets, vocabulary]
numbers is done once, for all losses, in ``fused.py``.

A loss takes scores and targets and returns float32 [N], one value a target, in nats; whoever calls it sums, and divides
once by the number of targets of the optimizer step. Gradients come by autograd. Values and gradients are finite
whenever the student gives every kept id a finite logit.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True, slots=True, eq=False)
class SparseTargets:
    """What N targets are trained towards.

    labels: int64 [N], the real tokens. entry_ids: int64 [N, K]. entry_logprobs: float32 [N, K], natural logs at
    temperature 1; -inf marks what isn't an entry (padding repeats the row's first id). Each row's first is an entry.
    tail_logprobs: float32 [N], log of the mass outside the entries, -inf if there is none.
    """

    labels: Tensor
    entry_ids: Tensor
    entry_logprobs: Tensor
    tail_logprobs: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, rows: slice) -> "SparseTargets":
        return SparseTargets(
            self.labels[rows], self.entry_ids[rows], self.entry_logprobs[rows], self.tail_logprobs[rows]
        )

    @property
    def is_entry(self) -> Tensor:
        """bool [N, K]."""
        return self.entry_logprobs > -torch.inf

    @property
    def kept_ids(self) -> Tensor:
        """int64 [N, K]: entry_ids, where whatever isn't an entry repeats its row's first id."""
        return torch.where(self.is_entry, self.entry_ids, self.entry_ids[:, :1])


@dataclass(frozen=True, slots=True, eq=False)
class StudentScores:
    """What losses see of the student's logits z.

    kept_logits: [N, K], z at ``targets.kept_ids``. rest_lse: [N], logsumexp of z over all ids that aren't entries, -inf
    if there are none. label_logits: [N], z at the real token. Any floating dtype: losses compute in float32.
    """

    kept_logits: Tensor
    rest_lse: Tensor
    label_logits: Tensor


LossFunction = Callable[[StudentScores, SparseTargets], Tensor]


class Divergence(Protocol):
    """An entry of :data:`LOSSES`: a loss whose temperature isn't chosen yet."""

    def __call__(self, scores: StudentScores, targets: SparseTargets, *, temperature: float) -> Tensor:
        """Float32 [N], nats."""


def kl(scores: StudentScores, targets: SparseTargets, *, temperature: float = 1.0) -> Tensor:
    """KL(teacher || student) over K + 1 outcomes, the temperature acting inside the kept ids only.

    KL(Bern(m_t) || Bern(m_s)) + m_t T^2 KL(softmax_K(z_t / T) || softmax_K(z_s / T)), m = mass of the kept ids: the
    decoupled top-K of LFM2 (arXiv 2511.23404). By the chain rule it is, at T = 1, the KL over K ids and one bucket for
    all others; with K = V and no tail it is the full KL, times T^2. T^2 keeps the gradient's size (Hinton et al. 2015).

    The teacher's masses count relative to their sum: what rounding made of it is no divergence. A student that has no
    other ids than the kept ones can't have a tail: a rounding remainder in the teacher's is then left out too.
    """
    kept = _kept_logits(scores, targets)
    rest_lse = scores.rest_lse.float()
    has_rest = rest_lse > -torch.inf
    # Log odds of kept against rest. Where there is no rest, 0 stands in, so that no gradient meets an infinity.
    student_odds = torch.where(has_rest, kept.logsumexp(1) - torch.where(has_rest, rest_lse, 0.0), 0.0)
    teacher_odds = torch.where(has_rest, targets.entry_logprobs.logsumexp(1) - targets.tail_logprobs, torch.inf)
    outside = _share(F.logsigmoid(teacher_odds), F.logsigmoid(student_odds))
    outside = outside + _share(F.logsigmoid(-teacher_odds), F.logsigmoid(-student_odds))

    teacher = (targets.entry_logprobs / temperature).log_softmax(1)
    student = (kept / temperature).log_softmax(1)
    inside = _share(teacher, student).sum(1)
    return torch.where(has_rest, outside, 0.0) + temperature**2 * teacher_odds.sigmoid() * inside


def ce(scores: StudentScores, targets: SparseTargets, *, temperature: float = 1.0) -> Tensor:
    """Cross-entropy with the real token, -log p(label) over the whole vocabulary; the temperature plays no part."""
    del temperature
    return student_lse(scores, targets) - scores.label_logits.float()


LOSSES: Mapping[str, Divergence] = {"kl": kl, "ce": ce}


def build_loss(name: str, *, temperature: float = 1.0) -> LossFunction:
    """The loss of that name (a key of :data:`LOSSES`) with its temperature set."""
    return partial(LOSSES[name], temperature=temperature)


def student_lse(scores: StudentScores, targets: SparseTargets) -> Tensor:
    """float32 [N]: logsumexp of the student's logits over the whole vocabulary."""
    return torch.logaddexp(_kept_logits(scores, targets).logsumexp(1), scores.rest_lse.float())


def outcome_logprobs(scores: StudentScores, targets: SparseTargets) -> tuple[Tensor, Tensor]:
    """Log probabilities of the K + 1 outcomes at temperature 1, float32 [N, K + 1]: (teacher's, student's).

    The last column is the tail; what isn't an entry is -inf in both. Each row's masses sum to 1.
    """
    teacher = torch.cat([targets.entry_logprobs, targets.tail_logprobs[:, None]], 1).log_softmax(1)
    student = torch.cat([_kept_logits(scores, targets), scores.rest_lse.float()[:, None]], 1).log_softmax(1)
    return teacher, student


def _kept_logits(scores: StudentScores, targets: SparseTargets) -> Tensor:
    return scores.kept_logits.float().masked_fill(~targets.is_entry, -torch.inf)


def _share(teacher_log: Tensor, student_log: Tensor) -> Tensor:
    """An outcome's share t (log t - log s) of a KL, elementwise: 0, and without gradient, where t is 0."""
    difference = torch.where(teacher_log > -torch.inf, teacher_log - student_log, 0.0)
    return teacher_log.exp() * difference
