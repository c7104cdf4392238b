"""Communication hooks: those of torch give what they give there, and what they cannot keep is refused."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

from instep.errors import Desync, PeerLost
from instep.mesh.mesh import Mesh
from instep.replicate.wrapper import DataParallel
from tests.parity import filled
from tests.replicate.nets import Dense
from tests.replicate.replicas import (
    assert_mean_gradients,
    equal_everywhere,
    failing_at,
    gradients,
    mean_gradients,
    square,
)
from tests.world import world

# Hook -> the dtype in which it adds the halves of two ranks.
HOOKS: list[tuple[Any, torch.dtype]] = [
    (default_hooks.allreduce_hook, torch.float32),
    (default_hooks.fp16_compress_hook, torch.float16),
    (default_hooks.bf16_compress_hook, torch.bfloat16),
    (default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook), torch.float16),
]


def trained(model: DataParallel, mesh: Mesh, dtype: torch.dtype, rtol: float = 0.0) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        square(model, mesh.rank).backward()
        by_rank = [mean_gradients(model.module, lambda m, _, r=r: square(m, r), size=1) for r in range(2)]
        for ours, *parts in zip(gradients(model.module), *by_rank, strict=True):
            expected = sum(x.to(dtype) / 2 for x in parts).float()
            torch.testing.assert_close(ours, expected, rtol=rtol, atol=rtol * float(expected.abs().max()))
        optimizer.step()
    assert equal_everywhere(mesh, model.parameters())


@pytest.mark.parametrize("backend", ["gloo", "shm"])
@world(2, by="process")
def test_the_hooks_of_torch(mesh: Mesh, backend: str) -> None:
    group = torch.distributed.new_group(backend=backend)
    for hook, dtype in HOOKS:
        model = DataParallel(filled(Dense()), bucket_cap_mb=1e-4)
        model.register_comm_hook(group, hook)
        trained(model, mesh, dtype)
        model.close()


@world(2, by="process")
def test_power_sgd_sees_matrices_and_their_parameters(mesh: Mesh) -> None:
    state = powerSGD_hook.PowerSGDState(
        None, matrix_approximation_rank=8, start_powerSGD_iter=2, min_compression_rate=0.1
    )
    model = DataParallel(filled(Dense()))
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    trained(model, mesh, torch.float32, 1e-4)  # of the full rank, so that nothing is lost
    model.close()


def own(state: dict[str, Any], bucket: Any) -> torch.futures.Future[Tensor]:
    """Every rank keeps its own gradients."""
    parts = [g.clone() for g in bucket.gradients()]
    state.setdefault("seen", []).append((bucket.index(), bucket.is_last(), len(bucket.parameters())))
    assert [g.shape for g in parts] == [p.shape for p in bucket.parameters()]
    done: torch.futures.Future[Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


@world(2)
def test_ranks_may_differ_where_a_hook_lets_them(mesh: Mesh) -> None:
    model, state = DataParallel(filled(Dense()), process_group=mesh, bucket_cap_mb=1e-5), dict[str, Any]()
    model.register_comm_hook(state, own)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        square(model, mesh.rank).backward()
        alone = torch.autograd.grad(square(model.module, mesh.rank), list(model.module.parameters()))
        assert all(map(torch.equal, gradients(model.module), alone))
        optimizer.step()
    assert not equal_everywhere(mesh, model.parameters())
    first = state["seen"][: len(state["seen"]) // 2]
    assert [(k, last) for k, last, _ in first] == [(k, k == len(first) - 1) for k in range(len(first))]
    model.close()


def sum_over(pg: dist.ProcessGroup, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    return pg.allreduce([bucket.buffer()]).get_future().then(lambda summed: summed.value()[0])


@world(2)
def test_a_rank_that_is_gone_while_a_hook_reduces_is_a_lost_one(mesh: Mesh) -> None:
    model = DataParallel(filled(Dense()), process_group=mesh, strategy="flat")
    group = mesh.world.duplicate()
    if mesh.rank == 1:
        model.register_comm_hook(dict[str, Any](), own)
        square(model, 1).backward()
        group.close()
    else:
        model.register_comm_hook(group.pg, sum_over)
        with pytest.raises(PeerLost, match="the communication hook of bucket 0"):
            square(model, 0).backward()
        group.close()
    model.close()


@world(2)
def test_a_hook_on_one_rank_alone_is_told_to_all(mesh: Mesh) -> None:
    model = DataParallel(filled(Dense()), process_group=mesh)
    if mesh.rank == 1:
        model.register_comm_hook({}, own)
    with pytest.raises(Desync, match=r"reduces with a communication hook; .*register_comm_hook on every"):
        square(model, mesh.rank).backward()
    model.close()


@world(2)
def test_a_declared_step_has_no_hook(mesh: Mesh) -> None:
    model = DataParallel(filled(Dense()), process_group=mesh)
    model.register_comm_hook({}, own)
    with pytest.raises(ValueError, match="same bits on any number of ranks, and the hook would replace"):
        next(model.micro_batches(2))
    model.close()


@world(2)
def test_backwards_that_are_given_up_leave_nothing_of_a_hook(mesh: Mesh) -> None:
    model = DataParallel(filled(Dense()), process_group=mesh, bucket_cap_mb=1e-5)
    model.register_comm_hook(mesh, mean_by_messages)
    loss, last = square(model, mesh.rank), model.module.layers[0].weight
    fails = mesh.rank == 1
    with (
        failing_at(last, ZeroDivisionError) if fails else nullcontext(),
        pytest.raises(ZeroDivisionError if fails else Desync),
    ):
        loss.backward()
    square(model, mesh.rank).backward()
    assert_mean_gradients(mesh, model.module, square)
    model.close()


def mean_by_messages(mesh: Mesh, bucket: Any) -> torch.futures.Future[Tensor]:
    work = mesh.world.pg.allreduce([bucket.buffer()])
    return work.get_future().then(lambda future: future.value()[0] / mesh.axes.world_size)


def test_what_is_no_hook_is_refused_as_by_torch() -> None:
    model = DataParallel(nn.Linear(1, 1))
    with pytest.raises(TypeError, match="must be callable"):
        model.register_comm_hook(None, 1)
    model.register_comm_hook({}, own)
    with pytest.raises(RuntimeError, match="can only be called once"):
        model.register_comm_hook({}, own)
    model.close()


def nothing(state: object, bucket: Any) -> Any:
    return None


def too_little(state: object, bucket: Any) -> Any:
    done: torch.futures.Future[Tensor] = torch.futures.Future()
    done.set_result(torch.zeros(1))
    return done


@pytest.mark.parametrize(
    ("hook", "error", "message"),
    [
        (nothing, TypeError, "has to return a torch.futures.Future, got NoneType"),
        (too_little, ValueError, "expected its future to hold a tensor of .* elements, got 1 elements"),
    ],
)
def test_what_a_hook_returns_is_looked_at(hook: Any, error: type[Exception], message: str) -> None:
    model = DataParallel(filled(Dense()))
    model.register_comm_hook(None, hook)
    with pytest.raises(error, match=message):
        square(model, 0).backward()
    assert gradients(model.module) == [None] * 6
    model.close()
