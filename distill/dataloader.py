"""The cache as a stream of whole optimizer steps, prefetched, the same for every start and every reader.

The order is a function of (seed, epoch) alone and the position is the step's number, so a resume needs one integer.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from distill.cache import Layer, Located
from distill.collate import TokenBatch, collate
from distill.losses import SparseTargets
from distill.records import concat
from distill.types import Records, TokenizedSample

_PREFETCH_STEPS = 4
_READ_TIMEOUT = 600.0  # seconds


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """A micro-batch: tokens, teacher distributions, and float32 [N] logprob of the real token and entropy."""

    tokens: TokenBatch
    targets: SparseTargets
    label_logprobs: Tensor
    entropies: Tensor

    def to(self, device: str) -> "Batch":
        """The same batch on ``device``."""
        t = self.targets
        targets = SparseTargets(
            labels=t.labels.to(device),
            entry_ids=t.entry_ids.to(device),
            entry_logprobs=t.entry_logprobs.to(device),
            tail_logprobs=t.tail_logprobs.to(device),
        )
        return Batch(self.tokens.to(device), targets, self.label_logprobs.to(device), self.entropies.to(device))


@dataclass(frozen=True, slots=True, eq=False)
class OptimizerStep:
    """Everything one optimizer step needs. ``number`` counts from 1; ``num_targets`` is over all micro-batches."""

    number: int
    micro_batches: tuple[Batch, ...]
    num_targets: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class CachedSamples:
    """The samples of a split in dataset order, duplicates included, and where their records are."""

    layer: Layer
    samples: Sequence[TokenizedSample]
    located: dict[bytes, Located]

    def __len__(self) -> int:
        return len(self.samples)

    def batch(self, rows: Sequence[int]) -> Batch:
        """Read the given samples' records into one batch."""
        samples = [self.samples[row] for row in rows]
        records = concat([self.layer.read(sample, self.located[sample.key]) for sample in samples])
        tokens = collate(samples)
        return Batch(
            tokens=tokens,
            targets=pad(records, tokens.labels),
            label_logprobs=torch.from_numpy(records.label_logprobs),
            entropies=torch.from_numpy(records.entropies),
        )


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
    )


def epoch_order(lengths: npt.NDArray[np.int64], data_order: str, *, seed: int, epoch: int) -> npt.NDArray[np.int64]:
    """Rows in the order of ``epoch`` (from 0): shuffled anew each epoch, by falling length, or as in the dataset."""
    if data_order == "shuffle":
        return np.random.Generator(np.random.PCG64([seed, epoch])).permutation(len(lengths))
    if data_order == "sorted":
        return np.argsort(-lengths, kind="stable")
    return np.arange(len(lengths))


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Which samples make which step. The last step of an epoch takes what is left, its loss weighted by its targets."""

    lengths: npt.NDArray[np.int64]
    batch_size: int
    grad_accum_batches: int
    num_epochs: int
    data_order: str
    seed: int

    @property
    def samples_per_step(self) -> int:
        """Samples of a full step."""
        return self.batch_size * self.grad_accum_batches

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps of one pass over the samples."""
        return -(-len(self.lengths) // self.samples_per_step)

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the whole training."""
        return self.steps_per_epoch * self.num_epochs

    def steps(self, first: int) -> Iterator[tuple[int, list[list[int]]]]:
        """(number, rows of each micro-batch) from step ``first`` (counted from 1) to the last."""
        for epoch in range((first - 1) // self.steps_per_epoch, self.num_epochs):
            order = epoch_order(self.lengths, self.data_order, seed=self.seed, epoch=epoch)
            for index in range(self.steps_per_epoch):
                number = epoch * self.steps_per_epoch + index + 1
                if number < first:
                    continue
                rows = order[index * self.samples_per_step : (index + 1) * self.samples_per_step].tolist()
                yield number, [rows[i : i + self.batch_size] for i in range(0, len(rows), self.batch_size)]


def load_steps(data: CachedSamples, plan: StepPlan, *, first: int) -> Iterator[OptimizerStep]:
    """The optimizer steps from ``first`` on, read ahead by a thread that ends with the generator."""

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
        for number, micro_batches in plan.steps(first):
            pending.append(pool.submit(build, number, micro_batches))
            if len(pending) > _PREFETCH_STEPS:
                yield pending.popleft().result(timeout=_READ_TIMEOUT)
        while pending:
            yield pending.popleft().result(timeout=_READ_TIMEOUT)
    finally:
        pool.shutdown(cancel_futures=True)
