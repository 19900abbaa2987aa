"""The cache as a stream of whole optimizer steps, read ahead, the same for every start and any number of readers.

What is in a step is ``steps``' affair, and its number all that a resume needs. Readers are threads: most of their time
goes by in inflating and in arithmetic on large arrays, outside the interpreter's lock, and what they have read needn't
be copied. Where several teachers have scored a sample, their records are merged when read.
"""

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from distill.cache import LayerSpec, Located
from distill.collate import TokenBatch, collate
from distill.errors import InputError, MachineError
from distill.losses import SparseTargets
from distill.merge import merge
from distill.records import concat, select
from distill.steps import StepPlan
from distill.types import Records, TokenizedSample

_AHEAD_STEPS = 4
_AHEAD_BYTES = 1 << 28
"""No more is read ahead than so many steps a reader, nor, of large steps, so many bytes and one step."""

_ENTRY_BYTES = 8 + 4
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
    """What one teacher can give, as ``distill.cache`` opens it. Threads may share it."""

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

    def batch(self, rows: Sequence[int], begins_row: npt.NDArray[np.bool_] | None = None) -> Batch:
        """Read the given samples' records into one batch; ``begins_row`` as for ``collate``."""
        samples = [self.samples[row] for row in rows]
        records = self._records(samples)
        tokens = collate(samples, begins_row)
        return Batch(
            tokens=tokens,
            targets=pad(records, tokens.labels),
            label_logprobs=torch.from_numpy(records.label_logprobs),
        )

    def bytes_bound(self, rows: Sequence[int]) -> int:
        """About how many bytes the batch of ``rows`` takes at most."""
        entries = sum(teacher.source.spec.top_k for teacher in self.teachers)
        return sum(len(self.samples[row].targets) for row in rows) * entries * _ENTRY_BYTES

    def entropy_quantile(self, quantile: float) -> tuple[float, float]:
        """That quantile of the teacher's entropies, in nats, over all targets, and the share of those equal to it that
        makes it up with those below: a cache stores entropies in steps, so many may be equal.

        Reads all records once. InputError if no entropy is known, as of several teachers.
        """
        parts = [self._records([sample]).entropies for sample in self.samples]
        known = np.concatenate([part[~np.isnan(part)] for part in parts])
        if not len(known):
            raise InputError(
                "ce_below_entropy_quantile: the cache doesn't know the teacher's entropies (several teachers, or an"
                " imported cache); leave it at 0"
            )
        wanted = quantile * len(known)
        entropy = np.sort(known)[max(0, math.ceil(wanted) - 1)]
        return float(entropy), float((wanted - np.sum(known < entropy)) / np.sum(known == entropy))

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


def load_steps(
    data: CachedSamples, plan: StepPlan, *, first: int, last: int | None = None, readers: int = 1
) -> Iterator[OptimizerStep]:
    """The optimizer steps from ``first`` to ``last``, or to the end, read ahead by threads that end with them.

    With no ``readers`` each step is read when it is asked for. Nothing behind ``last`` is read, so only the segments up
    to there have to be in the cache. What goes wrong with a step is raised in its place; MachineError if a read takes
    ten minutes.
    """

    def read(rows: list[int]) -> Batch:
        return data.batch(rows, plan.begins_row(rows))

    if not readers:
        for number, micro_batches in plan.steps(first, last):
            yield _step(number, [read(rows) for rows in micro_batches])
        return
    ahead: deque[_Ahead] = deque()
    pool = ThreadPoolExecutor(readers, thread_name_prefix="prefetch")
    patient = True
    try:
        for number, micro_batches in plan.steps(first, last):
            size = sum(map(data.bytes_bound, micro_batches))
            ahead.append(_Ahead(number, [pool.submit(read, rows) for rows in micro_batches], size))
            while len(ahead) > 1 and (
                len(ahead) > _AHEAD_STEPS * readers or sum(step.bytes for step in ahead) > _AHEAD_BYTES
            ):
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()
    except _TooSlowError:
        patient = False
        raise
    finally:
        pool.shutdown(wait=patient, cancel_futures=True)


class _TooSlowError(MachineError):
    """A reader is stuck; waiting for it to end would be, too."""


@dataclass(frozen=True, slots=True, eq=False)
class _Ahead:
    """A step that is being read, and about how many bytes it takes."""

    number: int
    batches: list[Future[Batch]]
    bytes: int

    def result(self) -> OptimizerStep:
        _, late = wait(self.batches, timeout=_READ_TIMEOUT)
        if late:
            raise _TooSlowError(f"the cache: step {self.number} could not be read in {_READ_TIMEOUT:g} seconds")
        return _step(self.number, [batch.result() for batch in self.batches])


def _step(number: int, batches: list[Batch]) -> OptimizerStep:
    return OptimizerStep(
        number=number,
        micro_batches=tuple(batches),
        num_targets=sum(len(batch.tokens.labels) for batch in batches),
        num_tokens=sum(batch.tokens.num_tokens for batch in batches),
    )
