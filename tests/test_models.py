"""Model folders: what is missing is named, and digests follow the content."""

import json
import os
import shutil
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from distill.errors import InputError
from distill.models import (
    PipelineConfig,
    compute_dtype,
    config_digest,
    gguf_file,
    load_causal_lm,
    loaded_bytes,
    quantisation,
    read_model_config,
    read_pipeline_config,
    resolve_device,
    stored_dtype,
    weight_files,
    weights_digest,
)
from distill.records import concat
from distill.teacher import Teacher, TeacherSpec
from distill.types import Records
from tests.helpers import make_samples
from tests.toys import make_model_folder

VOCAB = 261


@pytest.fixture
def folder(tmp_path: Path, student_folder: Path) -> Path:
    """A copy that may be damaged."""
    return Path(shutil.copytree(student_folder, tmp_path / "model"))


def test_half_a_sharded_download_is_named(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(InputError, match=r"model-00002-of-00002\.safetensors is missing"):
        weight_files(folder)


def test_weights_that_lack_a_tensor_are_named(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text()) | {"num_hidden_layers": 2}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match=r"weights are missing \(model.layers.1"):
        load_causal_lm(folder, dtype="fp32", device="cpu", trust_remote_code=False)


def test_the_digest_follows_the_content_and_is_remembered(folder: Path, tmp_path: Path) -> None:
    store = tmp_path / "cache" / "digests.json"
    first = weights_digest(folder, store)
    remembered = store.read_text()
    assert weights_digest(folder, store) == first and store.read_text() == remembered
    path = folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(1, 1))
    assert weights_digest(folder, store) != first


def test_what_changes_logits_changes_the_configurations_digest(folder: Path) -> None:
    path, first = folder / "config.json", config_digest(folder)
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"transformers_version": "0", "dtype": "float16", "use_cache": False}))
    assert config_digest(folder) == first
    path.write_text(json.dumps(config | {"rms_norm_eps": 0.5}))
    assert config_digest(folder) != first


def test_types_and_devices(folder: Path) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"dtype": "bfloat16"}))
    assert stored_dtype(folder) == "bf16"
    assert compute_dtype(folder, "auto", "cpu") == "fp32"
    assert compute_dtype(folder, "auto", "cuda:0") == "bf16"
    assert compute_dtype(folder, "fp16", "cpu") == "fp16"
    assert resolve_device("cpu") == "cpu"
    with pytest.raises(InputError, match="not on this machine"):
        resolve_device("cuda:99")
    with pytest.raises(InputError, match="is no device"):
        resolve_device("toaster")


# --- pipeline_config.json --------------------------------------------------------------------------------------------


def test_pipeline_config(tmp_path: Path) -> None:
    path = tmp_path / "pipeline_config.json"
    assert read_pipeline_config(tmp_path) == PipelineConfig(path)
    path.write_text('{"seq_chunk_len": 256, "batch_size": 4, "completion": true, "add_bos": false, "x": 1, "y": {}}')
    found = read_pipeline_config(tmp_path)
    assert found == PipelineConfig(path, 256, 4, True, False, ("x", "y"))
    path.write_text('{"seq_chunk_len": null, "batch_size": null, "completion": null, "add_bos": null}')
    assert read_pipeline_config(tmp_path) == PipelineConfig(path)


def test_what_is_not_followed_of_it_is_said(tmp_path: Path) -> None:
    path = tmp_path / "pipeline_config.json"
    found = PipelineConfig(path, add_bos=True, unknown=("x", "y"))
    known = f"{path}: not followed: x, y (known: seq_chunk_len, batch_size, completion, add_bos)"
    assert found.notes(True) == [known]
    assert (
        found.notes(False)[1] == f"{path}: add_bos true is not followed; the run's add_bos (false) holds for all models"
    )
    assert "(null: as tokenizer or template does)" in found.notes(None)[1]
    assert PipelineConfig(path).notes(True) == []


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"seq_chunk_len": 0}', "seq_chunk_len: a whole number from 1 on, not 0"),
        ('{"seq_chunk_len": true}', "seq_chunk_len: a whole number from 1 on, not True"),
        ('{"batch_size": 2.5}', "batch_size: a whole number from 1 on, not 2.5"),
        ('{"completion": "no"}', "completion: true or false, not 'no'"),
        ('{"add_bos": 1}', "add_bos: true or false, not 1"),
        ("[]", "not a JSON object"),
        ("{", "cannot be read as JSON"),
    ],
)
def test_a_wrong_pipeline_config_is_named(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "pipeline_config.json").write_text(content)
    with pytest.raises(InputError) as error:
        read_pipeline_config(tmp_path)
    assert "pipeline_config.json: " in str(error.value) and message in str(error.value)


# --- quantised ------------------------------------------------------------------------------------------------------


def edit_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"quant_method": "gptq", "bits": 4}, "gptq-4bit"),
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, "awq-4bit"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True, "load_in_4bit": False}, "bitsandbytes-8bit"),
        ({"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, "bitsandbytes-4bit-nf4"),
        ({"quant_method": "fp8"}, "fp8"),
    ],
)
def test_the_quantisation_is_described(folder: Path, settings: dict[str, Any], name: str) -> None:
    assert quantisation(folder) == "none"
    edit_config(folder, quantization_config=settings)
    assert quantisation(folder) == name
    assert weight_files(folder) and loaded_bytes(folder, "fp32") == (folder / "model.safetensors").stat().st_size
    edit_config(folder, quantization_config="4 bit")
    with pytest.raises(InputError, match="quantization_config: a JSON object"):
        quantisation(folder)


@pytest.mark.parametrize(("method", "library"), [("gptq", "optimum gptqmodel"), ("awq", "gptqmodel"), ("hqq", "hqq")])
def test_an_absent_library_is_named(folder: Path, method: str, library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    edit_config(folder, quantization_config={"quant_method": method, "bits": 4})
    monkeypatch.setattr("distill.models.quantised.find_spec", lambda name: None)
    with pytest.raises(InputError, match=f"its weights are {method}-4bit; that needs: pip install {library}$"):
        load(folder, quantised=True)
    with pytest.raises(InputError, match=r"are quantised .* not for a student"):
        load(folder, quantised=False)


def load(folder: Path, *, quantised: bool) -> object:
    return load_causal_lm(folder, dtype="fp32", device="cpu", trust_remote_code=False, quantised=quantised)


def all_logprobs(folder: Path) -> Records:
    spec = TeacherSpec(folder, "fp32", "cpu", vocab_size=VOCAB, top_k=VOCAB, trust_remote_code=False)
    teacher = Teacher(spec)
    assert not teacher.notes
    return concat(teacher.records(make_samples(4, length=24)))


@pytest.fixture(scope="module")
def wide_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Wide enough for blocks of 64 weights."""
    return make_model_folder(tmp_path_factory.mktemp("models") / "wide", seed=3, hidden=64, layers=2)


@pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="needs bitsandbytes")
@pytest.mark.parametrize(("bits", "error"), [(4, 1.0), (8, 0.2)])
def test_a_teacher_of_bitsandbytes_on_the_cpu(
    wide_folder: Path, tmp_path: Path, bits: int, error: float, capfd: pytest.CaptureFixture[str]
) -> None:
    from transformers import BitsAndBytesConfig

    settings = BitsAndBytesConfig(
        load_in_4bit=bits == 4, load_in_8bit=bits == 8, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32
    )
    packed = AutoModelForCausalLM.from_pretrained(wide_folder, quantization_config=settings, device_map={"": "cpu"})
    packed.save_pretrained(tmp_path / "packed")
    capfd.readouterr()
    assert quantisation(tmp_path / "packed").startswith(f"bitsandbytes-{bits}bit")
    assert loaded_bytes(tmp_path / "packed", "fp32") < loaded_bytes(wide_folder, "fp32")
    got, expected = all_logprobs(tmp_path / "packed"), all_logprobs(wide_folder)
    difference = np.abs(got.label_logprobs - expected.label_logprobs).mean()
    assert 1e-4 < difference < error
    assert capfd.readouterr().err == "", "no library talks to the user"


# --- GGUF -----------------------------------------------------------------------------------------------------------


def write_gguf(model_folder: Path, path: Path) -> None:
    """A Llama as llama.cpp's converter writes it: rotary halves interleaved, float32."""
    from gguf import GGUFWriter

    model = LlamaForCausalLM.from_pretrained(model_folder)
    config = model.config
    writer = GGUFWriter(path, "llama")
    writer.add_name("toy")
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.head_dim)
    names = {
        "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    }  # fmt: skip
    for name, tensor in model.state_dict().items():
        array = tensor.numpy()
        part = name.removeprefix("model.").removesuffix(".weight")
        if part.startswith("layers."):
            _, number, inside = part.split(".", 2)
            if inside in ("self_attn.q_proj", "self_attn.k_proj"):
                heads = config.num_attention_heads
                array = array.reshape(heads, 2, -1, array.shape[1]).swapaxes(1, 2).reshape(array.shape)
            writer.add_tensor(f"blk.{number}.{names[inside]}.weight", np.ascontiguousarray(array))
        elif part in ("embed_tokens", "norm"):
            writer.add_tensor({"embed_tokens": "token_embd", "norm": "output_norm"}[part] + ".weight", array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def gguf_folder(wide_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("gguf")
    folder = tmp_path_factory.mktemp("packed") / "toy-gguf"
    folder.mkdir()
    write_gguf(wide_folder, folder / "toy.gguf")
    return folder


def test_a_gguf_teacher_is_the_model_that_it_was_made_from(
    gguf_folder: Path, wide_folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert weight_files(gguf_folder) == [gguf_folder / "toy.gguf"]
    assert quantisation(gguf_folder) == "gguf" and stored_dtype(gguf_folder) == "bf16"
    description = read_model_config(gguf_folder)
    assert (description["vocab_size"], description["max_position_embeddings"]) == (VOCAB, 512)
    parameters = sum(tensor.numel() for tensor in LlamaForCausalLM.from_pretrained(wide_folder).parameters())
    assert loaded_bytes(gguf_folder, "bf16") == 2 * parameters
    capfd.readouterr()
    got, expected = all_logprobs(gguf_folder), all_logprobs(wide_folder)
    assert np.allclose(got.label_logprobs, expected.label_logprobs, atol=1e-4)
    assert np.allclose(got.entropies, expected.entropies, atol=1e-4)
    assert capfd.readouterr().err == "", "no library talks to the user"


def test_gguf_folders_that_leave_questions(gguf_folder: Path, wide_folder: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(gguf_folder, tmp_path / "two"))
    shutil.copy(folder / "toy.gguf", folder / "more.gguf")
    with pytest.raises(InputError, match=r"two: 2 \.gguf files \(more\.gguf, toy\.gguf\); leave one"):
        weight_files(folder)
    both = Path(shutil.copytree(wide_folder, tmp_path / "both"))
    shutil.copy(gguf_folder / "toy.gguf", both)
    assert gguf_file(both) is None and quantisation(both) == "none", "ordinary weights are taken first"


def test_half_a_gguf_download_is_an_error_of_one_line(gguf_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "half"
    folder.mkdir()
    data = (gguf_folder / "toy.gguf").read_bytes()
    for size in (0, 3, 4, 100, 1000, len(data) // 2, len(data) - 64):
        (folder / "toy.gguf").write_bytes(data[:size])
        with pytest.raises(InputError) as error:
            load(folder, quantised=True)
        assert str(error.value).startswith(str(folder)) and "\n" not in str(error.value)
    (folder / "toy.gguf").write_bytes(b"<html>" + data)
    with pytest.raises(InputError, match="not a GGUF file; complete the download"):
        weight_files(folder)


def test_the_digest_of_a_gguf_follows_its_content(gguf_folder: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(gguf_folder, tmp_path / "copy"))
    first = weights_digest(folder, tmp_path / "digests.json")
    data = bytearray((folder / "toy.gguf").read_bytes())
    data[-1] ^= 1
    (folder / "toy.gguf").write_bytes(data)
    assert weights_digest(folder, tmp_path / "digests.json") != first
    assert config_digest(folder) == config_digest(gguf_folder)


# --- devices --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "max_memory", "expected"),
    [
        (None, {}, {}),
        (None, {0: 9}, {}),
        (None, {0: 9, 2: 7}, {"device_map": "auto", "max_memory": {0: 9, 2: 7}}),
        ({"load_in_8bit": True}, {1: 9}, {"device_map": {"": "cuda:1"}}),
        ({"load_in_8bit": True}, {0: 9, 2: 7}, {"device_map": "auto", "max_memory": {0: 9, 2: 7}}),
    ],
)
def test_what_transformers_is_told_of_devices(
    folder: Path,
    settings: dict[str, bool] | None,
    max_memory: dict[int, int],
    expected: dict[str, object],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Made-up GPUs: the model is not really loaded."""
    if settings:
        edit_config(folder, quantization_config=settings)
    told: dict[str, object] = {}

    class Model:
        def to(self, device: str) -> "Model":
            told["moved"] = device
            return self

        def eval(self) -> "Model":
            return self

    def from_pretrained(path: Path, **options: object) -> tuple[Model, dict[str, list[str]]]:
        told.update({name: options[name] for name in ("device_map", "max_memory") if name in options})
        return Model(), {"missing_keys": []}

    monkeypatch.setattr("transformers.AutoModelForCausalLM", SimpleNamespace(from_pretrained=from_pretrained))
    monkeypatch.setattr("distill.models.load.require_library", lambda *_: None)
    load_causal_lm(
        folder, dtype="fp32", device="cuda:1", trust_remote_code=False, quantised=True, max_memory=max_memory
    )
    assert told == (expected or {"moved": "cuda:1"})


def test_a_model_spread_by_accelerate_gives_the_same_records(
    wide_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two "devices" that both are the CPU: hooks move what passes between them."""
    from accelerate import dispatch_model

    def spread(folder: Path, **options: object) -> object:
        model = LlamaForCausalLM.from_pretrained(folder).eval()
        places = {"model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.layers.1": "disk", "model.norm": "cpu"}
        places |= {"model.rotary_emb": "cpu", "lm_head": "cpu"}
        return dispatch_model(model, places, main_device="cpu", offload_dir=str(folder / "offload"))

    expected = all_logprobs(wide_folder)
    monkeypatch.setattr("distill.teacher.load_causal_lm", spread)
    got = all_logprobs(wide_folder)
    assert np.allclose(got.label_logprobs, expected.label_logprobs, atol=1e-5)
