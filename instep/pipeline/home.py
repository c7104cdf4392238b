"""Where the parameters of a pipeline are: each whole on the rank of its stage, absent on all others.

Every rank has all parameters by name. An absent one has no elements and no gradient: a weight of (64, 16)
has the shape (0, 16) there. An optimizer passes over it, and a layer of another stage cannot be called by
mistake. What saves, hashes, compares and counts the state asks ``Home`` for its shape.
"""

from __future__ import annotations

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
from instep.state.boxes import BoxHome
from instep.state.homes import DividedOptimizer, Home, ParameterShard, dense_strides, undivided
from instep.state.shards import Box

NO_VALUES = (
    "the parameters of this pipeline were on the meta device and have no values yet: call "
    "model.materialise(), or load a state"
)
GIVES = (
    "state_dict() of a pipeline: {!r} is on another rank. All ranks together have "
    "instep.full_state_dict(model), and instep.save writes each rank's part"
)
TAKES = (
    "load_state_dict() into a pipeline: {!r} is on another rank. Load before the pipeline is made, or, from "
    "a checkpoint of instep, with instep.load()"
)
_ABSENT = "instep_absent"  # an attribute, so that a closed pipeline's parameters are known, too


class PipelineHome(Home):
    """The ``named`` parameters: number i is on rank ``ranks[i]`` of ``group``; ``everyone`` trains them.

    ``boxes`` is the home that they had before, if layers are cut over ranks too: a stage has its boxes.

    With ``release`` those of other ranks give their memory back. ``replicas`` is the mesh whose data axes
    have the ranks of one stage. ``before`` is the home that they had in another group. All are absent then,
    until a state is put, and so are those from the meta device, which come to the device of the mesh.
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
        boxes: BoxHome | None = None,
    ) -> None:
        self.boxes: BoxHome | None = boxes
        self.group, self.everyone, self.replicas = group, everyone, replicas
        self.names, self.parameters = list(named), list(named.values())
        self._rank_of = {id(p): rank for p, rank in zip(self.parameters, ranks, strict=True)}
        if before is None:  # what has a home is not aligned any more
            align(self.parameters)
            self.has_values = not any(p.is_meta for p in self.parameters)
            self._shapes = {id(p): (p.shape, dense_strides(p)) for p in self.parameters}
        else:
            self._shapes = before._shapes
        if boxes is not None:
            shapes = [boxes.local_shape(p) for p in self.parameters]
            empty = [torch.empty(shape, device="meta") for shape in shapes]
            self._shapes = {id(p): (x.shape, x.stride()) for p, x in zip(self.parameters, empty, strict=True)}
        for p in self.parameters:
            if p.is_meta:
                become(p, _nothing(p, replicas.device))
                setattr(p, _ABSENT, True)
        here = [p for p in self.parameters if self.holds(p)]
        self.held = [
            ParameterShard(p, 0, self._shapes[id(p)][0].numel(), p, self.shape_of(p), self.box_of(p))
            for p in here
        ]

    def release(self) -> None:
        """Keep no values of what other ranks have."""
        for p in self.parameters:
            if not self.holds(p):
                drop_values(p)

    def holds(self, parameter: Tensor) -> bool:
        """Whether ``parameter`` is on this rank, as one that came later is."""
        return self._rank_of.get(id(parameter), self.group.rank) == self.group.rank

    def shape_of(self, parameter: Tensor) -> torch.Size:
        return self._shapes[id(parameter)][0] if self.boxes is None else self.boxes.shape_of(parameter)

    def strides_of(self, parameter: Tensor) -> tuple[int, ...]:
        return self._shapes[id(parameter)][1] if self.boxes is None else self.boxes.strides_of(parameter)

    def box_of(self, parameter: Tensor) -> Box | None:
        return None if self.boxes is None else self.boxes.box_of(parameter)

    def slices_with(self, parameter: Tensor) -> list[int]:
        return [self._rank_of[id(parameter)]]

    def num_shares(self, parameter: Tensor) -> int:
        """As ``Home`` says: it is whole, here or elsewhere."""
        return int(self.holds(parameter))

    def empty_like(self, parameter: Tensor) -> Tensor:
        """Memory for all of ``parameter``."""
        shape, strides = self._shapes[id(parameter)]
        return torch.empty_strided(shape, strides, dtype=parameter.dtype, device=parameter.device)

    def make_room(self) -> None:
        """As ``Home`` says: what has come to this rank from another one gets memory."""
        for x in self.held:
            self.give_room(x.parameter)

    def give_room(self, parameter: Tensor) -> None:
        """``parameter`` has memory for all its values, if it was absent."""
        if is_absent(parameter):
            parameter.data = self.empty_like(parameter)
            setattr(parameter, _ABSENT, False)

    def loaded(self) -> None:
        self.has_values = True

    def fetch(self, parameter: Tensor) -> Tensor:
        """As ``Home`` says.

        Raises:
            ValueError: parameters have no values yet.
        """
        own = self.fetch_own(parameter)
        return own if self.boxes is None else self.boxes.whole(parameter, own)

    def fetch_own(self, parameter: Tensor) -> Tensor:
        """What a rank of the stage of ``parameter`` computes with: a box where layers are cut. Collective."""
        if not self.has_values:
            raise ValueError(NO_VALUES)
        found = torch.empty(self._shapes[id(parameter)][0], dtype=parameter.dtype, device=parameter.device)
        if self.holds(parameter):
            found.copy_(parameter.detach())
        rank = self._rank_of[id(parameter)]
        self.group.broadcast(found.view(-1).view(torch.uint8), "the gathering of a state dict", root=rank)
        return found

    def divided(self, optimizer: Optimizer) -> DividedOptimizer:
        """As ``Home`` says: it steps what is here, and nothing else has a gradient."""
        whole, own = undivided(optimizer), {id(x.parameter): x for x in self.held}
        held = {i: own[id(x.parameter)] for i, x in whole.held.items() if id(x.parameter) in own}
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
            drop_values(p)


def is_absent(p: Tensor) -> bool:
    """Whether the values of ``p`` are on another rank, or nowhere yet."""
    return bool(getattr(p, _ABSENT, False))


def drop_values(p: Tensor) -> None:
    """``p`` is absent from now on: its memory is free."""
    with torch.no_grad():
        p.data = _nothing(p, p.device)
    setattr(p, _ABSENT, True)


def _nothing(p: Tensor, device: torch.device) -> Tensor:
    """No elements, and as many dimensions: optimizers' groups are often made by them."""
    return torch.empty((0, *p.shape[1:]), dtype=p.dtype, device=device)


def guard(module: nn.Module, home: PipelineHome) -> list[RemovableHandle]:
    """From now on no layer of another rank is called, and no state dict has or loads its parameters."""
    give = Hook(partial(_refuse, home, GIVES))
    take = Hook(partial(_refuse, home, TAKES))
    handles = []
    for m in module.modules():
        handles += [m.register_state_dict_post_hook(give), m.register_load_state_dict_pre_hook(take)]
        if not all(map(home.holds, m.parameters(recurse=False))):
            handles.append(m.register_forward_pre_hook(_require_here))
    return handles


def _require_here(module: nn.Module, _: Any) -> None:
    if any(is_absent(p) for p in module.parameters(recurse=False)):
        raise RuntimeError(
            f"a layer of a pipeline, {type(module).__name__}, was called, whose weights are on another rank: "
            "train with model.step(), and call the Pipeline itself to evaluate"
        )


def _refuse(
    home: PipelineHome, reason: str, module: nn.Module, state: Mapping[str, Any], prefix: str, *_: Any
) -> None:
    """A state dict has no parameter that is on another rank; the parameter itself it may have."""
    for key, p in module._parameters.items():
        if p is not None and not home.holds(p) and state.get(prefix + key, p) is not p:
            raise RuntimeError(reason.format(prefix + key))
