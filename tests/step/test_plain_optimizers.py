"""An optimizer of one's own, whose ``step`` takes no closure, trains a replicated model like torch's."""

from __future__ import annotations

import torch
from torch.optim import Optimizer

from instep.mesh.mesh import Mesh
from instep.replicate.wrapper import DataParallel
from tests.parity import filled
from tests.replicate.nets import Dense, mean_square
from tests.world import world


class Plain(Optimizer):
    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad, alpha=group["lr"])


@world(2)
def test_a_step_without_a_closure(mesh: Mesh) -> None:
    ours, theirs = (DataParallel(filled(Dense()), process_group=mesh) for _ in range(2))
    steps = Plain(ours.parameters(), {"lr": 0.1}).step, torch.optim.SGD(theirs.parameters(), lr=0.1).step
    for number in range(3):
        for model, step in zip((ours, theirs), steps, strict=True):
            for micro_batch in model.micro_batches(4, step=number):
                mean_square(model, micro_batch, number)
            step()
            model.zero_grad()
    torch.testing.assert_close(list(ours.parameters()), list(theirs.parameters()), rtol=0, atol=1e-7)
    for model in (ours, theirs):
        model.close()
