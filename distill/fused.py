"""The head and the loss in one: chunks over positions, gradients made in the forward pass.

No [targets, vocabulary] tensor ever exists, only one chunk of it, which becomes the gradient in place: logits, then
exp(z - max), then d loss / d z. A loss needs the few numbers of :class:`~distill.losses.StudentScores`, and autograd
gives its gradients with respect to them; from there to the logits it is one formula for all losses:

    d loss / d z_v = g_kept[v] + [v not kept] g_rest exp(z_v - rest_lse) + [v = label] g_label

Three products of 2 N V H operations a call, as many as plain cross-entropy needs, and nothing is computed twice.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from distill.head import Head
from distill.losses import LossFunction, SparseTargets, StudentScores, student_lse

CPU_CHUNK_BYTES = 64 * 2**20
GPU_CHUNK_BYTES = 512 * 2**20
"""Sizes of the float32 logits of one chunk of positions. Each chunk also passes once over the whole gradient of the
weight, which has to be little beside its products: a GPU, faster at these, needs more positions a chunk for that."""

_CPU_BLOCK_BYTES = 4 * 2**20
"""What lies between the products is done in blocks of rows that stay in a processor's cache meanwhile."""


@dataclass(frozen=True, slots=True, eq=False)
class StudentStatistics:
    """What validation needs of the student's distributions at N targets, all float32 without gradient.

    argmax_ids: int64 [N]. top_logprobs: [N], log probability of the argmax.
    """

    scores: StudentScores
    argmax_ids: Tensor
    top_logprobs: Tensor

    def to(self, device: str) -> "StudentStatistics":
        """The same on ``device``."""
        s = self.scores
        scores = StudentScores(s.kept_logits.to(device), s.rest_lse.to(device), s.label_logits.to(device))
        return StudentStatistics(scores, self.argmax_ids.to(device), self.top_logprobs.to(device))


def fused_loss(
    hidden: Tensor,
    head: Head,
    targets: SparseTargets,
    loss_fn: LossFunction,
    *,
    scale: float,
    chunk_bytes: int | None = None,
) -> Tensor:
    """``scale`` times the sum of ``loss_fn`` over all targets: a float32 scalar that can be backpropagated once.

    hidden: [N, H], the states that predict the targets. scale: 1 / number of targets of the whole optimizer step.
    chunk_bytes: size of a chunk's logits, by default one that suits the device. The products are made in the autocast
    dtype if autocast is on, else in the weight's; everything else, and every sum, is float32. Whatever needs no
    gradient (all, without grad mode; a frozen head) costs none.
    """
    work = _Work(head, targets, loss_fn, scale, chunk_bytes, torch.is_grad_enabled())
    return cast(Tensor, _FusedLoss.apply(hidden, head.weight, head.bias, work))  # type: ignore[no-untyped-call]


def fused_losses(
    hidden: Tensor, head: Head, targets: SparseTargets, loss_fn: LossFunction, *, chunk_bytes: int | None = None
) -> Tensor:
    """``loss_fn`` of each target from hidden [N, H], float32 [N], in chunks and without gradient: one product."""
    with torch.no_grad():
        projection = _Projection.of(hidden, head, chunk_bytes)
        parts = [
            loss_fn(_take(projection.logits(projection.inputs(hidden[rows])), targets[rows])[0], targets[rows])
            for rows in projection.chunks(len(hidden))
        ]
    return torch.cat(parts)


def student_statistics(
    hidden: Tensor, head: Head, targets: SparseTargets, *, chunk_bytes: int | None = None
) -> StudentStatistics:
    """Statistics of the student at each target from hidden [N, H], in chunks and without gradient."""
    with torch.no_grad():
        projection = _Projection.of(hidden, head, chunk_bytes)
        parts = [
            _statistics(projection.logits(projection.inputs(hidden[rows])), targets[rows])
            for rows in projection.chunks(len(hidden))
        ]
    scores = StudentScores(
        torch.cat([part.scores.kept_logits for part in parts]),
        torch.cat([part.scores.rest_lse for part in parts]),
        torch.cat([part.scores.label_logits for part in parts]),
    )
    return StudentStatistics(
        scores, torch.cat([part.argmax_ids for part in parts]), torch.cat([part.top_logprobs for part in parts])
    )


def dense_loss(logits: Tensor, targets: SparseTargets, loss_fn: LossFunction, *, scale: float) -> Tensor:
    """As :func:`fused_loss`, by plain autograd on logits [N, V], for models whose head isn't understood."""
    return scale * dense_losses(logits, targets, loss_fn).sum()


def dense_losses(logits: Tensor, targets: SparseTargets, loss_fn: LossFunction) -> Tensor:
    """``loss_fn`` of each target from logits [N, V], float32 [N]."""
    z, ids = logits.float(), targets.kept_ids
    others = z.scatter(1, ids, -torch.inf)
    has_rest = (others > -torch.inf).any(1)
    rest_lse = others.masked_fill(~has_rest[:, None], 0.0).logsumexp(1).masked_fill(~has_rest, -torch.inf)
    scores = StudentScores(z.gather(1, ids), rest_lse, z.gather(1, targets.labels[:, None]).squeeze(1))
    return loss_fn(scores, targets)


def dense_statistics(logits: Tensor, targets: SparseTargets) -> StudentStatistics:
    """As :func:`student_statistics`, from logits [N, V], for models whose head isn't understood."""
    return _statistics(logits.detach().to(torch.float32, copy=True), targets)


@dataclass(frozen=True, slots=True, eq=False)
class _Projection:
    """A head made ready for one call: weight [V, H] and bias cropped and cast once, a buffer for a chunk's logits.

    The head's scale is applied to its inputs instead of its outputs, which are far larger: z = W (scale h) + scale b.
    """

    weight: Tensor
    bias: Tensor | None
    scale: float
    softcap: float | None
    buffer: Tensor

    @staticmethod
    def of(hidden: Tensor, head: Head, chunk_bytes: int | None) -> "_Projection":
        device = head.weight.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else head.weight.dtype
        budget = chunk_bytes or (CPU_CHUNK_BYTES if device == "cpu" else GPU_CHUNK_BYTES)
        most = max(1, budget // (4 * head.vocab_size))
        rows = _ceil(len(hidden), max(1, _ceil(len(hidden), most)))
        return _Projection(
            head.weight[: head.vocab_size].detach().to(dtype),
            None if head.bias is None else head.bias[: head.vocab_size].detach().float() * head.scale,
            head.scale,
            head.softcap,
            torch.empty(rows, head.vocab_size, dtype=torch.float32, device=head.weight.device),
        )

    def chunks(self, total: int) -> Iterator[slice]:
        """As few as the buffer allows, of about the same size: a small one costs nearly as much as a large one."""
        count = _ceil(total, max(1, len(self.buffer)))
        return (slice(total * i // count, total * (i + 1) // count) for i in range(count))

    def inputs(self, hidden: Tensor) -> Tensor:
        """[n, H] in the dtype and on the device of the products."""
        scaled = hidden if self.scale == 1.0 else hidden * self.scale
        return scaled.to(self.weight.device, self.weight.dtype)

    def logits(self, inputs: Tensor) -> Tensor:
        """The float32 logits [n, V] of a chunk's inputs, in the buffer: valid until the next call."""
        z = self.buffer[: len(inputs)]
        if inputs.dtype == torch.float32:
            torch.mm(inputs, self.weight.t(), out=z)
        else:
            z.copy_(torch.mm(inputs, self.weight.t()))
        if self.bias is not None:
            z.add_(self.bias)
        return z if self.softcap is None else z.div_(self.softcap).tanh_().mul_(self.softcap)

    def slope(self, z: Tensor) -> Tensor | None:
        """d z / d (z before the soft cap), [n, V], or None where it is 1."""
        return None if self.softcap is None else z.div(self.softcap).square_().neg_().add_(1.0)


def _take(z: Tensor, targets: SparseTargets) -> tuple[StudentScores, Tensor]:
    """The student's scores from a chunk's logits [n, V], which become exp(z - max of the others), 0 at the kept ids.

    Also returned: the row sums [n] of that.
    """
    ids = targets.kept_ids
    kept, label = z.gather(1, ids), z.gather(1, targets.labels[:, None]).squeeze(1)
    z.scatter_(1, ids, -torch.inf)
    rows = max(1, _CPU_BLOCK_BYTES // (4 * z.shape[1])) if z.device.type == "cpu" else len(z)
    parts = [_exponentials(block) for block in z.split(rows)]
    peak, mass = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    return StudentScores(kept, peak + mass.log(), label), mass


def _exponentials(z: Tensor) -> tuple[Tensor, Tensor]:
    """Rows z [n, V] become exp(z - peak); returned are peak [n], the largest of each (0 for -inf), and the sums [n]."""
    peak = z.amax(1)
    peak = torch.where(peak > -torch.inf, peak, 0.0)
    return peak, z.sub_(peak[:, None]).exp_().sum(1)


def _statistics(z: Tensor, targets: SparseTargets) -> StudentStatistics:
    """Of a chunk's logits [n, V], which are used up."""
    top, argmax_ids = z.max(1)
    scores, _ = _take(z, targets)
    return StudentStatistics(scores, argmax_ids, top - student_lse(scores, targets))


def _differentiate(z: Tensor, targets: SparseTargets, loss_fn: LossFunction, scale: float) -> Tensor:
    """The losses [n] of a chunk's logits [n, V], which become the gradient of ``scale`` times their sum."""
    scores, mass = _take(z, targets)
    leaves = [part.requires_grad_() for part in (scores.kept_logits, scores.rest_lse, scores.label_logits)]
    with torch.enable_grad():
        losses = loss_fn(scores, targets)
        total = losses.sum() * scale
    kept, rest, label = torch.autograd.grad(total, leaves, allow_unused=True, materialize_grads=True)
    z.mul_(torch.where(mass > 0, rest / mass, 0.0)[:, None])
    z.scatter_add_(1, targets.kept_ids, kept).scatter_add_(1, targets.labels[:, None], label[:, None])
    return losses.detach()


class _Gradients:
    """The gradients of the scaled sum of losses with respect to what the head reads, float32; None where not needed."""

    def __init__(self, projection: _Projection, hidden: Tensor, weight: Tensor, needs: tuple[bool, bool, bool]) -> None:
        self.projection = projection
        self.hidden = torch.empty_like(hidden, dtype=torch.float32, device=weight.device) if needs[0] else None
        self.weight = torch.zeros_like(weight, dtype=torch.float32) if needs[1] else None
        self.bias = torch.zeros_like(weight[:, 0], dtype=torch.float32) if needs[2] else None

    def add(self, rows: slice, inputs: Tensor, grad_logits: Tensor) -> None:
        """Takes a chunk's d loss / d z [n, V], z before the soft cap."""
        weight, scale, crop = self.projection.weight, self.projection.scale, grad_logits.shape[1]
        if self.bias is not None:
            self.bias[:crop].add_(grad_logits.sum(0), alpha=scale)
        grad = grad_logits.to(weight.dtype)
        if self.hidden is not None:
            torch.mul(torch.mm(grad, weight), scale, out=self.hidden[rows])
        if self.weight is None:
            return
        if weight.dtype == torch.float32:
            self.weight[:crop].addmm_(grad.t(), inputs)
        else:
            self.weight[:crop].add_(torch.mm(grad.t(), inputs))


@dataclass(frozen=True, slots=True, eq=False)
class _Work:
    """What the autograd function is told besides the tensors that it differentiates by."""

    head: Head
    targets: SparseTargets
    loss_fn: LossFunction
    scale: float
    chunk_bytes: int | None
    grad_enabled: bool


class _FusedLoss(torch.autograd.Function):
    """Makes the gradients in forward; backward multiplies them by grad_output.

    The scale is in them before the products, so that a loss scale keeps those of float16 from vanishing or overflowing.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, work: _Work) -> Tensor:
        needs = ctx.needs_input_grad[:3] if work.grad_enabled else (False, False, False)
        projection = _Projection.of(hidden, work.head, work.chunk_bytes)
        gradients = _Gradients(projection, hidden, weight, needs) if any(needs) else None
        losses = torch.empty(len(hidden), dtype=torch.float32, device=weight.device)
        with torch.autocast(weight.device.type, enabled=False):
            for rows in projection.chunks(len(hidden)):
                targets, inputs = work.targets[rows], projection.inputs(hidden[rows])
                z = projection.logits(inputs)
                if gradients is None:
                    losses[rows] = work.loss_fn(_take(z, targets)[0], targets)
                    continue
                slope = projection.slope(z)
                losses[rows] = _differentiate(z, targets, work.loss_fn, work.scale)
                gradients.add(rows, inputs, z if slope is None else z.mul_(slope))
        ctx.gradients = gradients
        ctx.like = [None if part is None else part.new_empty(0) for part in (hidden, weight, bias)]
        return losses.sum() * work.scale

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        """Uses the stored gradients up."""
        gradients, ctx.gradients = ctx.gradients, None
        assert gradients is not None, "a fused loss can be backpropagated once"
        parts = zip((gradients.hidden, gradients.weight, gradients.bias), ctx.like, strict=True)
        return (*(None if part is None else part.mul_(grad_output).to(like) for part, like in parts), None)


def _ceil(a: int, b: int) -> int:
    return -(-a // b)
