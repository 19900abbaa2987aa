"""Quantised checkpoints: how the weights of a folder are packed, and the library that can unpack them."""

from importlib.util import find_spec
from pathlib import Path

from distill.errors import InputError
from distill.files import read_object
from distill.models.folder import gguf_file

# By the name that a configuration calls its method: what has to be installed. Other methods say it themselves.
_LIBRARIES = {
    "gguf": ("gguf",),
    "bitsandbytes": ("bitsandbytes",),
    "gptq": ("optimum", "gptqmodel"),
    "awq": ("gptqmodel",),
    "compressed-tensors": ("compressed_tensors",),
    "hqq": ("hqq",),
    "torchao": ("torchao",),
}


def quantisation(folder: Path) -> str:
    """How the weights of a model folder are quantised, such as ``bitsandbytes-4bit-nf4`` or ``gguf``; else ``none``.

    Raises InputError if its configuration says it in a way that nobody understands.
    """
    if gguf_file(folder) is not None:
        return "gguf"
    path = folder / "config.json"
    settings = read_object(path).get("quantization_config")
    if settings is None:
        return "none"
    if not isinstance(settings, dict):
        raise InputError(f"{path}: quantization_config: a JSON object is wanted here")
    method = str(settings.get("quant_method") or "bitsandbytes")
    if method != "bitsandbytes":
        bits = settings.get("bits")
        return method if bits is None else f"{method}-{bits}bit"
    if settings.get("load_in_8bit"):
        return "bitsandbytes-8bit"
    return f"bitsandbytes-4bit-{settings.get('bnb_4bit_quant_type', 'fp4')}"


def require_library(folder: Path, packing: str) -> None:
    """Raises InputError naming what has to be installed to load a folder whose ``quantisation`` is ``packing``."""
    method = next((method for method in _LIBRARIES if packing == method or packing.startswith(f"{method}-")), None)
    missing = [name for name in _LIBRARIES.get(method or "", ()) if find_spec(name) is None]
    if missing:
        raise InputError(f"{folder}: its weights are {packing}; that needs: pip install {' '.join(missing)}")
