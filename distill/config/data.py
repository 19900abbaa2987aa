"""``data``: sources and chains of transforms, as the keys that they come to.

A chain says what is done with the text before it is trained on; here each of its steps is what some key says. So what
it means for the cache is what those keys mean: chunking decides what the samples are, order and batches decide nothing.
Sources that loop or mix shape the training alone: the teacher reads each sample once.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from distill.config.keys import show, suggest
from distill.config.root import Setting
from distill.config.spelling import Trail
from distill.config.tree import Entry, as_setting, nested
from distill.errors import InputError

_PRESETS = {"preset_slimpajama6b": "DKYoon/SlimPajama-6B"}
_SETS = ("train_datasets", "eval_datasets", "scratch")
# By name, the options of each source and transform.
_SOURCES: dict[str, tuple[str, ...]] = {
    "files": ("path", "paths"),
    "hub": ("id", "split"),
    "loop": ("inner",),
    "mix": ("sources", "weights"),
    **dict.fromkeys(_PRESETS, ("split",)),
}
_TRANSFORMS: dict[str, tuple[str, ...]] = {
    "compose": ("transforms",),
    "tokenize": ("tokenizer_config",),
    "chunk_tokens": ("max_seq_len",),
    "shuffle": ("buffer_size", "seed"),
    "flat_batcher": ("batch_size", "seq_len"),
    "prefetch": (),
    "to_device": ("device",),
}


@dataclass
class _Reading:
    """One dataset as it is read: its texts, the keys that its chain comes to, and whether it is repeated."""

    said: str
    paths: list[str] = field(default_factory=list)
    keys: dict[str, Any] = field(default_factory=dict)
    loops: bool = False

    def key(self, name: str, value: Any) -> None:
        """Note that the chain sets a key. InputError if it sets it twice, to different values."""
        if self.keys.setdefault(name, value) != value:
            raise InputError(
                f"{self.said}: {name} is {show(self.keys[name])} in one transform, {show(value)} in another"
            )

    def source(self, given: Any) -> None:
        """Read a source: a path or the like, or a component."""
        if isinstance(given, str):
            self.paths.append(given)
            return
        name, options = self._component(given, _SOURCES, "source")
        if name == "files":
            paths = options.get("paths", options.get("path"))
            for path in paths if isinstance(paths, list) else [paths]:
                if not isinstance(path, str):
                    raise InputError(f"{self.said}: source files needs path or paths, not {show(paths)}")
                self.paths.append(path)
        elif name == "loop":
            self.loops = True
            self.source(options.get("inner"))
        elif name == "mix":
            self._mix(options.get("sources"), options.get("weights"))
        else:
            split = options.get("split")
            self.paths.append(f"{_PRESETS.get(name) or options.get('id')}{f':{split}' if split else ''}")

    def transform(self, given: Any) -> None:
        """Read a transform, or a chain of them."""
        if given is None or isinstance(given, list):
            for step in given or ():
                self.transform(step)
            return
        name, options = self._component(given, _TRANSFORMS, "transform")
        if name == "compose":
            self.transform(options.get("transforms"))
        elif name == "tokenize" and options.get("tokenizer_config") is not None:
            self.key("tokenizer_config", options["tokenizer_config"])
        elif name == "chunk_tokens":
            self.key("long_samples", "chunk")
            self._copy(options, {"max_seq_len": "context_len"})
        elif name == "shuffle":
            self.key("data_order", "shuffle")
            self._copy(options, {"seed": "seed"})
        elif name == "flat_batcher":
            self.key("packing", True)
            self._copy(options, {"batch_size": "batch_size", "seq_len": "context_len"})
        elif name == "to_device":
            self._copy(options, {"device": "device"})

    def _mix(self, sources: Any, weights: Any) -> None:
        if not isinstance(sources, list) or not sources:
            raise InputError(f"{self.said}: source mix needs sources, a list of them, not {show(sources)}")
        if weights is not None and len(set(map(str, weights if isinstance(weights, list) else ["?"]))) != 1:
            raise InputError(f"{self.said}: weights of a mix are not available yet (available: all alike)")
        for source in sources:
            self.source(source)

    def _copy(self, options: Mapping[str, Any], keys: Mapping[str, str]) -> None:
        for option, name in keys.items():
            if options.get(option) is not None:
                self.key(name, options[option])

    def _component(self, given: Any, known: Mapping[str, tuple[str, ...]], kind: str) -> tuple[str, dict[str, Any]]:
        """The name and the options of a component; a name alone is short for one without options."""
        given = {"_name": given} if isinstance(given, str) else given
        name = given.get("_name") if isinstance(given, dict) else None
        if not isinstance(name, str) or name not in known:
            names = ", ".join(known)
            raise InputError(f"{self.said}: {show(name or given)} is no {kind} ({names}){suggest(str(name), known)}")
        for option in given.keys() - {"_name", *known[name]}:
            options = ", ".join(known[name]) or "none"
            raise InputError(f"{self.said}: {kind} {name} has no option {option!r} (options: {options})")
        return name, {option: value for option, value in given.items() if option != "_name"}


def data_settings(entries: Sequence[Entry], by_trail: Mapping[Trail, Entry]) -> Iterator[Setting]:
    """The keys that the group ``data`` comes to; one that is said in a later file, or on the command line, counts more.

    InputError for what no key can say.
    """
    if not entries:
        return
    data = nested(entries)["data"]
    for name in data:
        if name not in _SETS:
            entry = _entry(entries, ("data", name))
            raise InputError(f"{entry.said}: unknown key{suggest(name, _SETS)} (known: {', '.join(_SETS)})")
    train = _read(data.get("train_datasets"), entries, "train_datasets")
    held = _read(data.get("eval_datasets"), entries, "eval_datasets")
    for reading, path_key in ((train, "dataset_path"), (held, "validation_dataset_path")):
        if reading.paths:
            reading.keys[path_key] = reading.paths if len(reading.paths) > 1 else reading.paths[0]
    for name in ("context_len", "long_samples", "tokenizer_config"):
        if name in held.keys and held.keys[name] != train.keys.get(name, held.keys[name]):
            raise InputError(
                f"{held.said}: {name} is {show(held.keys[name])}, but {show(train.keys[name])} in training"
            )
    if train.loops and by_trail.get(("max_steps",)) is None:
        raise InputError(f"{train.said}: a source that loops needs optimization.iterations, the steps to end after")
    places = [("train_datasets", train, train.keys)]
    places.append(("eval_datasets", held, {name: held.keys[name] for name in held.keys if name not in train.keys}))
    for place, reading, keys in places:
        for name, value in keys.items():
            if place == "eval_datasets" and name in ("batch_size", "packing", "data_order", "seed"):
                continue  # validation has batches of its own
            setting = _setting(name, value, _entry(entries, ("data", place)), by_trail.get((name,)), reading.said)
            if setting is not None:
                yield setting


def _setting(name: str, value: Any, entry: Entry, explicit: Entry | None, said: str) -> Setting | None:
    if explicit is not None and explicit.value is not None and explicit.value != value:
        if explicit.layer == entry.layer:
            raise InputError(f"{said}: {name} is {show(value)} here, but {show(explicit.value)} in {explicit.origin}")
        if explicit.layer > entry.layer:
            return None
    return replace(as_setting(entry), key=name, value=value, said=f"{said}: {name}")


def _read(given: Any, entries: Sequence[Entry], name: str) -> _Reading:
    """Read a dataset, or several by names of their own."""
    if given is None:
        return _Reading("")
    reading = _Reading(_entry(entries, ("data", name)).said)
    if not isinstance(given, dict):
        raise InputError(f"{reading.said}: must be an object of source and transform, not {show(given)}")
    for dataset in [given] if "source" in given else given.values():
        if not isinstance(dataset, dict) or "source" not in dataset:
            raise InputError(f"{reading.said}: a dataset is an object of source and transform, not {show(dataset)}")
        for part in dataset.keys() - {"source", "transform"}:
            raise InputError(f"{reading.said}: a dataset has no {part!r}, only source and transform")
        reading.source(dataset["source"])
        reading.transform(dataset.get("transform"))
    return reading


def _entry(entries: Sequence[Entry], trail: Trail) -> Entry:
    """The first entry at or below ``trail``, which stands for all of it in messages."""
    return next(entry for entry in entries if entry.trail[: len(trail)] == trail)
