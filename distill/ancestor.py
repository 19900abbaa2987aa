"""Brings the ancestor's ``distributions.hdf5`` into a layer: whose distribution is which, and nothing guessed.

A group of that file is known by a digest over the ids of its contents and by its number of rows. Both must fit one
sample of the text dataset and no other; the text that the file itself names, where it does, must be that sample's.
Rows predict: in a conversation each saved content has a row for each of its tokens and one for what follows. In a
completion row i stands on token i and predicts token i + 1, so that its first token has none.

What the file doesn't say is NaN in our records: the entropy, and the logprob of a real token that wasn't kept.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from distill.cache import Layer, LayerSpec, build_shard
from distill.cache.ancestor_file import AncestorFile, AncestorGroup, TextDigest, content_digest, text_digest
from distill.collect import Budget, ShardPlan, plan_shards, seal_image
from distill.errors import InputError
from distill.records import concat
from distill.types import FloatArray, Records, Sample, TokenizedSample

UNKNOWN = "unknown"
"""What stands in a layer's description for what the ancestor's file doesn't say."""

# Logprobs in fp16 are off by up to 2^-12 of themselves, so their mass is by about entropy * 2^-12.
_MASS_TOLERANCE = 0.01
# The tail is what remains of one. Where rounding leaves nothing, something beyond fp16's resolution is assumed.
_SMALLEST_TAIL = 1e-6
_NAMED = 5
_NOWHERE = -1


@dataclass(frozen=True, slots=True)
class ImportReport:
    """What came in and what didn't. ``unmatched`` and ``refused`` count groups and rows by reason.

    groups: in the file. samples, targets: now in the layer because of it, ``present`` of the samples were before.
    unknown_labels, unknown_entropies: targets whose real token was not among the kept ones; that have no entropy.
    named: the first few unmatched groups.
    """

    groups: int
    samples: int
    present: int
    targets: int
    unknown_labels: int
    unknown_entropies: int
    unmatched: Mapping[str, int]
    refused: Mapping[str, int]
    named: tuple[str, ...]

    def lines(self) -> Iterator[str]:
        """The report as people read it."""
        yield f"{self.groups:,} groups: {self.samples:,} samples with {self.targets:,} targets imported"
        if self.present:
            yield f"{self.present:,} of the samples were in the cache already"
        for what, count in (("entropy", self.unknown_entropies), ("real token's logprob", self.unknown_labels)):
            if count:
                yield f"unknown: the {what} of {count:,} targets ({count / self.targets:.1%})"
        for reason, count in self.refused.items():
            yield f"refused: {count:,} rows: {reason}"
        for reason, count in self.unmatched.items():
            yield f"not matched: {count:,} groups: {reason}"
        for name in self.named:
            yield f"not matched: {name}"


@dataclass(frozen=True, slots=True, eq=False)
class _Form:
    """One way in which the ancestor may have stored a sample: row i is the distribution of ``positions[i]``."""

    sample: TokenizedSample
    positions: npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False)
class _Match:
    """The group that holds a sample. ``verified``: the file says that it is of this very text."""

    group: AncestorGroup
    form: _Form
    verified: bool


@dataclass(slots=True)
class _Tally:
    """What is counted on the way."""

    groups: int = 0
    samples: int = 0
    present: int = 0
    targets: int = 0
    unknown_labels: int = 0
    unknown_entropies: int = 0
    unmatched: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    named: list[str] = field(default_factory=list)

    def leave_out(self, group: AncestorGroup, reason: str) -> None:
        self.unmatched[reason] += 1
        if len(self.named) < _NAMED:
            self.named.append(f"{group.name}: {reason}")

    def count(self, records: Records, *, samples: int) -> None:
        self.samples += samples
        self.targets += len(records)
        self.unknown_labels += int(np.isnan(records.label_logprobs).sum())
        self.unknown_entropies += int(np.isnan(records.entropies).sum())

    def report(self) -> ImportReport:
        return ImportReport(
            groups=self.groups,
            samples=self.samples,
            present=self.present,
            targets=self.targets,
            unknown_labels=self.unknown_labels,
            unknown_entropies=self.unknown_entropies,
            unmatched=dict(self.unmatched.most_common()),
            refused=dict(self.refused.most_common()),
            named=tuple(self.named),
        )


def ancestor_spec(
    file: AncestorFile, *, teacher: str, weights: str, token_map: str, vocab_size: int, cache_precision: str
) -> LayerSpec:
    """The layer that an ancestor's file becomes. ``weights`` is the SHA-256 of the file: its teacher's are unknown.

    Raises InputError if whole distributions have another width than the vocabulary.
    """
    if not file.has_ids and file.width != vocab_size:
        raise InputError(
            f"{file.path}: whole distributions over {file.width} tokens, the vocabulary here has {vocab_size}; "
            f"set crop_distr_to_size to {file.width}"
        )
    return LayerSpec(
        teacher=teacher,
        weights=weights,
        model_config=UNKNOWN,
        dtype=UNKNOWN,
        quantisation=UNKNOWN,
        attention=UNKNOWN,
        token_map=token_map,
        vocab_size=vocab_size,
        mode="topk" if file.has_ids else "full",
        top_k=min(file.width, vocab_size),
        cache_precision=cache_precision,
    )


def import_splits(
    file: AncestorFile,
    splits: Sequence[tuple[Layer, Sequence[TokenizedSample]]],
    *,
    texts: Mapping[str, Sample],
    budget: Budget,
    shard_targets: int,
) -> ImportReport:
    """Write what ``file`` holds of each split's distinct samples into its layer, in planned-shard order, as shards.

    The caller holds the dataset lock. ``texts`` are the rows that the samples were made of, by their ``where``; with
    them an equal answer to another prompt isn't taken for the sample's. A second import of the same file finds its
    samples present and writes nothing.

    Raises InputError if nothing fits or the cap is reached, MachineError for a full disk; sealed shards stay.
    """
    tally = _Tally()
    everything = {sample.key: sample for _, samples in splits for sample in samples}
    matches = _match(file, everything.values(), texts, tally)
    if not matches:
        reasons = "; ".join(f"{reason} ({count:,})" for reason, count in tally.unmatched.most_common(3))
        raise InputError(
            f"{file.path}: none of its {tally.groups:,} samples is in the text dataset: {reasons}; give the tokenizer, "
            "prompt_format, save_*_range and context_len that it was collected with"
        )
    for layer, samples in splits:
        matched = [
            replace(sample, targets=_stored_targets(sample, matches[sample.key].form))
            for sample in samples
            if sample.key in matches
        ]
        if matched:
            layer.prepare()
            _import_samples(file, layer, matched, matches, tally, budget=budget, shard_targets=shard_targets)
            layer.compact()
    return tally.report()


def _import_samples(
    file: AncestorFile,
    layer: Layer,
    samples: Sequence[TokenizedSample],
    matches: Mapping[bytes, _Match],
    tally: _Tally,
    *,
    budget: Budget,
    shard_targets: int,
) -> None:
    spec, stored = layer.spec, _stored(layer, samples)
    for shard in plan_shards(samples, shard_targets=shard_targets, layer=spec):
        read = _read_shard(file, spec.vocab_size, shard, matches, stored, tally)
        if read:
            found, records = [sample for sample, _ in read], concat([records for _, records in read])
            seal_image(layer, build_shard(found, records, layer=spec.describe(), vocab_size=spec.vocab_size), budget)
            tally.count(records, samples=len(read))


# -- whose is it ------------------------------------------------------------------------------------------------------


def stored_forms(sample: TokenizedSample) -> Iterator[tuple[str, npt.NDArray[np.int32]]]:
    """The ways in which the ancestor may have stored ``sample``: content digest, and the position of each row.

    A conversation: the saved contents, those that have targets here, one after the other. A completion: without its
    first token; or, as the ancestor's first versions did after a BOS, with it.
    """
    ids = sample.token_ids
    if not sample.is_completion:
        saved = [span for span in sample.spans if np.isin(np.arange(span.start, span.end), sample.targets).any()]
        if saved:
            contents = np.concatenate([ids[span.start : span.end] for span in saved])
            positions = np.concatenate([np.arange(span.start, span.end + 1, dtype=np.int32) for span in saved])
            # Contents without a template between them: what follows the one is the start of the other.
            positions[1:][positions[1:] == positions[:-1]] = _NOWHERE
            yield content_digest(contents), positions
        return
    for span in sample.spans:
        for first in (span.start + 1, span.start)[: 1 + (span.start > 0)]:
            yield content_digest(ids[first : span.end]), np.arange(first, span.end + 1, dtype=np.int32)


def _stored_targets(sample: TokenizedSample, form: _Form) -> npt.NDArray[np.int32]:
    """The targets of ``sample`` that have a row. A row for what follows the text is one if EOS is a target."""
    return sample.targets[np.isin(sample.targets, form.positions)]


def _match(
    file: AncestorFile, samples: Iterable[TokenizedSample], texts: Mapping[str, Sample], tally: _Tally
) -> dict[bytes, _Match]:
    """For each sample, by key, that exactly one group is of: that group."""
    forms: dict[str, list[_Form]] = defaultdict(list)
    for sample in samples:
        for digest, positions in stored_forms(sample):
            forms[digest].append(_Form(sample, positions))
    said = {where: text_digest(text) for where, text in texts.items()}
    claims: dict[bytes, list[_Match]] = defaultdict(list)
    for group in file.groups():
        tally.groups += 1
        form = _candidate(group, file.width, forms.get(group.digest, []), said)
        if isinstance(form, str):
            tally.leave_out(group, form)
        else:
            verified = group.text is not None and said.get(form.sample.where) == group.text
            claims[form.sample.key].append(_Match(group, form, verified))
    matches = {}
    for key, claim in claims.items():
        # Several groups for one sample are its duplicates only if each of them says that it is this text.
        sure = len(claim) == 1 or all(match.verified for match in claim)
        if sure:
            matches[key] = claim[0]
        for match in claim[sure:]:
            tally.leave_out(match.group, "the same sample again" if sure else "several groups fit one sample")
    return matches


def _candidate(group: AncestorGroup, width: int, forms: Sequence[_Form], said: Mapping[str, TextDigest]) -> _Form | str:
    """The one sample that ``group`` can be of, or why there is none."""
    fitting = [form for form in forms if len(form.positions) == group.rows]
    same = [form for form in fitting if group.text in (None, said.get(form.sample.where, group.text))]
    reasons = {
        f"other than {width} entries a row": group.width != width,
        "no sample has these contents": not forms,
        "another number of rows than its contents ask for": not fitting,
        "the same contents in another text": not same,
        "several samples fit it": len(same) > 1,
        "none of its rows is of a target": not any(len(_stored_targets(form.sample, form)) for form in same),
    }
    return next((reason for reason, holds in reasons.items() if holds), None) or same[0]


# -- what does it say -------------------------------------------------------------------------------------------------


def to_records(
    logprobs: FloatArray, ids: npt.NDArray[np.int64] | None, labels: npt.NDArray[np.integer], vocab_size: int
) -> tuple[Records, npt.NDArray[np.int64], Counter[str]]:
    """Rows of the ancestor's as records; those that are no distributions are left out.

    logprobs [R, K] float, natural logs; ids [R, K], or None if column i is token i; labels [R]: the real tokens.
    Returns the records of the good rows, those rows' numbers, ascending, and how many of the others fail by reason.
    A tail is what remains of one, and the kept logprobs are shifted by what fp16 rounding made of their sum.
    """
    width = logprobs.shape[1]
    values = logprobs.astype(np.float64)
    if ids is None:
        ids = np.broadcast_to(np.arange(width), values.shape)
    reasons = Counter[str]()
    whole = width == vocab_size
    with np.errstate(over="ignore", invalid="ignore"):
        masses = np.exp(values).sum(1)
    ordered = np.sort(ids, axis=1)
    faults = {
        "a value that is no finite number": ~np.isfinite(values).all(1),
        "a token id outside the vocabulary": (ordered[:, 0] < 0) | (ordered[:, -1] >= vocab_size),
        "a token id twice": (ordered[:, 1:] == ordered[:, :-1]).any(1),
        "probabilities that add up to more than one": masses > 1 + _MASS_TOLERANCE,
        # The likeliest K of V tokens have K/V of the mass at least.
        "probabilities that add up to too little": masses < width / vocab_size * (1 - _MASS_TOLERANCE),
    }
    bad = np.zeros(len(values), bool)
    for reason, rows in faults.items():
        if (rows & ~bad).any():
            reasons[reason] = int((rows & ~bad).sum())
        bad |= rows
    good = np.flatnonzero(~bad)
    order = np.lexsort((ids[good], -values[good]), axis=1)
    values, kept = np.take_along_axis(values[good], order, 1), np.take_along_axis(ids[good], order, 1)
    tails = np.zeros(len(good)) if whole else np.maximum(1 - masses[good], _SMALLEST_TAIL)
    values += (np.log1p(-tails) - np.log(masses[good]))[:, None]
    is_label = kept == np.asarray(labels)[good][:, None]
    with np.errstate(divide="ignore"):
        tail_logprobs = np.log(tails)
    records = Records(
        entry_counts=np.full(len(good), width, np.int64),
        entry_ids=kept.ravel().astype(np.int64),
        entry_logprobs=values.ravel().astype(np.float32),
        tail_logprobs=tail_logprobs.astype(np.float32),
        label_logprobs=np.where(is_label.any(1), (values * is_label).sum(1), np.nan).astype(np.float32),
        entropies=(-(np.exp(values) * values).sum(1) if whole else np.full(len(good), np.nan)).astype(np.float32),
    )
    return records, good, reasons


_Targets = npt.NDArray[np.int32]


def _stored(layer: Layer, samples: Sequence[TokenizedSample]) -> dict[bytes, list[_Targets]]:
    """What the layer has of the samples, by key: the targets of each of its rows. Looked up once for all of them.

    Of a sample that is there whole one row is enough, and its own targets stand for that.
    """
    lacking = {sample.key for sample in layer.missing(samples)}
    stored = {sample.key: [sample.targets] for sample in samples if sample.key not in lacking}
    for name in sorted(layer.shards):
        for row, key in enumerate(layer.keys(name)):
            if key in lacking:
                stored.setdefault(key, []).append(layer.reader(name).targets(row))
    return stored


def _read_shard(
    file: AncestorFile,
    vocab_size: int,
    shard: ShardPlan,
    matches: Mapping[bytes, _Match],
    stored: Mapping[bytes, list[_Targets]],
    tally: _Tally,
) -> list[tuple[TokenizedSample, Records]]:
    """The samples of a planned shard that aren't ``stored``, with those targets whose rows are good, and records."""
    read = []
    for sample in shard:
        if _covered(sample, stored):
            tally.present += 1
            continue
        match = matches[sample.key]
        good, records = _read_sample(file, sample, match, vocab_size, tally)
        if not len(records):
            tally.leave_out(match.group, "none of its rows is a distribution")
        elif _covered(good, stored):  # what is left of it where rows were refused came in with an earlier import
            tally.present += 1
        else:
            read.append((good, records))
    return read


def _covered(sample: TokenizedSample, stored: Mapping[bytes, list[_Targets]]) -> bool:
    return any(np.isin(sample.targets, targets).all() for targets in stored.get(sample.key, ()))


def _read_sample(
    file: AncestorFile, sample: TokenizedSample, match: _Match, vocab_size: int, tally: _Tally
) -> tuple[TokenizedSample, Records]:
    targets, parts = [], []
    for first, logprobs, ids in file.read(match.group.name):
        positions = match.form.positions[first : first + len(logprobs)]
        rows = np.flatnonzero(np.isin(positions, sample.targets))
        wanted = positions[rows]
        records, good, reasons = to_records(
            logprobs[rows], None if ids is None else ids[rows], sample.token_ids[wanted], vocab_size
        )
        targets.append(wanted[good])
        parts.append(records)
        tally.refused += reasons
    return replace(sample, targets=np.concatenate(targets)), concat(parts)
