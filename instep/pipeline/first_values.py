"""First values for a pipeline of a model from the meta device: each rank fills its own layers, no others.

The values are those that one process would make: of a parameter they depend on its name, and where modules
fill their own, on the module's. Layer by layer, so that of what others have one layer at most takes memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

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
        by_name = []
        if self.init is not None or hasattr(self.module, "init_parameter"):
            by_name = units = [unit for unit in units if any(map(home.holds, unit.parameters))]
        for unit in by_name:  # tied ones may be elsewhere
            unit.begin_use()
        materialise(self.module, units, self.init, self.seed)
        for unit in by_name:
            unit.hide()
        elsewhere = {id(p) for p in home.parameters if not home.holds(p)}
        broadcast_values(self.module, alike, but=elsewhere)
        home.loaded()


@dataclass
class UnfilledLayer:
    """Parameters of one layer, and what modules fill together with them; those that are here stay."""

    name: str
    home: PipelineHome
    own_dtype: torch.dtype
    device: torch.device
    names: list[str] = field(default_factory=list)
    parameters: list[Tensor] = field(default_factory=list)
    materialised: bool = False

    def strides_of(self, parameter: Tensor) -> tuple[int, ...]:
        return self.home.strides_of(parameter)

    def begin_use(self) -> None:
        """Until now they may be absent; those that are elsewhere are again when all is kept."""
        for p in self.parameters:
            self.home.give_room(p)

    def keep(self, i: int, values: Tensor) -> None:
        p = self.parameters[i]
        if self.home.holds(p) and p.data_ptr() != values.data_ptr():
            p.detach().copy_(values)

    def hide(self) -> None:
        for p in self.parameters:
            if not self.home.holds(p):
                drop_values(p)


def _unfilled(module: nn.Module, layers: Sequence[Layer], home: PipelineHome) -> Iterator[UnfilledLayer]:
    """Of each layer that is here, or has buffers to be filled, one for each dtype."""
    for layer in layers:
        own = {id(p) for p in layer.module.parameters()}
        no_buffers = all(not x.is_meta for x in layer.module.buffers())
        if no_buffers and not any(home.holds(p) for p in layer.module.parameters()):
            continue
        for m in module.modules():
            its = {id(p) for p in m.parameters(recurse=False)}
            own |= its if its & own else set()
        found: dict[torch.dtype, UnfilledLayer] = {}
        for name, p in zip(home.names, home.parameters, strict=True):
            if id(p) in own:
                unit = found.setdefault(p.dtype, UnfilledLayer(layer.path, home, p.dtype, p.device))
                unit.names.append(name)
                unit.parameters.append(p)
        yield from found.values()
