"""What belongs to the ordinary torch loop is with a pipeline what it is in one process, to the bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import instep
from instep.mesh.mesh import Mesh
from instep.state.hash import SharedHash
from instep.step.micro_batches import MicroBatch
from tests.state_oracle import state_entries, state_sha256
from tests.training_state import training_state
from tests.world import world

WIDTH, ROWS, G, STEPS = 8, 4, 6, 3
Optimizers = Sequence[torch.optim.Optimizer]


def net() -> nn.Sequential:
    """Four layers, the same in every call."""
    layers = [
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        for _ in range(4)
    ]
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in (p for layer in layers for p in layer.parameters()):
            p.copy_(torch.rand(p.shape, generator=generator) - 0.4)
    return nn.Sequential(*layers)


def data(step: int, micro_batch: MicroBatch) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + micro_batch.index)
    x, y = torch.randn(2, ROWS, WIDTH, generator=generator)
    return x, y


def adamw(module: nn.Module) -> Optimizers:
    return [torch.optim.AdamW(module.parameters(), lr=1e-2)]


class Loop:
    """The ordinary loop around ``model``, with what a test has to say between its lines."""

    autocast: torch.dtype | None = None

    def __init__(self, optimizers: Callable[[nn.Module], Optimizers] = adamw) -> None:
        self.make = optimizers

    def before_update(self, module: nn.Module, optimizers: Optimizers) -> None:
        """Gradients are whole."""

    def update(self, optimizers: Optimizers) -> None:
        for optimizer in optimizers:
            optimizer.step()

    def around(self) -> Any:
        """Around forward and loss."""
        return nullcontext() if self.autocast is None else torch.autocast("cpu", self.autocast)

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(output, target.to(output.dtype))

    def alone(self, module: nn.Module) -> str:
        """The hash after ``STEPS`` steps in one process."""
        model, optimizers = instep.DataParallel(module), self.make(module)
        for step in range(STEPS):
            for micro_batch in model.micro_batches(G):
                x, y = data(step, micro_batch)
                with self.around():
                    loss = self.loss(module(x), y)
                loss.backward()
            self._end(module, optimizers)
        model.close()
        return state_sha256(state_entries(module, optimizers[0]), STEPS)

    def piped(self, mesh: Mesh, module: nn.Module, schedule: str = "1f1b") -> str:
        """The same of a pipeline."""
        model = instep.Pipeline(module, mesh, schedule, G)
        optimizers = self.make(model)
        for step in range(STEPS):
            with self.around():
                model.step(
                    lambda output, mb, step=step: self.loss(output, data(step, mb)[1]),
                    lambda mb, step=step: data(step, mb)[0],
                )
            self._end(model, optimizers)
        state = training_state(model, optimizers[0])
        found = SharedHash(state.group).digests(state.owned(state.hashed()), STEPS)[0]
        model.close()
        return found

    def _end(self, module: nn.Module, optimizers: Optimizers) -> None:
        self.before_update(module, optimizers)
        self.update(optimizers)
        for optimizer in optimizers:
            optimizer.zero_grad()


class ClippedApart(Loop):
    """Clips what a chosen layer has alone, then the rest: with two stages, each has one of the two."""

    def __init__(self, prefixes: Sequence[str]) -> None:
        super().__init__()
        self.prefixes, self.norms = prefixes, []

    def before_update(self, module: nn.Module, optimizers: Optimizers) -> None:
        for prefix in self.prefixes:
            chosen = [p for name, p in module.named_parameters() if name.startswith(prefix)]
            self.norms.append(float(instep.clip_grad_norm_(chosen, 0.01)))


@world(2, pp=2, dp=1)
@pytest.mark.parametrize("prefixes", [("0.",), ("3.",), ("0.", "3."), ("3.", "0.", "")])
def test_parameters_that_one_stage_has_are_clipped_alone(mesh: Mesh, prefixes: Sequence[str]) -> None:
    one, other = ClippedApart(prefixes), ClippedApart(prefixes)
    assert one.piped(mesh, net()) == other.alone(net())
    assert one.norms == other.norms and len(set(one.norms)) == STEPS * len(prefixes)


class Autocast(Loop):
    autocast = torch.bfloat16


@world(2, pp=2, dp=1)
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_mixed_precision_has_the_bits_of_one_process(mesh: Mesh, schedule: str) -> None:
    assert Autocast().piped(mesh, net(), schedule) == Autocast().alone(net())


@contextmanager
def hooked(module: nn.Module) -> Iterator[list[tuple[str, str, float]]]:
    """Hooks that halve what a layer gives, and what comes back to it, and write down what they saw."""
    seen: list[tuple[str, str, float]] = []

    def forward(name: str, output: Tensor) -> Tensor:
        seen.append((name, "forward", float(output.detach().sum())))
        return output / 2

    def backward(name: str, gradients: Any) -> Any:
        seen.append((name, "backward", float(gradients[0].sum())))
        return tuple(None if g is None else g / 2 for g in gradients)

    handles = []
    for name, layer in module.named_children():
        handles.append(layer.register_forward_hook(lambda m, i, o, name=name: forward(name, o)))
        if name != "0":  # whose input is data, and has no gradient
            handles.append(layer.register_full_backward_hook(lambda m, i, o, name=name: backward(name, i)))
    yield seen
    for handle in handles:
        handle.remove()


@world(2, pp=2, dp=1)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
def test_hooks_of_layers_see_and_change_what_they_do_in_one_process(mesh: Mesh, schedule: str) -> None:
    alone, piped = net(), net()
    with hooked(alone) as expected:
        sha256 = Loop().alone(alone)
    with hooked(piped) as seen:
        assert Loop().piped(mesh, piped, schedule) == sha256
    mine = ("0", "1") if mesh.along["pp"].rank == 0 else ("2", "3")
    assert sorted(seen) == sorted(one for one in expected if one[0] in mine)
