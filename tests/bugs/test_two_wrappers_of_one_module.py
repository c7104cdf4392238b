"""Two living wrappers of one module reduced its gradients at once, each while the other was writing them.

It takes no more than a notebook cell that is run twice under another name. The first wrapper made ``.grad``
a view of its bucket and sent it; the second one copied from there what was local, reduced or half of each,
by chance. Two modules that share a part were refused, though torch's DDP trains them.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from instep.mesh.mesh import Mesh
from instep.replicate.wrapper import DataParallel
from tests.parity import filled
from tests.replicate.nets import Dense
from tests.replicate.replicas import (
    assert_mean_gradients,
    equal_everywhere,
    gradients,
    mean_gradients,
    samples,
    square,
)
from tests.world import world


@world(2)
def test_of_two_wrappers_of_one_module_the_newer_one_does_the_work(mesh: Mesh) -> None:
    module = filled(Dense())
    first, second = (DataParallel(module, process_group=mesh, bucket_cap_mb=1e-5) for _ in range(2))
    for model in (first, second, first, second):
        module.zero_grad()
        square(model, mesh.rank).backward()
        assert_mean_gradients(mesh, module, square)
        torch.optim.SGD(module.parameters(), lr=0.1).step()
    with pytest.raises(RuntimeError, match="is closed"):
        first.sync_gradients()
    second.close()


@world(2)
def test_a_wrapper_takes_over_from_those_of_its_parts(mesh: Mesh) -> None:
    module = filled(Dense())
    module.layers[0] = DataParallel(module.layers[0], process_group=mesh)
    inner = DataParallel(module, process_group=mesh)
    outer = DataParallel(inner, process_group=mesh)
    for _ in range(2):
        outer.zero_grad()
        square(outer, mesh.rank).backward()
        torch.testing.assert_close(gradients(module), mean_gradients(filled(Dense()), square))
    outer.close()


class Headed(nn.Module):
    """A head on an encoder, which others may have, too."""

    def __init__(self, encoder: nn.Module, width: int) -> None:
        super().__init__()
        self.encoder = encoder
        self.head = filled(nn.Linear(9, width))

    def forward(self, x: Tensor, *, encode: bool = True) -> Tensor:
        return self.head(self.encoder(x) if encode else x.new_ones(len(x), 9))


def two_heads(mesh: Mesh, **options: Any) -> tuple[DataParallel, DataParallel]:
    encoder = filled(nn.Linear(6, 9))
    return tuple(DataParallel(Headed(encoder, k), process_group=mesh, **options) for k in (3, 2))


def other(model: nn.Module, rank: int) -> Tensor:
    return model(samples(rank, key="other samples")).square().mean()


def assert_gradients(models: Sequence[DataParallel], loss: Callable[..., Tensor]) -> None:
    """Of all parameters of ``models``: the mean over the ranks of ``loss(modules, rank)``."""
    modules = nn.ModuleList(model.module for model in models)
    torch.testing.assert_close(gradients(modules), mean_gradients(modules, loss))
    modules.zero_grad()


@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": False, "bucket_cap_mb": 1e-5}])
@world(2)
def test_two_modules_that_share_a_part_train_as_with_ddp(mesh: Mesh, options: dict[str, Any]) -> None:
    first, second = models = two_heads(mesh, **options)
    optimizer = torch.optim.SGD(nn.ModuleList(models).parameters(), lr=0.1)
    for _ in range(2):
        square(first, mesh.rank).backward()  # one after the other
        other(second, mesh.rank).backward()
        assert_gradients(models, lambda m, rank: square(m[0], rank) + other(m[1], rank))
        (square(first, mesh.rank) + other(second, mesh.rank)).backward()  # at once
        assert_gradients(models, lambda m, rank: square(m[0], rank) + other(m[1], rank))
        with first.no_sync():  # what the first keeps to itself goes with the exchange of the second
            (square(first, mesh.rank) * 0 + first(samples(mesh.rank)).mean()).backward()
        other(second, mesh.rank).backward()
        first.sync_gradients()
        assert_gradients(models, lambda m, rank: m[0](samples(rank)).mean() + other(m[1], rank))
        for model in models:  # in turns
            optimizer.zero_grad()
            square(model, mesh.rank).backward()
            optimizer.step()
        optimizer.zero_grad()
    assert equal_everywhere(mesh, nn.ModuleList(models).parameters())
    for model in models:
        model.close()


@world(2)
def test_a_guest_without_synchronisation_exchanges_nothing_of_its_host(mesh: Mesh) -> None:
    first, second = two_heads(mesh)
    with second.no_sync():
        square(second, mesh.rank).backward()
    assert not equal_everywhere(mesh, gradients(second.module))
    second.sync_gradients()
    torch.testing.assert_close(gradients(second.module), mean_gradients(second.module, square))
    for model in (first, second):
        model.close()


@pytest.mark.parametrize("busy", [0, 1])
@world(2)
def test_a_rank_that_does_not_come_to_what_is_shared_exchanges_it_all_the_same(mesh: Mesh, busy: int) -> None:
    def loss(model: nn.Module, rank: int) -> Tensor:
        return model(samples(rank), encode=rank == busy).square().mean()

    first, second = two_heads(mesh, find_unused_parameters=True)
    for model in (first, second):
        loss(model, mesh.rank).backward()
        torch.testing.assert_close(gradients(model.module), mean_gradients(model.module, loss))
        model.zero_grad()
    for model in (first, second):
        model.close()


@world(2)
def test_a_part_of_a_wrapped_module_may_be_wrapped_too(mesh: Mesh) -> None:
    model = DataParallel(filled(Dense()), process_group=mesh)
    part = DataParallel(model.module.layers[0], process_group=mesh)
    for wrapper in (part, model, part):
        square(wrapper, mesh.rank).backward()
        assert_mean_gradients(mesh, wrapper.module, square)
        model.zero_grad()
    part.close()
    square(model, mesh.rank).backward()
    assert_mean_gradients(mesh, model.module, square)
    model.close()


@world(2)
def test_who_reduces_for_another_lives_as_long_and_says_when_it_is_closed(mesh: Mesh) -> None:
    first, second = two_heads(mesh)
    alive = weakref.ref(first)
    del first
    gc.collect()
    square(second, mesh.rank).backward()
    torch.testing.assert_close(gradients(second.module), mean_gradients(second.module, square))
    second.zero_grad()
    alive().close()
    with pytest.raises(
        ValueError, match=r"'encoder.weight' was reduced by another DataParallel .*closed: wrap"
    ):
        square(second, mesh.rank)
    second.close()


@world(2)
def test_a_declared_step_has_all_that_it_trains(mesh: Mesh) -> None:
    first, second = two_heads(mesh)
    for method in (lambda: next(second.micro_batches(2)), lambda: second.verify(samples(mesh.rank), square)):
        with pytest.raises(ValueError, match=r"shares parameters with another DataParallel"):
            method()
    step = first.micro_batches(2)
    next(step)
    loss = square(second, mesh.rank)
    with pytest.raises(ValueError, match="went into the forward of another one that shares parameters"):
        loss.backward()
    step.close()
    first.zero_grad()
    for micro_batch in first.micro_batches(2):
        square(first, micro_batch.index).backward()
    torch.testing.assert_close(gradients(first.module), mean_gradients(first.module, square))
    for model in (first, second):
        model.close()
