"""Sweeps: the combinations, one run each, and the table; a slip in one of them stops all before the first."""

import json
from pathlib import Path

import pytest

from distill import cli, pipeline
from distill.config import Config, RunOptions
from distill.errors import InputError
from distill.sweep import sweep_points


@pytest.mark.parametrize(
    ("words", "labels"),
    [
        (["-m", "lr=1,2"], ["lr=1", "lr=2"]),
        (["lr=1,2", "run", "-m", "seed=3,4"], ["lr=1 seed=3", "lr=1 seed=4", "lr=2 seed=3", "lr=2 seed=4"]),
        (["-m", "betas=[0.1,0.2],[0.3,0.4]", "seed=1"], ["betas=[0.1,0.2]", "betas=[0.3,0.4]"]),
        (["-m", 'loss={"kl":1,"ce":1},kl', "--lr=1,2"], ['loss={"kl":1,"ce":1}', "loss=kl"]),
        (["-m", "wandb_comment='a,b',c"], ["wandb_comment='a,b'", "wandb_comment=c"]),
    ],
)
def test_combinations(words: list[str], labels: list[str]) -> None:
    points = sweep_points(words)
    assert [point.label for point in points] == labels
    assert all("-m" not in point.words and len(point.words) == len(words) - 1 for point in points)


def test_nothing_varies() -> None:
    with pytest.raises(InputError, match="nothing varies"):
        sweep_points(["-m", "lr=1", "betas=[0.1,0.2]"])


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Config]:
    """The configurations that were run; each run leaves a summary."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    configs: list[Config] = []

    def run(config: Config, _: RunOptions) -> None:
        if config.pipeline.seed == 13:
            raise InputError("seed: unlucky")
        configs.append(config)
        folder = Path(config.paths.cache_folder) / "runs" / f"run-{len(configs)}"
        folder.mkdir(parents=True)
        metrics = {"before": {"kl": 2.0, "ce": 3.0}, "after": {"kl": 10 * config.training.lr, "ce": None}}
        summary = {"train": {"steps": 7, "seconds": 1.25}, "validation": metrics}
        (folder / "summary.json").write_text(json.dumps(summary))
        (folder.parent / "latest").write_text(folder.name)  # as where there are no links

    monkeypatch.setattr(pipeline, "run", run)
    return configs


def test_runs_one_after_the_other_and_a_table(made: list[Config], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["-m", "lr=0.1,0.2", "-bs", "3"]) == 0
    assert [(config.training.lr, config.training.batch_size) for config in made] == [(0.1, 3), (0.2, 3)]
    assert capsys.readouterr().out.splitlines()[-3:] == [
        "run  values  steps  seconds  KL before  KL after  CE after",
        "1    lr=0.1  7      1.2      2.0000     1.0000",
        "2    lr=0.2  7      1.2      2.0000     2.0000",
    ]


def test_a_slip_stops_all_and_a_failure_keeps_the_table(made: list[Config], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["-m", "lr=0.1,fast"]) == 2
    assert (made, capsys.readouterr().err) == ([], 'error: lr: must be a number, not "fast"\n')
    assert cli.main(["-m", "seed=1,13,2"]) == 2
    printed = capsys.readouterr()
    assert printed.out.splitlines()[-1].startswith("1    seed=1  7")
    assert printed.err == "error: seed: unlucky\n"
    assert cli.main(["plan", "-m", "seed=1,2"]) == 2
    assert capsys.readouterr().err == "error: -m: has no meaning for plan, only for run and train\n"
