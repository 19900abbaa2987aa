"""Splits, duplicates and which teacher is meant."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distill.errors import InputError
from distill.prepare import distinct, find_teacher, hold_out
from tests.helpers import make_samples
from tests.toys import make_model_folder


@given(st.integers(2, 80), st.floats(0.01, 0.5))
def test_a_sample_never_changes_sides(count: int, fraction: float) -> None:
    samples = make_samples(count)
    train, held = hold_out(samples, fraction)
    assert train and held
    assert sorted(s.key for s in train + held) == sorted(s.key for s in samples)
    _, of_more = hold_out([*make_samples(40, seed=9), *samples], fraction)
    limit = int(fraction * 2**64)
    by_key = {s.key for s in samples if int.from_bytes(s.key[:8], "big") < limit}
    assert by_key - {s.key for s in of_more} <= {max(s.key for s in samples)}


def test_pieces_of_one_sample_stay_together() -> None:
    samples = [replace(s, where=f"text:{number // 4}") for number, s in enumerate(make_samples(40))]
    train, held = hold_out(samples, 0.4)
    assert not {s.where for s in train} & {s.where for s in held}


def test_one_sample_cannot_be_split() -> None:
    with pytest.raises(InputError, match="validation_dataset_path"):
        hold_out(make_samples(1) * 3, 0.5)


def test_duplicates_are_one_sample_with_the_targets_of_all() -> None:
    a, b = make_samples(2)
    fewer = replace(a, targets=a.targets[:1])
    other = replace(a, targets=np.array([len(a.token_ids) - 1], np.int32))
    found = distinct([fewer, b, other, a, b])
    assert [s.key for s in found] == [a.key, b.key]
    assert found[0].targets.tolist() == sorted({*fewer.targets.tolist(), *other.targets.tolist(), *a.targets.tolist()})


def test_a_teacher_is_a_folder_or_the_only_one_in_it(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="not a folder"):
        find_teacher(str(tmp_path / "absent"))
    with pytest.raises(InputError, match="holds no model"):
        find_teacher(str(tmp_path))
    first = make_model_folder(tmp_path / "first", seed=0, hidden=16, layers=1)
    (tmp_path / "notes.txt").touch()
    assert find_teacher(str(tmp_path)) == find_teacher(str(first)) == first
    make_model_folder(tmp_path / "second", seed=0, hidden=16, layers=1)
    with pytest.raises(InputError, match=r"several teachers \(first, second\) are not available yet"):
        find_teacher(str(tmp_path))
