"""Do all ranks mean the same, and can all do it? Asked before anything changes: all raise or none does.

A rank that refuses alone would leave the others waiting in the next operation, until a deadline names it as
lost. So what a rank might refuse is attempted first, and then every rank is told.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import TypeVar

from instep.mesh.exits import as_told
from instep.mesh.group import Group

T = TypeVar("T")


def attempt(function: Callable[[], T]) -> tuple[T | None, Exception | None]:
    """What ``function`` returns, or what it raises, for ``agree``."""
    try:
        return function(), None
    except Exception as problem:
        return None, problem


def agree(problem: Exception | None, lines: Sequence[str], group: Group, operation: str) -> None:
    """Go on if no rank has a ``problem`` and all have the same ``lines``. Collective.

    Raises:
        ValueError: on all ranks; this rank's ``problem``, another's, or the first line that differs.
    """
    text = json.dumps(list(lines)).encode()
    mine = {
        "digest": hashlib.sha256(text).hexdigest(),
        "problem": "" if problem is None else str(problem)[:1000],
    }
    if problem is not None:
        mine["problem"] = mine["problem"] or type(problem).__name__
    rows = [json.loads(row) for row in group.all_gather_bytes(json.dumps(mine).encode(), operation)]
    if problem is not None:
        raise problem
    for rank, row in zip(group.ranks, rows, strict=True):
        if row["problem"]:
            raise as_told(ValueError(f"rank {rank}: {row['problem']}"))
    if len({row["digest"] for row in rows}) > 1:
        everybody = group.all_gather_bytes(text, f"{operation}, line by line")
        found = first_difference([json.loads(data) for data in everybody], group.ranks)
        difference = "in nothing that can be shown" if found is None else found[1]
        raise ValueError(f"the ranks differ in {operation.removeprefix('the comparison of ')}: {difference}")


def first_difference(by_rank: Sequence[Sequence[str]], ranks: Sequence[int]) -> tuple[int, str] | None:
    """The number of the first line that differs, and "this on rank 0, but that on rank 1", if one does."""
    for i, lines in enumerate(zip_longest(*by_rank, fillvalue="nothing")):
        for rank, line in zip(ranks, lines, strict=True):
            if line != lines[0]:
                return i, f"{lines[0]} on rank {ranks[0]}, but {line} on rank {rank}"
    return None
