"""Model folders: check them, tell them apart by their weights, load them. Shared by teacher and student."""

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distill.errors import InputError, MachineError
from distill.files import free_bytes, make_folder, os_errors, whole_folder, write_durably

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

# What changes without changing any logit; the compute type has a place of its own.
_COSMETIC = {"_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache", "architectures"}

_WEIGHT_PATTERNS = ("*.safetensors", "pytorch_model*.bin")


def weight_files(folder: Path) -> list[Path]:
    """The files that hold the weights: safetensors if there are any, sorted by name.

    Raises InputError for a folder that isn't a model's or has no weights.
    """
    if not folder.is_dir():
        raise InputError(f"{folder}: no such model folder")
    if not (folder / "config.json").is_file():
        raise InputError(f"{folder}: not a model folder (it has no config.json)")
    for pattern in _WEIGHT_PATTERNS:
        files = sorted(folder.glob(pattern))
        if files:
            _check_shards(folder, files)
            for path in files:
                _check_whole(path)
            if "quantization_config" in read_model_config(folder):
                raise InputError(f"{folder}: quantised models are not available yet")
            return files
    raise InputError(f"{folder}: no weights (*.safetensors) in this model folder; is the download complete?")


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
    """``config.json`` of a model folder."""
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{path}: cannot be read as JSON ({error})") from error
    if not isinstance(config, dict):
        raise InputError(f"{path}: not a JSON object")
    return config


def config_digest(folder: Path) -> str:
    """SHA-256 over what ``config.json`` says of the computation: the same weights can be run in more than one way."""
    config = {name: value for name, value in read_model_config(folder).items() if name not in _COSMETIC}
    return hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()


def compute_dtype(folder: Path, wanted: str, device: str) -> str:
    """The teacher's compute type for ``teacher_dtype`` ``wanted``.

    ``auto`` is the checkpoint's own type on an accelerator and fp32 on a CPU, most of which only emulate bf16.
    """
    if wanted != "auto":
        return wanted
    return "fp32" if device == "cpu" else stored_dtype(folder)


def stored_dtype(folder: Path) -> str:
    """The type that a checkpoint's weights are stored in, by its own word; fp32 if it says nothing."""
    config = read_model_config(folder)
    stored = str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")
    return {"bfloat16": "bf16", "float16": "fp16"}.get(stored, "fp32")


def resolve_device(device: str | None) -> str:
    """The device to use: as named, else the first GPU, else the CPU. InputError if the named one is absent."""
    import torch

    if device is None:
        return "cuda:0" if torch.cuda.is_available() else "cpu"
    try:
        parsed = torch.device(device)
    except RuntimeError as error:
        raise InputError(f"device: {device!r} is no device; use for example cpu or cuda:0") from error
    if parsed.type == "cuda" and (parsed.index or 0) >= torch.cuda.device_count():
        raise InputError(f"device: {device} is not on this machine ({torch.cuda.device_count()} GPUs); use cpu")
    return str(parsed)


def torch_dtype(name: str) -> "torch.dtype":
    """The torch type of ``fp32``, ``bf16`` or ``fp16``."""
    import torch

    return {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[name]


def load_causal_lm(folder: Path, *, dtype: str, device: str, trust_remote_code: bool) -> "PreTrainedModel":
    """A causal language model from a local folder, in evaluation mode.

    Raises InputError if the folder can't be loaded as one, MachineError if the device has no room for it.
    """
    import torch
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM

    weight_files(folder)
    quiet_transformers()
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=torch_dtype(dtype),
            local_files_only=True,
            trust_remote_code=trust_remote_code,
            output_loading_info=True,
        )
        model, report = loaded
        model = model.to(device).eval()
    except torch.cuda.OutOfMemoryError as error:
        raise MachineError(f"{folder}: does not fit on {device}; use a smaller model or another device") from error
    except (
        OSError,
        ValueError,
        LookupError,
        RuntimeError,
        ImportError,
        TypeError,
        AttributeError,
        ArithmeticError,
        SafetensorError,
    ) as error:  # whatever a configuration that isn't one makes transformers raise
        reason = " ".join(str(error).split())[:300]
        raise InputError(f"{folder}: cannot be loaded as a causal language model: {reason}") from error
    if report["missing_keys"]:
        names = ", ".join(sorted(report["missing_keys"])[:3])
        raise InputError(f"{folder}: weights are missing ({names}, {len(report['missing_keys'])} in all)")
    return model  # type: ignore[no-any-return]


@contextmanager
def saved_folder(path: Path) -> Iterator[Path]:
    """``files.whole_folder`` for weights: safetensors has an error class of its own for a full or broken disk."""
    from safetensors import SafetensorError

    try:
        with whole_folder(path) as temporary:
            yield temporary
    except SafetensorError as error:
        raise MachineError(f"{path}: cannot write: {error} ({free_bytes(path):,} bytes free)") from error


def quiet_transformers() -> None:
    """No progress bars and no notes from transformers: what a user has to know is said by us."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()


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
