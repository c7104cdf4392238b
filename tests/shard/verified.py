"""Trial steps of sharded modules, and all that a trial must leave as it was."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from instep.mesh.mesh import Mesh
from instep.reduce.placeholder import slices_of
from instep.shard.fully import fully_shard
from instep.shard.optimizer import ShardedOptimizer
from instep.verify.gradient_report import Report
from tests.parity import bits, numbers
from tests.replicate.trials import Raises, square
from tests.shard.trained import WIDTH


def rows_of(rank: int, key: str = "verify") -> Tensor:
    return numbers(4, WIDTH, key=f"{key} on rank {rank}")


def low(model: nn.Module, batch: Tensor) -> Tensor:
    """The loss of a model that computes in bfloat16."""
    return model(batch.bfloat16()).float().square().mean()


def verified(mesh: Mesh, module: nn.Module, batch: Any, loss: Any = square, **options: Any) -> Report:
    model: Any = fully_shard(module, mesh, **options)
    try:
        return model.verify(batch, loss)
    finally:
        model.close()


def on_the_reduced_path(model: Any, factor: float) -> Callable[[Tensor], Tensor]:
    reducer = model.sharding.reducer
    return lambda gradient: gradient * (factor if reducer.plan is not None else 1)


def after_the_exchange(model: Any, change: Callable[[], None]) -> None:
    reducer = model.sharding.reducer
    exchange = reducer.finish

    def finish() -> None:
        exchange()
        change()

    reducer.finish = finish


def piece_of(model: Any, parameter: Tensor) -> Tensor | None:
    """What this rank has of the reduced gradient of ``parameter``."""
    reducer = model.sharding.reducer
    held = [x for space in reducer.spaces for x in space.held if x.parameter is parameter]
    return reducer.gradient_of(held[0]) if held else None


def failing(rank: int, where: str) -> Callable[[nn.Module, Tensor], Tensor]:
    """A loss that fails once: in forward or backward on rank 1, or in the reference on rank 0."""
    calls: list[None] = []

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        calls.append(None)
        if rank == 1 and where == "forward" and len(calls) == 1:
            raise ValueError("planted in forward")
        if rank == 0 and where == "the reference" and len(calls) == 3:
            raise ValueError("planted in the reference")
        value = square(model, batch)
        return Raises.apply(value) if rank == 1 and where == "backward" else value

    return loss


def tensors(model: Any, optimizer: ShardedOptimizer | None) -> list[Tensor]:
    """This rank's part of all that training carries on, weights that are gathered now among it."""
    sharding = model.sharding
    held = [x for space in sharding.spaces for x in space.held]
    pieces = [
        piece
        for space in sharding.reducer.spaces
        for x in space.held
        if (piece := space.gradient_of(x)) is not None
    ]
    found = [x.tensor for x in held] + pieces + [*model.parameters(), *model.buffers()]
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    found += [gradient for gradient in gradients if slices_of(gradient) is None]
    if optimizer is not None:
        kept = [state.values() for state in optimizer.local_state.values()]
        found += [x for values in kept for x in values if isinstance(x, Tensor)]
    return [*(x.detach().clone() for x in found), torch.get_rng_state()]


def books(model: Any) -> dict[str, Any]:
    sharding = model.sharding
    names = ("local", "steps", "exchanges", "given_up", "plan", "leaf", "_seen", "_expected", "_unsteady")
    own = {
        name: getattr(sharding.reducer, name) for name in (*names, "_carried", "_put_aside", "_warned_unused")
    }
    own |= {"step": sharding.next_step, "contract": model.step_mode, "sync": sharding.backward.sync}
    own |= {
        "training": [m.training for m in model.modules()],
        "versions": [p._version for p in model.parameters()],
    }
    if (stage3 := sharding.stage3) is not None:
        own["gathered"] = [unit.name for unit in stage3.units if unit.shown]
        for name in ("_next", "_previous", "_last", "_kept", "_ran", "_inside", "_in_backward"):
            own[name] = copy.copy(getattr(stage3, name))
    return {name: copy.copy(value) for name, value in own.items()}


def assert_untouched(model: Any, optimizer: ShardedOptimizer | None, trial: Callable[[], object]) -> None:
    gradients = [p.grad for p in model.parameters()]
    buffers = list(model.buffers())
    before, books_before = tensors(model, optimizer), books(model)
    trial()
    after, books_after = tensors(model, optimizer), books(model)
    assert len(before) == len(after)
    for i, (x, y) in enumerate(zip(before, after, strict=True)):
        assert torch.equal(bits(x), bits(y)), i
    assert {k: x for k, x in books_after.items() if books_before[k] != x} == {}
    assert all(p.grad is gradient for p, gradient in zip(model.parameters(), gradients, strict=True))
    assert all(x is y for x, y in zip(model.buffers(), buffers, strict=True))
