"""The algorithms by name; ``cost`` has a formula under each of these names."""

from __future__ import annotations

from instep.comm import binomial_tree, butterfly, direct, naive, ring
from instep.comm.schedule import Schedule

# For ``perform``. Those of the last two take x or its parts, one for each rank; the others one tensor x.
ALL_REDUCE: dict[str, Schedule] = {
    "naive": naive.all_reduce,
    "reduce_broadcast": binomial_tree.all_reduce,
    "ring": ring.all_reduce,
    "direct": direct.all_reduce,
    "recursive_doubling": butterfly.recursive_doubling,
    "halving_doubling": butterfly.halving_doubling,
}
BROADCAST: dict[str, Schedule] = {
    "naive": naive.broadcast,
    "tree": binomial_tree.broadcast,
    "scatter_allgather": ring.broadcast,
}
REDUCE: dict[str, Schedule] = {"naive": naive.reduce, "tree": binomial_tree.reduce}
REDUCE_SCATTER: dict[str, Schedule] = {"ring": ring.reduce_scatter, "direct": direct.reduce_scatter}
ALL_GATHER: dict[str, Schedule] = {"ring": ring.all_gather, "direct": direct.all_gather}

SCHEDULES = {
    "all_reduce": ALL_REDUCE,
    "broadcast": BROADCAST,
    "reduce": REDUCE,
    "reduce_scatter": REDUCE_SCATTER,
    "all_gather": ALL_GATHER,
}

# Functions that send from one place and receive in another.
ALL_TO_ALL = {"direct": direct.all_to_all}
SCATTER = {"naive": naive.scatter}
GATHER = {"naive": naive.gather}
