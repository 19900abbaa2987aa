"""How a training goes through a text of which the cache holds only a part at a time.

Parts end between optimizer steps, so the number of steps, and with it the schedule of the learning rate, is that of a
training without rounds. Pure: what is collected when is ``rounds``' affair.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from distill.steps import Segment, epoch_order


@dataclass(frozen=True, slots=True)
class Visit:
    """A turn of the training on one part: its optimizer steps ``first`` to ``last``; None if the part isn't known."""

    part: int
    epochs: tuple[int, ...]
    first: int
    last: int | None


@dataclass(frozen=True, slots=True, eq=False)
class Parts:
    """The order in which a training goes through parts of the text.

    ``order`` are all units of the text (see ``steps``: samples, or what is batched or packed together); ``ends`` the
    ends of the parts known so far, as positions in ``order``, each but the last one of the text a multiple of
    ``units_per_step``.
    """

    order: npt.NDArray[np.int64]
    ends: tuple[int, ...]
    units_per_step: int
    num_epochs: int
    epochs_per_round: int | str

    @property
    def complete(self) -> bool:
        """Whether all parts are known."""
        return bool(self.ends) and self.ends[-1] == len(self.order)

    def start(self, part: int) -> int:
        """The position at which ``part`` begins."""
        return self.ends[part - 1] if part else 0

    def positions(self, part: int) -> npt.NDArray[np.int64]:
        """The units of a known part in the order in which they are collected."""
        return self.order[self.start(part) : self.ends[part]]

    def rows(self, part: int) -> npt.NDArray[np.int64]:
        """The units of a known part, ascending."""
        return np.sort(self.positions(part))

    def visits(self) -> Iterator[Visit]:
        """All turns, up to the first one whose part isn't known.

        With ``epochs_per_round`` 1 every other epoch goes backwards: its first part still is in the cache.
        """
        position = 0
        for part, epochs in self._turns():
            if part == len(self.ends):
                yield Visit(part, epochs, position + 1, None)
                return
            steps = len(epochs) * math.ceil((self.ends[part] - self.start(part)) / self.units_per_step)
            yield Visit(part, epochs, position + 1, position + steps)
            position += steps

    def visit_after(self, step: int) -> Visit:
        """The turn that comes when ``step`` optimizer steps are done; the last one if they all are."""
        visits = list(self.visits())
        return next((visit for visit in visits if visit.last is None or visit.last > step), visits[-1])

    def segments(self) -> list[Segment]:
        """All turns as the training sees them, one segment an epoch of a part; what isn't known yet is one part."""
        whole = self if self.complete else replace(self, ends=(*self.ends, len(self.order)))
        return [
            Segment(whole.rows(visit.part), epoch, visit.part) for visit in whole.visits() for epoch in visit.epochs
        ]

    def _turns(self) -> Iterator[tuple[int, tuple[int, ...]]]:
        parts = range(len(self.ends) + (not self.complete))
        if self.epochs_per_round == "all":
            for part in parts:
                yield part, tuple(range(self.num_epochs))
            return
        for part in parts:
            yield part, (0,)
        for epoch in range(1, self.num_epochs):
            for part in reversed(parts) if epoch % 2 else parts:
                yield part, (epoch,)


def base_order(units: int, data_order: str, seed: int) -> npt.NDArray[np.int64]:
    """The order in which the units are dealt to parts: mixed if the training mixes them, else as they stand."""
    return epoch_order(
        np.zeros(units, np.int64), "shuffle" if data_order == "shuffle" else "native", seed=seed, epoch=0
    )


def part_end(start: int, reach: int, *, units_per_step: int, total: int) -> int:
    """Where a part that begins at ``start`` ends if the ``reach`` units from there on are in the cache.

    Behind the last whole optimizer step, or at the end of all ``total`` units.
    """
    return total if start + reach == total else start + reach // units_per_step * units_per_step
