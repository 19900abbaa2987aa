"""New students: layers and width kept of a model, or an architecture with random weights.

``init_student`` writes one where the user wants it; ``student_folder`` finds the student of a run, and makes it under
the cache folder where ``student_init`` asks for a new one: in a folder named by what it is made of, so that the next
start finds the same weights.
"""

import difflib
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from distill.config import Config
from distill.errors import InputError, machine_failed
from distill.files import os_errors, remove_folder
from distill.models import (
    config_digest,
    layer_stack,
    load_causal_lm,
    quiet_transformers,
    read_model_config,
    saved_folder,
    stored_dtype,
    torch_dtype,
    weight_files,
    weights_digest,
)
from distill.tokenizer import load_tokenizer, save_tokenizer

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

# What is said of a size, and transformers' common name of it.
_SIZES = {
    "layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "intermediate": "intermediate_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
}
_TOKENIZER_FILES = ("tokenizer*", "special_tokens_map.json", "*.jinja", "*.model", "vocab*", "merges.txt", "*.tiktoken")
# All that a student needs of a model's repository.
_HUB_FILES = ["*.safetensors", "*.json", *_TOKENIZER_FILES]
_DIGITS = 12
# What a description of no possible model makes transformers raise.
_BAD_DESCRIPTION = (ValueError, LookupError, TypeError, AttributeError, RuntimeError, ArithmeticError)


# -- a run's student -------------------------------------------------------------------------------------------------


def student_name(config: Config) -> str:
    """What a run's student is called, in folders and messages."""
    init = config.paths.student_init
    if init is None:
        return Path(config.paths.student_path or "student").name
    source = init["from"] if "from" in init else init["config"]
    stem = Path(source).name if isinstance(source, str) else str(source.get("model_type", "student"))
    sizes = "".join(f"-{init[name]}{name}" for name in _SIZES if name in init)
    return f"{stem}{sizes or '-new'}"


def student_folder(config: Config) -> Path:
    """The folder of a run's student: that of ``student_path``, a model of the hub, or one made for ``student_init``.

    Nothing is downloaded without ``allow_downloads``. Raises InputError naming the key if there is no student.
    """
    if config.paths.student_init is not None:
        return _made_student(config, config.paths.student_init)
    path = config.paths.student_path
    if not path:
        raise InputError("student_path: not given; set it in the configuration file or with --student_path")
    if Path(path).is_absolute() or Path(path).exists():
        return Path(path)
    return _hub_folder(path, allow_downloads=config.pipeline.allow_downloads)


def _hub_folder(model_id: str, *, allow_downloads: bool) -> Path:
    """The local copy of a model ``owner/name`` of the Hugging Face hub."""
    import httpx
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model_id, local_files_only=not allow_downloads, allow_patterns=_HUB_FILES))
    except (LocalEntryNotFoundError, HfHubHTTPError, HFValidationError, OSError, httpx.HTTPError) as error:
        if machine_failed(error):
            raise
        way_out = "is the name right, and the network there?" if allow_downloads else "set allow_downloads to fetch it"
        raise InputError(
            f"student_path: {model_id}: no such folder, nor a model in the hub's cache; {way_out}"
        ) from error


def _made_student(config: Config, init: Mapping[str, Any]) -> Path:
    cache = Path(config.paths.cache_folder)
    folder = cache / "student" / "made" / f"{student_name(config)}-{_digest(config, init)}"
    if folder.is_dir():
        try:
            weight_files(folder)
            return folder
        except InputError:  # damaged since; the same is made again
            remove_folder(folder)
    sizes = {name: init[name] for name in _SIZES if name in init}
    if "from" in init:
        keep_part(Path(init["from"]), folder, sizes, said="student_init")
    else:
        _make_random(init, folder, sizes, seed=config.pipeline.seed)
    return folder


def _digest(config: Config, init: Mapping[str, Any]) -> str:
    """Of all that decides the weights of a made student, and its tokenizer."""
    said: dict[str, Any] = dict(init)
    if "from" in init:
        folder = Path(init["from"])
        said["from"] = [weights_digest(folder, Path(config.paths.cache_folder) / "digests.json"), config_digest(folder)]
    else:
        said["seed"] = config.pipeline.seed
        if isinstance(init["config"], str):
            said["config"] = config_digest(Path(init["config"]))
    digest = hashlib.sha256(json.dumps(said, sort_keys=True).encode())
    tokenizer = _tokenizer_folder(init)
    for path in sorted(path for pattern in _TOKENIZER_FILES for path in tokenizer.glob(pattern)):
        with os_errors("read", path):
            digest.update(f"{path.name}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:_DIGITS]


def _tokenizer_folder(init: Mapping[str, Any]) -> Path:
    return Path(init.get("tokenizer") or init.get("from") or init["config"])


# -- random weights --------------------------------------------------------------------------------------------------


def _make_random(init: Mapping[str, Any], folder: Path, sizes: Mapping[str, int], seed: int) -> None:
    """Write a student of an architecture with the random weights that ``seed`` gives it."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig, AutoModelForCausalLM

    quiet_transformers()
    tokenizer = load_tokenizer(_tokenizer_folder(init), trust_remote_code=False)
    given = init["config"]
    wanted = read_model_config(Path(given)) if isinstance(given, str) else dict(given)
    if not isinstance(given, str):
        ids = {f"{role}_token_id": getattr(tokenizer, f"{role}_token_id") for role in ("bos", "eos", "pad")}
        wanted = {"vocab_size": len(tokenizer)} | ids | wanted
    elif "tokenizer" in init:
        wanted["vocab_size"] = len(tokenizer)
    try:
        described = dict(wanted)
        model_type = described.pop("model_type", "")
        if not isinstance(given, str):
            _check_described(model_type, described)
        config = AutoConfig.for_model(model_type, **described)
        config = _resized(config, sizes)
        with torch.random.fork_rng(range(torch.cuda.device_count())):
            torch.manual_seed(seed)
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        model.eval()(torch.arange(4)[None] % config.vocab_size)  # sizes that don't fit together fail here
    except (*_BAD_DESCRIPTION, StrictDataclassError) as error:
        raise InputError(f"student_init: no such model can be made: {' '.join(str(error).split())[:300]}") from error
    with saved_folder(folder) as temporary:
        model.save_pretrained(temporary)
        save_tokenizer(tokenizer, temporary)


def _resized(config: "PretrainedConfig", sizes: Mapping[str, int]) -> "PretrainedConfig":
    """``config`` with other ``sizes``; where the width changes, the size of a head follows it unless heads do."""
    changed = config.to_dict()
    if "layers" in sizes:
        changed |= _with_layers(config, [index % config.num_hidden_layers for index in range(sizes["layers"])])
    for name in sizes.keys() - {"layers"}:
        changed[_own_name(config, _SIZES[name], f"student_init: {name}")] = sizes[name]
    if "heads" in sizes and "kv_heads" not in sizes:
        changed.pop("num_key_value_heads", None)
    if sizes.keys() & {"hidden", "heads"}:
        changed.pop("head_dim", None)  # the width over the heads
    return type(config).from_dict(changed)


def _own_name(config: "PretrainedConfig", name: str, said: str) -> str:
    """What an architecture calls a size itself."""
    own = config.attribute_map.get(name, name)
    if not hasattr(config, own):
        raise InputError(f"{said}: a {config.model_type} has no {name}")
    return own


def _check_described(model_type: Any, described: Mapping[str, Any]) -> None:
    """Raises InputError for an unknown architecture, and for what it has no word for: transformers would ignore it."""
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    known = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    if model_type not in known:
        near = difflib.get_close_matches(str(model_type), known, n=3) or ["llama", "gpt2", "qwen3"]
        raise InputError(
            f"student_init: model_type {model_type!r} is no causal language model of transformers; did you mean"
            f" {' or '.join(near)}?"
        )
    config = AutoConfig.for_model(model_type)
    words = {*config.to_dict(), *config.attribute_map, *config.attribute_map.values()}
    for name in described.keys() - words:
        near = difflib.get_close_matches(name, sorted(words), n=3)
        hint = f"; did you mean {' or '.join(near)}?" if near else ""
        raise InputError(f"student_init: a {model_type} configuration has no {name!r}{hint}")


# -- a part of a model -----------------------------------------------------------------------------------------------


def kept_layers(layers: int, keep: int) -> list[int]:
    """Indices of ``keep`` evenly spaced layers out of ``layers``, the first and the last always among them."""
    if keep == 1:
        return [0]
    return [round(index * (layers - 1) / (keep - 1)) for index in range(keep)]


def init_student(teacher_dir: Path, layers: int, out_dir: Path) -> None:
    """Write a student that is the teacher with ``layers`` of its layers, all else kept.

    Raises InputError if the teacher has fewer layers, keeps them in an unknown way, or ``out_dir`` exists.
    """
    if out_dir.exists():
        raise InputError(f"{out_dir}: exists; name a new folder with --out")
    keep_part(teacher_dir, out_dir, {"layers": layers}, said="--layers")


def keep_part(source: Path, folder: Path, sizes: Mapping[str, int], *, said: str) -> None:
    """Write a model that has ``layers`` of the source's layers, and ``hidden`` and ``intermediate`` of its width.

    Layers are spaced evenly. Of the width the channels with the largest embeddings stay, of what is between the two
    halves of a feed-forward block those with the largest outgoing weights; heads stay as they are. InputError that
    begins with ``said`` or the source for what can't be had.
    """
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoModelForCausalLM

    quiet_transformers()
    weight_files(source)
    dtype = stored_dtype(source)
    model = load_causal_lm(source, dtype=dtype, device="cpu", trust_remote_code=False)
    tokenizer = load_tokenizer(source, trust_remote_code=False)
    config = model.config
    _check_sizes(config, sizes, said, source)
    count = config.num_hidden_layers
    layers = kept_layers(count, sizes.get("layers", count))
    changed = _with_layers(config, layers)
    narrower = sizes.keys() & {"hidden", "intermediate"}
    changed |= {_own_name(config, _SIZES[name], said): sizes[name] for name in narrower}
    if narrower and getattr(config, "num_attention_heads", None):
        changed["head_dim"] = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    try:
        smaller = AutoModelForCausalLM.from_config(type(config).from_dict(changed), dtype=torch_dtype(dtype))
    except (*_BAD_DESCRIPTION, StrictDataclassError) as error:
        raise InputError(f"{said}: no such part can be made: {' '.join(str(error).split())[:300]}") from error
    weights = _kept_weights(model, layer_stack(model, source), layers)
    smaller.load_state_dict(_narrowed(weights, smaller, model, said) if narrower else weights)
    with saved_folder(folder) as temporary:
        smaller.save_pretrained(temporary)
        save_tokenizer(tokenizer, temporary)


def _check_sizes(config: "PretrainedConfig", sizes: Mapping[str, int], said: str, source: Path) -> None:
    for name, size in sizes.items():
        key = said if said.startswith("--") else f"{said}: {name}"
        if name in ("heads", "kv_heads"):
            raise InputError(f"{key}: heads are kept as they are; leave it out")
        largest = getattr(config, _own_name(config, _SIZES[name], key))
        if size > largest:
            what = "layers" if name == "layers" else f"{_SIZES[name]}"
            raise InputError(f"{key}: {size}, but {source} has {largest} {what}; use 1 to {largest}")


def _kept_weights(model: "PreTrainedModel", stack: str, layers: list[int]) -> dict[str, Tensor]:
    """The model's weights under the names that they have with these layers alone."""
    renamed = {f"{stack}.{old}.": f"{stack}.{new}." for new, old in enumerate(layers)}
    weights = {}
    for name, tensor in model.state_dict().items():
        prefix = next((prefix for prefix in renamed if name.startswith(prefix)), None)
        if prefix is not None:
            weights[renamed[prefix] + name.removeprefix(prefix)] = tensor
        elif not name.startswith(f"{stack}."):
            weights[name] = tensor
    return weights


def _narrowed(
    weights: Mapping[str, Tensor], smaller: "PreTrainedModel", source: "PreTrainedModel", said: str
) -> dict[str, Tensor]:
    """``weights`` cut to the shapes of ``smaller``, the same channels of the width everywhere.

    Which dimension is which is told by its size before and after.
    """
    before, after = source.config, smaller.config
    inner = _SIZES["intermediate"]
    hidden: tuple[int, int] = (before.hidden_size, after.hidden_size)
    between: tuple[int, int] = (getattr(before, inner, 0), getattr(after, inner, 0))
    embedding: Any = source.get_input_embeddings()
    if hidden == between or embedding.weight.shape[1] != hidden[0]:
        raise InputError(f"{said}: cannot tell the width of this architecture from its other sizes; keep layers alone")
    width = _strongest(embedding.weight.detach(), hidden[1])
    shapes = {name: tensor.shape for name, tensor in smaller.state_dict().items()}
    # Of each feed-forward block, told by its name.
    middles = {
        _block(name): _strongest(tensor, between[1])
        for name, tensor in weights.items()
        if tensor.dim() == 2 and tensor.shape == (hidden[0], between[0])
    }
    narrowed = {}
    for name, tensor in weights.items():
        for dim, size in enumerate(shapes[name]):
            change = (tensor.shape[dim], size)
            if change == hidden and hidden[0] != hidden[1]:
                tensor = tensor.index_select(dim, width)  # noqa: PLW2901
            elif change == between and _block(name) in middles:
                tensor = tensor.index_select(dim, middles[_block(name)])  # noqa: PLW2901
        if tensor.shape != shapes[name]:
            raise InputError(f"{said}: this architecture cannot be made narrower ({name}); keep layers alone")
        narrowed[name] = tensor
    return narrowed


def _strongest(weight: Tensor, count: int) -> Tensor:
    """Ascending indices [count] of the columns of ``weight`` [n, m] with the largest norm."""
    return weight.float().square().sum(0).topk(count).indices.sort().values


def _block(name: str) -> str:
    return name.rsplit(".", 2)[0]


def _with_layers(config: "PretrainedConfig", keep: list[int]) -> dict[str, Any]:
    """The configuration with these layers; every list that has one value a layer (``layer_types``) follows."""
    count = config.num_hidden_layers
    per_layer = {
        name: [value[index] for index in keep]
        for name, value in config.to_dict().items()
        if isinstance(value, list) and len(value) == count and name != "architectures"
    }
    name_of_count = config.attribute_map.get("num_hidden_layers", "num_hidden_layers")
    return config.to_dict() | per_layer | {name_of_count: len(keep)}
