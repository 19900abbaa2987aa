"""The losses on whole distributions, in float64 and row by row: slow, and simple enough to be believed."""

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from distill.losses import SparseTargets


def make_targets(
    n: int, vocab: int, k: int, *, seed: int = 0, counts: list[int] | None = None, peak: float = 3.0
) -> SparseTargets:
    """Records of random teachers; ``counts`` says how many of the k entries are real, the rest is padding."""
    generator = torch.Generator().manual_seed(seed)
    teacher = (peak * torch.randn(n, vocab, generator=generator, dtype=torch.float64)).log_softmax(1)
    order = teacher.argsort(1, descending=True)
    ids, logprobs, tails = order[:, :k].clone(), torch.empty(n, k, dtype=torch.float64), []
    for row, count in enumerate(counts or [k] * n):
        logprobs[row] = teacher[row, ids[row]]
        logprobs[row, count:] = -torch.inf
        ids[row, count:] = ids[row, 0]
        tails.append(teacher[row, order[row, count:]].logsumexp(0) if count < vocab else torch.tensor(-torch.inf))
    labels = torch.randint(vocab, (n,), generator=generator)
    labels[0] = ids[0, 0]  # at least one label is a kept id
    return SparseTargets(labels, ids, logprobs.float(), torch.stack(tails).float())


def reference_kl(logits: Tensor, targets: SparseTargets, temperature: float = 1.0) -> Tensor:
    """[N], from logits [N, V]."""
    losses = []
    for row, z in enumerate(logits.double()):
        real = targets.entry_logprobs[row] > -torch.inf
        ids, t = targets.entry_ids[row][real], targets.entry_logprobs[row][real].double()
        tail = targets.tail_logprobs[row].double()
        p = z.log_softmax(0)
        others = [v for v in range(len(z)) if v not in ids.tolist()]
        m_t, m_s = t.logsumexp(0), p[ids].logsumexp(0)
        loss = m_t.exp() * (m_t - m_s)
        if tail > -torch.inf:
            loss = loss + tail.exp() * (tail - p[others].logsumexp(0))
        inner_t, inner_s = (t / temperature).log_softmax(0), (z[ids] / temperature).log_softmax(0)
        losses.append(loss + m_t.exp() * temperature**2 * (inner_t.exp() * (inner_t - inner_s)).sum())
    return torch.stack(losses)


def reference_ce(logits: Tensor, targets: SparseTargets, temperature: float = 1.0) -> Tensor:
    """[N], from logits [N, V]."""
    return -logits.double().log_softmax(1).gather(1, targets.labels[:, None]).squeeze(1)


def kl_of(t: Tensor, p: Tensor) -> Tensor:
    """Of two vectors of probabilities; 0 log 0 is 0."""
    return torch.where(t > 0, t * (t.clamp(min=1e-300).log() - p.log()), 0.0).sum()


def reverse_kl_of(t: Tensor, p: Tensor) -> Tensor:
    return kl_of(p, torch.where(t > 0, t, math.exp(-30)))


def jsd_of(t: Tensor, p: Tensor, beta: float = 0.5) -> Tensor:
    m = beta * t + (1 - beta) * p
    return beta * kl_of(t, m) + (1 - beta) * kl_of(p, m)


def skew_kl_of(t: Tensor, p: Tensor, alpha: float = 0.1) -> Tensor:
    return kl_of(t, alpha * t + (1 - alpha) * p)


def skew_reverse_kl_of(t: Tensor, p: Tensor, alpha: float = 0.1) -> Tensor:
    return kl_of(p, alpha * p + (1 - alpha) * torch.where(t > 0, t, math.exp(-30)))


def tvd_of(t: Tensor, p: Tensor) -> Tensor:
    return (t - p).abs().sum() / 2


def ab_of(t: Tensor, p: Tensor, alpha: float = 0.2, beta: float = 0.7) -> Tensor:
    both = alpha + beta
    shares = t**alpha * p**beta - alpha / both * t**both - beta / both * p**both
    return -shares.sum() / (alpha * beta)


DIVERGENCES: dict[str, Callable[..., Tensor]] = {
    "reverse_kl": reverse_kl_of,
    "jsd": jsd_of,
    "skew_kl": skew_kl_of,
    "skew_reverse_kl": skew_reverse_kl_of,
    "tvd": tvd_of,
    "ab": ab_of,
}


def reference_divergence(
    of: Callable[..., Tensor], logits: Tensor, targets: SparseTargets, temperature: float = 1.0, tail: str = "bucket"
) -> Tensor:
    """[N], from logits [N, V]; ``of`` two vectors of probabilities."""
    losses = []
    for row, z in enumerate(logits.double()):
        real = targets.entry_logprobs[row] > -torch.inf
        ids, t = targets.entry_ids[row][real], targets.entry_logprobs[row][real].double()
        others = [v for v in range(len(z)) if v not in ids.tolist() and z[v] > -torch.inf]
        inner_t, inner_s = (t / temperature).softmax(0), (z[ids] / temperature).softmax(0)
        if tail == "renormalise" or not others:
            losses.append(temperature**2 * of(inner_t, inner_s))
            continue
        rest = targets.tail_logprobs[row].double().exp()
        m_t = t.exp().sum() / (t.exp().sum() + rest)
        m_s = z.softmax(0)[ids].sum()
        bern_t, bern_s = torch.stack([m_t, 1 - m_t]), torch.stack([m_s, z.softmax(0)[others].sum()])
        whole = of(torch.cat([m_t * inner_t, bern_t[1:]]), torch.cat([m_s * inner_s, bern_s[1:]]))
        losses.append(of(bern_t, bern_s) + temperature**2 * (whole - of(bern_t, bern_s)))
    return torch.stack(losses)


def reference_kl_tail(logits: Tensor, targets: SparseTargets, temperature: float, tail: str) -> Tensor:
    """[N]: KL with the teacher's tail renormalised away, dropped, or given to the real token."""
    losses = []
    for row, z in enumerate(logits.double()):
        real = targets.entry_logprobs[row] > -torch.inf
        ids, t = targets.entry_ids[row][real], targets.entry_logprobs[row][real].double().exp()
        rest, label, p = targets.tail_logprobs[row].double().exp(), targets.labels[row], z.softmax(0)
        t, rest = t / (t.sum() + rest), rest / (t.sum() + rest)
        extra = torch.zeros((), dtype=torch.float64)
        if tail == "renormalise":
            t = t / t.sum()
        elif tail == "to_target" and label in ids:
            t = t + rest * (ids == label)
        elif tail == "to_target" and rest > 0:
            extra = rest * (rest.log() - p[label].log())
        inner_t, inner_s = (t.log() / temperature).softmax(0), (z[ids] / temperature).softmax(0)
        m_t, m_s = t.sum(), p[ids].sum()
        inside = temperature**2 * kl_of(inner_t, inner_s)
        losses.append(m_t * (m_t.log() - m_s.log()) + m_t * inside + extra)
    return torch.stack(losses)


Reference = Callable[[Tensor, SparseTargets, float], Tensor]
REFERENCES: dict[str, Reference] = {
    "kl": reference_kl,
    "ce": reference_ce,
    **{name: partial(reference_divergence, of) for name, of in DIVERGENCES.items()},
}


def reference_of(name: str, tail: str) -> Reference:
    """The loss of that name with that tail."""
    if tail == "bucket" or name == "ce":
        return REFERENCES[name]
    if name == "kl":
        return lambda logits, targets, temperature: reference_kl_tail(logits, targets, temperature, tail)
    return partial(reference_divergence, DIVERGENCES[name], tail=tail)
