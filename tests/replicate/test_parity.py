"""Declared steps: every placement gives the bits of one process, and those are the bits of a plain loop."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from instep.mesh.mesh import Mesh
from instep.replicate.wrapper import DataParallel
from instep.step.micro_batches import MicroBatch
from tests.parity import (
    Training,
    assert_bits_of_one,
    assert_same_bits,
    bits_of_one,
    filled,
    train,
    train_by_hand,
    world_of_one,
)
from tests.replicate.nets import OTHER, PLAIN, RANDOM, Dense, data, mean_square
from tests.world import world

TINY_MB, LARGE_MB = 1e-4, 25
WITHOUT_RANDOM = PLAIN | OTHER


@pytest.mark.parametrize("name", PLAIN)
def test_one_process_gives_the_tree_sum_of_plain_gradients(name: str) -> None:
    assert_same_bits(bits_of_one(PLAIN[name]), train_by_hand(PLAIN[name]))


@pytest.mark.parametrize("name", WITHOUT_RANDOM)
@world(3)
def test_three_ranks_give_the_bits_of_one(mesh: Mesh, name: str) -> None:
    turn = [*WITHOUT_RANDOM].index(name)
    for cap in (TINY_MB, LARGE_MB if turn % 2 else [TINY_MB, LARGE_MB]):
        assert_bits_of_one(mesh, WITHOUT_RANDOM[name], bucket_cap_mb=cap)


@pytest.mark.parametrize("name", RANDOM)
@world(3, by="process")
def test_three_ranks_give_the_bits_of_one_with_dropout(mesh: Mesh, name: str) -> None:
    assert_bits_of_one(mesh, RANDOM[name], bucket_cap_mb=TINY_MB)


def test_dropout_is_on_in_these_tests() -> None:
    for name in RANDOM:
        training = RANDOM[name]
        module = filled(training.module())
        seen = []
        for _ in range(2):
            training.leaf_step(module, MicroBatch(0, 1), 0)
            seen.append([p.grad.clone() for p in module.parameters()])
            module.zero_grad()
        assert any(not torch.equal(a, b) for a, b in zip(*seen, strict=True)), name


@world(3)
def test_the_order_of_plain_all_reduce_shows(mesh: Mesh) -> None:
    """The negative control: these tests can fail."""
    training = Training(Dense, mean_square, num_leaves=7)
    with pytest.raises(AssertionError, match="elements differ"):
        assert_bits_of_one(mesh, training, ordered=False)
    unordered, ordered = dict(train(training, mesh, ordered=False)), dict(bits_of_one(training))
    for name in unordered:
        torch.testing.assert_close(unordered[name], ordered[name], rtol=1e-3, atol=1e-5)


@world(2)
def test_weights_make_the_mean_over_items_exact(mesh: Mesh) -> None:
    """8 samples here and 2 there: the gradient is that of one batch of 10, not a mean of means."""
    samples = torch.cat([data(MicroBatch(i, 3), 0) for i in range(3)]).double()[:10]
    parts = samples[:8].clone(), samples[8:].clone()
    alone = filled(Dense()).double()
    alone(samples).square().sum(1).mean().backward()
    model = DataParallel(filled(Dense()).double(), process_group=mesh)
    for micro_batch in model.micro_batches(2):
        part = parts[micro_batch.index]
        micro_batch.weight = len(part)
        model(part).square().sum().backward()
    for ours, expected in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, expected.grad, rtol=1e-12, atol=1e-12)
    model.close()


def test_the_user_s_random_stream_goes_on_as_if_there_had_been_no_step() -> None:
    model = DataParallel(Dense(dropout=0.5), process_group=world_of_one())
    before = torch.get_rng_state()
    for micro_batch in model.micro_batches(3):
        mean_square(model, micro_batch, 0)
    assert torch.equal(torch.get_rng_state(), before)


@world(2)
def test_a_float64_copy_agrees_with_the_mean_of_all_micro_batches(mesh: Mesh) -> None:
    """The gradient itself, computed another way: autograd of the mean of the losses, in float64."""
    alone = filled(Dense()).double()
    model = DataParallel(copy.deepcopy(alone), process_group=mesh)
    losses = [alone(data(MicroBatch(i, 6), 0, torch.float64)).square().mean() for i in range(6)]
    torch.stack(losses).mean().backward()
    for micro_batch in model.micro_batches(6):
        model(data(micro_batch, 0, torch.float64)).square().mean().backward()
    for ours, expected in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, expected.grad, rtol=1e-12, atol=1e-14)
    model.close()


@world(2)
def test_every_rank_ends_with_the_same_gradient_also_with_one_parameter_and_one_leaf(mesh: Mesh) -> None:
    model = DataParallel(filled(nn.Linear(3, 1, bias=False)), process_group=mesh)
    for micro_batch in model.micro_batches(1):
        model(torch.ones(2, 3)).sum().backward()
        assert micro_batch.index == mesh.rank == 0
    assert torch.equal(model.module.weight.grad, torch.full((1, 3), 2.0))
    model.close()
