"""Text files to samples: every row is read, or refused as ``file:line`` with what is wrong with it.

Containers, told apart by their names; all text is UTF-8, with or without a byte order mark:

- ``.jsonl`` has a row a line, ``.json`` a list of rows or one row, ``.csv`` a row a line under a header, and a ``.txt``
  file is one completion; each may be compressed as ``.gz`` or ``.zst``
- ``.parquet``, with ``row N`` in the place of the line
- a dataset of the Hugging Face hub: ``owner/name``, ``owner/name/config``, either with ``:split`` after it, which may
  be a slice as `datasets` writes it (``owner/name:train[:1000]``); without a split it is ``train``, or the only one.
  A file or folder of that name goes before it

Whatever the container, the same rows give the same samples. Rows are told apart one by one, by their keys, in this
order (a key whose value is null, and an empty cell of a table, counts as absent):

1. ShareGPT, the ancestor's: ``{"init": system, "conversations": [{"from": ..., "value": ...}], "tags": [...]}``;
   with the tag ``completion`` the value of its only turn is plain text
2. OpenAI: ``{"messages": [{"role": ..., "content": ...}]}``
3. instruct: ``{"prompt" | "instruction", "input"?, "response" | "completion" | "output"}``
4. plain text: ``{"text": ...}``

In tables ``conversations`` and ``messages`` may be JSON text.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

from distill.dataset.files import find, read_file
from distill.dataset.hub import read_hub
from distill.errors import InputError
from distill.types import Sample

__all__ = ["read_samples"]


def read_samples(paths: str | Sequence[str], *, allow_downloads: bool = False) -> Iterator[Sample]:
    """Yield the samples of a file, a folder (its files, sorted by name), a hub dataset, or a list of those, in order.

    A hub dataset has to be in the local cache of `datasets` unless ``allow_downloads``; without it no network is used.
    Files are streamed: in memory are a few rows at a time.

    Raises InputError, while iterating, for what is missing, unreadable, damaged or empty, and for the first bad row;
    MachineError if the disk fails.
    """
    paths = [paths] if isinstance(paths, str) else list(paths)
    sources = [source for path in paths for source in find(path)]
    count = 0
    for source in sources:
        for sample in read_file(source) if isinstance(source, Path) else read_hub(source, allow_downloads):
            count += 1
            yield sample
    if not count:
        raise InputError(f"{', '.join(paths) or 'dataset_path'}: no samples in it; give a file or folder with text")
