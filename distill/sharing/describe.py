"""What a cache is, and what it says of one sample, in lines for people. Text from a cache can't control a terminal."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from distill.cache import Admissions, Layer, ShardInfo, find_layers
from distill.errors import InputError
from distill.sharing.samples import nth_row, sample_at
from distill.types import Records, TokenizedSample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_CANDIDATES = 5
_LONGEST = 400


def describe_cache(dataset_folder: Path, admissions: Admissions) -> Iterator[str]:
    """A few lines for each layer of each split under ``dataset_folder``; a layer that can't be read is one line.

    Raises InputError if there is no layer at all.
    """
    folders = layer_folders(dataset_folder)
    if not folders:
        raise InputError(f"{dataset_folder}: no layer in it; give the folder that is the cache_folder")
    for folder in folders:
        yield f"{folder.parent.name}/{folder.name}"
        try:
            with Layer.load(folder, admissions) as layer:
                yield from (f"  {line}" for line in (*describe_layer(layer), *layer.notes))
        except InputError as error:
            yield f"  {error}"


def describe_layer(layer: Layer) -> Iterator[str]:
    """What it was made with, what it holds and what that takes on disk."""
    spec, total = layer.spec, totals(layer)
    yield f"teacher: {spec.teacher}, {spec.dtype}, quantisation {spec.quantisation}, weights {spec.weights[:12]}"
    yield f"records: {spec.mode}, K = {spec.top_k} of {spec.vocab_size:,} ids, {spec.cache_precision}"
    yield f"tokens: of the map {spec.token_map[:12]}"
    shards = f"{len(layer.shards):,} shard{'s' if len(layer.shards) != 1 else ''}"
    yield f"holds: {total.samples:,} samples, {total.tokens:,} tokens, {total.targets:,} targets in {shards}"
    size, targets = layer.bytes(), max(total.targets, 1)
    yield f"takes: {size:,} bytes on disk, {size / targets:.1f} a target; kept mass {total.kept_mass_sum / targets:.4f}"


def describe_sample(
    layer: Layer, number: int, tokenizer: "PreTrainedTokenizerBase", *, targets: int = 5
) -> Iterator[str]:
    """Sample ``number`` of a layer (from 0), decoded span by span, and the likeliest tokens at a few of its targets.

    Raises InputError if the layer has no such sample or the tokenizer fewer tokens than it.
    """
    reader, row = nth_row(layer, number)
    sample, records = sample_at(reader, row), reader.records(row)
    if layer.spec.vocab_size > len(tokenizer):
        raise InputError(
            f"{layer.folder}: its tokens are {layer.spec.vocab_size:,}, the tokenizer's {len(tokenizer):,}; "
            "give the tokenizer that it was collected with"
        )
    kind = "completion" if sample.is_completion else "conversation"
    yield (
        f"sample {number} ({reader.path.name}, row {row}): a {kind} of {len(sample.token_ids):,} tokens, "
        f"{len(sample.spans)} spans, {len(sample.targets):,} targets"
    )
    yield from _parts(sample, tokenizer)
    chosen = np.unique(np.linspace(0, len(sample.targets) - 1, targets).round().astype(int)) if targets > 0 else ()
    for target in chosen:
        yield from _target(sample, records, int(target), tokenizer)


def totals(layer: Layer) -> ShardInfo:
    """The sums over all shards of a layer."""
    infos = layer.shards.values()
    return ShardInfo(
        name="",
        sha256="",
        bytes=sum(info.bytes for info in infos),
        samples=sum(info.samples for info in infos),
        tokens=sum(info.tokens for info in infos),
        targets=sum(info.targets for info in infos),
        entries=sum(info.entries for info in infos),
        kept_mass_sum=float(sum(info.kept_mass_sum for info in infos)),
    )


def layer_folders(dataset_folder: Path) -> list[Path]:
    """The folders of all layers of all splits, by split and name."""
    return [folder for split in sorted(dataset_folder.glob("*/")) for folder in find_layers(split)]


def shown(text: str, longest: int = _LONGEST) -> str:
    """``text`` in quotes, on one line: what isn't printable is escaped, what is too long is cut in the middle."""
    if len(text) > longest:
        text = f"{text[: longest // 2]} … {text[-longest // 2 :]}"
    letters = (c if c.isprintable() and c != "\\" else c.encode("unicode_escape").decode() for c in text)
    return f'"{"".join(letters)}"'


def _parts(sample: TokenizedSample, tokenizer: "PreTrainedTokenizerBase") -> Iterator[str]:
    """The sample cut at its spans, the template's parts between them."""
    end = 0
    for span in sample.spans:
        if span.start > end:
            yield f"  {'template':<10} {_decoded(sample.token_ids[end : span.start], tokenizer)}"
        yield f"  {span.role:<10} {_decoded(sample.token_ids[span.start : span.end], tokenizer)}"
        end = span.end
    if end < len(sample.token_ids):
        yield f"  {'template':<10} {_decoded(sample.token_ids[end:], tokenizer)}"


def _target(
    sample: TokenizedSample, records: Records, target: int, tokenizer: "PreTrainedTokenizerBase"
) -> Iterator[str]:
    """One target: the real token, the likeliest ones, and the mass of all that weren't kept."""
    position = int(sample.targets[target])
    first = int(records.entry_counts[:target].sum())
    entries = slice(first, first + int(records.entry_counts[target]))
    ids, logprobs = records.entry_ids[entries], records.entry_logprobs[entries]
    label, entropy = float(records.label_logprobs[target]), float(records.entropies[target])
    real = _decoded(sample.token_ids[position : position + 1], tokenizer)
    known = "unknown" if np.isnan(label) else f"{np.exp(label):.2%}"
    nats = "entropy unknown" if np.isnan(entropy) else f"entropy {entropy:.3f} nats"
    yield f"  position {position}: really {real}, probability {known}, {nats}"
    for entry in np.lexsort((ids, -logprobs))[:_CANDIDATES]:
        yield f"    {np.exp(logprobs[entry]):8.2%}  {_decoded(ids[entry : entry + 1], tokenizer)}"
    yield f"    {np.exp(records.tail_logprobs[target]):8.2%}  outside the {len(ids)} kept tokens"


def _decoded(token_ids: np.ndarray[tuple[int, ...], np.dtype[np.integer]], tokenizer: "PreTrainedTokenizerBase") -> str:
    return shown(str(tokenizer.decode(token_ids.tolist())))
