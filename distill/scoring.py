"""What a collecting worker does: a planned shard through the teacher, then encoded and sealed beside the next one."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch

from distill.cache import ShardInfo, build_shard
from distill.collate import token_batches
from distill.errors import MachineError
from distill.models import out_of_memory
from distill.placement import Placement
from distill.records import concat
from distill.teacher import Scored, Teacher, TeacherSpec
from distill.types import TokenizedSample
from distill.workers import Channel, Later

# Shorter chunks of a sample save no memory that matters.
_SHORTEST_CHUNK = 16


@dataclass(frozen=True, slots=True)
class CollectSpec:
    """What a worker has to know; crosses into its process.

    layer: the description that goes into every shard. threads: CPU threads. A batch has at most ``tokens_per_batch``
    tokens, padding included, and, if that is given, at most ``batch_size`` samples.
    """

    teacher: TeacherSpec
    layer: Mapping[str, Any]
    threads: int
    tokens_per_batch: int
    batch_size: int | None = None

    def on(self, placement: Placement) -> Self:
        """The same for a worker where ``placement`` says."""
        return replace(self, teacher=self.teacher.on(placement))


@dataclass(frozen=True, slots=True, eq=False)
class ShardTask:
    """One planned shard and the folder that it belongs into."""

    folder: Path
    samples: tuple[TokenizedSample, ...]


class CollectWorker:
    """Lives in a worker process with its teacher; called once a shard.

    Its progress is either a number of tokens or a line for the user.
    """

    def __init__(self, spec: CollectSpec) -> None:
        torch.set_num_threads(spec.threads)
        self._spec = spec
        self._teacher = Teacher(spec.teacher)
        self._untold = list(self._teacher.notes)
        # Both None until memory runs out: most tokens in a batch, and in a chunk of a sample.
        self._most_tokens: int | None = None
        self._chunk_len: int | None = None

    def __call__(self, task: ShardTask, channel: Channel) -> Later:
        """Score one shard. What is left for later needs no teacher: transfer, encode, write."""
        while self._untold:
            channel.progress(self._untold.pop())
        rows: list[int] = []
        scored: list[Scored] = []
        for batch in self._batches(task.samples):
            samples = [task.samples[row] for row in batch]
            rows += batch
            scored += self._score(samples, channel)
            channel.progress(sum(len(sample.token_ids) for sample in samples))
        return Later(partial(self._seal, task, rows, scored, channel))

    def _batches(self, samples: Sequence[TokenizedSample]) -> Iterator[list[int]]:
        """Rows of ``samples`` by falling length, cut into batches."""
        lengths = np.array([len(sample.token_ids) for sample in samples], np.int64)
        for rows in token_batches(lengths, self._spec.tokens_per_batch):
            size = self._spec.batch_size or len(rows)
            yield from (rows[start : start + size] for start in range(0, len(rows), size))

    def _seal(self, task: ShardTask, rows: list[int], scored: list[Scored], channel: Channel) -> ShardInfo | None:
        """The sealed shard, or None if the parent, asked for its bytes, has no room for it."""
        by_row = dict(zip(rows, (records for part in scored for records in part.records()), strict=True))
        scored.clear()
        records = concat([by_row[row] for row in range(len(rows))])
        by_row.clear()
        vocab_size = self._spec.teacher.vocab_size
        image = build_shard(task.samples, records, layer=self._spec.layer, vocab_size=vocab_size)
        if not channel.request((task.folder, image.info.name, image.disk_bytes)):
            return None
        image.seal(task.folder)
        return image.info

    # -- memory -----------------------------------------------------------------------------------------------------

    def _score(self, batch: Sequence[TokenizedSample], channel: Channel) -> list[Scored]:
        """A batch, longest sample first, in as few parts as the memory allows."""
        longest = len(batch[0].token_ids)
        while True:
            size = len(batch) if self._most_tokens is None else max(1, self._most_tokens // longest)
            size = min(size, len(batch))
            parts = [batch[start : start + size] for start in range(0, len(batch), size)]
            try:
                return [self._teacher.score(part, self._chunk_len) for part in parts]
            except (RuntimeError, MemoryError) as error:
                if not out_of_memory(error):
                    raise
            # Outside of the handler, which holds the failed batch's tensors.
            channel.progress(self._shrink(size, longest))

    def _shrink(self, size: int, longest: int) -> str:
        """Halve what ran out of memory, ``size`` samples of up to ``longest`` tokens, from now on. A line that says so.

        Raises MachineError if it can't be less.
        """
        self._teacher.free_memory()
        name = self._spec.teacher.folder.name
        if size > 1:
            self._most_tokens = longest * (size // 2)
            now = f"batches of at most {self._most_tokens:,} tokens"
        else:
            before = self._chunk_len or self._spec.teacher.seq_chunk_len or longest
            self._chunk_len = min(before, longest) // 2
            now = f"samples in chunks of {self._chunk_len:,} tokens"
            if self._chunk_len < _SHORTEST_CHUNK or not self._teacher.can_chunk():
                raise MachineError(
                    f"{name}: out of memory with one sample of {longest:,} tokens; free some memory, run fewer workers,"
                    " or use a smaller context_len or teacher"
                )
        return (
            f"{name}: out of memory; a worker goes on with {now}, and its shards may differ in the last bits from those"
            " of a run with more memory"
        )
