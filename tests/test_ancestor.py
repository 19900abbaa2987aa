"""The ancestor's cache: every distribution lands on the target that it predicts, or is left out by name."""

import hashlib
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import h5py
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distill.ancestor import ImportReport, ancestor_spec, import_splits, stored_forms, to_records
from distill.cache import Admissions, Layer
from distill.cache.ancestor_file import AncestorFile, check_ancestor_file, content_digest
from distill.cache.foreign import admit_foreign_file
from distill.cache.gate.rules import RefusedError
from distill.collect import Budget
from distill.errors import InputError
from distill.tokenizer import ChatTemplate, SampleRules, SampleTokenizer
from distill.types import ROLES, Sample, Span, TokenizedSample, Turn, sample_key
from tests.toys import CHATML, make_tokenizer

VOCAB, K = 261, 20
PLENTY = 1 << 40


class World:
    """A text dataset, its tokens, and a teacher that is a function of the tokens before a position."""

    def __init__(self, rows: Sequence[dict[str, object]], *, add_bos: bool | None = None, **rules: object) -> None:
        self.rows = list(rows)
        self.texts = {f"t.jsonl:{number}": self._sample(row, number) for number, row in enumerate(rows)}
        tokenizer = make_tokenizer()
        given = {"context_len": 200, "crop": VOCAB, "add_bos": add_bos} | rules
        self._tokenizer = SampleTokenizer(tokenizer, ChatTemplate(tokenizer, CHATML), SampleRules(**given))  # type: ignore[arg-type]
        self.samples = [piece for text in self.texts.values() for piece in self._tokenizer.tokenize(text)]

    @staticmethod
    def _sample(row: dict, number: int) -> Sample:
        where = f"t.jsonl:{number}"
        if "completion" in row.get("tags", []):
            return Sample(where, text=row["conversations"][0]["value"])
        turns = [Turn("assistant" if t["from"] == "gpt" else "user", t["value"]) for t in row["conversations"]]
        head = [Turn("system", row["init"])] if row.get("init") else []
        return Sample(where, turns=(*head, *turns))

    @staticmethod
    def teacher(sample: TokenizedSample) -> np.ndarray:
        """float64 [L + 1, V]: row t is the distribution of token t given those before it."""
        rows = []
        for position in range(len(sample.token_ids) + 1):
            seed = hashlib.sha256(sample.token_ids[:position].tobytes()).digest()
            logits = np.random.default_rng(list(seed)).normal(0, 3, VOCAB)
            rows.append(logits - np.log(np.exp(logits).sum()))
        return np.array(rows)


def chat(prompt: str, answer: str, init: str = "") -> dict[str, object]:
    turns = [{"from": "human", "value": prompt}, {"from": "gpt", "value": answer}]
    return {"init": init, "conversations": turns}


def completion(text: str) -> dict[str, object]:
    return {"conversations": [{"from": "human", "value": text}], "tags": ["completion"]}


ROWS = [
    chat("How many?", "42, no more."),
    chat("Why so few?", " It is written's so. ", init="Be brief."),
    {"conversations": [t for n in range(3) for t in chat(f"q{n}", f"answer {n}")["conversations"]]},  # type: ignore[attr-defined]
    completion("Once upon a time there was a teacher."),
    completion("Twice."),
]


def ranges_of(sample: TokenizedSample, roles: Sequence[str] = ("assistant",)) -> list[tuple[int, int]]:
    """The logit rows that the ancestor keeps: in a conversation from the one that predicts a content's first token to
    that on its last; in a completion those on its tokens."""
    if sample.is_completion:
        return [(span.start, span.end) for span in sample.spans]
    return [(span.start - 1, span.end) for span in sample.spans if span.role in roles]


def content_sha(sample: TokenizedSample, ranges: list[tuple[int, int]]) -> str:
    digits = "".join(str(int(token)) for start, end in ranges for token in sample.token_ids[start + 1 : end])
    return hashlib.sha256(digits.encode()).hexdigest()


def put_group(
    file: h5py.File,
    name: str,
    sample: TokenizedSample,
    row: dict[str, object] | None,
    *,
    k: int | None = K,
    roles: Sequence[str] = ("assistant",),
    ranges: list[tuple[int, int]] | None = None,
) -> h5py.Group:
    ranges = ranges or ranges_of(sample, roles)
    rows = np.concatenate([np.arange(start, end) for start, end in ranges])
    dense = World.teacher(sample)[rows + 1]
    group = file.create_group(name)
    group.attrs["content_sha"] = content_sha(sample, ranges)
    if row is not None:
        group.attrs["sample"] = str(row)
    if k is None:
        group.create_dataset("distributions", data=dense, dtype=np.float16, compression="gzip", compression_opts=6)
        return group
    order = np.argsort(-dense, axis=1, kind="stable")[:, :k]
    values = np.take_along_axis(dense, order, 1)
    group.create_dataset("distributions", data=values, dtype=np.float16, compression="gzip", compression_opts=6)
    group.create_dataset("indices", data=order, dtype=np.uint32, compression="gzip", compression_opts=6)
    return group


def write_file(path: Path, world: World, *, k: int | None = K, said: bool = True, shift: int = 0) -> Path:
    """What the ancestor makes of a dataset whose samples are all used whole."""
    with h5py.File(path, "w") as file:
        for number, sample in enumerate(world.samples):
            row = world.rows[int(sample.where.split(":")[1])]
            put_group(file, f"convo_{number + shift}", sample, row if said else None, k=k)
        if k is not None:
            file.attrs["topk"] = k
        file.attrs["vocab_family"] = "llama_3"
    return path


def run_import(
    path: Path,
    folder: Path,
    world: World,
    *,
    limit: int = PLENTY,
    shard_targets: int = 40,
    texts: dict[str, Sample] | None = None,
    precision: str = "exact",
) -> tuple[ImportReport, Layer]:
    check_ancestor_file(path)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    admissions = Admissions(folder.parent)
    with AncestorFile(path) as file:
        spec = ancestor_spec(
            file, teacher="old", weights=digest, token_map="t" * 64, vocab_size=VOCAB, cache_precision=precision
        )
        layer = Layer.open(folder, spec, admissions)
        report = import_splits(
            file,
            [(layer, world.samples)],
            texts=world.texts if texts is None else texts,
            budget=Budget(limit, 0),
            shard_targets=shard_targets,
        )
    return report, layer


def check_against_teacher(layer: Layer, sample: TokenizedSample, targets: np.ndarray, *, k: int = K) -> None:
    """Each stored record is the float64 teacher's own, as far as fp16 goes."""
    wanted = replace(sample, targets=targets)
    records = layer.read(wanted, layer.locate([wanted])[sample.key])
    dense = World.teacher(sample)[targets]
    ids = records.entry_ids.reshape(-1, k)
    assert np.array_equal(records.entry_counts, np.full(len(targets), k))
    logprobs = records.entry_logprobs.reshape(-1, k)
    np.testing.assert_allclose(logprobs, np.take_along_axis(dense, ids, 1), rtol=1e-3, atol=2e-3)
    assert (np.sort(dense, axis=1)[:, -k] <= np.take_along_axis(dense, ids, 1).min(1) + 1e-2).all()
    rest = 1 - np.exp(np.take_along_axis(dense, ids, 1)).sum(1)
    np.testing.assert_allclose(np.exp(records.tail_logprobs), rest, atol=2e-3)
    labels = sample.token_ids[targets]
    kept = (ids == labels[:, None]).any(1)
    assert np.array_equal(np.isnan(records.label_logprobs), ~kept)
    real = dense[np.arange(len(targets)), labels]
    np.testing.assert_allclose(records.label_logprobs[kept], real[kept], rtol=1e-3, atol=2e-3)
    if k < VOCAB:
        assert np.isnan(records.entropies).all()


# -- what lands where -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("add_bos", [True, False])
def test_every_row_lands_on_the_target_that_it_predicts(tmp_path: Path, add_bos: bool) -> None:
    world = World(ROWS, add_bos=add_bos)
    report, layer = run_import(write_file(tmp_path / "d.hdf5", world), tmp_path, world)
    assert (report.groups, report.samples, report.unmatched, report.refused) == (5, 5, {}, {})
    total = unknown = 0
    for sample in world.samples:
        # A completion's first token has no row; what follows its last one has, and is our EOS.
        targets = sample.targets[sample.targets > sample.spans[0].start] if sample.is_completion else sample.targets
        if add_bos and sample.is_completion:
            assert layer.missing([sample]) == [sample]
        else:
            assert layer.missing([sample]) == []
        check_against_teacher(layer, sample, targets)
        total += len(targets)
        records = layer.read(
            replace(sample, targets=targets), layer.locate([replace(sample, targets=targets)])[sample.key]
        )
        unknown += int(np.isnan(records.label_logprobs).sum())
    assert (report.targets, report.unknown_labels) == (total, unknown) and unknown > 0
    with Layer.open(tmp_path, layer.spec) as stranger:  # every shard passes the gate
        assert all(len(stranger.reader(name)) for name in stranger.shards)


def test_whole_distributions_become_a_full_layer(tmp_path: Path) -> None:
    world = World(ROWS)
    report, layer = run_import(write_file(tmp_path / "d.hdf5", world, k=None), tmp_path, world)
    assert (layer.spec.mode, layer.spec.top_k, report.unknown_labels) == ("full", VOCAB, 0)
    for sample in world.samples[:3]:
        check_against_teacher(layer, sample, sample.targets, k=VOCAB)
        records = layer.read(sample, layer.locate([sample])[sample.key])
        assert (records.tail_logprobs == -np.inf).all()
        dense = World.teacher(sample)[sample.targets]
        np.testing.assert_allclose(records.entropies, -(np.exp(dense) * dense).sum(1), rtol=5e-3)
    with AncestorFile(tmp_path / "d.hdf5") as file, pytest.raises(InputError, match="set crop_distr_to_size to 261"):
        ancestor_spec(file, teacher="t", weights="w" * 64, token_map="t", vocab_size=VOCAB - 1, cache_precision="exact")


def test_saved_roles_come_in_the_order_of_the_turns(tmp_path: Path) -> None:
    roles = ("system", "user", "assistant")
    world = World([chat("Who?", "I.", init="Short.")], saved_roles=frozenset(roles))
    with h5py.File(tmp_path / "d.hdf5", "w") as file:
        put_group(file, "convo_7", world.samples[0], world.rows[0], roles=roles)
    report, layer = run_import(tmp_path / "d.hdf5", tmp_path, world)
    assert report.samples == 1 and layer.missing(world.samples) == []
    check_against_teacher(layer, world.samples[0], world.samples[0].targets)


@pytest.mark.parametrize("k", [K, None])
def test_a_compact_layer_knows_as_little(tmp_path: Path, k: int | None) -> None:
    world = World(ROWS[:3])
    path = write_file(tmp_path / "d.hdf5", world, k=k)
    _, exact = run_import(path, tmp_path / "a", world)
    _, compact = run_import(path, tmp_path / "b", world, precision="compact")
    with Layer.open(tmp_path / "b", compact.spec) as stranger:  # every shard passes the gate
        for sample in world.samples:
            one, two = (layer.read(sample, layer.locate([sample])[sample.key]) for layer in (exact, stranger))
            assert np.array_equal(np.isnan(one.label_logprobs), np.isnan(two.label_logprobs))
            assert np.array_equal(np.isnan(one.entropies), np.isnan(two.entropies))
            np.testing.assert_allclose(np.exp(one.tail_logprobs), np.exp(two.tail_logprobs), atol=0.01)


def test_two_splits_share_one_file(tmp_path: Path) -> None:
    world = World(ROWS)
    path = write_file(tmp_path / "d.hdf5", world)
    with AncestorFile(path) as file:
        spec = ancestor_spec(
            file, teacher="old", weights="w" * 64, token_map="t" * 64, vocab_size=VOCAB, cache_precision="exact"
        )
        layers = [Layer.open(tmp_path / split, spec, Admissions(tmp_path)) for split in ("train", "validation")]
        splits = list(zip(layers, (world.samples[:2], world.samples[1:3]), strict=True))
        report = import_splits(file, splits, texts=world.texts, budget=Budget(PLENTY, 0), shard_targets=40)
    # The second sample is in both splits; the file's other two are in none.
    assert (report.groups, report.samples, report.unmatched) == (5, 4, {"no sample has these contents": 2})
    for layer, samples in splits:
        assert layer.missing(samples) == []
        for sample in samples:
            check_against_teacher(layer, sample, sample.targets)


def test_a_conversation_cut_by_the_context_has_a_row_past_its_end(tmp_path: Path) -> None:
    world = World([chat("How many?", "42, no more and no less than that.")], context_len=60)
    assert world.samples[0].spans[-1].end == 60 == len(world.samples[0].token_ids)
    report, layer = run_import(write_file(tmp_path / "d.hdf5", world), tmp_path, world)
    assert report.targets == len(world.samples[0].targets)
    check_against_teacher(layer, world.samples[0], world.samples[0].targets)


def test_the_first_versions_completions_have_a_row_on_bos(tmp_path: Path) -> None:
    world = World([completion("Once upon a time.")], add_bos=True)
    sample = world.samples[0]
    with h5py.File(tmp_path / "d.hdf5", "w") as file:
        put_group(file, "convo_0_moved", sample, None, ranges=[(0, sample.spans[0].end)])
        ids = file["convo_0_moved/indices"][:]
        del file["convo_0_moved/indices"]
        file["convo_0_moved"].create_dataset("indices", data=ids, dtype=np.int32)
    report, layer = run_import(tmp_path / "d.hdf5", tmp_path, world)
    assert (report.samples, layer.missing([sample])) == (1, [])
    check_against_teacher(layer, sample, sample.targets)


# -- what is left out -------------------------------------------------------------------------------------------------


def made_up(token_ids: list[int], start: int, *, where: str) -> TokenizedSample:
    ids = np.array(token_ids, np.int32)
    targets = np.arange(start, len(ids), dtype=np.int32)
    return TokenizedSample(where, False, ids, (Span(start, len(ids) - 1, "assistant"),), targets, sample_key(ids))


def test_different_ids_with_the_same_digits_are_not_guessed(tmp_path: Path) -> None:
    world = World(ROWS[:1])
    world.samples = [made_up([5, 12, 3, 9], 1, where="a:1"), made_up([5, 1, 23, 9], 1, where="a:2")]
    with h5py.File(tmp_path / "d.hdf5", "w") as file:
        put_group(file, "convo_0", world.samples[0], None)
    with pytest.raises(InputError, match="none of its 1 samples is in the text dataset: several samples fit it"):
        run_import(tmp_path / "d.hdf5", tmp_path, world)


def test_equal_answers_are_told_apart_by_the_text_or_left_out(tmp_path: Path) -> None:
    world = World([chat("One?", "Yes."), chat("Two?", "Yes."), chat("Three?", "No.")])
    path = write_file(tmp_path / "d.hdf5", world)
    report, layer = run_import(path, tmp_path / "a", world)
    assert (report.samples, report.unmatched) == (3, {})
    for sample in world.samples:
        check_against_teacher(layer, sample, sample.targets)
    # Nobody says which text is which: only the answer that is unique comes in.
    write_file(path, world, said=False)
    report, _ = run_import(path, tmp_path / "b", world)
    assert (report.samples, report.unmatched) == (1, {"several samples fit it": 2})
    assert report.named == ("convo_0: several samples fit it", "convo_1: several samples fit it")
    # One sample here, two groups there.
    fewer = World([chat("One?", "Yes."), chat("Three?", "No.")])
    report, _ = run_import(path, tmp_path / "c", fewer)
    assert (report.samples, report.unmatched) == (1, {"several groups fit one sample": 2})


def test_an_equal_answer_to_another_prompt_is_not_taken(tmp_path: Path) -> None:
    there = World([chat("Is it green?", "Yes."), chat("Three?", "No.")])
    here = World([chat("Is it blue??", "Yes."), chat("Three?", "No.")])
    report, layer = run_import(write_file(tmp_path / "d.hdf5", there), tmp_path, here)
    assert (report.samples, report.unmatched) == (1, {"the same contents in another text": 1})
    assert layer.missing(here.samples) == here.samples[:1]


def test_duplicates_in_the_file_come_in_once(tmp_path: Path) -> None:
    world = World([chat("One?", "Yes.")])
    with h5py.File(tmp_path / "d.hdf5", "w") as file:
        for name in ("convo_3", "convo_10"):
            put_group(file, name, world.samples[0], world.rows[0])
    report, _ = run_import(tmp_path / "d.hdf5", tmp_path, world)
    assert (report.samples, report.named) == (1, ("convo_10: the same sample again",))


def test_rows_that_do_not_fit_and_unknown_contents_are_counted_and_named(tmp_path: Path) -> None:
    world = World(ROWS)
    path = write_file(tmp_path / "d.hdf5", world)
    with h5py.File(path, "r+") as file:
        for name in ("distributions", "indices"):
            rows = file["convo_0"][name][:-1]
            del file["convo_0"][name]
            file["convo_0"][name] = rows
        file["convo_1"].attrs["content_sha"] = "0" * 64
        del file["convo_2"].attrs["content_sha"]
        for name in ("distributions", "indices"):
            rows = file["convo_3"][name][:, :-1]
            del file["convo_3"][name]
            file["convo_3"][name] = rows
    report, _ = run_import(path, tmp_path, world)
    assert report.unmatched == {
        "no sample has these contents": 2,
        "another number of rows than its contents ask for": 1,
        f"other than {K} entries a row": 1,
    }
    assert report.named[0] == "convo_0: another number of rows than its contents ask for"
    lines = list(report.lines())
    assert lines[0] == f"5 groups: 1 samples with {report.targets} targets imported"
    assert "not matched: 2 groups: no sample has these contents" in lines


def test_rows_that_are_no_distributions_are_refused_and_counted(tmp_path: Path) -> None:
    world = World([chat("Count.", "One, two, three."), chat("And?", "Four.")])
    path = write_file(tmp_path / "d.hdf5", world)
    with h5py.File(path, "r+") as file:
        values, ids = file["convo_0/distributions"], file["convo_0/indices"]
        values[0, 3] = np.nan
        values[1, 0] = 0.5
        values[2] = -100.0
        ids[3, 1] = VOCAB
        ids[4, 1] = ids[4, 0]
        file["convo_1/distributions"][...] = -np.inf
    report, layer = run_import(path, tmp_path, world)
    count = len(world.samples[1].targets)
    assert report.refused == {
        "a value that is no finite number": 1 + count,
        "probabilities that add up to more than one": 1,
        "probabilities that add up to too little": 1,
        "a token id outside the vocabulary": 1,
        "a token id twice": 1,
    }
    assert report.unmatched == {"none of its rows is a distribution": 1}
    check_against_teacher(layer, world.samples[0], world.samples[0].targets[5:])
    again, _ = run_import(path, tmp_path, world)
    assert (again.samples, again.present) == (0, 1)


# -- written as any layer is ------------------------------------------------------------------------------------------


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_an_import_that_was_cut_short_ends_with_the_same_bytes(tmp_path: Path) -> None:
    world = World(ROWS)
    path = write_file(tmp_path / "d.hdf5", world)
    report, whole = run_import(path, tmp_path / "whole", world)
    sizes = sorted(info.bytes for info in whole.shards.values())
    assert len(sizes) >= 3
    with pytest.raises(InputError, match="max_cache_size_gb"):
        run_import(path, tmp_path / "parts", world, limit=50_000)
    done = len(tree(tmp_path / "parts"))
    assert 2 < done < len(tree(tmp_path / "whole"))
    (next((tmp_path / "parts").iterdir()) / "half.h5.1.tmp").write_bytes(b"half")
    second, _ = run_import(path, tmp_path / "parts", world)
    assert tree(tmp_path / "parts") == tree(tmp_path / "whole")
    assert (second.present > 0, second.present + second.samples) == (True, report.samples)
    third, _ = run_import(path, tmp_path / "parts", world)
    assert (third.samples, third.present, third.targets) == (0, report.samples, 0)
    assert tree(tmp_path / "parts") == tree(tmp_path / "whole")


def test_an_import_reads_the_layers_keys_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(ROWS)
    path = write_file(tmp_path / "d.hdf5", world)
    with h5py.File(path, "r+") as file:  # so that one sample is there with fewer targets than are looked for
        file["convo_0/distributions"][2, 0] = np.nan
    asked = []
    key_rows = Layer._key_rows
    monkeypatch.setattr(Layer, "_key_rows", lambda self, name: asked.append(name) or key_rows(self, name))
    first, layer = run_import(path, tmp_path / "layer", world)
    assert asked == [] and len(layer.shards) >= 3 and sum(first.refused.values()) == 1
    again, _ = run_import(path, tmp_path / "layer", world)
    assert (again.samples, again.present) == (0, first.samples)
    assert sorted(asked) == sorted([*layer.shards] * 2)


def test_the_order_of_the_groups_does_not_matter(tmp_path: Path) -> None:
    world = World(ROWS)
    path = write_file(tmp_path / "d.hdf5", world)
    with h5py.File(tmp_path / "e.hdf5", "w") as other, h5py.File(path) as file:
        for number, name in enumerate(reversed(list(file))):
            file.copy(name, other, name=f"convo_{number}")
        other.attrs["topk"] = K
    _, first = run_import(path, tmp_path / "a", world)
    _, second = run_import(tmp_path / "e.hdf5", tmp_path / "b", world)
    assert list(first.shards) == list(second.shards)
    for sample in world.samples[:3]:
        a, b = (layer.read(sample, layer.locate([sample])[sample.key]) for layer in (first, second))
        assert np.array_equal(a.entry_ids, b.entry_ids) and np.array_equal(a.entry_logprobs, b.entry_logprobs)


# -- numbers ----------------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 1 << 30), st.integers(1, 30), st.integers(1, 30), st.sampled_from([0.1, 1.0, 4.0, 12.0]))
def test_records_are_valid_distributions(seed: int, rows: int, k: int, scale: float) -> None:
    rng, vocab = np.random.default_rng(seed), 30
    logits = rng.normal(0, scale, (rows, vocab))
    dense = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    ids = rng.permuted(np.tile(np.arange(vocab), (rows, 1)), axis=1)
    top = np.argsort(-np.take_along_axis(dense, ids, 1), axis=1)[:, :k]
    ids = np.take_along_axis(ids, top, 1)
    labels = rng.integers(0, vocab, rows)
    values = np.take_along_axis(dense, ids, 1).astype(np.float16).astype(np.float32)
    records, good, reasons = to_records(values, ids, labels, vocab)
    assert np.array_equal(good, np.arange(rows)) and not reasons
    logprobs = records.entry_logprobs.reshape(rows, k).astype(np.float64)
    np.testing.assert_allclose(np.exp(logprobs).sum(1) + np.exp(records.tail_logprobs), 1, atol=1e-5)
    assert (np.diff(logprobs, axis=1) <= 0).all()
    known = ~np.isnan(records.label_logprobs)
    assert np.array_equal(known, (ids == labels[:, None]).any(1))
    np.testing.assert_allclose(
        records.label_logprobs[known], dense[np.arange(rows), labels][known], rtol=2e-3, atol=4e-3
    )


def test_the_digest_is_of_digits_without_separator() -> None:
    assert content_digest(np.array([12, 3])) == content_digest(np.array([1, 23])) == hashlib.sha256(b"123").hexdigest()


def test_contents_without_a_template_between_them_share_no_target() -> None:
    ids = np.arange(10, 20, dtype=np.int32)
    spans = (Span(1, 4, "user"), Span(4, 9, "assistant"))
    sample = TokenizedSample("a:1", False, ids, spans, np.arange(1, 10, dtype=np.int32), sample_key(ids))
    ((_, positions),) = stored_forms(sample)
    assert positions.tolist() == [1, 2, 3, 4, -1, 5, 6, 7, 8, 9]
    assert set(ROLES) >= {span.role for span in spans}


# -- strangers --------------------------------------------------------------------------------------------------------


def hostile(kind: str, path: Path, tmp_path: Path) -> None:
    with h5py.File(path, "r+") as file:
        group = file["convo_0"]
        rows, values = group["distributions"].shape[0], group["distributions"][:]
        match kind:
            case "external link":
                other = shutil.copy(path.with_suffix(".bak"), tmp_path / "other.h5")
                del file["convo_1"]
                file["convo_1"] = h5py.ExternalLink(other, "convo_1")
            case "soft link":
                file["convo_77"] = h5py.SoftLink("/convo_1")
            case "the same group twice":
                file["convo_77"] = group
            case "a cycle":
                group["indices_2"] = file["/"]
            case "external storage":
                del group["distributions"]
                group.create_dataset(
                    "distributions", (rows, K), np.float16, external=[(str(tmp_path / "secret"), 0, rows * K * 2)]
                )
            case "virtual":
                del group["distributions"]
                layout = h5py.VirtualLayout((rows, K), np.float16)
                layout[:] = h5py.VirtualSource(str(path.with_suffix(".bak")), "convo_0/distributions", (rows, K))
                group.create_virtual_dataset("distributions", layout)
            case "a shape bomb":
                del group["distributions"]
                group.create_dataset("distributions", (1 << 20, 1 << 20), np.float16, chunks=(1, 1024))
            case "a compression bomb":
                del group["distributions"]
                group.create_dataset("distributions", data=np.zeros((1 << 14, 1 << 10), np.float16), compression=9)
            case "another type":
                del group["distributions"]
                group["distributions"] = values.astype(np.float64)
            case "a foreign filter":
                del group["distributions"]
                group.create_dataset("distributions", data=values, compression="lzf")
            case "another name":
                file["extra"] = values
            case "another dataset":
                group["more"] = values
            case "another attribute":
                group.attrs["run_me"] = "import os"
            case "an array as attribute":
                group.attrs["content_sha"] = np.zeros(1000)
            case "a reference":
                group.attrs["content_sha"] = group["indices"].ref
            case "different shapes":
                del group["indices"]
                group["indices"] = np.zeros((rows, K + 1), np.uint32)
            case "a group as dataset":
                del group["indices"]
                group.create_group("indices")
            case "a dataset as group":
                del file["convo_1"]
                file["convo_1"] = values


KINDS = [
    *("external link", "soft link", "the same group twice", "a cycle", "external storage", "virtual", "a shape bomb"),
    *("a compression bomb", "another type", "a foreign filter", "another name", "another dataset"),
    *("another attribute", "an array as attribute", "a reference", "different shapes", "a group as dataset"),
    "a dataset as group",
]


@pytest.mark.parametrize("kind", KINDS)
def test_what_the_ancestor_does_not_write_is_refused(kind: str, tmp_path: Path) -> None:
    path = write_file(tmp_path / "d.hdf5", World(ROWS))
    (tmp_path / "secret").write_bytes(b"\x3c" * 100_000)
    shutil.copy(path, path.with_suffix(".bak"))
    check_ancestor_file(path)
    hostile(kind, path, tmp_path)
    with pytest.raises((RefusedError, OSError)):
        check_ancestor_file(path)


def test_the_check_runs_in_a_process_of_its_own_and_once(tmp_path: Path) -> None:
    path = write_file(tmp_path / "d.hdf5", World(ROWS[:2]))
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    assert admit_foreign_file(path, Admissions(tmp_path)) == digest
    assert digest in Admissions(tmp_path)
    (tmp_path / "link.hdf5").symlink_to(path)
    with pytest.raises(InputError, match=r"link.hdf5: not a regular file"):
        admit_foreign_file(tmp_path / "link.hdf5", Admissions(tmp_path))
    hostile("soft link", path, tmp_path)
    with pytest.raises(InputError, match=r"d.hdf5: refused: convo_77: a soft or external link"):
        admit_foreign_file(path, Admissions(tmp_path))
    path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(InputError, match=r"d.hdf5: refused: .*truncated"):
        admit_foreign_file(path, Admissions(tmp_path))


def test_a_text_that_is_no_literal_is_not_run(tmp_path: Path) -> None:
    world = World([chat("One?", "Yes.")])
    path = write_file(tmp_path / "d.hdf5", world)
    for text in ("__import__('os').abort()", "[" * 5000, "{'conversations': 3}", "-" * 50_000 + "1", "\ud7ff"):
        with h5py.File(path, "r+") as file:
            file["convo_0"].attrs["sample"] = text
        check_ancestor_file(path)
        with AncestorFile(path) as file:
            assert [group.text for group in file.groups()] == [None]


def test_no_file_and_other_files_are_one_line(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("not HDF5")
    with h5py.File(tmp_path / "empty", "w"):
        pass
    for name in ("absent", "text", "empty"):
        with pytest.raises(InputError, match=name):
            AncestorFile(tmp_path / name)
