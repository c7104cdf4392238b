"""A micro-batch computed once more, by any rank, beside the training that goes on.

The gradient of a micro-batch is a function of the weights, the samples and the keys of the random numbers.
So a rank that has these gets the bits that its owner got, and may ask where a nan began, or whether another
rank computes as it should. It happens in a twin of the module, so no ``.grad``, buffer or generator of the
training is touched: a copy, as hooks of a data-parallel wrapper stay behind when a module is copied, or,
where no rank has all weights, a new module that was given them.

``compare_leaves`` does it on all ranks: what is wrong on one spoils the gradient of all, and no loss curve
tells. Weights and moments themselves are compared by ``ordered/replicas.py``.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from instep.errors import ReplicasDiffer
from instep.mesh.agree import all_or_none
from instep.mesh.device import generators
from instep.mesh.process_group import Group
from instep.mesh.rank_process import as_told
from instep.ordered.keys import LeafKeys
from instep.ordered.replicas import (
    Digests,
    Odd,
    digests,
    gather,
    listed,
    odd_one_out,
    ranks_listed,
    together,
    way_out,
)
from instep.step.micro_batches import MicroBatch

LEAVES = "the comparison of micro-batches"
LossOf = Callable[[nn.Module, MicroBatch], Tensor]
"""The loss of one micro-batch with the given model, which is not the trained one."""


@dataclass(frozen=True)
class Computed:
    """Loss, and gradients by parameter name in registration order; those that never came are missing."""

    loss: Tensor
    gradients: Mapping[str, Tensor]


Compute = Callable[[int], Computed]
"""``leaf_gradients`` for the step that is under way, with everything bound but the micro-batch."""


def leaf_gradients(
    module: nn.Module, loss_of: LossOf, leaf: int, *, num_leaves: int, step: int, seed: int
) -> Computed:
    """The gradients that micro-batch ``leaf`` of ``num_leaves`` has in a declared step, with their bits.

    As ``twin_gradients``, in a copy of ``module``, which is not a wrapper.
    """
    twin = copy.deepcopy(module)
    return twin_gradients(twin, loss_of, leaf, num_leaves=num_leaves, step=step, seed=seed)


def twin_gradients(
    twin: nn.Module, loss_of: LossOf, leaf: int, *, num_leaves: int, step: int, seed: int
) -> Computed:
    """The gradients that micro-batch ``leaf`` of ``num_leaves`` has in a declared step, with their bits.

    They are of the loss as it is: not yet summed, weighted or clipped. No communication. Takes memory for a
    second set of weights and gradients, as long as it runs.

    Args:
        twin: with the weights of before the step; nothing else uses it.
        step, seed: as in ``micro_batches`` and its ``DataParallel``; they key the random numbers.
    """
    device = next((parameter.device for parameter in twin.parameters()), torch.device("cpu"))
    keys = LeafKeys(twin, seed, generators(device))
    with keys.step(), keys.leaf(step, leaf), torch.enable_grad():
        loss = loss_of(twin, MicroBatch(leaf, num_leaves))
        loss.backward()
    gradients = {name: p.grad for name, p in twin.named_parameters() if p.grad is not None}
    return Computed(loss.detach(), gradients)


def compare_leaves(group: Group, compute: Compute, plan: Sequence[Sequence[int]], step: int) -> None:
    """Every rank computes the first micro-batch of the next rank, too, and the bits are compared. Collective.

    ``plan[r]`` are the micro-batches of group rank r in ``step``. The owner also computes its own again,
    since what it has sent is part of a sum by now. So this finds a rank that computes otherwise each time:
    broken arithmetic, another build, other weights or samples; not a slip in the step itself. If two ranks
    differ, a third one decides. It must come before the update; ranks have two micro-batches more to
    compute in such a step.

    Raises:
        ReplicasDiffer: on every rank, naming micro-batch, parameter, the ranks that computed it, and of
            three or more ranks the odd one.
    """
    if group.size == 1:
        return
    owners = {own[0]: rank for rank, own in enumerate(plan) if len(own)}
    votes: dict[int, dict[int, Digests]] = {leaf: {} for leaf in owners}

    def ask(distance: int, about: Iterable[int]) -> None:
        """Let the rank that is ``distance`` after its owner compute each of the leaves ``about``."""
        mine = [leaf for leaf in about if (owners[leaf] + distance) % group.size == group.rank]
        computed = all_or_none(
            group, LEAVES, lambda: {str(leaf): digests(compute(leaf).gradients.items()) for leaf in mine}
        )
        for rank, said in gather(group, computed, LEAVES).items():
            for leaf, values in said.items():
                votes[int(leaf)][rank] = values

    ask(0, owners)
    ask(-1, owners)
    doubtful = [leaf for leaf in owners if odd_one_out(votes[leaf])]
    if not doubtful:
        return
    if group.size > 2:
        ask(1, doubtful)
    error = _compute_different({leaf: votes[leaf] for leaf in doubtful}, step)
    raise as_told(error) if group.rank else error


def _compute_different(votes: Mapping[int, Mapping[int, Digests]], step: int) -> ReplicasDiffer:
    lines: list[str] = []
    found: list[Odd] = []
    for leaf, said in votes.items():
        odd = odd_one_out(said)
        assert odd is not None
        asked = ranks_listed(tuple(sorted(said)))
        blame = f": {ranks_listed(odd.ranks)} computed otherwise" if odd.certain else ", all that were asked"
        lines.append(f"  micro-batch {leaf}, by {asked}{blame}: {listed(odd.names)}")
        found.append(odd)
    whole = together(found)
    assert whole is not None
    table = "\n".join(lines)
    return ReplicasDiffer(
        f"in step {step} ranks computed different gradients of one micro-batch:\n{table}\n{way_out(whole)}",
        ranks=whole.ranks,
        parameters=whole.names,
    )
