"""The codecs against the float64 distributions that they encode."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distill.codec import CODECS, FULL_CODECS, KL_BUDGET, Codec, MemoryStore, agree_with_tail, codec_for, log1mexp
from distill.codec import levels as levels_module
from distill.codec.orders import MAX_ORDERS, Orders, build_orders, choose_orders, number_of_orders
from distill.records import concat, select
from distill.types import Records
from tests.helpers import dense_logprobs, same_records, top_k_records

EXACT, COMPACT = CODECS["exact"], CODECS["compact"]
SHAPES = ("peaked", "flat", "tied", "suppressed", "steep", "two-sided")


def logits_of(shape: str, rng: np.random.Generator, rows: int, vocab_size: int) -> np.ndarray:
    """float64 logits of distributions of one kind."""
    noise = rng.normal(0, 1, (rows, vocab_size))
    match shape:
        case "peaked":
            noise[np.arange(rows), rng.integers(0, vocab_size, rows)] += 12
            return noise
        case "flat":
            return noise * 1e-3
        case "tied":
            return np.rint(noise)
        case "suppressed":
            return np.where(rng.random(noise.shape) < 0.5, -np.inf, noise * 3)
        case "steep":
            return noise * 40
        case _:
            return np.where(rng.random(noise.shape) < 0.01, 20.0, noise)


def records_of(
    shape: str, rng: np.random.Generator, *, rows: int, vocab_size: int, k: int, ragged: bool = False
) -> Records:
    """The likeliest entries of random distributions; what is suppressed (-inf) is never an entry."""
    logits = logits_of(shape, rng, rows, vocab_size)
    logits[np.isneginf(logits).all(1)] = 0.0
    logprobs = logits - np.logaddexp.reduce(logits, axis=1)[:, None]
    parts = []
    for row in logprobs:
        most = int(np.isfinite(row).sum())
        kept = min(int(rng.integers(1, k + 1)) if ragged else k, most)
        order = np.argsort(-row, kind="stable")
        rest = row[order[kept:]]
        with np.errstate(divide="ignore"):
            tail = np.logaddexp.reduce(rest) if np.isfinite(rest).any() else -np.inf
        parts.append((order[:kept], row[order[:kept]], tail, row[rng.integers(vocab_size)]))
    with np.errstate(invalid="ignore"):
        entropies = -np.where(np.isfinite(logprobs), np.exp(logprobs) * logprobs, 0.0).sum(1)
    return Records(
        entry_counts=np.array([len(part[0]) for part in parts]),
        entry_ids=np.concatenate([part[0] for part in parts]),
        entry_logprobs=np.concatenate([part[1] for part in parts]).astype(np.float32),
        tail_logprobs=np.array([part[2] for part in parts], np.float32),
        label_logprobs=np.array([part[3] for part in parts], np.float32),
        entropies=np.maximum(entropies, 0).astype(np.float32),
    )


def through(codec: Codec, records: Records, vocab_size: int) -> Records:
    return codec.decode(codec.encode(records, vocab_size))


def mass(records: Records) -> np.ndarray:
    """Kept mass and tail of each record, float64."""
    starts = np.cumsum(records.entry_counts) - records.entry_counts
    kept = np.add.reduceat(np.exp(records.entry_logprobs.astype(np.float64)), starts)
    return kept + np.exp(records.tail_logprobs.astype(np.float64))


def aligned(records: Records) -> tuple[np.ndarray, np.ndarray]:
    """ids and float64 logprobs, the entries of each record by id."""
    rows = np.repeat(np.arange(len(records)), records.entry_counts)
    order = np.lexsort((records.entry_ids, rows))
    return records.entry_ids[order], records.entry_logprobs[order].astype(np.float64)


def losses(records: Records, decoded: Records) -> np.ndarray:
    """KL(exact || decoded) over K + 1 outcomes of each record, float64; the same ids are demanded."""
    ids, logprobs = aligned(records)
    decoded_ids, decoded_logprobs = aligned(decoded)
    assert np.array_equal(records.entry_counts, decoded.entry_counts)
    assert np.array_equal(ids, decoded_ids)
    starts = np.cumsum(records.entry_counts) - records.entry_counts
    kept = np.add.reduceat(np.exp(logprobs) * (logprobs - decoded_logprobs), starts)
    tails, decoded_tails = records.tail_logprobs.astype(np.float64), decoded.tail_logprobs.astype(np.float64)
    assert np.array_equal(np.isneginf(tails), np.isneginf(decoded_tails))
    return kept + np.exp(tails) * (np.maximum(tails, -1e9) - np.maximum(decoded_tails, -1e9))


def assert_valid(records: Records) -> None:
    """A distribution whose likeliest entry comes first."""
    assert np.isfinite(records.entry_logprobs).all()
    assert np.allclose(mass(records), 1.0, atol=1e-5)
    starts = np.cumsum(records.entry_counts) - records.entry_counts
    assert np.array_equal(np.maximum.reduceat(records.entry_logprobs, starts), records.entry_logprobs[starts])


@given(st.floats(-100, -1e-12))
def test_log1mexp_equals_float64(x: float) -> None:
    expected = np.log(-np.expm1(x)) if x > -0.7 else np.log1p(-np.exp(x))
    assert log1mexp(np.float32([x]))[0] == pytest.approx(np.float32(expected), rel=1e-5, abs=1e-12)


@settings(deadline=None, max_examples=50)
@given(seed=st.integers(0, 1 << 30), k=st.integers(1, 97), vocab_size=st.sampled_from([97, 1 << 17]))
def test_exact_records_are_close_and_add_up_to_one(seed: int, k: int, vocab_size: int) -> None:
    rng = np.random.default_rng(seed)
    logprobs = dense_logprobs(rng, 7)
    records = top_k_records(logprobs, rng.integers(0, 97, 7), k)
    decoded = through(EXACT, records, vocab_size)
    assert np.array_equal(decoded.entry_ids, records.entry_ids)
    assert np.array_equal(decoded.tail_logprobs, records.tail_logprobs)
    assert np.array_equal(decoded.label_logprobs, records.label_logprobs)
    assert np.allclose(mass(decoded), 1.0, atol=1e-6)
    # fp16 has 11 significant bits.
    assert np.allclose(decoded.entry_logprobs, records.entry_logprobs, rtol=2**-10, atol=2e-3)
    kept = np.exp(records.entry_logprobs.astype(np.float64)).reshape(7, k)
    difference = (records.entry_logprobs - decoded.entry_logprobs).astype(np.float64).reshape(7, k)
    assert ((kept * difference).sum(1) < 1e-4).all()


@settings(deadline=None, max_examples=120)
@given(
    seed=st.integers(0, 1 << 30),
    shape=st.sampled_from(SHAPES),
    vocab_size=st.sampled_from([2, 3, 97, 1500]),
    k=st.integers(1, 300),
    rows=st.sampled_from([1, 5, 40]),
    ragged=st.booleans(),
)
def test_compact_keeps_its_promise(seed: int, shape: str, vocab_size: int, k: int, rows: int, ragged: bool) -> None:
    """Whatever the record: the same ids, at most the promised loss, a valid distribution, its likeliest first."""
    rng = np.random.default_rng(seed)
    records = records_of(shape, rng, rows=rows, vocab_size=vocab_size, k=min(k, vocab_size), ragged=ragged)
    decoded = through(COMPACT, records, vocab_size)
    assert losses(records, decoded).max() <= KL_BUDGET * 1.01 + 1e-5
    assert_valid(decoded)


@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 1 << 30), shape=st.sampled_from(SHAPES), vocab_size=st.sampled_from([2, 97, 3000]))
def test_full_distributions_invent_no_mass(seed: int, shape: str, vocab_size: int) -> None:
    rng = np.random.default_rng(seed)
    shape = "steep" if shape == "suppressed" else shape
    records = records_of(shape, rng, rows=5, vocab_size=vocab_size, k=vocab_size)
    assert np.isneginf(records.tail_logprobs).all()
    for name, codec in FULL_CODECS.items():
        decoded = through(codec, records, vocab_size)
        assert np.isneginf(decoded.tail_logprobs).all()
        assert losses(records, decoded).max() <= (KL_BUDGET * 1.01 + 1e-5 if name == "compact" else 1e-4)
        assert_valid(decoded)


def test_small_entries_of_a_large_vocabulary_keep_their_mass() -> None:
    """Each may be a 2^-30th of the first: sums of so many in float32 lose them, or invent some."""
    vocab_size = 40_000
    logits = np.random.default_rng(8).normal(0, 2, (3, vocab_size))
    logits[:, 7] += [10, 18, 25]
    logprobs = logits - np.logaddexp.reduce(logits, axis=1)[:, None]
    records = top_k_records(logprobs, np.array([7, 7, 7]), vocab_size)
    decoded = through(FULL_CODECS["compact"], records, vocab_size)
    assert_valid(decoded)
    assert losses(records, decoded).max() <= KL_BUDGET
    ids, exact = aligned(records)
    small = (ids != 7).reshape(3, -1)
    kept, expected = (np.where(small, np.exp(x).reshape(3, -1), 0).sum(1) for x in (aligned(decoded)[1], exact))
    assert np.allclose(kept, expected, rtol=0.02, atol=1e-5)


def test_the_likeliest_entry_stays_the_likeliest() -> None:
    """Also where others are as likely, or fall into the same level."""
    rng = np.random.default_rng(0)
    records = records_of("tied", rng, rows=200, vocab_size=97, k=50)
    for codec, k in ((COMPACT, 50), (EXACT, 50)):
        decoded = through(codec, records, 97)
        assert np.array_equal(decoded.entry_ids[::k], records.entry_ids[::k])


def test_a_large_vocabulary_and_ids_above_65535() -> None:
    """Report A5: ids above 65,535 wrapped."""
    rng = np.random.default_rng(1)
    small = records_of("peaked", rng, rows=700, vocab_size=300, k=20)
    spread = rng.permutation(70_000)[:300]
    records = Records(
        small.entry_counts,
        spread[small.entry_ids],
        small.entry_logprobs,
        small.tail_logprobs,
        small.label_logprobs,
        small.entropies,
    )
    for codec in CODECS.values():
        decoded = through(codec, records, 70_000)
        assert losses(records, decoded).max() <= KL_BUDGET * 1.01
        with pytest.raises(AssertionError, match="outside the vocabulary"):
            codec.encode(records, int(spread[small.entry_ids].max()))


@pytest.mark.parametrize("used", [65_535, 65_536, 65_537, 70_000])
def test_ranks_around_sixteen_bits(used: int) -> None:
    """Every id once, in one order, in records of different lengths."""
    rows, rng = 701, np.random.default_rng(2)
    counts = np.full(rows, used // rows)
    counts[: used % rows] += 1
    logprobs = [np.log(np.sort(rng.dirichlet(np.ones(count + 1)))[::-1]) for count in counts]
    ids = rng.permutation(70_000)[:used]
    ids[[ids.argmax(), -1]] = ids[[-1, ids.argmax()]]  # the last rank stands in a short record
    records = Records(
        counts,
        ids,
        np.concatenate([row[:-1] for row in logprobs]).astype(np.float32),
        np.array([row[-1] for row in logprobs], np.float32),
        np.zeros(rows, np.float32),
        np.ones(rows, np.float32),
    )
    assert number_of_orders(rows) == 1
    decoded = through(COMPACT, records, 70_000)
    assert losses(records, decoded).max() <= KL_BUDGET * 1.05
    assert_valid(decoded)


@pytest.mark.parametrize("codec", [COMPACT, EXACT], ids=["compact", "exact"])
def test_any_slice_reads_the_same_as_the_whole(codec: Codec) -> None:
    rng = np.random.default_rng(3)
    k = 40
    records = concat(
        [records_of(shape, rng, rows=300, vocab_size=2000, k=k, ragged=shape == "flat") for shape in SHAPES]
    )
    arrays = codec.encode(records, 2000)
    decoder, whole = codec.open(MemoryStore(arrays)), codec.decode(arrays)
    for start, stop in [(0, 1), (511, 513), (100, 1700), (1023, 1024), (1799, 1800), (700, 700)]:
        part = decoder.records(start, stop)
        expected = select(whole, np.arange(start, stop))
        assert same_records(part, expected), (start, stop)


@pytest.mark.parametrize("codec", FULL_CODECS.values(), ids=FULL_CODECS)
def test_any_slice_of_full_distributions_reads_the_same(codec: Codec) -> None:
    records = records_of("peaked", np.random.default_rng(4), rows=100, vocab_size=3000, k=3000)
    arrays = codec.encode(records, 3000)
    decoder, whole = codec.open(MemoryStore(arrays)), codec.decode(arrays)
    for start, stop in [(0, 3), (7, 9), (40, 100)]:
        assert same_records(decoder.records(start, stop), select(whole, np.arange(start, stop)))


@pytest.mark.parametrize("mode", ["topk", "full"])
@pytest.mark.parametrize("precision", ["exact", "compact"])
def test_encoding_again_gives_the_same_bytes_and_the_declared_arrays(mode: str, precision: str) -> None:
    codec = codec_for(mode, precision)
    assert codec is not None and codec_for(mode, "fancy") is None
    k = 400 if mode == "full" else 30
    records = records_of("two-sided", np.random.default_rng(5), rows=600, vocab_size=400, k=k)
    first, second = codec.encode(records, 400), codec.encode(records, 400)
    assert set(first) == set(second) == set(codec.array_types)
    for name, stored in first.items():
        assert np.array_equal(stored.array, second[name].array)
        kind = codec.array_types[name]
        assert stored.array.dtype.name in kind.dtypes and stored.array.ndim == kind.ndim
    assert all(len(first[name].array) == 600 for name in codec.record_arrays)
    raw = sum(stored.array.nbytes for stored in first.values())
    assert raw <= codec.bytes_bound(600, k, 400)


@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 1 << 30), shape=st.sampled_from(SHAPES), k=st.integers(1, 400), spread=st.booleans())
def test_the_bound_is_one_for_any_records(seed: int, shape: str, k: int, spread: bool) -> None:
    rng = np.random.default_rng(seed)
    records = records_of(shape, rng, rows=20, vocab_size=400, k=k)
    vocab_size = 60_000 if spread else 400
    ids = rng.permutation(vocab_size)[:400][records.entry_ids]
    records = Records(
        records.entry_counts,
        ids,
        records.entry_logprobs,
        records.tail_logprobs,
        records.label_logprobs,
        records.entropies,
    )
    for codec in CODECS.values():
        raw = sum(stored.array.nbytes for stored in codec.encode(records, vocab_size).values())
        assert raw <= codec.bytes_bound(20, k, vocab_size)


def test_statistics_are_fixed_point_and_unknown_stays_unknown() -> None:
    values = np.float32([0.0, 0.3, 2.7182, 11.5, np.nan])
    size = len(values)
    tails = np.float32([-np.inf, -1e-4, -0.7, -9.0, -200.0])
    labels = np.float32([-0.0001, -np.inf, -70.0, -3.3333, np.nan])
    records = Records(np.full(size, 1), np.arange(size), np.float32([0, -9, -0.7, -0.1, 0]), tails, labels, values)
    decoded = through(COMPACT, records, 10)
    assert np.allclose(decoded.entropies, values, atol=0.5 / 1024, equal_nan=True)
    assert np.isneginf(decoded.label_logprobs[1]) and np.isnan(decoded.label_logprobs[4])
    assert decoded.label_logprobs[2] < -63  # saturates
    assert abs(decoded.label_logprobs[3] - labels[3]) <= 0.5 / 1024
    assert np.isneginf(decoded.tail_logprobs[0]) and np.allclose(decoded.tail_logprobs[1:], tails[1:], atol=0.5 / 128)
    kept, expected = decoded.entry_logprobs, log1mexp(tails)
    assert np.allclose(kept, expected, atol=0.5 / 128), "what is kept is exact to as much, however little it is"


def test_levels_beyond_a_byte() -> None:
    """Many likely entries of which the first is far above: a fine step, so large levels."""
    k = 3000
    probs = np.concatenate([[0.5], np.full(k - 1, 0.5 / (k - 1))]) * np.linspace(1.1, 0.9, k)
    probs /= probs.sum() * 1.25
    row = Records(
        np.array([k]),
        np.arange(k),
        np.log(probs).astype(np.float32),
        np.log(np.float32([0.2])),
        np.float32([-1]),
        np.float32([5]),
    )
    records = concat([row] * 30)
    arrays = COMPACT.encode(records, k)
    assert len(arrays["level_excess"].array) == 30
    decoded = COMPACT.decode(arrays)
    assert losses(records, decoded).max() <= KL_BUDGET * 1.01
    assert_valid(decoded)


def test_the_coarsest_step_that_fits_is_found() -> None:
    """Neither always the finest nor one too coarse."""
    rng = np.random.default_rng(6)
    records = records_of("peaked", rng, rows=300, vocab_size=500, k=200)
    arrays = COMPACT.encode(records, 500)
    steps = arrays["steps"].array
    assert steps.min() == 0 and steps.max() < 40
    flat = records_of("flat", rng, rows=20, vocab_size=500, k=200)
    assert COMPACT.encode(flat, 500)["steps"].array.min() >= 0
    assert losses(flat, COMPACT.decode(COMPACT.encode(flat, 500))).max() <= KL_BUDGET * 1.01
    assert levels_module.KL_BUDGET <= 0.001


def test_records_may_differ_in_their_number_of_entries() -> None:
    logprobs = np.log(np.float32([0.5, 0.3, 0.9, 0.25, 0.25, 0.25]))
    counts = np.array([2, 1, 3])
    tails = np.log(np.float32([0.2, 0.1, 0.25]))
    assert np.allclose(agree_with_tail(logprobs, counts, tails), logprobs, atol=1e-6)
    halved = np.log(np.float32([0.6]))
    assert np.allclose(agree_with_tail(logprobs, counts, np.append(tails[:2], halved))[3:], np.log(0.4 / 3), atol=1e-6)


# -- orders -----------------------------------------------------------------------------------------------------------


def test_orders_sort_by_how_often_an_id_is_used() -> None:
    places = np.array([5, 5, 5, 5, 3, 1, 1, 12, 10 + 4])  # order 0: 5 four times, 1 twice, 3 once; order 1: 2 and 4
    orders, ranks = build_orders(places, 2, 10)
    assert orders.ids.tolist() == [5, 1, 3, 2, 4] and orders.lengths.tolist() == [3, 2]
    assert ranks[[5, 1, 3, 12, 14]].tolist() == [0, 1, 2, 0, 1]
    again = Orders.from_deltas(orders.deltas, orders.lengths)
    assert again.ids.dtype == np.uint16 and np.array_equal(again.ids, orders.ids)


def test_records_of_two_kinds_get_different_orders() -> None:
    """Two halves of the vocabulary, never mixed in a record: no order serves both."""
    rng = np.random.default_rng(7)
    rows, k = 4096, 20
    half = rng.integers(0, 2, rows)
    ids = np.stack([rng.choice(400, k, replace=False) for _ in range(rows)]) + 400 * half[:, None]
    logprobs = np.tile(np.log(np.linspace(2, 1, k) / 40), rows).astype(np.float32)
    ones = np.ones(rows, np.float32)
    records = Records(np.full(rows, k), ids.ravel(), logprobs, log1mexp(ones * np.log(0.75)), -ones, ones)
    chosen = choose_orders(records, 800)
    assert chosen.max() < number_of_orders(rows) <= MAX_ORDERS
    for order in np.unique(chosen):
        assert len(np.unique(half[chosen == order])) == 1
