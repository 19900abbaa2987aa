"""Which run is unfinished, under which name it exports, and when a start may go on with it."""

from dataclasses import replace
from pathlib import Path

import pytest

from distill.config import Config, RunOptions
from distill.errors import InputError
from distill.runs import (
    Run,
    check_identity,
    export_folder,
    finish_run,
    load_run,
    new_run,
    save_run,
    set_aside,
    settle,
    state_folder,
)

IDENTITY = {"the student": "a", "the training samples": "b"}


def config_of(tmp_path: Path, **changes: object) -> Config:
    return Config.from_flat(
        {"cache_folder": str(tmp_path), "student_path": str(tmp_path / "models" / "tiny"), **changes}
    )


def begin(config: Config, run: Run) -> None:
    """An unfinished run that has saved a state."""
    save_run(state_folder(config), run)
    (state_folder(config) / "step_1").mkdir()


def test_a_run_that_has_not_begun_asks_for_nothing(tmp_path: Path) -> None:
    """A start that was refused, or killed before its first state, doesn't stand in the way of the corrected one."""
    config = config_of(tmp_path)
    save_run(state_folder(config), new_run(config, IDENTITY))
    other = config_of(tmp_path, lr=0.5)
    assert settle(other, RunOptions()) == other
    (state_folder(config) / "step_2").mkdir()
    with pytest.raises(InputError, match="lr"):
        settle(other, RunOptions())


def test_an_unfinished_run_is_found_and_goes_on_with_the_same_values(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    run = new_run(config, IDENTITY)
    begin(config, run)
    assert load_run(state_folder(config)) == run
    assert settle(config, RunOptions()) == config
    # What decides nothing may change: how often is saved, how many workers there are.
    settle(config_of(tmp_path, save_state_every_minutes=1, num_inference_workers=3), RunOptions())
    check_identity(run, IDENTITY)


def test_other_values_are_named_with_both_ways_out(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    begin(config, new_run(config, IDENTITY))
    other = config_of(tmp_path, lr=0.5, batch_size=7)
    with pytest.raises(InputError, match=r"batch_size \(was 4, now 7\), lr \(was 1e-05, now 0.5\).*--resume.*--fresh"):
        settle(other, RunOptions())
    assert settle(other, RunOptions(resume=True)) == config
    assert settle(other, RunOptions(fresh=True)) == other


def test_validation_times_decide_only_for_schedules_that_look(tmp_path: Path) -> None:
    changes: dict[str, object] = {"lr_scheduler": "reduce_lr_on_plateau"}
    config = config_of(tmp_path, **changes)
    begin(config, new_run(config, IDENTITY))
    with pytest.raises(InputError, match="validate_every_n_epochs"):
        settle(config_of(tmp_path, validate_every_n_epochs=0.5, **changes), RunOptions())


@pytest.mark.parametrize("change", [{"max_steps": 7}, {"num_epochs": 2}, {"batch_size": 2}, {"decay_form": "cosine"}])
def test_a21_what_changes_the_schedule_is_refused_without_a_flag(tmp_path: Path, change: dict[str, object]) -> None:
    config = config_of(tmp_path)
    begin(config, new_run(config, IDENTITY))
    (key,) = change
    with pytest.raises(InputError, match=rf"{key} \(was .*--resume goes on with its values, --fresh sets it aside"):
        settle(config_of(tmp_path, **change), RunOptions())
    assert settle(config_of(tmp_path, **change), RunOptions(resume=True)) == config


@pytest.mark.parametrize("change", [{"early_stop_patience": 2}, {"save_best_student": True}])
def test_validation_times_decide_where_validations_choose(tmp_path: Path, change: dict[str, object]) -> None:
    config = config_of(tmp_path, **change)
    begin(config, new_run(config, IDENTITY))
    with pytest.raises(InputError, match="validate_every_n_epochs"):
        settle(config_of(tmp_path, validate_every_n_epochs=0.5, **change), RunOptions())


def test_other_models_or_samples_are_named(tmp_path: Path) -> None:
    run = new_run(config_of(tmp_path), IDENTITY)
    with pytest.raises(InputError, match="the training samples; --fresh"):
        check_identity(run, IDENTITY | {"the training samples": "c"})


def test_a_name_is_given_once(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    (export_folder(config) / "tiny_final").mkdir(parents=True)
    (export_folder(config) / "tiny-2_step_5").mkdir()
    # Asked again before its run was recorded (a kill, an error), it is still this student's; another's it never is.
    assert [new_run(config, IDENTITY).name for _ in range(2)] == ["tiny-3", "tiny-3"]
    other = config_of(tmp_path, student_path=str(tmp_path / "tiny-3"))
    assert new_run(other, IDENTITY).name == "tiny-3-2"
    reserved = export_folder(config) / ".tiny-3.reserved"
    reserved.write_text(reserved.read_text()[:9])  # as a full disk leaves it
    assert new_run(config, IDENTITY).name == "tiny-3"
    (export_folder(config) / "tiny-3_best").mkdir()
    assert new_run(config, IDENTITY).name == "tiny-4", "a best student is never another run's"
    odd = config_of(tmp_path, student_path=str(tmp_path / "[a]"))
    (export_folder(odd) / "[a]_final").mkdir()
    assert new_run(odd, IDENTITY).name == "[a]-2"


@pytest.mark.parametrize("keep", [True, False])
def test_a_finished_run_leaves_no_state_behind_that_another_could_take(tmp_path: Path, keep: bool) -> None:
    config = config_of(tmp_path)
    state, run = state_folder(config), new_run(config, IDENTITY)
    save_run(state, run)
    (state / "step_3").mkdir()
    finish_run(state, run, keep_state=keep)
    assert load_run(state) is None and not state.exists()
    assert [path.name for path in state.parent.iterdir()] == (["tiny_final"] if keep else [])


def test_setting_aside_deletes_nothing(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    for _ in range(2):
        save_run(state_folder(config), new_run(config, IDENTITY))
        set_aside(state_folder(config))
    assert sorted(path.name for path in state_folder(config).parent.iterdir()) == ["tiny.old", "tiny.old-2"]


def test_a_damaged_record_is_named(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    begin(config, replace(new_run(config, IDENTITY), folder="x"))
    (state_folder(config) / "run.json").write_text("{")
    with pytest.raises(InputError, match=r"run.json: damaged .*--fresh"):
        settle(config, RunOptions())
    settle(config, RunOptions(fresh=True))
