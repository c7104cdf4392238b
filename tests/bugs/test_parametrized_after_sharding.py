"""Parametrizations put values into parameters by ``set_``, which torch hands over to no class of tensors.

In stage 3 the parameter then had memory of its own until its weights were gathered again: training went on
with the values from before, without a word. Those that make other parameters ended in torch's own words.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.nn.utils.parametrizations import weight_norm
from torch.nn.utils.parametrize import register_parametrization

from instep.mesh.mesh import Mesh
from instep.shard.fully import full_state_dict, fully_shard
from tests.parity import filled
from tests.replicate.nets import Dense
from tests.replicate.replicas import square
from tests.world import world


class Doubled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x

    def right_inverse(self, x: Tensor) -> Tensor:
        return x / 2


def parametrize(module: nn.Module) -> None:
    register_parametrization(module.layers[0], "weight", Doubled())


def halve(module: nn.Module) -> None:
    vector_to_parameters(parameters_to_vector(module.parameters()).detach() / 2, module.parameters())


def assign(module: nn.Module) -> None:
    with torch.no_grad():
        for p in module.parameters():
            p.set_(torch.full_like(p, 0.1))


@pytest.mark.parametrize("change", [parametrize, halve, assign])
@world(2)
def test_values_that_are_put_in_by_set_or_data_are_trained_with(mesh: Mesh, change) -> None:
    module, alone = fully_shard(filled(Dense()), mesh), filled(Dense())
    for model, ranks in ((module, [mesh.rank]), (alone, [0, 1])):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        change(model)
        for _ in range(2):
            for rank in ranks:
                (square(model, rank) / len(ranks)).backward()
            optimizer.step()
            optimizer.zero_grad()
    expected = alone.state_dict()
    for name, values in full_state_dict(module).items():
        torch.testing.assert_close(values, expected[name])
    module.close()


@world(2)
def test_what_cannot_be_done_in_slices_says_what_to_do(mesh: Mesh) -> None:
    module = fully_shard(filled(Dense()), mesh)
    first = "'layers.0.weight'"
    with pytest.raises(
        ValueError, match=rf"{first} is in slices.*register them first, then call fully_shard"
    ):
        weight_norm(module.layers[0])
    with pytest.raises(ValueError, match=f"{first} would have other memory.*convert first"):
        module.layers[0].weight.set_(torch.zeros(1))
    with pytest.raises(ValueError, match="expected one tensor, whose values it is to have"):
        module.layers[0].weight.set_()
    module.close()


@world(2)
def test_in_stage_2_the_way_to_change_values_is_named(mesh: Mesh) -> None:
    module = fully_shard(filled(Dense()), mesh, stage=2)
    halve(module)
    with pytest.raises(ValueError, match=r"vector_to_parameters.*p\.copy_\(values\) under no_grad"):
        square(module, mesh.rank).backward()
    module.close()
