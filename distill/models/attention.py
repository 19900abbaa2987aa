"""FlashAttention 2, where it can be had; everything else attends as transformers chooses (sdpa where there is one)."""

from importlib.util import find_spec

from distill.errors import InputError

FLASH = "flash_attention_2"
"""As transformers and a layer's description call it."""


def require_flash_attention(device: str, dtype: str, dtype_key: str) -> None:
    """Raises InputError naming ``use_flash_attn_2`` unless a model on ``device`` that computes in ``dtype`` can use it.

    ``dtype_key`` is the key that decides ``dtype``.
    """
    if not device.startswith("cuda"):
        raise InputError(f"use_flash_attn_2: needs a CUDA GPU, not {device}; switch it off, and sdpa is used")
    if find_spec("flash_attn") is None:
        raise InputError("use_flash_attn_2: needs: pip install flash-attn; or switch it off, and sdpa is used")
    if dtype == "fp32":
        raise InputError(
            f"use_flash_attn_2: computes in bf16 or fp16 only, but {dtype_key} is fp32; change one of them"
        )
