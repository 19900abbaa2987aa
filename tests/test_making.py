"""New students: layers and width of a model, random ones, and those of the hub."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from distill.config import Config
from distill.errors import InputError
from distill.making import init_student, kept_layers, student_folder, student_name
from tests.architectures import ARCHITECTURES, make
from tests.jobs import distill, same_weights, write_config
from tests.toys import make_model_folder, make_tokenizer


@pytest.fixture
def teacher(tmp_path: Path) -> Path:
    return make_model_folder(tmp_path / "teacher", seed=0, hidden=16, layers=4)


def made(tmp_path: Path, init: dict[str, Any], **more: Any) -> Path:
    return student_folder(Config.from_flat({"student_init": init, "cache_folder": tmp_path / "cache"} | more))


def load(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder)


def test_kept_layers_are_spaced_evenly() -> None:
    assert kept_layers(30, 6) == [0, 6, 12, 17, 23, 29]
    assert kept_layers(5, 5) == [0, 1, 2, 3, 4]
    assert kept_layers(7, 2) == [0, 6]
    assert kept_layers(7, 1) == [0]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_student_of_all_layers_is_its_teacher_and_fewer_are_chosen(name: str, tmp_path: Path) -> None:
    teacher = make(name)
    teacher.save_pretrained(tmp_path / "teacher")
    make_tokenizer().save_pretrained(tmp_path / "teacher")
    ids = torch.arange(12)[None]
    init_student(tmp_path / "teacher", 4, tmp_path / "all")
    same = AutoModelForCausalLM.from_pretrained(tmp_path / "all")
    assert torch.allclose(same(ids).logits, teacher(ids).logits, atol=1e-5)
    init_student(tmp_path / "teacher", 2, tmp_path / "two")
    small = AutoModelForCausalLM.from_pretrained(tmp_path / "two")
    assert small.config.num_hidden_layers == 2
    assert torch.isfinite(small(ids).logits).all()
    assert len(json.loads((tmp_path / "two" / "config.json").read_text()).get("layer_types") or [0, 0]) == 2


def test_init_student_refuses_what_it_cannot_do(tmp_path: Path) -> None:
    teacher = make_model_folder(tmp_path / "teacher", seed=0, hidden=16, layers=2)
    with pytest.raises(InputError, match=r"--layers: 3, but .* has 2 layers"):
        init_student(teacher, 3, tmp_path / "out")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()
    with pytest.raises(InputError, match="exists; name a new folder"):
        init_student(teacher, 1, tmp_path / "full")
    with pytest.raises(InputError, match="no such model folder"):
        init_student(tmp_path / "absent", 1, tmp_path / "out")


# -- student_init ------------------------------------------------------------------------------------------------------


def test_layers_kept_are_those_of_the_verb_and_a_second_start_finds_them(teacher: Path, tmp_path: Path) -> None:
    folder = made(tmp_path, {"from": str(teacher), "layers": 2})
    assert folder.parent == tmp_path / "cache" / "student" / "made" and folder.name.startswith("teacher-2layers-")
    init_student(teacher, 2, tmp_path / "verb")
    assert (folder / "model.safetensors").read_bytes() == (tmp_path / "verb" / "model.safetensors").read_bytes()
    stamp = (folder / "model.safetensors").stat().st_mtime_ns
    assert made(tmp_path, {"layers": 2, "from": str(teacher)}) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == stamp, "made again"


def test_another_source_size_or_tokenizer_is_another_student(teacher: Path, tmp_path: Path) -> None:
    first = made(tmp_path, {"from": str(teacher), "layers": 2})
    assert made(tmp_path, {"from": str(teacher), "layers": 3}) != first
    path = teacher / "tokenizer_config.json"
    path.write_text(path.read_text().replace("im_start", "im_begin"))
    second = made(tmp_path, {"from": str(teacher), "layers": 2})
    assert second != first
    make_model_folder(teacher, seed=1, hidden=16, layers=4)
    assert made(tmp_path, {"from": str(teacher), "layers": 2}) not in (first, second)


def test_width_keeps_the_strongest_channels_everywhere(teacher: Path, tmp_path: Path) -> None:
    narrow = load(made(tmp_path, {"from": str(teacher), "hidden": 12, "intermediate": 20, "layers": 4}))
    source = load(teacher)
    config = narrow.config
    assert (config.hidden_size, config.intermediate_size, config.head_dim) == (12, 20, 8)
    width = source.model.embed_tokens.weight.square().sum(0).topk(12).indices.sort().values
    middle = source.model.layers[1].mlp.down_proj.weight.square().sum(0).topk(20).indices.sort().values
    assert torch.equal(narrow.model.embed_tokens.weight, source.model.embed_tokens.weight[:, width])
    ours, theirs = narrow.model.layers[1].mlp, source.model.layers[1].mlp
    assert torch.equal(ours.down_proj.weight, theirs.down_proj.weight[width][:, middle])
    assert torch.equal(ours.gate_proj.weight, theirs.gate_proj.weight[middle][:, width])
    attention = narrow.model.layers[1].self_attn.o_proj.weight
    assert torch.equal(attention, source.model.layers[1].self_attn.o_proj.weight[width])
    assert narrow.lm_head.weight is narrow.model.embed_tokens.weight
    assert torch.isfinite(narrow(torch.arange(9)[None]).logits).all()


def test_full_width_is_the_model_itself(teacher: Path, tmp_path: Path) -> None:
    same = load(made(tmp_path, {"from": str(teacher), "hidden": 16, "intermediate": 32}))
    ids = torch.arange(9)[None]
    assert torch.equal(same(ids).logits, load(teacher)(ids).logits)


@pytest.mark.parametrize("name", ["mistral", "qwen2", "qwen3", "gemma2", "cohere", "gpt-neox", "phi"])
def test_width_of_many_architectures(name: str, tmp_path: Path) -> None:
    make(name).save_pretrained(tmp_path / "teacher")
    make_tokenizer().save_pretrained(tmp_path / "teacher")
    init = {"from": str(tmp_path / "teacher"), "hidden": 24, "layers": 2}
    try:
        narrow = load(made(tmp_path, init))
    except InputError as error:
        assert name in ("gpt-neox", "phi") and "cannot be made narrower" in str(error)
        return
    assert torch.isfinite(narrow(torch.arange(9)[None]).logits).all()


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        (
            {"model_type": "llama", "num_layers": 1},
            "a llama configuration has no 'num_layers'; did you mean .*num_hidden",
        ),
        ({"model_type": "llama", "hiden_size": 16}, "has no 'hiden_size'; did you mean hidden_size"),
        ({"model_type": "lama"}, "model_type 'lama' is no causal language model of transformers; did you mean llama"),
        ({}, "model_type '' is no causal language model"),
        ({"model_type": "vit"}, "model_type 'vit' is no causal language model"),
    ],
)
def test_words_that_an_architecture_does_not_know(
    config: dict[str, Any], problem: str, teacher: Path, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=problem):
        made(tmp_path, {"config": config, "tokenizer": str(teacher)})


def test_a_damaged_made_student_is_made_again(teacher: Path, tmp_path: Path) -> None:
    weights = made(tmp_path, {"from": str(teacher), "layers": 2}) / "model.safetensors"
    before = weights.read_bytes()
    weights.write_bytes(before[:100])
    assert made(tmp_path, {"from": str(teacher), "layers": 2}) == weights.parent
    assert weights.read_bytes() == before


@pytest.mark.parametrize(
    ("sizes", "problem"),
    [
        ({"layers": 5}, "student_init: layers: 5, but .* has 4 layers; use 1 to 4"),
        ({"hidden": 32}, "student_init: hidden: 32, but .* has 16 hidden_size"),
        ({"hidden": 15}, "student_init: no such part can be made"),
        ({"heads": 1}, "student_init: heads: heads are kept as they are"),
    ],
)
def test_what_the_source_has_not_is_refused(sizes: dict[str, int], problem: str, teacher: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=problem):
        made(tmp_path, {"from": str(teacher)} | sizes)
    assert not list((tmp_path / "cache" / "student").rglob("*.safetensors"))


def test_a_new_architecture_from_a_folder(teacher: Path, tmp_path: Path) -> None:
    init = {"config": str(teacher), "layers": 6, "hidden": 24, "heads": 3, "intermediate": 40}
    state = torch.get_rng_state()
    folder = made(tmp_path, init)
    assert torch.equal(torch.get_rng_state(), state)
    model = load(folder)
    config = model.config
    assert (config.num_hidden_layers, config.hidden_size, config.num_attention_heads) == (6, 24, 3)
    assert (config.num_key_value_heads, config.head_dim, config.intermediate_size) == (3, 8, 40)
    assert config.vocab_size == 261 and config.tie_word_embeddings
    assert AutoTokenizer.from_pretrained(folder).chat_template == make_tokenizer().chat_template
    assert folder.name.startswith("teacher-6layers-24hidden-40intermediate-3heads-")


def test_a_new_architecture_from_its_description_and_seed(teacher: Path, tmp_path: Path) -> None:
    description = {"model_type": "qwen3", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
                   "num_key_value_heads": 1, "head_dim": 8, "intermediate_size": 24}  # fmt: skip
    init = {"config": description, "tokenizer": str(teacher)}
    folder = made(tmp_path, init)
    config = json.loads((folder / "config.json").read_text())
    assert config["model_type"] == "qwen3" and config["vocab_size"] == 261
    assert (config["bos_token_id"], config["eos_token_id"], config["pad_token_id"]) == (1, 2, 0)
    again = made(tmp_path / "elsewhere", init)
    other = made(tmp_path, init, seed=1)
    weights = [load_file(path / "model.safetensors")["model.embed_tokens.weight"] for path in (folder, again, other)]
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])
    assert other != folder, "another seed, another student"


@pytest.mark.parametrize(
    "change", [{"model_type": "lama"}, {"num_attention_heads": 3}, {"hidden_size": "wide"}, {"num_hidden_layers": None}]
)
def test_an_architecture_that_cannot_be_is_refused(change: dict[str, Any], teacher: Path, tmp_path: Path) -> None:
    description = {"model_type": "llama", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    with pytest.raises(InputError, match=r"^student_init: no such model can be made: [^\n]+$"):
        made(tmp_path, {"config": description | change, "tokenizer": str(teacher)})


def test_names_say_what_a_student_is() -> None:
    def name(**flat: Any) -> str:
        return student_name(Config.from_flat(flat))

    assert name(student_path="/models/small") == "small"
    assert name(student_path="owner/absent-model") == "absent-model"
    assert name(student_init={"from": "/m/big", "layers": 3}) == "big-3layers"
    assert name(student_init={"config": {"model_type": "llama"}, "tokenizer": "/m/t"}) == "llama-new"


# -- the hub -----------------------------------------------------------------------------------------------------------


def test_a_model_of_the_hub_comes_from_its_cache(
    teacher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No network: nothing is asked for without allow_downloads."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    config = Config.from_flat({"student_path": "someone/small"})
    with pytest.raises(InputError, match=r"student_path: someone/small: no such folder, .*set allow_downloads"):
        student_folder(config)
    snapshot = tmp_path / "hub" / "models--someone--small" / "snapshots" / ("0" * 40)
    snapshot.parent.mkdir(parents=True)
    teacher.rename(snapshot)
    (tmp_path / "hub" / "models--someone--small" / "refs").mkdir()
    (tmp_path / "hub" / "models--someone--small" / "refs" / "main").write_text("0" * 40)
    assert student_folder(config) == snapshot and student_name(config) == "small"


def test_a_student_has_to_be_given() -> None:
    with pytest.raises(InputError, match="student_path: not given"):
        student_folder(Config.from_flat({}))


# -- whole runs --------------------------------------------------------------------------------------------------------


def test_a_run_makes_its_student_and_finds_it_again(teacher_folder: Path, text_file: Path, tmp_path: Path) -> None:
    config = write_config(
        tmp_path, teacher_folder, teacher_folder, text_file, student_path=None, multi_gpu=True, num_epochs=1,
        student_init={"from": str(teacher_folder), "layers": 1}, max_memory={"7": "1GB", "cpu": "1GB"},
    )  # fmt: skip
    said = distill(config)
    name = f"{teacher_folder.name}-1layers"
    if not torch.cuda.is_available():
        assert "warning: max_memory: GPU 7 is not on this machine" in said.stderr
        assert "there is no GPU on this machine; the student is on the CPU" in said.stderr
    first = load(tmp_path / "cache" / "student" / "trained" / f"{name}_final")
    assert first.config.num_hidden_layers == 1
    assert "0 targets in 0 shards are to be collected" in distill(config, "plan").stdout
    distill(config, "train")
    again = load(tmp_path / "cache" / "student" / "trained" / f"{name}-2_final")
    assert same_weights(first.state_dict(), again.state_dict())
    assert len(list((tmp_path / "cache" / "student" / "made").iterdir())) == 1
