"""What lets the replicas of DistributedDataParallel drift apart without a word, on two processes.

Each test shows it first: after an optimizer step the ranks hold different weights. Here the gradient is
right, or an error says what to do.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from instep.mesh.mesh import Mesh
from instep.replicate.threads import ThreadedReplicas
from instep.replicate.wrapper import DataParallel
from tests.parity import filled
from tests.replicate.nets import Dense, Segments, Twice
from tests.replicate.replicas import (
    assert_mean_gradients,
    equal_everywhere,
    samples,
    square,
)
from tests.world import world

Step = Callable[[nn.Module, int], None]
"""Forwards and backwards of a wrapped model on one rank's data."""


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.1)


def ddp_diverges(mesh: Mesh, module: nn.Module, step: Step, **options: object) -> bool:
    """Whether the ranks' weights differ after ``step`` and an optimizer step, with no error raised."""
    step(DistributedDataParallel(module, **options), mesh.rank)
    sgd(module).step()
    return not equal_everywhere(mesh, module.parameters())


@world(2, by="process")
def test_forward_of_the_inner_module(mesh: Mesh) -> None:
    def step(model: nn.Module, rank: int) -> None:
        square(model.module, rank).backward()

    assert ddp_diverges(mesh, filled(Dense()), step)
    model = DataParallel(filled(Dense()))
    step(model, mesh.rank)
    assert_mean_gradients(mesh, model.module, square)
    model.close()


@world(2, by="process")
def test_a_method_of_the_inner_module_that_is_not_forward(mesh: Mesh) -> None:
    def loss(module: nn.Module, rank: int) -> Tensor:
        return module.layers[:2](samples(rank)).square().mean()

    def step(model: nn.Module, rank: int) -> None:
        loss(model.module, rank).backward()

    assert ddp_diverges(mesh, filled(Dense()), step)
    model = DataParallel(filled(Dense()), find_unused_parameters=True)
    step(model, mesh.rank)
    assert_mean_gradients(mesh, model.module, loss)
    model.close()


@world(2, by="process")
def test_a_gradient_that_is_set_by_hand(mesh: Mesh) -> None:
    def step(model: nn.Module, rank: int) -> None:
        parameters = list(model.module.parameters())
        for p, g in zip(parameters, torch.autograd.grad(square(model, rank), parameters), strict=True):
            p.grad = g

    assert ddp_diverges(mesh, filled(Dense()), step)
    model = DataParallel(filled(Dense()))
    step(model, mesh.rank)
    with pytest.raises(RuntimeError, match=r"'layers.0.weight' has a gradient, but nothing was exchanged"):
        sgd(model.module).step()
    model.sync_gradients()  # the way out that the message names
    assert_mean_gradients(mesh, model.module, square)
    sgd(model.module).step()
    model.close()


@world(2, by="process")
def test_a_parameter_that_is_unfrozen_after_wrapping(mesh: Mesh) -> None:
    def frozen() -> nn.Module:
        module = filled(Dense())
        module.layers[0].requires_grad_(False)
        return module

    def step(model: nn.Module, rank: int) -> None:
        model.module.layers[0].requires_grad_(True)
        square(model, rank).backward()

    assert ddp_diverges(mesh, frozen(), step)
    model = DataParallel(frozen())
    with pytest.raises(ValueError, match=r"'layers.0.weight' was frozen when .*unfreeze first"):
        step(model, mesh.rank)
    model.close()


@world(2, by="process")
def test_an_unfrozen_parameter_that_forward_does_not_show(mesh: Mesh) -> None:
    """Trained through a part of the model, so that only the optimizer can notice."""
    module = filled(Dense())
    module.layers[0].requires_grad_(False)
    model = DataParallel(module, find_unused_parameters=True)
    module.layers[0].requires_grad_(True)
    module.layers[0](samples(mesh.rank)).sum().backward()
    with pytest.raises(RuntimeError, match=r"'layers.0.weight' was frozen when the model was wrapped"):
        sgd(module).step()
    model.close()


@world(2, by="process")
def test_a_layer_that_is_replaced_after_wrapping(mesh: Mesh) -> None:
    def step(model: nn.Module, rank: int) -> None:
        model.module.layers[-1] = filled(nn.Linear(5, 2))
        square(model, rank).backward()

    assert ddp_diverges(mesh, filled(Dense()), step)
    model = DataParallel(filled(Dense()))
    with pytest.raises(ValueError, match=r"'layers.5.weight' was not there when the model was wrapped.*wrap"):
        step(model, mesh.rank)
    with pytest.raises(ValueError, match="was not there when the model was wrapped"):
        next(model.micro_batches(2))
    model.close()


@world(2, by="process")
def test_a_checkpoint_that_is_loaded_by_assignment(mesh: Mesh) -> None:
    def step(model: nn.Module, rank: int) -> None:
        weights = {name: x.clone() for name, x in model.module.state_dict().items()}
        model.module.load_state_dict(weights, assign=True)
        square(model, rank).backward()

    assert ddp_diverges(mesh, filled(Dense()), step)
    model = DataParallel(filled(Dense()))
    with pytest.raises(ValueError, match="assign=True replaces them"):
        step(model, mesh.rank)
    model.close()


@world(2, by="process")
def test_a_layer_that_no_rank_uses(mesh: Mesh) -> None:
    def loss(model: nn.Module, rank: int) -> Tensor:
        return model(samples(rank), False).square().mean()

    def step(model: nn.Module, rank: int) -> None:
        loss(model, rank).backward()

    assert ddp_diverges(mesh, filled(Twice()), step)
    model = DataParallel(filled(Twice()), find_unused_parameters=True)
    step(model, mesh.rank)
    assert_mean_gradients(mesh, model.module, loss)
    assert model.module.never.weight.grad is None
    model.close()


@world(2, by="process")
def test_layers_registered_in_another_order(mesh: Mesh) -> None:
    def swapped() -> nn.Module:
        names = ["a", "b"] if mesh.rank == 0 else ["b", "a"]
        module = nn.Module()
        for name in names:
            setattr(module, name, filled(nn.Linear(3, 3)))
        return module

    theirs = DistributedDataParallel(swapped())
    with torch.no_grad():
        theirs.module.a.weight.fill_(1.0)
        theirs.module.b.weight.fill_(2.0)
    theirs = DistributedDataParallel(theirs.module)
    assert not equal_everywhere(mesh, [theirs.module.a.weight])  # after taking rank 0's values
    with pytest.raises(ValueError, match=r"models: parameter 'a.weight', .* on rank 0, but .*'b.weight'"):
        DataParallel(swapped())


@world(2, by="process")
def test_two_forwards_before_two_backwards(mesh: Mesh) -> None:
    """As a GAN's discriminator is trained. DDP expects one backward per forward, and skips the second."""

    def losses(model: nn.Module, rank: int) -> list[Tensor]:
        return [model(samples(rank, key)).square().mean() for key in ("real", "fake")]

    def step(model: nn.Module, rank: int) -> None:
        for loss in losses(model, rank):
            loss.backward()

    assert ddp_diverges(mesh, filled(Dense()), step)
    model = DataParallel(filled(Dense()))
    step(model, mesh.rank)
    assert_mean_gradients(mesh, model.module, lambda module, rank: sum(losses(module, rank)))
    model.close()


@world(2, by="process")
def test_a_second_backward_through_a_retained_graph(mesh: Mesh) -> None:
    def step(model: nn.Module, rank: int) -> None:
        loss = square(model, rank)
        loss.backward(retain_graph=True)
        loss.backward()

    assert ddp_diverges(mesh, filled(Dense()), step)
    model = DataParallel(filled(Dense()))
    step(model, mesh.rank)
    assert_mean_gradients(mesh, model.module, lambda module, rank: 2 * square(module, rank))
    model.close()


@world(2, by="process")
def test_a_step_after_no_sync_alone(mesh: Mesh) -> None:
    def step(model: nn.Module, rank: int) -> None:
        with model.no_sync():
            square(model, rank).backward()

    assert ddp_diverges(mesh, filled(Dense()), step)
    model = DataParallel(filled(Dense()))
    step(model, mesh.rank)
    with pytest.raises(RuntimeError, match=r"never exchanged.*outside of no_sync.*sync_gradients"):
        sgd(model.module).step()
    model.close()


@world(2, by="process")
def test_a_module_that_changes_its_dtype_after_wrapping(mesh: Mesh) -> None:
    def step(model: nn.Module, rank: int) -> None:
        model.module.double()
        model(samples(rank).double()).square().mean().backward()

    assert ddp_diverges(mesh, filled(Dense()), step)
    model = DataParallel(filled(Dense()))
    with pytest.raises(ValueError, match=r"float64.*wrap"):
        step(model, mesh.rank)
    model.close()


@world(2, by="process")
def test_an_embedding_that_rescales_the_rows_that_it_looks_up(mesh: Mesh) -> None:
    def module(max_norm: float | None) -> nn.Module:
        return filled(nn.Sequential(nn.Embedding(4, 3, max_norm=max_norm), nn.Linear(3, 2)))

    def step(model: nn.Module, rank: int) -> None:
        model(torch.tensor([rank])).square().mean().backward()

    assert ddp_diverges(mesh, module(0.01), step)
    with pytest.raises(ValueError, match=r"'0' has max_norm=0\.01, which rescales.*max_norm=None"):
        DataParallel(module(0.01))
    with pytest.raises(ValueError, match="max_norm"):
        ThreadedReplicas(module(0.01), 2, alone=True)
    model = DataParallel(module(None))
    step(model, mesh.rank)
    sgd(model.module).step()
    assert equal_everywhere(mesh, model.parameters())
    model.close()


@world(2, by="process")
def test_reentrant_checkpointing_of_one_block_three_times(mesh: Mesh) -> None:
    """No divergence, but an error that many have met: DDP counts one gradient per parameter."""

    def loss(model: nn.Module, rank: int) -> Tensor:
        return model(samples(rank).requires_grad_()).square().mean()

    theirs = DistributedDataParallel(filled(Segments(reentrant=True)))
    with pytest.raises(RuntimeError, match="ready"):
        loss(theirs, mesh.rank).backward()
    module = filled(Segments(reentrant=True))
    model, optimizer = DataParallel(module, bucket_cap_mb=1e-5), sgd(module)
    for _ in range(3):
        optimizer.zero_grad()
        loss(model, mesh.rank).backward()
        module.reentrant = False  # the oracle differentiates with autograd.grad
        assert_mean_gradients(mesh, module, loss)
        module.reentrant = True
        optimizer.step()
    model.close()
