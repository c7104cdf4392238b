"""Where the parameters of a pipeline are: each whole, on the rank of its stage, and nowhere else.

On the other ranks a parameter keeps its name and its shape, since every rank knows the whole model, and takes
the memory of one NaN. What saves, hashes, compares and counts the state asks ``Home``, as for parameters in
slices.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from instep.hook import Hook
from instep.mesh.mesh import Mesh
from instep.net.process_group import Group
from instep.shard.unit import become
from instep.state.alignment import align
from instep.state.homes import DividedOptimizer, Home, ParameterShard, dense_strides, undivided

NO_VALUES = (
    "the parameters of this pipeline were on the meta device and have no values yet: call "
    "model.materialise(), or load a state"
)


class PipelineHome(Home):
    """The ``named`` parameters: number i is on rank ``ranks[i]`` of ``group``; ``everyone`` trains them.

    With ``release`` those of other ranks give their memory back. ``replicas`` is the mesh whose data axes
    have the ranks of one stage. ``before`` is the home that they had in another group: without values then,
    until a state is put, as those from the meta device are, which come to the device of the mesh.
    """

    resident = False
    has_values = False

    def __init__(
        self,
        group: Group,
        everyone: Group,
        replicas: Mesh,
        named: Mapping[str, Tensor],
        ranks: Sequence[int],
        before: PipelineHome | None = None,
    ) -> None:
        self.group, self.everyone, self.replicas = group, everyone, replicas
        self.names, self.parameters = list(named), list(named.values())
        if before is None:  # what has a home is not aligned any more
            align(self.parameters)
        self.has_values = before is None and not any(p.is_meta for p in self.parameters)
        self._rank_of = {id(p): rank for p, rank in zip(self.parameters, ranks, strict=True)}
        self._strides: dict[int, tuple[int, ...]] = (
            {id(p): dense_strides(p) for p in self.parameters} if before is None else before._strides
        )
        for p in self.parameters:
            if p.is_meta:
                become(p, _nan(p, replicas.device))
        here = [p for p in self.parameters if self.holds(p)]
        self.held = [ParameterShard(p, 0, p.numel(), p, p.shape) for p in here]

    def release(self) -> None:
        """Keep no values of what other ranks have."""
        for p in self.parameters:
            if not self.holds(p):
                hide(p)

    def holds(self, parameter: Tensor) -> bool:
        """Whether ``parameter`` is on this rank, as one that came later is."""
        return self._rank_of.get(id(parameter), self.group.rank) == self.group.rank

    def strides_of(self, parameter: Tensor) -> tuple[int, ...]:
        return self._strides[id(parameter)]

    def slices_with(self, parameter: Tensor) -> list[int]:
        return [self._rank_of[id(parameter)]]

    def num_shares(self, parameter: Tensor) -> int:
        """As ``Home`` says: it is whole, here or elsewhere."""
        return int(self.holds(parameter))

    def make_room(self) -> None:
        """As ``Home`` says: what has come to this rank from another one gets memory."""
        for p in (x.parameter for x in self.held):
            if is_hidden(p):
                p.data = torch.empty_strided(p.shape, self.strides_of(p), dtype=p.dtype, device=p.device)

    def loaded(self) -> None:
        self.has_values = True

    def fetch(self, parameter: Tensor) -> Tensor:
        """As ``Home`` says.

        Raises:
            ValueError: parameters have no values yet.
        """
        if not self.has_values:
            raise ValueError(NO_VALUES)
        found = parameter.detach().clone(memory_format=torch.contiguous_format)
        rank = self._rank_of[id(parameter)]
        self.group.broadcast(found.view(-1).view(torch.uint8), "the gathering of a state dict", root=rank)
        return found

    def divided(self, optimizer: Optimizer) -> DividedOptimizer:
        """As ``Home`` says: it steps what is here, and nothing else has a gradient."""
        whole = undivided(optimizer)
        held = {i: x for i, x in whole.held.items() if self.holds(x.parameter)}
        return DividedOptimizer(
            group=self.group,
            locals=(optimizer,),
            held=held,
            homes=[self],
            num_replicas=self.everyone.size // self.group.size,
            load=whole.load,
            leave=optimizer.state.clear,
        )

    def vacate(self) -> None:
        """Hold no values, and no memory, until the parameters have another home."""
        self.has_values = False
        for p in self.parameters:
            hide(p)


def is_hidden(p: Tensor) -> bool:
    """Whether ``p`` shows one number in the place of its values."""
    return p.untyped_storage().nbytes() < p.numel() * p.element_size()


def hide(p: Tensor) -> None:
    """Let the memory of ``p`` go."""
    with torch.no_grad():
        p.data = _nan(p, p.device)


def _nan(p: Tensor, device: torch.device) -> Tensor:
    """In the place of values, or a zero, where the dtype has none."""
    shown = math.nan if p.is_floating_point() or p.is_complex() else 0
    return torch.full((), shown, dtype=p.dtype, device=device).expand(p.shape)


def guard_state_dicts(module: nn.Module, home: PipelineHome) -> list[RemovableHandle]:
    """From now on ``module`` neither gives nor takes, in a state dict, what is on another rank."""
    give, take = Hook(partial(_require_values, home)), Hook(partial(_refuse_values, home))
    return [
        handle
        for m in module.modules()
        for handle in (m.register_state_dict_post_hook(give), m.register_load_state_dict_pre_hook(take))
    ]


def _require_values(
    home: PipelineHome, module: nn.Module, state: Mapping[str, Any], prefix: str, metadata: Any
) -> None:
    """A state dict has no parameter that is on another rank; the parameter itself it may have."""
    for key, p in module._parameters.items():
        if p is not None and not home.holds(p) and state.get(prefix + key, p) is not p:
            raise RuntimeError(
                f"state_dict() of a pipeline: {prefix + key!r} is on another rank. All ranks together have "
                "instep.full_state_dict(model), and instep.save writes each rank's part"
            )


def _refuse_values(
    home: PipelineHome, module: nn.Module, state: Mapping[str, Any], prefix: str, *others: Any
) -> None:
    for key, p in module._parameters.items():
        if p is not None and not home.holds(p) and prefix + key in state:
            raise RuntimeError(
                f"load_state_dict() into a pipeline: {prefix + key!r} is on another rank. Load before the "
                "pipeline is made, or, from a checkpoint of instep, with instep.load()"
            )
