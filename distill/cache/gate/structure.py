"""The structure of a shard's file, checked on its metadata alone: no value of any array is read here.

An allow-list: what this program's own writer makes passes, everything else is refused. One small function a rule.
"""

import math
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from distill.cache.gate.rules import OtherVersionError, RefusedError, require
from distill.cache.shard import FORMAT, FORMAT_VERSION, array_types
from distill.cache.spec import LayerSpec
from distill.cache.strict import FileState, check_fields, is_count, is_text, open_regular, parse_json
from distill.codec import codec_for

FILE_BYTES = 1 << 30
HEADER_BYTES = 1 << 16
CHUNK_BYTES = 64 << 20
ARRAY_BYTES = 2 << 30
SMALL_ARRAY_BYTES = 8 << 20
"""Below it any compression is allowed: a column of equal numbers is honest, and compresses a thousandfold."""
MOST_COMPRESSION = 200
DEFLATE_COMPRESSION = 1040
"""What deflate reaches at most. Whole distributions are mostly zeros, and they are read by pieces."""
WHOLE_BYTES = 128 << 20
FILTERS = frozenset({h5py.h5z.FILTER_DEFLATE, h5py.h5z.FILTER_SHUFFLE, h5py.h5z.FILTER_FLETCHER32})
_SIGNATURE = b"\x89HDF\r\n\x1a\n"


def check_file(path: Path) -> int:
    """The size in bytes of a file that can be a shard: regular, of bounded size, HDF5 from the first byte."""
    size = FileState.of(path).size
    require(size <= FILE_BYTES, f"{size:,} bytes; a shard has at most {FILE_BYTES:,}")
    with open_regular(path) as file:
        require(file.read(len(_SIGNATURE)) == _SIGNATURE, "not an HDF5 file")
    return size


def check_structure(file: h5py.File, size: int) -> dict[str, Any]:
    """Every object of an opened shard of ``size`` bytes: attributes, links, names, types, layouts, filters, sizes.

    Returns its header.
    """
    header = check_header(file)
    types = array_types(header)
    check_names(file, frozenset(types))
    for name in types:
        check_link(file, name)
        check_is_array(file, name)
    datasets = {name: file[name] for name in types}
    large = large_arrays(header)
    for name, dataset in datasets.items():
        dtypes, ndim = types[name]
        check_attributes(name, dataset)
        check_dtype(name, dataset, dtypes)
        check_shape(name, dataset, ndim)
        check_layout(name, dataset)
        check_external(name, dataset)
        check_filters(name, dataset)
        check_chunks(name, dataset)
        check_size(name, dataset, DEFLATE_COMPRESSION if name in large else MOST_COMPRESSION)
    check_whole({name: dataset for name, dataset in datasets.items() if name not in large})
    check_overlap(datasets, size)
    return header


# -- the file's own ------------------------------------------------------------------------------------------------


def check_header(file: h5py.File) -> dict[str, Any]:
    """The one attribute: bounded JSON of exactly the fields that a shard has."""
    require(h5py.h5a.get_num_attrs(file.id) == 1, "header: not the only attribute")
    require(h5py.h5a.exists(file.id, b"header"), "header: missing")
    attribute = h5py.h5a.open(file.id, b"header")
    kind, space = attribute.get_type(), attribute.get_space()
    require(kind.get_class() == h5py.h5t.STRING and space.get_simple_extent_npoints() == 1, "header: not one string")
    require(attribute.get_storage_size() <= HEADER_BYTES and kind.get_size() <= HEADER_BYTES, "header: too large")
    value = file.attrs["header"]
    text = value.encode() if isinstance(value, str) else bytes(value)
    require(len(text) <= HEADER_BYTES, "header: too large")
    return header_of(parse_json(text, "header"))


def header_of(value: Any) -> dict[str, Any]:
    """A parsed header, checked field by field."""
    require(isinstance(value, dict) and value.get("format") == FORMAT, "header: not a shard of distill")
    if value.get("version") != FORMAT_VERSION:
        version = str(value.get("version"))[:20]
        raise OtherVersionError(f"format version {version}, this program reads {FORMAT_VERSION}; update it")
    fields = {"format": is_text, "version": is_count, "made_by": is_text, "layer": _is_object, "arrays_sha256": is_text}
    check_fields(value, fields, "header")
    layer = value["layer"]
    mode, precision = layer.get("mode"), layer.get("cache_precision")
    if is_text(mode) and is_text(precision) and codec_for(mode, precision) is None:
        raise OtherVersionError(f"mode {mode!r} with precision {precision!r} is not known here; update this program")
    LayerSpec.from_json({**layer, "teacher": "-"}, "header: layer")
    return dict(value)


def check_names(file: h5py.File, expected: frozenset[str]) -> None:
    """Exactly the arrays of the format, by name, before anything of them is opened."""
    count = file.id.get_num_objs()
    require(count <= len(expected), f"{count} objects; a shard has {len(expected)}")
    for name in sorted(expected.symmetric_difference(file)):
        raise RefusedError(f"{name[:40]}: {'missing' if name in expected else 'not an array of this format'}")


# -- an object -----------------------------------------------------------------------------------------------------


def check_link(file: h5py.File, name: str) -> None:
    """A hard link, known before it is followed: soft and external ones may lead anywhere."""
    kind = file.id.links.get_info(name.encode()).type
    require(kind == h5py.h5l.TYPE_HARD, f"{name}: a soft or external link")


def check_is_array(file: h5py.File, name: str) -> None:
    """An array: neither a group, which may hold itself, nor a named type."""
    require(h5py.h5o.get_info(file.id, name.encode()).type == h5py.h5o.TYPE_DATASET, f"{name}: not an array")


def check_attributes(name: str, dataset: h5py.Dataset) -> None:
    """Arrays have no attributes."""
    require(h5py.h5a.get_num_attrs(dataset.id) == 0, f"{name}: has attributes")


def check_dtype(name: str, dataset: h5py.Dataset, dtypes: Collection[str]) -> None:
    """One of the listed types, bit for bit: no compound, text, reference, enum or home-made number."""
    kind = dataset.id.get_type()
    known = (h5py.h5t.py_create(np.dtype(dtype).newbyteorder("<")) for dtype in dtypes)
    require(any(kind.equal(other) for other in known), f"{name}: its type is not {' or '.join(sorted(dtypes))}")


def check_shape(name: str, dataset: h5py.Dataset, ndim: int) -> None:
    """Of the right rank and of fixed size."""
    space = dataset.id.get_space()
    require(space.get_simple_extent_type() == h5py.h5s.SIMPLE, f"{name}: not an array of rank {ndim}")
    require(space.get_simple_extent_ndims() == ndim, f"{name}: not an array of rank {ndim}")
    require(space.get_simple_extent_dims() == space.get_simple_extent_dims(True), f"{name}: of open size")


def check_layout(name: str, dataset: h5py.Dataset) -> None:
    """Stored in this file, in chunks or in one piece; a virtual array is made of other files."""
    layout = dataset.id.get_create_plist().get_layout()
    require(layout in {h5py.h5d.CHUNKED, h5py.h5d.CONTIGUOUS}, f"{name}: a virtual or compact array")


def check_external(name: str, dataset: h5py.Dataset) -> None:
    """No bytes of another file."""
    require(dataset.id.get_create_plist().get_external_count() == 0, f"{name}: its data is in another file")


def check_filters(name: str, dataset: h5py.Dataset) -> None:
    """Filters that are built in, each at most once: a deflated deflate compresses a millionfold."""
    plist = dataset.id.get_create_plist()
    filters = [plist.get_filter(number)[0] for number in range(plist.get_nfilters())]
    require(FILTERS.issuperset(filters) and len(set(filters)) == len(filters), f"{name}: filters {filters[:8]}")


def check_chunks(name: str, dataset: h5py.Dataset) -> None:
    """Chunks of bounded size, and all of them there: what isn't stored would be made up."""
    if dataset.chunks is None:
        return
    require(math.prod(dataset.chunks) * dataset.dtype.itemsize <= CHUNK_BYTES, f"{name}: chunks of {dataset.chunks}")
    wanted = math.prod(-(-length // chunk) for length, chunk in zip(dataset.shape, dataset.chunks, strict=True))
    require(dataset.id.get_num_chunks() == wanted, f"{name}: not all of its chunks are stored")


def large_arrays(header: Mapping[str, Any]) -> frozenset[str]:
    """The arrays that a reader takes by pieces: those with a value for each entry."""
    codec = codec_for(header["layer"]["mode"], header["layer"]["cache_precision"])
    assert codec is not None, "checked with the header"
    return frozenset(codec.entry_arrays) | {name for name, kind in codec.array_types.items() if kind.ndim > 1}


def check_whole(datasets: Mapping[str, h5py.Dataset]) -> None:
    """The arrays that are read whole fit into memory together."""
    size = sum(dataset.size * dataset.dtype.itemsize for dataset in datasets.values())
    require(size <= WHOLE_BYTES, f"{max(datasets, key=lambda name: datasets[name].size)}: {size:,} bytes with others")


def check_size(name: str, dataset: h5py.Dataset, most_compression: int = MOST_COMPRESSION) -> None:
    """No more memory than what is stored can honestly stand for."""
    size, stored = dataset.size * dataset.dtype.itemsize, dataset.id.get_storage_size()
    require(size <= ARRAY_BYTES, f"{name}: {size:,} bytes")
    require(stored > 0 or size == 0, f"{name}: {size:,} bytes declared, none stored")
    allowed = max(SMALL_ARRAY_BYTES, most_compression * stored)
    require(size <= allowed, f"{name}: {size:,} bytes declared, {stored:,} stored")


def check_overlap(datasets: Mapping[str, h5py.Dataset], size: int) -> None:
    """Every piece of every array inside the file, and no byte in two of them."""
    pieces = sorted(piece for dataset in datasets.values() for piece in _pieces(dataset))
    ends = [start + length for start, length in pieces]
    require(not ends or max(ends) <= size, "data beyond the end of the file")
    for end, (start, _) in zip(ends, pieces[1:], strict=False):
        require(end <= start, f"data at byte {start:,} belongs to two arrays")


def _pieces(dataset: h5py.Dataset) -> list[tuple[int, int]]:
    """Where the data of an array lies in the file: (first byte, bytes)."""
    pieces: list[tuple[int, int]] = []
    if dataset.chunks is not None:
        dataset.id.chunk_iter(lambda info: pieces.append((info.byte_offset, info.size)))
    elif dataset.id.get_offset() is not None:
        pieces.append((dataset.id.get_offset(), dataset.id.get_storage_size()))
    return pieces


def _is_object(value: Any) -> bool:
    return isinstance(value, dict)
