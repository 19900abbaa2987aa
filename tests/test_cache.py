"""Shards and layers: written and read bit for bit, found by content, and never lost."""

import shutil
import zlib
from pathlib import Path

import h5py
import numpy as np
import pytest

from distill.cache import Layer, ShardImage, ShardReader, build_shard
from distill.cache.shard import bytes_bound, keys_path, shard_path
from distill.codec import CODECS
from distill.errors import InputError
from distill.files import allocated
from distill.records import concat, select
from distill.types import TokenizedSample
from tests.helpers import VOCAB, make_records, make_samples, make_spec, same_records

SPEC = make_spec()


def image_of(samples: list[TokenizedSample], seed: int = 1) -> ShardImage:
    return build_shard(samples, make_records(samples, seed=seed), layer=SPEC.describe(), vocab_size=VOCAB)


def seal(layer: Layer, samples: list[TokenizedSample], *, register: bool = True) -> ShardImage:
    image = image_of(samples)
    image.seal(layer.folder)
    if register:
        layer.register(image.info)
    return image


def new_layer(tmp_path: Path) -> Layer:
    layer = Layer.open(tmp_path, SPEC)
    layer.prepare()
    return layer


def test_shard_reads_back_bit_for_bit(tmp_path: Path) -> None:
    samples = make_samples(40)
    records = make_records(samples)
    image = image_of(samples)
    image.seal(tmp_path)
    expected = CODECS["exact"].decode(CODECS["exact"].encode(records, VOCAB))
    with ShardReader(shard_path(tmp_path, image.info.name), image.info) as reader:
        assert len(reader) == 40
        assert same_records(reader.all_records(), expected)
        assert same_records(concat([reader.records(row) for row in range(40)]), expected)
        for row, sample in enumerate(samples):
            assert np.array_equal(reader.token_ids(row), sample.token_ids)
            assert np.array_equal(reader.targets(row), sample.targets)
            assert reader.spans(row) == sample.spans
        assert reader.key_rows() == image.keys
        assert reader.info() == image.info


def test_equal_content_gives_equal_bytes_and_size_stays_within_its_bound() -> None:
    samples = make_samples(40)
    first, second = image_of(samples), image_of(samples)
    assert first.data == second.data
    bound = bytes_bound(first.info.tokens, first.info.targets, 5, VOCAB)
    assert allocated(len(first.data)) <= bound


def test_any_hdf5_reader_opens_a_shard(tmp_path: Path) -> None:
    """Built-in filters only, nothing but flat arrays and one bounded attribute."""
    image = image_of(make_samples(3))
    image.seal(tmp_path)
    with h5py.File(shard_path(tmp_path, image.info.name)) as file:
        assert list(file.attrs) == ["header"]
        for dataset in file.values():
            assert isinstance(dataset, h5py.Dataset) and dataset.ndim == 1
            filters = dataset.id.get_create_plist()
            assert all(filters.get_filter(i)[0] in {1, 2, 3} for i in range(filters.get_nfilters()))


def test_layer_finds_samples_by_content(tmp_path: Path) -> None:
    layer = new_layer(tmp_path)
    samples = make_samples(30)
    seal(layer, samples[:10])
    seal(layer, samples[10:20])
    again = Layer.open(tmp_path, SPEC)
    assert [s.key for s in again.missing(reversed(samples))] == [s.key for s in reversed(samples[20:])]
    located = again.locate(samples)
    expected = CODECS["exact"].decode(CODECS["exact"].encode(make_records(samples[10:20]), VOCAB))
    got = concat([again.read(sample, located[sample.key]) for sample in samples[10:20]])
    assert same_records(got, expected)


def test_stored_targets_serve_fewer_but_not_more(tmp_path: Path) -> None:
    from dataclasses import replace

    layer = new_layer(tmp_path)
    sample = next(s for s in make_samples(50) if len(s.targets) >= 4)
    image = seal(layer, [sample])
    fewer = replace(sample, targets=sample.targets[1::2])
    located = layer.locate([fewer])
    whole = layer.read(sample, layer.locate([sample])[sample.key])
    assert same_records(layer.read(fewer, located[sample.key]), select(whole, np.arange(len(sample.targets))[1::2]))
    if sample.targets[0] > 1:
        more = replace(sample, targets=np.concatenate([[1], sample.targets]).astype(np.int32))
        assert layer.missing([more]) == [more]
        other = build_shard([more], make_records([more]), layer=SPEC.describe(), vocab_size=VOCAB)
        assert other.info.name != image.info.name


@pytest.mark.parametrize("lost", ["index", "torn index", "keys", "keys and index"])
def test_a_sealed_shard_is_never_lost(tmp_path: Path, lost: str) -> None:
    """A kill between any two writes leaves a shard that the next start adopts."""
    layer = new_layer(tmp_path)
    samples = make_samples(20)
    seal(layer, samples[:10])
    image = seal(layer, samples[10:])
    index = layer.folder / "index.jsonl"
    whole = index.read_bytes()
    if lost == "index":
        index.write_bytes(whole.splitlines(keepends=True)[0])
    elif lost == "torn index":
        index.write_bytes(whole[:-7])
    if "keys" in lost:
        keys_path(layer.folder, image.info.name).unlink()
    if lost == "keys and index":
        index.unlink()
    (layer.folder / "half-written.h5.tmp").write_bytes(b"half")
    again = Layer.open(tmp_path, SPEC)
    again.prepare()
    assert again.missing(samples) == []
    assert again.shards == layer.shards
    assert index.read_bytes() == b"".join(sorted(whole.splitlines(keepends=True), key=lambda line: line[9:]))
    assert not list(layer.folder.glob("*.tmp"))


def test_a_shard_that_vanished_is_collected_again(tmp_path: Path) -> None:
    layer = new_layer(tmp_path)
    samples = make_samples(20)
    image = seal(layer, samples)
    shard_path(layer.folder, image.info.name).unlink()
    assert len(Layer.open(tmp_path, SPEC).missing(samples)) == 20


def test_a_layer_is_found_whatever_its_teacher_is_called(tmp_path: Path) -> None:
    layer = new_layer(tmp_path)
    samples = make_samples(5)
    seal(layer, samples)
    assert Layer.open(tmp_path, make_spec(teacher="renamed")).missing(samples) == []


def test_an_index_line_of_another_version_is_made_anew(tmp_path: Path) -> None:
    layer = new_layer(tmp_path)
    samples = make_samples(5)
    seal(layer, samples)
    index = layer.folder / "index.jsonl"
    text = index.read_bytes().partition(b" ")[2].strip().replace(b'"version": 1', b'"version": 2, "more": 3')
    index.write_bytes(b"%08x %s\n" % (zlib.crc32(text), text))
    again = Layer.open(tmp_path, SPEC)
    assert again.shards == {}
    again.prepare()
    assert again.missing(samples) == [] and again.shards == layer.shards


def test_flipped_bits_are_refused_by_name(tmp_path: Path) -> None:
    layer = new_layer(tmp_path)
    samples = make_samples(20)
    image = seal(layer, samples)
    path = shard_path(layer.folder, image.info.name)
    data = bytearray(path.read_bytes())
    rng = np.random.default_rng(3)
    for position in rng.integers(0, len(data), 60):
        damaged = bytearray(data)
        damaged[position] ^= 1 << int(rng.integers(8))
        path.write_bytes(damaged)
        with Layer.open(tmp_path, SPEC) as again, pytest.raises(InputError, match=path.name):
            again.read(samples[0], again.locate(samples)[samples[0].key])
    path.write_bytes(data)
    keys = keys_path(layer.folder, image.info.name)
    keys.write_bytes(b"\0" + keys.read_bytes()[1:])
    assert Layer.open(tmp_path, SPEC).missing(samples) == []  # derived data: computed again


def test_a_shard_of_another_layer_is_refused(tmp_path: Path) -> None:
    layer = new_layer(tmp_path)
    samples = make_samples(5)
    image = seal(layer, samples)
    other = Layer.open(tmp_path, make_spec(top_k=6))
    other.prepare()
    for path in (shard_path(layer.folder, image.info.name), keys_path(layer.folder, image.info.name)):
        shutil.copy(path, other.folder)
    with pytest.raises(InputError, match="belongs to another layer"):
        Layer.open(tmp_path, make_spec(top_k=6)).prepare()


@pytest.mark.parametrize(
    "change",
    [
        {"weights": "x" * 64},
        {"model_config": "x" * 64},
        {"dtype": "bf16"},
        {"quantisation": "nf4"},
        {"attention": "eager"},
        {"token_map": "x" * 64},
        {"vocab_size": 96},
        {"mode": "sampled"},
        {"top_k": 6},
        {"cache_precision": "compact"},
    ],
)
def test_whatever_decides_a_record_names_another_layer(change: dict[str, object]) -> None:
    assert make_spec(**change).folder_name != SPEC.folder_name
    assert make_spec(teacher="renamed").folder_name.rpartition("-")[2] == SPEC.folder_name.rpartition("-")[2]


def test_a_newer_format_is_named(tmp_path: Path) -> None:
    image = image_of(make_samples(2))
    image.seal(tmp_path)
    path = shard_path(tmp_path, image.info.name)
    with h5py.File(path, "r+") as file:
        file.attrs["header"] = str(file.attrs["header"]).replace('"version": 1}', '"version": 2}')
    with pytest.raises(InputError, match="format version 2, this program reads 1"):
        ShardReader(path)
