"""Small made-up inputs that several tests share."""

import numpy as np

from distill.cache import LayerSpec
from distill.types import Records, Span, TokenizedSample, sample_key

VOCAB = 97


def make_sample(rng: np.random.Generator, *, length: int = 12, vocab_size: int = VOCAB) -> TokenizedSample:
    token_ids = rng.integers(0, vocab_size, length).astype(np.int32)
    start = int(rng.integers(1, length))
    return TokenizedSample(
        where=f"made-up:{rng.integers(1 << 30)}",
        is_completion=False,
        token_ids=token_ids,
        spans=(Span(start, length, "assistant"),),
        targets=np.arange(start, length, dtype=np.int32),
        key=sample_key(token_ids),
    )


def make_samples(count: int, *, seed: int = 0, length: int = 12) -> list[TokenizedSample]:
    rng = np.random.default_rng(seed)
    return [make_sample(rng, length=int(rng.integers(2, length + 1))) for _ in range(count)]


def dense_logprobs(rng: np.random.Generator, rows: int, vocab_size: int = VOCAB) -> np.ndarray:
    """float64 log-probabilities [rows, vocab_size] of rather peaked distributions."""
    logits = rng.normal(0, 3, (rows, vocab_size))
    return logits - np.log(np.exp(logits).sum(1, keepdims=True))


def top_k_records(logprobs: np.ndarray, labels: np.ndarray, k: int) -> Records:
    """The exact records of dense distributions, in float64 until the end."""
    order = np.argsort(-logprobs, axis=1, kind="stable")
    kept = order[:, :k]
    rest = np.take_along_axis(logprobs, order[:, k:], 1)
    with np.errstate(divide="ignore"):
        tails = np.log(np.exp(rest).sum(1)) if k < logprobs.shape[1] else np.full(len(logprobs), -np.inf)
    return Records(
        entry_counts=np.full(len(logprobs), k, np.int64),
        entry_ids=kept.ravel().astype(np.int64),
        entry_logprobs=np.take_along_axis(logprobs, kept, 1).ravel().astype(np.float32),
        tail_logprobs=tails.astype(np.float32),
        label_logprobs=logprobs[np.arange(len(logprobs)), labels].astype(np.float32),
        entropies=-(np.exp(logprobs) * logprobs).sum(1).astype(np.float32),
    )


def make_records(samples: list[TokenizedSample], *, k: int = 5, seed: int = 1) -> Records:
    labels = np.concatenate([sample.token_ids[sample.targets] for sample in samples])
    return top_k_records(dense_logprobs(np.random.default_rng(seed), len(labels)), labels, k)


def make_spec(**changes: object) -> LayerSpec:
    fields = {
        "teacher": "toy teacher",
        "weights": "w" * 64,
        "model_config": "c" * 64,
        "dtype": "fp32",
        "quantisation": "none",
        "attention": "sdpa",
        "token_map": "t" * 64,
        "vocab_size": VOCAB,
        "mode": "topk",
        "top_k": 5,
        "cache_precision": "exact",
    }
    return LayerSpec(**(fields | changes))  # type: ignore[arg-type]


def same_records(a: Records, b: Records) -> bool:
    return all(np.array_equal(getattr(a, name), getattr(b, name)) for name in Records.__slots__)
