"""Rank 0's buffers for everyone, once per step and never inside forward.

Running statistics differ between ranks, since each has seen other samples; DDP lets rank 0's win before
each forward. Here they travel after the gradients, in one message, and only bits that differ are written.

A buffer may have been saved by a forward whose backward is still to come: the second of two losses, or of
two forwards. Written in place, that backward would compute with numbers its forward never saw. So a buffer
that a graph holds is replaced by a new tensor, and the graph keeps the old one.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from instep.mesh.group import Group

OPERATION = "the broadcast of buffers"


def broadcast_buffers(module: nn.Module, group: Group) -> None:
    """Give the buffers of ``module`` the values that the group's first rank has in them. Collective."""
    by_device: dict[torch.device, list[Tensor]] = {}
    for buffer in module.buffers():
        if buffer.numel():
            by_device.setdefault(buffer.device, []).append(buffer)
    new: dict[Tensor, Tensor] = {}
    for buffers in by_device.values():
        message = torch.cat([_bytes(buffer) for buffer in buffers])
        group.broadcast(message, OPERATION)
        if group.rank == 0:
            continue
        parts = message.split([buffer.numel() * buffer.element_size() for buffer in buffers])
        for buffer, part in zip(buffers, parts, strict=True):
            if not torch.equal(part, _bytes(buffer)):
                new[buffer] = part.clone().view(buffer.dtype).view(buffer.shape)
    held = {buffer for buffer in new if _is_held_by_a_graph(buffer)}
    for owner in module.modules() if held else ():
        for name, mine in owner._buffers.items():
            if mine is not None and mine in held:
                owner._buffers[name] = new[mine]
    for buffer in new.keys() - held:
        buffer.detach().copy_(new[buffer])


def _is_held_by_a_graph(buffer: Tensor) -> bool:
    """Whether something beside Python holds the tensor itself; views of it hold its storage too.

    Who has a view sees what is written, and if that is a graph, its backward raises.
    """
    # The tensor is one user of its storage, the object made to ask is another.
    shared = torch._C._storage_Use_Count(buffer.untyped_storage()._cdata) > 2
    return buffer._use_count() > 1 and not shared  # type: ignore[attr-defined]


def _bytes(x: Tensor) -> Tensor:
    return x.detach().contiguous().reshape(-1).view(torch.uint8)
