"""Values that have an inside: paths, amounts of memory, descriptions of new students. What is wrong is a ValueError."""

import re
from typing import Any

from distill.config.keys import show
from distill.config.reader import BACKSLASH_HINT

_INIT_SIZES = frozenset({"layers", "hidden", "intermediate", "heads", "kv_heads"})
_MEMORY_UNITS = {"GB": 10**9, "GiB": 2**30, "MB": 10**6, "MiB": 2**20, "KB": 10**3, "KiB": 2**10}


def path_text(text: str) -> str:
    """``text``, unless it holds a control character, as a path with single backslashes does."""
    control = next((char for char in text if ord(char) < 32 or ord(char) == 127), None)
    if control is not None:
        raise ValueError(f"the path holds the control character {control!a}: {BACKSLASH_HINT}")
    return text


def memory_bytes(text: str) -> int:
    """Bytes of an amount of memory such as "24GB" (of 10^9 bytes) or "1.5GiB" (of 2^30). ValueError if it is none."""
    match = re.fullmatch(r"(\d{1,9}(?:\.\d{1,6})?) ?(GB|GiB|MB|MiB|KB|KiB)", text)
    if match is None:
        raise ValueError(f'must be an amount of memory such as "24GB" or "1.5GiB", not {show(text)}')
    return int(float(match[1]) * _MEMORY_UNITS[match[2]])


def memory_by_device(sizes: dict[str, str]) -> dict[str, str]:
    """``sizes``, if each is an amount of memory of a GPU by its number, of "cpu" or of "disk"."""
    for name, size in sizes.items():
        if not re.fullmatch(r"\d{1,3}|cpu|disk", name):
            raise ValueError(f'{show(name)} is no device; write GPUs by their number ("0"), "cpu" or "disk"')
        memory_bytes(size)
    return sizes


def student_init(wanted: dict[str, Any]) -> dict[str, Any]:
    """Either layers and width of a model that is there, or an architecture with random weights."""
    start = next((name for name in ("from", "config") if name in wanted), "")
    if not start or ("from" in wanted and "config" in wanted):
        raise ValueError('needs either "from" (a model folder to keep layers of) or "config" (a new architecture)')
    known = _INIT_SIZES | ({"from"} if start == "from" else {"config", "tokenizer"})
    for name, value in wanted.items():
        if name not in known:
            raise ValueError(f"{name!a} is not a part of it (parts: {', '.join(sorted(known))})")
        if name in _INIT_SIZES and not (isinstance(value, int) and not isinstance(value, bool) and value >= 1):
            raise ValueError(f"{name} must be a whole number from 1 on, not {show(value)}")
        if name in ("from", "tokenizer") or (name == "config" and not isinstance(value, dict)):
            if not isinstance(value, str) or not value:
                raise ValueError(f"{name} must be a path, not {show(value)}")
            path_text(value)
    if isinstance(wanted.get("config"), dict) and "tokenizer" not in wanted:
        raise ValueError('a "config" that is an object needs "tokenizer", the folder of one')
    return wanted
