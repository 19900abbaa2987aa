"""The codec against the float64 distributions that it encodes."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distill.codec import CODECS, agree_with_tail, log1mexp
from distill.types import Records
from tests.helpers import dense_logprobs, top_k_records

EXACT = CODECS["exact"]


def mass(records: Records) -> np.ndarray:
    """Kept mass and tail of each record, float64."""
    ends = np.cumsum(records.entry_counts)
    kept = np.add.reduceat(np.exp(records.entry_logprobs.astype(np.float64)), ends - records.entry_counts)
    return kept + np.exp(records.tail_logprobs.astype(np.float64))


@given(st.floats(-100, -1e-12))
def test_log1mexp_equals_float64(x: float) -> None:
    expected = np.log(-np.expm1(x)) if x > -0.7 else np.log1p(-np.exp(x))
    assert log1mexp(np.float32([x]))[0] == pytest.approx(np.float32(expected), rel=1e-5, abs=1e-12)


@settings(deadline=None, max_examples=50)
@given(seed=st.integers(0, 1 << 30), k=st.integers(1, 97), vocab_size=st.sampled_from([97, 1 << 17]))
def test_decoded_records_are_close_and_add_up_to_one(seed: int, k: int, vocab_size: int) -> None:
    rng = np.random.default_rng(seed)
    logprobs = dense_logprobs(rng, 7)
    records = top_k_records(logprobs, rng.integers(0, 97, 7), k)
    decoded = EXACT.decode(EXACT.encode(records, vocab_size))
    assert np.array_equal(decoded.entry_ids, records.entry_ids)
    assert np.array_equal(decoded.tail_logprobs, records.tail_logprobs)
    assert np.array_equal(decoded.label_logprobs, records.label_logprobs)
    assert np.allclose(mass(decoded), 1.0, atol=1e-6)
    # fp16 has 11 significant bits.
    assert np.allclose(decoded.entry_logprobs, records.entry_logprobs, rtol=2**-10, atol=2e-3)
    kept = np.exp(records.entry_logprobs.astype(np.float64)).reshape(7, k)
    difference = (records.entry_logprobs - decoded.entry_logprobs).astype(np.float64).reshape(7, k)
    assert ((kept * difference).sum(1) < 1e-4).all()


def test_ids_beyond_16_bits_survive() -> None:
    """Report A5: ids above 65,535 wrapped."""
    records = Records(
        entry_counts=np.array([2]),
        entry_ids=np.array([69_999, 65_536]),
        entry_logprobs=np.log(np.float32([0.5, 0.25])),
        tail_logprobs=np.log(np.float32([0.25])),
        label_logprobs=np.float32([-1]),
        entropies=np.float32([1]),
    )
    assert EXACT.decode(EXACT.encode(records, 70_000)).entry_ids.tolist() == [69_999, 65_536]
    with pytest.raises(AssertionError, match="outside the vocabulary"):
        EXACT.encode(records, 69_999)


def test_records_may_differ_in_their_number_of_entries() -> None:
    logprobs = np.log(np.float32([0.5, 0.3, 0.9, 0.25, 0.25, 0.25]))
    counts = np.array([2, 1, 3])
    tails = np.log(np.float32([0.2, 0.1, 0.25]))
    assert np.allclose(agree_with_tail(logprobs, counts, tails), logprobs, atol=1e-6)
    halved = np.log(np.float32([0.6]))
    assert np.allclose(agree_with_tail(logprobs, counts, np.append(tails[:2], halved))[3:], np.log(0.4 / 3), atol=1e-6)
