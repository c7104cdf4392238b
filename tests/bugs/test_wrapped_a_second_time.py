"""A framework put torch's DDP around a model that was wrapped, and training went on, with other weights.

accelerate's ``prepare`` does it to every model that it is given, and the Trainer of transformers gives it
the user's. With ``gradient_as_bucket_view`` the weights were wrong from the first step on; and under
accumulation ``no_sync`` reached the outer wrapper alone. Here a constructor call stands for the frameworks,
because that is what they make.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.nn.parallel import DistributedDataParallel

from instep.mesh.mesh import Mesh
from instep.pipeline.pipeline import Pipeline
from instep.reduce.blocks import BLOCK_ELEMENTS
from instep.replicate.wrapper import DataParallel
from instep.shard.fully import fully_shard
from tests.parity import filled, world_of_one
from tests.replicate.nets import Dense
from tests.replicate.replicas import assert_mean_gradients, square
from tests.world import world

Wrap = Callable[[nn.Module, Mesh], nn.Module]

OURS: dict[str, Wrap] = {
    "DataParallel": lambda module, mesh: DataParallel(module, process_group=mesh),
    "stage 2": lambda module, mesh: fully_shard(module, mesh, stage=2),
    "stage 3": lambda module, mesh: fully_shard(module, mesh, stage=3),
}
AROUND = r"was put around .*use one of the two.*leave the model out of prepare\(\)"


class Holder(nn.Module):
    """A model with a wrapper somewhere in it."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


@pytest.mark.parametrize("ours", OURS)
def test_ddp_around_a_wrapper_is_refused_when_it_is_made(ours: str) -> None:
    mesh = world_of_one()
    model = OURS[ours](filled(Dense()), mesh)
    with pytest.raises(ValueError, match=AROUND):
        DistributedDataParallel(model, process_group=object())
    assert all(hasattr(model, name) for name in dir(model) if name.startswith("_ddp"))  # looking is free
    model.close()


@world(2, by="process")
@pytest.mark.parametrize("ours", OURS)
def test_ddp_further_out_is_refused_in_the_first_forward(mesh: Mesh, ours: str) -> None:
    even = nn.Linear(BLOCK_ELEMENTS, 2, bias=False)  # shards of one shape, which torch's DDP takes
    inner = OURS[ours](filled(even), mesh)
    model = DistributedDataParallel(Holder(inner))
    with pytest.raises(ValueError, match=AROUND):
        model(torch.ones(2, BLOCK_ELEMENTS))
    inner.close()


@world(2, by="process")
def test_ddp_may_leave_to_a_wrapper_what_it_leaves_out_itself(mesh: Mesh) -> None:
    """As torch's own nested DDPs do."""
    module = Holder(DataParallel(filled(Dense()), process_group=mesh))
    module.head = nn.Linear(3, 3)
    names = [name for name, _ in module.named_parameters() if name.startswith("body.")]
    module._ddp_params_and_buffers_to_ignore = names
    square(DistributedDataParallel(module), mesh.rank).backward()
    assert_mean_gradients(mesh, module.body.module, square)
    module.body.close()


@world(2, by="process")
def test_fsdp_around_a_wrapper_is_refused_when_it_is_made(mesh: Mesh) -> None:
    for further_out in (False, True):
        inner = DataParallel(filled(Dense()), process_group=mesh)
        with pytest.raises(ValueError, match=AROUND):
            fsdp2(Holder(inner) if further_out else inner)
        inner.close()


@world(2, by="process")
def test_torch_s_wrappers_inside_are_refused_by_name(mesh: Mesh) -> None:
    ddp, fsdp = DistributedDataParallel(filled(Dense())), fsdp2(filled(Dense()))
    for wrap in OURS.values():
        with pytest.raises(ValueError, match="the module is wrapped in torch's DistributedDataParallel alr"):
            wrap(ddp, mesh)
        with pytest.raises(ValueError, match="part 'body' of the module is wrapped in torch's FSDP already"):
            wrap(Holder(fsdp), mesh)
    ddp.requires_grad_(False)  # a teacher, say
    model = DataParallel(nn.ModuleList([ddp, nn.Linear(2, 2)]), process_group=mesh)
    model.close()


@pytest.mark.parametrize("wrap", OURS.values(), ids=OURS)
def test_a_pipeline_inside_is_refused_by_name(wrap: Wrap) -> None:
    """Both exchanged its gradients, and the first step said that none had come."""
    mesh = world_of_one()
    model = Pipeline([nn.Linear(2, 2)], mesh)
    with pytest.raises(ValueError, match="the module is wrapped in instep's Pipeline already, and both"):
        wrap(model, mesh)
    model.close()
