"""The fused head against plain autograd on whole logits in float64: values, gradients, memory, loss scale."""

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from distill.fused import dense_loss, dense_losses, dense_statistics, fused_loss, fused_losses, student_statistics
from distill.head import Head
from distill.losses import LOSSES, SparseTargets, StudentScores, Tail, build_loss, tails_of
from tests.dense_reference import make_targets, reference_of

N, V, H, ROWS = 11, 29, 6, 33
KL = build_loss("kl")


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def make_head(
    *, scale: float = 1.0, softcap: float | None = None, bias: bool = False, dtype: torch.dtype = torch.float32
) -> Head:
    weight = random(ROWS, H, seed=1).to(dtype).requires_grad_()
    return Head(weight, random(ROWS, seed=2).to(dtype).requires_grad_() if bias else None, scale, softcap, V)


def make_hidden() -> Tensor:
    return random(N, H, seed=3).requires_grad_()


def gradients(loss: Tensor, hidden: Tensor, head: Head) -> list[Tensor]:
    return list(torch.autograd.grad(loss, [t for t in (hidden, head.weight, head.bias) if t is not None]))


def expected(
    hidden: Tensor, head: Head, targets: SparseTargets, name: str, temperature: float, tail: str = "bucket"
) -> list[Tensor]:
    """[loss, gradients of hidden, weight and bias], float64."""
    leaves = [None if t is None else t.detach().double().requires_grad_() for t in (hidden, head.weight, head.bias)]
    h, weight, bias = leaves
    logits = head.scale * nn.functional.linear(h, weight, bias)[:, :V]
    if head.softcap is not None:
        logits = head.softcap * torch.tanh(logits / head.softcap)
    loss = reference_of(name, tail)(logits, targets, temperature).sum() / N
    return [loss, *torch.autograd.grad(loss, [leaf for leaf in leaves if leaf is not None])]


HEADS = {
    "plain": {},
    "bias": {"bias": True},
    "scaled": {"scale": 0.3},
    "capped": {"softcap": 2.0},
    "all": {"scale": 1.7, "softcap": 1.5, "bias": True},
}


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize("k", [1, 5, V])
@pytest.mark.parametrize(("name", "temperature"), [("kl", 1.0), ("kl", 2.5), ("ce", 1.0)])
def test_value_and_gradients_equal_the_reference(kind: str, k: int, name: str, temperature: float) -> None:
    counts = [max(1, k - row % 4) for row in range(N)]
    hidden, head, targets = make_hidden(), make_head(**HEADS[kind]), make_targets(N, V, k, counts=counts)
    loss = fused_loss(
        hidden, head, targets, build_loss(name, temperature=temperature), scale=1 / N, chunk_bytes=4 * V * 4
    )
    assert loss.dtype == torch.float32 and loss.shape == ()
    results = [loss, *gradients(loss, hidden, head)]
    for result, reference in zip(results, expected(hidden, head, targets, name, temperature), strict=True):
        torch.testing.assert_close(result.double(), reference, rtol=2e-5, atol=2e-6)
    assert results[2][V:].eq(0).all()  # rows behind the crop don't exist


@pytest.mark.parametrize("temperature", [1.0, 2.5])
@pytest.mark.parametrize("k", [1, 5, V])
@pytest.mark.parametrize(("name", "tail"), [(name, tail) for name in LOSSES for tail in tails_of(name)])
def test_every_loss_with_every_tail_equals_the_reference(name: str, tail: Tail, k: int, temperature: float) -> None:
    targets = make_targets(N, V, k, counts=[max(1, k - row % 4) for row in range(N)])
    hidden, head = make_hidden(), make_head(**HEADS["all"])
    loss = fused_loss(
        hidden, head, targets, build_loss(name, temperature=temperature, tail=tail), scale=1 / N, chunk_bytes=4 * V * 4
    )
    results = [loss, *gradients(loss, hidden, head)]
    for result, reference in zip(results, expected(hidden, head, targets, name, temperature, tail), strict=True):
        torch.testing.assert_close(result.double(), reference, rtol=5e-5, atol=5e-6)


@pytest.mark.parametrize("name", LOSSES)
def test_losses_one_by_one_are_those_of_the_sum(name: str) -> None:
    """What weights by divergence are made of: chunked, dense and summed agree."""
    hidden, head, targets, loss_fn = make_hidden(), make_head(bias=True), make_targets(N, V, 5), build_loss(name)
    losses = fused_losses(hidden, head, targets, loss_fn, chunk_bytes=4 * V * 3)
    assert losses.shape == (N,) and not losses.requires_grad
    torch.testing.assert_close(losses, dense_losses(head.logits(hidden).detach(), targets, loss_fn))
    torch.testing.assert_close(losses.sum(), fused_loss(hidden, head, targets, loss_fn, scale=1.0))


def test_rows_are_worked_on_in_blocks_without_a_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for rows in (1, 2, 100):
        monkeypatch.setattr("distill.fused._CPU_BLOCK_BYTES", 4 * V * rows)
        hidden, head = make_hidden(), make_head()
        loss = fused_loss(hidden, head, make_targets(N, V, 5), KL, scale=1 / N)
        results.append([loss.detach(), *gradients(loss, hidden, head)])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize(("n", "most", "sizes"), [(11, 4, {4, 3}), (9, 4, {3}), (10, 3, {3, 2}), (4, 100, {4})])
def test_chunks_are_of_about_the_same_size(n: int, most: int, sizes: set[int]) -> None:
    """A last chunk of one row would cost as much as a whole one: it passes over the whole gradient of the weight."""
    seen = set()

    def loss_fn(scores: StudentScores, targets: SparseTargets) -> Tensor:
        seen.add(len(targets))
        return KL(scores, targets)

    fused_loss(make_hidden()[:n], make_head(), make_targets(n, V, 5), loss_fn, scale=1.0, chunk_bytes=4 * V * most)
    assert seen == sizes


@pytest.mark.parametrize("rows", range(1, N + 2))
def test_the_chunk_size_is_invisible(rows: int) -> None:
    hidden, head, targets = make_hidden(), make_head(softcap=3.0, bias=True), make_targets(N, V, 5)
    whole = fused_loss(hidden, head, targets, KL, scale=1 / N)
    parts = fused_loss(hidden, head, targets, KL, scale=1 / N, chunk_bytes=4 * V * rows)
    torch.testing.assert_close(parts, whole)
    for a, b in zip(gradients(parts, hidden, head), gradients(whole, hidden, head), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", LOSSES)
def test_dense_loss_and_statistics_agree_with_fused(name: str) -> None:
    for k in (4, V):
        hidden, head, targets = make_hidden(), make_head(bias=True, scale=0.5), make_targets(N, V, k)
        fused = fused_loss(hidden, head, targets, build_loss(name), scale=1 / N)
        dense = dense_loss(head.logits(hidden), targets, build_loss(name), scale=1 / N)
        torch.testing.assert_close(fused, dense)
        for a, b in zip(gradients(fused, hidden, head), gradients(dense, hidden, head), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", HEADS)
def test_statistics_equal_the_reference(kind: str) -> None:
    hidden, head, targets = make_hidden(), make_head(**HEADS[kind]), make_targets(N, V, 5)
    logits = head.logits(hidden).detach()
    others = logits.clone().scatter_(1, targets.entry_ids, -torch.inf)
    for statistics in (
        student_statistics(hidden, head, targets, chunk_bytes=4 * V * 3),
        dense_statistics(logits, targets),
    ):
        torch.testing.assert_close(statistics.scores.kept_logits, logits.gather(1, targets.entry_ids))
        torch.testing.assert_close(statistics.scores.rest_lse, others.logsumexp(1))
        torch.testing.assert_close(statistics.scores.label_logits, logits[range(N), targets.labels])
        torch.testing.assert_close(statistics.top_logprobs, logits.log_softmax(1).amax(1))
        assert torch.equal(statistics.argmax_ids, logits.argmax(1))
        assert not statistics.top_logprobs.requires_grad
    assert torch.equal(logits, head.logits(hidden))  # dense_statistics leaves its input alone


def test_suppressed_tokens_on_both_sides_are_finite() -> None:
    """Report A7: teacher and student row [-0.2, -1.7, -inf]."""
    logits = torch.tensor([[-0.2, -1.7, -torch.inf]], requires_grad=True)
    targets = SparseTargets(
        torch.tensor([0]), torch.tensor([[0, 1, 2]]), logits.detach().clone(), torch.tensor([-torch.inf])
    )
    hidden = torch.ones(1, 1, requires_grad=True)
    head = Head(torch.zeros(3, 1, requires_grad=True), logits.detach()[0].requires_grad_(), 1.0, None, 3)
    for loss, leaves in (
        (dense_loss(logits, targets, KL, scale=1.0), [logits]),
        (fused_loss(hidden, head, targets, KL, scale=1.0), [hidden, head.weight, head.bias]),
    ):
        assert loss.item() == pytest.approx(0.0, abs=1e-6)
        for gradient in torch.autograd.grad(loss, leaves):
            torch.testing.assert_close(gradient, torch.zeros_like(gradient))


class LargestTensor(TorchDispatchMode):
    """Records the number of elements of the largest tensor that any operation returns."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for part in result if isinstance(result, tuple | list) else [result]:
            if isinstance(part, Tensor):
                self.largest = max(self.largest, part.numel())
        return result


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_no_tensor_of_targets_times_vocabulary_exists(softcap: float | None) -> None:
    n, vocab, chunk = 64, 101, 3
    targets = make_targets(n, vocab, 5)
    weight, hidden = random(vocab, 8, seed=1).requires_grad_(), random(n, 8, seed=2).requires_grad_()
    head = Head(weight, None, 1.0, softcap, vocab)
    with LargestTensor() as allocations:
        fused_loss(hidden, head, targets, KL, scale=1.0, chunk_bytes=4 * vocab * chunk).backward()
        student_statistics(hidden, head, targets, chunk_bytes=4 * vocab * chunk)
    assert allocations.largest <= max(weight.numel(), chunk * vocab)


def test_splits_of_a_step_give_the_same_gradient() -> None:
    """Invariant 6 and report A10: one sum over all targets, divided once, whatever the micro-batches."""
    targets, reference = make_targets(N, V, 5), None
    for cuts in ([N], [2, N], [1, 4, 5, N]):
        hidden, head, start = make_hidden(), make_head(), 0
        for stop in cuts:
            rows = slice(start, stop)
            fused_loss(hidden[rows], head, targets[rows], KL, scale=1 / N).backward()
            start = stop
        reference = reference or (head.weight.grad, hidden.grad)
        torch.testing.assert_close(head.weight.grad, reference[0], rtol=1e-5, atol=1e-7)
        torch.testing.assert_close(hidden.grad, reference[1], rtol=1e-5, atol=1e-7)


def test_a10_the_mean_is_over_targets_not_over_micro_batches() -> None:
    """Report A10: 2 targets at KL 0.5 and 6 at KL 2.0 are 1.625."""
    hidden, head, targets = make_hidden(), make_head(), make_targets(N, V, 5)
    total = 0.0
    for n, value in ((2, 0.5), (6, 2.0)):
        loss = fused_loss(hidden[:n], head, targets[:n], lambda s, _, v=value: v + 0.0 * s.rest_lse, scale=1 / 8)
        total += loss.item()
    assert total == 1.625


def test_tied_weights_sum_both_gradients() -> None:
    embedding, targets = nn.Embedding(V, H), make_targets(N, V, 5)
    head = Head(embedding.weight, None, 1.0, None, V)
    ids = torch.arange(N)
    fused_loss(embedding(ids), head, targets, KL, scale=1.0).backward()
    fused, embedding.weight.grad = embedding.weight.grad, None
    dense_loss(head.logits(embedding(ids)), targets, KL, scale=1.0).backward()
    torch.testing.assert_close(fused, embedding.weight.grad, rtol=1e-5, atol=1e-6)


def test_frozen_parts_get_no_gradient_and_change_no_other() -> None:
    hidden, head, targets = make_hidden(), make_head(bias=True), make_targets(N, V, 5)
    full = gradients(fused_loss(hidden, head, targets, KL, scale=1.0), hidden, head)
    head.weight.requires_grad_(False)
    fused_loss(hidden, head, targets, KL, scale=1.0).backward()
    assert head.weight.grad is None
    assert torch.equal(hidden.grad, full[0]) and torch.equal(head.bias.grad, full[2])
    head.weight.requires_grad_(True)
    fused_loss(hidden.detach(), head, targets, KL, scale=1.0).backward()
    assert torch.equal(head.weight.grad, full[1])


def test_without_grad_mode_the_value_is_the_same_and_no_gradient_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, head, targets = make_hidden(), make_head(), make_targets(N, V, 5)
    trained = fused_loss(hidden, head, targets, KL, scale=1 / N)
    monkeypatch.setattr("distill.fused._Gradients", None)
    with torch.no_grad():
        validated = fused_loss(hidden, head, targets, KL, scale=1 / N)
    assert torch.equal(trained, validated)
    assert not validated.requires_grad


def test_backward_multiplies_and_works_once() -> None:
    hidden, head, targets = make_hidden(), make_head(), make_targets(N, V, 5)
    once = gradients(fused_loss(hidden, head, targets, KL, scale=0.5), hidden, head)
    loss = fused_loss(hidden, head, targets, KL, scale=0.25)
    (6.0 * loss).backward(retain_graph=True)
    torch.testing.assert_close(hidden.grad, 3.0 * once[0])
    with pytest.raises(AssertionError, match="once"):
        loss.backward()


@pytest.mark.parametrize("autocast", [False, True])
def test_bfloat16_is_near_the_reference_and_gradients_keep_their_dtypes(autocast: bool) -> None:
    targets = make_targets(N, V, 5)
    head = make_head(dtype=torch.float32 if autocast else torch.bfloat16, bias=True)
    hidden = random(N, H, seed=3).to(torch.bfloat16).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = fused_loss(hidden, head, targets, KL, scale=1 / N, chunk_bytes=4 * V * 4)
        statistics = student_statistics(hidden, head, targets)
    assert loss.dtype == statistics.scores.rest_lse.dtype == torch.float32
    reference = expected(hidden, head, targets, "kl", 1.0)
    torch.testing.assert_close(loss.double(), reference[0], rtol=2e-2, atol=1e-2)
    for result, exact, leaf in zip(
        gradients(loss, hidden, head), reference[1:], (hidden, head.weight, head.bias), strict=True
    ):
        assert result.dtype == leaf.dtype
        assert (result.double() - exact).norm() < 0.02 * exact.norm()


def test_the_scale_is_in_the_products_of_half_precision() -> None:
    """A loss scale heals what vanishes in float16, and 1 / number of targets what a sum over them would overflow."""
    count = 20
    targets = SparseTargets(
        torch.zeros(count, dtype=torch.int64),
        torch.zeros(count, 1, dtype=torch.int64),
        torch.full((count, 1), 0.999).log(),
        torch.full((count,), 0.001).log(),
    )
    head = Head(torch.zeros(V, H, dtype=torch.float16).requires_grad_(), None, 1.0, None, V)
    hidden = torch.full((count, H), 9000.0).requires_grad_()
    large = gradients(fused_loss(hidden, head, targets, KL, scale=1 / count), hidden, head)[1]
    torch.testing.assert_close(large[0].float(), torch.full((H,), 9000 * (1 / V - 0.999)), rtol=2e-3, atol=0.0)
    ones = torch.ones(count, H).requires_grad_()
    tiny = gradients(fused_loss(ones, head, targets, KL, scale=2e-9), ones, head)[1]
    healed = gradients(fused_loss(ones, head, targets, KL, scale=2e-9 * 65536), ones, head)[1]
    assert not tiny.any() and healed[:, 0].all()


def test_gradient_checkpointing_before_the_head() -> None:
    body, targets = nn.Linear(H, H), make_targets(N, V, 5)
    states = random(N, H, seed=3)
    results = []
    for use in (False, True):
        head = make_head()
        hidden = torch.utils.checkpoint.checkpoint(body, states, use_reentrant=False) if use else body(states)
        body.zero_grad()
        fused_loss(hidden, head, targets, KL, scale=1.0).backward()
        results.append((body.weight.grad.clone(), head.weight.grad))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
