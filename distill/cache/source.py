"""A source: what one teacher can give to a run, from its own layer and from any that holds as much and more."""

from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import numpy as np
import numpy.typing as npt

from distill.cache.gate import Admissions
from distill.cache.layer import Layer, Located
from distill.cache.spec import LayerSpec, readable_layers
from distill.types import FloatArray, Records, TokenizedSample


@dataclass(slots=True)
class Source:
    """The layers that serve ``spec``: its ``own``, where new records go, and the ``larger`` ones, smallest K first.

    A context manager that closes its layers.
    """

    spec: LayerSpec
    own: Layer
    larger: tuple[Layer, ...]
    _stack: ExitStack = field(default_factory=ExitStack)

    @classmethod
    def open(cls, parent: Path, spec: LayerSpec, admissions: Admissions) -> Self:
        """The source of ``spec`` among the layers under ``parent``.

        A layer serves if it was collected in the same way with at least as many entries, at least as exactly.
        """
        with ExitStack() as stack:
            own = stack.enter_context(Layer.open(parent, spec, admissions))
            serving = []
            for folder, other, _ in readable_layers(parent):  # a neighbour's faults are told when it is opened itself
                if other is not None and other.hex != spec.hex and other.serves(spec):
                    serving.append(stack.enter_context(Layer.load(folder, admissions)))
            serving.sort(key=lambda layer: (layer.spec.top_k, layer.spec.hex))
            return cls(spec, own, tuple(serving), stack.pop_all())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def locate(self, samples: Iterable[TokenizedSample]) -> dict[bytes, Located]:
        """Where the records of ``samples`` are, by key; what no layer holds whole is left out."""
        rest = {sample.key: sample for sample in samples}
        found: dict[bytes, Located] = {}
        for number, layer in enumerate((self.own, *self.larger)):
            here = layer.locate(rest.values(), number=number)
            found |= here
            rest = {key: sample for key, sample in rest.items() if key not in here}
        return found

    def missing(self, samples: Iterable[TokenizedSample]) -> list[TokenizedSample]:
        """The samples that have to be collected."""
        samples = list(samples)
        found = self.locate(samples)
        return [sample for sample in samples if sample.key not in found]

    def read(self, sample: TokenizedSample, located: Located) -> Records:
        """The records of ``sample``'s targets, in their order, with at most ``spec.top_k`` entries each."""
        if not located.layer:
            return self.own.read(sample, located)
        return cut(self.larger[located.layer - 1].read(sample, located), self.spec.top_k)


def cut(records: Records, top_k: int) -> Records:
    """The likeliest ``top_k`` entries of each record, by falling logprob, ties by id; the others' mass joins the tail.

    Log-sums are in float64.
    """
    counts = records.entry_counts
    if not len(counts) or counts.max() <= top_k:
        return records
    width = int(counts.max())
    inside = np.arange(width) < counts[:, None]
    logprobs = np.full(inside.shape, -np.inf, np.float32)
    logprobs[inside] = records.entry_logprobs
    # The K-th largest of each row is a bar; only what reaches it (K entries and their ties) has to be sorted.
    bar = np.partition(logprobs, width - top_k, axis=1)[:, width - top_k]
    reaches = (logprobs >= bar[:, None]) & inside
    entries, row = np.flatnonzero(reaches[inside]), np.nonzero(reaches)[0]
    order = np.lexsort((records.entry_ids[entries], -records.entry_logprobs[entries], row))
    rank = np.arange(len(row)) - np.searchsorted(row, row)
    chosen = entries[order[rank < top_k]]
    return Records(
        entry_counts=np.minimum(counts, top_k),
        entry_ids=records.entry_ids[chosen],
        entry_logprobs=records.entry_logprobs[chosen],
        tail_logprobs=_with_dropped(records, chosen),
        label_logprobs=records.label_logprobs,
        entropies=records.entropies,
    )


def _with_dropped(records: Records, chosen: npt.NDArray[np.int64]) -> FloatArray:
    """The tails [R] when only the ``chosen`` entries are kept: log-sums over the others, in float64."""
    dropped = np.ones(len(records.entry_ids), np.bool_)
    dropped[chosen] = False
    record = np.repeat(np.arange(len(records)), records.entry_counts)[dropped]
    masses = np.bincount(record, np.exp(records.entry_logprobs[dropped], dtype=np.float64), len(records))
    with np.errstate(divide="ignore"):
        return np.logaddexp(records.tail_logprobs.astype(np.float64), np.log(masses)).astype(np.float32)
