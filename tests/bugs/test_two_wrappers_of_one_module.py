"""Two living wrappers of one module reduced its gradients at once, each while the other was writing them.

It takes no more than a notebook cell that is run twice under another name. The first wrapper made ``.grad``
a view of its bucket and sent it; the second one copied from there what was local, reduced or half of each,
by chance. A module that shares only a part with a wrapped one is refused.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from instep.mesh.mesh import Mesh
from instep.replicate.wrapper import DataParallel
from tests.parity import filled
from tests.replicate.nets import Dense
from tests.replicate.replicas import (
    assert_mean_gradients,
    gradients,
    mean_gradients,
    square,
)
from tests.world import world


@world(2)
def test_of_two_wrappers_of_one_module_the_newer_one_does_the_work(mesh: Mesh) -> None:
    module = filled(Dense())
    first, second = (DataParallel(module, process_group=mesh, bucket_cap_mb=1e-5) for _ in range(2))
    for model in (first, second, first, second):
        module.zero_grad()
        square(model, mesh.rank).backward()
        assert_mean_gradients(mesh, module, square)
        torch.optim.SGD(module.parameters(), lr=0.1).step()
    with pytest.raises(RuntimeError, match="is closed"):
        first.sync_gradients()
    second.close()


@world(2)
def test_a_wrapper_takes_over_from_those_of_its_parts(mesh: Mesh) -> None:
    module = filled(Dense())
    module.layers[0] = DataParallel(module.layers[0], process_group=mesh)
    inner = DataParallel(module, process_group=mesh)
    outer = DataParallel(inner, process_group=mesh)
    for _ in range(2):
        outer.zero_grad()
        square(outer, mesh.rank).backward()
        torch.testing.assert_close(gradients(module), mean_gradients(filled(Dense()), square))
    outer.close()


@world(2)
def test_a_module_that_shares_a_part_with_a_wrapped_one_is_refused_until_that_is_closed(mesh: Mesh) -> None:
    encoder = filled(nn.Linear(6, 9))
    first = DataParallel(nn.Sequential(encoder, filled(nn.Linear(9, 3))), process_group=mesh)
    other = nn.Sequential(encoder, filled(nn.Linear(9, 2)))
    for module in (other, encoder):
        with pytest.raises(ValueError, match=r"'0\.weight' belongs to another DataParallel.*wrap one module"):
            DataParallel(module, process_group=mesh)
    square(first, mesh.rank).backward()
    assert_mean_gradients(mesh, first.module, square)
    first.close()
    DataParallel(other, process_group=mesh).close()
