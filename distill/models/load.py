"""Model folders to models on a device."""

import gc
import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, redirect_stderr
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from distill.errors import InputError, MachineError
from distill.files import free_bytes, whole_folder
from distill.models.folder import GGUF_ERRORS, gguf_file, weight_files
from distill.models.quantised import quantisation, require_library

if TYPE_CHECKING:
    import torch
    from transformers import BitsAndBytesConfig, PreTrainedModel

Quantise = Literal["8bit", "4bit"]

# Whatever a configuration or a file that isn't one makes transformers raise.
_BAD_FOLDER = (*GGUF_ERRORS, RuntimeError, ImportError, ArithmeticError)
# torch has no class of its own for these.
_OUT_OF_MEMORY = ("DefaultCPUAllocator", "CUBLAS_STATUS_ALLOC_FAILED")


def resolve_device(device: str | None, key: str = "device") -> str:
    """The device to use: as named by ``key``, else the first GPU, else the CPU. InputError if it is absent."""
    import torch

    if device is None:
        return "cuda:0" if torch.cuda.is_available() else "cpu"
    try:
        parsed = torch.device(device)
    except RuntimeError as error:
        raise InputError(f"{key}: {device!r} is no device; use for example cpu or cuda:0") from error
    if parsed.type == "cuda" and (parsed.index or 0) >= torch.cuda.device_count():
        raise InputError(f"{key}: {device} is not on this machine ({torch.cuda.device_count()} GPUs); use cpu")
    if parsed.type == "mps" and not torch.backends.mps.is_available():
        raise InputError(f"{key}: mps is not on this machine; use cpu")
    return "cuda:0" if str(parsed) == "cuda" else str(parsed)


def release_memory() -> None:
    """Give what deleted models took back to the devices, for other processes."""
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def torch_dtype(name: str) -> "torch.dtype":
    """The torch type of ``fp32``, ``bf16`` or ``fp16``."""
    import torch

    return {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[name]


def load_causal_lm(
    folder: Path,
    *,
    dtype: str,
    device: str | Mapping[str, int | str],
    trust_remote_code: bool,
    quantised: bool = False,
    quantise: Quantise | None = None,
    max_memory: Mapping[int, int] | None = None,
    attention: str | None = None,
) -> "PreTrainedModel":
    """A causal language model from a local folder, in evaluation mode.

    device: one, or where each module goes, GPUs by their index. quantised: whether its weights may be. quantise: pack
    the linear layers' weights, all but the head's, while loading: LLM.int8 (arXiv 2208.07339), or nf4 with double
    quantisation (QLoRA, arXiv 2305.14314). max_memory: bytes by GPU index; with more than one GPU in it accelerate
    spreads the layers over them. attention: one of transformers' kinds; None takes its choice. Raises InputError if the
    folder can't be loaded as a causal language model, MachineError if the devices have no room for it.
    """
    from huggingface_hub.errors import StrictDataclassError
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM

    weight_files(folder)
    packing = quantisation(folder)
    if packing != "none" and not quantised:
        raise InputError(f"{folder}: its weights are quantised ({packing}): good for a teacher, not for a student")
    require_library(folder, packing)
    quiet_transformers()
    places = _device_map(packing, device, max_memory or {})
    if quantise is not None:
        devices = {"": device} if isinstance(device, str) else dict(device)
        places = {"device_map": devices, "quantization_config": _packing(quantise, on_cpu=device == "cpu")}
    packed = gguf_file(folder)
    try:
        with nullcontext() if packed is None else redirect_stderr(StringIO()):  # a progress bar nobody can turn off
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                folder,
                dtype=torch_dtype(dtype),
                local_files_only=True,
                trust_remote_code=trust_remote_code,
                output_loading_info=True,
                **places,
                **({} if attention is None else {"attn_implementation": attention}),
                **({} if packed is None else _unpacking(packed)),
            )
        model, report = loaded
        model = model.eval() if places else model.to(str(device)).eval()
    except (*_BAD_FOLDER, MemoryError, SafetensorError, StrictDataclassError) as error:
        if out_of_memory(error):
            raise MachineError(
                f"{folder}: does not fit on {_said(device)}; use a smaller model or another device"
            ) from error
        reason = " ".join(str(error).split())[:300]
        raise InputError(f"{folder}: cannot be loaded as a causal language model: {reason}") from error
    if report["missing_keys"]:
        names = ", ".join(sorted(report["missing_keys"])[:3])
        raise InputError(f"{folder}: weights are missing ({names}, {len(report['missing_keys'])} in all)")
    return model  # type: ignore[no-any-return]


def _said(device: str | Mapping[str, int | str]) -> str:
    return device if isinstance(device, str) else "the GPUs"


def _packing(quantise: Quantise, *, on_cpu: bool) -> "BitsAndBytesConfig":
    import torch
    from transformers import BitsAndBytesConfig

    if quantise == "8bit":
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32 if on_cpu else torch.bfloat16,
    )


def _unpacking(path: Path) -> dict[str, Any]:
    """How to load a .gguf."""
    from transformers import GgufConfig

    # Unpacked even where kernels for packed weights are installed: the same file gives the same records everywhere.
    return {"gguf_file": path.name, "quantization_config": GgufConfig(dequantize=True)}


def _device_map(packing: str, device: str | Mapping[str, int | str], max_memory: Mapping[int, int]) -> dict[str, Any]:
    """What transformers has to be told of devices: nothing for a model that is loaded whole and then moved."""
    if not isinstance(device, str):
        return {"device_map": dict(device)}
    if len(max_memory) > 1:
        return {"device_map": "auto", "max_memory": dict(max_memory)}
    if packing in ("none", "gguf"):
        return {}
    return {"device_map": {"": device}}  # packed weights can't be moved later


def out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that a GPU or the CPU has no memory for what was asked of it just now."""
    import torch

    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _OUT_OF_MEMORY)


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
    """No progress bars and no notes from transformers and its libraries: what a user has to know is said by us."""
    from transformers.utils.logging import disable_progress_bar, set_verbosity_error

    disable_progress_bar()
    set_verbosity_error()
    for library in ("accelerate", "bitsandbytes"):
        logging.getLogger(library).setLevel(logging.ERROR)
    # It says so for every layer and every step.
    warnings.filterwarnings("ignore", message="MatMul8bitLt: inputs will be cast")
    # peft sets it right itself, and says so for every layer of GPT-2.
    warnings.filterwarnings("ignore", message="fan_in_fan_out is set to False but the target module is `Conv1D`")
    # What peft asks of transformers.
    warnings.filterwarnings("ignore", message=".is_gradient_checkpointing. is deprecated")
