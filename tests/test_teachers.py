"""Which teachers a job has, and which layers can stand in for them."""

import io
from pathlib import Path

import pytest

from distill.errors import InputError
from distill.report import Console
from distill.teachers import JobTeacher, check_distinct, choose_cached, find_teachers, serving_layers, weigh
from tests.helpers import VOCAB, make_samples, make_spec
from tests.toys import make_model_folder


def test_teachers_are_a_folder_or_those_in_it_by_name(tmp_path: Path) -> None:
    err = io.StringIO()
    console = Console(io.StringIO(), err)
    with pytest.raises(InputError, match="not a folder"):
        find_teachers(str(tmp_path / "absent"), console)
    with pytest.raises(InputError, match="holds no model"):
        find_teachers(str(tmp_path), console)
    second = make_model_folder(tmp_path / "second", seed=0, hidden=16, layers=1)
    assert find_teachers(str(tmp_path), console) == find_teachers(str(second), console) == [second]
    assert not err.getvalue()
    first = make_model_folder(tmp_path / "first", seed=0, hidden=16, layers=1)
    (tmp_path / "notes.txt").touch()
    (tmp_path / "stray.bin").touch()
    (tmp_path / "pictures").mkdir()
    (tmp_path / ".hidden").mkdir()
    assert find_teachers(str(tmp_path), console) == [first, second]
    assert (
        err.getvalue() == "warning: teacher_models_folder: ignored what is no model: notes.txt, pictures, stray.bin\n"
    )


def test_half_a_download_is_no_stray_file(tmp_path: Path) -> None:
    make_model_folder(tmp_path / "whole", seed=0, hidden=16, layers=1)
    half = make_model_folder(tmp_path / "half", seed=0, hidden=16, layers=1)
    weights = half / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(InputError, match=r"half.*complete the download"):
        find_teachers(str(tmp_path), Console(io.StringIO(), io.StringIO()))
    (half / "config.json").unlink()
    with pytest.raises(InputError, match="half"):
        find_teachers(str(tmp_path), Console(io.StringIO(), io.StringIO()))


def test_weights_are_by_name() -> None:
    assert weigh(["a", "b"], {"b": 3.0}) == [1.0, 3.0]
    with pytest.raises(InputError, match="teacher_weights: no teacher is named 'bb'; did you mean 'b'"):
        weigh(["a", "b"], {"bb": 3.0})


def test_the_same_model_twice_is_refused() -> None:
    spec = make_spec(teacher="a")
    check_distinct([JobTeacher(spec, 1.0, None, None)])
    with pytest.raises(InputError, match="a and b are the same model"):
        check_distinct([JobTeacher(spec, 1.0, None, None), JobTeacher(make_spec(teacher="b"), 1.0, None, None)])


def test_who_scores_what() -> None:
    (conversation,) = make_samples(1)
    assert [JobTeacher(make_spec(), 1.0, kind, None).scores(conversation) for kind in (None, False, True)] == [
        True, True, False,
    ]  # fmt: skip


def test_a_cache_serves_with_one_layer_a_teacher() -> None:
    maps = {VOCAB: "t" * 64}
    small, large = make_spec(top_k=5), make_spec(top_k=20, cache_precision="compact")
    other = make_spec(weights="x" * 64, teacher="other")
    foreign = make_spec(token_map="f" * 64, teacher="foreign")
    where = Path("dataset")
    specs = [(small, 9), (large, 9), (other, 3), (foreign, 9)]
    found = serving_layers(specs, token_maps=maps, top_k=10, where=where)
    assert [(spec.teacher, spec.top_k, spec.cache_precision) for spec in found] == [
        ("toy teacher", 10, "compact"), ("other", 5, "exact"),
    ]  # fmt: skip
    assert serving_layers([(small, 9), (large, 3)], token_maps=maps, top_k=10, where=where) == [small], "most samples"
    assert serving_layers([(make_spec(mode="full", top_k=VOCAB), 1)], token_maps=maps, top_k=None, where=where) == [
        make_spec(mode="full", top_k=VOCAB)
    ]
    with pytest.raises(InputError, match=r"those of foreign-.* are for other tokens"):
        serving_layers([(foreign, 1)], token_maps=maps, top_k=5, where=where)
    with pytest.raises(InputError, match="it holds none"):
        serving_layers([], token_maps=maps, top_k=5, where=where)


def test_twins_in_a_cache_are_chosen_by_name() -> None:
    one, other = make_spec(dtype="fp32"), make_spec(dtype="bf16")
    with pytest.raises(InputError, match="several layers of toy teacher"):
        choose_cached([one, other], {})
    assert choose_cached([one, other], {one.folder_name: 0.0}) == [(other, 1.0)]
    assert choose_cached([one], {"toy teacher": 2.0}) == [(one, 2.0)]
    with pytest.raises(InputError, match="no layer is of 'nobody'"):
        choose_cached([one], {"nobody": 1.0})
    with pytest.raises(InputError, match="all teachers weigh 0"):
        choose_cached([one], {"toy teacher": 0.0})
