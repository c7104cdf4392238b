"""Hashes of all micro-batches in one file: each once, in order, with the rank that computed it."""

from __future__ import annotations

from typing import Any

from instep.mesh.mesh import Mesh
from instep.replicate.gradient_hashes import GradientHashes
from instep.run.writer import MicroBatchHashes
from tests.parity import world_of_one
from tests.world import world


def digests(leaf: int) -> dict[str, str]:
    return {"w": f"{leaf:016x}", "a": "b"}


@world(3)
def test_the_first_rank_writes_the_micro_batches_of_all_in_order_then_the_sum(mesh: Mesh) -> None:
    lines: list[dict[str, Any]] = []
    mine = {0: [4, 5], 1: [0], 2: [1, 2, 3]}[mesh.rank]
    seen = GradientHashes({leaf: digests(leaf) for leaf in mine}, {"w": str(mesh.rank)})
    MicroBatchHashes(mesh.world.group, lambda **fields: lines.append(fields)).step(7, seen)
    if mesh.rank:
        assert lines == []
        return
    ranks = [1, 2, 2, 2, 0, 0]
    leaves = [{"step": 7, "leaf": i, "rank": rank, "parameters": digests(i)} for i, rank in enumerate(ranks)]
    assert lines == [*leaves, {"step": 7, "reduced": {"w": "0"}}]
    assert list(lines[0]["parameters"]) == ["w", "a"]  # registration order


def test_a_run_of_one_rank_needs_no_group() -> None:
    lines: list[dict[str, Any]] = []
    MicroBatchHashes(world_of_one().world.group, lambda **fields: lines.append(fields)).step(
        1, GradientHashes({0: {}}, {})
    )
    assert lines == [{"step": 1, "leaf": 0, "rank": 0, "parameters": {}}, {"step": 1, "reduced": {}}]
