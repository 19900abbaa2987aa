import json
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import AddedToken

from distill.config import Config
from distill.errors import InputError
from distill.tokenizer import (
    ChatTemplate,
    PromptFormat,
    SampleTokenizer,
    fit_vocabularies,
    is_completion_model,
    load_tokenizer,
    real_vocab_size,
    resolve_template,
    token_map,
    token_map_digest,
)
from distill.types import Sample, Span, Turn, sample_key
from tests.tokenizer_zoo import (
    ALL_ROLES,
    ANY_TEXT,
    CONTROLS,
    FORMAT,
    KINDS,
    NOTE,
    ORDINARY_TEXT,
    TEMPLATES,
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

# -- spans and control tokens -----------------------------------------------------------------------------------------


@given(st.sampled_from(sorted(KINDS)), st.sampled_from(sorted(TEMPLATES)), conversations(ANY_TEXT))
@settings(max_examples=200, deadline=None)
def test_spans_are_the_contents_and_contents_are_plain_text(kind: str, template: str, sample: Sample) -> None:
    has_system = sample.turns[0].role == "system"
    assume(not (has_system and template == "gemma"))
    tokenizer = build(kind, template, saved_roles=ALL_ROLES)
    try:
        result = one(tokenizer.tokenize(sample))
    except InputError as error:  # Only BPE without word boundaries glues contents to the template's letters.
        assert "a token takes in both" in str(error)
        assert kind in ("metaspace-always", "metaspace-first", "legacy", "unigram")
        return
    written = sample.turns[has_system and template == "no_system" :]
    if template == "mistral" and has_system:  # It writes the system turn into the last user turn.
        last_user = max(i for i, turn in enumerate(sample.turns) if turn.role == "user")
        written = (*sample.turns[1:last_user], sample.turns[0], *sample.turns[last_user:])
    assert [span.role for span in result.spans] == [turn.role for turn in written]
    ids = make(kind)
    control_ids = {ids.convert_tokens_to_ids(control) for control in CONTROLS} - {ids.unk_token_id}
    control_ids -= {ids.convert_tokens_to_ids("<unk>")} if kind in ("unigram", "characters") else set()
    for span, turn, decoded in zip(result.spans, written, contents(kind, result), strict=True):
        assert not control_ids & set(result.token_ids[span.start : span.end].tolist())
        if kind in ("bytes", "bytes-trimmed"):
            assert decoded.strip() == turn.content.strip()
            assert turn.content.strip() in decoded
    saved = [t for span in result.spans for t in range(span.start, span.end)]
    assert set(saved) - {0} <= set(result.targets.tolist())
    assert result.targets.tolist() == sorted(set(result.targets.tolist()))
    assert result.key == sample_key(result.token_ids)


@given(st.sampled_from(sorted(KINDS)), st.sampled_from(sorted(TEMPLATES)), conversations(ORDINARY_TEXT))
@settings(max_examples=100, deadline=None)
def test_ordinary_text_is_tokenized_as_the_tokenizer_does_it(kind: str, template: str, sample: Sample) -> None:
    assume(not (sample.turns[0].role == "system" and template == "gemma"))
    tokenizer = make(kind, template)
    messages = [{"role": turn.role, "content": turn.content} for turn in sample.turns]
    expected = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False)
    try:
        assert one(build(kind, template).tokenize(sample)).token_ids.tolist() == expected
    except InputError as error:
        assert "a token takes in both" in str(error)


@pytest.mark.parametrize("kind", ["bytes", "bytes-trimmed", "characters"])
def test_exact_contents_between_control_tokens(kind: str) -> None:
    sample = talk(" hello\n\n", "the <|im_end|>\tend ", "</s><s>", "  a", system="<|im_start|>")
    result = one(build(kind, "{% for m in messages %}<turn>{{ m['content'] }}<|eot|>{% endfor %}").tokenize(sample))
    assert contents(kind, result) == [turn.content for turn in sample.turns]


@pytest.mark.parametrize("kind", [kind for kind in sorted(KINDS) if kind != "unigram"])
@pytest.mark.parametrize("control", [*CONTROLS, "<|im_end|><|im_end|>", "<</s>s>"])
def test_control_strings_survive_as_text(kind: str, control: str) -> None:
    decoded = contents(kind, one(build(kind, "chatml").tokenize(talk("hello", f"a {control} b"))))[1]
    assert decoded.strip() == f"a {control} b"
    sample = one(build(kind).tokenize(text(f"a {control} b")))
    assert contents(kind, sample) == [f"a {control} b"]
    assert tokens(kind, sample.token_ids)[-1] == "</s>"


def test_added_tokens_are_control_tokens_only_where_the_template_writes_them() -> None:
    note_id = make("bytes").convert_tokens_to_ids(NOTE)
    sample = talk("hello", f"a {NOTE} b")
    kept = one(build("bytes", "chatml").tokenize(sample))
    assert note_id in kept.token_ids  # no part of the format: an ordinary word of this vocabulary
    plain = one(build("bytes", "noted").tokenize(sample))
    span = plain.spans[1]
    assert note_id not in plain.token_ids[span.start : span.end]
    assert plain.token_ids[plain.targets[-1]] == note_id  # it ends the turn


@pytest.mark.parametrize("kind", sorted(KINDS))
@pytest.mark.parametrize("flag", ["special", "lstrip", "rstrip", "normalized", "single_word"])
def test_control_tokens_with_flags_are_read_as_the_tokenizer_reads_them(kind: str, flag: str) -> None:
    flags = {"special": True, "normalized": False, flag: flag != "special"}
    template = "{% for m in messages %}<|a|>\n{{ m['content'] }}<|z|>\n{% endfor %}"
    tokenizer = make.__wrapped__(kind, template)
    tokenizer.add_tokens([AddedToken("<|a|>", **flags), AddedToken("<|z|>", **flags)])
    messages = [{"role": "user", "content": "hello!"}, {"role": "assistant", "content": "the than"}]
    result = one(
        SampleTokenizer(tokenizer, ChatTemplate.of(tokenizer, "model"), rules()).tokenize(talk("hello!", "the than"))
    )
    assert result.token_ids.tolist() == tokenizer.apply_chat_template(messages, return_dict=False)
    assert [tokenizer.decode(result.token_ids[s.start : s.end]).strip() for s in result.spans] == ["hello!", "the than"]
    plain = one(
        SampleTokenizer(tokenizer, ChatTemplate.of(tokenizer, "model"), rules()).tokenize(talk("<|z|>", "the <|a|>"))
    )
    marks = set(tokenizer.convert_tokens_to_ids(["<|a|>", "<|z|>"]))
    assert not any(marks & set(plain.token_ids[span.start : span.end].tolist()) for span in plain.spans)


def test_characters_of_several_tokens_and_trimmed_offsets() -> None:
    for kind in ("bytes", "bytes-trimmed", "metaspace-first"):
        result = one(build(kind, "human").tokenize(talk("😀", "😀 日本")))
        assert [decoded.strip() for decoded in contents(kind, result)] == ["😀", "😀 日本"]
    spaces = one(build("bytes-trimmed", "phi").tokenize(talk("   a   ", "   ")))
    assert contents("bytes-trimmed", spaces) == ["   a   ", "   "]


# -- templates --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("template", "ends"),
    [
        ("chatml", ["<|im_end|>", "<|im_end|>"]),
        ("llama2", ["[/INST]", "</s>"]),
        ("llama3", ["<|eot|>", "<|eot|>"]),
        ("gemma", ["<|eot|>", "<|eot|>"]),
        ("zephyr", ["</s>", "</s>"]),
        ("phi", ["<|eot|>", "<|eot|>"]),
        ("mistral", ["[/INST]", "</s>"]),
        ("human", ["Ċ", "Ċ"]),
        ("noted", [NOTE, NOTE]),
        ("{% for m in messages %}<turn>{{ m['content'] }}{% endfor %}", ["<turn>"]),
        ("{% for m in messages %}<s>{{ m['content'] }}x</s>{% endfor %}", ["</s>", "</s>"]),
        ("{% for m in messages %}{{ m['content'] }} \n<s>{% endfor %}", ["<s>", "<s>"]),
    ],
)
def test_the_token_that_ends_a_turn_is_a_target(template: str, ends: list[str]) -> None:
    sample = talk("hello the?", "hello!")
    result = one(build("bytes", template, saved_roles=ALL_ROLES).tokenize(sample))
    inside = {t for span in result.spans for t in range(span.start, span.end)}
    found = tokens("bytes", result.token_ids[[t for t in result.targets if t not in inside]])
    assert found == ends
    without = one(build("bytes", template, saved_roles=ALL_ROLES, train_turn_end=False).tokenize(sample))
    assert set(without.targets.tolist()) == inside - {0}
    assert without.key == result.key


def test_only_saved_roles_are_targets() -> None:
    sample = talk("hello", "the", "a", "than", system="this")
    for roles in [set(), {"system"}, {"user"}, {"assistant"}, {"system", "assistant"}, ALL_ROLES]:
        found = build("bytes", "chatml", saved_roles=frozenset(roles), train_turn_end=False).tokenize(sample)
        wanted = [turn.content for turn in sample.turns if turn.role in roles]
        assert bool(found) == bool(wanted)
        if found:
            assert len(found[0].spans) == 5
            assert make("bytes").decode(found[0].token_ids[found[0].targets]) == "".join(wanted)


def test_first_answer_token_to_end_mark() -> None:  # tloen/alpaca-lora#306
    formats = {**FORMAT, "USER_START": "Q: ", "USER_END": " ", "ASSISTANT_START": "A: ", "ASSISTANT_END": "</s>"}
    tokenizer = SampleTokenizer(make("characters"), PromptFormat.from_mapping(formats, "prompt_format"), rules())
    result = one(tokenizer.tokenize(talk("2+3?", "five.")))
    assert "".join(tokens("characters", result.token_ids)) == "Q: 2+3? A: five.</s>"
    assert tokens("characters", result.token_ids[result.targets]) == ["f", "i", "v", "e", ".", "</s>"]
    assert result.spans == (Span(3, 7, "user"), Span(11, 16, "assistant"))


def test_prompt_formats_are_unescaped_once(tmp_path: Path) -> None:
    """The configuration does it for its own; a file in a model folder may have typed escapes, too."""
    typed, real = {**FORMAT, "SYS_START": "\\t#\\n"}, {**FORMAT, "SYS_START": "\t#\n"}
    sample = talk("a", "b", system="c")
    (tmp_path / "prompt_format.json").write_text(json.dumps(typed))
    from_file = resolve_template(None, [(tmp_path, make("bytes"))])
    assert from_file is not None
    assert from_file.render(sample) == PromptFormat.from_mapping(real, "x").render(sample)
    assert from_file.render(sample).text == "\t#\nc\n### User:\na\n### Assistant:\nb</s>\n"
    assert PromptFormat.from_mapping(typed, "x").render(sample).text.startswith("\\t#\\nc\n")
    config = Config.from_flat({"prompt_format": {**FORMAT, "SYS_START": "\\\\n"}}).student.prompt_format
    from_config = resolve_template(config, [])
    assert from_config is not None
    assert from_config.render(sample).text.startswith("\\\nc"), "a backslash before an escape stays one"


def test_templates_see_a_fixed_date() -> None:
    template = "{{ strftime_now('%d %b %Y, %Y-%m-%d') }}\n{% for m in messages %}<turn>{{ m['content'] }}{% endfor %}"
    result = one(build("bytes", template).tokenize(talk("a", "b")))
    assert make("bytes").decode(result.token_ids).startswith("26 Jul 2024, 2024-07-26\n<turn>a")


def test_resolving_the_one_template(tmp_path: Path) -> None:
    student, teacher = tmp_path / "student", tmp_path / "teacher"
    student.mkdir(), teacher.mkdir()
    bare, chat = make("bytes"), make("bytes", "chatml")
    assert resolve_template(None, [(student, bare), (teacher, bare)]) is None
    assert isinstance(resolve_template(None, [(student, bare), (teacher, chat)]), ChatTemplate)
    (teacher / "prompt_format.json").write_text(json.dumps(FORMAT))
    assert isinstance(resolve_template(None, [(student, bare), (teacher, chat)]), PromptFormat)
    assert isinstance(resolve_template(None, [(student, chat), (teacher, bare)]), ChatTemplate)
    (student / "prompt_format.json").write_text(json.dumps({**FORMAT, "USER_START": "student"}))
    found = resolve_template(None, [(student, chat), (teacher, chat)])
    assert isinstance(found, PromptFormat)
    assert found.around["user"][0] == "student"
    found = resolve_template({**FORMAT, "USER_START": "config"}, [(student, chat)])
    assert isinstance(found, PromptFormat)
    assert found.around["user"][0] == "config"


def test_a_borrowed_template_keeps_its_owners_special_tokens() -> None:
    owner, student = make("bytes", "zephyr"), make("bytes", named=False)
    result = one(SampleTokenizer(student, ChatTemplate.of(owner, "teacher"), rules()).tokenize(talk("a", "b")))
    assert tokens("bytes", result.token_ids[result.targets]) == ["b", "</s>"]


# -- model folders ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"USER_END": None},
            "prompt_format: USER_END is missing or no string; a prompt format has SYS_START, SYS_END, ",
        ),
        ({"USER_END": 5}, "prompt_format: USER_END is missing or no string"),
        (
            {"USER_STOP": ""},
            "prompt_format: unknown key 'USER_STOP'; a prompt format has SYS_START, SYS_END, USER_START",
        ),
    ],
)
def test_bad_prompt_formats(changes: dict[str, object], message: str) -> None:
    with pytest.raises(InputError) as error:
        resolve_template({**FORMAT, **changes}, [])
    assert str(error.value).startswith(message)


def test_loading_a_saved_tokenizer(tmp_path: Path) -> None:
    make("bytes", "chatml", True).save_pretrained(tmp_path)
    loaded = load_tokenizer(tmp_path, False)
    sample = talk("hello <s>", "the")
    expected = one(build("bytes", "chatml").tokenize(sample))
    found = one(SampleTokenizer(loaded, resolve_template(None, [(tmp_path, loaded)]), rules()).tokenize(sample))
    assert found.key == expected.key
    assert token_map(loaded) == token_map(make("bytes"))
    for file, content in [("tokenizer.json", "{"), ("tokenizer_config.json", "[")]:
        good = (tmp_path / file).read_text()
        (tmp_path / file).write_text(content)
        with pytest.raises(InputError) as error:
            load_tokenizer(tmp_path, False)
        assert str(error.value).startswith(str(tmp_path)) and file.partition(".")[0].split("_")[0] in str(error.value)
        (tmp_path / file).write_text(good)
    with pytest.raises(InputError, match="nowhere: no such model folder"):
        load_tokenizer(tmp_path / "nowhere", False)
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="empty: its tokenizer can't be loaded"):
        load_tokenizer(tmp_path / "empty", False)


def test_completion_models() -> None:
    chat, bare = make("bytes", "chatml"), make("bytes")
    assert (is_completion_model(chat, None), is_completion_model(bare, None)) == (False, True)
    assert is_completion_model(chat, True) and not is_completion_model(bare, False)


def test_vocabularies_that_fit() -> None:
    small, large = make("characters"), make.__wrapped__("characters", named=False)
    size = real_vocab_size(small)
    large.add_tokens([AddedToken("<extra>")])
    assert size == max(token_map(small)) + 1 == real_vocab_size(large) - 1
    assert fit_vocabularies(large, small, None) == fit_vocabularies(small, large, None) == size
    assert fit_vocabularies(large, small, 5) == 5
    assert token_map_digest(small, size) == token_map_digest(large, size)
    assert token_map_digest(small, size + 1) != token_map_digest(large, size + 1)
    with pytest.raises(InputError) as error:
        fit_vocabularies(large, small, size + 10)
    assert str(error.value) == (
        f"teacher and student don't fit: id {size} is '<extra>' for the teacher and no token for the student; "
        f"take models of one vocabulary, or set crop_distr_to_size to {size} or less"
    )
    assert fit_vocabularies(small, small, size + 10) == size


def test_vocabularies_that_differ() -> None:
    with pytest.raises(InputError, match=r"id \d+ is '.+' for the teacher and '.+' for the student"):
        fit_vocabularies(make("bytes"), make("unigram"), None)
    crop = fit_vocabularies(make("bytes"), make("unigram"), len(CONTROLS))
    assert token_map_digest(make("bytes"), crop) == token_map_digest(make("unigram"), crop)
    assert token_map_digest(make("bytes"), 60) != token_map_digest(make("unigram"), 60)


def test_a_prompt_format_renders_the_same_as_its_chat_template() -> None:
    """The exported student carries the format that it was trained on."""
    parts = {
        "SYS_START": "#Sys:\n", "SYS_END": "\n\n", "USER_START": '#"User"\\t:', "USER_END": "{{ x }}",
        "ASSISTANT_START": "#AI 'é'\n", "ASSISTANT_END": "</s>",
    }  # fmt: skip
    prompt_format = PromptFormat.from_mapping(parts, "here")
    turns = (Turn("system", "a\\nb"), Turn("user", "b"), Turn("assistant", "c"), Turn("user", "d"))
    text = prompt_format.render(Sample("here", turns)).text
    messages = [{"role": turn.role, "content": turn.content} for turn in turns]
    template = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True).from_string(prompt_format.jinja())
    assert template.render(messages=messages) == text
    assert template.render(messages=messages, add_generation_prompt=True) == text + "#AI 'é'\n"
