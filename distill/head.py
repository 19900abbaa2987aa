"""How a causal language model turns hidden states into logits: the one place that knows, for teacher and student.

Knowing it lets both apply the head to the target positions only, in pieces, so that no [batch, length, vocabulary]
tensor exists. All of Hugging Face's causal models end in ``cap * tanh(scale * (W h + b) / cap)`` or a part of it;
where a model does something else, :func:`verified_head` finds out and the model's own logits have to be used.
"""

import inspect
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import Cache, DynamicCache, PretrainedConfig, PreTrainedModel

from distill.errors import InputError

# What a user is told of a model for which ``verified_head`` is None.
NOT_CAUSAL = "sees the tokens that it is to predict; it is no causal language model"
UNKNOWN_HEAD = "unusual output head; the model's own is used (slower, more memory)"

# Attributes of transformers' configurations that act on the logits (or, for some, on the hidden states just before).
_MULTIPLIERS = ("logit_scale", "lm_head_multiplier", "output_multiplier")
_DIVISORS = ("logits_scaling", "logits_mup_width_multiplier")
_SOFTCAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap", "softcap")
# Configurations that have such an attribute and use it otherwise: MPT's is never read, HyperCLOVA X multiplies by it.
_IGNORED = {"mpt": "logit_scale"}
_MULTIPLIED = {"hyperclovax": "logits_scaling", "hyperclovax_vision_v2": "logits_scaling"}


@dataclass(frozen=True, slots=True, eq=False)
class Head:
    """The last linear layer of a model and what happens to its output.

    weight: [rows, H], rows >= vocab_size; it is the live parameter, not a copy. bias: [rows] or None. scale multiplies
    the logits, then softcap (if any) squeezes them into (-softcap, softcap). Only the ids below vocab_size exist:
    rows behind them are never computed, which is the same as masking them with -inf before a softmax.
    """

    weight: Tensor
    bias: Tensor | None
    scale: float
    softcap: float | None
    vocab_size: int

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 [n, vocab_size] of hidden states [n, H]; the product is computed in the weight's dtype."""
        weight, bias = self._rows()
        logits = F.linear(hidden.to(weight.device, weight.dtype), weight, bias).float()
        if self.scale != 1.0:
            logits = logits * self.scale
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)

    def logits_into(self, out: Tensor, hidden: Tensor) -> Tensor:
        """:meth:`logits`, in the first n rows of ``out``, float32 [>= n, vocab_size], which are returned.

        Without gradient. Fresh memory of that size costs more than writing to it: the system clears it, page by page.
        """
        weight, bias = self._rows()
        out, hidden = out[: len(hidden)], hidden.to(weight.device, weight.dtype)
        if weight.dtype != torch.float32:
            out.copy_(F.linear(hidden, weight, bias))
        elif bias is None:
            torch.mm(hidden, weight.t(), out=out)
        else:
            torch.addmm(bias, hidden, weight.t(), out=out)
        if self.scale != 1.0:
            out.mul_(self.scale)
        return out if self.softcap is None else out.div_(self.softcap).tanh_().mul_(self.softcap)

    def in_dtype(self, dtype: torch.dtype) -> Self:
        """This head with its product computed in ``dtype``; the weight is a copy unless it has that type already."""
        weight, bias = self._rows()
        return replace(self, weight=weight.to(dtype), bias=None if bias is None else bias.to(dtype))

    def _rows(self) -> tuple[Tensor, Tensor | None]:
        return self.weight[: self.vocab_size], None if self.bias is None else self.bias[: self.vocab_size]


def find_head(model: PreTrainedModel, vocab_size: int) -> Head:
    """The head of ``model`` cropped to ``vocab_size`` ids, read from its modules and configuration.

    Cheap: call it again whenever the weights may have been replaced. Raises InputError for a model without one and for
    a crop above its rows.
    """
    layer = _output_layer(model)
    if layer is None:
        raise InputError(f"{type(model).__name__} has no output embeddings: a causal language model is needed")
    if vocab_size > layer.weight.shape[0]:
        raise InputError(
            f"crop_distr_to_size: {vocab_size} ids are wanted, but the head of {type(model).__name__} has "
            f"{layer.weight.shape[0]} rows; choose a smaller crop"
        )
    config = model.config.get_text_config()
    return Head(layer.weight, getattr(layer, "bias", None), _scale(config), _softcap(config), vocab_size)


def _output_layer(model: PreTrainedModel) -> Any:
    return model.get_output_embeddings()


def _scale(config: PretrainedConfig) -> float:
    names = [name for name in (*_MULTIPLIERS, *_DIVISORS) if isinstance(getattr(config, name, None), int | float)]
    scale = 1.0
    for name in names:
        if _IGNORED.get(config.model_type) == name:
            continue
        value = float(getattr(config, name))
        multiplies = name in _MULTIPLIERS or _MULTIPLIED.get(config.model_type) == name
        scale *= value if multiplies else 1.0 / value
    return scale


def _softcap(config: PretrainedConfig) -> float | None:
    for name in _SOFTCAPS:
        if getattr(config, name, None) is not None:
            return float(getattr(config, name))
    return None


def hidden_states(
    model: PreTrainedModel, token_ids: Tensor, cache: Cache | None = None, position_ids: Tensor | None = None
) -> Tensor:
    """The normed hidden states [B, L, H] that the head reads, of right-padded token_ids int64 [B, L].

    No attention mask is given: in a causal model what stands to the right of a position can't reach it. With a
    ``cache`` the tokens follow those that it has seen, and it has seen them too afterwards. With position_ids, int64
    [B, L], rows hold several samples, each beginning where they restart: :func:`packs` says whether a model honours it.
    """
    body = _body(model)
    hidden: Tensor = body(**_inputs(model, token_ids, position_ids), **_caching(body, cache)).last_hidden_state
    return hidden.view(*token_ids.shape, -1)


def own_logits(
    model: PreTrainedModel, token_ids: Tensor, cache: Cache | None = None, position_ids: Tensor | None = None
) -> Tensor:
    """The model's own logits [B, L, rows] of what :func:`hidden_states` gives the hidden states of."""
    logits: Tensor = model(**_inputs(model, token_ids, position_ids), **_caching(model, cache)).logits
    return logits.view(*token_ids.shape, -1)


def _inputs(model: PreTrainedModel, token_ids: Tensor, position_ids: Tensor | None) -> dict[str, Tensor]:
    if position_ids is None:
        return {"input_ids": token_ids}
    # transformers makes a block-diagonal mask of positions that restart. With FlashAttention there is no mask, and
    # samples are told apart only where there is but one row.
    if "flash" in str(model.config._attn_implementation):
        token_ids, position_ids = token_ids.reshape(1, -1), position_ids.reshape(1, -1)
    return {"input_ids": token_ids, "position_ids": position_ids}


def _caching(module: nn.Module, cache: Cache | None) -> dict[str, Any]:
    if cache is None:
        return {"use_cache": False}
    # transformers' own name since 5.24; a model folder that brings its code may still have the older one.
    known = "cache" in inspect.signature(module.forward).parameters
    return {"use_cache": True, "cache" if known else "past_key_values": cache}


def _body(model: PreTrainedModel) -> nn.Module:
    """The model without its head; the model itself where that can't be told."""
    if model.base_model is not model:
        return model.base_model
    return getattr(model, "model", model)  # Llama 4's text model doesn't say the prefix it uses


@torch.no_grad()
def runs_in_chunks(model: PreTrainedModel, token_ids: Tensor) -> bool:
    """Whether a model in evaluation mode gives the same logits when its tokens come in two chunks, through a cache.

    token_ids: int64 [B, L], a short batch without padding. False for architectures that remember in another way.
    """
    middle = token_ids.shape[1] // 2
    whole = own_logits(model, token_ids)
    try:
        cache = DynamicCache(config=model.config.get_text_config())
        chunks = [own_logits(model, part, cache) for part in token_ids.tensor_split([middle], 1)]
    except (TypeError, ValueError, AttributeError, LookupError, NotImplementedError):
        return False
    error = (torch.cat(chunks, 1) - whole).float().abs().max()
    return bool(error <= max(1e-4, 8 * torch.finfo(whole.dtype).eps) * whole.float().abs().max())


@torch.no_grad()
def is_causal(model: PreTrainedModel, token_ids: Tensor) -> bool:
    """Whether what follows a position changes nothing there, as all that is done without an attention mask relies on.

    token_ids: int64 [1, L], L >= 2, a sample that is not all of one token. The model is left as it was.
    """
    other = token_ids.clone()
    other[0, -1] = token_ids[0, 0]
    was_training = model.training
    model.train(False)
    try:
        logits = own_logits(model, torch.cat([token_ids, other])).float()
    finally:
        model.train(was_training)
    eps = 0.01 if getattr(model, "is_loaded_in_8bit", False) else 8 * torch.finfo(model.dtype).eps
    seen = (logits[0, :-1] - logits[1, :-1]).nan_to_num(0.0).abs().max()
    return bool(seen <= max(1e-5, eps) * logits.nan_to_num(0.0, 0.0, 0.0).abs().max())


@torch.no_grad()
def packs(model: PreTrainedModel, token_ids: Tensor) -> bool:
    """Whether samples that share a row give the logits that each of them gives in a row of its own.

    token_ids: int64 [1, L], L >= 12, different ones, which are cut into samples. False for architectures that take no
    position ids, use them for something else, or look at a row as a whole. The model is left as it was.
    """
    samples = token_ids[0].tensor_split([5, 6])  # one of a single token among them
    length = max(map(len, samples))
    alone = torch.stack([F.pad(sample, (0, length - len(sample))) for sample in samples])
    positions = torch.cat([torch.arange(len(sample), device=token_ids.device) for sample in samples])
    other = torch.cat([samples[0].flip(0), *samples[1:]])
    was_training = model.training
    model.train(False)
    try:
        separate = own_logits(model, alone)
        together = own_logits(model, torch.stack([token_ids[0], other]), position_ids=positions.expand(2, -1)).float()
    except (TypeError, ValueError, AttributeError, LookupError, NotImplementedError):
        return False
    except torch.OutOfMemoryError:
        raise  # it says nothing of the model
    except RuntimeError:  # shapes that don't fit
        return False
    finally:
        model.train(was_training)
    expected = torch.cat([row[: len(sample)] for row, sample in zip(separate, samples, strict=True)]).float()
    error = (together[0] - expected).abs().max()
    # What follows the first sample must not see it. In untrained models too, where seeing it makes little difference.
    leak = (together[0] - together[1])[len(samples[0]) :].abs().max()
    eps = torch.finfo(separate.dtype).eps
    if getattr(model, "is_loaded_in_8bit", False):
        eps = 0.01  # such products are rounded by what else is in the batch
    return bool(torch.maximum(error / max(1e-4, 8 * eps), leak / (8 * eps)) <= expected.abs().max())


def head_error(model: PreTrainedModel, head: Head, token_ids: Tensor) -> float:
    """Largest absolute difference between ``head`` on the hidden states and the model's own logits.

    token_ids: int64 [B, L], a short batch without padding. Equal infinities are equal; a NaN on one side only, or
    tensors that don't fit together, are an infinite error.
    """
    return _compare(model, head, token_ids)[0]


def verified_head(model: PreTrainedModel, vocab_size: int, token_ids: Tensor) -> Head | None:
    """The model's head, or None where the model makes its logits in a way that :class:`Head` can't describe.

    token_ids: int64 [B, L], a short batch without padding to compare on. Rounding may make a difference of 1e-4 of the
    largest logit, or of four units in its last place where the dtype that is computed in is coarser than that.
    """
    weight = getattr(_output_layer(model), "weight", None)
    if _body(model) is model or weight is None or weight.dim() != 2 or not weight.is_floating_point():
        return None  # no head, no body, or a quantised head, whose numbers are packed
    head = find_head(model, vocab_size)
    error, largest = _compare(model, head, token_ids)
    device, dtype = head.weight.device.type, head.weight.dtype
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
    return head if error <= max(1e-4, 4 * torch.finfo(dtype).eps) * largest else None


@torch.no_grad()
def _compare(model: PreTrainedModel, head: Head, token_ids: Tensor) -> tuple[float, float]:
    """(:func:`head_error`, the model's largest finite absolute logit)."""
    was_training = model.training
    model.train(False)  # dropout would make any two passes differ
    try:
        own = own_logits(model, token_ids)[..., : head.vocab_size].float()
        hidden = hidden_states(model, token_ids)
    finally:
        model.train(was_training)
    largest = own.nan_to_num(0.0, 0.0, 0.0).abs().max().item()
    if hidden.shape[-1] != head.weight.shape[1] or own.shape[-1] != head.vocab_size:
        return float("inf"), largest
    # A spread model's own logits are where its inputs are.
    ours = head.logits(hidden.flatten(0, 1)).to(own.device).view_as(own)
    same = (own == ours) | (own.isnan() & ours.isnan())
    return (own - ours).abs().nan_to_num(nan=float("inf")).masked_fill(same, 0.0).max().item(), largest
