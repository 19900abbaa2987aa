"""What kinds of values keys have: their types and ranges, by the names that sections.py declares keys with."""

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from distill.config.keys import MAX_INT, show
from distill.config.values import memory_by_device, path_text, student_init

Count = Annotated[int, Field(ge=1, le=MAX_INT)]
Natural = Annotated[int, Field(ge=0, le=MAX_INT)]
Positive = Annotated[float, Field(gt=0)]
OBSERVING = ("reduce_lr_on_plateau", "greedy")
"""The schedules that look at validations; all others are functions of the step."""

NonNegative = Annotated[float, Field(ge=0)]
Exponent = Annotated[float, Field(ge=0, le=10)]
LossName = Literal["kl", "reverse_kl", "jsd", "skew_kl", "skew_reverse_kl", "tvd", "ab", "ce"]
Tail = Literal["bucket", "renormalise", "drop", "to_target"]
Momentum = Annotated[float, Field(ge=0, lt=1)]

PROMPT_PARTS = ("SYS_START", "SYS_END", "USER_START", "USER_END", "ASSISTANT_START", "ASSISTANT_END")


def _device_name(name: str) -> str:
    if not re.fullmatch(r"cpu|mps|cuda(:\d{1,3})?", name):
        raise ValueError(f'must be "cpu", "cuda", "cuda:N" or "mps", not {show(name)}')
    return name


def _prompt_parts(parts: dict[str, str]) -> dict[str, str]:
    """Exactly the six parts, in order. Backslash-n and backslash-t as two characters mean the one they stand for."""
    for name in (*PROMPT_PARTS, *parts):
        if name not in parts:
            raise ValueError(f"{name} is missing (needed: {', '.join(PROMPT_PARTS)})")
        if name not in PROMPT_PARTS:
            raise ValueError(f"{name!a} is not a part of a prompt format (parts: {', '.join(PROMPT_PARTS)})")
    return {name: parts[name].replace("\\n", "\n").replace("\\t", "\t") for name in PROMPT_PARTS}


PathText = Annotated[str, Field(min_length=1, json_schema_extra={"format": "path"}), AfterValidator(path_text)]
PathTexts = Annotated[tuple[PathText, ...], Field(min_length=1)]
Device = Annotated[str, AfterValidator(_device_name)]
MemoryByDevice = Annotated[dict[str, str], AfterValidator(memory_by_device)]
StudentInit = Annotated[dict[str, Any], AfterValidator(student_init)]
PromptFormat = Annotated[dict[str, str], AfterValidator(_prompt_parts)]

Optimizer = Literal[
    "adam", "adamw", "adamw8bit", "adamw32bit", "paged_adamw", "paged_adamw8bit", "paged_adamw32bit",
    "sgd", "rmsprop", "rmsprop8bit", "rmsprop32bit", "adagrad",
]  # fmt: skip
# wsd is ours, the others are the names of transformers' get_scheduler.
Scheduler = Literal[
    "wsd", "linear", "cosine", "cosine_with_restarts", "polynomial", "constant", "constant_with_warmup", "inverse_sqrt",
    "reduce_lr_on_plateau", "cosine_with_min_lr", "cosine_warmup_with_min_lr", "warmup_stable_decay", "greedy",
]  # fmt: skip
