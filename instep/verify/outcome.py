"""Every rank does its part, and all go on, or all raise and name the one that has failed."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TypeVar, cast

from instep.errors import InstepError
from instep.mesh.group import Group
from instep.step.agree import attempt

T = TypeVar("T")

KINDS: dict[str, type[Exception]] = {"ValueError": ValueError, "TypeError": TypeError}
FOLLOWING = ("Desync", "PeerLost")  # what the other ranks raise when one has failed
MESSAGE_LIMIT = 4000


def agreed(group: Group, operation: str, function: Callable[[], T]) -> T:
    """``function()`` of this rank, once it has worked on all. Collective.

    Raises:
        ValueError, TypeError, InstepError: it failed on a rank; that rank raises what it has raised, and the
            others an error that names it.
    """
    result, failure = attempt(function)
    text = "" if failure is None else json.dumps([type(failure).__name__, str(failure)[:MESSAGE_LIMIT]])
    said = group.all_gather_bytes(text.encode(), f"the outcome of {operation}")
    failed = {rank: json.loads(data) for rank, data in zip(group.ranks, said, strict=True) if data}
    if not failed:
        return cast(T, result)
    causes = {rank: record for rank, record in failed.items() if record[0] not in FOLLOWING} or failed
    if failure is not None and group.global_rank in causes:
        failure.add_note(f"rank {group.global_rank}, in {operation} of verify()")
        raise failure
    rank, (kind, message) = next(iter(causes.items()))
    raise KINDS.get(kind, InstepError)(f"rank {rank} raised {kind} in {operation}: {message}") from failure
