"""Validation metrics: how close a student is to its teacher, at temperature 1, as sums over targets.

Sums are what can be added over batches and ranks; :meth:`MetricSums.metrics` divides once at the end. kl and acceptance
are over K + 1 outcomes and so bounds of the full ones (kl from below, acceptance from above) that tighten with K.
"""

import math
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from distill.fused import StudentStatistics
from distill.losses import SparseTargets, ce, kl, outcome_logprobs

ECE_BINS = 21
"""Uniform bins of the top-1 confidence, as in Distillation Scaling Laws (arXiv 2502.08606, eq. 38)."""

Bins = tuple[float, ...]


@dataclass(frozen=True, slots=True)
class MetricSums:
    """Sums over targets, in nats where they are logs.

    teacher_targets counts the targets whose real token's teacher logprob is known, teacher_ce sums over these. The bins
    are over the student's top-1 confidence: number of targets, sum of confidences, number of argmaxes that are the
    real token.
    """

    targets: int
    kl: float
    ce: float
    teacher_targets: int
    teacher_ce: float
    agreement: int
    acceptance: float
    bin_targets: Bins
    bin_confidence: Bins
    bin_correct: Bins

    @staticmethod
    def zero() -> "MetricSums":
        """The empty sum."""
        none = (0.0,) * ECE_BINS
        return MetricSums(0, 0.0, 0.0, 0, 0.0, 0, 0.0, none, none, none)

    def __add__(self, other: "MetricSums") -> "MetricSums":
        return MetricSums(*(_add(getattr(self, field.name), getattr(other, field.name)) for field in fields(self)))

    def metrics(self) -> dict[str, float]:
        """Per target: kl, ce, teacher_ce, top1_agreement, ece, acceptance; and targets, their number.

        teacher_ce is left out where no target's is known. ece: the expected calibration error, the mean over targets of
        the gap between accuracy and mean confidence of the target's bin.
        """
        assert self.targets > 0, "no targets to evaluate on"
        gaps = (abs(correct - sure) for correct, sure in zip(self.bin_correct, self.bin_confidence, strict=True))
        result = {
            "kl": self.kl / self.targets,
            "ce": self.ce / self.targets,
            "top1_agreement": self.agreement / self.targets,
            "ece": math.fsum(gaps) / self.targets,
            "acceptance": self.acceptance / self.targets,
            "targets": self.targets,
        }
        if self.teacher_targets:
            result["teacher_ce"] = self.teacher_ce / self.teacher_targets
        return result


@torch.no_grad()
def batch_metrics(statistics: StudentStatistics, targets: SparseTargets, label_logprobs: Tensor) -> MetricSums:
    """The sums of one batch, added up in float64.

    label_logprobs: float32 [N], the teacher's of the real tokens; NaN where it isn't known. acceptance: the sum of
    min(t, p) over the outcomes, 1 - TVD, which is the rate at which speculative decoding accepts the student's tokens.
    """
    # float64 isn't to be had on every device; there is little of it.
    statistics, targets, label_logprobs = statistics.to("cpu"), targets.to("cpu"), label_logprobs.cpu()
    scores = statistics.scores
    teacher, student = outcome_logprobs(scores, targets)
    known = ~label_logprobs.isnan()
    confidence = statistics.top_logprobs.double().exp()
    bins = (confidence * ECE_BINS).long().clamp(0, ECE_BINS - 1)
    correct = statistics.argmax_ids == targets.labels

    def binned(values: Tensor) -> Bins:
        return tuple(torch.bincount(bins, weights=values.double(), minlength=ECE_BINS).tolist())

    return MetricSums(
        targets=len(targets),
        kl=kl(scores, targets).double().sum().item(),
        ce=ce(scores, targets).double().sum().item(),
        teacher_targets=int(known.sum()),
        teacher_ce=-label_logprobs[known].double().sum().item(),
        agreement=int((statistics.argmax_ids == targets.entry_ids[:, 0]).sum()),
        acceptance=torch.minimum(teacher, student).double().exp().sum().item(),
        bin_targets=binned(torch.ones_like(confidence)),
        bin_confidence=binned(confidence),
        bin_correct=binned(correct),
    )


def _add(a: Any, b: Any) -> Any:
    return tuple(map(sum, zip(a, b, strict=True))) if isinstance(a, tuple) else a + b
