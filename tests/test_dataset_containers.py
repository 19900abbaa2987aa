"""Whatever a row is kept in, it is the same sample; what is damaged, cut off or a bomb is one line."""

import csv
import io
import json
import random
import socket
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import datasets
import pyarrow
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from distill.dataset import read_samples
from distill.dataset.strict_json import JsonStream
from distill.errors import InputError
from distill.types import Sample, Turn
from tests.tokenizer_zoo import build

Rows = list[dict[str, Any]]


@pytest.fixture(autouse=True)
def _in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


# -- the same rows in every container ---------------------------------------------------------------------------------


def as_jsonl(rows: Rows) -> bytes:
    return "\n".join(json.dumps(row, ensure_ascii=False) for row in rows).encode()


def as_json(rows: Rows) -> bytes:
    return json.dumps(rows, indent=1).encode()


def as_csv(rows: Rows, **form: Any) -> bytes:
    columns = sorted({key for row in rows for key in row})
    out = io.StringIO()
    writer = csv.writer(out, **{"lineterminator": "\n", "quoting": csv.QUOTE_ALL, **form})
    writer.writerow(columns)
    for row in rows:
        cells = [row.get(column) for column in columns]
        writer.writerow([cell if isinstance(cell, str) else json.dumps(cell) if cell else "" for cell in cells])
    return out.getvalue().encode()


def as_table(rows: Rows) -> pyarrow.Table:
    return pyarrow.table({key: [row.get(key) for row in rows] for row in rows for key in row})


def as_parquet(rows: Rows, compression: str = "snappy") -> bytes:
    out = pyarrow.BufferOutputStream()
    parquet.write_table(as_table(rows), out, compression=compression, write_page_checksum=True)
    return bytes(out.getvalue())


def as_parquet_of_json(rows: Rows) -> bytes:
    return as_parquet([{k: v if isinstance(v, str) else json.dumps(v) for k, v in row.items()} for row in rows])


def marked(content: bytes) -> bytes:
    return b"\xef\xbb\xbf" + content


def windows_json(rows: Rows) -> bytes:
    return marked(as_json(rows).replace(b"\n", b"\r\n\r\n"))


def windows_csv(rows: Rows) -> bytes:
    return marked(as_csv(rows, lineterminator="\r\n", quoting=csv.QUOTE_MINIMAL)).removesuffix(b"\r\n")


def windows_jsonl(rows: Rows) -> bytes:
    return marked(b"\r\n\r\n \r\n".join(as_jsonl(rows).split(b"\n")) + b"\r\n")


def packed(content: bytes, codec: str) -> bytes:
    out = pyarrow.BufferOutputStream()
    with pyarrow.CompressedOutputStream(out, codec) as stream:
        stream.write(content)
    return bytes(out.getvalue())


CONTAINERS: dict[str, Callable[[Rows], bytes]] = {
    "a.jsonl": as_jsonl,
    "a.json": as_json,
    "a.csv": as_csv,
    "a.parquet": as_parquet,
    "b.parquet": as_parquet_of_json,
    "b.jsonl": windows_jsonl,
    "b.json": windows_json,
    "b.csv": windows_csv,
    "a.jsonl.gz": lambda rows: packed(windows_jsonl(rows), "gzip"),
    "a.JSONL.ZST": lambda rows: packed(as_jsonl(rows), "zstd"),
    "a.json.gz": lambda rows: packed(windows_json(rows), "gzip"),
    "a.json.zst": lambda rows: packed(as_json(rows), "zstd"),
    "a.csv.gz": lambda rows: packed(as_csv(rows), "gzip"),
    "a.csv.zst": lambda rows: packed(windows_csv(rows), "zstd"),
}

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1).filter(str.strip) | st.sampled_from(
    ["a\u2028b\x85\x0c", '"x", ""y""\r\nz\r', "\ufeff,\n", " a\t", "[1]", "null", "NA", "0012", "\\n\x00\x1f", "日本😀"]
)
TURNS = st.lists(st.tuples(st.sampled_from(["user", "assistant"]), TEXTS), min_size=1, max_size=3)
ROWS = st.one_of(
    TEXTS.map(lambda text: {"text": text}),
    st.tuples(TEXTS, TEXTS).map(lambda pair: {"prompt": pair[0], "response": pair[1]}),
    st.tuples(TEXTS, TEXTS, TEXTS).map(lambda t: dict(zip(("instruction", "input", "output"), t, strict=True))),
    TURNS.map(lambda turns: {"messages": [{"role": role, "content": content} for role, content in turns]}),
    st.tuples(TEXTS, TURNS).map(
        lambda pair: {
            "init": pair[0],
            "conversations": [{"from": role, "value": content} for role, content in pair[1]],
            "tags": ["x"],
        }
    ),
    TEXTS.map(lambda text: {"conversations": [{"from": "human", "value": text}], "tags": ["completion"]}),
)


def contents(samples: Iterator[Sample]) -> list[tuple[tuple[Turn, ...], str | None]]:
    return [(sample.turns, sample.text) for sample in samples]


def keys(samples: Iterator[Sample]) -> list[bytes]:
    tokenizer = build("bytes", "chatml")
    return [piece.key for sample in samples for piece in tokenizer.tokenize(sample)]


@given(rows=st.lists(ROWS, min_size=1, max_size=6))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_rows_are_the_same_samples_in_every_container(rows: Rows) -> None:
    found = {}
    for name, write in CONTAINERS.items():
        Path(name).write_bytes(write(rows))
        found[name] = contents(read_samples(name))
    assert len(found["a.jsonl"]) == len(rows)
    for name in CONTAINERS:
        assert found[name] == found["a.jsonl"], name


VARIED: Rows = [
    {"text": "one\r\ntwo\u2028three"},
    {"messages": [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": 'So, "so".'}]},
    {"init": "Be brief.", "conversations": [{"from": "human", "value": "2+3?"}, {"from": "gpt", "value": "5\n"}]},
    {"prompt": "a", "response": "b"},
]


def test_a17_a18_keys_are_the_same_in_every_container(hub_cache: Callable[..., None]) -> None:
    hub_cache("owner", "name", "default", {"train": VARIED})
    Path("plain.jsonl").write_bytes(as_jsonl(VARIED))
    wanted = keys(read_samples("plain.jsonl"))
    assert len(wanted) == len(VARIED)
    assert keys(read_samples("owner/name")) == wanted
    for name, write in CONTAINERS.items():
        Path(name).write_bytes(write(VARIED))
        assert keys(read_samples(name)) == wanted, name


def test_a_folder_may_mix_containers() -> None:
    Path("data").mkdir()
    for name, write in CONTAINERS.items():
        Path("data", name).write_bytes(write(VARIED))
    for stray in ("README.md", "x.tar.gz", "data.gz", ".hidden.parquet"):
        Path("data", stray).write_bytes(b"x")
    Path("data", "z.txt.gz").write_bytes(packed(marked(b"one\r\ntwo"), "gzip"))
    samples = list(read_samples("data"))
    assert samples[-1] == Sample("data/z.txt.gz:1", text="one\ntwo")
    assert len(samples) == len(VARIED) * len(CONTAINERS) + 1


# -- places -----------------------------------------------------------------------------------------------------------


def test_places_are_physical_lines_or_rows() -> None:
    Path("a.csv").write_bytes(b'\n\ntext,n\r\n"one\n\nline",1\r\n\r\n  \ntwo,2\n"three",3')
    assert [(sample.where, sample.text) for sample in read_samples("a.csv")] == [
        ("a.csv:4", "one\n\nline"),
        ("a.csv:9", "two"),
        ("a.csv:10", "three"),
    ]
    rows = [{"text": f"t{i}", "n": i} for i in range(600)]
    for name in ("a.parquet", "a.jsonl.zst"):
        Path(name).write_bytes(as_parquet(rows) if name == "a.parquet" else packed(as_jsonl(rows), "zstd"))
    assert [sample.where for sample in read_samples("a.parquet")][::300] == ["a.parquet:row 1", "a.parquet:row 301"]
    assert [sample.where for sample in read_samples("a.jsonl.zst")][-1] == "a.jsonl.zst:600"
    rows[555]["text"] = " "
    Path("a.parquet").write_bytes(as_parquet(rows))
    with pytest.raises(InputError, match=r"^a\.parquet:row 556: text is empty$"):
        list(read_samples("a.parquet"))


def test_cells_of_every_length() -> None:
    before = csv.field_size_limit()
    Path("a.csv").write_bytes(as_csv([{"text": "x" * 200_000}, {"text": "y"}]))
    reading = iter(read_samples("a.csv"))
    assert len(next(reading).text or "") == 200_000
    assert csv.field_size_limit() == before, "the limit is the whole process's"
    assert next(reading).text == "y"


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"body": ["a"]}, "no known column in ['body']; known are conversations, messages, prompt, text"),
        ({"text": [5]}, "row 1: text is a string, not a number"),
        ({"text": [b"a"]}, "row 1: text is a string, not a number"),
        ({"messages": [["a"]]}, "row 1: turn 1 is a JSON object, not a string"),
        ({"messages": ['[{"role": 5}]']}, "row 1: turn 1: unknown role 5"),
        ({"text": ["a", None], "output": [None, "b"]}, "row 2: unknown form of row with the keys ['output']; "),
    ],
)
def test_bad_rows_of_tables(table: dict[str, list[object]], message: str) -> None:
    parquet.write_table(pyarrow.table(table), "a.parquet")
    with pytest.raises(InputError) as error:
        list(read_samples("a.parquet"))
    assert message in str(error.value) and "\n" not in str(error.value)


def test_turns_may_be_a_list_a_key() -> None:
    turns = {"from": ["human", "gpt"], "value": ["a", "b"]}
    parquet.write_table(pyarrow.table({"conversations": [turns], "image": [b"\xff"]}), "a.parquet")
    assert contents(read_samples("a.parquet")) == [((Turn("user", "a"), Turn("assistant", "b")), None)]
    columns = [pyarrow.array(["a"]), pyarrow.array(["b"])]
    parquet.write_table(pyarrow.Table.from_arrays(columns, names=["text", "text"]), "a.parquet")
    with pytest.raises(InputError, match="the column 'text' is given twice"):
        list(read_samples("a.parquet"))


def test_text_that_is_not_utf8_in_a_table() -> None:
    broken = pyarrow.Array.from_buffers(
        pyarrow.string(), 1, [None, pyarrow.py_buffer(b"\0\0\0\0\1\0\0\0"), pyarrow.py_buffer(b"\xff")]
    )
    parquet.write_table(pyarrow.table({"text": broken}), "a.parquet")
    with pytest.raises(InputError, match=r"a\.parquet:row 1: text that is not UTF-8"):
        list(read_samples("a.parquet"))


# -- damage -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.json.zst", "a.csv.gz", "a.txt.zst", "a.parquet"])
def test_cut_off_or_changed_files_are_one_line(name: str) -> None:
    rows = VARIED * 20
    codec = {"gz": "gzip", "zst": "zstd"}.get(name.rpartition(".")[2])
    whole = packed(b"plain text\n" * 99, "zstd") if ".txt" in name else CONTAINERS[name](rows)
    Path(name).write_bytes(whole)
    wanted = contents(read_samples(name))
    chooser = random.Random(0)
    cuts = [whole[:length] for length in {0, 1, 7, len(whole) - 1, *chooser.sample(range(len(whole)), 20)}]
    flips = []
    for position in chooser.sample(range(len(whole)), 60 * (codec != "zstd")):  # zstd here has no checksum
        flips.append(whole[:position] + bytes([whole[position] ^ 1 << chooser.randrange(8)]) + whole[position + 1 :])
    for content in [*cuts, whole + b"more", b"", b'{"text": "a"}\n', *flips]:
        Path(name).write_bytes(content)
        try:
            assert contents(read_samples(name)) == wanted  # the flipped bit meant nothing
            assert content in flips
        except InputError as error:
            assert str(error).startswith(f"{name}") and "\n" not in str(error)


def test_the_damage_is_named() -> None:
    Path("a.jsonl.gz").write_bytes(packed(b'{"text": "a"}\n' * 99, "gzip")[:-9])
    Path("b.jsonl.zst").write_bytes(b"")
    Path("c.parquet").write_bytes(b"<!DOCTYPE html>")
    for name, reason in [
        ("a.jsonl.gz", "Truncated compressed stream"),
        ("b.jsonl.zst", "the file is empty"),
        ("c.parquet", "Parquet magic bytes not found in footer. Either the file is corrupted or this is not a p"),
    ]:
        with pytest.raises(InputError) as error:
            list(read_samples(name))
        start = f"{name}: damaged, cut off or not what its name says ({reason}"
        assert str(error.value).startswith(start) and str(error.value).endswith("make or download it again")


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.json.zst", "a.txt.gz", "a.csv.zst"])
@pytest.mark.parametrize("content", [b" " * 20_000_000, b'{"text": "' + b"a" * 20_000_000, b'"a\n' * 7_000_000])
def test_a_bomb_ends_at_the_longest_row(name: str, content: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("text", "strict_json"):
        monkeypatch.setattr(f"distill.dataset.{module}.MAX_ROW", 1 << 18)
    head = b"text\n" if ".csv" in name else b"[" if ".json." in name else b""
    Path(name).write_bytes(packed(head + content, "gzip" if name.endswith("gz") else "zstd"))
    tracemalloc.start()
    with pytest.raises(InputError, match=rf"^{name}:\d+: "):
        list(read_samples(name))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 10_000_000


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.json.gz", "a.csv.zst", "a.parquet"])
def test_long_files_are_streamed(name: str) -> None:
    rows = [{"text": f"{i} " * 4000} for i in range(1000)]
    Path(name).write_bytes(CONTAINERS[name](rows))
    tracemalloc.start()
    assert sum(1 for _ in read_samples(name)) == 1000
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert sum(len(row["text"]) for row in rows) > 15_000_000
    assert peak < 8_000_000


# -- JSON in blocks ---------------------------------------------------------------------------------------------------


def read_in_blocks(content: bytes, block: int) -> list[object]:
    found: list[object] = []
    try:
        stream = JsonStream(io.BytesIO(content), "a.json", block)
        while stream.peek():
            found += [stream.line, stream.value()]
    except InputError as error:
        found.append(str(error))
    return found


JSON = st.recursive(
    st.none() | st.booleans() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@given(
    values=st.lists(st.lists(JSON, max_size=3), min_size=1, max_size=4),
    indent=st.sampled_from([None, 1]),
    ascii_only=st.booleans(),
    block=st.integers(1, 40),
    cut=st.integers(0, 60),
    extra=st.sampled_from([b"", b"\xff", b"}", b'"\x01"', b"[NaN]", b'{"a": 1, "a": 2}', b"tru", b'["\\ud8']),
)
@settings(max_examples=200, deadline=None)
def test_json_is_the_same_in_blocks_of_any_size(
    values: list[object], indent: int | None, ascii_only: bool, block: int, cut: int, extra: bytes
) -> None:
    text = "\n \n".join(json.dumps(value, indent=indent, ensure_ascii=ascii_only) for value in values)
    content = text.encode("utf-8", "surrogatepass")
    content = content[: len(content) - cut * bool(extra)] + extra
    found = read_in_blocks(content, block)
    whole = read_in_blocks(content, 1 << 20)
    if whole and isinstance(whole[-1], str) and "not UTF-8" in whole[-1]:  # then a value before it is given first
        assert found[-1] == whole[-1] or "broken JSON" in str(found[-1])
    else:
        assert found == whole
    assert extra or list(whole[1::2]) == values


# -- datasets of the hub ----------------------------------------------------------------------------------------------


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Puts datasets where the library keeps those that it has downloaded; there is no network."""

    def no_network(*_: object, **__: object) -> NoReturn:
        raise AssertionError("the network was asked")

    monkeypatch.setattr(socket, "getaddrinfo", no_network)
    monkeypatch.setattr(socket.socket, "connect", no_network)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "hub"))

    def put(owner: str, name: str, config: str, splits: dict[str, Rows]) -> None:
        folder = tmp_path / "hub" / f"{owner}___{name}" / config / "0.0.0" / "abc"
        folder.mkdir(parents=True)
        for split, rows in splits.items():
            table = as_table(rows)
            with pyarrow.ipc.new_stream(folder / f"{name}-{split}.arrow", table.schema) as stream:
                stream.write_table(table)
        info = {
            "features": datasets.Features.from_arrow_schema(table.schema).to_dict(),
            "builder_name": "parquet",
            "dataset_name": name,
            "config_name": config,
            "version": {"version_str": "0.0.0", "major": 0, "minor": 0, "patch": 0},
            "splits": {
                split: {"name": split, "num_bytes": 1, "num_examples": len(rows), "dataset_name": name}
                for split, rows in splits.items()
            },
        }
        (folder / "dataset_info.json").write_text(json.dumps(info))

    return put


def test_a_cached_dataset_needs_no_network(hub_cache: Callable[..., None]) -> None:
    rows = [{"text": f"t{i}", "n": i} for i in range(300)]
    hub_cache("owner", "name", "default", {"test": [{"text": "x", "n": 0}], "train": rows})
    hub_cache("owner", "two", "main", {"a": [{"text": "a"}], "b": [{"text": "b"}]})
    hub_cache("owner", "two", "other", {"dev": [{"text": "d"}]})
    samples = list(read_samples("owner/name"))
    assert [sample.text for sample in samples] == [row["text"] for row in rows]
    assert samples[299].where == "owner/name:row 300"
    found = list(read_samples(["owner/name:test", "owner/two/main:b", "owner/two/other", "owner/name:train[1:2]"]))
    assert [(sample.where, sample.text) for sample in found] == [
        ("owner/name:test:row 1", "x"),
        ("owner/two/main:b:row 1", "b"),
        ("owner/two/other:row 1", "d"),
        ("owner/name:train[1:2]:row 1", "t1"),
    ]
    Path("owner").mkdir()
    Path("owner/name").write_bytes(b"")
    with pytest.raises(InputError, match="owner/name: not a kind of file"):
        list(read_samples("owner/name"))


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("owner/absent", ["no such file or folder", "Couldn't find cache", "allow_downloads"]),
        ("data/train", ["no such file or folder", "allow_downloads"]),
        ("owner/two/third", ["Available configs in the cache: ['main', 'other']", "allow_downloads"]),
        ("owner/two", ["multiple 'owner/two' configurations", "owner/name/config:split", "allow_downloads"]),
        ("owner/two/main", ["which split?", "owner/two/main:SPLIT", "a, b"]),
        ("owner/two/main:c", ['Unknown split "c"', "allow_downloads"]),
        ("owner/two/other", ["owner/two/other: no known column in ['body']"]),
    ],
)
def test_datasets_that_are_not_there(name: str, parts: list[str], hub_cache: Callable[..., None]) -> None:
    hub_cache("owner", "two", "main", {"a": [{"text": "a"}], "b": [{"text": "b"}]})
    hub_cache("owner", "two", "other", {"dev": [{"body": "d"}]})
    with pytest.raises(InputError) as error:
        list(read_samples(name))
    assert str(error.value).startswith(f"{name}: ") and "\n" not in str(error.value)
    for part in parts:
        assert part in str(error.value)


def test_downloads_only_where_they_are_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def load_dataset(path: str, name: str | None, *, split: str | None) -> datasets.DatasetDict:
        asked.append((path, name, split))
        if path == "owner/gone":
            raise ConnectionError("no\nroute")
        return datasets.DatasetDict({"train": datasets.Dataset(as_table(VARIED))})

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    Path("a.jsonl").write_bytes(as_jsonl(VARIED))
    wanted = contents(read_samples("a.jsonl"))
    assert contents(read_samples("owner/name/main", allow_downloads=True)) == wanted
    with pytest.raises(InputError, match=r"^owner/gone:x: no such file or folder, nor a .* that loads \(no route\)$"):
        list(read_samples("owner/gone:x", allow_downloads=True))
    with pytest.raises(InputError, match="allow_downloads"):
        list(read_samples("owner/gone:x"))
    assert asked == [("owner/name", "main", None), ("owner/gone", None, "x")]
