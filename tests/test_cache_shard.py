"""Shards: what was put in comes out, from any reader, within the promised bytes."""

import io
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distill.cache.shard import (
    ShardImage,
    ShardReader,
    array_types,
    build_shard,
    bytes_bound,
    shard_path,
)
from distill.cache.storage import FileStore, to_hdf5
from distill.codec import Stored, codec_for
from distill.errors import InputError
from distill.files import allocated
from distill.records import concat
from distill.types import Records, TokenizedSample
from tests.helpers import VOCAB, make_records, make_samples, make_spec, same_records

KINDS = [(mode, precision) for mode in ("topk", "full") for precision in ("exact", "compact")]


def layer_of(mode: str, precision: str, k: int = 5) -> dict[str, Any]:
    return make_spec(mode=mode, cache_precision=precision, top_k=VOCAB if mode == "full" else k).describe()


def image_of(samples: list[TokenizedSample], mode: str, precision: str, k: int = 5) -> tuple[ShardImage, Records]:
    records = make_records(samples, k=VOCAB if mode == "full" else k)
    return build_shard(samples, records, layer=layer_of(mode, precision, k), vocab_size=VOCAB), records


def decoded(records: Records, mode: str, precision: str) -> Records:
    codec = codec_for(mode, precision)
    assert codec is not None
    return codec.decode(codec.encode(records, VOCAB))


@pytest.mark.parametrize(("mode", "precision"), KINDS)
def test_a_shard_reads_back_sample_by_sample(tmp_path: Path, mode: str, precision: str) -> None:
    samples = make_samples(300)
    image, records = image_of(samples, mode, precision)
    image.seal(tmp_path)
    expected = decoded(records, mode, precision)
    with ShardReader(shard_path(tmp_path, image.info.name)) as reader:
        assert same_records(reader.all_records(), expected)
        assert same_records(concat([reader.records(row) for row in range(300)]), expected)
        order = np.random.default_rng(0).permutation(300)
        shuffled = {row: reader.records(int(row)) for row in order}
        assert same_records(concat([shuffled[row] for row in range(300)]), expected)
        for row, sample in enumerate(samples):
            assert np.array_equal(reader.token_ids(row), sample.token_ids)
            assert np.array_equal(reader.targets(row), sample.targets)
            assert reader.spans(row) == sample.spans
        assert reader.key_rows() == image.keys
        assert reader.info() == image.info


@pytest.mark.parametrize(("mode", "precision"), KINDS)
def test_equal_content_gives_equal_bytes_of_the_declared_arrays(tmp_path: Path, mode: str, precision: str) -> None:
    samples = make_samples(200)
    image, _ = image_of(samples, mode, precision)
    assert image.data == image_of(samples, mode, precision)[0].data
    image.seal(tmp_path)
    with h5py.File(shard_path(tmp_path, image.info.name)) as file:
        assert list(file.attrs) == ["header"]
        types = array_types(json.loads(file.attrs["header"]))
        assert set(types) == set(file)
        for name, (dtypes, ndim) in types.items():
            assert file[name].dtype.name in dtypes and file[name].ndim == ndim
            filters = file[name].id.get_create_plist()
            assert all(filters.get_filter(i)[0] in {1, 2} for i in range(filters.get_nfilters()))
    with pytest.raises(KeyError, match="fancy"):
        array_types({"layer": {"mode": "fancy", "cache_precision": "exact"}})


@pytest.mark.parametrize(("mode", "precision"), KINDS)
def test_the_loader_of_the_documentation_works(tmp_path: Path, mode: str, precision: str) -> None:
    text = (Path(__file__).parent.parent / "docs" / "cache-format.md").read_text(encoding="utf-8")
    code = re.search(r"```python\n(.*?)```", text, re.DOTALL)
    assert code is not None
    names: dict[str, Any] = {}
    exec(code[1], names)  # the documentation is ours
    samples = make_samples(700, length=9)
    whole = make_records(samples, k=VOCAB if mode == "full" else 30)
    layer = layer_of(mode, precision, 30)
    image = build_shard(samples, whole, layer=layer, vocab_size=VOCAB)
    image.seal(tmp_path)
    path = shard_path(tmp_path, image.info.name)
    ids, probs, tails = names["load"](path)
    with ShardReader(path) as reader:
        records = reader.all_records()
    dense = np.zeros((len(records), VOCAB))
    rows = np.repeat(np.arange(len(records)), records.entry_counts)
    dense[rows, records.entry_ids] = np.exp(records.entry_logprobs.astype(np.float64))
    loaded = np.zeros_like(dense)
    np.add.at(loaded, (np.arange(len(ids))[:, None], ids), probs)
    assert np.allclose(loaded, dense, atol=1e-5)
    assert np.allclose(tails, np.exp(records.tail_logprobs), atol=1e-5)


def test_the_loader_of_the_documentation_reads_ragged_records(tmp_path: Path) -> None:
    text = (Path(__file__).parent.parent / "docs" / "cache-format.md").read_text(encoding="utf-8")
    names: dict[str, Any] = {}
    exec(text.split("```python\n")[1].split("```")[0], names)
    samples = make_samples(60)
    parts = [make_records([sample], k=1 + number % 7) for number, sample in enumerate(samples)]
    for precision in ("exact", "compact"):
        layer = layer_of("topk", precision)
        image = build_shard(samples, concat(parts), layer=layer, vocab_size=VOCAB)
        image.seal(tmp_path)
        path = shard_path(tmp_path, image.info.name)
        ids, probs, _ = names["load"](path)
        with ShardReader(path) as reader:
            records = reader.all_records()
            assert same_records(concat([reader.records(row) for row in range(60)]), records)
        first = np.cumsum(records.entry_counts) - records.entry_counts
        likeliest = probs.argmax(1)
        assert np.array_equal(ids[np.arange(len(ids)), likeliest], records.entry_ids[first])
        assert np.array_equal((probs > 0).sum(1), records.entry_counts)


@settings(deadline=None, max_examples=25)
@given(
    seed=st.integers(0, 1 << 30),
    count=st.integers(1, 40),
    length=st.integers(2, 30),
    k=st.integers(1, VOCAB),
    kind=st.sampled_from(KINDS),
)
def test_no_shard_is_larger_than_its_bound(seed: int, count: int, length: int, k: int, kind: tuple[str, str]) -> None:
    samples = make_samples(count, seed=seed, length=length)
    image, _ = image_of(samples, *kind, k=k)
    info = image.info
    layer = layer_of(*kind, k=k)
    bound = bytes_bound(info.tokens, info.targets, layer["top_k"], VOCAB, mode=kind[0], precision=kind[1])
    assert allocated(len(image.data)) + len(image.keys) <= bound
    exact = bytes_bound(
        info.tokens, info.targets, layer["top_k"], VOCAB, samples=count, mode=kind[0], precision=kind[1]
    )
    assert len(image.data) + len(image.keys) <= exact <= bound


def test_a_sample_without_targets_has_no_records(tmp_path: Path) -> None:
    samples = make_samples(3)
    samples[1] = replace(samples[1], targets=np.empty(0, np.int32))
    for precision in ("exact", "compact"):
        image, _ = image_of(samples, "topk", precision)
        image.seal(tmp_path)
        with ShardReader(shard_path(tmp_path, image.info.name)) as reader:
            assert len(reader.records(1)) == 0
            assert len(reader.records(2)) == len(samples[2].targets)


@pytest.mark.parametrize("field", ["mode", "cache_precision"])
def test_an_unknown_encoding_is_refused_by_name(tmp_path: Path, field: str) -> None:
    layer = layer_of("topk", "exact") | {field: "fancy"}
    header = {"format": "distill-shard", "version": 1, "made_by": "a test", "layer": layer}
    path = tmp_path / "shard.h5"
    path.write_bytes(to_hdf5({}, header))
    with pytest.raises(InputError, match="'fancy'"):
        ShardReader(path)


@pytest.mark.parametrize("name", ["levels", "gaps", "order_lengths", "gap_excess_counts", "steps", "record_orders"])
def test_arrays_that_do_not_fit_each_other_are_refused(tmp_path: Path, name: str) -> None:
    samples = make_samples(100)
    codec = codec_for("topk", "compact")
    assert codec is not None
    image, _ = image_of(samples, "topk", "compact")
    path = tmp_path / "shard.h5"
    with h5py.File(io.BytesIO(image.data)) as file:
        arrays = {key: Stored(dataset[()], dataset.chunks) for key, dataset in file.items()}
        header = json.loads(str(file.attrs["header"]))
    short = arrays[name].array[:-1] if name != "record_orders" else arrays[name].array + 200
    arrays[name] = Stored(short, None if short.ndim == 1 else short.shape)
    path.write_bytes(to_hdf5(arrays, header))
    with pytest.raises(InputError, match=f"damaged shard.*{name.removesuffix('_counts')}|damaged shard"):
        ShardReader(path)


def test_a_chunk_that_inflates_to_too_much_is_refused(tmp_path: Path) -> None:
    """A stranger's chunk is not inflated beyond what it can hold."""
    path = tmp_path / "bomb.h5"
    with h5py.File(path, "w") as file:
        dataset = file.create_dataset("levels", shape=(8, 8), dtype="u1", chunks=(8, 8), compression="gzip")
        bomb = to_hdf5({"levels": Stored(np.zeros((4096, 4096), np.uint8), (4096, 4096))}, {})
        with h5py.File(io.BytesIO(bomb)) as other:
            dataset.id.write_direct_chunk((0, 0), other["levels"].id.read_direct_chunk((0, 0))[1])
    with h5py.File(path) as file, pytest.raises(ValueError, match="wrong size"):
        FileStore(file).chunk("levels", (0, 0))


@pytest.mark.parametrize("filters", [{}, {"compression": "lzf"}, {"compression": "gzip", "fletcher32": True}])
def test_any_filters_of_another_writer_are_read(tmp_path: Path, filters: dict[str, Any]) -> None:
    values = np.random.default_rng(0).integers(0, 256, (70, 40)).astype(np.uint8)
    path = tmp_path / "other.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("levels", data=values, chunks=(32, 40), **filters)
    with h5py.File(path) as file:
        store = FileStore(file)
        assert np.array_equal(store.chunk("levels", (1, 0)), values[32:64])
        assert np.array_equal(store.chunk("levels", (2, 0))[:6], values[64:])


def test_what_deflate_cannot_shorten_is_stored(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (64, 4096)).astype(np.uint8)
    for packing in ("symbols", "runs", "text"):
        data = to_hdf5({"levels": Stored(noise, (64, 4096), packing)}, {})  # type: ignore[arg-type]
        with h5py.File(io.BytesIO(data)) as file:
            assert file["levels"].id.get_storage_size() < noise.nbytes * 513 / 512
            assert np.array_equal(file["levels"][()], noise)
