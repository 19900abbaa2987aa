"""Divergences against the float64 reference, and everything that made others' losses NaN."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from distill.fused import fused_loss
from distill.head import Head
from distill.losses import (
    LOSSES,
    LossFunction,
    LossParameters,
    SparseTargets,
    StudentScores,
    Tail,
    Weighing,
    build_loss,
    ce,
    kl,
    outcome_logprobs,
    student_lse,
)
from distill.teacher import top_k_statistics
from tests.dense_reference import (
    DIVERGENCES,
    REFERENCES,
    jsd_of,
    kl_of,
    make_targets,
    reference_divergence,
    reference_kl,
    reference_kl_tail,
    reverse_kl_of,
    skew_kl_of,
)

V = 23


def make_scores(logits: Tensor, targets: SparseTargets) -> StudentScores:
    """By definition, differentiable."""
    ids, rows = targets.kept_ids, range(len(targets))
    rest = [torch.tensor([v for v in range(logits.shape[1]) if v not in ids[row].tolist()]).long() for row in rows]
    exists = [bool((logits[row, rest[row]] > -torch.inf).any()) for row in rows]
    rest_lse = [logits[row, rest[row]].logsumexp(0) if exists[row] else torch.tensor(-torch.inf) for row in rows]
    return StudentScores(
        logits.gather(1, ids), torch.stack(rest_lse), logits.gather(1, targets.labels[:, None]).squeeze(1)
    )


def make_logits(n: int, seed: int = 7, size: float = 2.0) -> Tensor:
    return size * torch.randn(n, V, generator=torch.Generator().manual_seed(seed))


def value_and_gradient(name: str, logits: Tensor, targets: SparseTargets, temperature: float) -> tuple[Tensor, Tensor]:
    logits = logits.clone().requires_grad_()
    losses = build_loss(name, temperature=temperature)(make_scores(logits, targets), targets)
    return losses.detach(), torch.autograd.grad(losses.sum(), logits)[0]


@pytest.mark.parametrize("temperature", [1.0, 0.5, 2.0, 4.0])
@pytest.mark.parametrize("k", [1, 5, V])
@pytest.mark.parametrize("name", LOSSES)
def test_values_and_gradients_equal_the_reference(name: str, k: int, temperature: float) -> None:
    counts = [k, max(1, k // 2), 1, k]
    targets, logits = make_targets(4, V, k, counts=counts), make_logits(4)
    losses, gradient = value_and_gradient(name, logits, targets, temperature)
    exact = logits.double().requires_grad_()
    expected = REFERENCES[name](exact, targets, temperature)
    torch.testing.assert_close(losses.double(), expected, rtol=1e-5, atol=2e-6)
    expected_gradient = torch.autograd.grad(expected.sum(), exact)[0]
    torch.testing.assert_close(gradient.double(), expected_gradient, rtol=1e-5, atol=2e-6)


def test_whole_vocabulary_is_the_full_kl_times_the_squared_temperature() -> None:
    targets, logits = make_targets(4, V, V), make_logits(4)
    teacher = torch.empty(4, V).scatter(1, targets.entry_ids, targets.entry_logprobs)
    for temperature in (1.0, 3.0):
        leaf = logits.clone().requires_grad_()
        t, p = (teacher / temperature).log_softmax(1), (leaf / temperature).log_softmax(1)
        full = temperature**2 * F.kl_div(p, t, reduction="none", log_target=True).sum(1)
        losses, gradient = value_and_gradient("kl", logits, targets, temperature)
        torch.testing.assert_close(losses, full.detach(), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(gradient, torch.autograd.grad(full.sum(), leaf)[0], rtol=1e-5, atol=1e-6)


def test_one_literal_number() -> None:
    """Teacher 1/2, 1/4 and a tail of 1/4; student 1/4, 1/4 and a tail of 1/2: ln(2)/2 - ln(2)/4."""
    log = math.log
    targets = SparseTargets(
        torch.tensor([2]), torch.tensor([[0, 1]]), torch.tensor([[log(0.5), log(0.25)]]), torch.tensor([log(0.25)])
    )
    scores = make_scores(torch.full((1, 4), 5.0), targets)
    assert kl(scores, targets).item() == pytest.approx(0.25 * log(2))
    assert ce(scores, targets).item() == pytest.approx(log(4))
    assert student_lse(scores, targets).item() == pytest.approx(5.0 + log(4))


@pytest.mark.parametrize("name", LOSSES)
def test_a7_suppressed_tokens_on_both_sides_are_finite(name: str) -> None:
    """Report A7: teacher and student row [-0.2, -1.7, -inf]."""
    row = torch.tensor([[-0.2, -1.7, -torch.inf]])
    targets = SparseTargets(torch.tensor([0]), torch.tensor([[0, 1, 2]]), row, torch.tensor([-torch.inf]))
    losses, gradient = value_and_gradient(name, row, targets, 2.0)
    assert losses.isfinite().all() and gradient.isfinite().all()
    assert gradient[0, 2] == 0.0
    if name == "kl":
        assert losses.item() == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize("name", LOSSES)
def test_a8_padding_changes_no_gradient(name: str) -> None:
    """Report A8: records of 3 and 7 entries in one batch as apart."""
    both = make_targets(2, V, 7, counts=[3, 7])
    logits = make_logits(2)
    short = SparseTargets(both.labels[:1], both.entry_ids[:1, :3], both.entry_logprobs[:1, :3], both.tail_logprobs[:1])
    together = value_and_gradient(name, logits, both, 2.0)
    for row, targets in ((slice(0, 1), short), (slice(1, 2), both[1:2])):
        alone = value_and_gradient(name, logits[row], targets, 2.0)
        torch.testing.assert_close(together[0][row], alone[0], rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(together[1][row], alone[1], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("k", [1, 20, 77])
@pytest.mark.parametrize("name", LOSSES)
def test_a6_rows_behind_the_tokenizer_do_not_exist(name: str, k: int) -> None:
    """Report A6: heads of 96 and 80 rows over 77 tokens, nearly all of the teacher's mass on its row 90."""
    generator = torch.Generator().manual_seed(1)
    teacher, student = (torch.randn(rows, 6, generator=generator) for rows in (96, 80))
    hidden = torch.randn(5, 6, generator=generator)
    labels = torch.randint(77, (5,), generator=generator)
    bias = torch.zeros(96).index_fill(0, torch.tensor([90]), 50.0)

    def run(teacher: Head, student: Head) -> tuple[SparseTargets, Tensor, Tensor]:
        top = top_k_statistics(teacher.logits(hidden), labels, k)
        targets = SparseTargets(labels, top.ids, top.logprobs, top.tail_logprobs)
        loss = fused_loss(hidden, student, targets, build_loss(name, temperature=1.5), scale=0.2)
        return targets, loss.detach(), torch.autograd.grad(loss, student.weight)[0]

    whole = run(Head(teacher, bias, 1.0, None, 77), Head(student.clone().requires_grad_(), None, 1.0, None, 77))
    trimmed = (
        Head(teacher[:77], bias[:77], 1.0, None, 77),
        Head(student[:77].clone().requires_grad_(), None, 1.0, None, 77),
    )
    targets, loss, gradient = run(*trimmed)
    assert whole[0].entry_ids.max() < 77
    torch.testing.assert_close(whole[0].entry_logprobs, targets.entry_logprobs)
    torch.testing.assert_close(whole[1], loss)
    torch.testing.assert_close(whole[2][:77], gradient)
    assert whole[2][77:].eq(0).all()
    expected = REFERENCES[name](hidden.double() @ student[:77].double().T, targets, 1.5).sum() / 5
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("suppressed", [0, 3])
def test_whole_distributions_give_the_full_kl_of_float64(suppressed: int) -> None:
    """K = V with no tail, entries in any order behind the first, some ids without mass and so without an entry."""
    generator = torch.Generator().manual_seed(5)
    logits = 3.0 * torch.randn(6, V, generator=generator, dtype=torch.float64)
    logits[:, :suppressed] = -torch.inf
    teacher, labels = logits.log_softmax(1), torch.full((6,), V - 1)
    order = torch.stack([torch.randperm(V, generator=generator) for _ in range(6)])
    best = teacher.gather(1, order).argmax(1)
    order[range(6), best], order[:, 0] = order[:, 0], order[range(6), best]
    targets = SparseTargets(labels, order, teacher.gather(1, order).float(), torch.full((6,), -torch.inf))
    student = make_logits(6)
    losses, gradient = value_and_gradient("kl", student, targets, 1.0)
    leaf = student.double().requires_grad_()
    terms = teacher.exp() * (teacher - leaf.log_softmax(1))
    full = terms.masked_fill(teacher == -torch.inf, 0.0).sum(1)
    torch.testing.assert_close(losses.double(), full.detach(), rtol=1e-5, atol=2e-6)
    exact = leaf.detach().softmax(1) - teacher.exp()
    torch.testing.assert_close(gradient.double(), exact, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("name", LOSSES)
def test_the_order_behind_the_first_entry_is_invisible(name: str) -> None:
    targets, logits = make_targets(4, V, 7, counts=[7, 5, 1, 3]), make_logits(4)
    order = torch.tensor([0, 6, 3, 1, 5, 2, 4])  # padding among the entries too
    shuffled = replace(targets, entry_ids=targets.entry_ids[:, order], entry_logprobs=targets.entry_logprobs[:, order])
    for got, expected in zip(
        value_and_gradient(name, logits, shuffled, 2.0), value_and_gradient(name, logits, targets, 2.0), strict=True
    ):
        torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("k", [5, V])
@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_teacher_as_student_is_zero(k: int, temperature: float) -> None:
    logits = make_logits(6, size=4.0)
    order = logits.argsort(1, descending=True)
    logprobs = logits.log_softmax(1).gather(1, order)
    tail = logprobs[:, k:].logsumexp(1)
    targets = SparseTargets(order[:, 0], order[:, :k], logprobs[:, :k].contiguous(), tail)
    losses, gradient = value_and_gradient("kl", logits, targets, temperature)
    assert losses.abs().max() < 1e-6
    assert gradient.abs().max() < 1e-6


def test_a_teacher_of_mass_one_pushes_the_students_tail_down() -> None:
    targets = SparseTargets(torch.tensor([1]), torch.tensor([[1]]), torch.tensor([[0.0]]), torch.tensor([-torch.inf]))
    losses, gradient = value_and_gradient("kl", make_logits(1), targets, 1.0)
    torch.testing.assert_close(losses, value_and_gradient("ce", make_logits(1), targets, 1.0)[0])
    assert gradient.isfinite().all() and gradient[0, 1] < 0


def test_a_tail_that_the_student_cannot_have_is_left_out() -> None:
    """K = V, but rounding left the teacher a tail: finite, and the full KL to the renormalised teacher."""
    targets, logits = make_targets(3, V, V), make_logits(3)
    rounded = SparseTargets(targets.labels, targets.entry_ids, targets.entry_logprobs - 1e-3, torch.full((3,), -6.9))
    exact, expected = value_and_gradient("kl", logits, rounded, 1.0), value_and_gradient("kl", logits, targets, 1.0)
    torch.testing.assert_close(exact[0], expected[0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(exact[1], expected[1], rtol=1e-5, atol=1e-6)


def test_rounding_of_the_teachers_masses_is_no_divergence() -> None:
    targets, logits = make_targets(3, V, 5), make_logits(3)
    off = SparseTargets(targets.labels, targets.entry_ids, targets.entry_logprobs + 1e-3, targets.tail_logprobs + 1e-3)
    torch.testing.assert_close(*(value_and_gradient("kl", logits, t, 2.0)[0] for t in (off, targets)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", LOSSES)
def test_half_precision_scores_are_computed_in_float32(name: str, dtype: torch.dtype) -> None:
    targets, logits = make_targets(3, V, 5), make_logits(3, size=10.0).to(dtype)
    scores = make_scores(logits.float(), targets)
    low = StudentScores(scores.kept_logits.to(dtype), scores.rest_lse.to(dtype), scores.label_logits.to(dtype))
    high = StudentScores(low.kept_logits.float(), low.rest_lse.float(), low.label_logits.float())
    loss = build_loss(name)
    assert loss(low, targets).dtype == torch.float32
    assert torch.equal(loss(low, targets), loss(high, targets))


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    k=st.integers(1, V),
    peak=st.sampled_from([0.0, 1.0, 20.0, 60.0]),
    size=st.sampled_from([0.0, 1.0, 50.0, 1e4]),
    temperature=st.sampled_from([0.1, 1.0, 5.0]),
    name=st.sampled_from(sorted(LOSSES)),
)
def test_extremes_are_finite_and_no_kl_is_negative(
    seed: int, k: int, peak: float, size: float, temperature: float, name: str
) -> None:
    targets = make_targets(3, V, k, seed=seed, peak=peak, counts=[k, (k + 1) // 2, 1])
    losses, gradient = value_and_gradient(name, make_logits(3, seed, size), targets, temperature)
    assert losses.isfinite().all() and gradient.isfinite().all()
    assert losses.min() > -1e-5
    assert gradient.sum(1).abs().max() < 1e-3 * max(1.0, temperature)  # a shift of all logits is no change


def test_the_bucket_is_a_lower_bound_that_tightens() -> None:
    logits = make_logits(5)
    values = [reference_kl(logits, make_targets(5, V, k)).mean().item() for k in (1, 3, 9, V)]
    assert values == sorted(values)


def test_outcome_logprobs_are_two_distributions() -> None:
    targets = make_targets(4, V, 6, counts=[6, 3, 1, 2])
    teacher, student = outcome_logprobs(make_scores(make_logits(4), targets), targets)
    assert teacher.shape == student.shape == (4, 7)
    for logprobs in (teacher, student):
        torch.testing.assert_close(logprobs.exp().sum(1), torch.ones(4))
        assert logprobs[1, 3:6].eq(-torch.inf).all()


# -- the other divergences, tails, mixes and weights -----------------------------------------------------------------


def checked(loss: LossFunction, reference: Callable[[Tensor], Tensor], logits: Tensor, targets: SparseTargets) -> None:
    """Values and gradients against float64."""
    leaf = logits.clone().requires_grad_()
    losses = loss(make_scores(leaf, targets), targets)
    exact = logits.double().requires_grad_()
    expected = reference(exact)
    torch.testing.assert_close(losses.detach().double(), expected.detach(), rtol=1e-5, atol=5e-6)
    gradients = torch.autograd.grad(losses.sum(), leaf)[0], torch.autograd.grad(expected.sum(), exact)[0]
    torch.testing.assert_close(gradients[0].double(), gradients[1], rtol=1e-5, atol=5e-6)


@pytest.mark.parametrize("temperature", [1.0, 3.0])
@pytest.mark.parametrize("k", [1, 5, V])
@pytest.mark.parametrize("tail", ["renormalise", "drop", "to_target"])
def test_what_becomes_of_the_tail_in_kl(tail: Tail, k: int, temperature: float) -> None:
    targets, logits = make_targets(6, V, k, counts=[k, max(1, k // 2), 1, k, k, k]), make_logits(6)
    targets.labels[1] = next(v for v in range(V) if v not in targets.kept_ids[1])  # a label that isn't kept
    loss = build_loss("kl", temperature=temperature, tail=tail)
    checked(loss, lambda z: reference_kl_tail(z, targets, temperature, tail), logits, targets)


@pytest.mark.parametrize("temperature", [1.0, 3.0])
@pytest.mark.parametrize("name", DIVERGENCES)
def test_divergences_over_the_kept_ids_of_both(name: str, temperature: float) -> None:
    targets, logits = make_targets(4, V, 5, counts=[5, 2, 1, 5]), make_logits(4)
    loss = build_loss(name, temperature=temperature, tail="renormalise")
    of = DIVERGENCES[name]
    checked(loss, lambda z: reference_divergence(of, z, targets, temperature, "renormalise"), logits, targets)


@pytest.mark.parametrize("k", [5, V])
@pytest.mark.parametrize(
    ("name", "parameters", "of"),
    [
        ("jsd", LossParameters(jsd_beta=0.9), partial(jsd_of, beta=0.9)),
        ("skew_kl", LossParameters(skew_alpha=0.0), kl_of),
        ("skew_kl", LossParameters(skew_alpha=0.6), partial(skew_kl_of, alpha=0.6)),
        ("skew_reverse_kl", LossParameters(skew_alpha=0.0), reverse_kl_of),
        ("ab", LossParameters(ab_alpha=1.0, ab_beta=0.0), kl_of),
        ("ab", LossParameters(ab_alpha=0.0, ab_beta=1.0), reverse_kl_of),
        ("ab", LossParameters(ab_alpha=0.5, ab_beta=0.5), lambda t, p: 2 * ((t.sqrt() - p.sqrt()) ** 2).sum()),
        ("ab", LossParameters(ab_alpha=0.0, ab_beta=0.0), lambda t, p: 0.5 * ((t.log() - p.log()) ** 2).sum()),
        (
            "ab",
            LossParameters(ab_alpha=0.5, ab_beta=0.0),
            lambda t, p: 4 * (t.sqrt() * (t / p).log() / 2 - t.sqrt() + p.sqrt()).sum(),
        ),
        (
            "ab",
            LossParameters(ab_alpha=0.0, ab_beta=0.5),
            lambda t, p: 4 * (p.sqrt() * (p / t).log() / 2 - p.sqrt() + t.sqrt()).sum(),
        ),
    ],
)
def test_parameters_and_their_limits(
    name: str, parameters: LossParameters, of: Callable[[Tensor, Tensor], Tensor], k: int
) -> None:
    targets, logits = make_targets(4, V, k), make_logits(4)
    loss = build_loss(name, parameters=parameters)
    checked(loss, lambda z: reference_divergence(of, z, targets), logits, targets)


@pytest.mark.parametrize("a", [1e-4, 1e-3])
def test_the_limits_of_ab_are_where_it_goes(a: float) -> None:
    targets, logits = make_targets(4, V, 5), make_logits(4)
    scores = make_scores(logits.double(), targets)
    for at_zero, near in (((0.5, 0.0), (0.5, a)), ((0.0, 0.5), (a, 0.5))):
        limit, value = (
            build_loss("ab", parameters=LossParameters(ab_alpha=x, ab_beta=y))(scores, targets)
            for x, y in (at_zero, near)
        )
        torch.testing.assert_close(value, limit, rtol=60 * a, atol=1e-2)


@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize("name", DIVERGENCES)
def test_a_student_that_is_the_teacher_has_nothing_to_learn(name: str, temperature: float) -> None:
    teacher = make_logits(4).log_softmax(1)
    top = teacher.topk(5)
    tails = teacher.scatter(1, top.indices, -torch.inf).logsumexp(1)
    targets = SparseTargets(torch.zeros(4, dtype=torch.int64), top.indices, top.values, tails)
    losses, gradient = value_and_gradient(name, teacher, targets, temperature)
    assert losses.abs().max() < 1e-5
    assert name == "tvd" or gradient.abs().max() < 1e-5


def test_a_mix_is_the_weighted_sum() -> None:
    targets, logits = make_targets(4, V, 5), make_logits(4)
    scores = make_scores(logits, targets)
    mix = {"kl": 0.7, "reverse_kl": 0.2, "ce": 0.3}
    expected = sum(weight * build_loss(name, temperature=2.0)(scores, targets) for name, weight in mix.items())
    torch.testing.assert_close(build_loss(mix, temperature=2.0)(scores, targets), expected)


def test_sure_targets_learn_the_text() -> None:
    entropies = torch.tensor([0.1, 0.5, 2.0, torch.nan])
    targets, logits = replace(make_targets(4, V, 5), entropies=entropies), make_logits(4)
    scores = make_scores(logits, targets)
    losses = build_loss("kl", ce_below_entropy=0.5)(scores, targets)
    expected = torch.cat([ce(scores, targets)[:1], kl(scores, targets)[1:]])
    torch.testing.assert_close(losses, expected)
    losses = build_loss("kl", ce_below_entropy=0.5, ce_at_entropy=0.25)(scores, targets)
    expected[1] = 0.25 * ce(scores, targets)[1] + 0.75 * kl(scores, targets)[1]
    torch.testing.assert_close(losses, expected)


def test_weights_of_targets_by_their_divergence() -> None:
    targets = make_targets(5, V, 5)
    samples, d = torch.tensor([0, 0, 1, 1, 2]), torch.tensor([1.0, 4.0, 0.0, 0.0, 3.0])
    weighing = Weighing(kl, alpha=2.0)
    weighed = weighing.weigh(targets, d, samples)
    assert weighed.weights is not None and weighed.weights.tolist() == pytest.approx([1.25**2, 4.0, 1.0, 1.0, 4.0])
    scores = make_scores(make_logits(5), targets)
    torch.testing.assert_close(build_loss("kl")(scores, weighed), kl(scores, targets) * weighed.weights)
    none = Weighing(kl, alpha=0.0).weigh(targets, d, samples)
    assert none.weights is not None and none.weights.tolist() == [1.0] * 5
    assert weighed[1:3].weights is not None and len(weighed[1:3].weights) == 2
