import itertools
from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from distill.errors import InputError
from distill.tokenizer import ChatTemplate, PromptFormat, SampleTokenizer, tokenize_dataset
from distill.tokenizer.samples import TokenizedResult
from distill.types import Sample, Span, Turn
from tests.tokenizer_zoo import (
    ALL_ROLES,
    ANY_TEXT,
    FORMAT,
    KINDS,
    build,
    contents,
    conversations,
    make,
    one,
    rules,
    talk,
    text,
    tokens,
)

# -- BOS and EOS ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("adds_bos", [True, False])
@pytest.mark.parametrize("template", ["chatml", "llama2", "llama3", "<s><s>{{ messages[0]['content'] }}<|eot|>"])
def test_bos_by_chat_template(adds_bos: bool, template: str) -> None:
    writes = template != "chatml"
    for add_bos, count in [(None, int(writes)), (True, 1), (False, 0)]:
        tokenizer = build("bytes", template, adds_bos=adds_bos, add_bos=add_bos, saved_roles=ALL_ROLES)
        result = one(tokenizer.tokenize(talk("hello", "the")))
        assert tokens("bytes", result.token_ids[:2]).count("<s>") == count
        assert contents("bytes", result)[0].strip() == "hello"


@pytest.mark.parametrize("adds_bos", [True, False])
@pytest.mark.parametrize("start", ["", "<s>"])
def test_bos_by_prompt_format(adds_bos: bool, start: str) -> None:
    template = PromptFormat.from_mapping({**FORMAT, "USER_START": start + "<turn>"}, "x")
    for add_bos, count in [(None, int(adds_bos or bool(start))), (True, 1), (False, 0)]:
        tokenizer = SampleTokenizer(make("bytes", None, adds_bos), template, rules(add_bos=add_bos))
        result = one(tokenizer.tokenize(talk("hello", "the")))
        assert tokens("bytes", result.token_ids[:2]).count("<s>") == count
        assert contents("bytes", result) == ["hello", "the"]


@given(st.sampled_from(sorted(KINDS)), ANY_TEXT, st.booleans())
@settings(max_examples=100, deadline=None)
def test_bos_changes_nothing_else(kind: str, content: str, adds_bos: bool) -> None:
    found = {}
    for add_bos in (None, True, False):
        result = one(build(kind, adds_bos=adds_bos, add_bos=add_bos).tokenize(text(content)))
        [span] = result.spans
        names = tokens(kind, result.token_ids)
        assert names[-1] == "</s>"
        assert names[0] == "<s>" if span.start else names[0] != "<s>"
        assert span == Span(span.start, len(names) - 1, "completion")
        assert result.targets.tolist() == list(range(1, len(names)))
        found[add_bos] = (span.start, result.token_ids[span.start : span.end].tolist())
    assert [found[add_bos][0] for add_bos in (None, True, False)] == [int(adds_bos), 1, 0]
    assert found[None][1] == found[True][1] == found[False][1]


def test_completions_without_bos_and_eos() -> None:
    tokenizer = SampleTokenizer(make("bytes", named=False), None, rules())
    result = one(tokenizer.tokenize(text("hello the")))
    assert make("bytes").decode(result.token_ids) == "hello the"
    ending = SampleTokenizer(make("bytes"), None, rules(train_turn_end=False))
    assert one(ending.tokenize(text("hello the"))).targets.tolist() == result.targets.tolist()
    with pytest.raises(InputError, match="add_bos: the student's tokenizer has no BOS token"):
        SampleTokenizer(make("bytes", named=False), None, rules(add_bos=True))


# -- too long ---------------------------------------------------------------------------------------------------------


@given(
    kind=st.sampled_from(["bytes", "metaspace-always", "characters"]),
    content=st.lists(st.sampled_from(["hello", " the", "a", "\n", "😀"]), min_size=1, max_size=30).map("".join),
    context_len=st.integers(2, 12),
    add_bos=st.booleans(),
    turn_end=st.booleans(),
    named=st.booleans(),
)
@settings(max_examples=100, deadline=None)
def test_cutting_a_completion_loses_nothing_and_repeats_no_target(
    kind: str, content: str, context_len: int, add_bos: bool, turn_end: bool, named: bool
) -> None:
    assume(content.strip() and (named or not add_bos))
    tokenizer = make(kind, named=named)
    changes = {"add_bos": add_bos, "train_turn_end": turn_end}
    whole = SampleTokenizer(tokenizer, None, rules(**changes)).tokenize(text(content))
    assume(whole)
    pieces = SampleTokenizer(tokenizer, None, rules(context_len=context_len, **changes)).tokenize(text(content))
    assert all(len(piece.token_ids) <= context_len for piece in pieces)
    assert all((piece.token_ids[0] == tokenizer.bos_token_id) == add_bos for piece in pieces)
    wanted = [int(whole[0].token_ids[t]) for t in whole[0].targets]
    assert [int(piece.token_ids[t]) for piece in pieces for t in piece.targets] == wanted
    assert all(1 <= t < len(piece.token_ids) for piece in pieces for t in piece.targets)
    ends = [named and piece.token_ids[-1] == tokenizer.eos_token_id for piece in pieces]
    assert ends == [False] * (len(pieces) - 1) + [named] or (ends[-1:] == [False] and context_len == 2 and not turn_end)
    assert context_len == 2 or pieces[-1].spans  # the end is never learned from BOS alone
    if not add_bos:
        for before, after in itertools.pairwise(pieces):
            assert before.token_ids[-1] == after.token_ids[0]
    for piece in pieces:
        assert [span for span in piece.spans if not 0 <= span.start < span.end <= len(piece.token_ids)] == []


@pytest.mark.parametrize("long_samples", ["auto", "chunk", "truncate", "drop"])
def test_what_long_samples_says(long_samples: str) -> None:
    long_text, long_talk = text("hello the " * 10), talk("hello", "the " * 30)
    tokenizer = build("bytes", "chatml", context_len=20, long_samples=long_samples)
    fates = [tokenizer.explain(sample).fate for sample in (long_text, long_talk, text("hello"))]
    completion = {"auto": "chunked", "chunk": "chunked"}.get(long_samples, long_samples + "d")
    conversation = {"drop": "drop"}.get(long_samples, "truncate")
    expected = {"drop": "dropped", "truncate": "truncated", "truncated": "truncated", "dropd": "dropped"}
    assert fates == [expected.get(completion, completion), expected[conversation], "whole"]


def test_truncation_stays_inside_the_context() -> None:
    whole = one(build("bytes", "chatml", saved_roles=ALL_ROLES).tokenize(talk("hello the", "answer " * 5)))
    for context_len in range(2, len(whole.token_ids) + 1):
        cut = build("bytes", "chatml", context_len=context_len, saved_roles=ALL_ROLES).tokenize(
            talk("hello the", "answer " * 5)
        )
        targets = [t for t in whole.targets if t < context_len]
        assert bool(cut) == bool(targets)
        if cut:
            assert cut[0].token_ids.tolist() == whole.token_ids[:context_len].tolist()
            assert cut[0].targets.tolist() == targets
            assert all(span.start < span.end <= context_len for span in cut[0].spans)
    text_cut = one(build("bytes", context_len=3, long_samples="truncate").tokenize(text("hello the answer")))
    assert "</s>" not in tokens("bytes", text_cut.token_ids)


# -- data sets --------------------------------------------------------------------------------------------------------


@given(st.sampled_from(sorted(KINDS)), st.lists(conversations(ANY_TEXT) | ANY_TEXT.map(text), min_size=1, max_size=8))
@settings(max_examples=100, deadline=None)
def test_in_batches_and_one_by_one_is_the_same(kind: str, samples: list[Sample]) -> None:
    tokenizer = build(kind, "zephyr", context_len=16, saved_roles=ALL_ROLES)
    assert outcome(tokenizer.explain_all(samples)) == outcome((s, tokenizer.explain(s)) for s in samples)


def outcome(results: Iterable[tuple[Sample, TokenizedResult]]) -> list[object]:
    """All results up to the first bad sample, and what is said of that one."""
    done: list[object] = []
    try:
        for sample, result in results:
            done.append((sample, plain(result)))
    except InputError as error:
        done.append(str(error))
    return done


def plain(result: TokenizedResult) -> object:
    pieces = [
        (p.where, p.is_completion, p.token_ids.tolist(), p.spans, p.targets.tolist(), p.key) for p in result.pieces
    ]
    return result.fate, result.reason, pieces


def test_samples_before_a_bad_one_are_given_whatever_is_bad_about_it(monkeypatch: pytest.MonkeyPatch) -> None:
    good = [text("hello"), talk("a", "b"), text("the")]
    tokenizer = build("bytes", "gemma")
    for bad in (talk("a", "b", system="c"), text("\U00104000")):  # refused by the template, and by the encoder
        for at in range(4):
            samples = [*good[:at], bad, *good[at:], talk("a", "b", system="c")]
            *before, message = outcome(tokenizer.explain_all(samples))
            assert [sample for sample, _ in before] == good[:at]
            assert ("private character" if bad.is_completion else "System role") in message
    monkeypatch.setattr("distill.tokenizer.samples._BATCH_CHARACTERS", 5)
    assert outcome(tokenizer.explain_all(iter(good * 3))) == outcome((s, tokenizer.explain(s)) for s in good * 3)


def test_a9_samples_that_truncation_leaves_no_target_are_counted_and_named() -> None:  # huggingface/trl#6668
    long, good = replace(talk("the " * 40, "five"), where="d:2"), replace(talk("a", "b"), where="d:1")
    tokenizer = build("bytes", "chatml", context_len=32)
    found = tokenize_dataset([good, long], tokenizer)
    assert [sample.where for sample in found.samples] == ["d:1"]
    assert (found.counts.without_target, found.counts.first_without_target) == (1, "d:2")
    with pytest.raises(InputError, match=r"^no sample has a target: d:2: context_len 32 ends before it; raise it$"):
        tokenize_dataset([long], tokenizer)


def test_a12_one_bos_where_template_and_tokenizer_both_add_it() -> None:  # OpenRLHF/OpenRLHF#393
    template = ChatTemplate.of(make("bytes", "llama3", True), "student")
    found = [
        one(SampleTokenizer(make("bytes", "llama3", adds_bos), template, rules()).tokenize(talk("2+3?", "five")))
        for adds_bos in (True, False)  # as for a teacher and a student whose tokenizers differ in this alone
    ]
    assert tokens("bytes", found[0].token_ids).count("<s>") == 1
    assert tokens("bytes", found[0].token_ids)[0] == "<s>"
    assert found[0].token_ids.tolist() == found[1].token_ids.tolist()
    assert found[0].key == found[1].key


def test_counts() -> None:
    samples = [
        Sample("d:1", text="hello the " * 20),
        Sample("d:2", text="a"),
        Sample("d:3", turns=talk("hello", "the " * 40).turns),
        Sample("d:4", turns=talk("hello " * 40, "the").turns),
        Sample("d:5", turns=(Turn("user", "a"),)),
        Sample("d:6", turns=talk("a", "a").turns),
        Sample("d:6", turns=talk("a", "a").turns),
    ]
    result = tokenize_dataset(samples, build("bytes", "chatml", context_len=30))
    counts = result.counts
    assert (counts.samples, counts.completions, counts.conversations) == (7, 2, 5)
    assert (counts.chunked, counts.truncated, counts.dropped, counts.without_target) == (1, 1, 0, 2)
    assert counts.first_without_target == "d:4"
    assert [sample.where for sample in result.samples][-3:] == ["d:3", "d:6", "d:6"]
    assert result.samples[-1].key == result.samples[-2].key
    assert tokenize_dataset(samples, build("bytes", "chatml", context_len=30, long_samples="drop")).counts.dropped == 3


@given(st.lists(conversations(ANY_TEXT) | ANY_TEXT.map(text), min_size=2, max_size=6))
@settings(max_examples=30, deadline=None)
def test_keys_differ_exactly_where_ids_differ(samples: list[Sample]) -> None:
    pieces = [piece for sample in samples for piece in build("bytes", "chatml", context_len=24).tokenize(sample)]
    assert len({piece.key for piece in pieces}) == len({piece.token_ids.tobytes() for piece in pieces})


HELLO = talk("hello", "the")
TALKS = "data.jsonl:7: "
TEXTS = "data.jsonl:8: "


@pytest.mark.parametrize(
    ("template", "changes", "sample", "message"),
    [
        (None, {}, HELLO, TALKS + "a conversation needs a format, and no model has a chat template; set prompt_format"),
        (
            "gemma",
            {},
            talk("a", "b", system="c"),
            TALKS + "the chat template refuses this conversation: System role not supported",
        ),
        (
            "{{ messages[0]['content'] + 1 }}",
            {},
            HELLO,
            TALKS + 'the chat template refuses this conversation: can only concatenate str (not "int") to str',
        ),
        (
            "{% for m in messages %}{{ m['content'] | upper }}</s>{% endfor %}",
            {},
            HELLO,
            TALKS + "cannot locate turn 1 (user) in the chat template, which changes its text; "
            "set prompt_format or mend the turn",
        ),
        (
            "{% for m in messages %}{{ m['content'].split('</think>')[-1] }}</s>{% endfor %}",
            {},
            talk("a", "hm</think>b"),
            TALKS + "cannot locate turn 2 (assistant) in the chat template, which changes its text; "
            "set prompt_format or mend the turn",
        ),
        (
            "{% for m in messages %}{{ m['content'] }}</s>{{ m['content'] }}{% endfor %}",
            {},
            HELLO,
            TALKS
            + "cannot locate turn 1 (user) in the chat template, which writes it more than once; set prompt_format",
        ),
        (
            "{% for m in messages %}hell{{ m['content'] }}</s>{% endfor %}",
            {},
            talk("o", "b"),
            TALKS + "a token takes in both the user turn and the template's text around it (near 'llo'); "
            "put white space or a control token between them in prompt_format",
        ),
        (
            "chatml",
            {"crop": 300},
            talk("hello", "\U00104000"),
            TALKS + "the private character U+104000 can't be used in a text; replace it",
        ),
        ("chatml", {"crop": 3}, HELLO, TALKS + "token {id} ('{token}') is in the text, but ids from 3 on are cropped;"),
        (
            None,
            {"crop": 3},
            text("hello"),
            TEXTS + "token {id} ('{token}') is in the text, but ids from 3 on are cropped;",
        ),
        (
            "chatml",
            {"context_len": 4},
            HELLO,
            "no sample has a target: " + TALKS + "context_len 4 ends before it; raise it",
        ),
        (
            "chatml",
            {"saved_roles": frozenset({"system"})},
            HELLO,
            "no sample has a target: " + TALKS + "it has no turn of a role whose save_*_range is true",
        ),
        (
            "no_system",
            {"saved_roles": frozenset({"system"})},
            talk("a", "b", system="c"),
            "no sample has a target: " + TALKS + "it has no turn of a role whose save_*_range is true",
        ),
        (
            None,
            {"context_len": 2, "long_samples": "drop"},
            text("hello the"),
            "no sample has a target: " + TEXTS + "4 tokens, context_len is 2 and long_samples drops those",
        ),
        (None, {"train_turn_end": False}, text("a"), "no sample has a target: " + TEXTS + "no token to predict"),
    ],
)
def test_bad_samples_are_one_line_with_their_place(
    template: str | None, changes: dict[str, object], sample: Sample, message: str
) -> None:
    with pytest.raises(InputError) as error:
        tokenize_dataset([sample], build("bytes", template, **changes))
    if "{id}" in message:
        plain = build("bytes", template).tokenize(sample)[0]
        highest = int(plain.token_ids.max())
        message = message.format(id=highest, token=tokens("bytes", np.array([highest]))[0])
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)


def test_an_empty_dataset_is_refused() -> None:
    with pytest.raises(InputError, match="no sample has a target: the dataset is empty"):
        tokenize_dataset([], build("bytes"))
