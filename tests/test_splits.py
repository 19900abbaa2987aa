"""Splits and duplicates."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distill.errors import InputError
from distill.splits import distinct, hold_out
from tests.helpers import make_samples


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
