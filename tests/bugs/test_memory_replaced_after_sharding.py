"""Code that gives a parameter other memory (``set_``, ``.data =``) after sharding: its values would be lost.

Parametrizations and ``vector_to_parameters`` do it. Training went on with the values from before.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from instep.shard.fully import fully_shard
from tests.parity import filled, world_of_one
from tests.replicate.nets import Dense
from tests.replicate.replicas import square


def halve(module: nn.Module) -> None:
    vector_to_parameters(parameters_to_vector(module.parameters()).detach() / 2, module.parameters())


def assign(module: nn.Module) -> None:
    with torch.no_grad():
        for p in module.parameters():
            p.set_(torch.full_like(p, 0.1))


@pytest.mark.parametrize("change", [halve, assign])
@pytest.mark.parametrize("stage", [2, 3])
def test_the_next_forward_names_the_way_to_change_values(change, stage: int) -> None:
    module = fully_shard(filled(Dense()), world_of_one(), stage=stage)
    change(module)
    with pytest.raises(ValueError, match=r"vector_to_parameters.*p\.copy_\(values\) under no_grad"):
        square(module, 0)
    module.close()
