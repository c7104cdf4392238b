"""The numbers that each setting may have."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

Range = tuple[str, Callable[[float], bool]]
ABOVE_0: Range = ("a number above 0", lambda number: number > 0)
FROM_0: Range = ("0 or more", lambda number: number >= 0)
STAGES: Range = ("0, 1, 2 or 3", lambda number: number in range(4))
ROWS: Range = ("2 or more, or 0 for all ranks", lambda number: number == 0 or number >= 2)
FROM_2: Range = ("2 or more", lambda number: number >= 2)
BELOW_1: Range = ("a number from 0 to below 1", lambda number: 0 <= number < 1)
UP_TO_1: Range = ("a number from 0 to 1", lambda number: 0 <= number <= 1)

# GPTConfig checks the numbers of the model.
RANGES = {
    "ranks": FROM_0,
    "min_ranks": FROM_0,
    "steps": ABOVE_0,
    "seed": FROM_0,
    "stop_after": FROM_0,
    "timeout_s": ABOVE_0,
    "batch.global_size": ABOVE_0,
    "batch.micro_size": ABOVE_0,
    "optim.lr": ABOVE_0,
    "optim.warmup_steps": FROM_0,
    "optim.min_lr_ratio": UP_TO_1,
    "optim.clip": FROM_0,
    "optim.weight_decay": FROM_0,
    "optim.betas": BELOW_1,
    "optim.momentum": BELOW_1,
    "parallel.bucket_mb": ABOVE_0,
    "parallel.threads": ABOVE_0,
    "parallel.shard_stage": STAGES,
    "parallel.shard_ranks": ROWS,
    "checkpoint.every": FROM_0,
    "checkpoint.keep": FROM_2,
    "eval.every": FROM_0,
    "eval.windows": ABOVE_0,
    "checks.max_skipped": FROM_0,
    "checks.spike": FROM_0,
    "checks.skip_steps": FROM_0,
    "checks.replicas_every": FROM_0,
    "checks.leaves_every": FROM_0,
    "ledger.every": FROM_0,
    "trace.events": FROM_0,
}


def check_range(name: str, value: Any) -> None:
    """Raise ``ValueError`` for a number, or one of a tuple, outside of the range of ``name``."""
    wanted, holds = RANGES.get(name, ("", lambda _: True))
    for number in value if isinstance(value, tuple) else (value,):
        if isinstance(number, float) and not math.isfinite(number):
            raise ValueError(f"{name}: expected a finite number, got {number}")
        if not holds(number):
            raise ValueError(f"{name}: expected {wanted}, got {number}")
