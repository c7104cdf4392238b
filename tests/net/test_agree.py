"""What fails on one rank is raised on all, and reported by one."""

from __future__ import annotations

import gc
import json
import re
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

import pytest

from instep.errors import CheckpointRejected, ContractBroken, Desync, Diverged, InstepError, PeerLost
from instep.launch.rank_exit import mark_secondary
from instep.mesh.mesh import Mesh
from instep.net.agree import all_or_none, all_tell, on_first_rank, raise_on_all, require_same_lines
from tests.world import world


def failing(error: Exception) -> NoReturn:
    raise error


def is_told(error: BaseException) -> bool:
    return getattr(error, "told", False)


def assert_in_step(mesh: Mesh) -> None:
    """The ranks are at the same place: a message arrives where it should."""
    data = bytes([mesh.rank])
    assert mesh.world.group.all_gather_bytes(data, "a check") == [bytes([i]) for i in range(mesh.world.size)]


# By rank: its failure; then the rank that reports its own, and what ranks with no such failure raise.
MISSING = FileNotFoundError
FAILURES: list[Callable[[], tuple[list[Exception | None], int, type[Exception], str]]] = [
    lambda: ([MISSING("a"), None, None], 0, MISSING, "a"),
    lambda: ([None, MISSING("a"), MISSING("b")], 1, MISSING, "a"),
    lambda: ([MISSING("a"), MISSING("b")], 0, MISSING, "a"),
    lambda: ([KeyError("a bug"), None], 0, InstepError, "KeyError: 'a bug'"),
    lambda: ([None, ValueError()], 1, ValueError, "ValueError"),
    lambda: ([Desync("a rank has left"), None, ValueError("the cause")], 2, ValueError, "the cause"),
    lambda: ([PeerLost("a rank has left"), None, ValueError("the cause")], 2, ValueError, "the cause"),
    lambda: ([mark_secondary(Desync("rank 1 has left")), Desync("plans"), None], 1, Desync, "plans"),
    lambda: ([PeerLost("lost by 0"), PeerLost("lost by 1")], 0, PeerLost, "lost by 0"),
]


@pytest.mark.parametrize("number", range(len(FAILURES)))
def test_a_failing_rank_raises_its_own_error_and_the_others_name_the_first(number: int) -> None:
    failures, first, kind, message = FAILURES[number]()
    world(len(failures))(raises_or_names)(failures=failures, first=first, kind=kind, message=message)


def raises_or_names(
    mesh: Mesh, failures: list[Exception | None], first: int, kind: type[Exception], message: str
) -> None:
    own = failures[mesh.rank]
    is_cause = type(own) is type(failures[first]) and not (own and is_told(own))
    with pytest.raises(Exception) as caught:
        all_or_none(mesh.world.group, "a test", lambda: failing(own) if own else None)
    if is_cause:
        assert caught.value is own
    else:
        assert type(caught.value) is kind and str(caught.value) == f"rank {first}: {message}"
        [note] = caught.value.__notes__
        assert re.fullmatch(rf"rank {first} raised \w+ in a test; its own traceback has the cause", note)
        assert caught.value.__cause__ is own
    assert is_told(caught.value) is (mesh.rank != first)
    assert_in_step(mesh)


@world(2)
def test_a_caller_chooses_what_the_other_ranks_raise(mesh: Mesh) -> None:
    def fail() -> None:
        if mesh.rank == 1:
            raise PermissionError(13, "not here")

    kind = PermissionError if mesh.rank else CheckpointRejected
    with pytest.raises(kind, match="not here"):
        all_or_none(mesh.world.group, "a test", fail, errors=(CheckpointRejected,))


@world(3)
def test_what_every_rank_tells_is_known_to_all(mesh: Mesh) -> None:
    length = 5 * mesh.rank  # of the first rank: nothing
    result, told = all_tell(mesh.world.group, "a test", lambda: "x" * length, str.encode)
    assert result == "x" * length
    assert told == [b"x" * (5 * rank) for rank in range(3)]


@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_ranks_in_different_operations_are_told_so(backend: str) -> None:
    """A rank in ``instep.mean`` read what another one sent in ``instep.gather``: JSONDecodeError."""
    world(2, backend=backend)(mean_on_one_rank_and_gather_on_the_other)()


def mean_on_one_rank_and_gather_on_the_other(mesh: Mesh) -> None:
    with pytest.raises(Desync, match=r"rank 0 calls mean, at .*rank 1 calls gather, at .*test_agree\.py:\d+"):
        all_tell(mesh.world.group, "gather" if mesh.rank else "mean", lambda: "x", str.encode)


@world(2)
def test_what_cannot_be_told_is_a_failure(mesh: Mesh) -> None:
    with pytest.raises(TypeError, match="JSON serializable"):
        all_tell(
            mesh.world.group,
            "a test",
            lambda: object() if mesh.rank else 1,
            lambda made: json.dumps(made).encode(),
        )
    assert_in_step(mesh)


@world(2)
def test_what_is_too_long_to_be_told_is_an_error_on_all_but_on_a_rank_with_its_own(mesh: Mesh) -> None:
    limit = 1 << 16
    match = rf"a test: rank 1 has {limit + 5} bytes, more than the {limit}" if mesh.rank else "a failure"
    with pytest.raises(ValueError, match=match):
        all_tell(
            mesh.world.group,
            "a test",
            lambda: bytes(limit) if mesh.rank else failing(ValueError("a failure")),
            bytes,
            limit=limit,
        )


@world(2, timeout_s=2)
def test_a_rank_that_has_failed_raises_that_though_another_never_came(mesh: Mesh) -> None:
    if mesh.rank:
        return
    with pytest.raises(ValueError, match=r"^a failure$") as caught:
        all_or_none(mesh.world.group, "a test", lambda: failing(ValueError("a failure")))
    assert isinstance(caught.value.__cause__, PeerLost)


@world(2)
def test_what_the_first_rank_finds_is_known_to_all(mesh: Mesh) -> None:
    callers = []
    found = on_first_rank(mesh.world.group, "a test", lambda: callers.append(mesh.rank) or {"a": [1, None]})
    assert found == {"a": [1, None]}
    assert callers == ([0] if mesh.rank == 0 else [])
    assert on_first_rank(mesh.world.group, "a test", lambda: None) is None


@pytest.mark.parametrize(
    ("theirs", "difference"),
    [
        (["a=1", "b=3"], "b=2 on rank 0, but b=3 on rank 1"),
        (["a=1"], "b=2 on rank 0, but nothing on rank 1"),
        (["a=1", "b=2", "c=3"], "nothing on rank 0, but c=3 on rank 1"),
    ],
)
@world(2)
def test_the_first_line_that_differs_is_named_on_all_and_reported_by_one(
    mesh: Mesh, theirs: list[str], difference: str
) -> None:
    lines = theirs if mesh.rank else ["a=1", "b=2"]
    with pytest.raises(ContractBroken) as caught:
        require_same_lines(
            mesh.world.group, "options", lines, fix=": pass the same ones", error=ContractBroken
        )
    assert str(caught.value) == f"the ranks differ in options: {difference}: pass the same ones"
    assert is_told(caught.value) is (mesh.rank != 0)
    assert_in_step(mesh)


@world(2)
def test_an_error_that_all_have_found_is_reported_by_one(mesh: Mesh) -> None:
    with pytest.raises(Diverged, match=r"^too many$") as caught:
        raise_on_all(mesh.world.group, Diverged("too many"))
    assert is_told(caught.value) is (mesh.rank != 0)


@world(2)
def test_a_failure_that_was_caught_keeps_nothing_alive(mesh: Mesh) -> None:
    """What a frame of its traceback holds, a model for instance, is freed without the garbage collector."""

    class Large:
        pass

    def fail(large: Large) -> None:
        raise ValueError("a failure")

    def caught() -> weakref.ref[Large]:
        large = Large()
        with suppress(ValueError):
            all_or_none(mesh.world.group, "a test", lambda: fail(large))
        return weakref.ref(large)

    gc.disable()
    try:
        assert caught()() is None
    finally:
        gc.enable()
