"""Inside the loop a gradient is in ``.grad`` or in its bucket already: edits were lost or not, by chance.

In the first micro-batch of all, whose gradients are counted, ``.grad`` is there until the loop goes on;
later it has left during backward. So clipping inside the loop clipped one micro-batch of many, and
``zero_grad()`` at the end of the loop's body, a habit of plain loops, threw one away. An optimizer step did
what one expects on one rank, and so only there.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from instep.mesh.mesh import Mesh
from instep.replicate.strategies import STRATEGIES
from instep.replicate.wrapper import DataParallel
from tests.parity import filled, world_of_one
from tests.replicate.nets import Dense, mean_square
from tests.replicate.replicas import assert_mean_gradients, failing_at, mean_gradients, samples, square
from tests.world import world


def step(model: DataParallel, edit: Callable[[DataParallel], object]) -> None:
    for micro_batch in model.micro_batches(3):
        mean_square(model, micro_batch, 0)
        edit(model)


def clip(model: DataParallel) -> None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)


def replace(model: DataParallel) -> None:
    for p in model.parameters():
        p.grad = None if p.grad is None else 2 * p.grad


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("edit", [clip, replace])
def test_changing_a_gradient_inside_the_loop_is_refused(strategy: str, edit: Callable) -> None:
    model = DataParallel(filled(Dense()), process_group=world_of_one(), strategy=strategy)
    with pytest.raises(ValueError, match=r"was changed .*: clip and edit .* after micro_batches\(\)"):
        step(model, edit)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_taking_a_gradient_away_is_refused(strategy: str) -> None:
    model = DataParallel(filled(Dense()), process_group=world_of_one(), strategy=strategy)
    with pytest.raises(ValueError, match=r"was taken away .*zero_grad\(\) outside of micro_batches\(\)"):
        step(model, lambda model: model.zero_grad())


@world(2)
def test_zero_grad_at_the_start_of_the_body_does_no_harm(mesh: Mesh) -> None:
    model = DataParallel(filled(Dense()), process_group=mesh)
    for _ in range(2):
        for micro_batch in model.micro_batches(2):
            model.zero_grad()
            square(model, micro_batch.index).backward()
        assert_mean_gradients(mesh, model.module, square)
        model.zero_grad()
    model.close()


@world(1)
def test_an_optimizer_step_inside_the_loop_is_refused_on_one_rank_too(mesh: Mesh) -> None:
    model = DataParallel(filled(Dense()), process_group=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(RuntimeError, match=r"optimizer.step\(\) inside micro_batches\(\)"):
        step(model, lambda model: optimizer.step())


@world(2)
def test_a_user_s_hook_that_comes_later_than_ours_edits_the_gradient_before_it_leaves(mesh: Mesh) -> None:
    """Clipping by value in a hook, as torch's tutorial has it: while our lane was sending the same memory."""

    def clamp(parameter: torch.Tensor) -> None:
        parameter.grad.clamp_(-0.01, 0.01)

    model = DataParallel(filled(Dense()), process_group=mesh, bucket_cap_mb=1e-5)
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(clamp)
    by_rank = [mean_gradients(filled(Dense()), lambda m, _, r=r: square(m, r), size=1) for r in range(2)]
    expected = [sum(g.clamp(-0.01, 0.01) for g in parts) / 2 for parts in zip(*by_rank, strict=True)]
    for _ in range(3):
        model.zero_grad()
        square(model, mesh.rank).backward()
        torch.testing.assert_close([p.grad for p in model.parameters()], expected)
    model.close()


@world(2)
def test_two_backwards_after_one_that_was_caught_inside_the_loop(mesh: Mesh) -> None:
    """A micro-batch that did not fit into memory, done again in two halves."""

    model = DataParallel(filled(Dense()), process_group=mesh, strategy="flat")
    for _ in range(2):
        for micro_batch in model.micro_batches(2):
            x = samples(micro_batch.index)
            with failing_at(model.module.layers[0].weight, MemoryError), pytest.raises(MemoryError):
                model(x).square().mean().backward()
            model.zero_grad()
            for half in x.split(2):
                (0.5 * model(half.clone()).square().mean()).backward()
        assert_mean_gradients(mesh, model.module, square)
        model.zero_grad()
    model.close()
