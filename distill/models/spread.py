"""A student over several devices: which of its modules is where, and a model that runs that way.

accelerate moves what goes from one device to the next. What doesn't fit on the GPUs is computed and trained on the CPU
where that may be used; on disk nothing can be trained.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from distill.errors import InputError
from distill.models.layers import layer_stack
from distill.models.load import Quantise, load_causal_lm, quiet_transformers
from distill.placement import Spread

if TYPE_CHECKING:
    from transformers import PreTrainedModel

DeviceMap = dict[str, int | str]
"""Modules by name to the index of a GPU, "cpu" or "disk"; "" is the whole model."""


def load_spread(
    folder: Path, spread: Spread, *, quantise: Quantise | None, trust_remote_code: bool, attention: str | None = None
) -> "PreTrainedModel":
    """The model of a folder in fp32, or packed, spread over devices; inputs may be on any of them.

    Raises InputError naming the key at fault if it can't be spread so, and as ``load_causal_lm``.
    """
    quiet_transformers()
    devices = device_map(_without_weights(folder, trust_remote_code), spread, quantise)
    places = set(devices.values())
    if quantise is None or places == {"cpu"}:
        model = load_causal_lm(
            folder,
            dtype="fp32",
            device=_torch_name(places.pop()) if len(places) == 1 else "cpu",
            trust_remote_code=trust_remote_code,
            quantise=quantise,
            attention=attention,
        )
        return model if len(set(devices.values())) == 1 else connect(model, devices)
    if "cpu" in places:
        raise InputError("max_memory: packed weights have to be on GPUs, all of them; leave out cpu or give GPUs more")
    return load_causal_lm(
        folder,
        dtype="fp32",
        device=devices,
        trust_remote_code=trust_remote_code,
        quantise=quantise,
        attention=attention,
    )


def connect(model: "PreTrainedModel", devices: Mapping[str, int | str]) -> "PreTrainedModel":
    """Move a model's modules to their devices, and have what passes between them moved."""
    from accelerate import dispatch_model

    # With the CPU as its main device accelerate runs there what is there; else it would send it to a GPU when needed,
    # where it can't be trained.
    main = "cpu" if "cpu" in devices.values() else None
    dispatch_model(model, dict(devices), main_device=main, force_hooks=True)
    # transformers takes it for a sign of weights that aren't there, and saves such models in another way.
    del model.hf_device_map
    return model


def device_map(model: "PreTrainedModel", spread: Spread, quantise: Quantise | None = None) -> DeviceMap:
    """Where each module of ``model``, which may be on the meta device, goes.

    Tied weights are on one device. Raises InputError naming the key for what doesn't fit.
    """
    room: dict[int | str, int] = dict(spread.room)
    gpus = [device for device in room if isinstance(device, int)]
    if not gpus:
        return {"": "cpu"}
    if spread.strategy == "custom":
        return _custom_map(model, gpus, spread.first_layers)
    devices = _accelerates_map(model, room, spread.strategy, quantise)
    stranded = sorted(name for name, device in devices.items() if device == "disk")
    if stranded:
        size = sum(parameter.numel() for parameter in model.parameters())
        raise InputError(
            f"max_memory: {stranded[0]} and {len(stranded) - 1} more of a student of {size:,} parameters fit nowhere"
            " (on disk nothing can be trained); raise its entries, add cpu, or take 4bit"
        )
    return devices


def _accelerates_map(
    model: "PreTrainedModel", room: dict[int | str, int], strategy: str, quantise: Quantise | None
) -> DeviceMap:
    from accelerate.utils import CustomDtype, get_balanced_memory, infer_auto_device_map

    packed: dict[str | None, Any] = {None: torch.float32, "8bit": torch.int8, "4bit": CustomDtype.INT4}
    head = model.get_output_embeddings()
    linear = {f"{n}.weight" for n, m in model.named_modules() if isinstance(m, nn.Linear) and m is not head}
    how: dict[str, Any] = {
        "no_split_module_classes": sorted(model._no_split_modules or ()),
        "dtype": packed[quantise],
        "special_dtypes": {n: torch.float32 for n, _ in model.named_parameters() if n not in linear},
    }
    if strategy != "sequential":
        room = get_balanced_memory(model, dict(room), low_zero=strategy == "balanced_low_0", **how)
    return dict(infer_auto_device_map(model, dict(room), **how))


def _custom_map(model: "PreTrainedModel", gpus: list[int], first_layers: int | None) -> DeviceMap:
    """``first_layers`` layers with all that comes before them on the first GPU, the others evenly on the others.

    What comes after the layers is on the last GPU, but for a head that is tied to the embeddings.
    """
    stack = layer_stack(model, "device_map")
    count = len(model.get_submodule(stack))  # type: ignore[arg-type]
    first, last = gpus[0], gpus[-1]
    kept = round(count / len(gpus)) if first_layers is None else first_layers
    if kept > count or (len(gpus) == 1 and kept < count):
        allowed = str(count) if len(gpus) == 1 else f"0 to {count}"
        raise InputError(f"num_gpu0_layers: {kept}, but the student has {count} layers and {len(gpus)} GPUs; {allowed}")
    devices: DeviceMap = {}
    for index in range(count):
        others = len(gpus) - 1
        place = 0 if index < kept else 1 + (index - kept) * others // (count - kept)
        devices[f"{stack}.{index}"] = gpus[place]
    embedding: Any = model.get_input_embeddings()
    parts, module = stack.split("."), model
    for depth, part in enumerate(parts):
        prefix = "".join(f"{name}." for name in parts[:depth])
        devices |= {f"{prefix}{name}": first for name, _ in module.named_parameters(recurse=False)}
        devices |= {f"{prefix}{name}": first for name, _ in module.named_buffers(recurse=False)}
        passed = False
        for name, child in module.named_children():
            passed = passed or name == part
            weights = list(child.parameters())
            behind = passed and weights and not any(weight is embedding.weight for weight in weights)
            if name != part:
                devices[f"{prefix}{name}"] = last if behind else first
        module = module.get_submodule(part)  # type: ignore[assignment]
    return devices


def _without_weights(folder: Path, trust_remote_code: bool) -> "PreTrainedModel":
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=trust_remote_code)
        with torch.device("meta"):
            model: PreTrainedModel = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, LookupError, TypeError, RuntimeError, ImportError, StrictDataclassError) as error:
        reason = " ".join(str(error).split())[:300]
        raise InputError(f"{folder}: cannot be loaded as a causal language model: {reason}") from error
    model.tie_weights()
    return model


def _torch_name(device: int | str) -> str:
    return f"cuda:{device}" if isinstance(device, int) else device
