"""Tensors as they come out of a mapped file."""

from __future__ import annotations

import torch
from torch import Tensor


def off_by(nbytes: int, x: Tensor) -> Tensor:
    """A copy of ``x`` that begins ``nbytes`` past a multiple of 64, as in a file that is mapped."""
    file = torch.frombuffer(bytearray(x.nbytes + 128), dtype=torch.uint8)
    begin = -file.data_ptr() % 64 + nbytes
    return file[begin : begin + x.nbytes].view(x.dtype).view(x.shape).copy_(x)
