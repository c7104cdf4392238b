"""What one rank does for all: rank 0 reads or writes, and everybody learns how it went.

A rank that raises while the others go on leaves them waiting in the next collective. So whatever only rank
0 does ends with one small message: the result, or the error, which then is raised on every rank.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TypeVar

from instep import errors
from instep.mesh.group import Group

T = TypeVar("T")  # something that JSON can carry

KINDS: tuple[type[Exception], ...] = (
    ValueError,
    FileExistsError,
    FileNotFoundError,
    PermissionError,
    errors.CheckpointRejected,
    errors.ContractBroken,
)


def on_rank_zero(group: Group, operation: str, function: Callable[[], T]) -> T:
    """``function()`` of the group's first rank, for every rank. Collective.

    The error of rank 0 is raised on all ranks; on the others it is marked ``told``, so that a command says
    it once.
    """
    if group.rank != 0:
        answer = json.loads(group.all_gather_bytes(b"", operation)[0])
        if "error" in answer:
            raise _rebuilt(answer["error"])
        result: T = answer["result"]
        return result
    try:
        result = function()
        answer = {"result": result}
    except Exception as error:
        names = [kind.__name__ for kind in KINDS if isinstance(error, kind)]
        answer = {"error": [names[0] if names else "InstepError", str(error)]}
        group.all_gather_bytes(json.dumps(answer).encode(), operation)
        raise
    group.all_gather_bytes(json.dumps(answer).encode(), operation)
    return result


def _rebuilt(record: list[str]) -> Exception:
    name, message = record
    kind = next((kind for kind in KINDS if kind.__name__ == name), errors.InstepError)
    error = kind(message)
    error.told = True  # type: ignore[attr-defined]
    return error
