"""Which training is unfinished, and whether this start may go on with it.

``<cache_folder>/student/states/<student>/run.json`` stands from a run's first moment to its last; a start that finds
one goes on with it if the values that decide the result are the same.
"""

import hashlib
import itertools
import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from distill.checkpoint import saved_step
from distill.config import OBSERVING, Config, RunOptions
from distill.errors import InputError
from distill.files import TEMPORARY_SUFFIX, make_folder, os_errors, write_durably
from distill.journal import Journal
from distill.making import student_name

_RECORD = "run.json"
_DONE = ".done"


@dataclass(frozen=True, slots=True)
class Run:
    """A training from its first start to its end.

    ``deciding`` are the keys that decide its result, ``identity`` the digests of what it starts from (None until they
    are known), ``name`` that of its exports, ``folder`` its run folder.
    """

    deciding: dict[str, Any]
    identity: dict[str, str]
    name: str
    folder: str

    def digest(self) -> str:
        """Of what its result depends on."""
        return hashlib.sha256(json.dumps([self.deciding, self.identity], sort_keys=True).encode()).hexdigest()


def state_folder(config: Config) -> Path:
    """Where the state of the student's unfinished training is."""
    return Path(config.paths.cache_folder) / "student" / "states" / student_name(config)


def export_folder(config: Config) -> Path:
    """Where students are exported to."""
    return Path(config.paths.cache_folder) / "student" / "trained"


def load_run(state: Path) -> Run | None:
    """The unfinished run of a state folder."""
    path = state / _RECORD
    if not path.exists():
        return None
    try:
        run = Run(**json.loads(path.read_text()))
        if [type(value) for value in (run.deciding, run.identity, run.name, run.folder)] != [dict, dict, str, str]:
            raise ValueError("a value of the wrong type")
        return run
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise InputError(f"{path}: damaged ({error}); start again with --fresh") from error


def has_begun(state: Path) -> bool:
    """Whether the unfinished run of a state folder has done anything that another start would lose or mix with.

    One that was refused, or killed while it collected, has not: what was collected is the cache's.
    """
    return saved_step(state) is not None or Journal.exists(state)


def save_run(state: Path, run: Run) -> None:
    """Make ``run`` the unfinished run of ``state``."""
    make_folder(state)
    write_durably(state / _RECORD, json.dumps(asdict(run), indent=1).encode())


def finish_run(state: Path, run: Run, *, keep_state: bool) -> None:
    """The run is complete: its state goes, or stays under the name of its export."""
    with os_errors("finish the run", state):
        # Renamed first: whatever kills this process, no later run takes the old state for its own.
        if keep_state:
            state.replace(free_name(state.with_name(f"{run.name}_final")))
        else:
            state.replace(free_name(state.with_name(f"{state.name}{_DONE}")))
            for done in state.parent.glob(f"*{_DONE}*"):
                shutil.rmtree(done, ignore_errors=True)


def deciding(config: Config) -> dict[str, Any]:
    """The keys that decide the trained student, as JSON has them."""
    keys = config.deciding("result")
    training = config.training
    if training.lr_scheduler in OBSERVING or training.early_stop_patience or training.save_best_student:
        keys["validate_every_n_epochs"] = config.training.validate_every_n_epochs
    return dict(json.loads(json.dumps(keys)))


def settle(config: Config, options: RunOptions) -> Config:
    """The configuration to run with, given what an unfinished run was started with.

    One that hasn't begun asks for nothing. ``--resume`` takes that run's values over this start's, ``--fresh`` ignores
    them (and has the run set aside). Raises InputError naming the keys that differ if neither is given.
    """
    state = state_folder(config)
    run = None if options.fresh or not has_begun(state) else load_run(state)
    if run is None:
        return config
    now = deciding(config)
    changed = [key for key in now if run.deciding.get(key, now[key]) != now[key]]
    if not changed:
        return config
    if options.resume:
        return Config.from_flat(config.flat() | {key: run.deciding[key] for key in changed})
    raise _differs(", ".join(f"{key} (was {run.deciding[key]!r}, now {now[key]!r})" for key in changed))


def remove_leftovers(config: Config, run: Run) -> None:
    """Exports of ``run`` that a kill cut short."""
    if export_folder(config).is_dir():
        for path in export_folder(config).iterdir():
            if path.name.startswith(f"{run.name}_") and path.name.endswith(TEMPORARY_SUFFIX):
                shutil.rmtree(path, ignore_errors=True)


def set_aside(state: Path) -> None:
    """Move the state of an unfinished run out of the way; nothing is deleted."""
    if state.exists():
        with os_errors("set the old state aside", state):
            state.replace(free_name(state.with_name(f"{state.name}.old")))


def check_identity(run: Run, identity: Mapping[str, str]) -> None:
    """Raises InputError if the unfinished ``run`` started from other models or samples."""
    changed = [name for name, digest in identity.items() if run.identity.get(name) != digest]
    if changed:
        raise _differs(", ".join(changed), way_out="--fresh sets it aside, or give it back what it had")


def new_run(config: Config, identity: dict[str, str]) -> Run:
    """A run without a run folder so far, under a name that no other run has or will get.

    The name is reserved by a file beside the exports, made by whoever comes first.
    """
    exports, stem = make_folder(export_folder(config)), student_name(config)
    for number in itertools.count(1):
        name = stem if number == 1 else f"{stem}-{number}"
        finished = (f"{name}_final", f"{name}_best")
        taken = any(path.name in finished or path.name.startswith(f"{name}_step_") for path in exports.iterdir())
        if not taken and _reserve(exports / f".{name}.reserved", owner=str(state_folder(config))):
            return Run(deciding(config), identity, name, folder="")
    raise AssertionError("numbers don't end")


def _reserve(path: Path, owner: str) -> bool:
    """Whether the name is ``owner``'s now; it stays so if a kill or an error came before its run was recorded."""
    line = f"{owner}\n".encode()  # its end, so that no whole one is the beginning of another
    with os_errors("reserve the student's name", path):
        try:
            with path.open("xb", buffering=0) as file:  # a buffer writes what failed again when it is closed
                file.write(line)
        except FileExistsError:
            return line.startswith(path.read_bytes())  # a full disk may have cut it
    return True


def free_name(path: Path) -> Path:
    """``path``, or with ``-2``, ``-3`` … behind it where that is taken."""
    candidates = (path if number == 1 else path.with_name(f"{path.name}-{number}") for number in range(1, 1_000_000))
    return next(candidate for candidate in candidates if not candidate.exists())


def _differs(what: str, way_out: str = "--resume goes on with its values, --fresh sets it aside") -> InputError:
    return InputError(f"an unfinished run of this student was started with other values: {what}; {way_out}")
