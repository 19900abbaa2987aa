"""The cache as a stream of whole optimizer steps, prefetched, the same for every start and every reader.

The order is a function of (seed, epoch, part of the epoch) alone and the position is the step's number, so a resume
needs one integer. Where several teachers have scored a sample, their records are merged when read.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from distill.cache import LayerSpec, Located
from distill.collate import TokenBatch, collate
from distill.errors import InputError
from distill.losses import SparseTargets
from distill.merge import merge
from distill.records import concat, select
from distill.types import Records, TokenizedSample

_PREFETCH_STEPS = 4
_READ_TIMEOUT = 600.0  # seconds


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """A micro-batch: tokens, teacher distributions, and the teacher's float32 [N] logprob of the real token."""

    tokens: TokenBatch
    targets: SparseTargets
    label_logprobs: Tensor

    def to(self, device: str) -> "Batch":
        """The same batch on ``device``."""
        return Batch(self.tokens.to(device), self.targets.to(device), self.label_logprobs.to(device))


@dataclass(frozen=True, slots=True, eq=False)
class OptimizerStep:
    """Everything one optimizer step needs. ``number`` counts from 1; ``num_targets`` is over all micro-batches."""

    number: int
    micro_batches: tuple[Batch, ...]
    num_targets: int
    num_tokens: int


class RecordSource(Protocol):
    """What one teacher can give, as ``distill.cache`` opens it."""

    @property
    def spec(self) -> LayerSpec: ...  # noqa: D102

    def read(self, sample: TokenizedSample, located: Located) -> Records:
        """The records of ``sample``'s targets, in their order."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class TeacherShare:
    """A teacher's records and its weight, > 0. A sample that isn't in ``located`` is one that it was not to score."""

    source: RecordSource
    weight: float
    located: Mapping[bytes, Located]

    def read(self, samples: Sequence[TokenizedSample]) -> Records:
        """The records of ``samples`` one after the other, shard by shard from the disk."""
        places = [self.located[sample.key] for sample in samples]
        order = sorted(range(len(samples)), key=lambda i: (places[i].layer, places[i].shard, places[i].row))
        parts = {index: self.source.read(samples[index], places[index]) for index in order}
        return concat([parts[index] for index in range(len(samples))])


@dataclass(frozen=True, slots=True, eq=False)
class CachedSamples:
    """The samples of a split in dataset order, duplicates included, and the teachers that have scored them.

    Teachers are in fingerprint order. Only the rows that are asked for have to be in the cache.
    """

    teachers: Sequence[TeacherShare]
    samples: Sequence[TokenizedSample]

    def __len__(self) -> int:
        return len(self.samples)

    def batch(self, rows: Sequence[int]) -> Batch:
        """Read the given samples' records into one batch."""
        samples = [self.samples[row] for row in rows]
        records = self._records(samples)
        tokens = collate(samples)
        return Batch(
            tokens=tokens,
            targets=pad(records, tokens.labels),
            label_logprobs=torch.from_numpy(records.label_logprobs),
        )

    def entropy_quantile(self, quantile: float) -> float:
        """That quantile of the teacher's entropies, in nats, over all targets.

        Reads all records once. InputError if no entropy is known, as of several teachers.
        """
        parts = [self._records([sample]).entropies for sample in self.samples]
        known = np.concatenate([part[~np.isnan(part)] for part in parts])
        if not len(known):
            raise InputError(
                "ce_below_entropy_quantile: the cache doesn't know the teacher's entropies (several teachers, or an"
                " imported cache); leave it at 0"
            )
        return float(np.quantile(known, quantile))

    def _records(self, samples: Sequence[TokenizedSample]) -> Records:
        """Read and merged for each set of teachers at once, then put back in the samples' order."""
        groups: dict[tuple[int, ...], list[int]] = {}
        for index, sample in enumerate(samples):
            who = tuple(number for number, teacher in enumerate(self.teachers) if sample.key in teacher.located)
            assert who, f"{sample.where}: no teacher's records are in the cache"
            groups.setdefault(who, []).append(index)
        parts = [self._merged(who, [samples[index] for index in group]) for who, group in groups.items()]
        if len(parts) == 1:
            return parts[0]
        order = [index for group in groups.values() for index in group]
        sample_of_target = np.repeat(order, [len(samples[index].targets) for index in order])
        return select(concat(parts), np.argsort(sample_of_target, kind="stable"))

    def _merged(self, who: Sequence[int], samples: Sequence[TokenizedSample]) -> Records:
        teachers = [self.teachers[number] for number in who]
        vocab_sizes = {teacher.source.spec.vocab_size for teacher in teachers}
        assert len(vocab_sizes) == 1, "teachers of different crops"
        parts = [teacher.read(samples) for teacher in teachers]
        labels = np.concatenate([sample.token_ids[sample.targets] for sample in samples])
        return merge(parts, [teacher.weight for teacher in teachers], labels, vocab_sizes.pop())


def pad(records: Records, labels: Tensor) -> SparseTargets:
    """Ragged records to [N, K] tensors; padding repeats the row's first id with logprob -inf."""
    counts = records.entry_counts
    width = int(counts.max())
    mask = np.arange(width) < counts[:, None]
    starts = np.cumsum(counts) - counts
    ids = np.repeat(records.entry_ids[starts][:, None], width, axis=1)
    ids[mask] = records.entry_ids
    logprobs = np.full(ids.shape, -np.inf, np.float32)
    logprobs[mask] = records.entry_logprobs
    return SparseTargets(
        labels=labels,
        entry_ids=torch.from_numpy(ids),
        entry_logprobs=torch.from_numpy(logprobs),
        tail_logprobs=torch.from_numpy(records.tail_logprobs),
        entropies=torch.from_numpy(records.entropies),
    )


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """Samples that are trained in one go: ``rows``, int64, of the dataset, as part ``part`` of epoch ``epoch``."""

    rows: npt.NDArray[np.int64]
    epoch: int
    part: int = 0


def epoch_order(
    lengths: npt.NDArray[np.int64], data_order: str, *, seed: int, epoch: int, part: int = 0
) -> npt.NDArray[np.int64]:
    """The order of the rows in ``part`` of ``epoch``, both from 0.

    Shuffled anew each time, by falling length, or as in the dataset.
    """
    if data_order == "shuffle":
        entropy = [seed, epoch, part] if part else [seed, epoch]
        return np.random.Generator(np.random.PCG64(entropy)).permutation(len(lengths))
    if data_order == "sorted":
        return np.argsort(-lengths, kind="stable")
    return np.arange(len(lengths))


@dataclass(frozen=True, slots=True, eq=False)
class StepPlan:
    """Which samples make which step. Steps are numbered from 1 through the whole training.

    lengths: tokens of every sample of the dataset. segments: what is trained one after the other, by default all
    samples, once an epoch; each epoch's hold every sample once. No step mixes two segments: the last one of a segment
    takes what is left, its loss weighted by its targets.
    """

    lengths: npt.NDArray[np.int64]
    batch_size: int
    grad_accum_batches: int
    num_epochs: int
    data_order: str
    seed: int
    segments: Sequence[Segment] = ()

    def __post_init__(self) -> None:
        rows = np.arange(len(self.lengths))
        if not self.segments:
            object.__setattr__(self, "segments", tuple(Segment(rows, epoch) for epoch in range(self.num_epochs)))
            return
        assert max(segment.epoch for segment in self.segments) < self.num_epochs, "an epoch too many"
        for epoch in range(self.num_epochs):
            parts = [segment.rows for segment in self.segments if segment.epoch == epoch]
            assert all(map(len, parts)), "a segment without samples"
            assert np.array_equal(np.sort(np.concatenate(parts)), rows), f"not every sample once in epoch {epoch}"

    @property
    def samples_per_step(self) -> int:
        """Samples of a full step."""
        return self.batch_size * self.grad_accum_batches

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
        """(number, rows of each micro-batch) from step ``first`` to step ``last``, or to the end."""
        last = self.total_steps if last is None else last
        if first > last:
            return
        for index in range(self.segment_of(first), self.segment_of(last) + 1):
            numbers, order = self.steps_of(index), self._order(self.segments[index])
            for number in range(max(first, numbers.start), min(last, numbers[-1]) + 1):
                start = (number - numbers.start) * self.samples_per_step
                rows = order[start : start + self.samples_per_step].tolist()
                yield number, [rows[i : i + self.batch_size] for i in range(0, len(rows), self.batch_size)]

    def _order(self, segment: Segment) -> npt.NDArray[np.int64]:
        lengths = self.lengths[segment.rows]
        order = epoch_order(lengths, self.data_order, seed=self.seed, epoch=segment.epoch, part=segment.part)
        return segment.rows[order]

    @property
    def _ends(self) -> list[int]:
        """The last step of each segment."""
        return list(accumulate(-(-len(segment.rows) // self.samples_per_step) for segment in self.segments))


def load_steps(data: CachedSamples, plan: StepPlan, *, first: int, last: int | None = None) -> Iterator[OptimizerStep]:
    """The optimizer steps from ``first`` to ``last``, or to the end, read ahead by a thread that ends with them.

    Nothing behind ``last`` is read, so only the segments up to there have to be in the cache.
    """

    def build(number: int, micro_batches: list[list[int]]) -> OptimizerStep:
        batches = tuple(data.batch(rows) for rows in micro_batches)
        return OptimizerStep(
            number=number,
            micro_batches=batches,
            num_targets=sum(len(batch.tokens.labels) for batch in batches),
            num_tokens=sum(len(data.samples[row].token_ids) for rows in micro_batches for row in rows),
        )

    pending: deque[Future[OptimizerStep]] = deque()
    pool = ThreadPoolExecutor(1, thread_name_prefix="prefetch")
    try:
        for number, micro_batches in plan.steps(first, last):
            pending.append(pool.submit(build, number, micro_batches))
            if len(pending) > _PREFETCH_STEPS:
                yield pending.popleft().result(timeout=_READ_TIMEOUT)
        while pending:
            yield pending.popleft().result(timeout=_READ_TIMEOUT)
    finally:
        pool.shutdown(cancel_futures=True)
