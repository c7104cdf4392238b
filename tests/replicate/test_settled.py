"""Large gradients move into their bucket when they come, not when it is whole: nobody may be able to tell."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from instep.mesh.mesh import Mesh
from instep.replicate.wrapper import DataParallel
from instep.shard.fully import fully_shard
from instep.step import gradients
from tests.parity import assert_bits_of_one, assert_same_bits, bits_of_one, filled, numbers, train_by_hand
from tests.replicate.nets import OTHER, PLAIN, WIDTH, Dense, mean_square
from tests.shard import trained
from tests.shard.test_fully_parity import ODD, RUNS
from tests.world import world

Edit = Callable[[Tensor], Tensor]
SEVERAL_TIMES = ("three forwards", "used twice, used on odd leaves", "checkpointed", "five dtypes")


@pytest.fixture(autouse=True)
def every_gradient_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradients, "LARGE_BYTES", 0)


@pytest.mark.parametrize("name", PLAIN)
def test_one_process_gives_the_tree_sum_of_plain_gradients(name: str) -> None:
    assert_same_bits(bits_of_one(PLAIN[name]), train_by_hand(PLAIN[name]))


@world(2)
def test_two_ranks_give_the_bits_of_one(mesh: Mesh) -> None:
    for training in (PLAIN | OTHER).values():
        assert_bits_of_one(mesh, training)


@world(2)
@pytest.mark.parametrize("stage", [2, 3])
def test_slices_give_the_bits_of_one(mesh: Mesh, stage: int) -> None:
    for run in [RUNS["channels last"], *(ODD[name] for name in SEVERAL_TIMES)]:
        trained.assert_bits_of_one(mesh, run, stage=stage)


@world(2)
@pytest.mark.parametrize("wrap", [DataParallel, fully_shard])
def test_a_gradient_that_a_hook_keeps_stays_as_it_was(mesh: Mesh, wrap: type) -> None:
    """As who collects the gradients of single micro-batches does."""
    model, kept, copies = wrap(filled(Dense()), process_group=mesh), list[Tensor](), list[Tensor]()

    def keep(parameter: Tensor) -> None:
        kept.append(parameter.grad)
        copies.append(parameter.grad.clone())

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(keep)
    for micro_batch in model.micro_batches(4):
        mean_square(model, micro_batch, 0)
    assert len(kept) > 4
    assert all(torch.equal(x, y) for x, y in zip(kept, copies, strict=True))
    model.close()


@world(2)
@pytest.mark.parametrize("wrap", [DataParallel, fully_shard])
def test_a_gradient_that_is_kept_after_it_has_moved_stays_as_it_was(mesh: Mesh, wrap: type) -> None:
    """Hooks that come after a forward run after the wrapper's, and so do those of other parameters."""
    model, kept, copies = wrap(filled(Dense()), process_group=mesh), list[Tensor](), list[Tensor]()

    def keep(parameter: Tensor) -> None:
        if parameter.grad is not None:
            kept.append(parameter.grad)
            copies.append(parameter.grad.clone())

    for micro_batch in model.micro_batches(4):
        loss = model(numbers(4, WIDTH, key=f"leaf {micro_batch.index}")).square().mean()
        hooks = [p.register_post_accumulate_grad_hook(keep) for p in model.parameters()]
        loss.backward()
        for hook in hooks:
            hook.remove()
    assert len(kept) > 4
    assert all(torch.equal(x, y) for x, y in zip(kept, copies, strict=True))
    model.close()


def edited_by_another_hook(model: nn.Module, rank: int) -> list[Tensor]:
    """Gradients after a backward in which the first parameter's hook doubles the last one's gradient."""
    first, *_, last = model.parameters()

    def double_the_last(_: Tensor) -> None:
        last.grad.mul_(2.0)

    handle = first.register_post_accumulate_grad_hook(double_the_last)
    model(numbers(4, WIDTH, key=f"edited on rank {rank}")).square().mean().backward()
    handle.remove()
    return [p.grad for p in model.parameters()]


@world(2)
def test_what_other_hooks_edit_is_exchanged_in_the_plain_loop(mesh: Mesh) -> None:
    model, alone = DataParallel(filled(Dense()), process_group=mesh), filled(Dense())
    found = edited_by_another_hook(model, mesh.rank)
    expected = []
    for rank in range(2):
        alone.zero_grad()
        expected.append([g.clone() for g in edited_by_another_hook(alone, rank)])
    for g, *parts in zip(found, *expected, strict=True):
        torch.testing.assert_close(g, sum(parts) / 2)
    model.close()


@world(2)
def test_what_other_hooks_edit_is_an_error_in_a_declared_step(mesh: Mesh) -> None:
    model = DataParallel(filled(Dense()), process_group=mesh)

    def step() -> None:
        for _ in model.micro_batches(2):
            edited_by_another_hook(model, mesh.rank)

    with pytest.raises(ValueError, match=r"was changed between backward and its exchange"):
        step()
    model.close()


@world(2)
@pytest.mark.parametrize("change", [lambda g: g.t(), lambda g: g[:1].expand_as(g)])
def test_another_hook_may_put_a_gradient_another_way_round(mesh: Mesh, change: Edit) -> None:
    """On one rank alone: what is added up is what each has, not what lay in the bucket before."""

    def gradients_of(model: nn.Module, module: nn.Module, rank: int) -> list[Tensor]:
        first, *_, last = [p for p in module.parameters() if p.ndim == 2]

        def turn(_: Tensor) -> None:
            last.grad = change(last.grad)

        handle = first.register_post_accumulate_grad_hook(turn) if rank == 0 else None
        model(numbers(4, WIDTH, key=f"turned on rank {rank}")).square().mean().backward()
        if handle is not None:
            handle.remove()
        return [p.grad for p in module.parameters()]

    module = filled(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)))
    model = DataParallel(module, process_group=mesh, strategy="flat")
    found = gradients_of(model, module, mesh.rank)
    alone, expected = copy.deepcopy(module), []
    for rank in range(2):
        alone.zero_grad()
        expected.append([g.clone() for g in gradients_of(alone, alone, rank)])
    for g, *parts in zip(found, *expected, strict=True):
        torch.testing.assert_close(g, sum(parts) / 2)
    model.close()


@world(2)
def test_a_gradient_that_is_kept_of_a_backward_that_raised_stays_as_it_was(mesh: Mesh) -> None:
    model = fully_shard(filled(Dense()), mesh, stage=2, overlap=False)
    kept, copies = list[Tensor](), list[Tensor]()
    first, *others = model.parameters()

    def keep_and_raise(_: Tensor) -> None:
        for p in others:
            if p.grad is not None:
                kept.append(p.grad)
                copies.append(p.grad.clone())
        raise LookupError

    handle = first.register_post_accumulate_grad_hook(keep_and_raise)
    with pytest.raises(LookupError):
        model(numbers(4, WIDTH, key="raises")).square().mean().backward()
    handle.remove()
    for k in range(2):
        model.zero_grad()
        model(numbers(4, WIDTH, key=f"goes on {k}")).exp().mean().backward()
    assert kept
    assert all(torch.equal(x, y) for x, y in zip(kept, copies, strict=True))
    model.close()


class Gate(torch.autograd.Function):
    """The first input; the second one has no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


@world(2)
def test_a_function_may_have_no_gradient_to_pass_on(mesh: Mesh) -> None:
    """Autograd calls the hooks of what lies behind it all the same."""
    module = filled(nn.ModuleDict({"used": nn.Linear(WIDTH, 3), "gated": nn.Linear(WIDTH, 3)}))
    module.forward = lambda x: Gate.apply(module["used"](x), module["gated"](x))  # type: ignore[method-assign]
    model = DataParallel(module, process_group=mesh, find_unused_parameters=True)
    model(numbers(4, WIDTH, key=f"gate on rank {mesh.rank}")).square().mean().backward()
    assert module["used"].weight.grad is not None
    assert module["gated"].weight.grad is None
    model.close()
