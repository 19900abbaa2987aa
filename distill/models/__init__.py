"""Model folders: check them, tell them apart by their weights, load them. Shared by teacher and student.

``folder`` reads what a folder says of itself without loading any weights, ``pipeline_config`` a file of the ancestor's
that may lie in it, ``quantised`` says how its weights are packed, ``load`` puts them on a device, ``spread`` on
several; ``attention`` says whether FlashAttention can be used, ``layers`` where the blocks are.
"""

from distill.models.attention import FLASH, require_flash_attention
from distill.models.folder import (
    compute_dtype,
    config_digest,
    gguf_file,
    loaded_bytes,
    read_model_config,
    stored_dtype,
    weight_files,
    weights_digest,
)
from distill.models.layers import layer_stack
from distill.models.load import (
    Quantise,
    load_causal_lm,
    out_of_memory,
    quiet_transformers,
    release_memory,
    resolve_device,
    saved_folder,
    torch_dtype,
)
from distill.models.pipeline_config import PipelineConfig, read_pipeline_config
from distill.models.quantised import quantisation
from distill.models.spread import load_spread

__all__ = [
    "FLASH",
    "PipelineConfig",
    "Quantise",
    "compute_dtype",
    "config_digest",
    "gguf_file",
    "layer_stack",
    "load_causal_lm",
    "load_spread",
    "loaded_bytes",
    "out_of_memory",
    "quantisation",
    "quiet_transformers",
    "read_model_config",
    "read_pipeline_config",
    "release_memory",
    "require_flash_attention",
    "resolve_device",
    "saved_folder",
    "stored_dtype",
    "torch_dtype",
    "weight_files",
    "weights_digest",
]
