"""Which training is unfinished, and whether this start may go on with it.

``<cache_folder>/student/states/<student>/run.json`` stands from a run's first moment to its last; a start that finds
one goes on with it if the values that decide the result are the same.
"""

import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from distill.config import Config, RunOptions
from distill.errors import InputError
from distill.files import make_folder, os_errors, write_durably

_RECORD = "run.json"


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


def state_folder(config: Config) -> Path:
    """Where the state of the student's unfinished training is."""
    student = Path(config.paths.student_path or "student").name
    return Path(config.paths.cache_folder) / "student" / "states" / student


def export_folder(config: Config) -> Path:
    """Where students are exported to."""
    return Path(config.paths.cache_folder) / "student" / "trained"


def load_run(state: Path) -> Run | None:
    """The unfinished run of a state folder."""
    path = state / _RECORD
    if not path.exists():
        return None
    try:
        return Run(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise InputError(f"{path}: damaged ({error}); start again with --fresh") from error


def save_run(state: Path, run: Run) -> None:
    """Make ``run`` the unfinished run of ``state``."""
    make_folder(state)
    write_durably(state / _RECORD, json.dumps(asdict(run), indent=1).encode())


def finish_run(state: Path, run: Run, *, keep_state: bool) -> None:
    """The run is complete: its state goes, or stays under the name of its export."""
    with os_errors("finish the run", state):
        # Renamed first: whatever kills this process, no later run takes the old state for its own.
        done = state.replace(free_name(state.with_name(f"{run.name}_final")))
        if not keep_state:
            shutil.rmtree(done)


def settle(config: Config, options: RunOptions) -> Config:
    """The configuration to run with, given what an unfinished run was started with.

    ``--resume`` takes that run's values over this start's, ``--fresh`` ignores them (and has the run set aside). Raises
    InputError naming the keys that differ if neither is given.
    """
    run = None if options.fresh else load_run(state_folder(config))
    if run is None:
        return config
    now = json.loads(json.dumps(config.deciding("result")))
    changed = [key for key in now if run.deciding.get(key, now[key]) != now[key]]
    if not changed:
        return config
    if options.resume:
        return Config.from_flat(config.flat() | {key: run.deciding[key] for key in changed})
    raise _differs(", ".join(f"{key} (was {run.deciding[key]!r}, now {now[key]!r})" for key in changed))


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
    """A run under a name whose exports don't exist yet, without a run folder so far."""
    stem = Path(config.paths.student_path or "student").name
    taken = {path.name for path in export_folder(config).glob(f"{stem}*")}
    names = [stem, *(f"{stem}-{number}" for number in range(2, len(taken) + 3))]
    name = next(n for n in names if not any(t == f"{n}_final" or t.startswith(f"{n}_step_") for t in taken))
    return Run(json.loads(json.dumps(config.deciding("result"))), identity, name, folder="")


def free_name(path: Path) -> Path:
    """``path``, or with ``-2``, ``-3`` … behind it where that is taken."""
    candidates = (path if number == 1 else path.with_name(f"{path.name}-{number}") for number in range(1, 1_000_000))
    return next(candidate for candidate in candidates if not candidate.exists())


def _differs(what: str, way_out: str = "--resume goes on with its values, --fresh sets it aside") -> InputError:
    return InputError(f"an unfinished run of this student was started with other values: {what}; {way_out}")
