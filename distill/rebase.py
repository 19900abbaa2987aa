"""Gives cached records to the same text as it is tokenised now, paired by order.

For a text whose template, tokenisation or cache format has changed so that its samples have other keys. An old shard
holds consecutive samples, so the numbers of their targets say which of the new samples are theirs. New shards are
sealed before the old one goes: a kill leaves both valid, and the next start goes on.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from distill.cache import Layer, LayerSpec, ShardReader, build_shard, cut, find_layers
from distill.collect import seal_image
from distill.config import RunOptions
from distill.errors import InputError
from distill.lock import lock
from distill.planning import cache_lock, open_budget, readers_lock, survey
from distill.prepare import Job
from distill.report import Console
from distill.types import TokenizedSample

# What of a layer must be as it was; an imported one doesn't know.
_SAME = (
    ("weights", "another teacher"),
    ("model_config", "a teacher with another config.json"),
    ("dtype", "another teacher_dtype"),
    ("quantisation", "a teacher that was quantised otherwise"),
)
# Part of the content tokens that must be the same: a template's changes touch few of them, another text most.
_SAME_CONTENTS = 0.9


def rebase(job: Job, options: RunOptions, console: Console) -> None:
    """Where ``rebase_dataset`` is set, give old records to the job's samples that have none.

    Raises InputError, before anything is written, where counts or lengths differ, and without ``--yes``: the old shards
    are replaced.
    """
    if not job.config.pipeline.rebase_dataset:
        return
    if job.config.paths.dataset_path is None or job.config.paths.validation_dataset_path is None:
        raise InputError(
            "rebase_dataset: needs dataset_path and validation_dataset_path: which samples are held out depends on"
            " their tokens, and these have changed"
        )
    with lock(cache_lock(job.config)), lock(readers_lock(job.config)):
        for work in survey(job):
            new = [sample for shard in work.plan for sample in shard]
            with work.source as source:
                lacking = {sample.key for sample in source.missing(new)}
            if not lacking:
                console.say(f"rebase: {work.split} has all its records already")
                continue
            with _old_layer(job, work.split, work.source.own, new) as old:
                _check_spec(old.spec, work.teacher.layer)
                pairs = _pair(old, new, lacking)
                if not options.yes:
                    raise InputError(
                        f"rebase_dataset: would replace {len(pairs)} shards of {old.folder} by ones for the text as it"
                        " is now; add --yes to allow it"
                    )
                # One object a folder: each keeps its own idea of the index.
                own = old if old.folder == work.source.own.folder else work.source.own
                own.prepare()
                for shard, samples in pairs.items():
                    if samples:
                        _move(job, old, shard, samples, own)
                    old.drop([shard])
            console.say(f"rebase: {work.split}: {len(pairs)} shards of {old.folder.name} moved to the text as it is")


def _old_layer(job: Job, split: str, own: Layer, new: Sequence[TokenizedSample]) -> Layer:
    """The layer with samples that the text doesn't have any more: the teacher's own, or the only other one."""
    known = {sample.key for sample in new}
    layers = [Layer.load(folder, job.admissions) for folder in find_layers(job.dataset_folder / split)]
    stale = [layer for layer in layers if any(not known.issuperset(layer.keys(n)) for n in layer.shards)]
    mine = [layer for layer in stale if layer.folder == own.folder] or stale
    if len(mine) != 1:
        names = ", ".join(layer.folder.name for layer in mine) or "none"
        raise InputError(f"rebase_dataset: {job.dataset_folder / split} must hold one layer to rebase, not {names}")
    return mine[0]


def _check_spec(old: LayerSpec, new: LayerSpec) -> None:
    if old.vocab_size != new.vocab_size:
        raise InputError(f"rebase_dataset: the old records are over {old.vocab_size} ids, not {new.vocab_size}")
    if old.token_map != new.token_map:
        raise InputError("rebase_dataset: the old records are for other tokens than the student's; collect anew")
    for name, what in _SAME:
        theirs, ours = getattr(old, name), getattr(new, name)
        if theirs not in (ours, "unknown"):
            raise InputError(f"rebase_dataset: the old records are of {what}; collect anew")
    if old.top_k < new.top_k:
        raise InputError(f"save_topK: the old records have {old.top_k} entries, not {new.top_k}; ask for fewer")
    if old.cache_precision == "compact" and new.cache_precision == "exact":
        raise InputError("cache_precision: the old records are compact and can't become exact")


def _pair(old: Layer, new: Sequence[TokenizedSample], lacking: set[bytes]) -> dict[str, list[TokenizedSample]]:
    """The new samples of each old shard; none for a shard that a killed start has moved already.

    An old shard is a run of the text: its samples have as many targets as the new ones there, and those whose tokens
    are the same still have the same keys. InputError if a shard fits nowhere, or a sample that lacks records gets none.
    """
    known = {sample.key for sample in new}
    counts = np.array([len(sample.targets) for sample in new], np.int64)
    pairs: dict[str, list[TokenizedSample]] = {}
    claimed: set[bytes] = set()
    rest = set(lacking)
    for name in sorted(old.shards):
        keys = old.keys(name)
        if known.issuperset(keys):
            continue
        reader = old.reader(name)
        run = np.array([len(reader.targets(row)) for row in range(len(reader))], np.int64)
        places = [new[start : start + len(run)] for start in _starts(counts, run)]
        places = [place for place in places if _agrees(place, keys, known)]
        if not places:
            raise InputError(
                f"rebase_dataset: {len(run)} samples of {old.folder.name}/{name}.h5 are nowhere in the text with as"
                f" many targets each ({run[0]} first); give just the text that it was collected from"
            )
        # Where several fit by their lengths, the one whose contents agree.
        agreements = [_agreement(reader, place) for place in places]
        best = places[agreements.index(max(agreements))]
        if max(agreements) < _SAME_CONTENTS:
            raise InputError(
                f"rebase_dataset: {old.folder.name}/{name}.h5 fits the text at {best[0].where} by the numbers of its"
                " targets, but its contents are others; give just the text that it was collected from"
            )
        if agreements.count(max(agreements)) > 1 or best[0].key in claimed:
            raise InputError(
                f"rebase_dataset: {old.folder.name}/{name}.h5 fits several places of the text alike, {best[0].where}"
                " among them; whose records it holds can't be told: collect anew"
            )
        claimed |= {sample.key for sample in best}
        keys_there = {sample.key for sample in best}
        pairs[name] = list(best) if keys_there & rest else []
        rest -= keys_there
    if rest:
        first = next(sample for sample in new if sample.key in rest)
        raise InputError(f"rebase_dataset: {first.where} and {len(rest) - 1} more samples have no old records")
    return pairs


def _starts(counts: npt.NDArray[np.int64], run: npt.NDArray[np.int64]) -> list[int]:
    """Where in ``counts`` the ``run`` begins."""
    if len(counts) < len(run):
        return []
    starts = np.flatnonzero(counts[: len(counts) - len(run) + 1] == run[0])
    for offset, count in enumerate(run.tolist()):  # a few samples in, hardly a start is left
        starts = starts[counts[starts + offset] == count]
    return starts.tolist()


def _agrees(place: Sequence[TokenizedSample], keys: Sequence[bytes], known: set[bytes]) -> bool:
    """Whether all of the old ``keys`` that the text still has stand where they stood."""
    return all(sample.key == key or key not in known for sample, key in zip(place, keys, strict=True))


def _agreement(reader: ShardReader, samples: Sequence[TokenizedSample]) -> float:
    """Part of the old samples' content tokens, of all roles, that are the new ones', turn by turn."""
    same = total = 0
    for row, sample in enumerate(samples):
        ids, spans = reader.token_ids(row), reader.spans(row)
        for theirs, ours in zip(spans, sample.spans, strict=False):
            before, now = ids[theirs.start : theirs.end], sample.token_ids[ours.start : ours.end]
            same += int((before == now).sum()) if len(before) == len(now) else 0
        total += sum(span.end - span.start for span in spans)
    return same / max(total, 1)


def _move(job: Job, old: Layer, name: str, samples: Sequence[TokenizedSample], own: Layer) -> None:
    reader = old.reader(name)
    records = cut(reader.all_records(), own.spec.top_k)
    before = np.concatenate([reader.token_ids(row)[reader.targets(row)] for row in range(len(reader))])
    labels = np.concatenate([sample.token_ids[sample.targets] for sample in samples])
    # The logprob of another token than the one that is there now says nothing of that.
    known = np.where(before == labels, records.label_logprobs, np.float32(np.nan))
    image = build_shard(
        samples,
        replace(records, label_logprobs=known),
        layer=own.spec.describe(),
        vocab_size=own.spec.vocab_size,
    )
    seal_image(own, image, open_budget(job.config, [own]))
