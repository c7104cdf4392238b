"""Inputs of a module that computes in fewer bits: cast, as torch's mixed-precision wrappers do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from instep.mesh.mesh import Mesh
from instep.shard.fully import full_state_dict, fully_shard
from tests.parity import filled, numbers
from tests.shard.trained import assert_same
from tests.world import world


class Widens(nn.Module):
    """Between its layers it computes in float32; it keeps what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
        self.given: dict[str, Any] = {}

    def forward(self, x: Tensor, **others: Any) -> Tensor:
        self.given = {"x": x, **others}
        for layer in self.layers:
            x = torch.tanh(layer(x).float())
        return x


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("stage", [2, 3])
@world(2)
def test_floating_inputs_of_the_module_and_its_units_are_cast(
    mesh: Mesh, stage: int, dtype: torch.dtype
) -> None:
    model: Any = fully_shard(filled(Widens()), mesh, stage, compute_dtype=dtype)
    x = numbers(4, 8, key="x").requires_grad_()
    nested = {"mask": [torch.ones(2, dtype=torch.float64)], "name": "a"}
    out = model(x, tokens=torch.arange(3), nested=nested)
    given = model.given
    assert given["x"].dtype == given["nested"]["mask"][0].dtype == dtype
    assert given["tokens"].dtype == torch.int64 and given["nested"]["name"] == "a"
    assert nested["mask"][0].dtype == torch.float64  # the caller's own stays
    out.square().mean().backward()
    assert x.grad is not None and x.grad.dtype == torch.float32
    assert_same(full_state_dict(model), dict(filled(Widens()).state_dict()), "weights")
    model.close()


@world(2)
def test_without_a_compute_dtype_inputs_stay_what_they_are(mesh: Mesh) -> None:
    model: Any = fully_shard(filled(Widens()).double(), mesh)
    with pytest.raises(RuntimeError, match="dtype"):
        model(numbers(4, 8, key="x"))
    model.close()
