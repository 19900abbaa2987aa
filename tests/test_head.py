"""The head against the models' own logits, on tiny random models of many architectures."""

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, BertConfig, DynamicCache, GPT2LMHeadModel, PreTrainedModel

from distill.errors import InputError
from distill.head import (
    Head,
    find_head,
    head_error,
    hidden_states,
    is_causal,
    own_logits,
    runs_in_chunks,
    verified_head,
)

ROWS = 97
VOCAB = 90  # the crop: the last seven rows are padding of the head

LLAMA = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
GEMMA = LLAMA | {"num_key_value_heads": 1, "head_dim": 8}
MOE = LLAMA | {"num_local_experts": 2, "num_experts_per_tok": 1}
GPT2 = {"n_embd": 16, "n_layer": 2, "n_head": 2}

MODELS: dict[str, tuple[str, dict[str, object]]] = {
    "llama": ("llama", LLAMA),
    "llama tied": ("llama", LLAMA | {"tie_word_embeddings": True}),
    "mistral": ("mistral", LLAMA | {"num_key_value_heads": 1, "sliding_window": 4}),
    "mixtral": ("mixtral", MOE | {"num_key_value_heads": 1}),
    "qwen2": ("qwen2", LLAMA | {"num_key_value_heads": 1}),
    "qwen3": ("qwen3", GEMMA),
    "gemma2": ("gemma2", GEMMA | {"final_logit_softcapping": 0.5}),
    "gemma3": ("gemma3_text", GEMMA | {"final_logit_softcapping": 0.3}),
    "gemma3 uncapped": ("gemma3_text", GEMMA | {"final_logit_softcapping": None}),
    "cohere": ("cohere", LLAMA | {"logit_scale": 0.25}),
    "granite": ("granite", LLAMA | {"logits_scaling": 8.0}),
    "hyperclovax": ("hyperclovax", LLAMA | {"logits_scaling": 8.0, "num_key_value_heads": 2}),
    "gpt2": ("gpt2", GPT2),
    "gptj": ("gptj", GPT2 | {"rotary_dim": 4}),
    "gpt_neox": ("gpt_neox", LLAMA),
    "phi": ("phi", LLAMA | {"partial_rotary_factor": 0.5}),
    "opt": ("opt", LLAMA | {"ffn_dim": 24, "word_embed_proj_dim": 8}),
    "falcon": ("falcon", {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}),
    "mpt": ("mpt", {"d_model": 16, "n_layers": 2, "n_heads": 2, "logit_scale": 0.5}),
    "bloom": ("bloom", {"hidden_size": 16, "n_layer": 2, "n_head": 2}),
}


def make_model(name: str) -> PreTrainedModel:
    model_type, settings = MODELS[name]
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        model_type, vocab_size=ROWS, pad_token_id=0, bos_token_id=1, eos_token_id=2, **settings
    )
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # biases and norms start at constants
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def some_ids(length: int = 9) -> torch.Tensor:
    return torch.randint(3, VOCAB, (2, length), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_the_models_own(name: str) -> None:
    model, token_ids = make_model(name), some_ids()
    head = find_head(model, VOCAB)
    with torch.no_grad():
        own = model(input_ids=token_ids).logits[..., :VOCAB]
        ours = head.logits(hidden_states(model, token_ids).flatten(0, 1)).view_as(own)
    torch.testing.assert_close(ours, own, rtol=1e-5, atol=1e-6)
    assert head_error(model, head, token_ids) < 1e-5
    assert verified_head(model, VOCAB, token_ids) is not None


@pytest.mark.parametrize("name", MODELS)
def test_right_padding_is_invisible(name: str) -> None:
    model, token_ids = make_model(name), some_ids()
    padded = torch.cat([token_ids, torch.zeros(2, 4, dtype=torch.int64)], 1)
    with torch.no_grad():
        alone, together = hidden_states(model, token_ids), hidden_states(model, padded)[:, :9]
    torch.testing.assert_close(together, alone, rtol=1e-5, atol=1e-5)


def test_configurations_are_read() -> None:
    assert find_head(make_model("cohere"), VOCAB).scale == 0.25
    assert find_head(make_model("granite"), VOCAB).scale == 0.125
    assert find_head(make_model("hyperclovax"), VOCAB).scale == 8.0
    assert find_head(make_model("mpt"), VOCAB).scale == 1.0
    assert find_head(make_model("gemma2"), VOCAB).softcap == 0.5
    assert find_head(make_model("gptj"), VOCAB).bias is not None


def test_the_head_is_live() -> None:
    model, token_ids = make_model("llama"), some_ids()
    head = find_head(model, VOCAB)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(3.0)
    assert head_error(model, head, token_ids) < 1e-5


def test_half_precision_gives_float32_and_is_verified() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        model, token_ids = make_model("gemma2").to(dtype), some_ids()
        head = verified_head(model, VOCAB, token_ids)
        assert head is not None
        assert head.logits(hidden_states(model, token_ids)[0]).dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["llama", "gemma2", "cohere"])
def test_an_unknown_treatment_of_logits_is_found_out(name: str, dtype: torch.dtype) -> None:
    model = make_model(name).to(dtype)
    assert verified_head(model, VOCAB, some_ids()) is not None
    model.get_output_embeddings().register_forward_hook(lambda layer, inputs, logits: logits * 1.2)
    assert verified_head(model, VOCAB, some_ids()) is None


def test_a_model_without_a_body_has_no_verified_head() -> None:
    model = make_model("gpt2")
    model.base_model_prefix = "nowhere"
    assert verified_head(model, VOCAB, some_ids()) is None


def test_dropout_does_not_disturb_and_the_mode_stays() -> None:
    model = GPT2LMHeadModel(make_model("gpt2").config).train()
    assert model.config.embd_pdrop > 0
    assert verified_head(model, VOCAB, some_ids()) is not None
    assert model.training


def test_equal_infinities_are_equal_and_one_sided_nan_is_not() -> None:
    model, token_ids = make_model("gptj"), some_ids()
    head = find_head(model, VOCAB)
    assert head.bias is not None
    with torch.no_grad():
        head.bias[5] = -torch.inf
        assert head_error(model, head, token_ids) < 1e-5
        ours = Head(head.weight, head.bias.clone(), head.scale, head.softcap, head.vocab_size)
        head.bias[5] = torch.nan
        assert head_error(model, ours, token_ids) == float("inf")
        assert head_error(model, head, token_ids) < 1e-5


def test_what_does_not_fit_is_refused() -> None:
    model = make_model("llama")
    with pytest.raises(InputError, match=r"crop_distr_to_size: 98 ids .* 97 rows"):
        find_head(model, 98)
    with pytest.raises(InputError, match="no output embeddings"):
        find_head(model.model, VOCAB)
    other = nn.Linear(7, ROWS)
    assert head_error(model, Head(other.weight, other.bias, 1.0, None, VOCAB), some_ids()) == float("inf")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["llama", "gemma2", "cohere", "gptj"])
def test_logits_into_a_buffer_are_the_same(name: str, dtype: torch.dtype) -> None:
    """With scale, soft cap and bias; the rows behind stay as they are."""
    model = make_model(name).to(dtype)
    head, buffer = find_head(model, VOCAB), torch.full((20, VOCAB), 7.0)
    with torch.no_grad():
        hidden = hidden_states(model, some_ids()).flatten(0, 1)
        expected, got = head.logits(hidden), head.logits_into(buffer, hidden)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
    assert got.data_ptr() == buffer.data_ptr() and (buffer[len(hidden) :] == 7.0).all()


def test_the_product_may_be_computed_in_another_type() -> None:
    model, token_ids = make_model("gptj"), some_ids()
    head = find_head(model, VOCAB)
    assert head.in_dtype(torch.float32).weight.data_ptr() == head.weight.data_ptr(), "no copy without need"
    with torch.no_grad():
        hidden = hidden_states(model, token_ids).flatten(0, 1)
        coarse = head.in_dtype(torch.bfloat16).logits(hidden)
        expected = head.logits(hidden)
    assert coarse.dtype == torch.float32 and coarse.shape == expected.shape
    assert 0 < (coarse - expected).abs().max() < 0.05 * expected.abs().max()


@pytest.mark.parametrize("name", MODELS)
def test_chunks_through_a_cache_give_the_same(name: str) -> None:
    model, token_ids = make_model(name), some_ids(11)
    assert runs_in_chunks(model, token_ids)
    with torch.no_grad():
        cache = DynamicCache(config=model.config)
        chunks = [hidden_states(model, token_ids[:, start : start + 4], cache) for start in (0, 4, 8)]
        torch.testing.assert_close(torch.cat(chunks, 1), hidden_states(model, token_ids), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("error", [TypeError, AttributeError])
def test_a_model_without_such_a_cache_is_found_out(error: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model("llama")

    def forgetful(model: PreTrainedModel, token_ids: torch.Tensor, cache: object = None) -> torch.Tensor:
        return own_logits(model, token_ids)

    monkeypatch.setattr("distill.head.own_logits", forgetful)
    assert not runs_in_chunks(model, some_ids())

    def refusing(model: PreTrainedModel, token_ids: torch.Tensor, cache: object = None) -> torch.Tensor:
        if cache is not None:
            raise error("no such argument")
        return own_logits(model, token_ids)

    monkeypatch.setattr("distill.head.own_logits", refusing)
    assert not runs_in_chunks(model, some_ids())


@pytest.mark.parametrize("name", MODELS)
def test_causal_models_are_known_as_such(name: str) -> None:
    assert is_causal(make_model(name), some_ids(8)[:1])


def test_a_model_that_sees_ahead_is_found_out() -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    model = AutoModelForCausalLM.from_config(BertConfig(vocab_size=VOCAB, **sizes))
    model.train()
    assert not is_causal(model, some_ids(8)[:1]) and model.training, "left as it was"
    assert is_causal(
        AutoModelForCausalLM.from_config(BertConfig(vocab_size=VOCAB, is_decoder=True, **sizes)), some_ids(8)[:1]
    )
