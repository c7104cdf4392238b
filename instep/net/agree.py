"""All ranks succeed, or all raise: for whatever may fail on one rank and concerns every rank.

A rank that raises alone leaves the others waiting in their next collective, until a deadline reports it as
lost. So every rank tries, reports its outcome to the others, and then all go on or all raise:

    rank 0   tries: fine    | report |  ValueError("rank 1: expected 2, got 3")     secondary
    rank 1   tries: raises  | report |  its own ValueError("expected 2, got 3")     shown by the launcher
    rank 2   tries: fine    | report |  ValueError("rank 1: expected 2, got 3")     secondary

A rank that has failed raises its own exception, with its own traceback; the others raise one that names the
first such rank. Failures that another rank has caused (``PeerLost``, ``Desync``) count only if there is no
other. Reports are JSON of limited length, and the type of an error is its index in a list that all ranks
have: nothing from another rank is looked up by name, and nothing is unpickled.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from itertools import zip_longest
from typing import Any, NoReturn, TypeVar, cast

from instep.errors import (
    CheckpointRejected,
    ContractBroken,
    Desync,
    Diverged,
    InstepError,
    PeerLost,
    ReplicasDiffer,
)
from instep.launch.rank_exit import mark_secondary
from instep.net.process_group import Group

T = TypeVar("T")
Errors = Sequence[type[Exception]]

# The other ranks raise the first of these that the failure is an instance of, else the last.
SAME_KIND: Errors = (
    ValueError,
    TypeError,
    FileExistsError,
    FileNotFoundError,
    PermissionError,
    OSError,
    CheckpointRejected,
    ContractBroken,
    Diverged,
    ReplicasDiffer,
    Desync,
    PeerLost,
    InstepError,
)
CONSEQUENCES = (Desync, PeerLost)
MESSAGE_CHARACTERS = 4000
LIMIT_BYTES = 1 << 24
_SUCCESS, _FAILURE = b"\x01", b"\x00"


def attempt(function: Callable[[], T]) -> Callable[[], T]:
    """Call ``function`` now, before there is a group; ``all_or_none`` of the returned function reports it."""
    try:
        result = function()
    except Exception as error:
        return partial(_fail, error)
    return lambda: result


def all_or_none(group: Group, operation: str, function: Callable[[], T], *, errors: Errors = SAME_KIND) -> T:
    """``function()`` of this rank, once it has succeeded on all. Collective: 256 bytes per rank.

    Raises:
        the error of this rank, or one that names the first rank that has failed, with the operation in a
            note: the first of ``errors`` that the failure is an instance of, else the last.
        PeerLost: a rank did not come to ``operation``; on a rank that has failed, its own error.
    """
    return all_tell(group, operation, function, lambda result: b"", errors=errors)[0]


def all_tell(
    group: Group,
    operation: str,
    function: Callable[[], T],
    tell: Callable[[T], bytes],
    *,
    errors: Errors = SAME_KIND,
    limit: int = LIMIT_BYTES,
) -> tuple[T, list[bytes]]:
    """As ``all_or_none``, with ``tell(result)`` of every rank, in group order, of at most ``limit`` bytes.

    An error of ``tell`` is a failure, too. Collective. Before a rank's data stands a checksum of the name of
    its operation: ranks in different ones raise ``Desync``.
    """
    name = zlib.crc32(operation.encode()).to_bytes(4, "little")
    result: T | None = None
    failure: Exception | None = None
    try:
        result = function()
        told = tell(result)
        data = _SUCCESS + told if told else b""
    except Exception as error:
        # One of ours says all: a terminal that shows every rank has no use for its traceback.
        failure = error.with_traceback(None) if isinstance(error, InstepError) else error
        data = _FAILURE + _record(error, errors)
    try:
        try:
            everyone = group.all_gather_bytes(name + data, operation, limit=limit)
        except (PeerLost, ValueError) as problem:
            if failure is None:
                raise
            raise failure from problem
        if any(its[: len(name)] != name for its in everyone):
            raise group.out_of_step(None, operation) from failure
        everyone = [its[len(name) :] for its in everyone]
        failed = {
            rank: json.loads(its[1:])
            for rank, its in zip(group.ranks, everyone, strict=True)
            if its[:1] == _FAILURE
        }
        if failed:
            raise _error(failed, failure, group, operation, errors)
        return cast(T, result), [its[1:] for its in everyone]
    finally:
        failure = None  # its traceback has this frame: what the frame holds could not be freed


def on_first_rank(
    group: Group, operation: str, function: Callable[[], T], *, errors: Errors = SAME_KIND
) -> T:
    """``function()`` of the group's first rank, by way of JSON, on every rank. Collective.

    Its error is raised on all, as by ``all_or_none``.
    """
    mine = (lambda: json.dumps(function()).encode()) if group.rank == 0 else bytes
    _, everyone = all_tell(group, operation, mine, lambda data: data, errors=errors)
    return cast(T, json.loads(everyone[0]))


def require_same_lines(
    group: Group,
    what: str,
    lines: Sequence[str],
    *,
    fix: str = "",
    error: Callable[[str], Exception] = ValueError,
) -> None:
    """Raise ``error`` on all ranks unless all have the same ``lines`` about ``what``. Collective.

    Hashes are compared, 32 bytes per rank; the lines are sent only where they differ, to name the first such
    line, before the ``fix``.
    """
    operation, text = f"the comparison of {what}", json.dumps(list(lines)).encode()
    if len(set(group.all_gather_bytes(hashlib.sha256(text).digest(), operation))) == 1:
        return
    everyone = [json.loads(its) for its in group.all_gather_bytes(text, f"{operation}, line by line")]
    raise_on_all(group, error(f"the ranks differ in {what}: {first_difference(everyone, group.ranks)}{fix}"))


def first_difference(by_rank: Sequence[Sequence[str]], ranks: Sequence[int]) -> str:
    """ "this on rank 0, but that on rank 1" of the first line that is not the same for all; "" if all are."""
    for lines in zip_longest(*by_rank, fillvalue="nothing"):
        for rank, line in zip(ranks, lines, strict=True):
            if line != lines[0]:
                return f"{lines[0]} on rank {ranks[0]}, but {line} on rank {rank}"
    return ""


def raise_on_all(group: Group, error: Exception) -> NoReturn:
    """Raise ``error``, which every rank of ``group`` has found: as secondary on all but the first.

    Of several lines the others raise only the first, so that a terminal shows the rest once.
    """
    error = error.with_traceback(None)  # of where it was caught and kept
    if group.rank == 0:
        raise error
    head, *rest = str(error).splitlines()
    if rest:
        error.args = (f"{head.rstrip(':')} (rank {group.ranks[0]} says which)",)
    raise mark_secondary(error)


def _record(error: Exception, errors: Errors) -> bytes:
    """The report of ``error`` to the other ranks."""
    kinds = [number for number, kind in enumerate(errors) if isinstance(error, kind)]
    name, message = type(error).__name__, str(error)[:MESSAGE_CHARACTERS]
    return json.dumps(
        {
            "kind": kinds[0] if kinds else len(errors) - 1,
            "name": name,
            "message": message if kinds and message else f"{name}: {message}".removesuffix(": "),
            # The highest is raised: a secondary error and a consequence have their cause on another rank.
            "cause": 0 if getattr(error, "told", False) else 1 if isinstance(error, CONSEQUENCES) else 2,
        }
    ).encode()


def _error(
    failed: dict[int, dict[str, Any]],
    failure: Exception | None,
    group: Group,
    operation: str,
    errors: Errors,
) -> Exception:
    """The error that this rank raises, given its own ``failure``, if any."""
    most = max(record["cause"] for record in failed.values())
    causes = {rank: record for rank, record in failed.items() if record["cause"] == most}
    first, record = next(iter(causes.items()))
    if failure is not None and group.global_rank in causes:
        return failure if group.global_rank == first else mark_secondary(failure)
    error = mark_secondary(errors[record["kind"]](f"rank {first}: {record['message']}"))
    error.add_note(f"rank {first} raised {record['name']} in {operation}; its own traceback has the cause")
    error.__cause__ = failure
    return error


def _fail(error: Exception) -> NoReturn:
    raise error
