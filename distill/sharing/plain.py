"""A layer from one plain file into the cache, as ordinary shards."""

from collections.abc import Iterable
from itertools import islice

from distill.cache import Layer, build_shard
from distill.cache.plain_file import PlainFile
from distill.collect import Budget, plan_shards, seal_image
from distill.records import concat
from distill.types import TokenizedSample


def import_plain(file: PlainFile, layer: Layer, *, budget: Budget, shard_targets: int) -> tuple[int, int]:
    """Write the samples of ``file`` that ``layer``, which is the file's own (``file.spec``), lacks, as sealed shards.

    The caller holds the dataset lock. Returns how many samples and targets were written. Raises InputError for a
    damaged file or if the cap is reached, MachineError for a full disk; sealed shards stay.
    """
    assert layer.spec.describe() == file.spec.describe(), "another layer than the file's"
    samples = _largest(file.samples())
    lacking = {sample.where for sample in layer.missing(samples)}
    found = file.read(lacking)
    targets = 0
    for shard in plan_shards(samples, layer.spec, shard_targets):
        # The file's samples and the plan's are in the same order.
        part = list(islice(found, sum(sample.where in lacking for sample in shard)))
        if part:
            if not targets:  # not before anything of the file was read: a damaged one leaves no empty layer
                layer.prepare()
            chosen, records = [sample for sample, _ in part], concat([records for _, records in part])
            vocab_size = layer.spec.vocab_size
            seal_image(layer, build_shard(chosen, records, layer=layer.spec.describe(), vocab_size=vocab_size), budget)
            targets += len(records)
    if targets:
        layer.compact()
    return len(lacking), targets


def _largest(samples: Iterable[TokenizedSample]) -> list[TokenizedSample]:
    """Each sample once by key, with the most targets that it has, in the order in which those stand."""
    best: dict[bytes, TokenizedSample] = {}
    for sample in samples:
        known = best.get(sample.key)
        if known is None or len(known.targets) < len(sample.targets):
            best.pop(sample.key, None)  # so that it comes to stand here
            best[sample.key] = sample
    return list(best.values())
