"""Low-rank adapters (LoRA, arXiv 2106.09685): what is trained of a student whose own weights stay as they are.

A quantised student can't learn but through them. Merging adds B A scale to the weights that the adapters were trained
on: the quantised ones, dequantised, so that the merged student is the one that was validated, not a near one.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from distill.errors import InputError

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

MergeInto = Literal["dequantised", "original", "none"]

DEFAULT_RANK = 16
"""Of students that are quantised and so have to have adapters."""

_QUANTISED = ("Linear4bit", "Linear8bitLt")


@dataclass(frozen=True, slots=True)
class AdapterSpec:
    """``rank`` r and ``alpha``: the weights' change is (alpha / r) B A, with B [out, r] and A [r, in].

    ``targets``: names, or ends of names, of linear layers; empty for all but the head. ``dropout`` is of their input.
    ``seed`` makes A. ``merge_into`` says what an export has: merged weights (see the module), or the adapters alone.
    """

    rank: int
    alpha: float
    targets: tuple[str, ...]
    dropout: float
    seed: int
    merge_into: MergeInto


class Adapters:
    """The adapters inside a model, whose other parameters no longer take a gradient."""

    def __init__(self, model: "PreTrainedModel", spec: AdapterSpec) -> None:
        """InputError if a target is no linear layer of the model, or the head."""
        from peft import LoraConfig, get_peft_model

        config = LoraConfig(
            r=spec.rank,
            lora_alpha=spec.alpha,  # type: ignore[arg-type]
            target_modules=_target_names(model, spec.targets),
            lora_dropout=spec.dropout,
        )
        with torch.random.fork_rng(range(torch.cuda.device_count())):
            torch.manual_seed(spec.seed)
            try:
                self._wrapped: PeftModel = get_peft_model(model, config)
            except ValueError as error:
                reason = " ".join(str(error).split())[:200]
                raise InputError(f"lora_targets: {type(model).__name__} can't have adapters there: {reason}") from error
        self.merge_into = spec.merge_into

    def save(self, folder: Path) -> None:
        """Write them as peft has them, to go on top of the model that they were trained on."""
        self._wrapped.save_pretrained(str(folder))
        # peft leaves a card to fill in, and where the base is on this machine.
        (folder / "README.md").unlink(missing_ok=True)
        path = folder / "adapter_config.json"
        config = json.loads(path.read_text(encoding="utf-8"))
        config["base_model_name_or_path"] = Path(config["base_model_name_or_path"] or "").name
        path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")

    @torch.no_grad()
    def merge(self, plain: "PreTrainedModel") -> None:
        """Change ``plain``, the same model loaded without quantisation, into the one that was trained."""
        for name, module in self._wrapped.get_base_model().named_modules():
            layer = module.get_base_layer() if _is_adapted(module) else module
            quantised = type(layer).__name__ in _QUANTISED
            if name.endswith("base_layer") or not (_is_adapted(module) or quantised):
                continue
            target = plain.get_submodule(name)
            weight: Any = target.weight
            if (
                quantised and type(target).__name__ == "Conv1D"
            ):  # it was turned into a linear layer, which has [out, in]
                weight = weight.T
            if quantised and self.merge_into == "dequantised":
                weight.copy_(_dequantised(layer))
            if _is_adapted(module):
                weight.add_(module.get_delta_weight("default").to(weight.device, weight.dtype))


def _is_adapted(module: nn.Module) -> bool:
    from peft.tuners.lora import LoraLayer

    return isinstance(module, LoraLayer)


def _dequantised(layer: nn.Module) -> torch.Tensor:
    """The float weights of a layer of bitsandbytes."""
    from peft.utils.integrations import dequantize_bnb_weight

    packed: Any = layer.weight
    weight: torch.Tensor = dequantize_bnb_weight(packed, state=getattr(layer, "state", None))
    return weight.float()


def _target_names(model: "PreTrainedModel", targets: Sequence[str]) -> list[str]:
    """Names of the linear layers that ``targets`` mean, all but the head if there are none.

    By name, because what peft takes for linear includes packed experts, which it can't merge.
    """
    head = model.get_output_embeddings()
    layers = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"
    }
    others = [name for name, module in layers.items() if module is not head]
    chosen = []
    for target in targets:
        found = [name for name in layers if f".{name}".endswith(f".{target}")]
        if not found:
            known = ", ".join(sorted({name.rpartition(".")[2] for name in others}))
            raise InputError(f"lora_targets: {target!r} is no linear layer of the student; it has {known}")
        if any(layers[name] is head for name in found):
            raise InputError(f"lora_targets: {target!r} is the output layer, which stays as it is; name others")
        chosen += found
    return chosen if targets else others
