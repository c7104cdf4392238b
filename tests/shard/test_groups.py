"""Which ranks are meant: a mesh, a torch group, the registered mesh, nothing; and what else drives it."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.optim import SGD, AdamW

import instep
from instep.mesh.mesh import Mesh
from tests.parity import filled, numbers
from tests.replicate.replicas import equal_everywhere
from tests.shard.given import parameters, steps
from tests.shard.trained import WIDTH, Wide, assert_same
from tests.world import world


def assert_steps(optimizer: instep.ShardedOptimizer, given: list[torch.nn.Parameter], size: int) -> None:
    assert optimizer.group.size == size
    steps(optimizer, given, 2)
    expected = parameters()
    steps(AdamW(expected, lr=0.1), expected, 2)
    assert_same([p.detach() for p in given], [p.detach() for p in expected], "weights")
    optimizer.close()


def test_without_any_group_it_is_the_plain_optimizer() -> None:
    given = parameters()
    assert_steps(instep.ShardedOptimizer(given, AdamW, lr=0.1), given, 1)


@world(3, by="process")
def test_torch_groups_and_the_default_group(mesh: Mesh) -> None:
    for group in (None, dist.group.WORLD):
        given = parameters()
        assert_steps(instep.ShardedOptimizer(given, AdamW, group, lr=0.1), given, 3)
    pair = dist.new_group([0, 2])
    if mesh.rank != 1:
        given = parameters()
        assert_steps(instep.ShardedOptimizer(given, AdamW, pair, lr=0.1), given, 2)


@world(4, dp=2, tp=2)
def test_an_axis_of_a_mesh(mesh: Mesh) -> None:
    for process_group in (mesh, mesh["dp"], mesh["tp"]):
        given = parameters()
        assert_steps(instep.ShardedOptimizer(given, AdamW, process_group, lr=0.1), given, 2)


@world(2, by="process", backend="shm")
def test_a_gradient_scaler_a_scheduler_and_torch_s_clipping_work_as_ever(mesh: Mesh) -> None:
    results = []
    for sharded in (True, False):
        torch.manual_seed(0)
        module = Wide()
        optimizer = (
            instep.ShardedOptimizer(module.parameters(), SGD, mesh, lr=0.1, momentum=0.9)
            if sharded
            else SGD(module.parameters(), lr=0.1, momentum=0.9)
        )
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.5, total_steps=5)
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)
        for step in range(4):
            optimizer.zero_grad()
            loss = module(numbers(4, WIDTH, key=f"{step}")).square().mean()
            scaler.scale(loss * (float("inf") if step == 1 else 1.0)).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(module.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
        results.append(({**module.state_dict()}, optimizer.state_dict(), scaler.get_scale()))
    assert_same(results[0][0], results[1][0], "weights")
    assert_same(results[0][1], results[1][1], "state")
    assert results[0][2] == results[1][2] == 256.0
    assert equal_everywhere(mesh, module.parameters())


@world(2)
@pytest.mark.parametrize("added", [(3,), (1, 3), (0,), (1, 2)], ids=str)
@pytest.mark.parametrize("stage", [2, 3])
def test_a_group_added_later_may_have_a_part_of_a_unit(
    mesh: Mesh, stage: int, added: tuple[int, ...]
) -> None:
    """The parameters of the unit that an earlier group has were never stepped again."""

    def trained(is_sharded: bool) -> dict[str, torch.Tensor]:
        module = filled(torch.nn.Sequential(torch.nn.Linear(70, 70), torch.nn.Linear(70, 70)))
        model = instep.fully_shard(module, mesh, stage=stage)
        given = list(model.parameters())
        first = [p for i, p in enumerate(given) if i not in added]
        optimizer = instep.ShardedOptimizer(first, SGD, mesh, lr=0.1) if is_sharded else SGD(first, lr=0.1)
        optimizer.add_param_group({"params": [given[i] for i in added], "lr": 0.001})
        for micro_batch in model.micro_batches(2):
            model(numbers(3, 70, key=str(micro_batch.index))).square().sum().backward()
        optimizer.step()
        return {name: x.clone() for name, x in instep.full_state_dict(model).items()}

    assert_same(trained(True), trained(False), "weights")
