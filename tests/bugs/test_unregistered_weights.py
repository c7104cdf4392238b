"""Weights in a plain list got the sum over the micro-batches of a rank, beside the mean that others got.

No wrapper has a hook on such a weight, so an optimizer that has it is refused where it steps.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from instep.replicate.threads import ThreadedReplicas
from instep.replicate.wrapper import DataParallel
from tests.replicate.nets import WIDTH, mean_square


class Unregistered(nn.Module):
    """Has a weight in a list that is not an ``nn.ParameterList``."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, 3)
        self.scales = [torch.ones(3, requires_grad=True)]

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.scales[0]


def test_no_optimizer_steps_a_weight_that_is_not_registered_and_has_a_gradient() -> None:
    message = r"'scales' holds a trainable tensor of shape \(3,\) that is no parameter of the module"
    replicas, model = ThreadedReplicas(Unregistered(), 2), DataParallel(Unregistered())
    replicas.micro_batches(2, lambda model, micro_batch: mean_square(model, micro_batch, 0))
    declared_step(model)
    for wrapper in (replicas, model):
        torch.optim.SGD(wrapper.parameters(), 0.1).step()
        scales = wrapper.module.scales
        with pytest.raises(RuntimeError, match=message):
            torch.optim.SGD([*wrapper.parameters(), *scales], 0.1).step()
        assert torch.equal(scales[0], torch.ones(3))
        scales[0].grad = None
        torch.optim.SGD(scales, 0.1).step()
        scales[0].sum().backward()  # one that the program makes by itself is its own affair
        torch.optim.SGD(scales, 0.1).step()
        assert torch.equal(scales[0], torch.full((3,), 0.9))
    model.close()


def declared_step(model: DataParallel) -> None:
    for micro_batch in model.micro_batches(2):
        mean_square(model, micro_batch, 0)
