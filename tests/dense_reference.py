"""The losses on whole distributions, in float64 and row by row: slow, and simple enough to be believed."""

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


REFERENCES = {"kl": reference_kl, "ce": reference_ce}
