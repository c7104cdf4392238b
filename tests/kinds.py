"""Every kind of distributed training, by name, for tests of what all of them must do.

    @on_every_kind(2)
    def test_weights_are_those_of_one_process(mesh, kind):
        model, optimizer = KINDS[kind].make(filled(net()), mesh)
        Program(kind).step(model, optimizer, 0)

Tests use public behaviour: losses, ``full_state_dict``, ``clip_grad_norm_``, ``optimizer.step``, checkpoints.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

import instep
from instep.mesh.mesh import Mesh
from instep.shard.shard_groups import shard_group_of
from instep.state.hash import SharedHash
from instep.step.micro_batches import MicroBatch
from tests.parity import LeafStep, filled, numbers, world_of_one
from tests.shard.trained import assert_same
from tests.training_state import training_state
from tests.world import world

WIDTH, NUM_LEAVES = 72, 5
# Not a loop of torch, which rounds what is left after whole vectors by the shape of a slice.
FUSED = {"lr": 0.02, "fused": True}

MakeOptimizer = Callable[..., Optimizer]


def replicated(module: nn.Module, mesh: Mesh, **options: Any) -> Any:
    return instep.DataParallel(module, process_group=mesh, **options)


def sharded(module: nn.Module, mesh: Mesh, **options: Any) -> Any:
    return instep.fully_shard(module, mesh, **options)


def piped(module: nn.Module, mesh: Mesh, **options: Any) -> Any:
    return instep.Pipeline(module, mesh, "1f1b", NUM_LEAVES, **options)


def plainly(model: Any, mesh: Mesh, kind: type[Optimizer], groups: Any, **options: Any) -> Optimizer:
    return kind(groups, **options)


def in_shards(model: Any, mesh: Mesh, kind: type[Optimizer], groups: Any, **options: Any) -> Optimizer:
    return instep.ShardedOptimizer(groups, kind, shard_group_of(mesh), **options)


@dataclass(frozen=True)
class Kind:
    """How to make model and optimizer, and the axes of a mesh of two ranks, beside ``dp``."""

    wrap: Callable[..., Any]
    optimizer: MakeOptimizer = plainly
    options: Mapping[str, Any] = field(default_factory=dict)
    axes: Mapping[str, int] = field(default_factory=dict)

    def make(
        self,
        module: nn.Module,
        mesh: Mesh,
        kind: type[Optimizer] = AdamW,
        groups: Callable[[nn.Module], Iterable[Any]] = nn.Module.parameters,
        *,
        wrap: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> tuple[Any, Optimizer]:
        """The model, wrapped with options ``wrap``, and its optimizer of class ``kind``."""
        model = self.wrap(module, mesh, **self.options, **(wrap or {}))
        chosen = options or FUSED
        return model, self.optimizer(model, mesh, kind, groups(model), **chosen)


KINDS: dict[str, Kind] = {
    "replicated": Kind(replicated),
    "stage 1": Kind(replicated, in_shards),
    "stage 2": Kind(sharded, options={"stage": 2}),
    "stage 3": Kind(sharded, options={"stage": 3}),
    "pipeline": Kind(piped, axes={"pp": 2}),
    "stage 2, sharded optimizer": Kind(sharded, in_shards, {"stage": 2}),
    "stage 3, sharded optimizer": Kind(sharded, in_shards, {"stage": 3}),
}
EVERY = ("replicated", "stage 1", "stage 2", "stage 3", "pipeline")
WRAPPERS = ("replicated", "stage 2", "stage 3")  # stage 1 wraps as "replicated" does
LOOPS = ("replicated", "stage 1", "stage 2", "stage 3")  # with a loop over micro-batches
STAGES = ("stage 2", "stage 3")


def on_every_kind(size: int, kinds: Sequence[str] = EVERY, **options: Any) -> Callable[..., Any]:
    """As ``world(size, **options)``, once for each of ``kinds``, named ``kind``."""

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(body)
        def test(kind: str, **params: Any) -> None:
            __tracebackhide__ = True
            axes = KINDS[kind].axes
            over = {"dp": -1, **axes} if axes else {}
            world(size, **{**over, **options})(body)(kind=kind, **params)

        signature = inspect.signature(body)
        others = [x for name, x in signature.parameters.items() if name != "mesh"]
        test.__signature__ = signature.replace(parameters=others)  # type: ignore[attr-defined]
        return pytest.mark.parametrize("kind", kinds)(test)

    return decorate


def net(dropout: float = 0.0) -> nn.Sequential:
    """Matrices of several blocks of 4096 elements, cut in the middle by two to four ranks."""
    return nn.Sequential(
        nn.Linear(WIDTH, 4 * WIDTH),
        nn.Sequential(nn.Tanh(), nn.Dropout(dropout)),
        nn.Linear(4 * WIDTH, WIDTH),
        nn.LayerNorm(WIDTH),
    )


def rows(key: str) -> Tensor:
    return numbers(4, WIDTH, key=key)


def leaf_rows(step: int, micro_batch: MicroBatch) -> Tensor:
    return rows(f"step {step} leaf {micro_batch.index}")


def mean_square(output: Tensor, given: Tensor) -> Tensor:
    return output.float().square().mean()


def square(model: nn.Module, batch: Tensor) -> Tensor:
    return mean_square(model(batch), batch)


@dataclass(frozen=True)
class Program:
    """What is trained, by which kind and optimizer: all that the bits of a step depend on.

    ``inputs`` are those of a micro-batch of a step, and ``loss`` gets the output and them. ``leaf_step`` does
    forward and backward itself, in a loop over micro-batches.
    """

    kind: str
    module: Callable[[], nn.Module] = net
    inputs: Callable[[int, MicroBatch], Tensor] = leaf_rows
    loss: Callable[[Tensor, Tensor], Tensor] = mean_square
    leaf_step: LeafStep | None = None
    optimizer: type[Optimizer] = AdamW
    options: Mapping[str, Any] = field(default_factory=lambda: FUSED)
    groups: Callable[[nn.Module], Iterable[Any]] = nn.Module.parameters
    clip: float | None = None
    scheduled: bool = False
    wrap: Mapping[str, Any] = field(default_factory=dict)
    num_leaves: int = NUM_LEAVES
    num_steps: int = 2  # the first plans, and the second goes by the plan

    def make(self, module: nn.Module, mesh: Mesh) -> tuple[Any, Optimizer]:
        return KINDS[self.kind].make(
            module, mesh, self.optimizer, self.groups, wrap=self.wrap, **self.options
        )

    def leaf(self, model: nn.Module, micro_batch: MicroBatch, step: int) -> None:
        """Forward and backward of one micro-batch."""
        if self.leaf_step is not None:
            self.leaf_step(model, micro_batch, step)
            return
        given = self.inputs(step, micro_batch)
        self.loss(model(given), given).backward()

    def backward(self, model: Any, step: int) -> None:
        """Forward and backward of a declared step."""
        if isinstance(model, instep.Pipeline):
            model.step(
                lambda output, micro_batch: self.loss(output, self.inputs(step, micro_batch)),
                functools.partial(self.inputs, step),
            )
            return
        for micro_batch in model.micro_batches(self.num_leaves):
            self.leaf(model, micro_batch, step)

    def step(self, model: Any, optimizer: Optimizer, number: int) -> None:
        """A declared step."""
        self.backward(model, number)
        if self.clip is not None:
            instep.clip_grad_norm_(model.parameters(), self.clip)
        optimizer.step()
        optimizer.zero_grad()

    def trained(self, mesh: Mesh) -> State:
        """The state after ``num_steps``."""
        model, optimizer = self.make(filled(self.module()), mesh)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5) if self.scheduled else None
        for number in range(self.num_steps):
            self.step(model, optimizer, number)
            if scheduler is not None:
                scheduler.step()
        found = state_of(model, optimizer)
        close(optimizer, model)
        return found


def once_each(compute: Callable[..., Any]) -> Callable[..., Any]:
    """``compute`` is called once for each argument, for all threads that ask for the result."""
    found: dict[int, tuple[Any, Any]] = {}
    lock = threading.Lock()

    @functools.wraps(compute)
    def result(argument: Any) -> Any:
        with lock:
            if id(argument) not in found:
                found[id(argument)] = argument, compute(argument)  # which keeps its identity
            return found[id(argument)][1]

    return result


def close(*parts: Any) -> None:
    for part in parts:
        if hasattr(part, "close"):
            part.close()


@dataclass(frozen=True)
class State:
    """Weights and buffers of the whole model, and the hash of all state; "" on a rank that has none."""

    weights: dict[str, Tensor]
    sha256: str


def state_of(model: Any, optimizer: Optimizer) -> State:
    """A copy. Collective."""
    state = training_state(model, optimizer)
    digest = ""
    if state.is_divided or not state.group.rank:
        digest = SharedHash(state.group).digests(state.owned(state.hashed()), 0)[0]
    return State({name: x.clone() for name, x in instep.full_state_dict(model).items()}, digest)


def assert_same_state(ours: State, expected: State) -> None:
    """The same bits, of any two kinds on any ranks."""
    assert_same(ours.weights, expected.weights, "weights")
    assert ours.sha256 in ("", expected.sha256), "moments"


@once_each
def replicated_alone(program: Program) -> State:
    """``program`` in one process that divides nothing."""
    return replace(program, kind="replicated").trained(world_of_one())
