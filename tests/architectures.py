"""Tiny random models of many architectures, for whatever has to hold for any of them."""

from collections.abc import Callable

import torch
import transformers as tf
from transformers import PreTrainedModel

VOCAB = 261

_COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "head_dim": 8,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "initializer_range": 0.2,
}


def _without(*names: str, **more: object) -> dict[str, object]:
    return {name: value for name, value in _COMMON.items() if name not in names} | more


ARCHITECTURES: dict[str, Callable[[], PreTrainedModel]] = {
    "llama-tied": lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**_COMMON, tie_word_embeddings=True)),
    "mistral": lambda: tf.MistralForCausalLM(tf.MistralConfig(**_COMMON, sliding_window=8)),
    "qwen2": lambda: tf.Qwen2ForCausalLM(tf.Qwen2Config(**_without("head_dim"))),
    "qwen3": lambda: tf.Qwen3ForCausalLM(tf.Qwen3Config(**_COMMON)),
    "gemma2": lambda: tf.Gemma2ForCausalLM(tf.Gemma2Config(**_COMMON, final_logit_softcapping=3.0, sliding_window=8)),
    "gemma3": lambda: tf.Gemma3ForCausalLM(
        tf.Gemma3TextConfig(**_COMMON, final_logit_softcapping=3.0, sliding_window=8)
    ),
    "cohere": lambda: tf.CohereForCausalLM(tf.CohereConfig(**_without("head_dim"), logit_scale=0.3)),
    "granite": lambda: tf.GraniteForCausalLM(tf.GraniteConfig(**_without("head_dim"), logits_scaling=3.0)),
    "phi": lambda: tf.PhiForCausalLM(tf.PhiConfig(**_without("head_dim"))),
    "gpt2": lambda: tf.GPT2LMHeadModel(
        tf.GPT2Config(vocab_size=VOCAB, n_embd=32, n_layer=4, n_head=4, n_positions=128, initializer_range=0.2)
    ),
    "gpt-neox": lambda: tf.GPTNeoXForCausalLM(tf.GPTNeoXConfig(**_without("head_dim", "num_key_value_heads"))),
    "mixtral": lambda: tf.MixtralForCausalLM(tf.MixtralConfig(**_COMMON, num_local_experts=2)),
}


def make(name: str, seed: int = 0) -> PreTrainedModel:
    """The architecture with random weights, in evaluation mode."""
    torch.manual_seed(seed)
    return ARCHITECTURES[name]().eval()
