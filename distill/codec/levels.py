"""Probabilities in levels of a root of theirs.

Quantising q = sqrt(p) in even steps spreads the error in KL evenly over the entries: a step D costs about D^2 / 6 nats
an entry. Each record has the coarsest step of a fixed table whose KL(exact || decoded) over all K + 1 outcomes,
measured on the decoded values, stays within ``KL_BUDGET``. Entries of level 0 decode to the mean of what fell into it
in their record, so no mass is invented; the likeliest entry is the only one of its level.

Whole distributions are for those who want the shape of the smallest entries too, which a temperature above 1 weighs
more: they take the fourth root, whose even steps spread the error at a temperature of 2 evenly.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from distill.codec.base import Array, Counts, log1mexp
from distill.types import FloatArray

KL_BUDGET = 0.0008
"""Nats; what a record may lose."""

ESCAPE = 255
"""The largest byte: the value is this much plus what stands in a separate array."""

_STEPS_PER_OCTAVE = 4
_FINEST_STEP = 9 * _STEPS_PER_OCTAVE
_MOST_LEVELS = 1 << 17
_FLOORS_PER_NAT = 8
_ZERO_BELOW = 0.6  # in steps; a little more than half, because zeros are cheap
_TAIL_ODDS_PER_NAT = 128
_NO_TAIL = -32_768
_LOWEST = -1e4  # stands for log 0 where it is multiplied by 0
_LARGEST_TAIL = np.float32(-1e-7)

_FLOORS = (-np.arange(256) / _FLOORS_PER_NAT).astype(np.float32)


class Scale:
    """Levels of the ``power``-th root of a probability. A step's code c stands for 2^-(coarsest + c / 4).

    Logarithms of probabilities, float32: ``log_units[c]`` of level 1 with step c; ``log_levels[l]`` of level l in
    units of that, which of level 0 is below all. ``dtype`` is what sums over the entries need.
    """

    def __init__(self, power: int, coarsest: int, dtype: type[np.floating[Any]]) -> None:
        self.power, self.coarsest, self.dtype = power, coarsest, dtype
        octaves = coarsest + np.arange(256) / _STEPS_PER_OCTAVE
        self.log_units = (-power * np.log(2.0) * octaves).astype(np.float32)
        self.inverse_steps = (2.0 ** np.minimum(octaves, 60)).astype(np.float32)
        self.log_levels = np.full(_MOST_LEVELS, _LOWEST, np.float32)
        self.log_levels[1:] = power * np.log(np.arange(1, _MOST_LEVELS))

    def masses(self, levels: Array) -> Array:
        """The sum of each row's probabilities, in units of level 1."""
        halves = levels.astype(self.dtype)
        if self.power == 4:
            halves *= halves
        return np.asarray(np.einsum("ij,ij->i", halves, halves))


ROOTS = Scale(2, 7, np.float32)
"""Of the likeliest entries. The coarsest step is 2^-7: with it a temperature of 2 sees their shape as well."""

FOURTH_ROOTS = Scale(4, 8, np.float64)
"""Of whole distributions."""


@dataclass(frozen=True, slots=True, eq=False)
class Quantised:
    """``levels``: int32 [R, W]. ``steps`` and ``floors``: uint8 [R], codes of the step and of level 0's mean."""

    levels: npt.NDArray[np.int32]
    steps: npt.NDArray[np.uint8]
    floors: npt.NDArray[np.uint8]


def encode_tails(tails: FloatArray) -> npt.NDArray[np.int16]:
    """Log-odds of the tail in 1/128 nat: fine where the tail is small and where what is kept is small."""
    with np.errstate(divide="ignore", invalid="ignore"):
        odds = np.where(np.isneginf(tails), 0.0, tails - log1mexp(tails))
    codes = np.clip(np.rint(odds * _TAIL_ODDS_PER_NAT), _NO_TAIL + 1, -_NO_TAIL - 1)
    return np.where(np.isneginf(tails), _NO_TAIL, codes).astype(np.int16)


def decode_tails(codes: Array) -> tuple[FloatArray, FloatArray]:
    """float32 [R] each: log of the tail's mass, and log of the kept mass."""
    odds = np.where(codes == _NO_TAIL, -np.inf, codes / _TAIL_ODDS_PER_NAT)
    return (-np.logaddexp(0.0, -odds)).astype(np.float32), (-np.logaddexp(0.0, odds)).astype(np.float32)


def quantise(
    scale: Scale, logprobs: FloatArray, counts: Counts, tails: FloatArray, decoded: tuple[FloatArray, FloatArray]
) -> Quantised:
    """Levels of records [R, W], the likeliest entry of each in column 0, padding -inf behind its ``counts`` entries.

    ``tails`` are exact, ``decoded`` what ``decode_tails`` will say. The logprobs are taken to agree with ``tails``.
    """
    search = _Search(scale, logprobs, counts, tails, decoded)
    everyone = np.arange(len(counts))
    guess = 0.5 * np.log2(counts / (6.0 * KL_BUDGET)) - scale.coarsest if scale is ROOTS else np.zeros(len(counts))
    steps = np.clip(np.rint(_STEPS_PER_OCTAVE * guess), 0, _FINEST_STEP).astype(np.int64)
    loss = np.maximum(search.quantised(everyone, steps)[1], 1e-9)
    # The loss grows with the square of the step.
    finer = np.ceil(_STEPS_PER_OCTAVE / 2 * np.log2(loss / KL_BUDGET)).astype(np.int64)
    steps = np.clip(steps + finer, 0, _FINEST_STEP)
    result, loss = search.quantised(everyone, steps)
    rest = everyone[(loss > KL_BUDGET) & (steps < _FINEST_STEP)]
    while len(rest):
        steps[rest] += 1
        part, loss = search.quantised(rest, steps[rest])
        result.levels[rest], result.steps[rest], result.floors[rest] = part.levels, part.steps, part.floors
        rest = rest[(loss > KL_BUDGET) & (steps[rest] < _FINEST_STEP)]
    return result


def dequantise(
    scale: Scale, levels: Array, counts: Counts, steps: Array, floors: Array, log_kept: FloatArray
) -> FloatArray:
    """float32 [R, W] logprobs of levels [R, W], each row's summing to its kept mass; padding (level 0) is undefined."""
    log_units, log_floors = scale.log_units[steps], _FLOORS[floors]
    zeros = counts - np.count_nonzero(levels, axis=1)
    mass = scale.masses(levels) * np.exp(log_units) + zeros * np.exp(log_floors)
    shift = (log_kept - np.log(mass)).astype(np.float32)
    logprobs = np.take(scale.log_levels, levels)
    logprobs += (log_units + shift)[:, None]
    # The mean of level 0 is below level 1, and what is left of log 0 is below both.
    np.maximum(logprobs, (log_floors + shift)[:, None], out=logprobs)
    return logprobs


class _Search:
    """Levels of the same records at different steps, and what each step loses."""

    def __init__(
        self,
        scale: Scale,
        logprobs: FloatArray,
        counts: Counts,
        tails: FloatArray,
        decoded: tuple[FloatArray, FloatArray],
    ) -> None:
        self._scale, self._counts, self._log_kept = scale, counts, decoded[1]
        self._roots = np.exp(logprobs.astype(scale.dtype) / scale.dtype(scale.power))
        self._probs = self._roots**scale.power
        self._kept = -np.expm1(np.minimum(tails, _LARGEST_TAIL), dtype=scale.dtype)
        excess = self._kept / self._probs.sum(1)
        self._roots *= (excess ** (1 / scale.power))[:, None]
        self._probs *= excess[:, None]
        own = np.einsum("ij,ij->i", self._probs, np.maximum(logprobs, _LOWEST)) + self._kept * np.log(excess)
        tail = np.exp(tails)
        self._own = own + tail * (np.maximum(tails, _LOWEST) - np.maximum(decoded[0], _LOWEST))

    def quantised(self, rows: Array, steps: Array) -> tuple[Quantised, FloatArray]:
        """Some rows at the given steps, and KL(exact || decoded) over K + 1 outcomes of each."""
        part = slice(None) if len(rows) == len(self._counts) else rows
        roots, present = self._levels(part, steps)
        floors, rest, zeros = self._floors(part, present)
        log_units, log_floors, kept = self._scale.log_units[steps], _FLOORS[floors], self._kept[part]
        mass = self._scale.masses(roots) * np.exp(log_units) + zeros * np.exp(log_floors)
        levels = roots.astype(np.int32)
        logs = np.take(self._scale.log_levels, levels)
        logs *= present
        cross = np.einsum("ij,ij->i", self._probs[part], logs)
        cross += (kept - rest) * log_units + rest * log_floors + kept * (self._log_kept[part] - np.log(mass))
        return Quantised(levels, steps.astype(np.uint8), floors), np.asarray(self._own[part] - cross, np.float32)

    def _levels(self, rows: Array | slice, steps: Array) -> tuple[Array, Array]:
        """Levels as floats, and 1.0 where there is one."""
        levels = self._roots[rows] * self._scale.inverse_steps[steps][:, None]
        present = (levels >= _ZERO_BELOW).astype(levels.dtype)
        np.rint(levels, out=levels)
        levels *= present
        others = levels[:, 1:].max(1, initial=0.0)
        levels[:, 0] = np.maximum(levels[:, 0], others + 1)
        present[:, 0] = 1.0
        return levels, present

    def _floors(self, rows: Array | slice, present: FloatArray) -> tuple[npt.NDArray[np.uint8], FloatArray, FloatArray]:
        """Code of level 0's mean, the mass that fell into it, and the number of its entries."""
        zeros = self._counts[rows] - present.sum(1)
        rest = np.einsum("ij,ij->i", self._probs[rows], 1 - present)
        with np.errstate(divide="ignore"):
            logs = np.log(rest / np.maximum(zeros, 1))
        codes = np.where(zeros > 0, np.clip(np.rint(-_FLOORS_PER_NAT * logs), 0, 255), 255)
        return codes.astype(np.uint8), rest, zeros
