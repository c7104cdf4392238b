"""Declared steps of every kind have the bits of one process: of the tree sum of plain gradients."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam

from instep.mesh.mesh import Mesh
from instep.replicate.wrapper import DataParallel
from instep.shard.optimizer import ShardedOptimizer
from instep.step.micro_batches import MicroBatch
from tests.kinds import FUSED, LOOPS, STAGES, Program, assert_same_state, on_every_kind, replicated_alone
from tests.parity import (
    Training,
    assert_bits_of_one,
    assert_same_bits,
    bits_of_one,
    filled,
    numbers,
    train,
    train_by_hand,
    world_of_one,
)
from tests.replicate.nets import OTHER, PLAIN, RANDOM, Dense, data, mean_square
from tests.shard.trained import TiedWide, Wide, WideImages, images_step, low, tokens_step, wide_step
from tests.world import world

TINY_MB, LARGE_MB = 1e-4, 25
LOOP = {"lr": 0.05, "momentum": 0.9, "foreach": False, "fused": False}


def matrices_and_vectors(module: nn.Module) -> Iterable[Any]:
    """Two groups with other options each, as most people make them."""
    parameters = [*module.parameters()]
    return [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0, "lr": 0.01},
    ]


def program(module: Any, leaf_step: Any, **changes: Any) -> Program:
    return Program(
        "replicated", module, leaf_step=leaf_step, wrap={"find_unused_parameters": True}, **changes
    )


PROGRAMS = {
    "cut": program(Wide, wide_step, num_steps=4),
    "clipped, scheduled, two groups": program(
        Wide, wide_step, groups=matrices_and_vectors, clip=0.1, scheduled=True, num_leaves=8
    ),
    "momentum": program(Wide, wide_step, optimizer=SGD, options=LOOP, num_leaves=7),
    "amsgrad": program(Wide, wide_step, optimizer=Adam, options={**FUSED, "amsgrad": True}),
    "fewer micro-batches than ranks": program(Wide, wide_step, optimizer=SGD, options=LOOP, num_leaves=1),
    "uneven": program(Wide, wide_step, num_leaves=21),
    "named": program(Wide, wide_step, groups=lambda module: module.named_parameters()),
    "tied and frozen": program(TiedWide, tokens_step, groups=matrices_and_vectors, num_leaves=7),
    "channels last": program(WideImages, images_step, num_leaves=3),
}


def assert_bits(mesh: Mesh, kind: str, programs: Iterable[Program]) -> None:
    for each in programs:
        assert_same_state(replace(each, kind=kind).trained(mesh), replicated_alone(each))


@on_every_kind(2, (*LOOPS[1:], "stage 3, sharded optimizer"))
def test_two_ranks_give_the_bits_of_one(mesh: Mesh, kind: str) -> None:
    assert_bits(mesh, kind, PROGRAMS.values())


@on_every_kind(4, STAGES, dp=2, shard=2)
def test_shard_groups_give_the_bits_of_one(mesh: Mesh, kind: str) -> None:
    assert_bits(mesh, kind, PROGRAMS.values())


@on_every_kind(4, STAGES, dp=2, shard=2)
def test_forwards_in_bfloat16_have_the_bits_of_one_rank(mesh: Mesh, kind: str) -> None:
    def in_bfloat16(model: nn.Module, micro_batch: MicroBatch, step: int) -> None:
        low(model, numbers(4, 72, key=f"step {step} leaf {micro_batch.index}")).backward()

    each = Program(kind, Wide, leaf_step=in_bfloat16, wrap={"compute_dtype": torch.bfloat16}, num_leaves=6)
    assert_same_state(each.trained(mesh), each.trained(world_of_one()))


@world(4)
def test_the_wide_model_is_cut_in_the_middle_of_its_matrices(mesh: Mesh) -> None:
    optimizer = ShardedOptimizer(Wide().parameters(), torch.optim.AdamW, mesh)
    pieces = [x for x in optimizer.sharded_state_dict()["pieces"] if x["parameter"] in (0, 2)]
    assert any(piece["first"] > 0 or piece["last"] < 288 * 72 for piece in pieces)
    optimizer.close()


# Replicas


@pytest.mark.parametrize("name", PLAIN)
def test_one_process_gives_the_tree_sum_of_plain_gradients(name: str) -> None:
    assert_same_bits(bits_of_one(PLAIN[name]), train_by_hand(PLAIN[name]))


@pytest.mark.parametrize("name", PLAIN | OTHER)
@world(3)
def test_three_ranks_give_the_bits_of_one(mesh: Mesh, name: str) -> None:
    turn = [*PLAIN, *OTHER].index(name)
    for cap in (TINY_MB, LARGE_MB if turn % 2 else [TINY_MB, LARGE_MB]):
        assert_bits_of_one(mesh, (PLAIN | OTHER)[name], bucket_cap_mb=cap)


@pytest.mark.parametrize("name", RANDOM)
@world(3, by="process")
def test_three_ranks_give_the_bits_of_one_with_dropout(mesh: Mesh, name: str) -> None:
    assert_bits_of_one(mesh, RANDOM[name], bucket_cap_mb=TINY_MB)


def test_dropout_is_on_in_these_tests() -> None:
    for name, training in RANDOM.items():
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


def test_another_order_of_micro_batches_gives_other_statistics() -> None:
    """A control: within rounding, any would do."""

    def backwards(model: nn.Module, micro_batch: MicroBatch, number: int) -> None:
        training.leaf_step(model, MicroBatch(training.num_leaves - 1 - micro_batch.index, 7), number)

    training = PLAIN["batch norm, channels last"]
    ours, theirs = (dict(train_by_hand(x)) for x in (training, replace(training, leaf_step=backwards)))
    assert not torch.equal(ours["stem.1.running_mean"], theirs["stem.1.running_mean"])
