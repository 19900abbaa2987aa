"""What a training grows, reports and leaves on disk besides its states."""

import resource
from dataclasses import dataclass, field
from pathlib import Path

import torch

from distill.files import TEMPORARY_SUFFIX, remove_folder, replace_folder
from distill.student import Student


@dataclass(frozen=True, slots=True)
class TrainPaths:
    """Where a run keeps its state and puts its students: ``exports/<name>_step_<n>``, ``…_best`` and ``…_final``.

    ``identity`` is the digest of all that makes the run what it is: a state of another one is never gone on from.
    """

    state: Path
    exports: Path
    name: str
    identity: str = ""

    def export(self, what: str) -> Path:
        """The folder of an export."""
        return self.exports / f"{self.name}_{what}"

    def export_step(self, student: Student, step: int, *, keep: int | None) -> None:
        """Export the student as that of ``step``, and remove those before its newest ``keep`` (None: none).

        Exports of later steps are of a start that was killed, and will be made again: they don't count.
        """
        student.export(self.export(f"step_{step}"))
        if keep is not None:
            made = [other for other in self._exported_steps() if other <= step]
            for other in made[:-keep]:
                remove_folder(self.export(f"step_{other}"))

    def export_best(self, student: Student) -> None:
        """Put the student in the place of the best so far.

        Its state has to be saved already: if a kill comes before the end of this, the resume begins with it again.
        """
        new = self.export(f"best.new{TEMPORARY_SUFFIX}")
        if new.exists():  # a killed start's, perhaps of another step
            remove_folder(new)
        student.export(new)
        replace_folder(new, self.export("best"))

    def _exported_steps(self) -> list[int]:
        """Steps of the exports made before the end, ascending."""
        prefix = f"{self.name}_step_"
        numbers = [path.name.removeprefix(prefix) for path in self.exports.iterdir() if path.name.startswith(prefix)]
        return sorted(int(number) for number in numbers if number.isdecimal())


@dataclass(frozen=True, slots=True)
class TrainReport:
    """What a training did, over all its starts; ``seconds`` are those of its steps and of waiting for them,
    without validation and saving.

    It is ``finished`` after ``total_steps``, or earlier if validations stopped getting better.
    """

    steps: int
    total_steps: int
    finished: bool
    seconds: float
    tokens: int
    targets: int
    peak_memory_bytes: int
    resumed_from_step: int | None
    before: dict[str, float]
    after: dict[str, float]
    student: Path


@dataclass(slots=True)
class Progress:
    """Everything that grows during a training and survives a kill; ``step`` counts finished optimizer steps.

    ``best_kl`` is the lowest validation KL after any step, that of ``best_step``, and ``stale`` the number of
    validations since. ``ce_below_entropy`` in nats: targets whose teacher is surer than that learn the text alone,
    those of just that entropy with a weight of ``ce_at_entropy``.
    """

    step: int = 0
    seconds: float = 0.0
    tokens: int = 0
    targets: int = 0
    before: dict[str, float] = field(default_factory=dict)
    after: dict[str, float] = field(default_factory=dict)
    best_kl: float | None = None
    best_step: int = 0
    stale: int = 0
    ce_below_entropy: float | None = None
    ce_at_entropy: float = 0.0

    def validated(self, kl: float) -> None:
        """Take the KL of the validation after ``step``."""
        if self.best_kl is None or kl < self.best_kl:
            self.best_kl, self.best_step, self.stale = kl, self.step, 0
        else:
            self.stale += 1


def peak_memory(device: str) -> int:
    """Largest memory this process used so far: on all its GPUs, or resident on the host for the CPU. Bytes."""
    if device.startswith("cuda"):
        return sum(torch.cuda.max_memory_allocated(index) for index in range(torch.cuda.device_count()))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
