"""Receive buffers of exchanges, reused and as large as the largest exchange has needed."""

from __future__ import annotations

import torch
from torch import Tensor

from instep.memory import align_bytes, allocate


class Scratch:
    """One buffer per device and dtype; each ``take`` reuses the memory of the last one."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[torch.device, torch.dtype], Tensor] = {}

    @property
    def buffers(self) -> list[Tensor]:
        return [*self._buffers.values()]

    def take(self, num_elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """(num_elements,) of uninitialised memory."""
        key = (device, dtype)
        if key not in self._buffers or self._buffers[key].numel() < num_elements:
            segment = allocate(num_elements * dtype.itemsize, align_bytes(device), device)
            self._buffers[key] = segment.elements(dtype)
        return self._buffers[key][:num_elements]
