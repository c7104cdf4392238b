"""What fails on one rank is raised on all, and told by one."""

from __future__ import annotations

from typing import NoReturn

import pytest

from instep.errors import CheckpointRejected, ContractBroken, InstepError
from instep.mesh.mesh import Mesh
from instep.train.together import on_every_rank, on_rank_zero, require_same
from tests.world import world

KINDS = [
    ValueError,
    FileNotFoundError,
    FileExistsError,
    PermissionError,
    CheckpointRejected,
    ContractBroken,
]


def failing(error: Exception) -> NoReturn:
    raise error


def is_told(error: BaseException) -> bool:
    return getattr(error, "told", False)


def assert_in_step(mesh: Mesh) -> None:
    """The ranks are at the same place: a message arrives where it should."""
    data = bytes([mesh.rank])
    assert mesh.world.group.all_gather_bytes(data, "a check") == [bytes([i]) for i in range(mesh.world.size)]


@world(2)
def test_what_rank_zero_finds_is_known_to_all(mesh: Mesh) -> None:
    callers = []
    found = on_rank_zero(mesh.world.group, "a test", lambda: callers.append(mesh.rank) or {"a": [1, None]})
    assert found == {"a": [1, None]}
    assert callers == ([0] if mesh.rank == 0 else [])


@pytest.mark.parametrize("kind", KINDS)
@world(2)
def test_the_error_of_rank_zero_is_raised_on_every_rank_and_told_by_one(mesh: Mesh, kind: type) -> None:
    with pytest.raises(kind, match=r"^no such luck$") as caught:
        on_rank_zero(mesh.world.group, "a test", lambda: failing(kind("no such luck")))
    assert is_told(caught.value) is (mesh.rank != 0)
    assert_in_step(mesh)


@world(2)
def test_an_error_that_nobody_expected_is_itself_on_its_rank_only(mesh: Mesh) -> None:
    with pytest.raises(KeyError if mesh.rank == 0 else InstepError, match="a bug") as caught:
        on_rank_zero(mesh.world.group, "a test", lambda: failing(KeyError("a bug")))
    assert is_told(caught.value) is (mesh.rank != 0)
    assert_in_step(mesh)


@world(3)
def test_every_rank_has_its_own_result_when_all_have_one(mesh: Mesh) -> None:
    marker = object()
    assert on_every_rank(mesh.world.group, "a test", lambda: marker) is marker
    assert_in_step(mesh)


@pytest.mark.parametrize("failed", [[0], [1], [1, 2], [0, 1, 2]])
@world(3)
def test_the_first_rank_that_fails_tells_it_for_all(mesh: Mesh, failed: list[int]) -> None:
    def read() -> None:
        if mesh.rank in failed:
            raise FileNotFoundError(f"no file on rank {mesh.rank}")

    with pytest.raises(FileNotFoundError, match=f"^no file on rank {failed[0]}$") as caught:
        on_every_rank(mesh.world.group, "a test", read)
    assert is_told(caught.value) is (mesh.rank != failed[0])
    assert_in_step(mesh)


@world(3)
def test_what_must_be_the_same_may_be_the_same(mesh: Mesh) -> None:
    require_same(mesh.world.group, {"torch": "2", "threads": 1})
    assert_in_step(mesh)


@world(3)
def test_what_is_not_the_same_is_raised_with_the_first_rank_that_differs(mesh: Mesh) -> None:
    with pytest.raises(
        ContractBroken, match=r"rank 1 would .*\n  threads: 1 on rank 0, 2 on rank 1$"
    ) as caught:
        require_same(mesh.world.group, {"torch": "2", "threads": 1 + (mesh.rank > 0)})
    assert is_told(caught.value) is (mesh.rank != 0)
    assert_in_step(mesh)
