"""What is done on one rank alone after wrapping: all ranks raise, and name step, parameter and rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from instep.elastic.faults import flip_bit
from instep.errors import Desync, ReplicasDiffer
from instep.mesh.mesh import Mesh
from instep.net.process_group import alone
from instep.replicate.server import ParameterServer
from instep.replicate.wrapper import DataParallel
from instep.shard.fully import fully_shard
from instep.shard.optimizer import ShardedOptimizer
from instep.step import replica_watch
from instep.step.replica_watch import PERIOD, ReplicaWatch
from tests.replicate.replicas import equal_everywhere
from tests.world import world

ODD = 1
STRATEGIES = ["naive", "flat", "overlap", "bucketed"]
WRAPPERS = [*STRATEGIES, "server", "stage 1"]
Make = Callable[..., Optimizer]
PLAIN = partial(SGD, lr=0.1)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2))


class Loop:
    """A user's loop over ``kind`` of wrapper."""

    def __init__(self, mesh: Mesh, kind: str, make: Make = PLAIN, **options: Any) -> None:
        self.rank, self.module = mesh.rank, net()
        self.model: Any
        self.optimizer: Any
        if kind == "server":
            self.model = self.optimizer = ParameterServer(self.module, make(self.module.parameters()), mesh)
            return
        strategy = kind if kind in STRATEGIES else "bucketed"
        self.model = DataParallel(self.module, process_group=mesh, strategy=strategy, **options)
        if kind == "stage 1":
            self.optimizer = ShardedOptimizer(self.module.parameters(), SGD, mesh, lr=0.1)
        else:
            self.optimizer = make(self.module.parameters())

    def gradients(self) -> None:
        for micro_batch in self.model.micro_batches(3):
            loss(self.module, micro_batch.index).backward()

    def step(self) -> None:
        self.gradients()
        self.optimizer.step()
        if self.optimizer is not self.model:
            self.optimizer.zero_grad()


def loss(model: nn.Module, key: int) -> Tensor:
    return model(torch.arange(6.0).view(2, 3) + key).square().sum()


@contextmanager
def looping(mesh: Mesh, kind: str, *args: Any, **options: Any) -> Iterator[Loop]:
    loop = Loop(mesh, kind, *args, **options)
    yield loop
    loop.model.close()


@contextmanager
def told(loop: Loop, steps: int, *parameters: str, written: bool = False) -> Iterator[None]:
    """The block raises, on every rank the same; ``written``: since the last step, as it says."""
    with pytest.raises(ReplicasDiffer) as caught:
        yield
    assert caught.value.ranks == (ODD,)
    assert caught.value.parameters == (
        parameters or tuple(name for name, _ in loop.module.named_parameters())
    )
    when = f"after {steps} optimizer step{'' if steps == 1 else 's'}"
    assert str(caught.value).startswith(when)
    assert f", rank {ODD} holds other values than the other ranks in " in str(caught.value)
    assert (f"rank {ODD} wrote to parameters" in str(caught.value)) == written
    assert "Do on every rank what is done on one" in str(caught.value)


def reset(loop: Loop) -> None:
    torch.manual_seed(1)  # threads share the generator, which may be where it was for the layer
    loop.module[2].reset_parameters()


@world(3)
@pytest.mark.parametrize("kind", WRAPPERS)
@pytest.mark.parametrize("steps", [0, 2])
def test_a_layer_that_is_reset_on_one_rank_is_named_in_the_next_exchange(
    mesh: Mesh, kind: str, steps: int
) -> None:
    with looping(mesh, kind) as loop:
        for _ in range(steps):
            loop.step()
        if mesh.rank == ODD:
            reset(loop)
        with told(loop, steps, "2.weight", "2.bias", written=True):
            loop.step()


def load(loop: Loop) -> None:
    loop.module.load_state_dict({name: 2 * x for name, x in loop.module.state_dict().items()})


def scale_rate(loop: Loop) -> None:
    loop.optimizer.param_groups[0]["lr"] *= 2


def edit_gradient(loop: Loop) -> None:
    loop.module[0].bias.grad *= 2


def negate_moments(loop: Loop) -> None:
    loop.optimizer.state[loop.module[0].weight]["exp_avg"].neg_()


def flip(loop: Loop) -> None:
    """Past autograd."""
    flip_bit(loop.module[0].weight, index=11, bit=0)


# What rank 1 alone does between backward and step, and the parameters that it changes, by default all.
CHANGES: list[tuple[Callable[[Loop], None], tuple[str, ...]]] = [
    (load, ()),
    (scale_rate, ()),
    (edit_gradient, ("0.bias",)),
    (negate_moments, ("0.weight",)),
    (flip, ("0.weight",)),
]


@world(3, backend="shm")
@pytest.mark.parametrize(("change", "names"), CHANGES)
def test_what_one_rank_does_before_its_step_is_named_in_the_exchange_after_it(
    mesh: Mesh, change: Callable[[Loop], None], names: tuple[str, ...]
) -> None:
    with looping(mesh, "bucketed", AdamW if change is negate_moments else PLAIN) as loop:
        loop.step()
        loop.gradients()
        if mesh.rank == ODD:
            change(loop)
        loop.optimizer.step()
        loop.optimizer.zero_grad()
        with told(loop, 2, *names):
            loop.step()


@world(3)
def test_in_the_plain_loop_too(mesh: Mesh) -> None:
    with looping(mesh, "bucketed") as loop:
        for _ in range(2):
            loss(loop.model, mesh.rank).backward()
            loop.optimizer.step()
            loop.optimizer.zero_grad()
        if mesh.rank == ODD:
            with torch.no_grad():
                loop.module[1].weight.add_(1)
        with told(loop, 2, "1.weight", written=True):
            loss(loop.model, mesh.rank).backward()


def sharded_steps(module: Any, optimizer: Optimizer, num_steps: int) -> None:
    for _ in range(num_steps):
        for micro_batch in module.micro_batches(4):
            loss(module, micro_batch.index).backward()
        optimizer.step()
        optimizer.zero_grad()


@world(3)
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("change", ["weights", "learning rate"])
def test_a_shard_has_no_replica_so_updates_are_compared(mesh: Mesh, stage: int, change: str) -> None:
    module = fully_shard(net(), mesh, stage=stage)
    optimizer = SGD(module.parameters(), lr=0.1)
    sharded_steps(module, optimizer, 1)
    if mesh.rank == ODD and change == "weights":
        with torch.no_grad():
            module[2].weight.add_(1)
    elif mesh.rank == ODD:
        optimizer.param_groups[0]["lr"] *= 2
    with pytest.raises(Desync, match="has made updates with digest"):
        sharded_steps(module, optimizer, 2)
    module.close()


@world(4, dp=2, shard=2)
def test_of_shards_those_of_the_other_shard_group_are_the_replicas(mesh: Mesh) -> None:
    module = fully_shard(net(), mesh, stage=3)
    optimizer = SGD(module.parameters(), lr=0.1)
    sharded_steps(module, optimizer, 1)
    if mesh.rank == 2:  # all of so small a model is in the first shard
        next(p for p in module.parameters() if p.numel()).data.add_(1)  # past autograd's count
    with pytest.raises(ReplicasDiffer) as caught:
        sharded_steps(module, optimizer, 2)
    assert caught.value.ranks == (0, 2)  # two replicas of a shard have no majority
    assert caught.value.parameters
    module.close()


# What torch's DDP trains rightly goes on unchanged.


def sharpness_aware(loop: Loop) -> None:
    """Each rank moves the weights along its own gradient, and back before the step (SAM)."""
    model, parameters = loop.model, list(loop.module.parameters())
    with model.no_sync():
        loss(model, loop.rank).backward()
    with torch.no_grad():
        before = [p.clone() for p in parameters]
        for p in parameters:
            p.add_(p.grad, alpha=0.01)
            p.grad = None
    loss(model, loop.rank).backward()
    with torch.no_grad():
        for p, x in zip(parameters, before, strict=True):
            p.copy_(x)
    loop.optimizer.step()
    loop.optimizer.zero_grad()


def evaluate_with_an_average(loop: Loop) -> None:
    """Rank 0 alone puts other weights in, and these back."""
    if loop.rank == 0:
        before = {name: x.clone() for name, x in loop.module.state_dict().items()}
        loop.module.load_state_dict({name: x / 2 for name, x in before.items()})
        loop.module.load_state_dict(before)
    loop.step()


@world(2)
@pytest.mark.parametrize("use", [sharpness_aware, evaluate_with_an_average])
def test_weights_that_are_put_back_before_the_step_are_no_drift(
    mesh: Mesh, use: Callable[[Loop], None]
) -> None:
    with looping(mesh, "bucketed") as loop:
        for _ in range(3):
            use(loop)
        assert equal_everywhere(mesh, loop.module.parameters())


@world(2)
def test_frozen_parameters_and_buffers_may_be_each_rank_s_own(mesh: Mesh) -> None:
    module = net()
    module.register_parameter("frozen", nn.Parameter(torch.zeros(3), requires_grad=False))
    module.register_buffer("own", torch.zeros(3))
    model = DataParallel(module, process_group=mesh, broadcast_buffers=False)
    optimizer = SGD([p for p in module.parameters() if p.requires_grad], lr=0.1)
    for _ in range(3):
        module.frozen.add_(1 + mesh.rank)
        module.own.add_(mesh.rank)
        loss(model, mesh.rank).backward()
        optimizer.step()
        optimizer.zero_grad()
    model.close()


@world(2)
def test_without_the_comparison_ranks_go_on(mesh: Mesh) -> None:
    with looping(mesh, "bucketed", check_replicas=False) as loop:
        if mesh.rank == ODD:
            reset(loop)
        loop.step()
        loop.step()
        assert not equal_everywhere(mesh, loop.module.parameters())


# Which of it is looked at, and when.


@pytest.mark.parametrize("num_elements", [0, 1, 17, 123_457])
@pytest.mark.parametrize("num_parameters", [1, 33])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.complex128])
def test_every_element_has_its_turn(num_elements: int, num_parameters: int, dtype: torch.dtype) -> None:
    x = torch.zeros(num_elements, dtype=dtype)
    seen = torch.zeros(x.nbytes, dtype=torch.bool)

    def read(at: int, length: int) -> bytes:
        first = at - x.data_ptr()
        assert 0 <= first <= first + length <= x.nbytes
        seen[first : first + length] = True
        return b""

    watch = ReplicaWatch(alone(), lambda: [("x", x)] * num_parameters, [range(2)])
    with mock.patch.object(replica_watch.ctypes, "string_at", read):
        for step in range(PERIOD):
            watch.stepped(step + 7)
    assert seen.all()
