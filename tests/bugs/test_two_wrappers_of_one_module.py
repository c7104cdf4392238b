"""Two living wrappers of one module reduced its gradients at once, each while the other was writing them.

It takes no more than a notebook cell that is run twice under another name. The first wrapper made ``.grad``
a view of its bucket and sent it; the second one copied from there what was local, reduced or half of each,
by chance. The second one is refused until the first is closed or gone.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from torch import nn

from instep.mesh.mesh import Mesh
from instep.replicate.wrapper import DataParallel
from instep.shard.fully import fully_shard
from tests.parity import filled
from tests.replicate.nets import Dense
from tests.replicate.replicas import assert_mean_gradients, square
from tests.world import world

SECOND: dict[str, Callable[[DataParallel, Mesh], object]] = {
    "the module": lambda first, mesh: DataParallel(first.module, process_group=mesh),
    "the wrapper": lambda first, mesh: DataParallel(first, process_group=mesh),
    "a part": lambda first, mesh: DataParallel(first.module.layers[3], process_group=mesh),
    "more": lambda first, mesh: DataParallel(
        nn.ModuleList([first.module, nn.Linear(2, 2)]), process_group=mesh
    ),
    "on one rank": lambda first, mesh: DataParallel(
        first.module.layers[3] if mesh.rank else filled(nn.Linear(9, 5)), process_group=mesh
    ),
    "sharded": lambda first, mesh: fully_shard(first.module, mesh),
}


@pytest.mark.parametrize("second", SECOND)
@world(2)
def test_the_second_wrapper_is_refused_and_the_first_goes_on(mesh: Mesh, second: str) -> None:
    first = DataParallel(filled(Dense()), process_group=mesh)
    with pytest.raises(ValueError, match=r"belongs to a DataParallel already.*one module that holds all"):
        SECOND[second](first, mesh)
    square(first, mesh.rank).backward()
    assert_mean_gradients(mesh, first.module, square)
    module = first.module
    first.close()
    DataParallel(module, process_group=mesh).close()
