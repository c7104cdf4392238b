"""Buffers that are the same on all ranks are not sent; where they differ, all take rank 0's."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from instep.events import BUFFERS
from instep.mesh.mesh import Mesh
from instep.replicate.strategies import STRATEGIES
from instep.replicate.wrapper import DataParallel
from instep.shard.fully import fully_shard
from tests.parity import filled, numbers
from tests.replicate.nets import WIDTH, conv_net
from tests.replicate.replicas import equal_everywhere, square
from tests.world import world


class Positions(nn.Module):
    """Position ids, a causal mask and an integer scale, as transformers keep them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("positions", torch.arange(WIDTH).view(1, -1))
        self.register_buffer("mask", torch.ones(WIDTH, WIDTH, dtype=torch.bool).tril())
        self.register_buffer("table", torch.linspace(0, 1, WIDTH).to(torch.bfloat16), persistent=False)
        self.register_buffer("nothing", torch.empty(0))

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.linear(x) * self.table.float() + self.positions)


def travels(model: nn.Module) -> int:
    """How often buffers have travelled."""
    return sum(event.name == BUFFERS for event in model.recorder.events)


def step(model: nn.Module, rank: int) -> None:
    square(model, rank).backward()
    model.zero_grad()


@pytest.mark.parametrize("strategy", STRATEGIES)
@world(3)
def test_constant_buffers_are_never_sent(mesh: Mesh, strategy: str) -> None:
    model = DataParallel(filled(Positions()), process_group=mesh, strategy=strategy, bucket_cap_mb=1e-4)
    for _ in range(3):
        step(model, mesh.rank)
    assert travels(model) == 0
    model.close()


def in_place(buffer: Tensor) -> None:
    buffer[0] += 1


def by_data(buffer: Tensor) -> None:
    buffer.data[0] += 1


def by_numpy(buffer: Tensor) -> None:
    buffer.numpy()[0] += 1


WAYS = {"in place": in_place, ".data": by_data, "numpy": by_numpy}


@pytest.mark.parametrize("writer", [0, 1])
@pytest.mark.parametrize("way", WAYS)
@world(2)
def test_what_one_rank_writes_in_whatever_way_is_seen_by_its_bytes(mesh: Mesh, way: str, writer: int) -> None:
    model = DataParallel(filled(Positions()), process_group=mesh)
    step(model, mesh.rank)
    if mesh.rank == writer:
        WAYS[way](model.module.positions)
    step(model, mesh.rank)
    first = 1 if writer == 0 else 0  # rank 0's value counts
    assert model.module.positions[0].tolist() == [first + i for i in range(WIDTH)]
    assert travels(model) == 1
    assert equal_everywhere(mesh, model.buffers())
    model.close()


@world(2)
def test_what_all_ranks_write_alike_stays_at_home(mesh: Mesh) -> None:
    model = DataParallel(filled(Positions()), process_group=mesh)
    for turn in range(3):
        model.module.positions += turn
        model.module.mask = ~model.module.mask  # another tensor
        step(model, mesh.rank)
    assert travels(model) == 0
    model.close()


class Hooked(Positions):
    """Backward ends with a hook that writes into a buffer, after the last gradient has come."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        x.register_hook(self.last)
        return super().forward(x)

    def last(self, gradient: Tensor) -> None:
        self.mask.fill_(bool(self.rank))


@world(2)
def test_a_write_at_the_end_of_backward_is_not_too_late(mesh: Mesh) -> None:
    model = DataParallel(filled(Hooked(mesh.rank)), process_group=mesh)
    for _ in range(2):
        step(model, mesh.rank)
        assert not model.module.mask.any()
    model.close()


@world(2)
def test_other_buffers_on_one_rank_are_refused_by_name(mesh: Mesh) -> None:
    model = DataParallel(filled(Positions()), process_group=mesh)
    if mesh.rank:
        model.module.table = torch.zeros(2 * WIDTH)[:WIDTH].float()  # of another dtype
    with pytest.raises(
        ValueError, match=r"differ in buffers: buffer 'table', .*bfloat16.*broadcast_buffers=False"
    ):
        square(model, mesh.rank).backward()
    model.close()


@world(2)
def test_a_rank_without_a_buffer_that_others_have_is_no_hang(mesh: Mesh) -> None:
    model = DataParallel(filled(nn.Sequential(nn.Linear(WIDTH, 4))), process_group=mesh)
    if mesh.rank:
        model.module.register_buffer("own", torch.ones(3))
    with pytest.raises(ValueError, match=r"nothing on rank 0, but buffer 'own'"):
        square(model, mesh.rank).backward()
    model.close()


@world(4, shard=2)
def test_sharded_modules_too(mesh: Mesh) -> None:
    model = fully_shard(filled(Positions()), mesh)
    step(model, mesh.rank)
    assert travels(model) == 0
    model.mask.fill_(bool(mesh.rank))
    step(model, mesh.rank)
    assert travels(model) == 1 and not model.mask.any()
    model.close()


@world(2)
def test_running_statistics_of_a_conv_net_are_rank_0_s(mesh: Mesh) -> None:
    model = DataParallel(filled(conv_net(num_classes=3)), process_group=mesh)
    for turn in range(2):
        model(numbers(4, 3, 8, 8, key=f"{turn} {mesh.rank}")).square().mean().backward()
        assert equal_everywhere(mesh, model.buffers())
    assert travels(model) == 2
    model.close()
