"""What a setting of a recipe may be: the words of its type, and a range of numbers. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args, get_origin

from instep.run.toml import flatten

Range = tuple[str, Callable[[float], bool]]
ABOVE_0: Range = ("a number above 0", lambda number: number > 0)
FROM_0: Range = ("0 or more", lambda number: number >= 0)
STAGES: Range = ("0, 1, 2 or 3", lambda number: number in range(4))
SHARD_RANKS: Range = ("2 or more, or 0 for all ranks", lambda number: number == 0 or number >= 2)
FROM_2: Range = ("2 or more", lambda number: number >= 2)
BELOW_1: Range = ("a number from 0 to below 1", lambda number: 0 <= number < 1)
UP_TO_1: Range = ("a number from 0 to 1", lambda number: 0 <= number <= 1)


def check_settings(config: Any, ranges: Mapping[str, Range]) -> None:
    """Raise ``ValueError`` for a word that is none of its setting's, or a number outside of its range."""
    for name, kind, value in flatten(config):
        if get_origin(kind) is Literal and value not in get_args(kind):
            raise ValueError(f"{name}: expected one of {', '.join(get_args(kind))}, got {value!r}")
        wanted, holds = ranges.get(name, ("", lambda _: True))
        for number in value if isinstance(value, tuple) else (value,):
            if isinstance(number, float) and not math.isfinite(number):
                raise ValueError(f"{name}: expected a finite number, got {number}")
            if not holds(number):
                raise ValueError(f"{name}: expected {wanted}, got {number}")
