"""What was collected once serves again: without teacher or text, for a smaller K, for another template."""

import json
import shutil
from pathlib import Path

import pytest

from distill.cache import Layer, ShardImage, Source, find_layers
from distill.cache.gate import Admissions
from distill.files import disk_bytes
from tests.jobs import distill, same_weights, shards_of, summary_of, weights_of, write_config
from tests.toys import make_model_folder


@pytest.fixture(scope="module")
def collected(
    tmp_path_factory: pytest.TempPathFactory, teacher_folder: Path, student_folder: Path, text_file: Path
) -> Path:
    """The folder of a finished run: both splits are in its cache."""
    folder = tmp_path_factory.mktemp("collected")
    distill(write_config(folder, teacher_folder, student_folder, text_file))
    return folder


@pytest.fixture
def downloaded(tmp_path: Path, collected: Path) -> Path:
    """Only the dataset of that cache, as somebody else would get it."""
    shutil.copytree(collected / "cache" / "dataset", tmp_path / "cache" / "dataset")
    return tmp_path


def layers_of(folder: Path) -> list[Path]:
    return [layer for split in ("train", "validation") for layer in find_layers(folder / "cache" / "dataset" / split)]


def test_a_downloaded_cache_trains_the_same_student_without_a_teacher(
    downloaded: Path, collected: Path, student_folder: Path, text_file: Path
) -> None:
    config = write_config(downloaded, downloaded / "no teacher here", student_folder, text_file, use_teachers=False)
    before = shards_of(downloaded / "cache")
    distill(config)
    assert same_weights(weights_of(downloaded / "cache"), weights_of(collected / "cache"))
    assert shards_of(downloaded / "cache") == before
    summary = summary_of(downloaded / "cache")
    assert summary["cache"]["collected_targets"] == 0
    admitted = (downloaded / "cache" / "admitted.txt").read_text().split()
    assert len([word for word in admitted if len(word) == 64]) == len(list(downloaded.rglob("dataset/*/*/*.h5")))


def test_a_downloaded_cache_trains_without_the_text_too(downloaded: Path, student_folder: Path) -> None:
    config = write_config(
        downloaded, downloaded / "none", student_folder, downloaded / "none.jsonl",
        use_teachers=False, dataset_path=None, teacher_models_folder=None,
    )  # fmt: skip
    done = distill(config)
    assert "samples from the cache itself" in done.stdout
    summary = summary_of(downloaded / "cache")
    assert summary["data"]["train"]["targets"] + summary["data"]["validation"]["targets"] == summary["cache"]["targets"]
    assert summary["validation"]["after"]["kl"] < summary["validation"]["before"]["kl"]
    only_assistant = write_config(
        downloaded, downloaded / "none", student_folder, downloaded / "none.jsonl",
        use_teachers=False, dataset_path=None, teacher_models_folder=None, save_user_range=False,
    )  # fmt: skip
    distill(only_assistant)
    assert summary_of(downloaded / "cache")["data"]["train"]["targets"] < summary["data"]["train"]["targets"]


def test_another_text_is_not_in_a_downloaded_cache(downloaded: Path, student_folder: Path) -> None:
    text = downloaded / "other.jsonl"
    text.write_text("".join(json.dumps({"text": f"quite another text, number {n}"}) + "\n" for n in range(9)))
    config = write_config(downloaded, downloaded / "none", student_folder, text, use_teachers=False)
    done = distill(config, code=2)
    assert "are not in the cache" in done.stderr and done.stderr.count("error:") == 1


def test_an_empty_cache_and_another_tokenizer_are_named(tmp_path: Path, student_folder: Path, text_file: Path) -> None:
    config = write_config(tmp_path, tmp_path, student_folder, text_file, use_teachers=False)
    assert "it holds none" in distill(config, code=2).stderr


def test_a_smaller_k_is_served_by_a_larger_layer(
    downloaded: Path, teacher_folder: Path, student_folder: Path, text_file: Path
) -> None:
    config = write_config(downloaded, teacher_folder, student_folder, text_file, save_topK=7)
    before = shards_of(downloaded / "cache")
    distill(config)
    assert shards_of(downloaded / "cache") == before, "nothing was collected"
    assert summary_of(downloaded / "cache")["cache"]["collected_targets"] == 0
    larger = write_config(downloaded, teacher_folder, student_folder, text_file, save_topK=30)
    done = distill(larger, "collect")
    assert "is left as it is; it has K 20, not 30" in done.stdout
    assert before.items() <= shards_of(downloaded / "cache").items()


def test_all_of_the_distribution(tmp_path: Path, teacher_folder: Path, student_folder: Path, text_file: Path) -> None:
    """enable_topK false, and a save_topK beyond the vocabulary: the same layer, which serves any K."""
    config = write_config(tmp_path, teacher_folder, student_folder, text_file, enable_topK=False, save_topK=None)
    distill(config)
    assert summary_of(tmp_path / "cache")["cache"]["top_k"] == 261
    assert summary_of(tmp_path / "cache")["cache"]["kept_mass_mean"] == pytest.approx(1.0, abs=1e-6)
    before = shards_of(tmp_path / "cache")
    distill(write_config(tmp_path, teacher_folder, student_folder, text_file, save_topK=10_000), "collect")
    distill(write_config(tmp_path, teacher_folder, student_folder, text_file, save_topK=20), "collect")
    assert shards_of(tmp_path / "cache") == before


TEMPLATE = {"SYS_START": "", "SYS_END": "", "USER_START": "Q: ", "USER_END": "\n", "ASSISTANT_START": "A: "}
TEMPLATE |= {"ASSISTANT_END": "\n"}


@pytest.fixture
def two_texts(tmp_path: Path, text_file: Path) -> dict[str, str]:
    lines = text_file.read_text().splitlines(keepends=True)
    for name, part in (("train", lines[:50]), ("validation", lines[50:])):
        (tmp_path / f"{name}.jsonl").write_text("".join(part))
    return {
        "dataset_path": str(tmp_path / "train.jsonl"),
        "validation_dataset_path": str(tmp_path / "validation.jsonl"),
    }


def test_rebase_gives_the_records_to_the_new_samples(
    tmp_path: Path, teacher_folder: Path, student_folder: Path, text_file: Path, two_texts: dict[str, str]
) -> None:
    """Another template makes other keys of conversations; the contents, and so the targets, are the same."""
    keys = {**two_texts, "train_turn_end": False, "shard_targets": 250}
    distill(write_config(tmp_path, teacher_folder, student_folder, text_file, **keys), "collect")
    cache = tmp_path / "cache"
    before, size = shards_of(cache), disk_bytes(cache / "dataset")
    keys |= {"prompt_format": TEMPLATE, "rebase_dataset": True}
    config = write_config(tmp_path, teacher_folder, student_folder, text_file, **keys)
    done = distill(config, "collect", code=2)
    assert "add --yes" in done.stderr and shards_of(cache) == before
    # Killed after some shards: one is there twice, one is moved, the others are as they were.
    moved, seal = [], ShardImage.seal

    def killed(self: ShardImage, folder: Path) -> None:
        if len(moved) == 2:
            raise KeyboardInterrupt
        moved.append(self.info.name)
        seal(self, folder)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ShardImage, "seal", killed)
        distill(config, "collect", "--yes", code=130)
    distill(
        write_config(tmp_path, teacher_folder, student_folder, text_file, **keys, use_teachers=False), "train", "--yes"
    )
    assert summary_of(cache)["cache"]["collected_targets"] == 0
    after = shards_of(cache)
    assert not before.keys() & {name for name in after if name.endswith(".h5")}
    assert len(after) == len(before) and abs(disk_bytes(cache / "dataset") - size) < 30_000
    config = write_config(tmp_path, teacher_folder, student_folder, text_file, **keys)
    assert "has all its records already" in distill(config, "collect").stdout


def test_rebase_refuses_another_text(
    tmp_path: Path, teacher_folder: Path, student_folder: Path, text_file: Path, two_texts: dict[str, str]
) -> None:
    distill(write_config(tmp_path, teacher_folder, student_folder, text_file, **two_texts), "collect")
    train = Path(two_texts["dataset_path"])
    train.write_text("".join(line.replace("cat", "horse") for line in train.open()))
    before = shards_of(tmp_path / "cache")
    config = write_config(tmp_path, teacher_folder, student_folder, text_file, **two_texts, rebase_dataset=True)
    done = distill(config, "collect", "--yes", code=2)
    assert "nowhere in the text" in done.stderr and shards_of(tmp_path / "cache") == before
    held_out = write_config(tmp_path, teacher_folder, student_folder, text_file, rebase_dataset=True)
    assert "validation_dataset_path" in distill(held_out, "collect", "--yes", code=2).stderr


def test_rebase_pairs_samples_that_differ_in_their_prompts_alone(
    tmp_path: Path, teacher_folder: Path, student_folder: Path
) -> None:
    """Each answer is "yes": only the contents of all turns tell whose records these are."""
    for name, numbers in (("train", range(100, 116)), ("validation", range(200, 204))):
        rows = [{"prompt": f"is {37 * n} odd", "response": "yes"} for n in numbers]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    texts = {
        "dataset_path": str(tmp_path / "train.jsonl"),
        "validation_dataset_path": str(tmp_path / "validation.jsonl"),
    }
    keys = {**texts, "save_user_range": False, "shard_targets": 16, "cache_precision": "exact"}
    config = write_config(tmp_path, teacher_folder, student_folder, tmp_path / "train.jsonl", **keys)
    distill(config, "collect")
    before = labels_by_prompt(tmp_path)
    keys |= {"prompt_format": TEMPLATE, "rebase_dataset": True}
    config = write_config(tmp_path, teacher_folder, student_folder, tmp_path / "train.jsonl", **keys)
    distill(config, "collect", "--yes")
    after = labels_by_prompt(tmp_path)
    assert after == before and len(after) == 16
    lines = (tmp_path / "train.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "train.jsonl").write_text("".join(lines[4:8]))
    keys |= {"prompt_format": TEMPLATE | {"USER_START": "Question: "}}
    config = write_config(tmp_path, teacher_folder, student_folder, tmp_path / "train.jsonl", **keys)
    kept = shards_of(tmp_path / "cache")
    distill(config, "collect", "--yes", code=2)
    assert shards_of(tmp_path / "cache") == kept


def labels_by_prompt(folder: Path) -> dict[bytes, list[float]]:
    """The real tokens' logprobs of each training sample, by the digits in it."""
    found = {}
    (layer,) = find_layers(folder / "cache" / "dataset" / "train")
    with Admissions(folder / "cache") as admissions, Layer.load(layer, admissions) as opened:
        for name in opened.shards:
            reader = opened.reader(name)
            for row in range(len(reader)):
                span = reader.spans(row)[0]
                prompt = reader.token_ids(row)[span.start : span.end].tobytes()
                found[prompt] = reader.records(row).label_logprobs[:3].tolist()
    return found


def test_a_cache_of_the_training_split_alone_validates_on_a_part_of_it(downloaded: Path, student_folder: Path) -> None:
    shutil.rmtree(downloaded / "cache" / "dataset" / "validation")
    config = write_config(
        downloaded, downloaded / "none", student_folder, downloaded / "none.jsonl",
        use_teachers=False, dataset_path=None, teacher_models_folder=None,
    )  # fmt: skip
    assert "held out" in distill(config).stdout
    assert "nothing to collect with" in distill(config, "collect", code=2).stderr


def test_several_teachers(tmp_path: Path, student_folder: Path, text_file: Path) -> None:
    """A layer each, merged when read; a stray file is named; a name decides nothing but the weight."""
    teachers = tmp_path / "teachers"
    for number, name in enumerate(("b", "a", "c")):
        make_model_folder(teachers / name, seed=10 + number, hidden=32, layers=1)
    (teachers / "readme.txt").touch()
    config = write_config(tmp_path, teachers, student_folder, text_file, teacher_weights={"a": 3.0})
    done = distill(config)
    assert "ignored what is no model: readme.txt" in done.stderr
    assert {folder.name.rpartition("-")[0] for folder in layers_of(tmp_path)} == {"a", "b", "c"}
    summary = summary_of(tmp_path / "cache")
    data = summary["data"]
    assert summary["cache"]["collected_targets"] == 3 * (data["train"]["targets"] + data["validation"]["targets"])
    renamed = tmp_path / "renamed"
    for old, new in (("a", "z"), ("b", "y"), ("c", "x")):
        shutil.copytree(teachers / old, renamed / new)
    other = write_config(tmp_path / "other", renamed, student_folder, text_file, teacher_weights={"z": 3.0})
    shutil.copytree(tmp_path / "cache" / "dataset", tmp_path / "other" / "cache" / "dataset")
    distill(other)
    assert summary_of(tmp_path / "other" / "cache")["cache"]["collected_targets"] == 0
    assert same_weights(weights_of(tmp_path / "cache"), weights_of(tmp_path / "other" / "cache"))


def test_a_half_finished_second_teacher_is_seen_and_finished(
    tmp_path: Path, student_folder: Path, text_file: Path
) -> None:
    teachers = tmp_path / "teachers"
    for number, name in enumerate(("first", "second")):
        make_model_folder(teachers / name, seed=10 + number, hidden=32, layers=1)
    config = write_config(tmp_path, teachers, student_folder, text_file)
    distill(config, "collect")
    before = shards_of(tmp_path / "cache")
    (layer,) = (folder for folder in layers_of(tmp_path) if folder.match("train/second-*"))
    admissions = Admissions(tmp_path / "cache")
    with Layer.load(layer, admissions) as opened:
        opened.drop(sorted(opened.shards)[:1])
    done = distill(config, "train", code=2)
    assert "are not in the cache" in done.stderr
    done = distill(config, "plan")
    assert "train, second:" in done.stdout
    distill(config, "collect")
    assert shards_of(tmp_path / "cache") == before


def test_teachers_of_other_tokens_are_refused(tmp_path: Path, student_folder: Path, text_file: Path) -> None:
    teachers = tmp_path / "teachers"
    for name in ("fits", "strange"):
        make_model_folder(teachers / name, seed=1, hidden=32, layers=1)
    path = teachers / "strange" / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    vocab = tokenizer["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    path.write_text(json.dumps(tokenizer))
    done = distill(write_config(tmp_path, teachers, student_folder, text_file), "collect", code=2)
    assert "teacher strange and student don't fit" in done.stderr and "error:" in done.stderr
    assert not (tmp_path / "cache" / "dataset").exists()


def test_a_source_reads_what_the_larger_layer_has(collected: Path) -> None:
    (folder,) = find_layers(collected / "cache" / "dataset" / "train")
    admissions = Admissions(collected / "cache")
    with Layer.load(folder, admissions) as layer:
        spec = layer.spec
    smaller = type(spec)(**{name: getattr(spec, name) for name in spec.__slots__} | {"top_k": 3})
    with Source.open(folder.parent, smaller, admissions) as source:
        assert not source.own.shards and [layer.folder for layer in source.larger] == [folder]
