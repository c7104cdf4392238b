"""Memory for what an exchange receives: kept from one to the next, as much as the largest has needed."""

from __future__ import annotations

import torch
from torch import Tensor

from instep.memory import align_bytes, allocate


class Scratch:
    """One buffer per device and dtype; the next ``take`` overwrites the memory that the last one returned."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[torch.device, torch.dtype], Tensor] = {}

    @property
    def buffers(self) -> list[Tensor]:
        """The memory that it keeps."""
        return [*self._buffers.values()]

    def take(self, num_elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """(num_elements,) of memory that is not initialised."""
        kind = (device, dtype)
        if kind not in self._buffers or self._buffers[kind].numel() < num_elements:
            segment = allocate(num_elements * dtype.itemsize, align_bytes(device), device)
            self._buffers[kind] = segment.elements(dtype)
        return self._buffers[kind][:num_elements]
