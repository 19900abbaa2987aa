"""Strangers' shards: whatever is not an honest shard is refused, in a child with limits, opening nothing else."""

import ctypes
import json
import os
import re
import resource
import select
import shlex
import shutil
import signal
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from distill.cache import Admissions, Layer, LayerSpec, ShardImage, ShardReader, build_shard
from distill.cache.gate import Finding, Gate, RefusedShardError, meaning, structure
from distill.cache.gate import gate as gate_module
from distill.cache.gate import inspect as inspect_module
from distill.cache.gate.inspect import inspect
from distill.cache.gate.rules import RefusedError
from distill.cache.shard import shard_path
from distill.errors import InputError
from distill.types import Records
from tests import hostile
from tests.helpers import VOCAB, make_records, make_samples, make_spec

SPEC = make_spec()
SAMPLES = make_samples(40)


KINDS_OF_LAYER = [
    SPEC,
    make_spec(cache_precision="compact"),
    make_spec(mode="full", top_k=VOCAB),
    make_spec(mode="full", top_k=VOCAB, cache_precision="compact"),
]


def layer_kind(spec: LayerSpec) -> str:
    return f"{spec.mode} {spec.cache_precision}"


def honest_image(spec: LayerSpec = SPEC) -> ShardImage:
    records = make_records(SAMPLES, k=spec.top_k)
    return build_shard(SAMPLES, records, layer=spec.describe(), vocab_size=VOCAB)


@pytest.fixture(scope="module")
def image() -> ShardImage:
    return honest_image()


@pytest.fixture(scope="module")
def gate() -> Iterator[Gate]:
    with Gate() as shared:
        yield shared


@pytest.fixture
def shard(tmp_path: Path, image: ShardImage) -> Path:
    """An honest shard in a folder of its own."""
    folder = tmp_path / "layer"
    folder.mkdir()
    image.seal(folder)
    return shard_path(folder, image.info.name)


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    folder = tmp_path / "outside"
    folder.mkdir()
    return folder


class Watch:
    """The kernel's word (inotify) on whether anything in a folder was opened, changed or made."""

    EVENTS = 0x1 | 0x2 | 0x20 | 0x100 | 0x200 | 0x40 | 0x80  # access, modify, open, create, delete, moved from and to

    def __init__(self, folder: Path) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        self.descriptor = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        assert self.descriptor >= 0
        assert libc.inotify_add_watch(self.descriptor, os.fsencode(folder), self.EVENTS) >= 0

    def touched(self) -> bool:
        return bool(select.select([self.descriptor], [], [], 0)[0])

    def close(self) -> None:
        os.close(self.descriptor)


def peak_memory(gate: Gate) -> int:
    assert gate._child is not None
    status = Path(f"/proc/{gate._child.pid}/status").read_text()
    return int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) * 1024  # type: ignore[index]


def child_seconds(gate: Gate) -> float:
    """Processor time of the gate's children, those that have ended included; the clock also shows what else runs."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    living = 0.0
    if gate._child is not None:
        fields = Path(f"/proc/{gate._child.pid}/stat").read_text().rpartition(")")[2].split()
        living = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return ended.ru_utime + ended.ru_stime + living


@pytest.mark.parametrize("spec", KINDS_OF_LAYER, ids=layer_kind)
def test_an_honest_shard_passes(gate: Gate, tmp_path: Path, spec: LayerSpec) -> None:
    image = honest_image(spec)
    image.seal(tmp_path)
    finding = gate.check(shard_path(tmp_path, image.info.name))
    assert finding.info == image.info and finding.layer == spec.describe()


def test_a_watch_sees_what_is_opened(outside: Path) -> None:
    (outside / "x").write_bytes(b"x")
    watch = Watch(outside)
    assert not watch.touched()
    (outside / "x").read_bytes()
    assert watch.touched()
    watch.close()


@pytest.mark.parametrize("name", hostile.KINDS)
def test_hostile_files_are_refused(name: str, gate: Gate, shard: Path, outside: Path) -> None:
    """By name of file and object, within 5 s and 512 MB, and nothing outside the file is opened."""
    kind = hostile.KINDS[name]
    path = kind.build(shard, outside) or shard
    watch = Watch(outside)
    try:
        started = child_seconds(gate)
        with pytest.raises(InputError) as caught:
            gate.check(path)
        assert child_seconds(gate) - started < 5
        assert not watch.touched()
    finally:
        watch.close()
    message = str(caught.value)
    assert str(path) in message and re.search(kind.words, message), message
    assert len(message.splitlines()) == 1
    assert gate._child is None or peak_memory(gate) < 512 << 20
    assert not list(outside.parent.glob("**/*.tmp"))


def test_there_are_many_kinds() -> None:
    assert len(hostile.KINDS) >= 40


def test_a22_external_storage_is_refused_by_any_reader(shard: Path, outside: Path, tmp_path: Path) -> None:
    """A22: exit code 2 naming the object; the file that it points to is never opened."""
    hostile.KINDS["external_storage"].build(shard, outside)
    layer_folder = tmp_path / "dataset" / "train" / SPEC.folder_name
    layer_folder.mkdir(parents=True)
    shard.rename(layer_folder / shard.name)
    (layer_folder / "layer.json").write_bytes(SPEC.to_json())
    watch = Watch(outside)
    with Admissions(tmp_path) as admissions, Layer.load(layer_folder, admissions) as layer:
        assert layer.shards == {}
        (note,) = layer.notes
    assert "entry_logprobs" in note and str(layer_folder / shard.name) in note
    assert (tmp_path / "damaged" / layer_folder.name / shard.name).exists()
    assert not watch.touched()
    watch.close()
    assert InputError.exit_code == 2


# -- each guard is needed -------------------------------------------------------------------------------------------


def lenient_header(file: h5py.File) -> dict[str, Any]:
    return json.loads(str(file.attrs["header"]))  # type: ignore[no-any-return]


def nothing(*args: object) -> None:
    return None


# The guard to take away, and a hostile kind that only it refuses: without the guard the file passes.
NEEDED: dict[str, tuple[Any, Callable[..., Any], str]] = {
    "check_file": (inspect_module, lambda path: path.stat().st_size, "user_block"),
    "check_header": (structure, lenient_header, "second_attribute"),
    "header_of": (structure, lambda value: value, "header_with_more"),
    "check_names": (structure, nothing, "one_array_more"),
    "check_link": (structure, nothing, "external_link"),
    "check_attributes": (structure, nothing, "attribute_of_an_array"),
    "check_dtype": (structure, nothing, "big_endian_type"),
    "check_shape": (structure, nothing, "open_size"),
    "check_layout": (structure, nothing, "compact_layout"),
    "check_external": (structure, nothing, "external_storage"),
    "check_filters": (structure, nothing, "foreign_filter"),
    "check_chunks": (structure, nothing, "missing_chunks"),
    "check_size": (structure, nothing, "compression_bomb"),
    "check_overlap": (structure, nothing, "overlapping_arrays"),
    "check_counts": (meaning, nothing, "hidden_tokens"),
    "check_tokens": (meaning, nothing, "token_outside"),
    "check_spans": (meaning, nothing, "span_outside"),
    "check_targets": (meaning, nothing, "targets_that_fall"),
    "check_lengths": (inspect_module, nothing, "hidden_entries"),
    "check_floats": (inspect_module, nothing, "positive_logprob"),
    "check_entries": (meaning, nothing, "id_twice"),
    "check_masses": (meaning, nothing, "infinite_below"),
    "check_statistics": (meaning, nothing, "impossible_entropy"),
    "check_name": (inspect_module, nothing, "name_of_another_content"),
    "check_arrays": (inspect_module, nothing, "other_numbers_that_mean_something"),
}


@pytest.mark.parametrize("guard", NEEDED)
def test_each_guard_is_needed(guard: str, shard: Path, outside: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module, substitute, kind = NEEDED[guard]
    path = hostile.KINDS[kind].build(shard, outside) or shard
    assert inspect(path)["kind"] == "refused"
    monkeypatch.setattr(module, guard, substitute)
    monkeypatch.setattr(inspect_module, "check_arrays", nothing)  # whoever means harm makes a digest that fits
    assert inspect(path)["kind"] == "passed", inspect(path)


@pytest.mark.parametrize(
    ("module", "bound", "words"),
    [
        (structure, "FILE_BYTES", "a shard has at most"),
        (structure, "HEADER_BYTES", "header: too large"),
        (structure, "CHUNK_BYTES", "chunks of"),
        (structure, "ARRAY_BYTES", "bytes"),
        (structure, "WHOLE_BYTES", "bytes with others"),
    ],
)
def test_each_bound_is_kept(module: Any, bound: str, words: str, shard: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, bound, 1)
    assert words in inspect(shard)["reason"]


@pytest.mark.parametrize("twice", [False, True])
def test_entries_are_checked_in_memory_for_themselves_alone(twice: bool) -> None:
    """Many records with K = 10 of a real vocabulary: a flag for each token of each record would be 1.6 GB."""
    vocab_size, k, count = 49_152, 10, 1 << 15
    starts = np.random.default_rng(0).integers(0, vocab_size - 10 * k, (count, 1))
    ids = (starts + 7 * np.arange(k)).ravel()
    if twice:
        ids[-1] = ids[-3]
    unknown = np.full(count, np.nan, np.float32)
    logprobs = np.full(count * k, -3, np.float32)
    records = Records(np.full(count, k), ids, logprobs, unknown, unknown, unknown)
    tracemalloc.start()
    try:
        with pytest.raises(RefusedError, match="entry_ids: one twice") if twice else nullcontext():
            meaning.check_entries(records, vocab_size, k)
        assert tracemalloc.get_traced_memory()[1] < 32 * count * k
    finally:
        tracemalloc.stop()


# -- mutations ------------------------------------------------------------------------------------------------------


def mutate(data: bytes, rng: np.random.Generator) -> bytes:
    """The file with one to four random changes: bits, bytes, words of all ones, pieces moved, cut or gone."""
    changed = bytearray(data)
    for _ in range(int(rng.integers(1, 5))):
        at, length = int(rng.integers(len(changed))), int(rng.integers(1, 64))
        match int(rng.integers(6)):
            case 0:
                changed[at] ^= 1 << int(rng.integers(8))
            case 1:
                changed[at] = int(rng.integers(256))
            case 2:
                changed[at : at + 8] = b"\xff" * 8
            case 3:
                source = int(rng.integers(len(changed)))
                changed[at : at + length] = changed[source : source + length]
            case 4:
                del changed[at : at + length]
            case 5:
                changed[at : at + length] = bytes(length)
    return bytes(changed)


def content(path: Path) -> tuple[list[object], ...]:
    """All that a reader gives of a shard, to be compared."""
    with ShardReader(path) as reader:
        rows = range(len(reader))
        records = reader.all_records()
        arrays = [getattr(records, name).tobytes() for name in type(records).__slots__]
        return [[reader.key_rows(), *[reader.spans(row) for row in rows]], arrays]  # type: ignore[return-value]


@pytest.mark.parametrize("count", [40, pytest.param(1_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("spec", KINDS_OF_LAYER, ids=layer_kind)
def test_mutated_shards_are_refused_or_identical(spec: LayerSpec, count: int, gate: Gate, tmp_path: Path) -> None:
    image = honest_image(spec)
    image.seal(tmp_path)
    shard = shard_path(tmp_path, image.info.name)
    data, expected, passed = shard.read_bytes(), content(shard), 0
    rng = np.random.default_rng(count)
    for _ in range(count):
        shard.write_bytes(mutate(data, rng))
        started = child_seconds(gate)
        try:
            gate.check(shard)
        except RefusedShardError as error:
            assert str(shard) in str(error)
        except InputError as error:
            assert "format version" in str(error) or "not known here" in str(error), error
        else:
            passed += 1
            assert content(shard) == expected
        assert child_seconds(gate) - started < 5
        assert gate._child is None or peak_memory(gate) < 512 << 20
    assert passed < count / 2


# -- the child --------------------------------------------------------------------------------------------------------


def test_the_child_is_light_and_knows_no_secrets(shard: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_TOKEN", "secret")
    with Gate() as gate:
        gate.check(shard)
        assert gate._child is not None
        process = Path(f"/proc/{gate._child.pid}")
        maps, environment = (process / "maps").read_text(), (process / "environ").read_bytes()
        limits = (process / "limits").read_text()
        assert "torch" not in maps and "h5py" in maps
        assert b"SOME_TOKEN" not in environment and b"HDF5_PLUGIN_PRELOAD=::" in environment
        assert re.search(r"Max address space +536870912 ", limits) and re.search(r"Max file size +0 ", limits)
        assert str((process / "cwd").readlink()).endswith("(deleted)")
        assert peak_memory(gate) < 200 << 20


def test_a_child_that_was_killed_is_replaced(shard: Path) -> None:
    with Gate() as gate:
        gate.check(shard)
        for _ in range(3):
            assert gate._child is not None
            gate._child.kill()
            gate.check(shard)


def test_a_child_that_does_not_answer_is_replaced(shard: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Gate() as gate:
        gate.check(shard)
        assert gate._child is not None
        os.kill(gate._child.pid, signal.SIGSTOP)
        monkeypatch.setattr(gate_module, "WALL_SECONDS", 0.2)
        with pytest.raises(InputError, match="not checked within"):
            gate.check(shard)
        monkeypatch.undo()
        gate.check(shard)


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("while True: pass", "it took too long"),
        ("bytearray(1 << 30)", "MemoryError"),
        ("__import__('pathlib').Path({made!r}).write_text('x')", "File too large"),
        ("open('made', 'w')", "No such file"),
        ("__import__('os').abort()", "signal 6"),
        ("__import__('sys').stdout.write('x' * 100_000 + chr(10))", "broke the checker"),
        ("__import__('sys').stdout.write('[' * 60_000 + chr(10))", "not JSON"),
    ],
)
def test_what_a_file_could_do_to_its_reader(what: str, words: str, shard: Path, tmp_path: Path) -> None:
    """The child's limits hold whatever runs in it; what it answers is not trusted either."""
    program = (
        "import distill.cache.gate.inspect as module\n"
        f"def inspect(path, allow):\n    try:\n        {what.replace('{made!r}', repr(str(tmp_path / 'made')))}\n"
        "    except (OSError, MemoryError) as error:\n"
        "        return {'kind': 'refused', 'reason': str(error) or type(error).__name__}\n"
        "module.inspect = inspect\n"
        "from distill.cache.gate.__main__ import main\nmain()\n"
    )
    with Gate() as gate, pytest.MonkeyPatch.context() as patch:
        patch.setattr(gate_module, "_COMMAND", ("-c", program))
        started = time.monotonic()
        with pytest.raises(RefusedShardError, match=words):
            gate.check(shard)
        assert time.monotonic() - started < 10


def test_a_killed_parent_leaves_no_child(shard: Path) -> None:
    program = (
        "import sys, time\nfrom pathlib import Path\nfrom distill.cache.gate import Gate\n"
        "gate = Gate()\ngate.check(Path(sys.argv[1]))\nprint(gate._child.pid, flush=True)\ntime.sleep(60)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", program, str(shard)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    assert Path(f"/proc/{child}").exists()
    parent.kill()
    parent.wait()
    parent.stdout.close()
    deadline = time.monotonic() + 10
    while _runs(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _runs(child)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace")
def test_the_child_opens_the_file_alone(shard: Path, outside: Path, tmp_path: Path) -> None:
    """What the kernel says: of the files that a hostile one points to, none is opened."""
    for name in ("external_storage", "external_link", "virtual_array"):
        path = tmp_path / name / shard.name
        path.parent.mkdir()
        shutil.copy(shard, path)
        (tmp_path / name / "outside").mkdir()
        hostile.KINDS[name].build(path, tmp_path / name / "outside")
        log = tmp_path / f"{name}.log"
        command = f"strace -f -o {log} -e trace=open,openat,stat,access {sys.executable} -m distill.cache.gate"
        question = json.dumps(str(path)).encode()
        done = subprocess.run(shlex.split(command), input=question, capture_output=True, check=False)
        if b"ptrace" in done.stderr and not done.stdout:
            pytest.skip("strace is not allowed here")
        assert b'"refused"' in done.stdout
        text = log.read_text()
        assert str(path) in text and "secret" not in text


# -- admissions -------------------------------------------------------------------------------------------------------


class Counting(Admissions):
    """Counts what is gated."""

    gated = 0

    def inspect(self, path: Path) -> Finding:
        self.gated += 1
        return super().inspect(path)


def filled(cache: Path, image: ShardImage) -> Path:
    """A cache folder with one layer of one shard, as one that was downloaded."""
    folder = cache / "dataset" / "train" / SPEC.folder_name
    folder.mkdir(parents=True)
    with Admissions() as admissions:
        layer = Layer.open(folder.parent, SPEC, admissions)
        layer.prepare()
        image.seal(folder)
        layer.register(image.info)
    return folder


def read_all(folder: Path, cache: Path) -> int:
    """How many shards had to be gated for reading the layer."""
    with Counting(cache) as admissions, Layer.load(folder, admissions) as layer:
        located = layer.locate(SAMPLES)
        assert len(located) == len(SAMPLES)
        for sample in SAMPLES:
            layer.read(sample, located[sample.key])
        return admissions.gated


def test_a_verdict_is_kept(tmp_path: Path, image: ShardImage) -> None:
    folder = filled(tmp_path, image)
    assert [read_all(folder, tmp_path) for _ in range(3)] == [1, 0, 0]
    assert image.info.sha256 in (tmp_path / "admitted.txt").read_text()


def test_own_shards_are_admitted_when_sealed(tmp_path: Path, image: ShardImage) -> None:
    with Counting(tmp_path) as admissions:
        layer = Layer.open(tmp_path / "dataset" / "train", SPEC, admissions)
        layer.prepare()
        image.seal(layer.folder)
        layer.register(image.info)
        assert admissions.gated == 0
    assert read_all(layer.folder, tmp_path) == 0


def test_a_list_of_verdicts_that_was_copied_does_not_count(tmp_path: Path, image: ShardImage) -> None:
    """Who shares a whole cache folder can't vouch for what is in it."""
    folder = filled(tmp_path / "theirs", image)
    assert read_all(folder, tmp_path / "theirs") == 1
    shutil.copytree(tmp_path / "theirs", tmp_path / "mine")
    mine = tmp_path / "mine" / folder.relative_to(tmp_path / "theirs")
    assert [read_all(mine, tmp_path / "mine") for _ in range(2)] == [1, 0]


@pytest.mark.parametrize("damage", ["torn", "noise", "empty", "gone"])
def test_a_torn_list_only_costs_a_check(damage: str, tmp_path: Path, image: ShardImage) -> None:
    folder = filled(tmp_path, image)
    read_all(folder, tmp_path)
    path = tmp_path / "admitted.txt"
    match damage:
        case "torn":
            os.truncate(path, path.stat().st_size - 9)
        case "noise":
            path.write_bytes(np.random.default_rng(1).bytes(500))
        case "empty":
            path.write_bytes(b"")
        case "gone":
            path.unlink()
    assert [read_all(folder, tmp_path) for _ in range(3)][-1] == 0


def test_where_the_list_cannot_be_written_it_holds_for_the_process() -> None:
    """A cache on a read-only disk is read all the same."""
    admissions = Admissions(Path("/proc/sys"))  # writable to nobody
    admissions.add("0" * 64)
    assert "0" * 64 in admissions and "0" * 64 not in Admissions(Path("/proc/sys"))


def test_a_read_only_cache_is_read_and_left_alone(tmp_path: Path, image: ShardImage) -> None:
    """Not even with a lost index is anything written by a reader."""
    folder = filled(tmp_path, image)
    (folder / "index.jsonl").unlink()
    before = sorted(tmp_path.rglob("*"))
    with Admissions(Path("/proc/sys")) as admissions, Layer.load(folder, admissions) as layer:
        located = layer.locate(SAMPLES)
        assert all(len(layer.read(sample, located[sample.key])) for sample in SAMPLES)
        assert len(layer.notes) == 1 and "adopted" in layer.notes[0]
    assert sorted(tmp_path.rglob("*")) == before


def test_a_changed_file_is_checked_again(tmp_path: Path, image: ShardImage) -> None:
    folder = filled(tmp_path, image)
    read_all(folder, tmp_path)
    path = shard_path(folder, image.info.name)
    hostile.KINDS["id_outside"].build(path, tmp_path)
    with Admissions(tmp_path) as admissions, Layer.load(folder, admissions) as layer:
        if layer.shards:  # its size is still what the index says
            with pytest.raises(InputError, match="entry_ids: one outside"):
                layer.reader(image.info.name)
        else:
            assert "entry_ids: one outside" in layer.notes[0]
        assert layer.shards == {}
