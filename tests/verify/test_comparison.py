"""``compare`` alone, without a wrapper: copies, shards and values that are wrong on one rank are named."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from instep.mesh.mesh import Mesh
from instep.verify.comparison import compare
from instep.verify.gradient_report import RANKS_DIFFER, Report
from instep.verify.subject import GradientPiece, Value
from tests.parity import numbers, world_of_one
from tests.world import world

NAMES = ("first", "second")
PARTS = [[numbers(6, 4, key=f"{name} {part}") for name in NAMES] for part in range(3)]
PARAMETERS = {name: torch.zeros(6, 4) for name in NAMES}


def gradient(position: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return (sum(part[position].double() for part in PARTS) / len(PARTS)).to(dtype)


def shard(position: int, rank: int, ours: Tensor | None) -> GradientPiece:
    """Three of the six rows."""
    of = lambda x: x[3 * rank : 3 * rank + 3]  # noqa: E731
    return GradientPiece(position, of, lambda: None if ours is None else of(ours))


def whole(position: int, ours: Tensor | None) -> GradientPiece:
    return GradientPiece(position, lambda x: x, lambda: ours)


def compared(mesh: Mesh, copy: int, pieces: list[GradientPiece], **changes: Any) -> Report:
    parts = [(f"part {i}", lambda part=part: (1, part)) for i, part in enumerate(PARTS)]
    told = {"values": (), "step": lambda: None, "parts": parts, "rtol": None, "floor": 0.0, **changes}
    group = mesh.world.group
    return compare(group, PARAMETERS, copy, pieces, strategy="flat", ordered=True, **told)


def wrong(report: Report) -> list[tuple[str, int, str]]:
    return [(row.name, row.rank, row.note) for row in report.rows if not row.ok]


@world(2)
def test_copies_that_are_right_pass_and_one_that_is_not_is_named_with_its_rank(mesh: Mesh) -> None:
    assert compared(mesh, mesh.rank, [whole(i, gradient(i)) for i in range(2)]).ok
    changed = gradient(1) * (1 + mesh.rank)
    report = compared(mesh, mesh.rank, [whole(0, gradient(0)), whole(1, changed)])
    assert wrong(report) == [("second", 1, RANKS_DIFFER)] and report.rows[0].ratio == pytest.approx(2.0)
    assert "change .grad on all ranks in the same way" in report.cause


@world(2)
def test_a_gradient_that_stayed_on_its_rank_differs_between_ranks(mesh: Mesh) -> None:
    report = compared(mesh, mesh.rank, [whole(0, gradient(0)), whole(1, PARTS[mesh.rank][1])])
    assert [row[0::2] for row in wrong(report)] == [("second", RANKS_DIFFER)]
    assert "wrap the module after its last parameter was made" in report.cause


@world(2)
def test_shards_are_one_copy_and_the_rank_of_the_wrong_one_is_named(mesh: Mesh) -> None:
    assert compared(mesh, 0, [shard(i, mesh.rank, gradient(i)) for i in range(2)]).ok
    changed = gradient(1) * (1 + mesh.rank)
    report = compared(mesh, 0, [shard(0, mesh.rank, gradient(0)), shard(1, mesh.rank, changed)])
    assert [row[:2] for row in wrong(report)] == [("second", 1)]
    assert 0 < report.rows[0].error < 1  # a part of it is right


@world(4)
def test_of_two_copies_in_shards_the_rank_with_the_wrong_shard_is_named(mesh: Mesh) -> None:
    copy, place = divmod(mesh.rank, 2)
    ours = [gradient(0), -gradient(1) if mesh.rank == 2 else gradient(1)]
    report = compared(mesh, copy, [shard(i, place, x) for i, x in enumerate(ours)])
    assert [row[:2] for row in wrong(report)] == [("second", 2)]


@world(2)
def test_a_parameter_may_be_on_one_rank_only(mesh: Mesh) -> None:
    assert compared(mesh, 0, [whole(mesh.rank, gradient(mesh.rank))]).ok
    report = compared(mesh, 0, [whole(mesh.rank, None if mesh.rank else gradient(0))])
    assert wrong(report) == [("second", 1, "missing")]


@world(4)
def test_values_that_differ_from_those_of_another_copy_are_named(mesh: Mesh) -> None:
    copy, place = divmod(mesh.rank, 2)
    x = torch.zeros(3)
    x[1] = mesh.rank == 3
    pieces = [whole(i, gradient(i)) for i in range(2)]
    report = compared(mesh, copy, pieces, values=[Value("first", 3 * place, x)])
    assert report.differing == ("'first' has other values on rank 3 than on rank 1",) and not report.ok
    assert "the ranks hold different models: 'first'" in report.cause


@world(2)
def test_a_part_that_fails_on_one_rank_is_raised_on_both(mesh: Mesh) -> None:
    def fails() -> Any:
        if mesh.rank:
            raise ValueError("planted")
        return 1, PARTS[0]

    with pytest.raises(ValueError, match="^planted" if mesh.rank else "^rank 1: planted"):
        compared(mesh, mesh.rank, [whole(0, gradient(0))], parts=[("part 0", fails)])


def test_weights_of_parts_count_and_the_tolerance_is_that_of_the_dtype_or_as_given() -> None:
    one = world_of_one()
    heavy = [("a", lambda: (3, PARTS[0])), ("b", lambda: (0, PARTS[1]))]
    mean = [(x.double() + y.double()).div(3).float() for x, y in zip(PARTS[0], PARTS[1], strict=True)]
    assert compared(one, 0, [whole(i, x) for i, x in enumerate(mean)], parts=heavy).ok
    near = [whole(i, gradient(i) * (1 + 1e-4)) for i in range(2)]
    assert not compared(one, 0, near).ok
    assert compared(one, 0, near, rtol=1e-3).ok and compared(one, 0, near, floor=1e-3).ok
