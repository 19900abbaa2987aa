"""Shards and layers: written and read bit for bit, found by content, and never lost."""

import errno
import fcntl
import json
import os
import shutil
import signal
import time
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from distill.cache import (
    Admissions,
    Layer,
    LayerSpec,
    ShardImage,
    ShardReader,
    build_shard,
    find_layers,
    readable_layers,
)
from distill.cache.index import index_line
from distill.cache.shard import bytes_bound, keys_path, shard_path
from distill.codec import CODECS
from distill.errors import InputError, MachineError
from distill.files import allocated
from distill.lock import lock
from distill.records import concat, select
from distill.types import Records, TokenizedSample
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


def new_layer(tmp_path: Path, spec: LayerSpec = SPEC) -> Layer:
    layer = Layer.open(tmp_path, spec)
    layer.prepare()
    return layer


def test_shard_reads_back_bit_for_bit(tmp_path: Path) -> None:
    samples = make_samples(40)
    records = make_records(samples)
    image = image_of(samples)
    image.seal(tmp_path)
    expected = CODECS["exact"].decode(CODECS["exact"].encode(records, VOCAB))
    with ShardReader(shard_path(tmp_path, image.info.name)) as reader:
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


def test_an_index_of_a_newer_version_is_never_taken_for_torn(tmp_path: Path) -> None:
    layer = new_layer(tmp_path)
    seal(layer, make_samples(5))
    index = layer.folder / "index.jsonl"
    text = index.read_bytes().partition(b" ")[2].strip().replace(b'"version": 1', b'"version": 2, "more": 3')
    index.write_bytes(index.read_bytes() + b"%08x %s\n" % (zlib.crc32(text), text))
    before = index.read_bytes()
    with pytest.raises(
        InputError, match=r"index\.jsonl:2: format version 2, this program reads 1; update this program"
    ):
        Layer.open(tmp_path, SPEC)
    assert index.read_bytes() == before


@pytest.mark.parametrize(
    "change",
    [
        {"name": "../../../etc/passwd"},
        {"name": "A" * 32},
        {"sha256": 7},
        {"bytes": -1},
        {"bytes": True},
        {"samples": 1 << 70},
        {"kept_mass_sum": "x"},
        {"more": 1},
    ],
)
def test_an_index_entry_that_cannot_be_is_refused(tmp_path: Path, change: dict[str, object]) -> None:
    layer = new_layer(tmp_path)
    image = seal(layer, make_samples(5))
    text = json.dumps({"version": 1, **image.info.to_json(), **change}).encode()
    (layer.folder / "index.jsonl").write_bytes(b"%08x %s\n" % (zlib.crc32(text), text))
    with pytest.raises(InputError, match=rf"index\.jsonl:1: .*{next(iter(change))}"):
        Layer.open(tmp_path, SPEC)


@pytest.mark.parametrize("text", [b"[" * 100_000, b"nonsense", b"[]", b"7", b'{"version": NaN}', b"\xff\xfe"])
def test_an_index_line_that_is_no_object_is_refused(tmp_path: Path, text: bytes) -> None:
    layer = new_layer(tmp_path)
    (layer.folder / "index.jsonl").write_bytes(b"%08x %s\n" % (zlib.crc32(text), text))
    with pytest.raises(InputError, match=r"index\.jsonl:1: "):
        Layer.open(tmp_path, SPEC)


# -- damage ---------------------------------------------------------------------------------------------------------


def whole(layer: Layer, samples: list[TokenizedSample]) -> list[Records]:
    located = layer.locate(samples)
    return [layer.read(sample, located[sample.key]) for sample in samples]


@pytest.mark.parametrize("count", [100, pytest.param(1_000, marks=pytest.mark.slow)])
def test_a_flipped_bit_is_refused_by_name_or_changes_nothing(tmp_path: Path, count: int) -> None:
    """One bit anywhere in shards, keys and index: no silent change."""
    parent = tmp_path / "dataset" / "train"
    samples = make_samples(20)
    refused = 0
    with Admissions(tmp_path) as admissions:
        layer = Layer.open(parent, SPEC, admissions)
        layer.prepare()
        for part in (samples[:10], samples[10:]):
            seal(layer, part)
        expected = whole(layer, samples)
        files = {path: path.read_bytes() for path in sorted(layer.folder.iterdir()) if path.suffix != ".json"}
        assert len(files) == 5
        rng = np.random.default_rng(count)
        for number in range(count):
            # Every kind of file gets its share, not only the largest.
            path = list(files)[number % len(files)]
            damaged = bytearray(files[path])
            damaged[int(rng.integers(len(damaged)))] ^= 1 << int(rng.integers(8))
            path.write_bytes(damaged)
            with Layer.open(parent, SPEC, admissions) as again:
                try:
                    got = whole(again, samples)
                except InputError as error:
                    refused += 1
                    assert str(path) in str(error)
                    # Damaged shards are set aside; what calls itself another version's is left where it is.
                    assert path.suffix == ".h5" and (not path.exists() or "update this program" in str(error))
                else:
                    assert all(map(same_records, got, expected))
            for name, data in files.items():
                name.write_bytes(data)
    assert refused == count * 2 // 5


def test_a_damaged_shard_is_set_aside_and_collected_again(tmp_path: Path) -> None:
    parent = tmp_path / "dataset" / "train"
    samples = make_samples(20)
    with Admissions(tmp_path) as admissions:
        layer = Layer.open(parent, SPEC, admissions)
        layer.prepare()
        image = seal(layer, samples[:10])
        seal(layer, samples[10:])
        path = shard_path(layer.folder, image.info.name)
        path.write_bytes(bytes(len(image.data)))
        words = r"not an HDF5 file.*; set aside as .*, the next run collects it again"
        with Layer.open(parent, SPEC, admissions) as again, pytest.raises(InputError, match=words):
            whole(again, samples)
        target = tmp_path / "damaged" / layer.folder.name / path.name
        assert target.read_bytes() == bytes(len(image.data)) and not path.exists()
        after = Layer.open(parent, SPEC, admissions)
        assert {sample.key for sample in after.missing(samples)} == {sample.key for sample in samples[:10]}
        assert after.prepare() == []
        assert not keys_path(layer.folder, image.info.name).exists()


def test_where_nothing_can_be_moved_the_message_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parent = tmp_path / "dataset" / "train"
    with Admissions(tmp_path) as admissions:
        layer = Layer.open(parent, SPEC, admissions)
        layer.prepare()
        image = seal(layer, make_samples(5))
        shard_path(layer.folder, image.info.name).write_bytes(bytes(len(image.data)))

        def read_only(self: Path, target: Path) -> Path:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))

        monkeypatch.setattr(Path, "rename", read_only)
        with pytest.raises(InputError, match=r"Read-only file system.*, move it away and collect again"):
            whole(layer, make_samples(5))


def test_a_shard_that_its_index_line_contradicts_is_refused(tmp_path: Path) -> None:
    layer = new_layer(tmp_path)
    samples = make_samples(5)
    image = seal(layer, samples)
    wrong = replace(image.info, targets=image.info.targets + 1)
    (layer.folder / "index.jsonl").write_bytes(index_line(replace(wrong, sha256="0" * 64)))
    with Layer.open(tmp_path, SPEC) as again, pytest.raises(InputError, match="differs from the index"):
        whole(again, samples)


def test_a_swapped_shard_is_named_and_left_where_it_is(tmp_path: Path) -> None:
    """Two layers hold the same samples, so the same names; each has the other's file."""
    samples = make_samples(5)
    layers = [new_layer(tmp_path), new_layer(tmp_path, make_spec(top_k=6))]
    for layer in layers:
        image = build_shard(samples, make_records(samples), layer=layer.spec.describe(), vocab_size=VOCAB)
        image.seal(layer.folder)
        layer.register(image.info)
    one, two = (shard_path(layer.folder, image.info.name) for layer in layers)
    theirs = two.read_bytes()
    two.write_bytes(one.read_bytes())
    one.write_bytes(theirs)
    for layer, path in zip(layers, (one, two), strict=True):
        with pytest.raises(InputError, match="belongs to another layer") as caught:
            whole(Layer.open(tmp_path, layer.spec), samples)
        assert str(path) in str(caught.value) and path.exists()


def test_a_shard_of_another_layer_is_refused(tmp_path: Path) -> None:
    layer = new_layer(tmp_path)
    image = seal(layer, make_samples(5))
    other = new_layer(tmp_path, make_spec(top_k=6))
    for path in (shard_path(layer.folder, image.info.name), keys_path(layer.folder, image.info.name)):
        shutil.copy(path, other.folder)
    with pytest.raises(InputError, match="belongs to another layer"):
        Layer.open(tmp_path, make_spec(top_k=6)).prepare()


@pytest.mark.parametrize("damage", ["gone", "cut", "flipped", "noise", "of another shard"])
def test_key_rows_are_made_anew(tmp_path: Path, damage: str) -> None:
    layer = new_layer(tmp_path)
    samples = make_samples(20)
    image, other = seal(layer, samples[:10]), seal(layer, samples[10:])
    path = keys_path(layer.folder, image.info.name)
    match damage:
        case "gone":
            path.unlink()
        case "cut":
            path.write_bytes(image.keys[:-32])
        case "flipped":
            path.write_bytes(bytes([image.keys[0] ^ 1]) + image.keys[1:])
        case "noise":
            path.write_bytes(b"x" * 100_000)
        case "of another shard":
            shutil.copy(keys_path(layer.folder, other.info.name), path)
    again = Layer.open(tmp_path, SPEC, layer.admissions)
    assert again.missing(samples) == []
    again.prepare()
    assert path.read_bytes() == image.keys


def test_a_file_of_another_name_is_ignored_and_told(tmp_path: Path) -> None:
    layer = new_layer(tmp_path)
    (layer.folder / "a copy.h5").write_bytes(b"x")
    again = Layer.open(tmp_path, SPEC)
    assert again.shards == {} and "'a copy'" in again.notes[0]
    assert (layer.folder / "a copy.h5").exists()


# -- layer.json -------------------------------------------------------------------------------------------------------


def test_a_layer_is_loaded_by_its_file_alone(tmp_path: Path) -> None:
    layer = new_layer(tmp_path)
    samples = make_samples(5)
    seal(layer, samples)
    assert find_layers(tmp_path) == [layer.folder]
    with Admissions() as admissions, Layer.load(layer.folder, admissions) as again:
        assert again.spec == SPEC and again.missing(samples) == []
    assert find_layers(tmp_path / "absent") == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"version": 99}, "format version 99, this program reads .*; update"),
        ({"version": "1"}, "format version"),
        ({"top_k": 6}, "its folder is named"),
        ({"top_k": 0}, "top_k 0 does not fit"),
        ({"top_k": 98}, "top_k 98 does not fit"),
        ({"vocab_size": "97"}, "vocab_size cannot be"),
        ({"mode": "drawn"}, "mode 'drawn' .* update"),
        ({"mode": "full"}, "top_k 5 does not fit"),
        ({"teacher": "a\nb"}, "teacher cannot be"),
        ({"weights": None}, "weights cannot be"),
        ({"later": 1}, "unknown field 'later'"),
    ],
)
def test_a_layer_file_that_cannot_be_is_refused(tmp_path: Path, change: dict[str, object], words: str) -> None:
    layer = new_layer(tmp_path)
    path = layer.folder / "layer.json"
    path.write_text(json.dumps(json.loads(path.read_bytes()) | change))
    with Admissions() as admissions, pytest.raises(InputError, match=words) as caught:
        Layer.load(layer.folder, admissions)
    assert str(caught.value).startswith(f"{path}: ") and "\n" not in str(caught.value)


def test_a_neighbour_that_cannot_be_read_is_a_line(tmp_path: Path) -> None:
    layers = [new_layer(tmp_path, make_spec(top_k=k)) for k in (3, 4, 5)]
    broken = layers[1].folder
    (broken / "layer.json").write_text("{")
    found = {folder: (spec, problem) for folder, spec, problem in readable_layers(tmp_path)}
    assert list(found) == sorted(layer.folder for layer in layers)
    spec, problem = found.pop(broken)
    assert spec is None and problem.startswith(f"{broken / 'layer.json'}: not JSON") and "\n" not in problem
    assert sorted(spec.top_k for spec, problem in found.values() if spec and not problem) == [3, 5]
    assert list(readable_layers(tmp_path / "absent")) == []


@pytest.mark.parametrize("text", [b"", b"{", b"[" * 50_000, b"null", b" " * 100_000])
def test_a_damaged_layer_file_is_written_anew(tmp_path: Path, text: bytes) -> None:
    layer = new_layer(tmp_path)
    path = layer.folder / "layer.json"
    good = path.read_bytes()
    path.write_bytes(text)
    with Admissions() as admissions, pytest.raises(InputError, match=r"layer\.json"):
        Layer.load(layer.folder, admissions)
    (note,) = Layer.open(tmp_path, SPEC).prepare()
    assert "layer.json" in note and path.read_bytes() == good


# -- deleting ---------------------------------------------------------------------------------------------------------


def test_dropped_shards_are_gone_and_the_others_stay(tmp_path: Path) -> None:
    layer = new_layer(tmp_path)
    samples = make_samples(30)
    images = [seal(layer, samples[start : start + 10]) for start in (0, 10, 20)]
    before = layer.bytes()
    layer.drop([images[0].info.name, images[2].info.name, "not there"])
    assert layer.bytes() < before
    again = Layer.open(tmp_path, SPEC)
    assert {s.key for s in again.missing(samples)} == {s.key for s in samples[:10] + samples[20:]}
    left = {path.name for path in layer.folder.iterdir()}
    name = images[1].info.name
    assert left == {"layer.json", "index.jsonl", f"{name}.h5", f"{name}.keys"}


def test_a_kill_while_dropping_leaves_a_valid_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The n-th call of the file system is the last, for every n until all of it is done."""

    class Killed(BaseException):
        pass

    samples = make_samples(30)
    for last in range(1, 40):
        parent = tmp_path / str(last)
        layer = new_layer(parent)
        images = [seal(layer, samples[start : start + 10]) for start in (0, 10, 20)]
        with monkeypatch.context() as patch:
            left = [last]

            def counted(real: Callable[..., Any], left: list[int] = left) -> Callable[..., Any]:
                def call(*args: Any, **options: Any) -> Any:
                    left[0] -= 1
                    if not left[0]:
                        raise Killed
                    return real(*args, **options)

                return call

            patch.setattr(Path, "unlink", counted(Path.unlink))
            patch.setattr(Path, "replace", counted(Path.replace))
            patch.setattr(os, "fsync", counted(os.fsync))
            try:
                layer.drop([image.info.name for image in images[:2]])
                done = True
            except Killed:
                done = False
        again = Layer.open(parent, SPEC, layer.admissions)
        missing = {sample.key for sample in again.missing(samples)}
        again.prepare()
        assert {sample.key for sample in again.missing(samples)} == missing
        assert missing.isdisjoint(sample.key for sample in samples[20:])
        if done:
            assert missing == {sample.key for sample in samples[:20]}
            return
    raise AssertionError("never done")


# -- reports ----------------------------------------------------------------------------------------------------------


def test_a1_what_a_killed_writer_finished_opens(tmp_path: Path) -> None:
    """A1: SIGKILL at ten instants; every shard that was acknowledged is read, and the next start goes on."""
    samples = make_samples(64)
    images = [image_of(samples[start : start + 4]) for start in range(0, 64, 4)]
    rng = np.random.default_rng(1)
    with Admissions() as admissions:
        for attempt in range(10):
            parent = tmp_path / str(attempt)
            reader, writer = os.pipe()
            child = os.fork()
            if not child:
                layer = Layer.open(parent, SPEC, admissions)
                layer.prepare()
                for image in images:
                    image.seal(layer.folder)
                    layer.register(image.info)
                    os.write(writer, f"{image.info.name}\n".encode())
                os._exit(0)
            os.close(writer)
            time.sleep(float(rng.uniform(0, 0.05)))
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            with os.fdopen(reader) as pipe:
                acknowledged = set(pipe.read().split())
            again = Layer.open(parent, SPEC, admissions)
            again.prepare()
            assert acknowledged <= again.shards.keys() and len(again.shards) <= len(acknowledged) + 1
            with again:
                located = again.locate(samples)
                assert len(located) == 4 * len(again.shards)
                for sample in samples:
                    if sample.key in located:
                        again.read(sample, located[sample.key])
            assert not list(again.folder.glob("*.tmp"))


def test_a4_a_disk_without_locks_is_named_and_never_worked_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A4: errno 37 of a network disk names the file and the setting; nothing goes on without the lock."""

    def no_locks(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    entered = False
    with pytest.raises(MachineError, match=r"dataset\.lock: .*cache_folder"), lock(tmp_path / "dataset.lock"):
        entered = True
    assert not entered


def test_a5_ids_above_65535_come_back(tmp_path: Path) -> None:
    """A5: a vocabulary of 70,000 and an entry 69,999; HDF5 alone would have stored 65,535 in 16 bits."""
    spec = make_spec(vocab_size=70_000)
    layer = new_layer(tmp_path, spec)
    samples = make_samples(3)
    records = make_records(samples)
    ids = records.entry_ids.copy()
    ids[0] = 69_999
    image = build_shard(samples, replace(records, entry_ids=ids), layer=spec.describe(), vocab_size=70_000)
    image.seal(layer.folder)
    layer.register(image.info)
    with Layer.open(tmp_path, spec) as again:  # through the gate, too
        assert sorted(concat(whole(again, samples)).entry_ids) == sorted(ids)


def test_a24_a_sentinel_is_refused_and_lengths_are_told(tmp_path: Path) -> None:
    """A24: -1 among unsigned ids would have become 4,294,967,295; records of different lengths need no mark."""
    samples = make_samples(3)
    records = make_records(samples)
    ids = records.entry_ids.copy()
    ids[2] = -1
    with pytest.raises(AssertionError, match="outside the vocabulary"):
        build_shard(samples, replace(records, entry_ids=ids), layer=SPEC.describe(), vocab_size=VOCAB)
    counts = np.arange(len(records)) % 5 + 1
    keep = np.arange(5) < counts[:, None]
    ragged = replace(
        records,
        entry_counts=counts,
        entry_ids=records.entry_ids[keep.ravel()],
        entry_logprobs=records.entry_logprobs[keep.ravel()],
    )
    image = build_shard(samples, ragged, layer=SPEC.describe(), vocab_size=VOCAB)
    image.seal(tmp_path)
    with ShardReader(shard_path(tmp_path, image.info.name)) as reader:
        assert np.array_equal(reader.all_records().entry_counts, counts)


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
