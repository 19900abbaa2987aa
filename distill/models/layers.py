"""Where a model keeps its transformer blocks."""

from typing import TYPE_CHECKING

from torch import nn

from distill.errors import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def layer_stack(model: "PreTrainedModel", where: object) -> str:
    """Name of the list of the model's transformer blocks. InputError beginning with ``where`` if it can't be told."""
    count = model.config.get_text_config().num_hidden_layers
    lists = [
        str(n) for n, module in model.named_modules() if isinstance(module, nn.ModuleList) and len(module) == count
    ]
    outermost = [name for name in lists if not any(name.startswith(f"{other}.") for other in lists)]
    if len(outermost) != 1:
        raise InputError(f"{where}: cannot tell its layers in this architecture")
    return outermost[0]
