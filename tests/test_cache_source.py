"""What one teacher can give: from its own layer, or cut from a larger or more exact one; and checking a whole cache."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distill.cache import Admissions, Layer, LayerSpec, Located, Source, build_shard, cut
from distill.cache.shard import keys_path, shard_path
from distill.cache.verify import verify
from distill.records import concat
from distill.types import Records, TokenizedSample
from tests.helpers import VOCAB, dense_logprobs, make_records, make_samples, make_spec, same_records, top_k_records

SAMPLES = make_samples(30)
SMALL = make_spec(top_k=5)
LARGE = make_spec(top_k=20)
LARGER = make_spec(top_k=40)
FULL = make_spec(top_k=VOCAB, mode="full")


def fill(parent: Path, spec: LayerSpec, samples: list[TokenizedSample], *, seed: int = 1) -> Layer:
    layer = Layer.open(parent, spec)
    layer.prepare()
    records = make_records(samples, k=spec.top_k, seed=seed)
    image = build_shard(samples, records, layer=spec.describe(), vocab_size=VOCAB)
    image.seal(layer.folder)
    layer.register(image.info)
    return layer


@pytest.fixture
def admissions(tmp_path: Path) -> Admissions:
    return Admissions(tmp_path)


# -- cut ------------------------------------------------------------------------------------------------------------


@given(seed=st.integers(0, 1 << 30), k=st.integers(1, 60), rows=st.integers(1, 30))
def test_cut_equals_the_dense_reference(seed: int, k: int, rows: int) -> None:
    """As if only K had ever been kept: the same ids and logprobs, and a tail that holds the rest."""
    rng = np.random.default_rng(seed)
    dense = dense_logprobs(rng, rows)
    labels = rng.integers(0, VOCAB, rows)
    larger, expected = top_k_records(dense, labels, 60), top_k_records(dense, labels, k)
    got = cut(larger, k)
    assert np.array_equal(got.entry_ids, expected.entry_ids)
    assert np.array_equal(got.entry_logprobs, expected.entry_logprobs)
    assert np.array_equal(got.entry_counts, expected.entry_counts)
    np.testing.assert_allclose(got.tail_logprobs, expected.tail_logprobs, rtol=1e-5, atol=1e-6)
    assert same_records(replace(got, tail_logprobs=expected.tail_logprobs), expected)


@given(data=st.data())
def test_cut_of_ragged_records_in_any_order(data: st.DataObject) -> None:
    """Few distinct logprobs, so ties everywhere: by falling logprob, then by id; nothing of the mass is lost."""
    rng = np.random.default_rng(data.draw(st.integers(0, 1 << 30)))
    k = data.draw(st.integers(1, 9))
    counts = rng.integers(1, 12, 7)
    rows = [(rng.permutation(50)[:count], -rng.integers(1, 5, count).astype(np.float32)) for count in counts]
    tails = np.where(rng.random(7) < 0.3, -np.inf, -5.0).astype(np.float32)
    records = Records(
        entry_counts=counts,
        entry_ids=np.concatenate([ids for ids, _ in rows]),
        entry_logprobs=np.concatenate([logprobs for _, logprobs in rows]),
        tail_logprobs=tails,
        label_logprobs=np.zeros(7, np.float32),
        entropies=np.zeros(7, np.float32),
    )
    got = cut(records, k)
    if counts.max() <= k:
        assert got is records
        return
    for row, (ids, logprobs) in enumerate(rows):
        order = sorted(range(len(ids)), key=lambda entry: (-logprobs[entry], ids[entry]))[:k]
        part = slice(int(got.entry_counts[:row].sum()), int(got.entry_counts[: row + 1].sum()))
        assert got.entry_ids[part].tolist() == ids[order].tolist()
        assert got.entry_logprobs[part].tolist() == logprobs[order].tolist()
        rest = np.exp(float(tails[row])) + np.delete(np.exp(logprobs.astype(np.float64)), order).sum()
        np.testing.assert_allclose(np.exp(float(got.tail_logprobs[row])), rest, rtol=1e-6)


def test_cut_of_nothing() -> None:
    empty = make_records(SAMPLES[:1])
    none = Records(*(getattr(empty, name)[:0] for name in Records.__slots__))
    assert len(cut(none, 3)) == 0


# -- serving --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", [LARGE, FULL], ids=["topk", "full"])
def test_a_larger_layer_serves_a_smaller_k(spec: LayerSpec, tmp_path: Path, admissions: Admissions) -> None:
    fill(tmp_path, spec, SAMPLES)
    fill(tmp_path / "collected", SMALL, SAMPLES)
    with Source.open(tmp_path, SMALL, admissions) as source, Layer.open(tmp_path / "collected", SMALL) as collected:
        assert source.missing(SAMPLES) == [] and not source.own.shards
        located, expected_at = source.locate(SAMPLES), collected.locate(SAMPLES)
        assert {place.layer for place in located.values()} == {1}
        got = concat([source.read(sample, located[sample.key]) for sample in SAMPLES])
        expected = concat([collected.read(sample, expected_at[sample.key]) for sample in SAMPLES])
        assert np.array_equal(got.entry_counts, expected.entry_counts)
        same = got.entry_ids == expected.entry_ids  # fp16 ties may stand in another order
        assert same.mean() > 0.97
        np.testing.assert_allclose(got.entry_logprobs, expected.entry_logprobs, atol=4e-3)
        np.testing.assert_allclose(np.exp(got.tail_logprobs), np.exp(expected.tail_logprobs), atol=2e-3)
        masses = np.add.reduceat(np.exp(got.entry_logprobs), np.cumsum(got.entry_counts) - got.entry_counts)
        np.testing.assert_allclose(masses + np.exp(got.tail_logprobs), 1, atol=1e-5)


def test_the_own_layer_comes_first_then_the_smallest(tmp_path: Path, admissions: Admissions) -> None:
    fill(tmp_path, LARGER, SAMPLES[:25])
    fill(tmp_path, LARGE, SAMPLES[5:20])
    fill(tmp_path, SMALL, SAMPLES[:10])
    with Source.open(tmp_path, SMALL, admissions) as source:
        assert [layer.spec.top_k for layer in source.larger] == [20, 40]
        located = source.locate(SAMPLES)
        assert [located[s.key].layer for s in SAMPLES[:25]] == [0] * 10 + [1] * 10 + [2] * 5
        assert source.missing(SAMPLES) == SAMPLES[25:]
        for sample in SAMPLES[:25]:
            assert source.read(sample, located[sample.key]).entry_counts.max() == 5


def test_own_records_are_those_of_the_layer(tmp_path: Path, admissions: Admissions) -> None:
    layer = fill(tmp_path, SMALL, SAMPLES)
    with Source.open(tmp_path, SMALL, admissions) as source, layer:
        for sample in SAMPLES:
            place = source.locate([sample])[sample.key]
            assert place == Located(place.shard, place.row, 0)
            assert same_records(source.read(sample, place), layer.read(sample, place))


@pytest.mark.parametrize(
    ("stored", "wanted", "serves"),
    [
        (make_spec(top_k=20), make_spec(top_k=20, cache_precision="compact"), True),
        (make_spec(top_k=40), make_spec(top_k=20, cache_precision="compact"), True),
        (make_spec(top_k=20, cache_precision="compact"), make_spec(top_k=20), False),
        (make_spec(top_k=40, cache_precision="compact"), make_spec(top_k=20, cache_precision="compact"), True),
        (FULL, make_spec(top_k=20), True),
        (make_spec(top_k=VOCAB), FULL, False),
        (make_spec(top_k=5), make_spec(top_k=20), False),
        (make_spec(top_k=40, weights="x"), make_spec(top_k=20), False),
        (make_spec(top_k=40, vocab_size=90), make_spec(top_k=20), False),
        (make_spec(top_k=40, dtype="bf16"), make_spec(top_k=20), False),
        (make_spec(top_k=40, teacher="renamed"), make_spec(top_k=20), True),
    ],
)
def test_which_layer_serves_which(stored: LayerSpec, wanted: LayerSpec, serves: bool) -> None:
    assert stored.serves(wanted) == serves


def test_an_exact_layer_serves_where_compact_is_wanted(tmp_path: Path, admissions: Admissions) -> None:
    exact = fill(tmp_path, LARGE, SAMPLES)
    with Source.open(tmp_path, replace(LARGE, cache_precision="compact"), admissions) as source, exact:
        located = source.locate(SAMPLES)
        for sample in SAMPLES:
            place = located[sample.key]
            assert place.layer == 1
            assert same_records(source.read(sample, place), exact.read(sample, place))


def test_a_neighbour_that_cannot_be_read_is_of_no_concern(tmp_path: Path, admissions: Admissions) -> None:
    fill(tmp_path, LARGE, SAMPLES)
    other = fill(tmp_path, LARGER, SAMPLES)
    path = other.folder / "layer.json"
    path.write_text(json.dumps(json.loads(path.read_bytes()) | {"version": 99}))
    with Source.open(tmp_path, SMALL, admissions) as source:
        assert [layer.spec.top_k for layer in source.larger] == [20]


def test_an_absent_source_is_empty_and_makes_nothing(tmp_path: Path, admissions: Admissions) -> None:
    with Source.open(tmp_path / "absent", SMALL, admissions) as source:
        assert source.missing(SAMPLES) == SAMPLES and source.larger == ()
    assert not (tmp_path / "absent").exists()


# -- verify -----------------------------------------------------------------------------------------------------------


def test_verify_finds_nothing_in_a_sound_cache(tmp_path: Path, admissions: Admissions) -> None:
    for split, spec in (("train", SMALL), ("train", LARGE), ("validation", SMALL)):
        fill(tmp_path / "dataset" / split, spec, SAMPLES)
    with admissions:
        verdicts = list(verify(tmp_path / "dataset", admissions))
    targets = sum(len(sample.targets) for sample in SAMPLES)
    assert [(v.shards, v.targets, v.problems) for v in verdicts] == [(1, targets, ())] * 3
    assert [v.folder.parent.name for v in verdicts] == ["train", "train", "validation"]


def test_verify_of_nothing(tmp_path: Path, admissions: Admissions) -> None:
    assert list(verify(tmp_path / "dataset", admissions)) == []


def flip(path: Path, where: float) -> None:
    data = bytearray(path.read_bytes())
    data[int(where * len(data))] ^= 4
    path.write_bytes(data)


@pytest.mark.parametrize(
    "damage", ["flipped", "cut", "gone", "unlisted", "keys", "layer.json", "newer index", "foreign"]
)
def test_verify_names_what_is_amiss(damage: str, tmp_path: Path, admissions: Admissions) -> None:
    parent = tmp_path / "dataset" / "train"
    layer = fill(parent, SMALL, SAMPLES)
    (name,) = layer.shards
    path = shard_path(layer.folder, name)
    match damage:
        case "flipped":
            flip(path, 0.7)
        case "cut":
            path.write_bytes(path.read_bytes()[:-100])
        case "gone":
            path.unlink()
        case "unlisted":
            (layer.folder / "index.jsonl").write_bytes(b"")
        case "keys":
            flip(keys_path(layer.folder, name), 0.2)
        case "layer.json":
            (layer.folder / "layer.json").write_text("{")
        case "newer index":
            text = (layer.folder / "index.jsonl").read_text()
            (layer.folder / "index.jsonl").write_bytes(newer(text))
        case "foreign":
            other = fill(tmp_path / "elsewhere", LARGE, SAMPLES)
            path.write_bytes(shard_path(other.folder, name).read_bytes())
    with admissions:
        (verdict,) = verify(tmp_path / "dataset", admissions)
        (problem,) = verdict.problems
    words = {
        "flipped": "set aside",
        "cut": "set aside",
        "gone": "gone; the next run collects it again",
        "unlisted": "adopted",
        "keys": ".keys file is missing or damaged",
        "layer.json": "layer.json: not JSON",
        "newer index": "index.jsonl:1: format version 2",
        "foreign": "belongs to another layer, which is not here; set aside",
    }
    assert words[damage] in problem
    assert verdict.shards == (damage in {"unlisted", "keys"})
    assert (tmp_path / "damaged" / layer.folder.name / path.name).exists() == (damage in {"flipped", "cut", "foreign"})


def newer(text: str) -> bytes:
    import zlib

    line = text.partition(" ")[2].strip().replace('"version": 1', '"version": 2').encode()
    return b"%08x %s\n" % (zlib.crc32(line), line)


def test_verify_goes_on_after_damage(tmp_path: Path, admissions: Admissions) -> None:
    parent = tmp_path / "dataset" / "train"
    layer = Layer.open(parent, SMALL)
    layer.prepare()
    for start in range(0, 30, 5):
        samples = SAMPLES[start : start + 5]
        image = build_shard(samples, make_records(samples), layer=SMALL.describe(), vocab_size=VOCAB)
        image.seal(layer.folder)
        layer.register(image.info)
    for name in sorted(layer.shards)[::2]:
        flip(shard_path(layer.folder, name), 0.5)
    with admissions:
        (verdict,) = verify(tmp_path / "dataset", admissions)
        assert verdict.shards == 3 and len(verdict.problems) == 3
        (after,) = verify(tmp_path / "dataset", admissions)
    assert after.shards == 3
    assert all("gone" in problem for problem in after.problems)


def test_verify_checks_shards_that_were_admitted(tmp_path: Path, admissions: Admissions) -> None:
    """A digest that is known says nothing of the disk that the file lies on."""
    parent = tmp_path / "dataset" / "train"
    layer = Layer.open(parent, SMALL, admissions)
    layer.prepare()
    image = build_shard(SAMPLES, make_records(SAMPLES), layer=SMALL.describe(), vocab_size=VOCAB)
    image.seal(layer.folder)
    layer.register(image.info)
    flip(shard_path(layer.folder, image.info.name), 0.5)
    with admissions:
        (verdict,) = verify(tmp_path / "dataset", admissions)
    assert verdict.shards == 0 and "set aside" in verdict.problems[0]
