"""The recipes of examples/: each is a configuration, means what it says, and one of them trains."""

import json
from pathlib import Path

import pytest

from distill.cli import main
from distill.config import load_with_origins

EXAMPLES = Path(__file__).parent.parent / "examples"
RECIPES = {path.parent.name: path for path in sorted(EXAMPLES.glob("*/config.*"))}


def test_every_recipe_is_found_and_told() -> None:
    assert set(RECIPES) == {"demo", "flat", "layered", "yaml"}
    for name in RECIPES:
        assert len((EXAMPLES / name / "README.md").read_text(encoding="utf-8").splitlines()) <= 20


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_a_configuration_with_its_files(name: str) -> None:
    config = load_with_origins([RECIPES[name]]).config
    assert Path(config.paths.teacher_models_folder or "").is_dir()
    assert Path(str(config.paths.dataset_path)).is_file()
    assert config.paths.student_path is not None or config.paths.student_init is not None


def test_the_habits() -> None:
    flat, layered, yaml = (load_with_origins([RECIPES[name]]).config for name in ("flat", "layered", "yaml"))
    assert (flat.training.lr, flat.training.decay_start, flat.pipeline.ignore_model_type) == (3e-3, 0.8, True)
    init = layered.paths.student_init
    assert init is not None and (init["layers"], init["hidden"]) == (3, 96)
    assert (layered.training.num_epochs, layered.training.max_steps, layered.training.grad_accum_batches) == (
        "auto",
        300,
        4,
    )
    assert (yaml.training.validate_every_n_epochs, yaml.training.num_warmup_steps) == (0.25, 20)


def test_the_layered_one_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = (EXAMPLES / "demo" / "train.jsonl").read_text(encoding="utf-8").splitlines()[:12]
    (tmp_path / "few.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    words = ["dataset_path=few.jsonl", "validation_dataset_path=few.jsonl", "cache_folder=cache", "num_warmup_steps=0"]
    assert main(["--config", "layered", "optimization.iterations=5", "args.batch_size=4", *words]) == 0
    summary = json.loads((tmp_path / "cache/runs/latest/summary.json").read_text())
    assert summary["train"]["steps"] == 5, "as many epochs as five steps take"
    resolved = json.loads((tmp_path / "cache/runs/latest/config.json").read_text())
    assert (resolved["num_epochs"], resolved["batch_size"], resolved["grad_accum_batches"]) == ("auto", 4, 16)
