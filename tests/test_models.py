"""Model folders: what is missing is named, and digests follow the content."""

import json
import os
import shutil
from pathlib import Path

import pytest

from distill.errors import InputError
from distill.models import (
    compute_dtype,
    config_digest,
    load_causal_lm,
    resolve_device,
    stored_dtype,
    weight_files,
    weights_digest,
)


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


def test_a_quantised_model_is_refused_by_name(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text()) | {"quantization_config": {"quant_method": "gptq"}}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match="quantised models are not available yet"):
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
