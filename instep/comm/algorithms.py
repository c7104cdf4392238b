"""All algorithms: collective -> name -> list of steps."""

from __future__ import annotations

from instep.comm import binomial_tree, butterfly, direct, naive, ring
from instep.comm.schedule import Schedule

SCHEDULES: dict[str, dict[str, Schedule]] = {
    "all_reduce": {
        "naive": naive.all_reduce,
        "reduce_broadcast": binomial_tree.all_reduce,
        "ring": ring.all_reduce,
        "direct": direct.all_reduce,
        "recursive_doubling": butterfly.recursive_doubling,
        "halving_doubling": butterfly.halving_doubling,
    },
    "broadcast": {
        "naive": naive.broadcast,
        "tree": binomial_tree.broadcast,
        "scatter_allgather": ring.broadcast,
    },
    "reduce": {"naive": naive.reduce, "tree": binomial_tree.reduce},
    "reduce_scatter": {"ring": ring.reduce_scatter, "direct": direct.reduce_scatter},
    "all_gather": {"ring": ring.all_gather, "direct": direct.all_gather},
    "all_to_all": {"direct": direct.all_to_all},
    "scatter": {"naive": naive.scatter},
    "gather": {"naive": naive.gather},
}
