"""The strategies by name."""

from __future__ import annotations

from instep.replicate.bucketed import Bucketed
from instep.replicate.flat import Flat
from instep.replicate.naive import Naive
from instep.replicate.overlap import Overlap

STRATEGIES: dict[str, type[Naive]] = {
    "naive": Naive,
    "flat": Flat,
    "overlap": Overlap,
    "bucketed": Bucketed,
}

# Forms of data parallelism in which not every rank ends with the gradient: they wrap in another way.
WRAPPERS = {
    "server": "instep.ParameterServer(module, optimizer)",
    "threads": "instep.ThreadedReplicas(module, num_replicas)",
}


def find(name: str) -> type[Naive]:
    """The strategy called ``name``."""
    if name in WRAPPERS:
        raise ValueError(f"strategy {name!r} is a wrapper of its own: use {WRAPPERS[name]}")
    if name not in STRATEGIES:
        raise ValueError(f"strategy {name!r}: expected one of {', '.join(STRATEGIES)}")
    return STRATEGIES[name]
