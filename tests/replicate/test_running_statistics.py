"""Batch norm in declared steps: what is watched, what is refused, and what becomes of a step that fails.

That buffers have the bits of a plain loop: test_parity.py, test_placements.py.
"""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from instep.errors import Desync
from instep.mesh.mesh import Mesh
from instep.replicate.strategies import STRATEGIES
from instep.replicate.wrapper import DataParallel
from tests.parity import (
    Training,
    assert_same_bits,
    filled,
    train_by_hand,
    world_of_one,
)
from tests.replicate.nets import WIDTH, Residual, data, images, mean_square
from tests.replicate.replicas import equal_everywhere
from tests.world import world

NUM_LEAVES = 4
RESNET = Training(Residual, images, num_leaves=7)


class Net(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(WIDTH, WIDTH), norm

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.first(x))


def wrapped(norm: nn.Module, mesh: Mesh | None = None) -> DataParallel:
    return DataParallel(filled(Net(norm)), process_group=mesh or world_of_one())


def step(model: DataParallel, number: int = 0) -> None:
    for micro_batch in model.micro_batches(NUM_LEAVES, step=number):
        mean_square(model, micro_batch, number)


def buffers(module: nn.Module) -> list[tuple[str, Tensor]]:
    return [(name, x.clone()) for name, x in module.named_buffers()]


def test_another_order_of_micro_batches_gives_other_bits() -> None:
    """So the test above tells the order: within rounding, any would do."""

    def backwards(model: nn.Module, micro_batch: object, number: int) -> None:
        turned = copy.copy(micro_batch)
        turned.index = RESNET.num_leaves - 1 - turned.index
        images(model, turned, number)

    ours = dict(train_by_hand(RESNET))
    theirs = dict(train_by_hand(Training(Residual, backwards, num_leaves=7)))
    assert not torch.equal(ours["stem.1.running_mean"], theirs["stem.1.running_mean"])


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
    step(model)
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

    before = buffers(model.module)
    for number in range(2):  # gradients leave during backward from the second step on
        with pytest.raises(
            Desync if mesh.rank == 0 else KeyError, match="left" if mesh.rank == 0 else "mine"
        ):
            given_up(number)
        assert_same_bits(buffers(model.module), before)
        assert all(p.grad is None for p in model.module.parameters())
    for micro_batch in model.micro_batches(NUM_LEAVES, step=0):
        images(model, micro_batch, 0)
    assert_same_bits(buffers(model.module), expected)
    model.close()


@world(2)
def test_norms_that_track_on_one_rank_only_are_told_apart(mesh: Mesh) -> None:
    model = wrapped(nn.BatchNorm1d(WIDTH), mesh)
    if mesh.rank == 1:
        norm = model.module.norm
        norm.running_mean = norm.running_var = norm.num_batches_tracked = None
    with pytest.raises(Desync, match=r"running statistics of 0 norms; rank 0: 1\. Track them"):
        step(model)
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
            step(wrapped(kind(WIDTH)))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_a_compiled_norm_is_refused_by_name() -> None:
    module = Net(nn.BatchNorm1d(WIDTH))
    model = DataParallel(filled(module), process_group=world_of_one())
    step(model)  # hooks are there by now
    model.zero_grad()
    module.norm.compile(backend="eager", fullgraph=True)
    with pytest.raises(ValueError, match=r"forward changed buffer 'norm\.\w+' .* not compiled"):
        step(model)
    torch.compiler.reset()


def test_hooks_of_the_user_find_the_buffers_and_what_is_copied_is_plain() -> None:
    model = wrapped(nn.BatchNorm1d(WIDTH))
    norm, kinds = model.module.norm, set()
    step(model)
    norm.register_forward_pre_hook(lambda m, args: kinds.add(type(copy.deepcopy(m).running_mean)))
    norm.register_forward_hook(lambda m, args, output: kinds.add(type(m.running_mean)))
    kept = norm.running_mean
    model.zero_grad()
    for micro_batch in model.micro_batches(NUM_LEAVES):
        mean_square(model, micro_batch, 0)
        assert norm.running_mean is kept
    assert kinds == {Tensor}
    twin = copy.deepcopy(model.module)
    twin(torch.ones(4, WIDTH))
    assert type(twin.norm.running_mean) is Tensor
    model.close()
    assert len(norm._forward_hooks) == 1 and len(norm._forward_pre_hooks) == 1


def test_a_norm_that_raises_shows_its_buffers_again() -> None:
    model = wrapped(nn.BatchNorm1d(WIDTH))
    kept = model.module.norm.running_mean
    loop = model.micro_batches(NUM_LEAVES)
    next(loop)
    with pytest.raises(ValueError, match="expected 2D or 3D input"):
        model.module.norm(torch.ones(WIDTH))
    loop.close()
    assert model.module.norm.running_mean is kept
    step(model)


def test_a_wrapper_with_norms_is_collected() -> None:
    model = wrapped(nn.BatchNorm1d(WIDTH))
    step(model)
    gone = weakref.ref(model), weakref.ref(model.module)
    del model
    gc.collect()
    assert [x() for x in gone] == [None, None]
