"""The plain loop's own cases: switches of synchronisation, unused parameters, gradients that users touch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from instep.errors import Desync
from instep.mesh.mesh import Mesh
from instep.reduce.norm import clip_grad_norm_
from instep.replicate.strategies import STRATEGIES
from instep.replicate.wrapper import DataParallel
from tests.parity import bits, filled
from tests.replicate.nets import Dense, Segments, Twice, gpt
from tests.replicate.replicas import (
    assert_backwards,
    assert_mean_gradients,
    equal_everywhere,
    failing_at,
    gradients,
    mean_gradients,
    samples,
    square,
)
from tests.world import world


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.1)


def after_three_steps(mesh: Mesh, **options: object) -> list[Tensor]:
    """Parameters after plain steps in which the ranks see different text."""
    module = filled(gpt())
    model = DataParallel(module, process_group=mesh, **options)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01, fused=False)
    for step in range(3):
        optimizer.zero_grad()
        tokens = (samples(mesh.rank, f"text {step}").abs() * 1000).long() % 17
        model(tokens).logsumexp(-1).mean().backward()
        clip_grad_norm_(module.parameters(), 0.1)
        optimizer.step()
    model.close()
    return [p.detach().clone() for p in module.parameters()]


def assert_one_result(mesh: Mesh) -> None:
    expected = after_three_steps(mesh)
    assert equal_everywhere(mesh, expected)
    caps = [{"bucket_cap_mb": cap} for cap in (1e-4, [1e-5, 1e-2], lambda sizes: [max(sizes) / 2**20])]
    for options in [*caps, *({"strategy": strategy} for strategy in STRATEGIES)]:
        ours = after_three_steps(mesh, **options)
        assert all(torch.equal(bits(x), bits(y)) for x, y in zip(ours, expected, strict=True)), options


@world(3)
def test_every_strategy_and_bucket_size_gives_the_same_bits_on_three_ranks(mesh: Mesh) -> None:
    assert_one_result(mesh)


@world(3)
def test_the_gradient_is_the_mean_over_the_ranks(mesh: Mesh) -> None:
    for ordered in (True, False):
        model = DataParallel(filled(Dense()), process_group=mesh, ordered=ordered)
        square(model, mesh.rank).backward()
        assert_mean_gradients(mesh, model.module, square)
        model.close()


@world(2)
def test_a_reduced_gradient_that_a_user_keeps_is_not_overwritten(mesh: Mesh) -> None:
    """Gradients of two losses side by side, as PCGrad compares them."""

    def other(model: nn.Module, rank: int) -> Tensor:
        return model(samples(rank, "other")).exp().mean()

    model = DataParallel(filled(Dense()), process_group=mesh)
    for _ in range(3):
        model.zero_grad()
        square(model, mesh.rank).backward()
        kept = gradients(model.module)
        before = [g.clone() for g in kept]
        model.zero_grad()
        other(model, mesh.rank).backward()
        assert all(torch.equal(x, y) for x, y in zip(kept, before, strict=True))
        torch.testing.assert_close(kept, mean_gradients(model.module, square))
        assert_mean_gradients(mesh, model.module, other)
    model.close()


@world(2)
def test_a_gradient_may_be_edited_or_replaced_after_the_exchange(mesh: Mesh) -> None:
    model = DataParallel(filled(Dense()), process_group=mesh)
    first, *others = model.parameters()
    square(model, mesh.rank).backward()
    first.grad = torch.ones_like(first)
    for p in others:
        p.grad.add_(1.0)
    sgd(model.module).step()
    assert equal_everywhere(mesh, model.parameters())
    model.close()


@world(2)
def test_gradients_may_be_detached_in_place(mesh: Mesh) -> None:
    """As some loops do before zeroing them; torch refuses it for views."""
    model = DataParallel(filled(Twice()), process_group=mesh, find_unused_parameters=True)
    for _ in range(2):
        sometimes(model, mesh.rank).backward()
        for p in model.parameters():
            if p.grad is not None:
                p.grad.detach_().zero_()
    sometimes(model, mesh.rank).backward()
    assert_mean_gradients(mesh, model.module, sometimes)
    model.close()


@world(2)
def test_an_optimizer_may_step_twice_with_one_gradient(mesh: Mesh) -> None:
    model = DataParallel(filled(Dense()), process_group=mesh)
    optimizer = sgd(model.module)
    square(model, mesh.rank).backward()
    optimizer.step()
    optimizer.step()
    assert equal_everywhere(mesh, model.parameters())
    model.close()


@world(2)
def test_an_optimizer_may_step_with_zeros_and_without_gradients(mesh: Mesh) -> None:
    model = DataParallel(filled(Dense()), process_group=mesh)
    optimizer = sgd(model.module)
    optimizer.step()
    square(model, mesh.rank).backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    optimizer.step()
    assert equal_everywhere(mesh, model.parameters())
    model.close()


@world(2)
def test_two_optimizers_may_share_a_model(mesh: Mesh) -> None:
    model = DataParallel(filled(Dense()), process_group=mesh)
    halves = [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in (model.module.layers[0],)]
    halves.append(torch.optim.AdamW(model.module.layers[3:].parameters(), lr=0.1))
    for _ in range(3):
        model.zero_grad()
        square(model, mesh.rank).backward()
        for optimizer in halves:
            optimizer.step()
    assert equal_everywhere(mesh, model.parameters())
    model.close()


@world(2)
def test_an_optimizer_with_a_closure(mesh: Mesh) -> None:
    model = DataParallel(filled(Dense()), process_group=mesh)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)

    def closure() -> Tensor:
        optimizer.zero_grad()
        square(model, mesh.rank).backward()
        # The same on all ranks, as the closure of a data-parallel LBFGS has to be.
        return sum(p.grad.square().sum() for p in model.parameters())

    for _ in range(2):
        optimizer.step(closure)
    assert equal_everywhere(mesh, model.parameters())
    model.close()


@world(2)
def test_no_sync_counts_in_forward_as_in_ddp(mesh: Mesh) -> None:
    model = DataParallel(filled(Dense()), process_group=mesh)
    loss = square(model, mesh.rank)
    with model.no_sync():
        loss.backward()
    assert_mean_gradients(mesh, model.module, square)
    model.zero_grad()
    with model.no_sync():
        loss = square(model, mesh.rank)
    loss.backward()
    assert not equal_everywhere(mesh, gradients(model.module))
    model.sync_gradients()
    assert_mean_gradients(mesh, model.module, square)
    model.close()


@world(2)
def test_no_sync_ends_also_when_its_block_raises(mesh: Mesh) -> None:
    model = DataParallel(filled(Dense()), process_group=mesh)
    with pytest.raises(LookupError), model.no_sync():
        raise LookupError
    square(model, mesh.rank).backward()
    assert_mean_gradients(mesh, model.module, square)
    model.close()


@world(2)
def test_synchronising_twice_is_synchronising_once(mesh: Mesh) -> None:
    model = DataParallel(filled(Dense()), process_group=mesh)
    with model.no_sync():
        for _ in range(2):
            square(model, mesh.rank).backward()
    model.sync_gradients()
    once = [g.clone() for g in gradients(model.module)]
    clip_grad_norm_(model.parameters(), 1e-3)
    clipped = [g.clone() for g in gradients(model.module)]
    model.sync_gradients()
    assert all(torch.equal(x, y) for x, y in zip(gradients(model.module), clipped, strict=True))
    torch.testing.assert_close(once, mean_gradients(model.module, lambda module, r: 2 * square(module, r)))
    model.close()


def sometimes(model: nn.Module, rank: int) -> Tensor:
    """A loss for which only rank 1 uses one of the layers, and nobody another."""
    return model(samples(rank), rank == 1).square().mean()


@world(2)
def test_a_parameter_frozen_after_wrapping_counts_as_unused(mesh: Mesh) -> None:
    model = DataParallel(filled(Dense()), process_group=mesh, find_unused_parameters=True)
    square(model, mesh.rank).backward()
    model.zero_grad()
    model.module.layers[0].requires_grad_(False)
    square(model, mesh.rank).backward()
    assert_mean_gradients(mesh, model.module, square)
    assert model.module.layers[0].weight.grad is None
    model.module.layers[0].requires_grad_(True)
    assert_backwards(mesh, model)
    model.close()


@world(3)
def test_after_a_desync_all_ranks_can_go_on(mesh: Mesh) -> None:
    model = DataParallel(filled(Dense()), process_group=mesh, bucket_cap_mb=1e-5)
    if mesh.rank == 2:
        weight = model.module.layers[0].weight
        with failing_at(weight, KeyError), pytest.raises(KeyError, match="not a number"):
            square(model, mesh.rank).backward()
        model(samples(0))  # gives the step up; any forward does
    else:
        with pytest.raises(Desync, match="rank 2 left step 0"):
            square(model, mesh.rank).backward()
    assert_backwards(mesh, model, times=2)
    model.close()


@world(2)
def test_checkpointed_blocks_by_either_method(mesh: Mesh) -> None:
    def loss(model: nn.Module, rank: int) -> Tensor:
        return model(samples(rank).requires_grad_()).square().mean()

    for strategy in STRATEGIES:
        module = filled(Segments(reentrant=True))
        model = DataParallel(module, process_group=mesh, strategy=strategy, bucket_cap_mb=1e-5)
        for _ in range(3):
            model.zero_grad()
            loss(model, mesh.rank).backward()
            module.reentrant = False  # autograd.grad, which the expected gradient is made with, needs it
            assert_mean_gradients(mesh, module, loss)
            module.reentrant = True
        model.close()
