"""How much of the cap one teacher may fill in a round, corrected by what shards really take."""

from collections.abc import Callable
from pathlib import Path

from distill.cache import Layer, ShardInfo
from distill.collect import Budget, ShardPlan
from distill.planning import count_targets

# Shards differ in what they take; so much more than the mean so far is expected of the next one.
MARGIN = 1.05


class RoundAllowance:
    """What one teacher may collect in a round: ``share`` bytes of the ``budget``, corrected by what shards really take.

    ``layer`` has the shards so far, ``bytes_per_target`` is expected while there is none. ``must``: all of it has to
    fit; InputError where it doesn't. ``try_first``: the first shard is tried whatever is expected of it. ``promise`` is
    told of a shard before it is written.
    """

    def __init__(
        self,
        budget: Budget,
        layer: Layer,
        *,
        share: int,
        bytes_per_target: float,
        must: bool,
        try_first: bool,
        promise: Callable[[str], None],
    ) -> None:
        self._budget, self._share, self._must, self._promise = budget, share, must, promise
        self._try = try_first
        self._guess = bytes_per_target
        # Of all shards that are there, so that a start after a kill expects what the killed one did.
        self._bytes = sum(info.bytes for info in layer.shards.values())
        self._targets = count = sum(info.targets for info in layer.shards.values())
        self._begun = count
        self._taken = 0
        self._full = False

    def wants(self, shard: ShardPlan) -> bool:
        """Whether the shard is expected to fit beside those that are being made."""
        targets = count_targets([shard])
        per_target = self._bytes / self._targets if self._targets else self._guess
        expected = MARGIN * per_target * (self._begun - self._targets + targets)
        if not self._must and not self._try and self._taken + expected > self._share:
            self._full = True
        if self._full:
            return False
        self._try = False
        self._begun += targets
        return True

    def take(self, folder: Path, shard: str, size: int) -> bool:
        """See ``Allowance.take``."""
        if self._must:
            self._budget.take(folder, shard, size)
        elif self._taken + size > self._share or not self._budget.try_take(folder, shard, size):
            self._full = True
            return False
        self._promise(shard)
        self._taken += size
        return True

    def sealed(self, info: ShardInfo, seconds: float) -> None:
        """Corrects the plan by what the shard took."""
        self._bytes += info.bytes
        self._targets += info.targets
