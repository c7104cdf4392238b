"""Hashes of all micro-batches in one line: each once, in order, with the rank that computed it."""

from __future__ import annotations

from instep.mesh.mesh import Mesh
from instep.replicate.gradient_hashes import GradientHashes
from instep.run.writer import gather_leaves
from tests.world import world


def digests(leaf: int) -> dict[str, str]:
    return {"w": f"{leaf:016x}", "a": "b"}


@world(3)
def test_the_micro_batches_of_all_ranks_are_gathered_in_order_and_the_sum(mesh: Mesh) -> None:
    mine = {0: [4, 5], 1: [0], 2: [1, 2, 3]}[mesh.rank]
    seen = GradientHashes({leaf: digests(leaf) for leaf in mine}, {"w": str(mesh.rank)})
    found = gather_leaves(mesh.world.group, seen)
    ranks = [1, 2, 2, 2, 0, 0]
    leaves = [{"leaf": i, "rank": rank, "parameters": digests(i)} for i, rank in enumerate(ranks)]
    assert found == {"leaves": leaves, "reduced": {"w": "0"}}
    assert list(found["leaves"][0]["parameters"]) == ["w", "a"]  # registration order
