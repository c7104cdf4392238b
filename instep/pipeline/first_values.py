"""First values for a pipeline of a model from the meta device: each rank fills its own layers, no others.

The values are those that one process would make: of a parameter they depend on its name, and where modules
fill their own, on the module's. Layer by layer, so that of what others have one layer at most takes memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from instep.net.process_group import Group
from instep.pipeline.home import PipelineHome, drop_values
from instep.pipeline.layers import Layer
from instep.shard.materialise import Init, materialise, prepare
from instep.step.agreement import broadcast_values


@dataclass(frozen=True)
class FirstOfLayers:
    """How to fill ``layers`` of ``module``: see ``materialise`` of ``Pipeline``."""

    module: nn.Module
    init: Init | None
    seed: int

    def prepare(self, layers: Sequence[Layer], home: PipelineHome) -> None:
        """Look whether they can be filled later, and fill buffers."""
        prepare(self.module, list(_unfilled(self.module, layers, home)), self.init, self.seed)

    def fill(self, layers: Sequence[Layer], home: PipelineHome, alike: Group) -> None:
        """Fill what is here; the first of the ranks ``alike``, which have the same, decides. Collective."""
        home.make_room()
        units = list(_unfilled(self.module, layers, home))
        if self.init is not None or hasattr(self.module, "init_parameter"):
            units = [unit for unit in units if home.holds(unit.parameters[0])]
        materialise(self.module, units, self.init, self.seed)
        elsewhere = {id(p) for p in home.parameters if not home.holds(p)}
        broadcast_values(self.module, alike, but=elsewhere)
        home.loaded()


@dataclass
class UnfilledParameter:
    """A parameter of a layer called ``name``, to be filled with the others of that; as ``Unfilled`` says."""

    name: str
    home: PipelineHome
    names: list[str]
    parameters: list[Tensor]

    @property
    def device(self) -> torch.device:
        return self.parameters[0].device

    def empty(self, i: int) -> Tensor:
        return self.home.empty_like(self.parameters[i])

    @contextmanager
    def made_whole(self, values: Sequence[Tensor]) -> Iterator[None]:
        """Until now it may be absent; if it is elsewhere, it is again at the end."""
        (p,), (value,) = self.parameters, values
        self.home.give_room(p)
        own, p.data = p.data, value
        try:
            yield
        finally:
            p.data = own
            if self.home.holds(p):
                p.detach().copy_(value)
            else:
                drop_values(p)


def _unfilled(module: nn.Module, layers: Sequence[Layer], home: PipelineHome) -> Iterator[UnfilledParameter]:
    """What is in layers that are here or have buffers to be filled, and what modules fill along with it."""
    for layer in layers:
        own = {id(p) for p in layer.module.parameters()}
        no_buffers = all(not x.is_meta for x in layer.module.buffers())
        if no_buffers and not any(home.holds(p) for p in layer.module.parameters()):
            continue
        for m in module.modules():
            its = {id(p) for p in m.parameters(recurse=False)}
            own |= its if its & own else set()
        for name, p in zip(home.names, home.parameters, strict=True):
            if id(p) in own:
                yield UnfilledParameter(layer.path, home, [name], [p])
