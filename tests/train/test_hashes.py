"""The table of who holds what is exchanged when what a rank holds has changed, and only then."""

from __future__ import annotations

import pytest
import torch

from instep.mesh.group import Group
from instep.mesh.mesh import Mesh
from instep.ordered.blocks import BLOCK_ELEMENTS
from instep.ordered.hash import state_digests
from instep.ordered.parts import Part
from instep.ordered.sample import sampled_blocks
from instep.train.hashes import TABLE, Together
from tests.parity import numbers
from tests.world import world

LENGTH = 4 * BLOCK_ELEMENTS + 5


class Counted:
    """A group that writes down which bytes are gathered."""

    def __init__(self, group: Group) -> None:
        self.group, self.rank, self.size, self.ranks = group, group.rank, group.size, group.ranks
        self.operations: list[str] = []

    def all_gather_bytes(self, data: bytes, operation: str, *, limit: int = 1 << 24) -> list[bytes]:
        self.operations.append(operation)
        return self.group.all_gather_bytes(data, operation, limit=limit)


def pieces(x: torch.Tensor, edge: int, rank: int) -> list[Part]:
    """``x`` of two ranks, cut after ``edge`` blocks."""
    first, last = (0, edge * BLOCK_ELEMENTS) if rank == 0 else (edge * BLOCK_ELEMENTS, LENGTH)
    return [Part("x", (LENGTH,), x.dtype, first, last, x[first:last])]


@world(2)
def test_the_table_is_made_again_only_when_the_parts_of_a_rank_are_others(mesh: Mesh) -> None:
    group = Counted(mesh.world.group)
    together = Together(group, lambda phase: None)  # type: ignore[arg-type]
    for step, edge in enumerate((2, 2, 1, 1, 3)):
        x = numbers(LENGTH, key=f"step {step}")
        assert together.digests(pieces(x, edge, mesh.rank), step) == state_digests([("x", x)], step)
        assert together.samples(pieces(x, edge, mesh.rank), step, 2) == sampled_blocks([("x", x)], step, 2)
    assert group.operations.count(TABLE) == 3


@world(2)
def test_what_one_rank_alone_has_dropped_is_missed_by_all(mesh: Mesh) -> None:
    together, x = Together(mesh.world.group, lambda phase: None), numbers(LENGTH, key="x")
    y = Part.whole("y", torch.ones(3))
    before = together.digests([*pieces(x, 2, mesh.rank), y], 0)
    held = [] if mesh.rank else pieces(x, 2, 0)
    with pytest.raises(ValueError, match=f"'x': expected parts .* its end at {LENGTH}, got 0 to 8192"):
        together.digests([*held, y], 1)
    assert together.digests([*pieces(x, 2, mesh.rank), y], 0) == before


@world(2)
def test_whoever_waits_for_the_others_says_so(mesh: Mesh) -> None:
    phases: list[str] = []
    together, x = Together(mesh.world.group, phases.append), numbers(LENGTH, key="x")
    together.digests(pieces(x, 2, mesh.rank), 0)
    assert phases == ["gather", "hash", "gather"]
