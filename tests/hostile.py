"""Shards that a stranger may have made to harm: one function a kind, each given an honest shard to spoil.

A builder gets the honest file's path and a folder ``outside`` whose files nobody may open; it returns the spoilt file's
path if that is another. ``KINDS`` names, for each, words of the refusal.
"""

import json
import os
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np

Builder = Callable[[Path, Path], Path | None]


@dataclass(frozen=True)
class Kind:
    build: Builder
    words: str


KINDS: dict[str, Kind] = {}


def kind(words: str) -> Callable[[Builder], Builder]:
    def register(build: Builder) -> Builder:
        KINDS[build.__name__] = Kind(build, words)
        return build

    return register


def edit(path: Path) -> h5py.File:
    return h5py.File(path, "r+", libver=("v110", "v110"))


def swap(path: Path, name: str, data: Any = None, **options: Any) -> None:
    """Put another array in the place of ``name``."""
    with edit(path) as file:
        old = file[name][:]
        del file[name]
        file.create_dataset(name, data=old if data is None else data(old), **options)


def swap_raw(path: Path, name: str, kind_of_number: h5py.h5t.TypeID, space: Any = None, plist: Any = None) -> None:
    """The same with HDF5's own calls; nothing is written into the new array."""
    with edit(path) as file:
        count = len(file[name])
        del file[name]
        space = h5py.h5s.create_simple((count,)) if space is None else space
        h5py.h5d.create(file.id, name.encode(), kind_of_number, space, plist)


def change_header(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    with edit(path) as file:
        header = json.loads(str(file.attrs["header"]))
        changed = change(header)
        file.attrs["header"] = json.dumps(header if changed is None else changed)


# -- what leads out of the file -----------------------------------------------------------------------------


@kind("entry_logprobs: its data is in another file")
def external_storage(path: Path, outside: Path) -> None:
    with edit(path) as file:
        values = file["entry_logprobs"][:]
        del file["entry_logprobs"]
        (outside / "secret.bin").write_bytes(values.tobytes())
        file.create_dataset(
            "entry_logprobs", values.shape, values.dtype, external=[(str(outside / "secret.bin"), 0, values.nbytes)]
        )


@kind("entry_logprobs: a soft or external link")
def external_link(path: Path, outside: Path) -> None:
    with edit(path) as file, h5py.File(outside / "secret.h5", "w") as other:
        other["x"] = file["entry_logprobs"][:]
        del file["entry_logprobs"]
        file["entry_logprobs"] = h5py.ExternalLink(str(outside / "secret.h5"), "/x")


@kind("entry_logprobs: a soft or external link")
def external_link_to_a_pipe(path: Path, outside: Path) -> None:
    os.mkfifo(outside / "pipe.h5")
    with edit(path) as file:
        del file["entry_logprobs"]
        file["entry_logprobs"] = h5py.ExternalLink(str(outside / "pipe.h5"), "/x")


@kind("entry_ids: a soft or external link")
def soft_link(path: Path, outside: Path) -> None:
    with edit(path) as file:
        del file["entry_ids"]
        file["entry_ids"] = h5py.SoftLink("/tokens")


@kind("entry_ids: a soft or external link")
def soft_link_to_nothing(path: Path, outside: Path) -> None:
    with edit(path) as file:
        del file["entry_ids"]
        file["entry_ids"] = h5py.SoftLink("/nowhere")


@kind("entry_ids: a soft or external link")
def soft_link_to_itself(path: Path, outside: Path) -> None:
    with edit(path) as file:
        del file["entry_ids"]
        file["entry_ids"] = h5py.SoftLink("/entry_ids")


@kind("entry_logprobs: a virtual or compact array")
def virtual_array(path: Path, outside: Path) -> None:
    with edit(path) as file, h5py.File(outside / "secret.h5", "w") as other:
        values = file["entry_logprobs"][:]
        other["x"] = values
        del file["entry_logprobs"]
        layout = h5py.VirtualLayout(values.shape, values.dtype)
        layout[:] = h5py.VirtualSource(str(outside / "secret.h5"), "x", values.shape)
        file.create_virtual_dataset("entry_logprobs", layout)


@kind("not a regular file")
def symbolic_link(path: Path, outside: Path) -> None:
    path.rename(outside / "honest.h5")
    path.symlink_to(outside / "honest.h5")


@kind("not a regular file")
def pipe(path: Path, outside: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@kind("not a regular file")
def folder(path: Path, outside: Path) -> None:
    path.unlink()
    path.mkdir()


@kind("not a regular file")
def unix_socket(path: Path, outside: Path) -> None:
    path.unlink()
    before = Path.cwd()
    os.chdir(path.parent)  # a socket's path is short
    try:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(path.name)
    finally:
        os.chdir(before)


# -- bombs --------------------------------------------------------------------------------------------------


@kind("tokens: not all of its chunks")
def shape_bomb(path: Path, outside: Path) -> None:
    """Four petabytes of which nothing is stored."""
    swap_shape(path, "tokens", (1 << 51,), chunks=(1 << 20,))


def swap_shape(path: Path, name: str, shape: tuple[int, ...], **options: Any) -> None:
    with edit(path) as file:
        dtype = file[name].dtype
        del file[name]
        file.create_dataset(name, shape, dtype, **options)


@kind("tokens: .* bytes declared, none stored")
def contiguous_shape_bomb(path: Path, outside: Path) -> None:
    with edit(path) as file:
        del file["tokens"]
        plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        plist.set_alloc_time(h5py.h5d.ALLOC_TIME_LATE)
        h5py.h5d.create(file.id, b"tokens", h5py.h5t.STD_U16LE, h5py.h5s.create_simple((1 << 29,)), plist)


@kind("tokens: .* bytes declared, .* stored")
def compression_bomb(path: Path, outside: Path) -> Path:
    """Consistent in itself: a sample of nine million equal tokens, in nine kilobytes."""
    count = 9 << 20
    with edit(path) as file:
        counts = file["token_counts"][:]
        counts[-1] += count
        file["token_counts"][:] = counts
    swap(path, "tokens", lambda old: np.append(old, np.zeros(count, old.dtype)), compression="gzip", chunks=(1 << 20,))
    return name_by_content(path)


@kind("tokens: filters")
def twice_compressed_bomb(path: Path, outside: Path) -> None:
    with edit(path) as file:
        del file["tokens"]
        plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        plist.set_chunk((1 << 22,))
        plist.set_deflate(9)
        plist.set_deflate(9)
        space = h5py.h5s.create_simple((1 << 22,))
        dataset = h5py.h5d.create(file.id, b"tokens", h5py.h5t.STD_U16LE, space, plist)
        dataset.write(h5py.h5s.ALL, h5py.h5s.ALL, np.zeros(1 << 22, np.uint16))


@kind("tokens: chunks of")
def huge_chunk(path: Path, outside: Path) -> None:
    swap_shape(path, "tokens", (1 << 26,), chunks=(1 << 26,))


@kind("entropies: not all of its chunks")
def missing_chunks(path: Path, outside: Path) -> None:
    """HDF5 makes up what isn't stored."""
    with edit(path) as file:
        count = len(file["entropies"])
        del file["entropies"]
        file.create_dataset("entropies", (count,), np.float32, chunks=(max(1, count // 4),))[:2] = 1.0


@kind("bytes; a shard has at most")
def sparse_file(path: Path, outside: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(1 << 40)


@kind("objects; a shard has")
def many_objects(path: Path, outside: Path) -> None:
    with edit(path) as file:
        for number in range(2_000):
            file.create_group(f"group {number}")


@kind("objects; a shard has")
def deep_groups(path: Path, outside: Path) -> None:
    with edit(path) as file:
        group = file
        for _ in range(500):
            group = group.create_group("g")


@kind("entry_ids: not an array")
def group_that_holds_itself(path: Path, outside: Path) -> None:
    with edit(path) as file:
        del file["entry_ids"]
        group = file.create_group("entry_ids")
        group["again"] = group
        group["root"] = file["/"]


@kind("entry_ids: not an array")
def root_as_an_array(path: Path, outside: Path) -> None:
    with edit(path) as file:
        del file["entry_ids"]
        file["entry_ids"] = file["/"]


@kind("belongs to two arrays")
def overlapping_arrays(path: Path, outside: Path) -> None:
    """Two arrays of which only one is stored: the other's address is the same."""
    with h5py.File(path) as file:
        arrays, header = {name: dataset[:] for name, dataset in file.items()}, file.attrs["header"]
    moved = "label_logprobs"
    # Old headers have no checksums; contiguous arrays lie where their headers say.
    with h5py.File(path, "w", libver=("earliest", "v108")) as file:
        file.attrs["header"] = header
        for name in [*sorted(arrays.keys() - {moved}), moved]:
            file.create_dataset(name, data=arrays[name])
        file.flush()
        offset, target = (file[name].id.get_offset() for name in (moved, "tail_logprobs"))
    data = bytearray(path.read_bytes())
    assert offset + arrays[moved].nbytes == len(data), "the moved array is the last thing in the file"
    address = bytes(data).index(struct.pack("<QQ", offset, arrays[moved].nbytes))
    data[address : address + 8] = struct.pack("<Q", target)
    end = bytes(data).index(struct.pack("<Q", len(data)), 0, 100)  # the superblock's end of file
    data[end : end + 8] = struct.pack("<Q", offset)
    path.write_bytes(data[:offset])


# -- types and shapes -----------------------------------------------------------------------------------------


@kind("entry_ids: its type is not")
def compound_type(path: Path, outside: Path) -> None:
    swap(path, "entry_ids", lambda old: np.zeros(len(old), [("a", "u2"), ("b", "u2")]))


@kind("entry_ids: its type is not")
def variable_length_type(path: Path, outside: Path) -> None:
    swap_shape_of_type(path, "entry_ids", h5py.vlen_dtype(np.uint16))


def swap_shape_of_type(path: Path, name: str, dtype: Any) -> None:
    with edit(path) as file:
        count = len(file[name])
        del file[name]
        file.create_dataset(name, (count,), dtype)


@kind("entry_ids: its type is not")
def reference_type(path: Path, outside: Path) -> None:
    swap_shape_of_type(path, "entry_ids", h5py.ref_dtype)


@kind("entry_ids: its type is not")
def region_reference_type(path: Path, outside: Path) -> None:
    swap_shape_of_type(path, "entry_ids", h5py.regionref_dtype)


@kind("entry_ids: its type is not")
def opaque_type(path: Path, outside: Path) -> None:
    swap(path, "entry_ids", lambda old: np.zeros(len(old), "V2"))


@kind("entry_ids: its type is not")
def enum_type(path: Path, outside: Path) -> None:
    swap_shape_of_type(path, "entry_ids", h5py.enum_dtype({"a": 0, "b": 1}, np.uint16))


@kind("entry_ids: its type is not")
def bool_type(path: Path, outside: Path) -> None:
    swap(path, "entry_ids", lambda old: np.zeros(len(old), np.bool_))


@kind("entry_ids: its type is not")
def text_type(path: Path, outside: Path) -> None:
    swap(path, "entry_ids", lambda old: np.full(len(old), b"ab"))


@kind("entry_ids: its type is not")
def variable_text_type(path: Path, outside: Path) -> None:
    swap_shape_of_type(path, "entry_ids", h5py.string_dtype())


@kind("entry_ids: its type is not")
def array_type(path: Path, outside: Path) -> None:
    swap_raw(path, "entry_ids", h5py.h5t.array_create(h5py.h5t.STD_U16LE, (2,)))


@kind("entry_ids: its type is not")
def signed_ids(path: Path, outside: Path) -> None:
    swap(path, "entry_ids", lambda old: old.astype(np.int64))


@kind("token_counts: its type is not")
def big_endian_type(path: Path, outside: Path) -> None:
    swap(path, "token_counts", lambda old: old.astype(">u4"))


@kind("entry_logprobs: its type is not")
def wide_float_type(path: Path, outside: Path) -> None:
    swap(path, "entry_logprobs", lambda old: old.astype(np.float64))


@kind("entropies: its type is not")
def home_made_float_type(path: Path, outside: Path) -> None:
    number = h5py.h5t.IEEE_F32LE.copy()
    number.set_ebias(100)
    swap_raw(path, "entropies", number)


@kind("entry_ids: not an array")
def named_type(path: Path, outside: Path) -> None:
    with edit(path) as file:
        del file["entry_ids"]
        file["entry_ids"] = np.dtype(np.uint16)


@kind("entry_ids: not an array of rank")
def two_dimensions(path: Path, outside: Path) -> None:
    swap(path, "entry_ids", lambda old: old[None])


@kind("entropies: not an array of rank")
def scalar(path: Path, outside: Path) -> None:
    swap(path, "entropies", lambda old: old[0])


@kind("entropies: not an array of rank")
def null_space(path: Path, outside: Path) -> None:
    swap_raw(path, "entropies", h5py.h5t.IEEE_F32LE, h5py.h5s.create(h5py.h5s.NULL))


@kind("entropies: of open size")
def open_size(path: Path, outside: Path) -> None:
    swap(path, "entropies", maxshape=(None,))


@kind("entropies: a virtual or compact array")
def compact_layout(path: Path, outside: Path) -> None:
    with edit(path) as file:
        values = file["entropies"][:4096]
        del file["entropies"]
        plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        plist.set_layout(h5py.h5d.COMPACT)
        space = h5py.h5s.create_simple(values.shape)
        h5py.h5d.create(file.id, b"entropies", h5py.h5t.IEEE_F32LE, space, plist).write(space, space, values)


@kind("entry_ids: filters")
def foreign_filter(path: Path, outside: Path) -> None:
    swap(path, "entry_ids", compression="lzf")


@kind("entry_ids: filters")
def lossy_filter(path: Path, outside: Path) -> None:
    swap(path, "entry_ids", scaleoffset=4)


@kind("entry_ids: filters")
def unknown_filter(path: Path, outside: Path) -> None:
    """A plugin's: to read it, HDF5 would load a shared object."""
    with edit(path) as file:
        count = len(file["entry_ids"])
        del file["entry_ids"]
        plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        plist.set_chunk((count,))
        plist.set_filter(32015, h5py.h5z.FLAG_OPTIONAL, ())
        space = h5py.h5s.create_simple((count,))
        h5py.h5d.create(file.id, b"entry_ids", h5py.h5t.STD_U16LE, space, plist)


# -- names and attributes -------------------------------------------------------------------------------------


@kind("more: not an array of this format|objects; a shard has")
def one_array_more(path: Path, outside: Path) -> None:
    with edit(path) as file:
        file["more"] = np.zeros(3)


@kind("entropies: missing")
def one_array_less(path: Path, outside: Path) -> None:
    with edit(path) as file:
        del file["entropies"]


@kind("missing|not an array of this format")
def another_name(path: Path, outside: Path) -> None:
    with edit(path) as file:
        file.move("entropies", "entropy")


@kind("belongs to two arrays")
def two_names(path: Path, outside: Path) -> None:
    with edit(path) as file:
        del file["label_logprobs"]
        file["label_logprobs"] = file["tail_logprobs"]


@kind("tokens: has attributes")
def attribute_of_an_array(path: Path, outside: Path) -> None:
    with edit(path) as file:
        file["tokens"].attrs["x"] = 1


@kind("header: not the only attribute")
def second_attribute(path: Path, outside: Path) -> None:
    with edit(path) as file:
        file.attrs["template"] = "{{ import os }}"


@kind("header: too large")
def huge_header(path: Path, outside: Path) -> None:
    with edit(path) as file:
        file.attrs["header"] = " " * (4 << 20) + str(file.attrs["header"])


@kind("header: missing")
def no_header(path: Path, outside: Path) -> None:
    with edit(path) as file:
        file.attrs["head"] = file.attrs["header"]
        del file.attrs["header"]


@kind("header: not one string")
def header_of_numbers(path: Path, outside: Path) -> None:
    with edit(path) as file:
        file.attrs["header"] = np.arange(9)


@kind("header: not one string")
def header_of_strings(path: Path, outside: Path) -> None:
    with edit(path) as file:
        file.attrs["header"] = [str(file.attrs["header"])] * 2


@kind("header: not JSON")
def header_not_json(path: Path, outside: Path) -> None:
    with edit(path) as file:
        file.attrs["header"] = str(file.attrs["header"])[:-1]


@kind("header: not JSON")
def header_nested(path: Path, outside: Path) -> None:
    with edit(path) as file:
        file.attrs["header"] = "[" * 50_000


@kind("header: not JSON")
def header_not_a_number(path: Path, outside: Path) -> None:
    with edit(path) as file:
        file.attrs["header"] = str(file.attrs["header"]).replace('"top_k": 5', '"top_k": NaN')


@kind("header: not JSON")
def header_of_many_digits(path: Path, outside: Path) -> None:
    with edit(path) as file:
        file.attrs["header"] = str(file.attrs["header"]).replace('"top_k": 5', '"top_k": ' + "9" * 9_000)


@kind("header: not a shard of distill")
def header_of_another_format(path: Path, outside: Path) -> None:
    change_header(path, lambda header: header.update(format="other"))


@kind("format version 99, .* update")
def newer_version(path: Path, outside: Path) -> None:
    change_header(path, lambda header: header.update(version=99))


@kind("header: unknown field 'code'")
def header_with_more(path: Path, outside: Path) -> None:
    change_header(path, lambda header: header.update(code="x"))


@kind("header: layer is missing")
def header_with_less(path: Path, outside: Path) -> None:
    change_header(path, lambda header: header.pop("layer") and None)


@kind("header: layer: vocab_size cannot be")
def negative_vocabulary(path: Path, outside: Path) -> None:
    change_header(path, lambda header: header["layer"].update(vocab_size=-1))


@kind("header: layer: top_k")
def more_entries_than_tokens(path: Path, outside: Path) -> None:
    change_header(path, lambda header: header["layer"].update(top_k=1 << 40))


# -- meaning --------------------------------------------------------------------------------------------------


def change(path: Path, name: str, at: int, value: Any) -> None:
    with edit(path) as file:
        values = file[name][:]
        values[at] = value
        file[name][:] = values


def name_by_content(path: Path) -> Path:
    """Give the shard the name that fits what it now holds, so that nothing but the change itself is wrong."""
    from distill.cache.shard import ShardReader, shard_name

    with ShardReader(path) as reader:
        name = shard_name(reader.key_rows())
    return path.rename(path.with_name(f"{name}.h5"))


@kind("entry_logprobs: .*not finite|entry_logprobs: one above 0 or not a number")
def logprob_not_a_number(path: Path, outside: Path) -> None:
    change(path, "entry_logprobs", 3, np.nan)


@kind("entry_logprobs: one above 0")
def positive_logprob(path: Path, outside: Path) -> None:
    change(path, "entry_logprobs", 0, 5.0)


@kind("entry_logprobs: ")
def infinite_logprob(path: Path, outside: Path) -> None:
    change(path, "entry_logprobs", 0, np.inf)


@kind("entry_logprobs: one is not finite")
def infinite_below(path: Path, outside: Path) -> None:
    change(path, "entry_logprobs", 1, -np.inf)


@kind("entry_logprobs: a record that does not begin")
def least_likely_first(path: Path, outside: Path) -> None:
    change(path, "entry_logprobs", 0, -50.0)


@kind("tail_logprobs: one above 0")
def positive_tail(path: Path, outside: Path) -> None:
    change(path, "tail_logprobs", 0, 2.0)


@kind("tail_logprobs: one above 0 or not a number|not finite")
def tail_not_a_number(path: Path, outside: Path) -> None:
    change(path, "tail_logprobs", 0, np.nan)


@kind("label_logprobs: one above 0")
def positive_label(path: Path, outside: Path) -> None:
    change(path, "label_logprobs", 0, 1.0)


@kind("entropies: one that no distribution has")
def impossible_entropy(path: Path, outside: Path) -> None:
    change(path, "entropies", 0, 1e6)


@kind("entry_ids: one twice in a record")
def id_twice(path: Path, outside: Path) -> None:
    with h5py.File(path) as file:
        first = file["entry_ids"][0]
    change(path, "entry_ids", 1, first)


@kind("entry_ids: one outside")
def id_outside(path: Path, outside: Path) -> None:
    change(path, "entry_ids", 1, 40_000)


@kind("entry_ids: .* rows for .* entries")
def counts_that_lie(path: Path, outside: Path) -> None:
    change(path, "entry_counts", 0, 60_000)


@kind("entry_counts: not between 1 and")
def empty_record(path: Path, outside: Path) -> None:
    change(path, "entry_counts", 0, 0)
    with h5py.File(path) as file:
        gone = int(file["entry_counts"][1])
    for name in ("entry_ids", "entry_logprobs"):
        swap(path, name, lambda old: old[gone:])


@kind("entry_ids: .* rows for .* entries")
def hidden_entries(path: Path, outside: Path) -> None:
    for name in ("entry_ids", "entry_logprobs"):
        swap(path, name, lambda old: np.append(old, old[:1]))


@kind("tokens: .* rows where token_counts says")
def hidden_tokens(path: Path, outside: Path) -> None:
    swap(path, "tokens", lambda old: np.append(old, old[:1]))


@kind("tokens: .* rows where token_counts says")
def counts_that_overflow(path: Path, outside: Path) -> None:
    change(path, "token_counts", slice(None), 0xFFFFFFFF)


@kind("token_counts: no samples")
def no_samples(path: Path, outside: Path) -> None:
    with edit(path) as file:
        for name in list(file):
            dtype = file[name].dtype
            del file[name]
            file.create_dataset(name, data=np.zeros(0, dtype))


@kind("records of .* targets")
def record_missing(path: Path, outside: Path) -> None:
    swap(path, "tail_logprobs", lambda old: old[:-1])


@kind("target_positions: one outside its sample")
def target_outside(path: Path, outside: Path) -> None:
    change(path, "target_positions", 0, 4_000_000_000)


@kind("target_positions: one outside its sample")
def first_token_as_target(path: Path, outside: Path) -> None:
    change(path, "target_positions", 0, 0)


@kind("target_positions: not rising")
def targets_that_fall(path: Path, outside: Path) -> Path:
    with h5py.File(path) as file:
        positions, counts = file["target_positions"][:], file["target_counts"][:]
    row = int(np.argmax(counts > 1))
    start = int(counts[:row].sum())
    change(path, "target_positions", slice(start, start + 2), positions[start : start + 2][::-1])
    return name_by_content(path)


@kind("span_ends: a span outside its sample")
def span_outside(path: Path, outside: Path) -> None:
    change(path, "span_ends", 0, 9_999)


@kind("span_roles: an unknown role")
def unknown_role(path: Path, outside: Path) -> None:
    change(path, "span_roles", 0, 200)


@kind("tokens: an id outside")
def token_outside(path: Path, outside: Path) -> Path:
    change(path, "tokens", 0, 50_000)
    return name_by_content(path)


@kind("arrays_sha256 is not that of the arrays")
def content_of_another_digest(path: Path, outside: Path) -> None:
    change(path, "tokens", 0, 1)


@kind("arrays_sha256 is not that of the arrays")
def other_numbers_that_mean_something(path: Path, outside: Path) -> None:
    with h5py.File(path) as file:
        value = float(file["entropies"][0])
    change(path, "entropies", 0, value + 0.25)


@kind("the file's name does not fit")
def name_of_another_content(path: Path, outside: Path) -> Path:
    return path.rename(path.with_name("0" * 32 + ".h5"))


# -- no HDF5 ------------------------------------------------------------------------------------------------


@kind("not an HDF5 file")
def empty_file(path: Path, outside: Path) -> None:
    path.write_bytes(b"")


@kind("not an HDF5 file")
def text_file(path: Path, outside: Path) -> None:
    path.write_text("version https://git-lfs.example/spec/v1\n")


@kind("not an HDF5 file")
def user_block(path: Path, outside: Path) -> None:
    """A script in front of the HDF5 file: one file, two readers."""
    with h5py.File(path) as file:
        arrays, header = {name: dataset[:] for name, dataset in file.items()}, file.attrs["header"]
    with h5py.File(path, "w", libver=("v110", "v110"), userblock_size=512) as file:
        file.attrs["header"] = header
        for name, array in arrays.items():
            file.create_dataset(name, data=array)
    data = path.read_bytes()
    path.write_bytes(b"#!/bin/sh\n".ljust(512) + data[512:])


@kind("refused")
def only_the_signature(path: Path, outside: Path) -> None:
    path.write_bytes(b"\x89HDF\r\n\x1a\n")


@kind("refused")
def truncated_file(path: Path, outside: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])


@kind("refused")
def noise(path: Path, outside: Path) -> None:
    path.write_bytes(b"\x89HDF\r\n\x1a\n" + np.random.default_rng(5).bytes(20_000))


@kind("refused")
def open_for_writing(path: Path, outside: Path) -> None:
    """The mark that a killed writer leaves in the superblock."""
    data = bytearray(path.read_bytes())
    data[11] |= 1
    path.write_bytes(data)
