"""A closure whose backward was to exchange what ``no_sync`` had accumulated was refused before it was called.

The look at the gradients came before the optimizer's step, and a closure computes them in it: Lightning makes
every step so. Where the step before the last backward accumulates, ``.grad`` had not been exchanged yet, and
torch's DDP trains on. With a closure the look comes when it has returned.
"""

from __future__ import annotations

import pytest
import torch

from instep.mesh.mesh import Mesh
from instep.replicate.wrapper import DataParallel
from tests.parity import filled
from tests.replicate.nets import Dense
from tests.replicate.replicas import assert_mean_gradients, square
from tests.world import world


@world(2)
def test_a_closure_exchanges_what_was_accumulated_before_it(mesh: Mesh) -> None:
    model = DataParallel(filled(Dense()), process_group=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with model.no_sync():
        (square(model, mesh.rank) / 4).backward()

    def closure() -> float:
        (square(model, mesh.rank) * 3 / 4).backward()
        return 7.0

    assert optimizer.step(closure) == 7.0
    assert_mean_gradients(mesh, model.module, square)
    model.close()


@world(2)
def test_a_closure_that_exchanges_nothing_is_refused(mesh: Mesh) -> None:
    model = DataParallel(filled(Dense()), process_group=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = [p.detach().clone() for p in model.parameters()]

    def closure() -> None:
        with model.no_sync():
            square(model, mesh.rank).backward()

    with pytest.raises(RuntimeError, match="never exchanged"):
        optimizer.step(closure)
    assert all(torch.equal(p, was) for p, was in zip(model.parameters(), before, strict=True))
    model.close()
