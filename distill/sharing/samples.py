"""The samples that a cache holds, without the text that they were made of."""

from distill.cache import Layer, ShardReader
from distill.errors import InputError
from distill.types import TokenizedSample, sample_key


def samples_of(layer: Layer) -> list[TokenizedSample]:
    """The samples of a layer from its shards alone, in the order of the shards' names; ``where`` is shard:row.

    Each once by key: of several rows with the same tokens the one with the most targets. Raises InputError naming a
    shard that is damaged.
    """
    found: dict[bytes, TokenizedSample] = {}
    for name in sorted(layer.shards):
        reader = layer.reader(name)
        for row in range(len(reader)):
            sample = sample_at(reader, row)
            known = found.get(sample.key)
            if known is None or len(known.targets) < len(sample.targets):
                found[sample.key] = sample
    return list(found.values())


def sample_at(reader: ShardReader, row: int) -> TokenizedSample:
    """Sample ``row`` of a shard, with its stored targets. It is a completion if it has no other kind of span."""
    token_ids, spans = reader.token_ids(row), reader.spans(row)
    return TokenizedSample(
        where=f"{reader.path.stem}:{row}",
        is_completion=all(span.role == "completion" for span in spans),
        token_ids=token_ids,
        spans=spans,
        targets=reader.targets(row),
        key=sample_key(token_ids),
    )


def nth_row(layer: Layer, number: int) -> tuple[ShardReader, int]:
    """Where the layer's sample ``number`` is, counted from 0 in the order of ``samples_of`` with duplicates.

    Raises InputError if there are fewer.
    """
    rest = number
    for name in sorted(layer.shards):
        if 0 <= rest < layer.shards[name].samples:
            return layer.reader(name), rest
        rest -= layer.shards[name].samples
    count = sum(info.samples for info in layer.shards.values())
    raise InputError(f"{layer.folder}: no sample {number}; it has {count:,}, counted from 0")
