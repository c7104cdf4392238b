"""Private memory that outlives an operation.

Scratch comes from here, and so do buckets where the backend has no memory that all ranks can map;
``mesh.process_group.Group.allocate`` decides. Every address is aligned: some matrix kernels choose another
code path, and so other bits, when an operand is not on a vector boundary.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass

import torch
from torch import Tensor

ALIGN_BYTES = {"cpu": 64, "cuda": 256}
# Long sums over several buffers are made in pieces of this size, which a core's second-level cache holds, so
# that a partial sum never goes to main memory; much smaller ones only cost calls.
PIECE_BYTES = 512 << 10
MAPPED_BYTES = 1 << 20  # below, a mapping would cost more than what an arena keeps


@dataclass(frozen=True)
class Segment:
    """``tensor`` is flat bytes; ``fd`` a file descriptor that other processes can map, if there is one."""

    tensor: Tensor  # uint8, (nbytes,)
    fd: int | None = None

    def elements(self, dtype: torch.dtype) -> Tensor:
        """The whole segment as a flat tensor of ``dtype``."""
        with torch.inference_mode(False):  # it outlives what it is made in
            return self.tensor.view(dtype)


def flat(x: Tensor) -> Tensor:
    """The memory of a contiguous ``x`` in one row, (numel,).

    A dimension of length 1 may have any stride in a contiguous tensor, and torch views only stride 1 in
    another dtype: so it is set.
    """
    return x.as_strided((x.numel(),), (1,))


def as_bytes(x: Tensor) -> Tensor:
    """The bytes of the values of ``x`` in logical order, (nbytes,).

    Its own memory where that holds just them: where ``x`` is contiguous and no lazy conjugate or negative.
    Else a copy.
    """
    return flat(x.detach().resolve_conj().resolve_neg().contiguous()).view(torch.uint8)


def bytes_of(x: Tensor) -> bytes:
    """The values of ``x`` in logical order, from whatever device, as a message."""
    data: bytes = as_bytes(x).cpu().numpy().tobytes()
    return data


def tensor_of(data: bytes, dtype: torch.dtype) -> Tensor:
    """The values that ``bytes_of`` has given, in one row, in memory of their own on the CPU."""
    if not data:  # which torch does not view
        return torch.empty(0, dtype=dtype, device="cpu")
    return torch.frombuffer(bytearray(data), dtype=dtype)


def align_bytes(device: torch.device) -> int:
    """Alignment of every parameter, in bytes: a vector register on CPU, a cuBLASLt load on GPU."""
    return ALIGN_BYTES.get(device.type, 256)


def allocate(nbytes: int, align: int, device: torch.device | None = None) -> Segment:
    """``nbytes`` of private memory whose first address is a multiple of ``align`` bytes; not initialised.

    Much of it on the CPU is mapped, and given back to the system with its last tensor. What malloc gave would
    be kept for the thread that took it, or one that gets its arena, of which there are 8 per core: ranks that
    meet again and again, with new threads each time, would keep their scratch many times over.
    """
    if nbytes >= MAPPED_BYTES and (device is None or device.type == "cpu"):
        memory = mmap.mmap(-1, nbytes + align, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        raw = torch.frombuffer(memory, dtype=torch.uint8)
    else:
        raw = torch.empty(nbytes + align, dtype=torch.uint8, device=device)
    start = -raw.data_ptr() % align
    return Segment(raw[start : start + nbytes])
