"""The matrix: all rows, in the order of the table."""

from __future__ import annotations

from benchmarks.faults import around, crashes, stalls, state
from benchmarks.faults.row import Row


def matrix() -> list[Row]:
    """Every fault that is made."""
    return [*crashes.rows(), *stalls.rows(), *state.rows(), *around.rows()]
