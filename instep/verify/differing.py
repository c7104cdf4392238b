"""Which values are not the same on all ranks that have them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable

from instep.mesh.group import Group
from instep.ordered.hash import block_digests
from instep.verify.subject import Value


def differing(values: Iterable[Value], group: Group) -> list[str]:
    """Those of ``values`` whose bits are others on one rank than on another, in words. Collective.

    Values in slices are compared with the same slice of other replicas, if there are any.
    """
    mine = [(x.name, x.first, hashlib.sha256(b"".join(block_digests(x.tensor))).hexdigest()) for x in values]
    everyone = group.all_gather_bytes(json.dumps(mine).encode(), "the comparison of values")
    found: dict[tuple[str, int], dict[int, str]] = {}  # by name and first element: digests by rank
    for rank, data in zip(group.ranks, everyone, strict=True):
        for name, first, digest in json.loads(data):
            found.setdefault((name, first), {})[rank] = digest
    lines = []
    for (name, _), digests in found.items():
        rank, expected = next(iter(digests.items()))
        odd = [other for other, digest in digests.items() if digest != expected]
        if odd:
            lines.append(f"{name!r} has other values on rank {', '.join(map(str, odd))} than on rank {rank}")
    return lines
