"""Validation metrics against a dense float64 reference, and sums that don't care how targets are batched."""

import json
import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from distill.evaluate import ECE_BINS, MetricSums, batch_metrics
from distill.fused import dense_statistics
from distill.losses import SparseTargets
from distill.report import Summary, ValidationSummary
from tests.dense_reference import make_targets, reference_ce, reference_kl

N, V = 40, 17


def make_case(k: int, *, seed: int = 0) -> tuple[Tensor, SparseTargets, Tensor]:
    """Student logits, targets, teacher's logprobs of the real tokens."""
    generator = torch.Generator().manual_seed(seed + 1)
    logits = 3.0 * torch.randn(N, V, generator=generator)
    targets = make_targets(N, V, k, seed=seed, counts=[max(1, k - row % 3) for row in range(N)])
    logits[: N // 2].scatter_(1, targets.entry_ids[: N // 2, :1], 6.0)  # half of the argmaxes agree
    return logits, targets, -torch.rand(N, generator=generator)


def sums_of(case: tuple[Tensor, SparseTargets, Tensor], rows: slice = slice(None)) -> MetricSums:
    logits, targets, label_logprobs = case
    return batch_metrics(dense_statistics(logits[rows], targets[rows]), targets[rows], label_logprobs[rows])


def reference(case: tuple[Tensor, SparseTargets, Tensor]) -> dict[str, float]:
    logits, targets, label_logprobs = case
    p = logits.double().softmax(1)
    acceptance, bins = 0.0, [[0, 0.0, 0] for _ in range(ECE_BINS)]
    for row in range(N):
        real = targets.entry_logprobs[row] > -torch.inf
        kept, rest = p[row, targets.entry_ids[row][real]], p[row].clone()
        rest[targets.entry_ids[row][real]] = 0.0
        acceptance += torch.minimum(kept, targets.entry_logprobs[row][real].double().exp()).sum().item()
        acceptance += min(rest.sum().item(), math.exp(targets.tail_logprobs[row]))
        sure, guess = p[row].max().item(), p[row].argmax().item()
        cell = bins[min(int(sure * ECE_BINS), ECE_BINS - 1)]
        cell[0], cell[1], cell[2] = cell[0] + 1, cell[1] + sure, cell[2] + (guess == targets.labels[row].item())
    return {
        "kl": reference_kl(logits, targets).mean().item(),
        "ce": reference_ce(logits, targets).mean().item(),
        "teacher_ce": -label_logprobs.double().mean().item(),
        "top1_agreement": (logits.argmax(1) == targets.entry_ids[:, 0]).double().mean().item(),
        "ece": sum(n / N * abs(correct / n - sure / n) for n, sure, correct in bins if n),
        "acceptance": acceptance / N,
        "targets": N,
    }


@pytest.mark.parametrize("k", [1, 6, V])
def test_metrics_equal_the_reference(k: int) -> None:
    case = make_case(k)
    assert sums_of(case).metrics() == pytest.approx(reference(case), abs=1e-6)


def test_sums_do_not_care_about_batches() -> None:
    case = make_case(6)
    total = MetricSums.zero()
    for start, stop in ((0, 1), (1, 30), (30, N)):
        total = total + sums_of(case, slice(start, stop))
    assert total.metrics() == pytest.approx(sums_of(case).metrics(), abs=1e-7)
    assert sums_of(case) + MetricSums.zero() == sums_of(case)


def test_teacher_as_student_is_perfect() -> None:
    teacher = torch.randn(N, V, generator=torch.Generator().manual_seed(3)).log_softmax(1)
    order = teacher.argsort(1, descending=True)
    labels = torch.arange(N) % V
    targets = SparseTargets(
        labels, order[:, :5], teacher.gather(1, order[:, :5]), teacher.gather(1, order[:, 5:]).logsumexp(1)
    )
    metrics = sums_of((teacher, targets, teacher[range(N), labels])).metrics()
    assert metrics["kl"] == pytest.approx(0.0, abs=1e-6)
    assert metrics["acceptance"] == pytest.approx(1.0, abs=1e-6)
    assert metrics["top1_agreement"] == 1.0
    assert metrics["ce"] == pytest.approx(metrics["teacher_ce"], abs=1e-6)


def test_unknown_label_logprobs_are_left_out() -> None:
    logits, targets, label_logprobs = make_case(6)
    label_logprobs[3:] = torch.nan
    metrics = sums_of((logits, targets, label_logprobs)).metrics()
    assert metrics["teacher_ce"] == pytest.approx(-label_logprobs[:3].mean().item())
    metrics = sums_of((logits, targets, torch.full((N,), torch.nan))).metrics()
    assert "teacher_ce" not in metrics
    json.dumps(metrics, allow_nan=False)
    summary = Summary(validation=ValidationSummary(metrics, metrics)).to_dict()
    assert summary["validation"]["after"]["teacher_ce"] is None  # unknown, in a summary


def test_the_order_behind_the_first_entry_is_invisible() -> None:
    logits, targets, label_logprobs = make_case(6)
    order = torch.tensor([0, 4, 2, 5, 1, 3])  # padding among the entries too
    shuffled = replace(targets, entry_ids=targets.entry_ids[:, order], entry_logprobs=targets.entry_logprobs[:, order])
    expected = sums_of((logits, targets, label_logprobs)).metrics()
    assert sums_of((logits, shuffled, label_logprobs)).metrics() == pytest.approx(expected, abs=1e-7)


def test_certainty_falls_into_the_last_bin() -> None:
    targets = make_targets(2, V, 3)
    logits = torch.zeros(2, V).scatter_(1, targets.labels[:, None], 200.0)
    sums = sums_of((logits, targets, torch.zeros(2)))
    assert sums.bin_targets[-1] == sums.bin_correct[-1] == 2
    assert sums.metrics()["ece"] == pytest.approx(0.0, abs=1e-9)
    wrong = SparseTargets((targets.labels + 1) % V, targets.entry_ids, targets.entry_logprobs, targets.tail_logprobs)
    assert sums_of((logits, wrong, torch.zeros(2))).metrics()["ece"] == pytest.approx(1.0)


def test_no_targets_have_no_metrics() -> None:
    with pytest.raises(AssertionError, match="no targets"):
        MetricSums.zero().metrics()
