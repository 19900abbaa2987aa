"""Caches given away and received: nothing changes on the way, and everything is said."""

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import h5py
import numpy as np
import pytest

import distill.files
from distill.cache import Admissions, Layer, LayerSpec, ShardReader, Source, build_shard
from distill.cache.foreign import admit_foreign_file, open_foreign_file
from distill.cache.gate.rules import RefusedError
from distill.cache.plain_file import PlainFile, check_plain_file
from distill.cache.shard import shard_path
from distill.collect import Budget
from distill.errors import InputError, MachineError
from distill.records import concat
from distill.sharing import (
    choose_layers,
    describe_cache,
    describe_sample,
    export_file,
    export_folder,
    import_plain,
    sample_at,
    samples_of,
)
from distill.sharing.describe import shown
from distill.types import Records, TokenizedSample
from tests.helpers import make_records, make_samples, make_spec, same_records, top_k_records
from tests.toys import make_tokenizer

VOCAB = 261
SPEC = make_spec(vocab_size=VOCAB, top_k=5)
PLENTY = 1 << 40


def same(a: TokenizedSample, b: TokenizedSample) -> bool:
    return (
        (a.key, a.spans, a.is_completion) == (b.key, b.spans, b.is_completion)
        and np.array_equal(a.token_ids, b.token_ids)
        and np.array_equal(a.targets, b.targets)
    )


def equal(a: Records, b: Records) -> bool:
    """As ``same_records``, and unknown equals unknown."""
    names = Records.__slots__
    return all(np.array_equal(getattr(a, name), getattr(b, name), equal_nan=True) for name in names)


@pytest.fixture
def samples() -> list[TokenizedSample]:
    return make_samples(30, seed=4, length=20)


@pytest.fixture
def cache(tmp_path: Path, samples: list[TokenizedSample]) -> Path:
    """Two splits, the training one in three shards; some statistics unknown."""
    dataset = tmp_path / "cache" / "dataset"
    admissions = Admissions(tmp_path / "cache")
    for split, shards in (("train", [samples[:10], samples[10:11], samples[11:25]]), ("validation", [samples[25:]])):
        layer = Layer.open(dataset / split, SPEC, admissions)
        layer.prepare()
        for number, shard in enumerate(shards):
            records = make_records(shard, seed=number)
            if number == 1:
                records.entropies[:] = np.nan
                records.label_logprobs[:] = np.nan
            image = build_shard(shard, records, layer=SPEC.describe(), vocab_size=VOCAB)
            image.seal(layer.folder)
            layer.register(image.info)
        layer.compact()
    return dataset


def train_layer(dataset: Path, admissions: Admissions | None = None) -> Layer:
    return Layer.open(dataset / "train", SPEC, admissions or Admissions(dataset.parent))


# -- samples ----------------------------------------------------------------------------------------------------------


def test_the_samples_of_a_layer_need_no_text(cache: Path, samples: list[TokenizedSample]) -> None:
    with train_layer(cache) as layer:
        found = samples_of(layer)
        assert {sample.key for sample in found} == {sample.key for sample in samples[:25]}
        by_key = {sample.key: sample for sample in samples}
        assert all(same(sample, by_key[sample.key]) for sample in found)
        assert layer.missing(found) == []
        shard, row = found[3].where.split(":")
        assert same(sample_at(layer.reader(shard), int(row)), found[3])
        assert [sample.where.split(":")[0] for sample in found] == sorted(s.where.split(":")[0] for s in found)


def test_a_sample_that_is_there_twice_counts_once_with_the_more_targets(tmp_path: Path) -> None:
    sample = next(s for s in make_samples(50) if len(s.targets) >= 4)
    layer = Layer.open(tmp_path, SPEC, Admissions(tmp_path))
    layer.prepare()
    for targets in (sample.targets[:2], sample.targets, sample.targets[1:]):
        part = replace(sample, targets=targets)
        image = build_shard([part], make_records([part]), layer=SPEC.describe(), vocab_size=VOCAB)
        image.seal(layer.folder)
        layer.register(image.info)
    (found,) = samples_of(layer)
    assert np.array_equal(found.targets, sample.targets)


# -- a folder ---------------------------------------------------------------------------------------------------------


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_an_exported_folder_is_a_cache_folder_with_the_same_bytes(
    cache: Path, tmp_path: Path, samples: list[TokenizedSample]
) -> None:
    out = tmp_path / "shared" / "mine"
    report = export_folder(choose_layers(cache), out, Admissions(cache.parent))
    assert (report.layers, report.samples) == (2, 30)
    assert tree(out / "dataset") == tree(cache)
    assert sorted(path.name for path in out.iterdir()) == ["README.md", "dataset"]
    assert report.bytes >= sum(map(len, tree(out).values()))
    # Whoever gets it knows none of the shards: all of them pass the gate.
    with Source.open(out / "dataset" / "train", SPEC, Admissions(tmp_path / "other")) as source:
        assert source.missing(samples[:25]) == []
        assert len(samples_of(source.own)) == 25


def test_only_the_named_layers_are_exported(cache: Path, tmp_path: Path) -> None:
    for number, name in enumerate(("train", f"train/{SPEC.folder_name}", f"train/{SPEC.hex}")):
        export_folder(choose_layers(cache, [name]), tmp_path / str(number), Admissions(cache.parent))
        assert [path.name for path in (tmp_path / str(number) / "dataset").iterdir()] == ["train"]
    assert len(choose_layers(cache, [SPEC.hex])) == len(choose_layers(cache, [SPEC.folder_name])) == 2
    with pytest.raises(InputError, match=rf"'nobody': no such layer in .*; there are train/{SPEC.folder_name}, "):
        choose_layers(cache, ["nobody"])
    with pytest.raises(InputError, match="no layer in it"):
        choose_layers(tmp_path)


def test_the_card_says_what_it_is(cache: Path, tmp_path: Path) -> None:
    export_folder(choose_layers(cache), tmp_path / "out", Admissions(cache.parent))
    card = (tmp_path / "out" / "README.md").read_text()
    with train_layer(cache) as layer:
        infos = layer.shards.values()
        mass = sum(info.kept_mass_sum for info in infos) / sum(info.targets for info in infos)
    for fact in (
        *("license: # TO FILL IN", "contains the text itself", "toy teacher", "w" * 16, "t" * 64, "| topk | 5 | 261 |"),
        *("| exact |", f"{mass:.4f}", f"{sum(info.targets for info in infos):,}", '"use_teachers": false'),
    ):
        assert fact in card, fact


def peaked_layer(tmp_path: Path, spec: LayerSpec, samples: list[TokenizedSample]) -> Layer:
    layer = Layer.open(tmp_path / "cache" / "dataset" / "train", spec, Admissions(tmp_path / "cache"))
    layer.prepare()
    logits = np.random.default_rng(2).normal(0, 6, (sum(len(s.targets) for s in samples), VOCAB))
    dense = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    labels = np.concatenate([s.token_ids[s.targets] for s in samples])
    image = build_shard(samples, top_k_records(dense, labels, spec.top_k), layer=spec.describe(), vocab_size=VOCAB)
    image.seal(layer.folder)
    layer.register(image.info)
    return layer


@pytest.mark.parametrize("precision", ["exact", "compact"])
@pytest.mark.parametrize("mode", ["topk", "full"])
def test_the_cards_ten_lines_read_the_first_record(mode: str, precision: str, tmp_path: Path) -> None:
    k = 12 if mode == "topk" else VOCAB
    spec = make_spec(vocab_size=VOCAB, top_k=k, mode=mode, cache_precision=precision)
    samples = make_samples(60, seed=6, length=30)
    layer = peaked_layer(tmp_path, spec, samples)
    export_folder([layer.folder], tmp_path / "out", layer.admissions)
    (code,) = re.findall(r"```python\n(.*?)```", (tmp_path / "out" / "README.md").read_text(), re.DOTALL)
    assert code.startswith("import ") and len(code.strip().splitlines()[1:]) <= 10
    done = subprocess.run(
        [sys.executable, "-c", f"import numpy; numpy.set_printoptions(threshold=10_000)\n{code}"],
        cwd=tmp_path / "out",
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    numbers = [float(number) for number in re.findall(r"-?\d+\.?\d*(?:e[-+]?\d+)?", done.stdout)]
    records = layer.read(samples[0], layer.locate(samples[:1])[samples[0].key])
    tokens, target, tail = samples[0].token_ids, samples[0].targets[0], np.exp(records.tail_logprobs[0])
    assert numbers[: len(tokens) + 1] == [*tokens, target]
    ids, probabilities = np.array(numbers[len(tokens) + 1 : -1]).reshape(2, k)
    order = np.argsort(records.entry_ids[:k])
    assert np.array_equal(ids[np.argsort(ids)], records.entry_ids[:k][order])
    expected = np.exp(records.entry_logprobs[:k])[order]
    np.testing.assert_allclose(probabilities[np.argsort(ids)], expected, rtol=1e-4, atol=1e-7)
    np.testing.assert_allclose(numbers[-1], tail, atol=1e-6)


def test_nothing_is_overwritten(cache: Path, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "file.h5").write_bytes(b"mine")
    (tmp_path / "dangling.h5").symlink_to(tmp_path / "nowhere")
    folders, admissions = choose_layers(cache), Admissions(cache.parent)
    with pytest.raises(InputError, match="there: exists already"):
        export_folder(folders, tmp_path / "there", admissions)
    for name in ("file.h5", "dangling.h5"):
        with pytest.raises(InputError, match=f"{name}: exists already"):
            export_file(folders[0], tmp_path / name, admissions)
    assert (tmp_path / "file.h5").read_bytes() == b"mine"


def test_a_damaged_shard_is_not_given_away(cache: Path, tmp_path: Path) -> None:
    folder = choose_layers(cache, ["train"])[0]
    path = sorted(folder.glob("*.h5"))[1]
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    for export, name in ((export_file, "out.h5"), (lambda f, *rest: export_folder([f], *rest), "out")):
        path.write_bytes(data)
        with pytest.raises(InputError, match=path.stem):
            export(folder, tmp_path / name, Admissions(tmp_path / "other"))
        assert not list(tmp_path.glob("out*"))


@pytest.mark.parametrize("full", [True, False])
def test_a_full_disk_is_one_line_and_leaves_nothing(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, full: bool
) -> None:
    folders, admissions = choose_layers(cache), Admissions(cache.parent)
    if full:
        for module in ("distill.sharing.export", "distill.cache.plain_file"):
            monkeypatch.setattr(f"{module}.free_bytes", lambda path: 1000)
    else:

        def fail(*args: object, **more: object) -> None:
            raise OSError(28, os.strerror(28))

        monkeypatch.setattr("distill.sharing.export._copy", fail)
        monkeypatch.setattr("distill.cache.plain_file.sync", fail)
    with pytest.raises(MachineError):
        export_folder(folders, tmp_path / "out", admissions)
    with pytest.raises(MachineError):
        export_file(folders[0], tmp_path / "out.h5", admissions)
    assert not list(tmp_path.glob("out*"))
    assert distill.files.free_bytes(tmp_path) > 1000


# -- one file ---------------------------------------------------------------------------------------------------------


def test_one_file_holds_the_same_records_bit_for_bit(cache: Path, tmp_path: Path) -> None:
    report = export_file(choose_layers(cache, ["train"])[0], tmp_path / "x.h5", Admissions(cache.parent))
    assert (report.layers, report.samples) == (1, 25)
    admit_foreign_file(tmp_path / "x.h5", Admissions(tmp_path / "other"))
    with open_foreign_file(tmp_path / "x.h5") as file, train_layer(cache) as layer:
        assert isinstance(file, PlainFile)
        assert (file.spec, len(file)) == (SPEC, 25)
        found = list(file.read())
        for sample, records in found:
            own = layer.read(sample, layer.locate([sample])[sample.key])
            assert equal(records, own)
        stored = samples_of(layer)
        assert all(same(a, b) for a, b in zip([sample for sample, _ in found], stored, strict=True))


@pytest.mark.parametrize("mode", ["topk", "full"])
def test_one_file_of_a_compact_layer_is_bit_for_bit_too(mode: str, tmp_path: Path) -> None:
    k = 12 if mode == "topk" else VOCAB
    samples = make_samples(20, seed=6, length=30)
    layer = peaked_layer(tmp_path, make_spec(vocab_size=VOCAB, top_k=k, mode=mode, cache_precision="compact"), samples)
    export_file(layer.folder, tmp_path / "x.h5", layer.admissions)
    check_plain_file(tmp_path / "x.h5")
    with PlainFile(tmp_path / "x.h5") as file:
        for sample, records in file.read():
            assert equal(records, layer.read(sample, layer.locate([sample])[sample.key]))
        with Layer.open(tmp_path / "again", file.spec, Admissions(tmp_path)) as again:
            assert import_plain(file, again, budget=Budget(PLENTY, 0), shard_targets=50)[0] == 20
            assert again.missing(samples) == []
            for name in again.shards:
                again.admissions.inspect(shard_path(again.folder, name))


def test_anybody_reads_the_one_file_with_h5py(cache: Path, tmp_path: Path) -> None:
    export_file(choose_layers(cache, ["train"])[0], tmp_path / "x.h5", Admissions(cache.parent))
    with h5py.File(tmp_path / "x.h5") as file:
        counts = file["entry_counts"][:].astype(int)
        mass = np.add.reduceat(np.exp(file["entry_logprobs"][:].astype(float)), np.cumsum(counts) - counts)
        np.testing.assert_allclose(mass + np.exp(file["tail_logprobs"][:]), 1, atol=1e-5)
        assert file["entry_logprobs"].dtype == np.float32
        for dataset in file.values():
            filters = dataset.id.get_create_plist()
            assert all(filters.get_filter(i)[0] in {1, 2, 3} for i in range(filters.get_nfilters()))


def test_one_file_becomes_a_layer_again(cache: Path, tmp_path: Path, samples: list[TokenizedSample]) -> None:
    export_file(choose_layers(cache, ["train"])[0], tmp_path / "x.h5", Admissions(cache.parent))
    other = tmp_path / "other"
    with PlainFile(tmp_path / "x.h5") as file, Layer.open(other, file.spec, Admissions(tmp_path)) as layer:
        with pytest.raises(InputError, match="max_cache_size_gb"):
            import_plain(file, layer, budget=Budget(2000, 0), shard_targets=20)
        targets = sum(len(sample.targets) for sample in samples[:25])
        assert import_plain(file, layer, budget=Budget(PLENTY, 0), shard_targets=20) == (25, targets)
        assert import_plain(file, layer, budget=Budget(PLENTY, 0), shard_targets=20) == (0, 0)
        assert len(layer.shards) > 3
        with train_layer(cache) as own:
            for sample in samples[:25]:
                before, after = (each.read(sample, each.locate([sample])[sample.key]) for each in (own, layer))
                assert np.array_equal(before.entry_ids, after.entry_ids)
                np.testing.assert_allclose(before.entry_logprobs, after.entry_logprobs, rtol=1e-3, atol=1e-3)
                assert np.array_equal(before.tail_logprobs, after.tail_logprobs)
                assert np.array_equal(before.entropies, after.entropies, equal_nan=True)


def test_blocks_of_any_size_give_the_same(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    export_file(choose_layers(cache, ["train"])[0], tmp_path / "x.h5", Admissions(cache.parent))
    with PlainFile(tmp_path / "x.h5") as file:
        whole = list(file.read())
        for entries in (1, 100, 301):
            monkeypatch.setattr("distill.cache.plain_file._ENTRIES_AT_ONCE", entries)
            parts = list(file.read())
            assert all(same(a, b) and equal(x, y) for (a, x), (b, y) in zip(whole, parts, strict=True))


def put(layer: Layer, samples: list[TokenizedSample], records: Records) -> None:
    image = build_shard(samples, records, layer=layer.spec.describe(), vocab_size=layer.spec.vocab_size)
    image.seal(layer.folder)
    layer.register(image.info)


def imported(path: Path, folder: Path, shard_targets: int) -> Layer:
    with PlainFile(path) as file, Layer.open(folder, file.spec, Admissions()) as layer:
        import_plain(file, layer, budget=Budget(PLENTY, 0), shard_targets=shard_targets)
        return layer


def test_shards_are_cut_by_their_targets_whatever_is_read_at_once(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    export_file(choose_layers(cache, ["train"])[0], tmp_path / "x.h5", Admissions(cache.parent))
    whole = imported(tmp_path / "x.h5", tmp_path / "whole", 60)
    monkeypatch.setattr("distill.cache.plain_file._ENTRIES_AT_ONCE", 7)
    check_plain_file(tmp_path / "x.h5")
    parts = imported(tmp_path / "x.h5", tmp_path / "parts", 60)
    assert tree(parts.folder) == tree(whole.folder) and 2 <= len(whole.shards) <= 6


def test_of_a_sample_that_is_in_the_file_twice_the_more_targets_come_in(tmp_path: Path) -> None:
    first, other, *rest = (s for s in make_samples(80, seed=3) if len(s.targets) >= 4)
    layer = Layer.open(tmp_path / "theirs", SPEC, Admissions())
    layer.prepare()
    for shard in (
        [replace(first, targets=first.targets[:2]), other],
        [first, *rest],
        [replace(other, targets=other.targets[1:])],
    ):
        put(layer, shard, make_records(shard))
    with layer:
        export_file(layer.folder, tmp_path / "x.h5", layer.admissions)
        again = imported(tmp_path / "x.h5", tmp_path / "mine", 20)
        wanted = [first, other, *rest]
        assert again.missing(wanted) == [] and sum(info.samples for info in again.shards.values()) == len(wanted)
        for sample in wanted:
            theirs, mine = (each.read(sample, each.locate([sample])[sample.key]) for each in (layer, again))
            assert np.array_equal(theirs.entry_ids, mine.entry_ids)


def test_an_import_reads_the_layers_keys_once(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    export_file(choose_layers(cache, ["train"])[0], tmp_path / "x.h5", Admissions(cache.parent))
    shards = len(imported(tmp_path / "x.h5", tmp_path / "mine", 10).shards)
    asked = []
    locate = Layer.locate
    monkeypatch.setattr(Layer, "locate", lambda self, samples: asked.append(self) or locate(self, samples))
    imported(tmp_path / "x.h5", tmp_path / "mine", 10)
    imported(tmp_path / "x.h5", tmp_path / "new", 10)
    assert shards > 5 and len(asked) == 2


def test_a_long_column_of_one_number_is_honest(tmp_path: Path) -> None:
    """All of them have K entries, tails that nothing is in, unknown entropies: deflate shortens that by hundreds."""
    spec = make_spec(vocab_size=VOCAB, top_k=1)
    samples = [s for s in make_samples(400, seed=5, length=400) if len(s.targets)]
    count = sum(len(sample.targets) for sample in samples)
    assert count > 1 << 14
    same, unknown = np.zeros(count, np.float32), np.full(count, np.nan, np.float32)
    records = Records(np.ones(count, np.int64), np.full(count, 7), same, same - np.inf, unknown, unknown)
    layer = Layer.open(tmp_path / "layer", spec, Admissions())
    layer.prepare()
    put(layer, samples, records)
    with layer:
        export_file(layer.folder, tmp_path / "x.h5", layer.admissions)
    with h5py.File(tmp_path / "x.h5") as file:
        column = file["entry_counts"]
        assert column.size * column.dtype.itemsize > 200 * column.id.get_storage_size()
    check_plain_file(tmp_path / "x.h5")


def test_the_checking_process_finds_this_program_from_anywhere(cache: Path, tmp_path: Path) -> None:
    """Under ``python -c`` the program may be found by the empty entry of sys.path alone."""
    export_file(choose_layers(cache, ["train"])[0], tmp_path / "x.h5", Admissions(cache.parent))
    code = (
        "import sys, pathlib\n"
        "from distill.cache import Admissions\n"
        "from distill.cache.foreign import admit_foreign_file\n"
        "print(admit_foreign_file(pathlib.Path(sys.argv[1]), Admissions()))\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "x.h5")],
        cwd=Path(distill.files.__file__).parents[1],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (done.returncode, len(done.stdout.strip())) == (0, 64), done.stderr


@pytest.mark.parametrize(
    "kind",
    ["an id too high", "a mass above one", "a target past the end", "a count too many", "a link", "more", "no header",
     "newer", "NaN", "a shape bomb"],
)  # fmt: skip
def test_a_hostile_file_is_refused_by_name(kind: str, cache: Path, tmp_path: Path) -> None:
    path = tmp_path / "x.h5"
    export_file(choose_layers(cache, ["train"])[0], path, Admissions(cache.parent))
    check_plain_file(path)
    with h5py.File(path, "r+") as file:
        match kind:
            case "an id too high":
                file["entry_ids"][7] = VOCAB
            case "a mass above one":
                file["entry_logprobs"][5:10] = -0.1
            case "a target past the end":
                file["target_positions"][0] = 10_000
            case "a count too many":
                file["entry_counts"][3] += 1
            case "a link":
                del file["tokens"]
                file["tokens"] = h5py.ExternalLink("other.h5", "tokens")
            case "more":
                file["extra"] = np.zeros(3)
            case "no header":
                del file.attrs["header"]
            case "newer":
                file.attrs["header"] = str(file.attrs["header"]).replace('"version": 1}', '"version": 9}')
            case "NaN":
                file["entry_logprobs"][0] = np.nan
            case "a shape bomb":
                del file["tokens"]
                file.create_dataset("tokens", (1 << 40,), np.uint16, chunks=(16_384,))
    with pytest.raises((InputError, RefusedError)):
        check_plain_file(path)
    if kind == "NaN":
        with pytest.raises(InputError, match=r"x\.h5: refused: not a layer in one file, .* \(entry_logprobs: "):
            admit_foreign_file(path, Admissions(tmp_path / "other"))


# -- inspect ----------------------------------------------------------------------------------------------------------


def test_a_cache_says_what_it_is(cache: Path, samples: list[TokenizedSample]) -> None:
    lines = list(describe_cache(cache, Admissions(cache.parent)))
    text = "\n".join(lines)
    assert [line for line in lines if not line.startswith(" ")] == [
        f"train/{SPEC.folder_name}",
        f"validation/{SPEC.folder_name}",
    ]
    with train_layer(cache) as layer:
        tokens, targets = (sum(len(getattr(s, name)) for s in samples[:25]) for name in ("token_ids", "targets"))
        assert f"holds: 25 samples, {tokens} tokens, {targets} targets in 3 shards" in text
        assert f"takes: {layer.bytes():,} bytes on disk, {layer.bytes() / targets:.1f} a target; kept mass 0." in text
    assert "teacher: toy teacher, fp32" in text and "records: topk, K = 5 of 261 ids, exact" in text
    (cache / "train" / SPEC.folder_name / "layer.json").write_text("{}")
    lines = list(describe_cache(cache, Admissions(cache.parent)))
    assert "layer.json" in lines[1] and lines[2] == f"validation/{SPEC.folder_name}"
    with pytest.raises(InputError, match="no layer in it"):
        list(describe_cache(cache / "train", Admissions(cache.parent)))


def test_a_sample_is_decoded_with_its_candidates(cache: Path) -> None:
    tokenizer = make_tokenizer()
    with train_layer(cache) as layer:
        for number in (0, 11, 24):
            lines = list(describe_sample(layer, number, tokenizer, targets=3))
            text = "\n".join(lines)
            assert text.isprintable() or {c for c in text if not c.isprintable()} == {"\n"}
            stored = samples_of(layer)[number]
            assert lines[0].startswith(f"sample {number} ({stored.where.split(':')[0]}.h5, row ")
            assert sum(line.startswith("  position ") for line in lines) == min(3, len(stored.targets))
            assert any(line.startswith("  assistant  ") for line in lines)
            records = layer.read(stored, layer.locate([stored])[stored.key])
            best = f"{np.exp(records.entry_logprobs[0]):8.2%}  {shown(tokenizer.decode([records.entry_ids[0]]))}"
            assert any(best in line for line in lines)
        assert sum("probability unknown, entropy unknown" in t for n in range(25) for t in
                   describe_sample(layer, n, tokenizer, targets=1)) == 1  # fmt: skip
        with pytest.raises(InputError, match="no sample 25; it has 25, counted from 0"):
            list(describe_sample(layer, 25, tokenizer))
        with pytest.raises(InputError, match="no sample -1"):
            list(describe_sample(layer, -1, tokenizer))


def test_no_control_character_reaches_the_terminal() -> None:
    hostile = "\x1b]0;owned\x07\r\n\x9b31m\u202eevil\u2028\ud800\\ end"
    assert shown(hostile) == '"\\x1b]0;owned\\x07\\r\\n\\x9b31m\\u202eevil\\u2028\\ud800\\\\ end"'
    assert shown("schön 猫") == '"schön 猫"'
    assert len(shown("x" * 10_000)) < 500


def test_every_shard_is_whole_in_a_reader(cache: Path) -> None:
    with train_layer(cache) as layer:
        for name in layer.shards:
            with ShardReader(shard_path(layer.folder, name)) as reader:
                parts = concat([reader.records(row) for row in range(len(reader))])
                assert same_records(parts, reader.all_records()) or np.isnan(parts.entropies).all()
