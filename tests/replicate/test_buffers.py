"""Buffers: rank 0's where they differ; and running statistics, which declared steps keep in order."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from instep.errors import Desync
from instep.events import BUFFERS
from instep.mesh.mesh import Mesh
from instep.replicate.strategies import STRATEGIES
from instep.replicate.wrapper import DataParallel
from instep.shard.fully import fully_shard
from tests.parity import (
    Training,
    assert_same_bits,
    filled,
    train_by_hand,
    world_of_one,
)
from tests.replicate.nets import WIDTH, Residual, data, images, mean_square
from tests.replicate.replicas import equal_everywhere, gradients, samples, square
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


@pytest.mark.parametrize("writer", [0, 1])
@pytest.mark.parametrize("way", [lambda x: x, lambda x: x.data, lambda x: x.numpy()])
@world(2)
def test_what_one_rank_writes_in_whatever_way_is_seen_by_its_bytes(mesh: Mesh, way: Any, writer: int) -> None:
    model = DataParallel(filled(Positions()), process_group=mesh)
    step(model, mesh.rank)
    if mesh.rank == writer:
        way(model.module.positions)[0] += 1
    step(model, mesh.rank)
    first = 1 if writer == 0 else 0  # rank 0's value counts
    assert model.module.positions[0].tolist() == [first + i for i in range(WIDTH)]
    assert travels(model) == 1
    assert equal_everywhere(mesh, model.buffers())
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


@world(4, shard=2)
def test_sharded_modules_too(mesh: Mesh) -> None:
    model = fully_shard(filled(Positions()), mesh)
    step(model, mesh.rank)
    assert travels(model) == 0
    model.mask.fill_(bool(mesh.rank))
    step(model, mesh.rank)
    assert travels(model) == 1 and not model.mask.any()
    model.close()


# A buffer that a graph holds is replaced: rank 0's were written in place, unnoticed, under pending graphs.


class RunningScale(nn.Module):
    """Divides by a running mean square, which backward needs again; of rows that are turned in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("scale", torch.ones(WIDTH, 4).t().clone())

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.scale = 0.5 * self.scale + 0.5 * x.square().mean(0)
        return self.linear(x) / self.scale


def losses(model: nn.Module, rank: int) -> list[Tensor]:
    return [model(samples(rank, key)).square().mean() for key in ("first", "second")]


@world(2)
def test_the_second_of_two_backwards_computes_with_what_its_forward_saw(mesh: Mesh) -> None:
    by_rank = []
    for rank in range(2):
        alone = filled(RunningScale())
        by_rank.append(torch.autograd.grad(sum(losses(alone, rank)), list(alone.parameters())))
    model = DataParallel(filled(RunningScale()), process_group=mesh)
    strides = model.module.scale.stride()
    for loss in losses(model, mesh.rank):
        loss.backward()
    for ours, *parts in zip(gradients(model.module), *by_rank, strict=True):
        torch.testing.assert_close(ours, sum(parts) / 2)
    assert equal_everywhere(mesh, model.buffers()) and model.module.scale.stride() == strides
    model.close()


@world(2)
def test_a_buffer_that_two_modules_share_stays_shared(mesh: Mesh) -> None:
    module = nn.ModuleList([filled(RunningScale()), nn.Module()])
    module[1].register_buffer("same", module[0].scale)
    module.forward = module[0].forward
    model = DataParallel(module, process_group=mesh, find_unused_parameters=True)
    with torch.no_grad():
        module[0].scale.fill_(1.0 + mesh.rank)  # in place: both names see it
    kept = module[0].linear(samples(mesh.rank)) / module[0].scale  # a graph holds it
    module[0].linear(samples(mesh.rank)).sum().backward()
    assert module[1].same is module[0].scale
    assert module[0].scale.eq(1.0).all()
    kept.sum().backward()
    model.close()


@world(2)
def test_a_buffer_that_nobody_holds_is_written_in_place(mesh: Mesh) -> None:
    module = filled(nn.Sequential(nn.Linear(WIDTH, 4), nn.BatchNorm1d(4)))
    model = DataParallel(module, process_group=mesh)
    mean = module[1].running_mean
    for _ in range(2):
        losses(model, mesh.rank)[0].backward()
    assert module[1].running_mean is mean and equal_everywhere(mesh, [*gradients(module), *module.buffers()])
    model.close()


@world(2)
def test_buffers_are_left_alone_if_asked(mesh: Mesh) -> None:
    module = nn.Sequential(nn.Linear(WIDTH, 4), nn.BatchNorm1d(4))
    model = DataParallel(module, process_group=mesh, broadcast_buffers=False)
    square(model, mesh.rank).backward()
    assert not equal_everywhere(mesh, model.buffers())
    model.close()


NUM_LEAVES = 4


class Net(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(WIDTH, WIDTH), norm

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.first(x))


def wrapped(norm: nn.Module, mesh: Mesh | None = None) -> DataParallel:
    return DataParallel(filled(Net(norm)), process_group=mesh or world_of_one())


def declare(model: DataParallel, number: int = 0) -> None:
    for micro_batch in model.micro_batches(NUM_LEAVES, step=number):
        mean_square(model, micro_batch, number)


def kept(module: nn.Module) -> list[tuple[str, Tensor]]:
    return [(name, x.clone()) for name, x in module.named_buffers()]


@world(2)
def test_what_each_rank_measures_alone_would_differ(mesh: Mesh, monkeypatch) -> None:
    model = DataParallel(filled(Residual()), process_group=mesh)
    model._session.declared.statistics.exchange = lambda reducer: None
    for micro_batch in model.micro_batches(NUM_LEAVES):
        images(model, micro_batch, 0)
    assert equal_everywhere(mesh, [p.grad for p in model.module.parameters()])
    assert not equal_everywhere(mesh, model.module.buffers())
    model.close()


@world(2)
def test_a_forward_in_eval_mode_sees_the_statistics_of_before_the_step(mesh: Mesh) -> None:
    model = wrapped(nn.BatchNorm1d(WIDTH), mesh)
    declare(model)
    model.zero_grad()
    seen = []
    expected = copy.deepcopy(model.module).eval()
    for micro_batch in model.micro_batches(NUM_LEAVES):
        mean_square(model, micro_batch, 1)
        x = data(micro_batch, 1)
        with torch.no_grad():
            seen.append(torch.equal(model.module.eval()(x), expected(x)))
        model.module.train()
    assert all(seen)
    assert model.module.norm.num_batches_tracked == 2 * NUM_LEAVES
    model.close()


@pytest.mark.parametrize("strategy", STRATEGIES)
@world(2)
def test_a_step_that_is_given_up_changes_no_statistic_and_can_be_repeated(mesh: Mesh, strategy: str) -> None:
    """Also after the last backward, when all gradients have left."""
    model = DataParallel(filled(Residual()), process_group=mesh, strategy=strategy)
    expected = train_by_hand(Training(Residual, images, num_leaves=NUM_LEAVES, num_steps=1))
    expected = [(name, x) for name, x in expected if "running" in name or "tracked" in name]

    def given_up(number: int) -> None:
        for micro_batch in model.micro_batches(NUM_LEAVES, step=number):
            images(model, micro_batch, number)
            if mesh.rank == 1 and micro_batch.index == NUM_LEAVES - 1:
                raise KeyError("mine")

    before = kept(model.module)
    for number in range(2):  # gradients leave during backward from the second step on
        with pytest.raises(
            Desync if mesh.rank == 0 else KeyError, match="left" if mesh.rank == 0 else "mine"
        ):
            given_up(number)
        assert_same_bits(kept(model.module), before)
        assert all(p.grad is None for p in model.module.parameters())
    for micro_batch in model.micro_batches(NUM_LEAVES, step=0):
        images(model, micro_batch, 0)
    assert_same_bits(kept(model.module), expected)
    model.close()


def test_a_norm_that_changes_its_buffers_in_its_own_way_is_refused_by_name() -> None:
    class InPlace(nn.BatchNorm1d):
        def forward(self, x: Tensor) -> Tensor:
            self.running_mean.lerp_(x.detach().mean(0), 0.1)
            return F.batch_norm(x, None, None, training=True)

    class Replaced(nn.BatchNorm1d):
        def forward(self, x: Tensor) -> Tensor:
            self.running_mean = 0.9 * self.running_mean + 0.1 * x.detach().mean(0)
            return F.batch_norm(x, None, None, training=True)

    class Half(nn.BatchNorm1d):
        def forward(self, x: Tensor) -> Tensor:
            return F.batch_norm(x, self.running_mean, torch.ones(WIDTH), training=True)

    class Overridden(nn.BatchNorm1d):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x)

    for kind in (InPlace, Replaced, Half, Overridden):
        with pytest.raises(
            ValueError,
            match=r"forward changed buffer 'norm\.(running_mean|num_batches_tracked)' in a declared",
        ):
            declare(wrapped(kind(WIDTH)))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_a_compiled_norm_is_refused_by_name() -> None:
    model = wrapped(nn.BatchNorm1d(WIDTH))
    declare(model)  # hooks are there by now
    model.zero_grad()
    model.module.norm.compile(backend="eager", fullgraph=True)
    with pytest.raises(ValueError, match=r"forward changed buffer 'norm\.\w+' .* not compiled"):
        declare(model)
    torch.compiler.reset()


def test_a_wrapper_with_norms_is_collected() -> None:
    model = wrapped(nn.BatchNorm1d(WIDTH))
    declare(model)
    gone = weakref.ref(model), weakref.ref(model.module)
    del model
    gc.collect()
    assert [x() for x in gone] == [None, None]
