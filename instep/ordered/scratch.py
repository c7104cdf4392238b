"""Memory for what an exchange receives: kept from one to the next, as much as the largest has needed."""

from __future__ import annotations

import torch
from torch import Tensor

from instep.memory import align_bytes, allocate


class Scratch:
    """One buffer per device and dtype; what ``take`` returns is overwritten by the next that is taken.

    Those ``beside`` it are for what is under way at the same time.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[torch.device, torch.dtype], Tensor] = {}
        self._beside: dict[int, Scratch] = {}

    @property
    def buffers(self) -> list[Tensor]:
        """What is kept, also beside it."""
        return [*self._buffers.values(), *(x for other in self._beside.values() for x in other.buffers)]

    def beside(self, number: int) -> Scratch:
        """Another one, number ``number``, which takes memory of its own."""
        return self._beside.setdefault(number, Scratch())

    def take(self, num_elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """(num_elements,) of memory that is not initialised."""
        kind = (device, dtype)
        if kind not in self._buffers or self._buffers[kind].numel() < num_elements:
            segment = allocate(num_elements * dtype.itemsize, align_bytes(device), device)
            self._buffers[kind] = segment.elements(dtype)
        return self._buffers[kind][:num_elements]
