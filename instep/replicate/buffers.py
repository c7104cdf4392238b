"""Rank 0's buffers for everyone, once per step and never inside forward.

Running statistics differ between ranks, since each has seen other samples; DDP lets rank 0's win before
each forward. Here they travel after the gradients, in one message, and only bits that differ are written,
because a buffer may have been saved by a forward whose backward is still to come.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from instep.mesh.group import Group

OPERATION = "the broadcast of buffers"


def broadcast_buffers(module: nn.Module, group: Group) -> None:
    """Overwrite the buffers of ``module`` that differ from those of the group's first rank. Collective."""
    by_device: dict[torch.device, list[Tensor]] = {}
    for buffer in module.buffers():
        if buffer.numel():
            by_device.setdefault(buffer.device, []).append(buffer.detach())
    for buffers in by_device.values():
        message = torch.cat([_bytes(buffer) for buffer in buffers])
        group.broadcast(message, OPERATION)
        if group.rank == 0:
            continue
        parts = message.split([buffer.numel() * buffer.element_size() for buffer in buffers])
        for buffer, part in zip(buffers, parts, strict=True):
            if not torch.equal(part, _bytes(buffer)):
                # In training mode no backward reads running statistics, so the version stays as it is.
                with torch.autograd._unsafe_preserve_version_counter(buffer):
                    buffer.copy_(part.clone().view(buffer.dtype).view(buffer.shape))


def _bytes(x: Tensor) -> Tensor:
    return x.contiguous().reshape(-1).view(torch.uint8)
