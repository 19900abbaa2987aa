"""Looking at a cache, checking it, giving it away and taking one in, as the command line does it."""

import shutil
from pathlib import Path

import pytest

from distill.collect import LAYER_BYTES, SHARD_OVERHEAD
from distill.files import disk_bytes
from tests.jobs import distill, same_weights, shards_of, summary_of, weights_of, write_config


@pytest.fixture(scope="module")
def collected(
    tmp_path_factory: pytest.TempPathFactory, teacher_folder: Path, student_folder: Path, text_file: Path
) -> Path:
    """The folder of a finished run."""
    folder = tmp_path_factory.mktemp("collected")
    distill(write_config(folder, teacher_folder, student_folder, text_file))
    return folder


@pytest.fixture
def copied(tmp_path: Path, collected: Path, teacher_folder: Path, student_folder: Path, text_file: Path) -> Path:
    """The configuration of a copy of that cache."""
    shutil.copytree(collected / "cache", tmp_path / "cache", symlinks=True)
    return write_config(tmp_path, teacher_folder, student_folder, text_file)


def test_inspect_says_what_a_cache_is(copied: Path) -> None:
    done = distill(copied, "inspect", "--sample", "3")
    assert "toy-teacher" in done.stdout and "K = 20 of 261 ids" in done.stdout and "sample 3 of" in done.stdout
    assert not done.stderr
    assert "100000" in distill(copied, "inspect", "--sample", "100000", code=2).stderr.replace(",", "")
    assert distill(copied, "inspect", "--sample", "x", code=2).stderr.startswith("error: --sample: must be")
    assert "no such layer" in distill(copied, "inspect", "--layer", "nobody", code=2).stderr


def test_inspect_shows_a_sample_of_a_layer_that_has_some(copied: Path) -> None:
    layer = next(copied.parent.glob("cache/dataset/train/*"))
    empty = layer.with_name(f"a-first-one-{layer.name[-12:]}")
    empty.mkdir()
    shutil.copy(layer / "layer.json", empty)
    assert f"sample 3 of train/{layer.name}" in distill(copied, "inspect", "--sample", "3").stdout


@pytest.mark.parametrize("text", [None, "{"])
def test_a_lost_layer_file_is_written_anew_by_a_run_that_misses_nothing(copied: Path, text: str | None) -> None:
    path = next(copied.parent.glob("cache/dataset/train/*/layer.json"))
    good = path.read_bytes()
    path.unlink() if text is None else path.write_text(text)
    done = distill(copied, "collect")
    assert "layer.json" in done.stdout + done.stderr and path.read_bytes() == good
    assert "layer.json" not in (done := distill(copied, "collect")).stdout + done.stderr


def test_verify_names_a_damaged_shard_and_the_next_run_makes_it_anew(copied: Path) -> None:
    cache = copied.parent / "cache"
    before = shards_of(cache)
    done = distill(copied, "verify")
    assert "are sound" in done.stdout and not done.stderr
    shard = max(cache.glob("dataset/train/*/*.h5"), key=lambda path: path.stat().st_size)
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    done = distill(copied, "verify", code=2)
    assert shard.name in done.stderr and "set aside" in done.stderr and not shard.exists()
    assert (cache / "damaged" / shard.parent.name / shard.name).exists()
    distill(copied, "collect")
    assert shards_of(cache) == before
    distill(copied, "verify")


def test_a_damaged_shard_stops_a_training_by_name_and_the_next_run_goes_on(copied: Path) -> None:
    cache = copied.parent / "cache"
    before = shards_of(cache)
    shard = max(cache.glob("dataset/train/*/*.h5"), key=lambda path: path.stat().st_size)
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    done = distill(copied, "train", code=2)
    assert shard.name in done.stderr and done.stderr.count("error:") == 1
    distill(copied)
    assert shards_of(cache) == before
    assert summary_of(cache)["status"] == "completed" and summary_of(cache)["cache"]["collected_targets"] > 0


def test_an_exported_folder_is_a_cache_folder(
    copied: Path, collected: Path, student_folder: Path, text_file: Path, tmp_path: Path
) -> None:
    out = tmp_path / "shared"
    done = distill(copied, "export", "--out", str(out))
    assert "contains the text" in done.stdout and "licence" in (out / "README.md").read_text().lower()
    assert "exists already" in distill(copied, "export", "--out", str(out), code=2).stderr
    config = write_config(
        tmp_path / "theirs", tmp_path, student_folder, text_file, cache_folder=str(out), use_teachers=False
    )
    distill(config)
    assert same_weights(weights_of(out), weights_of(collected / "cache"))


def test_a_plain_file_comes_back(copied: Path, student_folder: Path, text_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "layer.h5"
    assert "--layer: one file holds one layer" in distill(copied, "export", "--out", str(out), code=2).stderr
    distill(copied, "export", "--out", str(out), "--layer", "train")
    config = write_config(tmp_path / "theirs", tmp_path, student_folder, text_file)
    done = distill(config, "import", "--from", str(out))
    assert "imported" in done.stdout
    done = distill(config, "inspect")
    assert "K = 20 of 261 ids" in done.stdout


def test_an_import_keeps_to_the_cap(copied: Path, student_folder: Path, text_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "layer.h5"
    distill(copied, "export", "--out", str(out), "--layer", "train")
    distill(write_config(tmp_path / "plenty", tmp_path, student_folder, text_file), "import", "--from", str(out))
    needed = disk_bytes(tmp_path / "plenty" / "cache" / "dataset")
    for number, spare in enumerate((-1, 2 * SHARD_OVERHEAD + 2 * LAYER_BYTES)):
        cap = (needed + spare) / 1e9
        folder = tmp_path / str(number)
        config = write_config(folder, tmp_path, student_folder, text_file, max_cache_size_gb=cap)
        done = distill(config, "import", "--from", str(out), code=2 if spare < 0 else 0)
        assert ("max_cache_size_gb" in done.stderr) == (spare < 0)
        assert disk_bytes(folder / "cache" / "dataset") <= needed + spare


def test_a_failed_import_leaves_no_layer(copied: Path, student_folder: Path, text_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "layer.h5"
    distill(copied, "export", "--out", str(out), "--layer", "train")
    data = bytearray(out.read_bytes())
    data[len(data) // 2] ^= 1
    out.write_bytes(data)
    config = write_config(tmp_path / "theirs", tmp_path, student_folder, text_file)
    assert str(out) in distill(config, "import", "--from", str(out), code=2).stderr
    assert not list((tmp_path / "theirs" / "cache").glob("dataset/*/*"))


def test_a_place_that_cannot_be_written_is_not_a_full_disk(copied: Path) -> None:
    for out in ("/proc/shared", "/proc/layer.h5"):
        done = distill(copied, "export", "--out", out, "--layer", "train", code=2)
        assert f"error: {out}: cannot write" in done.stderr and "full" not in done.stderr


def test_import_needs_what_it_says(copied: Path, tmp_path: Path) -> None:
    assert distill(copied, "import", code=2).stderr == "error: --from: missing (import --from PATH)\n"
    assert "absent.hdf5" in distill(copied, "import", "--from", str(tmp_path / "absent.hdf5"), code=2).stderr
    (tmp_path / "text.hdf5").write_text("not HDF5 at all")
    done = distill(copied, "import", "--from", str(tmp_path / "text.hdf5"), code=2)
    assert "text.hdf5" in done.stderr and done.stderr.count("error:") == 1
    assert distill(copied, "export", code=2).stderr == "error: --out: missing (export --out PATH)\n"
    assert distill(copied, "--from", "x", code=2).stderr == "error: --from: belongs to init-student and import\n"
    assert "--prune: has no meaning for verify" in distill(copied, "verify", "--prune", code=2).stderr
