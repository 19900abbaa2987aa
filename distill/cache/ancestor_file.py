"""The ancestor's cache as a file: ``distributions.hdf5``, a group a sample. Reads it; knows nothing of our layers.

A group ``convo_N`` holds float16 ``distributions`` [rows, K], natural logs of probabilities at temperature 1, and, if
only the K likeliest were kept, ``indices`` [rows, K] with their token ids. Its attributes are ``content_sha``, which
stands for the ids of the sample's contents, and ``sample``, the row of the text dataset as Python prints a dictionary.
The file's attributes ``topk`` and ``vocab_family`` may be missing: the ancestor deletes them whenever it deletes a
sample.

It is a stranger's file: ``foreign`` has ``check_ancestor_file`` look at it before it is opened here.
"""

import ast
import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import h5py
import numpy as np
import numpy.typing as npt

from distill.cache.gate.rules import require
from distill.cache.gate.structure import (
    check_attributes,
    check_chunks,
    check_dtype,
    check_external,
    check_filters,
    check_is_array,
    check_layout,
    check_link,
    check_shape,
    check_size,
)
from distill.errors import InputError, MachineError, machine_failed
from distill.types import FloatArray, Sample

VALUES, IDS = "distributions", "indices"
_GROUP = re.compile(r"convo_\d{1,12}(_moved)?")  # a kill while the ancestor renames leaves the second form
_FILE_ATTRIBUTES = frozenset({"vocab_family", "topk"})
_GROUP_ATTRIBUTES = frozenset({"content_sha", "sample"})
_TYPES = {VALUES: ("float16",), IDS: ("uint32", "int32")}  # the ancestor's first versions wrote int32
_LONGEST_TEXT = 1 << 20
_BLOCK_BYTES = 16 << 20
_H5_ERRORS = (OSError, KeyError, RuntimeError, ValueError, TypeError)

TextDigest = bytes
"""Stands for what was said in a sample, whatever template it is put into."""


@dataclass(frozen=True, slots=True)
class AncestorGroup:
    """One sample of the file. ``text`` is None where the file doesn't say which text it is.

    rows: how many distributions; width: entries in each; digest: of the ids of the contents (``content_digest``).
    """

    name: str
    digest: str
    rows: int
    width: int
    text: TextDigest | None


class AncestorFile:
    """Reads an ancestor's file group by group. Raises InputError naming the file where it can't be read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = h5py.File(path, "r", locking=False)
            first = self._file[next(iter(self._file))]
            self.has_ids: bool = IDS in first
            self.width = int(self._file.attrs.get("topk", 0)) if self.has_ids else 0
            self.width = self.width or int(first[VALUES].shape[1])
            self.vocab_family = str(self._file.attrs.get("vocab_family", "unknown"))
        except StopIteration as error:
            raise InputError(f"{path}: no sample in it") from error
        except _H5_ERRORS as error:
            raise _unreadable(path, error) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._file.close()

    def groups(self) -> Iterator[AncestorGroup]:
        """What each group is, without its distributions, in the order of the ancestor's sample numbers."""
        for name in sorted(self._file, key=lambda name: (int(name.split("_")[1]), name)):
            try:
                group = self._file[name]
                rows, width = group[VALUES].shape
                text = group.attrs.get("sample")
                yield AncestorGroup(
                    name=name,
                    digest=str(group.attrs.get("content_sha", "")),
                    rows=int(rows),
                    width=int(width),
                    text=_digest_of_row(text) if isinstance(text, str) else None,
                )
            except _H5_ERRORS as error:
                raise _unreadable(self.path, error) from error

    def read(self, name: str) -> Iterator[tuple[int, FloatArray, npt.NDArray[np.int64] | None]]:
        """A group's rows in blocks of bounded size: the first row's number, logprobs [R, K] and ids [R, K], or None.

        Without ids the distributions are whole: column i is token i.
        """
        try:
            group = self._file[name]
            values, ids = group[VALUES], group.get(IDS)
            step = max(1, _BLOCK_BYTES // (8 * values.shape[1]))
            for start in range(0, values.shape[0], step):
                rows = slice(start, start + step)
                yield start, values[rows].astype(np.float32), None if ids is None else ids[rows].astype(np.int64)
        except _H5_ERRORS as error:
            raise _unreadable(self.path, error) from error


def content_digest(token_ids: npt.NDArray[np.integer]) -> str:
    """The ancestor's ``content_sha``: SHA-256 over the decimal digits of the ids, one after the other.

    Without a separator between them, so different ids can have the same digest.
    """
    return hashlib.sha256("".join(map(str, token_ids.tolist())).encode()).hexdigest()


def text_digest(sample: Sample) -> TextDigest:
    """Stands for the texts of a sample's turns, in their order; white space around a turn doesn't count."""
    turns = [(turn.role == "assistant", turn.content) for turn in sample.turns]
    return _digest_of_turns(turns if sample.text is None else [(False, sample.text)])


def check_ancestor_file(path: Path) -> None:
    """Look at everything in the file; raises RefusedError naming the object that the ancestor would not have written.

    At the end every array has been read once, so that a reader meets nothing that wasn't met here.
    """
    with h5py.File(path, "r", locking=False) as file:
        _check_attributes(file, "the file", _FILE_ATTRIBUTES)
        seen: set[int] = set()
        for name in file:
            require(bool(_GROUP.fullmatch(name)), f"{name[:40]!r}: not a name that the ancestor gives")
            _check_new_object(file, name, seen)
            kind = h5py.h5o.get_info(file.id, name.encode()).type
            require(kind == h5py.h5o.TYPE_GROUP, f"{name}: not a group")
            _check_group(file[name], name, seen)


def _check_group(group: h5py.Group, name: str, seen: set[int]) -> None:
    _check_attributes(group, name, _GROUP_ATTRIBUTES)
    require(group.id.get_num_objs() <= len(_TYPES), f"{name}: more than {VALUES} and {IDS}")
    require(set(group) in ({VALUES}, {VALUES, IDS}), f"{name}: not {VALUES} and perhaps {IDS}")
    for part in group:
        where = f"{name}/{part}"
        _check_new_object(group, part, seen)
        check_is_array(group, part)
        dataset = group[part]
        check_attributes(where, dataset)
        check_dtype(where, dataset, _TYPES[part])
        check_shape(where, dataset, 2)
        for check in (check_layout, check_external, check_filters, check_chunks, check_size):
            check(where, dataset)
        require(dataset.size > 0, f"{where}: empty")
        step = max(1, _BLOCK_BYTES // (dataset.shape[1] * dataset.dtype.itemsize))
        for start in range(0, dataset.shape[0], step):
            dataset[start : start + step]
    require(IDS not in group or group[IDS].shape == group[VALUES].shape, f"{name}: {VALUES} and {IDS} differ in shape")


def _check_new_object(group: h5py.Group, name: str, seen: set[int]) -> None:
    check_link(group, name)
    address = h5py.h5o.get_info(group.id, name.encode()).addr
    require(address not in seen, f"{name}: the same object under two names")
    seen.add(address)


def _check_attributes(owner: h5py.Group, name: str, allowed: frozenset[str]) -> None:
    """Single texts of bounded length, and the number ``topk``."""
    require(h5py.h5a.get_num_attrs(owner.id) <= len(allowed), f"{name}: more attributes than {sorted(allowed)}")
    for key in owner.attrs:
        require(key in allowed, f"{name}: an attribute {key[:40]!r}")
        attribute = owner.attrs.get_id(key)
        is_number = attribute.dtype.kind in "iu"
        is_text = h5py.check_string_dtype(attribute.dtype) is not None
        require(attribute.shape == () and (is_number if key == "topk" else is_text), f"{name}: attribute {key}")
        if is_text:
            text = owner.attrs[key]
            require(len(text) <= _LONGEST_TEXT, f"{name}: attribute {key} has {len(text):,} characters")
            _digest_of_row(text)


def _digest_of_row(text: str) -> TextDigest | None:
    """The text digest of a printed row, None if it isn't one as the ancestor understands rows.

    Read by literals alone, so that nothing in it is run; nesting is bounded by Python's own parser.
    """
    try:
        row = ast.literal_eval(text)
        turns = [(turn["from"] == "gpt", turn["value"]) for turn in row["conversations"]]
        init, tags = row.get("init") or "", row.get("tags") or []
        if "completion" in tags:
            return _digest_of_turns([(False, turns[0][1])])
        return _digest_of_turns([(False, init), *turns] if init else turns)
    except (ValueError, SyntaxError, MemoryError, RecursionError, KeyError, TypeError, AttributeError, IndexError):
        return None


def _digest_of_turns(turns: list[tuple[bool, str]]) -> TextDigest:
    texts = [(assistant, text.strip()) for assistant, text in turns]
    return hashlib.sha256(repr(texts).encode("utf-8", "surrogatepass")).digest()


def _unreadable(path: Path, error: Exception) -> InputError | MachineError:
    if machine_failed(error):
        return MachineError(f"{path}: cannot be read: {error}")
    reason = " ".join(str(error).split())[:200]
    return InputError(f"{path}: not an ancestor's distributions.hdf5, or a damaged one ({reason})")
