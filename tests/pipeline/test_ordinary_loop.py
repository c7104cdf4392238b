"""What belongs to the ordinary torch loop is with a pipeline what it is in one process, to the bit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import instep
from instep.mesh.mesh import Mesh
from tests.kinds import WIDTH, Program, assert_same_state
from tests.parity import world_of_one
from tests.world import world


def net() -> nn.Sequential:
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Tanh()) for _ in range(4))
    )


@dataclass(frozen=True)
class Loop(Program):
    """The ordinary loop, with what a test has to say between its lines."""

    module: Any = net
    autocast: bool = False
    schedule: str = "1f1b"
    clipped: Sequence[str] = ()  # what begins so is clipped, one after the other
    norms: list[float] = field(default_factory=list)

    def make(self, module: nn.Module, mesh: Mesh) -> Any:
        if self.kind == "replicated":
            return super().make(module, mesh)
        model = instep.Pipeline(module, mesh, self.schedule, self.num_leaves)
        return model, torch.optim.AdamW(model.parameters(), **self.options)

    def backward(self, model: Any, step: int) -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
            super().backward(model, step)
        for prefix in self.clipped:
            chosen = [p for name, p in model.named_parameters() if name.startswith(prefix)]
            self.norms.append(float(instep.clip_grad_norm_(chosen, 0.01)))


def assert_as_alone(mesh: Mesh, **words: Any) -> None:
    one, other = Loop("pipeline", **words), Loop("replicated", **words)
    assert_same_state(one.trained(mesh), other.trained(world_of_one()))
    assert one.norms == other.norms and len(set(one.norms)) == len(other.clipped) * other.num_steps


@world(2, pp=2, dp=1)
@pytest.mark.parametrize("prefixes", [("0.",), ("3.",), ("0.", "3."), ("3.", "0.", "")])
def test_parameters_that_one_stage_has_are_clipped_alone(mesh: Mesh, prefixes: Sequence[str]) -> None:
    assert_as_alone(mesh, clipped=prefixes)


@world(2, pp=2, dp=1)
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_mixed_precision_has_the_bits_of_one_process(mesh: Mesh, schedule: str) -> None:
    assert_as_alone(mesh, schedule=schedule, autocast=True)


class Hooked:
    """Makes a net with hooks that halve outputs of layers, and gradients, and note what they saw."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, str, float]] = []

    def __call__(self) -> nn.Module:
        module = net()
        for name, layer in module.named_children():
            layer.register_forward_hook(lambda m, i, output, name=name: self.forward(name, output))
            if name != "0":  # whose input is data, and has no gradient
                layer.register_full_backward_hook(lambda m, inputs, o, name=name: self.backward(name, inputs))
        return module

    def forward(self, name: str, output: Tensor) -> Tensor:
        self.seen.append((name, "forward", float(output.detach().sum())))
        return output / 2

    def backward(self, name: str, gradients: Any) -> Any:
        self.seen.append((name, "backward", float(gradients[0].sum())))
        return tuple(None if g is None else g / 2 for g in gradients)


@world(2, pp=2, dp=1)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
def test_hooks_of_layers_see_and_change_what_they_do_in_one_process(mesh: Mesh, schedule: str) -> None:
    alone, piped = Hooked(), Hooked()
    one, other = Loop("pipeline", piped, schedule=schedule), Loop("replicated", alone)
    found, expected = one.trained(mesh), other.trained(world_of_one())
    mine = ("0", "1") if mesh.along["pp"].rank == 0 else ("2", "3")
    trained = [x for x in piped.seen if x[0] in mine]
    assert sorted(trained) == sorted(x for x in alone.seen if x[0] in mine)
    assert_same_state(found, expected)
