"""A micro-batch computed once more, by any rank, beside the training that goes on.

The gradient of a micro-batch is a function of the weights, the samples and the keys of the random numbers.
So a rank that has these gets the bits that its owner got, and may ask where a nan began, or whether another
rank computes as it should. It happens in a twin of the module, so no ``.grad``, buffer or generator of the
training is touched: a copy, as hooks of a data-parallel wrapper stay behind when a module is copied, or,
where no rank has all weights, a new module that was given them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from instep.mesh.device import generators
from instep.ordered.keys import LeafKeys
from instep.step.micro_batches import MicroBatch

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
