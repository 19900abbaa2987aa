"""Optimizers by name, with states that can be saved exactly, and schedules that are functions of the step."""

from distill.optim.optimizers import (
    OPTIMIZERS,
    build_optimizer,
    check_optimizer,
    load_optimizer_state,
    optimizer_state,
    paging_note,
)
from distill.optim.schedules import DECAY_FORMS, WARMUP_FORMS, Schedule, StepSchedule, build_schedule

__all__ = [
    "DECAY_FORMS",
    "OPTIMIZERS",
    "WARMUP_FORMS",
    "Schedule",
    "StepSchedule",
    "build_optimizer",
    "build_schedule",
    "check_optimizer",
    "load_optimizer_state",
    "optimizer_state",
    "paging_note",
]
