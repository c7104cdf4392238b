"""No wrapper could load a state dict, and one of a module with a part called ``module`` would be misread.

The hook that reads plain names was registered without the module that it expects first. And it looked at one
name at a time, so where a module has both ``weight`` and ``module.weight``, the second was taken for the
first with the prefix that other wrappers add.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from instep.replicate.wrapper import DataParallel
from tests.parity import world_of_one


class Confusing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))
        self.module = nn.Linear(2, 2)


@pytest.mark.parametrize("prefix", ["", "module."])
def test_names_are_judged_together(prefix: str) -> None:
    model = DataParallel(Confusing(), process_group=world_of_one())
    model.load_state_dict(
        {
            f"{prefix}weight": torch.full((2,), 1.0),
            f"{prefix}module.weight": torch.full((2, 2), 2.0),
            f"{prefix}module.bias": torch.full((2,), 3.0),
        }
    )
    assert model.module.weight.tolist() == [1, 1]
    assert model.module.module.weight.tolist() == [[2, 2], [2, 2]]
    assert model.module.module.bias.tolist() == [3, 3]


def test_those_of_equal_shape_are_not_confused() -> None:
    inner = nn.Linear(2, 2, bias=False)
    module = nn.Module()
    module.weight, module.module = nn.Parameter(torch.zeros(2, 2)), inner
    model = DataParallel(module, process_group=world_of_one())
    model.load_state_dict({"weight": torch.full((2, 2), 1.0), "module.weight": torch.full((2, 2), 2.0)})
    assert module.weight.tolist() == [[1, 1], [1, 1]]
    assert inner.weight.tolist() == [[2, 2], [2, 2]]
