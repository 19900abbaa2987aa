"""Divergences between a teacher's sparse record and a student, as pure functions of a few numbers a target.

A record knows K ids and the mass of all others together, so a loss over these K + 1 outcomes sees the student only
through its logits at the K ids, the logsumexp of its logits everywhere else, and its logit of the real token. That is
what :class:`StudentScores` holds, and why a loss is a small function here while the work on [targets, vocabulary]
numbers is done once, for all losses, in ``fused.py``.

A loss takes scores and targets and returns float32 [N], one value a target, in nats; whoever calls it sums, and divides
once by the number of targets of the optimizer step. Gradients come by autograd. Values and gradients are finite
whenever the student gives every kept id a finite logit.

**Temperature.** T acts inside the kept ids only: with m the kept mass, t'_i = m_t softmax_K(z_t / T)_i, p' alike, and
the tails untouched, every loss is D(B_t, B_p) + T^2 (D(t', p') - D(B_t, B_p)), B = (m, 1 - m). For KL the bracket is,
by the chain rule, m_t KL inside the kept ids; for any divergence T = 1 gives D over K + 1 outcomes, and K = V gives
T^2 D of the tempered distributions. T^2 keeps the gradient's size (Hinton et al. 2015).

**Which one.** Forward KL covers all that the teacher may say: the choice for pre-training and for calibrated students.
Reverse KL prefers a part of it; skewed, Jensen-Shannon and alpha-beta divergences lie between and help short
fine-tunings of much smaller students. Total variation is bounded, and blind to how wrong a wrong id is.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

Tail = Literal["bucket", "renormalise", "drop", "to_target"]

# Stands for log 0 of a teacher in losses that divide by its probabilities: they would be infinite.
_LOG_NOTHING = -30.0


@dataclass(frozen=True, slots=True, eq=False)
class SparseTargets:
    """What N targets are trained towards.

    labels: int64 [N], the real tokens. entry_ids: int64 [N, K]. entry_logprobs: float32 [N, K], natural logs at
    temperature 1; -inf marks what isn't an entry (padding repeats the row's first id). Each row's first is an entry.
    tail_logprobs: float32 [N], log of the mass outside the entries, -inf if there is none. entropies: float32 [N], the
    teacher's in nats, NaN where unknown; None if nobody asks. weights: float32 [N], by which losses count; None: all 1.
    """

    labels: Tensor
    entry_ids: Tensor
    entry_logprobs: Tensor
    tail_logprobs: Tensor
    entropies: Tensor | None = None
    weights: Tensor | None = None

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, rows: slice) -> "SparseTargets":
        return self._map(lambda tensor: tensor[rows])

    def to(self, device: str) -> "SparseTargets":
        """The same on ``device``."""
        return self._map(lambda tensor: tensor.to(device))

    def _map(self, change: Callable[[Tensor], Tensor]) -> "SparseTargets":
        tensors = (getattr(self, field.name) for field in fields(self))
        return SparseTargets(*(None if tensor is None else change(tensor) for tensor in tensors))  # type: ignore[arg-type]

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

Pointwise = Callable[[Tensor, Tensor], Tensor]
"""A divergence's share of one outcome: log t and log p of any equal shapes to nats. log t may be -inf."""


@dataclass(frozen=True, slots=True)
class LossParameters:
    """``jsd_beta``: the teacher's weight in the mixture, in (0, 1). ``skew_alpha``: in [0, 1), how much of the first
    distribution is mixed into the second. ``ab_alpha``, ``ab_beta``: >= 0.
    """

    jsd_beta: float = 0.5
    skew_alpha: float = 0.1
    ab_alpha: float = 0.2
    ab_beta: float = 0.7


def kl(scores: StudentScores, targets: SparseTargets, *, temperature: float = 1.0, tail: Tail = "bucket") -> Tensor:
    """KL(teacher || student), the temperature acting inside the kept ids only. float32 [N].

    bucket: KL(Bern(m_t) || Bern(m_s)) + m_t T^2 KL(softmax_K(z_t / T) || softmax_K(z_s / T)), m = mass of the kept ids:
    the decoupled top-K of LFM2 (arXiv 2511.23404). By the chain rule it is, at T = 1, the KL over K ids and one bucket
    for all others; with K = V and no tail it is the full KL, times T^2.

    renormalise: the teacher's kept ids count as all there is, the student's masses are over the whole vocabulary; the
    optimum is overconfident. drop: the tail's share is left out, m_t (log m_t - log m_s) + ..., which has the same
    optimum and weighs each target by m_t. to_target: the real token takes the tail's mass.

    The teacher's masses count relative to their sum: what rounding made of it is no divergence. A student that has no
    other ids than the kept ones can't have a tail: a rounding remainder in the teacher's is then left out too.
    """
    if tail == "to_target":
        return _kl_to_target(scores, targets, temperature)
    masses = _Masses.of(scores, targets)
    inside = _inside_kl(scores, targets, targets.entry_logprobs, temperature)
    if tail == "renormalise":
        return -masses.student_kept + inside
    outside = _share(masses.teacher_kept, masses.student_kept)
    if tail == "bucket":
        outside = outside + _share(masses.teacher_tail, masses.student_tail)
    return outside + masses.teacher_kept.exp() * inside


def ce(scores: StudentScores, targets: SparseTargets) -> Tensor:
    """Cross-entropy with the real token, -log p(label) over the whole vocabulary. float32 [N]."""
    return student_lse(scores, targets) - scores.label_logits.float()


def divergence(
    pointwise: Pointwise, scores: StudentScores, targets: SparseTargets, *, temperature: float, tail: Tail
) -> Tensor:
    """The divergence with these shares, float32 [N]: over K + 1 outcomes, or over both's kept ids (renormalise)."""
    teacher = (targets.entry_logprobs / temperature).log_softmax(1)
    student = (_kept_logits(scores, targets) / temperature).log_softmax(1)
    if tail == "renormalise":
        return temperature**2 * _summed(pointwise, teacher, student)
    assert tail == "bucket", "no other way with the tail"
    masses = _Masses.of(scores, targets)
    whole = _summed(
        pointwise,
        torch.cat([masses.teacher_kept[:, None] + teacher, masses.teacher_tail[:, None]], 1),
        torch.cat([masses.student_kept[:, None] + student, masses.student_tail[:, None]], 1),
    )
    if temperature == 1.0:
        return whole
    outside = _summed(
        pointwise,
        torch.stack([masses.teacher_kept, masses.teacher_tail], 1),
        torch.stack([masses.student_kept, masses.student_tail], 1),
    )
    return outside + temperature**2 * (whole - outside)


def reverse_kl_share(t: Tensor, p: Tensor) -> Tensor:
    """p (log p - log t), of KL(student || teacher)."""
    return _share(p, _something(t))


def jsd_share(t: Tensor, p: Tensor, *, beta: float) -> Tensor:
    """Of the generalised Jensen-Shannon divergence b KL(t || m) + (1 - b) KL(p || m), m = b t + (1 - b) p.

    As in GKD (arXiv 2306.13649, eq. 1); b = 1/2 is the symmetric one.
    """
    m = _mixed(t, p, beta)
    return beta * _share(t, m) + (1 - beta) * _share(p, m)


def skew_kl_share(t: Tensor, p: Tensor, *, alpha: float) -> Tensor:
    """Of KL(t || a t + (1 - a) p), DistiLLM (arXiv 2402.03898, eq. 4); a = 0 is the forward KL."""
    return _share(t, _mixed(t, p, alpha))


def skew_reverse_kl_share(t: Tensor, p: Tensor, *, alpha: float) -> Tensor:
    """Of KL(p || a p + (1 - a) t), DistiLLM (arXiv 2402.03898); a = 0 is the reverse KL."""
    return _share(p, _mixed(p, _something(t), alpha))


def tvd_share(t: Tensor, p: Tensor) -> Tensor:
    """|t - p| / 2, of the total variation distance."""
    return 0.5 * (t.exp() - p.exp()).abs()


def ab_share(t: Tensor, p: Tensor, *, alpha: float, beta: float) -> Tensor:
    """Of the alpha-beta divergence (Cichocki et al. 2011, "Generalized alpha-beta divergences"; ABKD, 2505.04560).

    -(t^a p^b - a/(a+b) t^(a+b) - b/(a+b) p^(a+b)) / (a b), with its limits at 0. (1, 0) is the forward KL, (0, 1) the
    reverse KL of distributions, (1/2, 1/2) four times the squared Hellinger distance.
    """
    a, b = alpha, beta
    if a and b:
        both = a + b
        return ((a * (both * t).exp() + b * (both * p).exp()) / both - (a * t + b * p).exp()) / (a * b)
    if a:
        gap = torch.where(t > -torch.inf, t - p, 0.0)
        return ((a * t).exp() * (a * gap - 1) + (a * p).exp()) / a**2
    t = _something(t)
    if b:
        return ((b * p).exp() * (b * (p - t) - 1) + (b * t).exp()) / b**2
    return 0.5 * (t - p) ** 2


LOSSES = ("kl", "reverse_kl", "jsd", "skew_kl", "skew_reverse_kl", "tvd", "ab", "ce")


def build_loss(
    loss: str | Mapping[str, float],
    *,
    temperature: float = 1.0,
    tail: Tail = "bucket",
    parameters: LossParameters | None = None,
    ce_below_entropy: float | None = None,
    ce_at_entropy: float = 0.0,
) -> LossFunction:
    """The loss of a name in :data:`LOSSES`, or the sum of several by their weights, float32 [N].

    ``targets.weights`` multiply it. Targets of a teacher's entropy below ``ce_below_entropy`` (nats) learn the real
    token instead, ce alone: where the teacher is sure, the text teaches copying better (arXiv 2509.01649); where its
    entropy is unknown it isn't below. Those of just this entropy do so with a weight of ``ce_at_entropy``. ``tail``
    must go with all names (``tails_of``).
    """
    weights = {loss: 1.0} if isinstance(loss, str) else dict(loss)
    assert all(tail in tails_of(name) for name in weights), "a loss without this tail"
    terms = [
        (weight, _named(name, temperature, tail, parameters or LossParameters())) for name, weight in weights.items()
    ]

    def total(scores: StudentScores, targets: SparseTargets) -> Tensor:
        value = sum((weight * term(scores, targets) for weight, term in terms), torch.zeros(()))
        if ce_below_entropy is not None:
            assert targets.entropies is not None, "targets without entropies"
            text = ce(scores, targets)
            value = torch.where(targets.entropies == ce_below_entropy, value.lerp(text, ce_at_entropy), value)
            value = torch.where(targets.entropies < ce_below_entropy, text, value)
        return value if targets.weights is None else value * targets.weights

    return total


def tails_of(name: str) -> tuple[Tail, ...]:
    """What can become of the mass outside the kept ids in that loss; ce knows none, so all are the same to it."""
    return ("bucket", "renormalise", "drop", "to_target") if name in ("kl", "ce") else ("bucket", "renormalise")


@dataclass(frozen=True, slots=True)
class Weighing:
    """Weights of targets by a divergence, the key ``alpha``: ((d / max) + 1)^alpha, max over the targets of a sample.

    ``by`` is the divergence d, taken without gradient before the loss itself: a product with the head more.
    """

    by: LossFunction
    alpha: float

    def weigh(self, targets: SparseTargets, divergences: Tensor, samples: Tensor) -> SparseTargets:
        """``targets`` with their weights, all 1 in a sample where d is 0 everywhere.

        divergences: float32 [N], values of ``by``. samples: int64 [N], the number of each target's sample.
        """
        d = divergences.detach().clamp(min=0.0)
        largest = d.new_zeros(int(samples.max()) + 1).scatter_reduce(0, samples, d, "amax")[samples]
        return replace(targets, weights=(torch.where(largest > 0, d / largest, 0.0) + 1.0) ** self.alpha)


def _named(name: str, temperature: float, tail: Tail, parameters: LossParameters) -> LossFunction:
    if name == "ce":
        return ce
    if name == "kl":
        return partial(kl, temperature=temperature, tail=tail)
    shares: dict[str, Pointwise] = {
        "reverse_kl": reverse_kl_share,
        "jsd": partial(jsd_share, beta=parameters.jsd_beta),
        "skew_kl": partial(skew_kl_share, alpha=parameters.skew_alpha),
        "skew_reverse_kl": partial(skew_reverse_kl_share, alpha=parameters.skew_alpha),
        "tvd": tvd_share,
        "ab": partial(ab_share, alpha=parameters.ab_alpha, beta=parameters.ab_beta),
    }
    return partial(divergence, shares[name], temperature=temperature, tail=tail)


@dataclass(frozen=True, slots=True, eq=False)
class _Masses:
    """Logs of the kept and the other mass of teacher and student, float32 [N], each pair's masses summing to 1.

    Without other ids: 0 and -inf, and no gradient.
    """

    teacher_kept: Tensor
    teacher_tail: Tensor
    student_kept: Tensor
    student_tail: Tensor

    @staticmethod
    def of(scores: StudentScores, targets: SparseTargets) -> "_Masses":
        rest = scores.rest_lse.float()
        has_rest = rest > -torch.inf
        # Log odds of kept against rest. Where there is no rest, 0 stands in, so that no gradient meets an infinity.
        kept = _kept_logits(scores, targets).logsumexp(1)
        student = torch.where(has_rest, kept - torch.where(has_rest, rest, 0.0), 0.0)
        teacher = torch.where(has_rest, targets.entry_logprobs.logsumexp(1) - targets.tail_logprobs, torch.inf)
        nothing = torch.full_like(rest, -torch.inf)
        return _Masses(
            F.logsigmoid(teacher),
            torch.where(has_rest, F.logsigmoid(-teacher), nothing),
            torch.where(has_rest, F.logsigmoid(student), 0.0),
            torch.where(has_rest, F.logsigmoid(-student), nothing),
        )


def _inside_kl(scores: StudentScores, targets: SparseTargets, teacher_logs: Tensor, temperature: float) -> Tensor:
    """T^2 KL(softmax_K(teacher_logs / T) || softmax_K(z_s / T)), [N]."""
    teacher = (teacher_logs / temperature).log_softmax(1)
    student = (_kept_logits(scores, targets) / temperature).log_softmax(1)
    return temperature**2 * _share(teacher, student).sum(1)


def _kl_to_target(scores: StudentScores, targets: SparseTargets, temperature: float) -> Tensor:
    """KL(q || student) with q the teacher's kept masses, and all the rest on the real token, kept or not."""
    masses = _Masses.of(scores, targets)
    is_label = (targets.entry_ids == targets.labels[:, None]) & targets.is_entry
    label_kept = is_label.any(1)
    kept_logs = targets.entry_logprobs.log_softmax(1) + masses.teacher_kept[:, None]
    with_tail = torch.where(is_label, torch.logaddexp(kept_logs, masses.teacher_tail[:, None]), kept_logs)
    inside = _inside_kl(scores, targets, with_tail, temperature)
    label = -ce(scores, targets)
    tail = _share(masses.teacher_tail, label)
    apart = _share(masses.teacher_kept, masses.student_kept) + masses.teacher_kept.exp() * inside + tail
    return torch.where(label_kept, -masses.student_kept + inside, apart)


def _summed(pointwise: Pointwise, teacher: Tensor, student: Tensor) -> Tensor:
    """Shares of log masses [N, outcomes] summed, [N]; what the student can't have (-inf) is no outcome."""
    exists = student > -torch.inf
    shares = pointwise(torch.where(exists, teacher, 0.0), torch.where(exists, student, 0.0))
    return torch.where(exists, shares, 0.0).sum(1)


def _something(t: Tensor) -> Tensor:
    return torch.where(t > -torch.inf, t, _LOG_NOTHING)


def _mixed(a: Tensor, b: Tensor, weight: float) -> Tensor:
    """log(w exp(a) + (1 - w) exp(b)); b finite."""
    return torch.logaddexp(a + math.log(weight), b + math.log1p(-weight)) if weight else b


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
