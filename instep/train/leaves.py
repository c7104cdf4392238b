"""``leaves.jsonl``: who computed which micro-batch of a step, the hashes of its gradient and of the sum.

{"step": 7, "leaf": 3, "rank": 1, "parameters": {"head.weight": "9f0a51c2d4e6b870", ...}}
{"step": 7, "reduced": {"head.weight": "51c2d4e6b8709f0a", ...}}
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from instep.mesh.group import Group
from instep.replicate.witness import Seen
from instep.train.ledger import Write

OPERATION = "the exchange of leaf hashes"


class Leaves:
    """Gathers the hashes of all ranks of ``group``; its first rank writes them down with ``write``."""

    def __init__(self, group: Group, write: Write) -> None:
        self.group = group
        self._write = write

    def step(self, step: int, seen: Seen) -> None:
        """The gradient of step number ``step`` (steps done with it) is there. Collective."""
        first = self.group.rank == 0
        mine = {"leaves": list(seen.leaves.items()), "reduced": seen.reduced if first else {}}
        everyone = self.group.all_gather_bytes(json.dumps(mine).encode(), OPERATION)
        if first:
            for line in _lines(step, dict(zip(self.group.ranks, everyone, strict=True))):
                self._write(**line)


def _lines(step: int, said: dict[int, bytes]) -> Iterator[dict[str, Any]]:
    """The leaves in their order, then the sum."""
    found = {rank: json.loads(data) for rank, data in said.items()}
    leaves = [(leaf, rank, digests) for rank, its in found.items() for leaf, digests in its["leaves"]]
    for leaf, rank, digests in sorted(leaves, key=lambda each: each[0]):
        yield {"step": step, "leaf": leaf, "rank": rank, "parameters": digests}
    yield {"step": step, "reduced": found[min(found)]["reduced"]}
