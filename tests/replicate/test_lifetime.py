"""Wrappers come and go: hooks, threads and groups with them; several may live at once."""

from __future__ import annotations

import gc
import threading

import pytest
import torch
import torch.distributed as dist
from torch import nn

from instep.mesh.mesh import Mesh
from instep.replicate.wrapper import DataParallel
from tests.parity import filled
from tests.replicate.nets import Dense
from tests.replicate.replicas import (
    assert_mean_gradients,
    gradients,
    mean_gradients,
    samples,
    square,
)
from tests.world import world


def lanes(rank: int) -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name == f"instep exchange, rank {rank}"]


def num_hooks(module: nn.Module) -> int:
    of_modules = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in module.modules())
    return of_modules + sum(len(p._post_accumulate_grad_hooks or ()) for p in module.parameters())


@world(2)
def test_a_dropped_wrapper_takes_its_hooks_and_its_thread_along(mesh: Mesh) -> None:
    module, before = filled(Dense()), lanes(mesh.rank)  # other tests may have left garbage
    for _ in range(3):
        model = DataParallel(module, process_group=mesh, strategy="overlap")
        for _ in range(2):  # what is sent in the middle of backward has a thread, from the second one on
            module.zero_grad()
            square(model, mesh.rank).backward()
        assert len(set(lanes(mesh.rank)) - set(before)) == 1
        del model
        gc.collect()
        assert num_hooks(module) == 0
        assert not set(lanes(mesh.rank)) - set(before)
        module.zero_grad()
    square(module, mesh.rank).backward()
    torch.testing.assert_close(gradients(module), [*alone(module, mesh.rank)])
    torch.optim.SGD(module.parameters(), lr=0.1).step()  # nobody watches it any more


def alone(module: nn.Module, rank: int) -> list[torch.Tensor]:
    return list(torch.autograd.grad(square(module, rank), list(module.parameters())))


@world(2)
def test_two_models_in_one_backward_use_a_group_each(mesh: Mesh) -> None:
    """Equal in size, with many buckets each: on one group their exchanges would meet each other's."""
    first = DataParallel(filled(nn.Sequential(*[nn.Linear(6, 6) for _ in range(8)])), process_group=mesh)
    second = DataParallel(
        filled(nn.Sequential(*[nn.Linear(6, 6) for _ in range(8)])), process_group=mesh, bucket_cap_mb=1e-5
    )
    for _ in range(5):
        first.zero_grad()
        second.zero_grad()
        second(first(samples(mesh.rank))).square().mean().backward()
        both = nn.Sequential(first.module, second.module)
        assert_mean_gradients(mesh, both, square)
    first.close()
    second.close()


@world(2)
def test_a_closed_wrapper_says_so(mesh: Mesh) -> None:
    model = DataParallel(filled(Dense()), process_group=mesh)
    model.close()
    model.close()
    with pytest.raises(RuntimeError, match=r"is closed: wrap model.module again"):
        next(model.micro_batches(2))
    with pytest.raises(RuntimeError, match="is closed"):
        model.sync_gradients()
    assert model(samples(0)).shape == (4, 3)


@world(2, by="process")
def test_a_user_s_collectives_between_ours_do_not_meet_them(mesh: Mesh) -> None:
    model = DataParallel(filled(nn.Sequential(*[nn.Linear(6, 6) for _ in range(6)])), bucket_cap_mb=1e-5)

    def sum_in_backward(gradient: torch.Tensor) -> None:
        x = torch.full((mesh.rank + 1,), 1.0)[:1].clone()
        dist.all_reduce(x)
        assert x.item() == 2

    for p in model.parameters():
        p.register_hook(sum_in_backward)
    for _ in range(3):
        model.zero_grad()
        work = dist.all_reduce(torch.ones(1000), async_op=True)
        square(model, mesh.rank).backward()
        work.wait()
        torch.testing.assert_close(gradients(model.module), mean_gradients_without_hooks(model.module))
    model.close()


def mean_gradients_without_hooks(module: nn.Module) -> list[torch.Tensor]:
    plain = nn.Sequential(*[nn.Linear(6, 6) for _ in range(6)])
    plain.load_state_dict(module.state_dict())
    return mean_gradients(plain, square)


@world(2, by="process")
def test_a_bare_process_group_stays_the_user_s(mesh: Mesh) -> None:
    group = dist.new_group([0, 1])
    before = len(dist.distributed_c10d._world.pg_map)
    model = DataParallel(filled(Dense()), process_group=group)
    assert model.group.pg is not group
    square(model, mesh.rank).backward()
    assert_mean_gradients(mesh, model.module, square)
    model.close()
    assert model.group.pg is None
    assert len(dist.distributed_c10d._world.pg_map) == before
    dist.all_reduce(torch.ones(1), group=group)
    dist.destroy_process_group(group)


@world(4, dp=2, tp=2)
def test_a_mesh_with_more_axes_is_reduced_over_dp_alone(mesh: Mesh) -> None:
    at = mesh.coordinates
    for group in (mesh, mesh["dp"]):
        model = DataParallel(filled(Dense()), process_group=group)
        square(model, mesh.rank).backward()
        peers = [rank for rank in range(4) if rank % 2 == at["tp"]]
        parts = zip(*[alone(filled(Dense()), rank) for rank in peers], strict=True)
        torch.testing.assert_close(gradients(model.module), [sum(part) / 2 for part in parts])
        model.close()
