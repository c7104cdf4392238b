"""What any file can hold: a copy of nested data with finite numbers and words that can be written. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from typing import Any

MOST_DEPTH = 20  # of what lies in each other


def plain(value: Any, depth: int = 0) -> Any:
    """A copy in which every number is finite and every word can be written; None for what cannot be told."""
    if isinstance(value, str):
        return words(value)
    if isinstance(value, float):
        return value if isfinite(value) else None
    if isinstance(value, int):
        return value if abs(value) < 1 << 63 else None
    if value is None or depth == MOST_DEPTH:
        return None
    if isinstance(value, Mapping):
        return {words(str(key)): plain(each, depth + 1) for key, each in value.items()}
    return [plain(each, depth + 1) for each in value]


def words(text: str) -> str:
    """``text`` without what is no letter in any file: a path need not be text."""
    return text.encode(errors="replace").decode()
