"""``.grad`` became another tensor after the exchange, so a list of gradients made once went stale.

Loops that zero in place (the default until torch 2.0) and optimizers of one's own keep such lists. DDP
leaves the tensor where it is. It now stays ``.grad`` and only its memory moves into the bucket.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from instep.mesh.mesh import Mesh
from instep.replicate.strategies import STRATEGIES
from instep.replicate.wrapper import DataParallel
from tests.parity import filled
from tests.replicate.nets import Dense
from tests.replicate.replicas import gradients, mean_gradients, square
from tests.world import world


@pytest.mark.parametrize("strategy", STRATEGIES)
@world(2)
def test_a_list_of_gradients_holds_for_the_whole_training(mesh: Mesh, strategy: str) -> None:
    module = filled(Dense())
    model = DataParallel(module, process_group=mesh, strategy=strategy)
    square(model, mesh.rank).backward()
    kept = gradients(module)
    for _ in range(3):
        for g in kept:
            g.zero_()
        square(model, mesh.rank).backward()
        torch.testing.assert_close(kept, mean_gradients(module, square))
        with torch.no_grad():
            for p, g in zip(module.parameters(), kept, strict=True):
                p.sub_(g, alpha=0.1)
    model.close()


@world(2)
def test_also_where_gradients_are_copies_of_their_bucket(mesh: Mesh) -> None:
    module = filled(nn.Linear(6, 3)).bfloat16()
    model = DataParallel(module, process_group=mesh)

    def loss(module: nn.Module, rank: int) -> torch.Tensor:
        return square(lambda x: module(x.bfloat16()).float(), rank)

    loss(model, mesh.rank).backward()
    kept = gradients(module)
    model.zero_grad(set_to_none=False)
    loss(model, mesh.rank).backward()
    torch.testing.assert_close(kept, mean_gradients(module, loss), rtol=2e-2, atol=1e-2)
    model.close()
