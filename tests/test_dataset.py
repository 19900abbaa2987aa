import errno
import json
import os
from pathlib import Path
from typing import NoReturn

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from distill.dataset import read_samples
from distill.errors import InputError, MachineError
from distill.types import Sample, Turn


@pytest.fixture(autouse=True)
def _in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def read(name: str, content: str | bytes) -> list[Sample]:
    Path(name).write_bytes(content.encode() if isinstance(content, str) else content)
    return list(read_samples(name))


def read_row(row: object) -> Sample:
    [sample] = read("a.jsonl", json.dumps(row))
    return sample


ASKED = (Turn("user", "Why?"), Turn("assistant", "So."))
SYSTEM = Turn("system", "Be brief.")
HUMAN = {"from": "human", "value": "Why?"}
GPT = {"from": "gpt", "value": "So."}


@pytest.mark.parametrize(
    ("row", "turns"),
    [
        ({"conversations": [HUMAN, GPT]}, ASKED),
        ({"init": "", "conversations": [HUMAN, GPT], "tags": [], "source": "x"}, ASKED),
        ({"init": "Be brief.", "conversations": [HUMAN, GPT]}, (SYSTEM, *ASKED)),
        ({"conversations": [{"from": "system", "value": "Be brief."}, HUMAN, GPT], "text": None}, (SYSTEM, *ASKED)),
        ({"messages": [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}]}, ASKED),
        (
            {
                "messages": [
                    {"role": "developer", "content": "Be brief."},
                    {"role": "user", "content": [{"type": "text", "text": "Wh"}, {"type": "text", "text": "y?"}]},
                    {"role": "assistant", "content": "So.", "tool_calls": None},
                ]
            },
            (SYSTEM, *ASKED),
        ),
        ({"prompt": "Why?", "completion": "So."}, ASKED),
        ({"prompt": "Why?", "response": "So.", "text": "Why? So."}, ASKED),
        ({"instruction": "Why?", "input": "", "output": "So."}, ASKED),
        ({"instruction": "Add.", "input": "1 2", "output": "3"}, (Turn("user", "Add.\n\n1 2"), Turn("assistant", "3"))),
    ],
)
def test_forms_of_conversations(row: object, turns: tuple[Turn, ...]) -> None:
    assert read_row(row) == Sample("a.jsonl:1", turns=turns)


@pytest.mark.parametrize(
    "row",
    [
        {"text": " Once\n"},
        {"init": "", "conversations": [{"from": "human", "value": " Once\n"}], "tags": ["x", "completion"]},
    ],
)
def test_forms_of_completions(row: object) -> None:
    sample = read_row(row)
    assert sample == Sample("a.jsonl:1", text=" Once\n")
    assert sample.is_completion


def test_a18_blank_lines_lose_nothing_and_lines_keep_their_physical_numbers() -> None:  # microsoft/graphrag#2424
    content = b'\xef\xbb\xbf{"text": "a"}\r\n\r\n  \n{"text": "b\xe2\x80\xa8c"}\r\n{"text": "d"}'
    assert read("a.jsonl", content) == [
        Sample("a.jsonl:1", text="a"),
        Sample("a.jsonl:4", text="b\u2028c"),
        Sample("a.jsonl:5", text="d"),
    ]


def test_a17_byte_order_mark_and_line_ends_change_nothing() -> None:  # huggingface/datasets#8243
    rows = '{"text": "a"}\n{"text": "b"}\n'
    plain = read("a.jsonl", rows)
    assert read("a.jsonl", "\ufeff" + rows.replace("\n", "\r\n")) == plain
    assert (
        read("a.txt", "\ufeffone\r\ntwo\r\n") == read("a.txt", "one\ntwo\n") == [Sample("a.txt:1", text="one\ntwo\n")]
    )


def test_json_rows_know_where_they_start() -> None:
    content = '\n[ {"text": "a"},\n  {"text":\n   "b"}\n ,\n{"text": "c"}, {"text": "d"} ]\n'
    wheres = [(sample.where, sample.text) for sample in read("a.json", content)]
    assert wheres == [("a.json:2", "a"), ("a.json:3", "b"), ("a.json:6", "c"), ("a.json:6", "d")]
    assert read("a.json", '\n\n{"text":\n "a"}\n') == [Sample("a.json:3", text="a")]


def test_folders_and_lists_in_order() -> None:
    Path("data/sub").mkdir(parents=True)
    for name in ("b.txt", "a.JSONL", "README.md", "._b.jsonl", "sub/c.txt"):
        Path("data", name).write_text('{"text": "a"}' if name.endswith("JSONL") else name)
    Path("z.txt").write_text("z")
    wheres = [sample.where for sample in read_samples(["z.txt", str(Path("data").absolute()), "z.txt"])]
    assert wheres == ["z.txt:1", "data/a.JSONL:1", "data/b.txt:1", "z.txt:1"]


@given(texts=st.lists(st.text(st.characters(exclude_categories=["Cs"])).filter(str.strip), min_size=1))
@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_text_survives_in_either_container(texts: list[str]) -> None:
    rows = [{"text": text} for text in texts]
    lines = "\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    assert [sample.text for sample in read("a.jsonl", lines)] == texts
    assert [sample.text for sample in read("a.json", json.dumps(rows, indent=1))] == texts


GOOD = '{"text": "good"}\n'
KINDS = ".jsonl, .json, .txt, .csv (also .gz or .zst) and .parquet"
KNOWN = "known are conversations, messages, prompt, text"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", GOOD + '{"text": "a"', "a.jsonl:2: broken JSON: Expecting ',' delimiter (column 13)"),
        ("a.jsonl", GOOD + '{"text": "a}\n', "a.jsonl:2: broken JSON: Unterminated string starting at (column 10)"),
        ("a.jsonl", GOOD + '\n{"text": "a\x01"}', "a.jsonl:3: broken JSON: Invalid control character at (column 12)"),
        (
            "a.jsonl",
            '{"text": "a"} {"text": "b"}',
            "a.jsonl:1: broken JSON: more than one value on the line (column 14)",
        ),
        ("a.jsonl", GOOD + '{"text": "a", "n": NaN}', "a.jsonl:2: broken JSON: NaN is no JSON number"),
        ("a.jsonl", '{"text": "a", "text": "b"}', "a.jsonl:1: broken JSON: the key 'text' is given twice"),
        ("a.jsonl", "[" * 100_000, "a.jsonl:1: broken JSON: maximum recursion depth exceeded"),
        ("a.jsonl", GOOD + '{"text": "\\ud83d"}', "a.jsonl:2: text has half a surrogate pair (\\ud83d)"),
        ("a.jsonl", GOOD.encode() + b'{"text": "\xff"}', "a.jsonl:2: not UTF-8 (byte 0xff); save it as UTF-8"),
        ("a.jsonl", GOOD.encode("utf-16"), "a.jsonl:1: not UTF-8 (byte 0xff); save it as UTF-8"),
        ("a.jsonl", '["text"]', "a.jsonl:1: a row is a JSON object, not a list"),
        ("a.jsonl", "null", "a.jsonl:1: a row is a JSON object, not null"),
        ("a.jsonl", "{}", f"a.jsonl:1: unknown form of row with the keys []; {KNOWN}"),
        ("a.jsonl", '{"b": 1, "a": 1}', f"a.jsonl:1: unknown form of row with the keys ['a', 'b']; {KNOWN}"),
        ("a.jsonl", '{"prompt": "a"}', f"a.jsonl:1: unknown form of row with the keys ['prompt']; {KNOWN}"),
        ("a.jsonl", '{"text": " \\n"}', "a.jsonl:1: text is empty"),
        ("a.jsonl", '{"text": 5}', "a.jsonl:1: text is a string, not a number"),
        (
            "a.jsonl",
            '{"prompt": "a", "instruction": "b", "output": "c"}',
            "a.jsonl:1: both prompt and instruction are given",
        ),
        ("a.jsonl", '{"prompt": "a", "output": ""}', "a.jsonl:1: output is empty"),
        ("a.jsonl", '{"prompt": "a", "input": [], "output": "b"}', "a.jsonl:1: input is a string, not a list"),
        ("a.jsonl", '{"conversations": []}', "a.jsonl:1: no turns in conversations"),
        ("a.jsonl", '{"conversations": "a"}', "a.jsonl:1: conversations is a list of turns, not a string"),
        ("a.jsonl", '{"conversations": [true]}', "a.jsonl:1: turn 1 is a JSON object, not true or false"),
        (
            "a.jsonl",
            '{"conversations": [{"from": "human", "value": "a"}, {"from": "robot", "value": "b"}]}',
            "a.jsonl:1: turn 2: unknown role 'robot'; known are system, human, user, gpt, assistant",
        ),
        ("a.jsonl", '{"conversations": [{"value": "a"}]}', "a.jsonl:1: turn 1: unknown role None; known are system"),
        ("a.jsonl", '{"conversations": [{"from": "gpt"}]}', "a.jsonl:1: turn 1: value is missing"),
        ("a.jsonl", '{"conversations": [{"from": "gpt", "value": "\\t"}]}', "a.jsonl:1: turn 1: value is empty"),
        ("a.jsonl", '{"conversations": [{"from": "gpt", "value": "a"}], "init": 1}', "a.jsonl:1: init is a string"),
        ("a.jsonl", '{"conversations": [{"from": "gpt", "value": "a"}], "tags": 1}', "a.jsonl:1: tags is a list"),
        (
            "a.jsonl",
            json.dumps({"conversations": [HUMAN, GPT], "tags": ["completion"]}),
            "a.jsonl:1: a completion (see its tags) has one turn and an empty init",
        ),
        (
            "a.jsonl",
            json.dumps({"init": "x", "conversations": [HUMAN], "tags": ["completion"]}),
            "a.jsonl:1: a completion (see its tags) has one turn and an empty init",
        ),
        (
            "a.jsonl",
            '{"messages": [{"role": "tool", "content": "a"}]}',
            "a.jsonl:1: turn 1: unknown role 'tool'; known are",
        ),
        (
            "a.jsonl",
            '{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}',
            "turn 1: a part of type 'image_url'",
        ),
        ("a.jsonl", '{"messages": [{"role": "user", "content": []}]}', "a.jsonl:1: turn 1: content is empty"),
        (
            "a.jsonl",
            '{"messages": [{"role": "assistant", "content": "a", "tool_calls": [{}]}]}',
            "turn 1: tool_calls are not",
        ),
        ("a.jsonl", "", "a.jsonl: no samples in it"),
        ("a.jsonl", "\r\n \n", "a.jsonl: no samples in it"),
        ("a.json", "[]", "a.json: no samples in it"),
        ("a.json", "", "a.json:1: broken JSON: Expecting value (column 1)"),
        ("a.json", '[{"text": "a"},\n\n{"text": }]', "a.json:3: broken JSON: Expecting value (column 10)"),
        ("a.json", '[{"text": "a"}\n{"text": "b"}]', "a.json:2: broken JSON: expected , or ] after a row"),
        ("a.json", '[{"text": "a"},\n]', "a.json:2: broken JSON: Expecting value"),
        ("a.json", '[{"text": "a"}', "a.json:1: broken JSON: expected , or ] after a row"),
        ("a.json", '[{"text": "a"}]\n\n[]', "a.json:3: broken JSON: more text after the list of rows"),
        (
            "a.json",
            '{"text": "a"}\n{"text": "b"}',
            "a.json:2: more than one value; a file with a row a line is named .jsonl",
        ),
        ("a.json", '[{"text": "a"},\n {"text": ""}]', "a.json:2: text is empty"),
        ("a.json", '[{"text": "a"},\n {"n": Infinity}]', "a.json:2: broken JSON: Infinity is no JSON number"),
        ("a.json", b'\n[{"text":\n"\xc3("}]', "a.json:3: not UTF-8 (byte 0xc3)"),
        ("a.txt", "", "a.txt:1: the file is empty"),
        ("a.txt", " \n", "a.txt:1: the file is empty"),
        ("a.txt", b"one\ntwo\xe9", "a.txt:2: not UTF-8 (byte 0xe9)"),
        ("a.doc", "", f"a.doc: not a kind of file that can be read; known are {KINDS}"),
        ("a.tar.gz", "", f"a.tar.gz: not a kind of file that can be read; known are {KINDS}"),
        ("a.parquet.gz", "", "a.parquet.gz: not a kind of file that can be read"),
        ("a.csv", "", "a.csv: no samples in it"),
        ("a.csv", "text\r\n", "a.csv: no samples in it"),
        ("a.csv", "body\na\n", "a.csv:1: no known column in ['body']; known are conversations, messages, prompt, text"),
        ("a.csv", "\ntext,text\na,b\n", "a.csv:2: the column 'text' is given twice"),
        ("a.csv", "text,n\na,1\n\nb\n", "a.csv:4: 1 cells, but the header has 2; is a quote missing?"),
        ("a.csv", 'text\n"a\nb"\n"c\n', "a.csv:4: broken CSV: unexpected end of data"),
        ("a.csv", 'text\n"a" b\n', "a.csv:2: broken CSV: ',' expected after '\"'; is a quote missing"),
        ("a.csv", b"text\na\n\xff\n", "a.csv:3: not UTF-8 (byte 0xff)"),
        ("a.csv", 'text\n" "\n', "a.csv:2: text is empty"),
        ("a.csv", 'text\n""\n', "a.csv:2: unknown form of row with the keys []; known are conversations, messages, "),
        ("a.csv", "prompt,response\na,\n", "prompt, text (empty: response)"),
        ("a.csv", "messages\n[{]\n", "a.csv:2: messages: broken JSON: Expecting property name enclosed in"),
        ("a.csv", 'tags,text\n"[""x"", ""x""",b\n', "a.csv:2: tags: broken JSON: Expecting ',' delimiter"),
        ("a.csv", "messages\n[1] 2\n", "a.csv:2: messages: broken JSON: more than one value"),
    ],
)
def test_bad_input_is_one_line_with_its_place(name: str, content: str | bytes, message: str) -> None:
    with pytest.raises(InputError) as error:
        read(name, content)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_bad_paths() -> None:
    Path("empty").mkdir()
    Path("empty/notes.doc").touch()
    for path, message in [
        ("missing.jsonl", "missing.jsonl: no such file or folder"),
        ("missing/file.parquet", "missing/file.parquet: no such file or folder"),
        ("./missing/folder", "missing/folder: no such file or folder"),
        ("/missing/folder", "/missing/folder: no such file or folder"),
        ("empty", f"empty: no file in this folder that can be read; known are {KINDS}"),
    ]:
        with pytest.raises(InputError) as error:
            list(read_samples(path))
        assert str(error.value) == message
    with pytest.raises(InputError, match="dataset_path: no samples"):
        list(read_samples([]))


@pytest.mark.parametrize(("number", "error"), [(errno.EIO, MachineError), (errno.EACCES, InputError)])
def test_a_failing_disk_is_not_the_users_fault(
    number: int, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> NoReturn:
        raise OSError(number, os.strerror(number))

    Path("a.txt").write_text("a")
    monkeypatch.setattr(Path, "open", fail)
    with pytest.raises(error, match=rf"^a\.txt: can't be read: {os.strerror(number)}"):
        list(read_samples("a.txt"))


def test_nothing_is_read_before_all_paths_are_known_to_exist() -> None:
    Path("a.txt").write_text("a")
    with pytest.raises(InputError, match=r"missing\.txt"):
        next(iter(read_samples(["a.txt", "missing.txt"])))
