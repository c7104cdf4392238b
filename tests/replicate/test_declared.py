"""The rules of declared steps: what breaks placement independence is an error that says so, on all ranks."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from instep.errors import Desync
from instep.mesh.mesh import Mesh
from instep.reduce.buckets import flat_real
from instep.replicate.strategies import STRATEGIES
from instep.replicate.wrapper import DataParallel
from tests.parity import filled, numbers, world_of_one
from tests.reduce.trees import tree_sum
from tests.replicate.nets import Dense, data, mean_square
from tests.replicate.replicas import failing_at, gradients
from tests.world import world

NUM_LEAVES = 4


def step(model: DataParallel, num_leaves: int = NUM_LEAVES) -> None:
    for micro_batch in model.micro_batches(num_leaves):
        mean_square(model, micro_batch, 0)


def alone(module: nn.Module) -> DataParallel:
    return DataParallel(module, process_group=world_of_one())


def expected_gradients(num_leaves: int = NUM_LEAVES) -> list[torch.Tensor]:
    model = alone(filled(Dense()))
    step(model, num_leaves)
    return gradients(model.module)


def assert_expected_gradients(model: DataParallel) -> None:
    for ours, expected in zip(gradients(model.module), expected_gradients(), strict=True):
        assert torch.equal(ours, expected)


def test_a_buffer_that_forward_replaces_is_noticed_too() -> None:
    class Cache(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.register_buffer("last", x.detach())
            return super().forward(x)

    module = Cache(6, 2)
    module.register_buffer("last", torch.zeros(4, 6))
    with pytest.raises(ValueError, match="buffer 'last'"):
        step(alone(module))


@world(2)
def test_sync_batch_norm_is_refused_before_it_runs(mesh: Mesh) -> None:
    module = nn.Sequential(nn.Conv2d(3, 4, 3), nn.SyncBatchNorm(4))
    model = DataParallel(filled(module), process_group=mesh)
    with pytest.raises(ValueError, match=r"'1' is a SyncBatchNorm.*depend on the placement.*GroupNorm"):
        next(model.micro_batches(NUM_LEAVES))
    model.close()


@world(2)
def test_a_loss_over_several_micro_batches_is_refused(mesh: Mesh) -> None:
    model = DataParallel(filled(Dense()), process_group=mesh)
    losses = []

    def forward_alone() -> None:
        for micro_batch in model.micro_batches(NUM_LEAVES):
            losses.append(model(data(micro_batch, 0)).square().mean())

    with pytest.raises(ValueError, match=rf"micro-batch {2 * mesh.rank} ended without a gradient.*once per"):
        forward_alone()
    with pytest.raises(ValueError, match=r"backward in no micro-batch went into the forward of micro-batch"):
        sum(losses).backward()
    model.zero_grad()
    step(model)
    assert_expected_gradients(model)
    model.close()


@world(2)
def test_backward_into_another_micro_batch_is_refused(mesh: Mesh) -> None:
    model = DataParallel(filled(Dense()), process_group=mesh)
    kept = []

    def backward_through_all_so_far() -> None:
        for micro_batch in model.micro_batches(NUM_LEAVES):
            kept.append(model(data(micro_batch, 0)).square().mean())
            sum(kept).backward(retain_graph=True)

    with pytest.raises(ValueError, match=r"backward in micro-batch \d went into .* micro-batch \d"):
        backward_through_all_so_far()
    step(model)
    assert_expected_gradients(model)
    model.close()


def test_a_gradient_left_over_is_refused() -> None:
    model = alone(filled(Dense()))
    model(torch.ones(1, 6)).sum().backward()
    with pytest.raises(ValueError, match=r"'layers.0.weight' already has a gradient.*zero_grad"):
        step(model)


def test_gradients_of_zeros_that_are_left_count_as_none() -> None:
    model = DataParallel(nn.Sequential(nn.Embedding(4, 3), nn.Linear(3, 1)))
    found = []
    for _ in range(2):
        for micro_batch in model.micro_batches(2):
            model(torch.tensor([micro_batch.index])).sum().backward()
        found.append([p.grad.clone() for p in model.parameters()])
        model.zero_grad(set_to_none=False)
    assert all(map(torch.equal, *found))
    model.close()


@pytest.mark.parametrize("weight", [-1, 2.0, True, torch.tensor(3)])
def test_a_weight_is_a_count(weight: object) -> None:
    model = alone(filled(Dense()))
    micro_batch = next(loop := model.micro_batches(2))
    micro_batch.weight = weight
    with pytest.raises(ValueError, match="expected a non-negative int"):
        mean_square(model, micro_batch, 0)
    loop.close()


@pytest.mark.parametrize("strategy", STRATEGIES)
@world(2)
def test_a_weight_that_changes_after_backward_is_refused_by_every_strategy(mesh: Mesh, strategy: str) -> None:
    model = DataParallel(filled(Dense()), process_group=mesh, strategy=strategy)
    for _ in range(2):  # gradients leave during backward from the second step on
        micro_batch = next(loop := model.micro_batches(2))
        mean_square(model, micro_batch, 0)
        micro_batch.weight = 5
        with pytest.raises(ValueError, match=r"weight of micro-batch \d was 1 in backward and is 5 now"):
            next(loop)
    model.close()


@world(2)
def test_weights_that_sum_to_zero_are_refused_on_all_ranks(mesh: Mesh) -> None:
    model = DataParallel(filled(Dense()), process_group=mesh)

    def count_nothing() -> None:
        for micro_batch in model.micro_batches(NUM_LEAVES):
            micro_batch.weight = 0

    with pytest.raises(ValueError, match="sum to 0"):
        count_nothing()
    step(model)
    assert_expected_gradients(model)
    model.close()


@world(3)
def test_all_ranks_may_leave_at_different_places(mesh: Mesh) -> None:
    model = DataParallel(filled(Dense()), process_group=mesh, bucket_cap_mb=1e-5)
    step(model)
    model.zero_grad()
    for turn in range(3):
        parameter = list(model.parameters())[2 * mesh.rank]
        # Some ranks have sent several buckets by now, some none; a rank learns either way that it is over.
        with failing_at(parameter, KeyError), pytest.raises((KeyError, Desync)):
            step(model)
        assert all(p.grad is None for p in model.parameters()), turn
    step(model)
    assert_expected_gradients(model)
    model.close()


def test_the_number_of_micro_batches_is_positive() -> None:
    with pytest.raises(ValueError, match="at least one micro-batch"):
        step(alone(Dense()), num_leaves=0)


@world(2)
def test_nested_loops_are_refused_and_given_up(mesh: Mesh) -> None:
    model = DataParallel(filled(Dense()), process_group=mesh)

    def nested() -> None:
        for micro_batch in model.micro_batches(NUM_LEAVES):
            mean_square(model, micro_batch, 0)
            step(model)

    with pytest.raises(ValueError, match="began while another one was open, within it"):
        nested()
    step(model)
    assert_expected_gradients(model)
    model.close()


@world(2)
def test_a_loop_that_was_left_by_keeping_its_iterator(mesh: Mesh) -> None:
    model = DataParallel(filled(Dense()), process_group=mesh)
    kept = model.micro_batches(NUM_LEAVES)
    mean_square(model, next(kept), 0)
    with pytest.raises(ValueError, match=r"keeping its iterator: .* close\(\)"):
        step(model)
    running = model.micro_batches(NUM_LEAVES)
    mean_square(model, next(running), 0)
    kept.close()  # must not disturb the step that runs
    for micro_batch in running:
        mean_square(model, micro_batch, 0)
    assert_expected_gradients(model)
    model.close()


def test_a_loop_that_was_given_up_does_not_go_on() -> None:
    model = alone(filled(Dense()))
    kept = model.micro_batches(NUM_LEAVES)
    next(kept)
    with pytest.raises(ValueError, match="began while another one was open"):
        step(model)
    with pytest.raises(ValueError, match="micro-batch 0 was given up"):
        next(kept)


@world(2)
def test_sync_gradients_inside_the_loop_is_refused(mesh: Mesh) -> None:
    model = DataParallel(filled(Dense()), process_group=mesh)
    mean_square(model, next(loop := model.micro_batches(NUM_LEAVES)), 0)
    with pytest.raises(ValueError, match=r"sync_gradients\(\) inside micro_batches\(\)"):
        model.sync_gradients()
    loop.close()
    step(model)
    assert_expected_gradients(model)
    model.close()


@world(2)
def test_a_declared_step_after_an_undeclared_backward_that_raised(mesh: Mesh) -> None:
    """What the failed backward has sent must not be taken for a part of the declared step."""
    model = DataParallel(filled(Dense()), process_group=mesh, bucket_cap_mb=1e-5)
    step(model)
    model.zero_grad()
    with failing_at(next(iter(model.parameters())), KeyError), pytest.raises(KeyError):
        model(torch.ones(1, 6)).sum().backward()
    model.zero_grad()
    step(model)
    assert_expected_gradients(model)
    model.close()


def test_the_contract_of_the_last_step_can_be_asked_for() -> None:
    model = alone(filled(Dense()))
    assert model.step_mode is None
    model(torch.ones(1, 6)).sum().backward()
    assert model.step_mode == "undeclared"
    model.zero_grad()
    step(model)
    assert model.step_mode == "declared"


class OfManyKinds(nn.Module):
    """Its gradients take every way into a bucket; most parameters have none in some leaf."""

    def __init__(self) -> None:
        super().__init__()
        self.small = nn.Parameter(torch.zeros(3))
        self.narrow = nn.Parameter(torch.zeros(40_000, dtype=torch.bfloat16))
        self.pairs = nn.Parameter(torch.zeros(10_000, dtype=torch.complex64))
        self.turned = nn.Parameter(torch.zeros(130, 140))
        self.rows = nn.Embedding(130, 140)

    def forward(self, leaf: int) -> torch.Tensor:
        used = [p for i, p in enumerate((self.small, self.narrow, self.pairs, self.turned)) if i != leaf % 4]
        found = [p * numbers(*p.shape, key=f"{leaf} {p.numel()}", dtype=p.dtype) for p in used]
        tokens = torch.arange(leaf, 130, 3 + leaf)
        weights = numbers(len(tokens), 140, key=str(leaf))
        return sum((x.real.sum() for x in found), (self.rows(tokens) * weights).sum())


@pytest.mark.parametrize("num_leaves", [2, 3, 5, 8])
def test_leaves_of_all_kinds_of_gradients_are_added_as_the_tree_says(num_leaves: int) -> None:
    leaves = []
    for leaf in range(num_leaves):
        module = OfManyKinds()
        module(leaf).backward()
        leaves.append([-torch.zeros_like(p) if p.grad is None else p.grad for p in module.parameters()])
    model = alone(OfManyKinds())
    for step in range(2):  # how often gradients come is known in the second one
        model.zero_grad()
        for micro_batch in model.micro_batches(num_leaves):
            model(micro_batch.index).backward()
        for p, *own in zip(model.parameters(), *leaves, strict=True):
            wide = [flat_real(x).float() for x in own]
            mean = tree_sum(wide, torch.add) * (1 / num_leaves)
            assert torch.equal(flat_real(p.grad), mean.to(flat_real(p).dtype)), (step, tuple(p.shape))
    model.close()
