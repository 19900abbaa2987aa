"""What a model folder says of itself: its weight files and their digest, its configuration, its number format."""

import hashlib
import json
import struct
from pathlib import Path
from typing import Any

from distill.errors import InputError
from distill.files import make_folder, os_errors, read_object, write_durably

# What changes without changing any logit; the compute type has a place of its own.
_COSMETIC = {"_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache", "architectures"}

_WEIGHT_PATTERNS = ("*.safetensors", "pytorch_model*.bin")
_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
# What a file that is cut off or isn't one makes the GGUF reader raise.
GGUF_ERRORS = (OSError, ValueError, LookupError, TypeError, AttributeError, OverflowError, struct.error)


def weight_files(folder: Path) -> list[Path]:
    """The files that hold the weights, sorted by name: safetensors if there are any, else .bin, else one .gguf.

    Raises InputError for a folder that isn't a model's, has no weights, or is half a download.
    """
    if not folder.is_dir():
        raise InputError(f"{folder}: no such model folder")
    packed = gguf_file(folder)
    if packed is not None:
        _check_gguf(packed)
        return [packed]
    if not (folder / "config.json").is_file():
        raise InputError(f"{folder}: not a model folder (it has no config.json)")
    files = _plain_weights(folder)
    if not files:
        raise InputError(f"{folder}: no weights (*.safetensors) in this model folder; is the download complete?")
    _check_shards(folder, files)
    for path in files:
        _check_whole(path)
    return files


def gguf_file(folder: Path) -> Path | None:
    """The .gguf file that holds the weights of a folder; None if they are in other files, or nowhere.

    Raises InputError if there are several to choose from.
    """
    files = sorted(folder.glob("*.gguf"))
    if not files or ((folder / "config.json").is_file() and _plain_weights(folder)):
        return None
    if len(files) > 1:
        names = ", ".join(path.name for path in files[:5])
        raise InputError(f"{folder}: {len(files)} .gguf files ({names}); leave one of them in the folder")
    return files[0]


def _plain_weights(folder: Path) -> list[Path]:
    found = (sorted(folder.glob(pattern)) for pattern in _WEIGHT_PATTERNS)
    return next((files for files in found if files), [])


def weights_digest(folder: Path, store: Path) -> str:
    """SHA-256 over the weight files, remembered in the JSON file ``store`` by path, size and time of change."""
    known = _remembered(store)
    total = hashlib.sha256()
    changed = False
    for path in weight_files(folder):
        status = path.stat()
        identity = f"{path.resolve()}:{status.st_size}:{status.st_mtime_ns}"
        if identity not in known:
            with os_errors("read", path), path.open("rb") as file:
                known[identity] = hashlib.file_digest(file, "sha256").hexdigest()
            changed = True
        total.update(f"{path.name}:{known[identity]}\n".encode())
    if changed:
        make_folder(store.parent)
        write_durably(store, json.dumps(known, indent=1).encode())
    return total.hexdigest()


def read_model_config(folder: Path) -> dict[str, Any]:
    """``config.json`` of a model folder; for a .gguf what transformers makes of the file's own description.

    Raises InputError if it can't be read.
    """
    packed = gguf_file(folder)
    return read_object(folder / "config.json") if packed is None else _read_gguf_config(packed)


def config_digest(folder: Path) -> str:
    """SHA-256 over what ``config.json`` says of the computation: the same weights can be run in more than one way.

    A .gguf has its configuration inside: the digest of its weights stands for both.
    """
    said = {} if gguf_file(folder) is not None else read_object(folder / "config.json")
    config = {name: value for name, value in said.items() if name not in _COSMETIC}
    return hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()


def compute_dtype(folder: Path, wanted: str, device: str) -> str:
    """The teacher's compute type for ``teacher_dtype`` ``wanted``.

    ``auto`` is the checkpoint's own type on an accelerator and fp32 on a CPU, most of which only emulate bf16.
    """
    if wanted != "auto":
        return wanted
    return "fp32" if device == "cpu" else stored_dtype(folder)


def stored_dtype(folder: Path) -> str:
    """The type that a checkpoint's weights are stored in, by its own word; fp32 if it says nothing.

    bf16 for a .gguf, most of which were made from that.
    """
    if gguf_file(folder) is not None:
        return "bf16"
    config = read_model_config(folder)
    stored = str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")
    return {"bfloat16": "bf16", "float16": "fp16"}.get(stored, "fp32")


def loaded_bytes(folder: Path, dtype: str) -> int:
    """About how many bytes the weights of a folder take once they are loaded in ``dtype``."""
    packed = gguf_file(folder)
    if packed is not None:
        return _gguf_parameters(packed) * _BYTES[dtype]
    size = sum(path.stat().st_size for path in weight_files(folder))
    if "quantization_config" in read_model_config(folder):
        return size  # they stay packed
    return size * _BYTES[dtype] // _BYTES[stored_dtype(folder)]


def _remembered(store: Path) -> dict[str, str]:
    with os_errors("read", store):
        if not store.exists():
            return {}
        try:
            known = json.loads(store.read_bytes())
        except (ValueError, RecursionError):
            return {}  # derived data: computed again
    return {k: v for k, v in known.items() if isinstance(v, str)} if isinstance(known, dict) else {}


def _check_whole(path: Path) -> None:
    """Half a download is shorter than a safetensors header says; a link of a hub's cache may lead nowhere."""
    if not path.exists():
        raise InputError(f"{path}: a link to a file that isn't there; complete the download")
    if path.suffix != ".safetensors":
        return
    size = path.stat().st_size
    with os_errors("read", path), path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        try:
            header = json.loads(file.read(length)) if 0 < length < size else {}
            ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            ends = []
    if not ends or 8 + length + max(ends) != size:
        raise InputError(f"{path}: not a whole safetensors file ({size:,} bytes); complete the download")


def _check_shards(folder: Path, files: list[Path]) -> None:
    """A sharded checkpoint's index names its files; half a download lacks some of them."""
    for index in folder.glob("*.index.json"):
        try:
            named = set(json.loads(index.read_text())["weight_map"].values())
        except (OSError, ValueError, KeyError, AttributeError) as error:
            raise InputError(f"{index}: not an index of weight files") from error
        missing = sorted(named - {path.name for path in files})
        if missing and any(name.endswith(files[0].suffix) for name in missing):
            raise InputError(f"{folder}: {missing[0]} is missing ({len(missing)} files in all); complete the download")


def _check_gguf(path: Path) -> None:
    with os_errors("read", path), path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise InputError(f"{path}: not a GGUF file; complete the download")


def _read_gguf_config(path: Path) -> dict[str, Any]:
    try:
        from transformers import AutoConfig

        return dict(AutoConfig.from_pretrained(path.parent, gguf_file=path.name, local_files_only=True).to_dict())
    except ImportError as error:
        raise InputError(f"{path}: a GGUF file needs: pip install gguf") from error
    except GGUF_ERRORS as error:
        raise InputError(f"{path}: cannot be read as GGUF ({_one_line(error)}); complete the download") from error


def _gguf_parameters(path: Path) -> int:
    try:
        from gguf import GGUFReader

        return sum(int(tensor.n_elements) for tensor in GGUFReader(path).tensors)
    except ImportError as error:
        raise InputError(f"{path}: a GGUF file needs: pip install gguf") from error
    except GGUF_ERRORS as error:
        raise InputError(f"{path}: cannot be read as GGUF ({_one_line(error)}); complete the download") from error


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
