"""Open shards, each lent to one thread at a time: HDF5's objects and a decoder's buffers can't be shared."""

import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from distill.cache.shard import ShardReader


class Readers:
    """Keeps at most ``most`` readers open besides those that are lent; the least recently used are closed.

    A second thread that asks for a shard while it is lent gets a reader of its own.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._idle: OrderedDict[str, list[ShardReader]] = OrderedDict()
        self._forgotten: Counter[str] = Counter()

    @contextmanager
    def lent(self, name: str, opened: Callable[[], ShardReader]) -> Iterator[ShardReader]:
        """A reader of the shard ``name`` for this thread alone, inside; ``opened`` makes one if none is idle."""
        with self._lock:
            times_forgotten = self._forgotten[name]
            idle = self._idle.get(name)
            reader = idle.pop() if idle else None
            if idle == []:
                del self._idle[name]
        if reader is None:
            reader = opened()
        try:
            yield reader
        finally:
            with self._lock:
                if self._forgotten[name] == times_forgotten:
                    self._keep(name, reader)
                else:
                    reader.close()

    def forget(self, name: str) -> None:
        """Close the readers of a shard, and those that are lent when they come back."""
        with self._lock:
            self._forgotten[name] += 1
            for reader in self._idle.pop(name, []):
                reader.close()

    def close(self) -> None:
        """Close all that are idle."""
        with self._lock:
            for readers in self._idle.values():
                for reader in readers:
                    reader.close()
            self._idle.clear()

    def _keep(self, name: str, reader: ShardReader) -> None:
        self._idle.setdefault(name, []).append(reader)
        self._idle.move_to_end(name)
        if sum(map(len, self._idle.values())) > self._most:
            oldest, readers = next(iter(self._idle.items()))
            readers.pop().close()
            if not readers:
                del self._idle[oldest]
