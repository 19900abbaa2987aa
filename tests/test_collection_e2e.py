"""Collections of unusual teachers, by the command line."""

import json
import shutil
from pathlib import Path

import pytest

from distill.cache import Layer, find_layers
from distill.cache.gate import Admissions
from tests.jobs import distill, shards_of, summary_of, write_config
from tests.test_models import write_gguf
from tests.toys import make_model_folder, make_tokenizer


def spec_of(folder: Path) -> object:
    (layer,) = find_layers(folder / "cache" / "dataset" / "train")
    with Admissions(folder / "cache") as admissions, Layer.load(layer, admissions) as opened:
        return opened.spec


def test_a_gguf_teacher_is_collected_from(tmp_path: Path, student_folder: Path, text_file: Path) -> None:
    pytest.importorskip("gguf")
    whole = make_model_folder(tmp_path / "whole", seed=4, hidden=32, layers=1)
    packed = tmp_path / "packed"
    packed.mkdir()
    write_gguf(whole, packed / "toy.gguf")
    make_tokenizer().save_pretrained(packed)
    config = write_config(tmp_path, packed, student_folder, text_file)
    distill(config, "collect")
    assert spec_of(tmp_path).quantisation == "gguf"  # type: ignore[attr-defined]
    assert summary_of(tmp_path / "cache")["cache"]["collected_targets"] > 0


def test_a_teachers_own_settings_are_honoured(tmp_path: Path, student_folder: Path, text_file: Path) -> None:
    """seq_chunk_len and batch_size change how it is run, not what; add_bos and completion what it is given."""
    teacher = make_model_folder(tmp_path / "teacher", seed=4, hidden=32, layers=1)
    plain = write_config(tmp_path / "plain", teacher, student_folder, text_file, ignore_model_type=False)
    distill(plain, "collect")
    own = {"seq_chunk_len": 20, "batch_size": 2, "completion": False, "strange": 1}
    (teacher / "pipeline_config.json").write_text(json.dumps(own))
    config = write_config(tmp_path / "own", teacher, student_folder, text_file, ignore_model_type=False)
    done = distill(config, "collect")
    assert "not followed: strange" in done.stderr
    theirs, ours = (sorted(shards_of(tmp_path / name / "cache")) for name in ("plain", "own"))
    assert theirs == ours, "the same samples"
    (teacher / "pipeline_config.json").write_text(json.dumps({"add_bos": True}))
    with_bos = write_config(tmp_path / "bos", teacher, student_folder, text_file, ignore_model_type=False)
    distill(with_bos, "collect")
    assert sorted(shards_of(tmp_path / "bos" / "cache")) != ours, "other tokens"
    without = write_config(
        tmp_path / "none", teacher, student_folder, text_file, ignore_model_type=False, add_bos=False
    )
    assert "add_bos true is not followed" in distill(without, "collect").stderr


def test_completion_and_instruct_teachers_share_a_text(tmp_path: Path, student_folder: Path, text_file: Path) -> None:
    """Each scores its kind; a sample that one isn't meant for is trained on the other's distribution alone."""
    teachers = tmp_path / "teachers"
    make_model_folder(teachers / "chat", seed=4, hidden=32, layers=1)
    base = make_model_folder(teachers / "base", seed=5, hidden=32, layers=1)
    (base / "pipeline_config.json").write_text('{"completion": true}')
    config = write_config(tmp_path, teachers, student_folder, text_file, ignore_model_type=False)
    distill(config)
    summary = summary_of(tmp_path / "cache")
    data = summary["data"]
    assert summary["cache"]["collected_targets"] == data["train"]["targets"] + data["validation"]["targets"]
    shutil.rmtree(base)
    done = distill(config, "collect")
    assert "skipped 20 completions" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("workers", [3, 16])
def test_any_number_of_workers_makes_the_same_shards(
    tmp_path: Path, teacher_folder: Path, student_folder: Path, text_file: Path, workers: int
) -> None:
    shards = []
    for number in (1, workers):
        folder = tmp_path / str(number)
        config = write_config(
            folder, teacher_folder, student_folder, text_file, num_inference_workers=number, shard_targets=150
        )
        distill(config, "collect")
        shards.append(shards_of(folder / "cache"))
    assert shards[0] == shards[1]
