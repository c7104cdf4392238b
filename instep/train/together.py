"""What may fail on one rank and concerns all: everybody learns how it went, and one rank tells it.

A rank that raises while the others go on leaves them waiting in the next collective. So what only rank 0
does, and what every rank does outside of training, ends with one small message: the result, or the error,
which then is raised on every rank. On all but the one that it is from, it is marked ``told``, so that a
command says it once.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import TypeVar

from instep import errors
from instep.checkpoint.contract import differences
from instep.checkpoint.manifest import Scalar
from instep.mesh.exits import as_told
from instep.mesh.group import Group

T = TypeVar("T")  # something that JSON can carry
R = TypeVar("R")

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

    Its error is raised on all.
    """
    if group.rank != 0:
        answer = json.loads(group.all_gather_bytes(b"", operation)[0])
        if "error" in answer:
            raise _rebuilt(answer["error"])
        result: T = answer["result"]
        return result
    try:
        result = function()
    except Exception as error:
        group.all_gather_bytes(json.dumps({"error": _record(error)}).encode(), operation)
        raise
    group.all_gather_bytes(json.dumps({"result": result}).encode(), operation)
    return result


def on_every_rank(group: Group, operation: str, function: Callable[[], R]) -> R:
    """``function()`` of this rank, once it has worked on all. Collective.

    The error of the first rank in which it did not is raised on all.
    """
    try:
        result = function()
    except Exception as error:
        said = group.all_gather_bytes(json.dumps(_record(error)).encode(), operation)
        if not any(said[: group.rank]):
            raise
    else:
        said = group.all_gather_bytes(b"", operation)
        if not any(said):
            return result
    raise _rebuilt(json.loads(next(filter(None, said))))


def require_same(group: Group, fields: Mapping[str, Scalar]) -> None:
    """Raise ``ContractBroken`` on all ranks unless ``fields`` are the same on all. Collective.

    A rank with another build, kind of CPU or text would compute other bits than the rest, without a word.
    """
    everyone = group.all_gather_bytes(json.dumps(dict(fields)).encode(), "the comparison of configurations")
    first, reference = group.ranks[0], json.loads(everyone[0])
    for rank, data in zip(group.ranks, everyone, strict=True):
        lines = differences(reference, json.loads(data), (f"on rank {first}", f"on rank {rank}"))
        if lines:
            error = errors.ContractBroken(
                f"rank {rank} would compute other bits than rank {first}; make these the same:\n  "
                + "\n  ".join(lines)
            )
            raise as_told(error) if group.rank else error


def _record(error: Exception) -> list[str]:
    names = [kind.__name__ for kind in KINDS if isinstance(error, kind)]
    return [names[0] if names else "InstepError", str(error)]


def _rebuilt(record: list[str]) -> Exception:
    name, message = record
    kind = next((kind for kind in KINDS if kind.__name__ == name), errors.InstepError)
    return as_told(kind(message))
