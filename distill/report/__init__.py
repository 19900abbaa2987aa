"""What people and programs learn about a run. The only module that prints.

``console`` talks to the terminal and the log, ``folder`` keeps ``runs/<time>-<name>/``, ``summary`` is the stable
``summary.json``, ``tracker`` passes the metrics on to wandb without ever depending on it.
"""

from distill.report.console import Console, Progress
from distill.report.folder import RunFolder
from distill.report.summary import (
    CacheSummary,
    CollectSummary,
    SplitSummary,
    Status,
    Summary,
    TrainSummary,
    ValidationSummary,
)
from distill.report.tracker import Tracker, WandbTracker, open_tracker, wandb_run_name

__all__ = [
    "CacheSummary",
    "CollectSummary",
    "Console",
    "Progress",
    "RunFolder",
    "SplitSummary",
    "Status",
    "Summary",
    "Tracker",
    "TrainSummary",
    "ValidationSummary",
    "WandbTracker",
    "open_tracker",
    "wandb_run_name",
]
