"""Which samples make which optimizer step: a function of (seed, epoch, part of the epoch) alone.

So a resume needs one integer, the step's number, and every reader finds the same batches.

What the order moves is a *unit*: samples that stay together in all epochs. A unit is one sample where micro-batches are
counted in samples; with a budget of tokens it is all samples of a micro-batch; and packed, all samples of a row. What
is in a unit is found once, in one order, so the number of steps is the same in every epoch and however the epochs are
cut into parts.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]

_OPEN_ROWS = 16
"""Rows that may still take a sample while samples are packed. More hardly fill them better."""


@dataclass(frozen=True, slots=True, eq=False)
class Units:
    """Samples that stay together, int64: ``samples`` [S] are rows of the dataset; unit u ends before ``ends[u]``."""

    samples: Ints
    ends: Ints

    def __len__(self) -> int:
        return len(self.ends)

    @property
    def starts(self) -> Ints:
        """int64 [U]: where each unit starts in ``samples``."""
        return np.concatenate([np.zeros(1, np.int64), self.ends[:-1]])

    def sizes(self, units: Ints) -> Ints:
        """The number of samples in each of ``units``."""
        return self.ends[units] - np.where(units > 0, self.ends[units - 1], 0)

    def of(self, units: Ints) -> Ints:
        """The samples of ``units``, one unit after the other."""
        counts = self.sizes(units)
        starts = self.ends[units] - counts
        places: Ints = np.arange(counts.sum()) + np.repeat(starts - (np.cumsum(counts) - counts), counts)
        return self.samples[places]


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """What is trained in one go: ``rows``, int64, of the plan's units, as part ``part`` of epoch ``epoch``."""

    rows: Ints
    epoch: int
    part: int = 0


def epoch_order(lengths: Ints, data_order: str, *, seed: int, epoch: int, part: int = 0) -> Ints:
    """The order of the rows in ``part`` of ``epoch``, both from 0.

    Shuffled anew each time, by falling length, or as in the dataset.
    """
    if data_order == "shuffle":
        entropy = [seed, epoch, part] if part else [seed, epoch]
        return np.random.Generator(np.random.PCG64(entropy)).permutation(len(lengths))
    if data_order == "sorted":
        return np.argsort(-lengths, kind="stable")
    return np.arange(len(lengths))


@dataclass(frozen=True, eq=False)
class StepPlan:
    """Which samples make which step. Steps are numbered from 1 through the whole training.

    lengths: tokens of every sample of the dataset. batch_size: samples of a micro-batch, or its rows if they are
    packed. max_tokens: most tokens of a micro-batch instead, padding included; a longer sample has one for itself.
    row_tokens: most tokens of a packed row; None has a row for each sample. segments: what is trained one after the
    other, by default all units, once an epoch; each epoch's hold every unit once. No step mixes two segments: the last
    one of a segment takes what is left, its loss weighted by its targets.
    """

    lengths: Ints
    batch_size: int
    grad_accum_batches: int
    num_epochs: int
    data_order: str
    seed: int
    segments: Sequence[Segment] = ()
    max_tokens: int | None = None
    row_tokens: int | None = None

    def __post_init__(self) -> None:
        rows = np.arange(len(self.units))
        if not self.segments:
            object.__setattr__(self, "segments", tuple(Segment(rows, epoch) for epoch in range(self.num_epochs)))
            return
        assert max(segment.epoch for segment in self.segments) < self.num_epochs, "an epoch too many"
        for epoch in range(self.num_epochs):
            parts = [segment.rows for segment in self.segments if segment.epoch == epoch]
            assert all(map(len, parts)), "a segment without samples"
            assert np.array_equal(np.sort(np.concatenate(parts)), rows), f"not every sample once in epoch {epoch}"

    @cached_property
    def units(self) -> Units:
        """What the order moves as one. Where that is more than a sample it is cut from the samples in epoch 0's order.

        So what is long together with ``sorted``, or stands together with ``native``, is trained together.
        """
        if self.max_tokens is None and self.row_tokens is None:
            rows = np.arange(len(self.lengths))
            return Units(rows, rows + 1)
        order = epoch_order(self.lengths, self.data_order, seed=self.seed, epoch=0)
        lengths = self.lengths[order]
        if self._row_tokens is None:
            assert self.max_tokens is not None
            return Units(order, _cut_padded(lengths, self.max_tokens))
        row_of = _pack(lengths, self._row_tokens)
        return Units(order[np.argsort(row_of, kind="stable")], np.cumsum(np.bincount(row_of)))

    @property
    def units_per_step(self) -> int:
        """Units of a full step."""
        return self._units_per_batch * self.grad_accum_batches

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps of one pass over the samples; their mean, rounded up, if epochs are cut differently."""
        return -(-self.total_steps // self.num_epochs)

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the whole training."""
        return self._ends[-1]

    def steps_of(self, segment: int) -> range:
        """Numbers of the steps that train ``segment``, an index into ``segments``."""
        ends = self._ends
        return range(ends[segment - 1] + 1 if segment else 1, ends[segment] + 1)

    def segment_of(self, step: int) -> int:
        """Index of the segment that step ``step`` belongs to."""
        assert 1 <= step <= self.total_steps, f"there is no step {step}"
        return bisect_left(self._ends, step)

    def steps(self, first: int = 1, last: int | None = None) -> Iterator[tuple[int, list[list[int]]]]:
        """(number, samples of each micro-batch) from step ``first`` to step ``last``, or to the end."""
        last = self.total_steps if last is None else last
        if first > last:
            return
        for index in range(self.segment_of(first), self.segment_of(last) + 1):
            numbers, order = self.steps_of(index), self._order(self.segments[index])
            for number in range(max(first, numbers.start), min(last, numbers[-1]) + 1):
                start = (number - numbers.start) * self.units_per_step
                units = order[start : start + self.units_per_step]
                batches = range(0, len(units), self._units_per_batch)
                yield number, [self.units.of(units[i : i + self._units_per_batch]).tolist() for i in batches]

    def begins_row(self, samples: Sequence[int]) -> npt.NDArray[np.bool_] | None:
        """bool [n]: which of a micro-batch's samples begin a packed row; None where each has its own."""
        return None if self._is_first is None else self._is_first[list(samples)]

    @property
    def _row_tokens(self) -> int | None:
        if self.row_tokens is None or self.max_tokens is None:
            return self.row_tokens
        return min(self.row_tokens, self.max_tokens)

    @property
    def _units_per_batch(self) -> int:
        if self.max_tokens is None:
            return self.batch_size
        return self.max_tokens // self._row_tokens if self._row_tokens else 1

    def _order(self, segment: Segment) -> Ints:
        lengths = self._unit_lengths[segment.rows]
        order = epoch_order(lengths, self.data_order, seed=self.seed, epoch=segment.epoch, part=segment.part)
        return segment.rows[order]

    @cached_property
    def _unit_lengths(self) -> Ints:
        """The longest sample of each unit."""
        return np.maximum.reduceat(self.lengths[self.units.samples], self.units.starts)

    @cached_property
    def _is_first(self) -> npt.NDArray[np.bool_] | None:
        """By sample, whether it begins a packed row."""
        if self.row_tokens is None:
            return None
        first = np.zeros(len(self.lengths), np.bool_)
        first[self.units.samples[self.units.starts]] = True
        return first

    @cached_property
    def _ends(self) -> list[int]:
        """The last step of each segment."""
        return list(accumulate(-(-len(segment.rows) // self.units_per_step) for segment in self.segments))


def _cut_padded(lengths: Ints, max_tokens: int) -> Ints:
    """Ends of consecutive micro-batches with as many samples as ``max_tokens`` hold, padding included; one at least."""
    ends: list[int] = []
    start = longest = 0
    for index, length in enumerate(lengths.tolist()):
        longest = max(longest, length)
        if index > start and (index + 1 - start) * longest > max_tokens:
            ends.append(index)
            start, longest = index, length
    return np.array([*ends, len(lengths)], np.int64)


def _pack(lengths: Ints, row_tokens: int) -> Ints:
    """The row, numbered from 0 as they begin, that each sample is packed into.

    Each goes into the fullest of the rows still open that it fits into. At most ``_OPEN_ROWS`` are open, so that what
    stands together in the text is packed nearby.
    """
    row_of = np.empty(len(lengths), np.int64)
    rows = 0
    spaces: list[tuple[int, int]] = []  # (tokens left, row) of the open rows, ascending
    for index, length in enumerate(lengths.tolist()):
        place = bisect_left(spaces, (length, -1))
        if place < len(spaces):
            space, row = spaces.pop(place)
        else:
            space, row = row_tokens, rows
            rows += 1
        row_of[index] = row
        if space > length:
            insort(spaces, (space - length, row))
            if len(spaces) > _OPEN_ROWS:
                del spaces[0]
    return row_of
