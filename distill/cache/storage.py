"""Named arrays in one HDF5 file: built in memory, read by chunks.

Every array is cut into chunks and deflated by us, with the strategy that suits its bytes, and handed to HDF5 as it is:
any reader sees ordinary gzip (and shuffle) filters. Reading the chunks of the large arrays takes the same short cut,
because HDF5's own path costs more than inflating a small chunk. Deflate's checksum of a chunk misses some changes of
one bit, where a repeated string is taken from another place: so the header has a SHA-256 of all arrays.
"""

import hashlib
import json
import math
import zlib
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from typing import Any

import h5py
import numpy as np

from distill.codec import Array, Packing, Stored, cut_chunk

H5_ERRORS = (OSError, KeyError, RuntimeError, ValueError, TypeError, IndexError, zlib.error)
"""What a damaged file raises when it is read."""

_CHUNK_ROWS = 1 << 16
_LEVEL = 6
_STRATEGIES: Mapping[Packing, int] = {
    "text": zlib.Z_DEFAULT_STRATEGY,
    "symbols": zlib.Z_HUFFMAN_ONLY,
    "runs": zlib.Z_RLE,
}
# Deflate changes its code every 4,096 symbols at 6, twice as many at 7: often enough to follow a matrix to its end.
_MEMORY_LEVELS: Mapping[Packing, int] = {"text": 9, "symbols": 7, "runs": 6}
_INFLATED_BYTES = 1 << 18


def to_hdf5(arrays: Mapping[str, Stored], header: Mapping[str, Any]) -> bytes:
    """The file's bytes: equal content gives equal bytes. ``arrays_sha256`` is added to the header."""
    # track_times would put the clock into the file; libver is pinned because its default moves between releases.
    with h5py.File("shard", "w", driver="core", backing_store=False, libver=("v110", "v110")) as file:
        digest = _together({name: _chunks_of(stored) for name, stored in arrays.items()})
        file.attrs["header"] = json.dumps({**header, "arrays_sha256": digest}, sort_keys=True)
        for name, stored in arrays.items():
            array = stored.array
            if not array.size:
                file.create_dataset(name, data=array, track_times=False)
                continue
            chunk = _chunk_shape(stored)
            dataset = file.create_dataset(
                name,
                shape=array.shape,
                dtype=array.dtype,
                chunks=chunk,
                compression="gzip",
                compression_opts=_LEVEL,
                shuffle=array.dtype.itemsize > 1,
                track_times=False,
            )
            for index in _grid(array.shape, chunk):
                place = tuple(i * size for i, size in zip(index, chunk, strict=True))
                dataset.id.write_direct_chunk(place, _deflate(cut_chunk(array, chunk, index), stored.packing))
        file.flush()
        return bytes(file.id.get_file_image())


def arrays_sha256(file: h5py.File) -> str:
    """SHA-256 (hex) over the arrays of an opened file: of each by its name, chunk by chunk as it is stored."""
    arrays = {name: _StoredArray(dataset.id) for name, dataset in file.items()}
    return _together({name: array.chunks() for name, array in arrays.items()})


class FileStore:
    """The arrays of an opened file, for a codec to read. The last chunks stay inflated."""

    def __init__(self, file: h5py.File) -> None:
        self._file = file
        self._arrays: dict[str, _StoredArray] = {}
        self._chunks: OrderedDict[tuple[str, tuple[int, ...]], Array] = OrderedDict()
        self._inflated = 0  # bytes of ``_chunks``

    def whole(self, name: str) -> Array:
        """See ``Store.whole``."""
        return self._array(name).whole()

    def rows(self, name: str, start: int, stop: int) -> Array:
        """See ``Store.rows``."""
        return self._array(name).rows(start, stop)

    def shape(self, name: str) -> tuple[int, ...]:
        """See ``Store.shape``."""
        return self._array(name).shape

    def chunk_shape(self, name: str) -> tuple[int, ...]:
        """See ``Store.chunk_shape``."""
        return self._array(name).chunk_shape

    def chunk(self, name: str, index: tuple[int, ...]) -> Array:
        """See ``Store.chunk``."""
        place = name, index
        chunk = self._chunks.pop(place, None)
        if chunk is None:
            chunk = self._array(name).chunk(index)
            self._inflated += chunk.nbytes
            while self._chunks and self._inflated > _INFLATED_BYTES:
                self._inflated -= self._chunks.popitem(last=False)[1].nbytes
        self._chunks[place] = chunk
        return chunk

    def _array(self, name: str) -> "_StoredArray":
        if name not in self._arrays:
            self._arrays[name] = _StoredArray(h5py.h5d.open(self._file.id, name.encode()))
        return self._arrays[name]


class _StoredArray:
    """A dataset, and what has to be known to read its chunks, asked of HDF5 once: its answers are slow.

    So are h5py's own objects: opening a shard would take half as long again with them.
    """

    def __init__(self, dataset: h5py.h5d.DatasetID) -> None:
        self._dataset = dataset
        self._dtype = dataset.dtype
        self.shape: tuple[int, ...] = dataset.shape

    def whole(self) -> Array:
        """All of it."""
        array = np.empty(self.shape, self._dtype)
        if array.size:
            self._dataset.read(h5py.h5s.ALL, h5py.h5s.ALL, array)
        return array

    def rows(self, start: int, stop: int) -> Array:
        """Rows of a one-dimensional array."""
        return np.asarray(h5py.Dataset(self._dataset)[start:stop])

    def chunks(self) -> Iterator[Array]:
        """All chunks."""
        if math.prod(self.shape):
            yield from (self.chunk(index) for index in _grid(self.shape, self.chunk_shape))

    def chunk(self, index: tuple[int, ...]) -> Array:
        """The chunk at ``index``, filled up with zeros where it reaches beyond the array's end."""
        place = tuple(i * size for i, size in zip(index, self.chunk_shape, strict=True))
        shuffled = self._filters == [h5py.h5z.FILTER_SHUFFLE, h5py.h5z.FILTER_DEFLATE]
        if not shuffled and self._filters != [h5py.h5z.FILTER_DEFLATE]:
            inside = tuple(slice(a, a + n) for a, n in zip(place, self.chunk_shape, strict=True))
            return cut_chunk(h5py.Dataset(self._dataset)[inside], self.chunk_shape, (0,) * len(place))
        skipped, packed = self._dataset.read_direct_chunk(place)
        # A stranger's chunk may inflate to anything: no more is taken than the chunk can hold.
        size = math.prod(self.chunk_shape) * self._dtype.itemsize
        inflate = zlib.decompressobj()
        data = inflate.decompress(packed, size)
        if skipped or len(data) != size or not inflate.eof:
            raise ValueError(f"{h5py.h5i.get_name(self._dataset).decode()}: a chunk of the wrong size")
        if shuffled:
            data = np.frombuffer(data, np.uint8).reshape(self._dtype.itemsize, -1).T.tobytes()
        return np.frombuffer(data, self._dtype).reshape(self.chunk_shape)

    @cached_property
    def chunk_shape(self) -> tuple[int, ...]:
        """The shape of a storage chunk; of all if it isn't cut into chunks."""
        plist = self._dataset.get_create_plist()
        return tuple(plist.get_chunk()) if plist.get_layout() == h5py.h5d.CHUNKED else self.shape

    @cached_property
    def _filters(self) -> list[int]:
        plist = self._dataset.get_create_plist()
        return [plist.get_filter(number)[0] for number in range(plist.get_nfilters())]


def _together(arrays: Mapping[str, Iterable[Array]]) -> str:
    """SHA-256 (hex) over the SHA-256 of each array's chunks, by name."""
    whole = hashlib.sha256()
    for name, chunks in sorted(arrays.items()):
        own = hashlib.sha256()
        for chunk in chunks:
            own.update(chunk.data)
        whole.update(f"{name} {own.hexdigest()}\n".encode())
    return whole.hexdigest()


def _chunk_shape(stored: Stored) -> tuple[int, ...]:
    return stored.chunk or (min(len(stored.array), _CHUNK_ROWS),)


def _chunks_of(stored: Stored) -> Iterator[Array]:
    if stored.array.size:
        chunk = _chunk_shape(stored)
        yield from (cut_chunk(stored.array, chunk, index) for index in _grid(stored.array.shape, chunk))


def _grid(shape: tuple[int, ...], chunk: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Where the chunks of an array are."""
    return iter(np.ndindex(*(-(-n // size) for n, size in zip(shape, chunk, strict=True))))


def _deflate(chunk: Array, packing: Packing) -> bytes:
    data = chunk.reshape(-1).view(np.uint8)
    if chunk.dtype.itemsize > 1:  # HDF5's shuffle filter: first bytes of all values, then all second ones ...
        data = np.ascontiguousarray(data.reshape(-1, chunk.dtype.itemsize).T)
    deflate = zlib.compressobj(_LEVEL, zlib.DEFLATED, zlib.MAX_WBITS, _MEMORY_LEVELS[packing], _STRATEGIES[packing])
    packed = deflate.compress(data.data) + deflate.flush()
    # Level 0 stores: what can't be compressed grows by five bytes in 16 kB and no more.
    return packed if len(packed) <= data.nbytes else zlib.compress(data.data, 0)
