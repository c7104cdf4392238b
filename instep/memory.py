"""Private memory that is kept beyond one operation.

Scratch memory is allocated here, and so are buckets where the backend has no memory that all ranks can map;
``net.process_group.Group.allocate`` decides. Every address is aligned: some matrix kernels choose another
code path, and so other bits, when an operand is not on a vector boundary.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass

import torch
from torch import Tensor

ALIGN_BYTES = {"cpu": 64, "cuda": 256}
# Long sums over several buffers are computed in pieces of this size, which fit into a core's second-level
# cache, so that partial sums never go to main memory; much smaller pieces only cost calls.
PIECE_BYTES = 512 << 10
MAPPED_BYTES = 1 << 20  # below, a mapping costs more than malloc's arenas waste


@dataclass(frozen=True)
class Segment:
    """``tensor`` is flat bytes; ``fd`` a file descriptor that other processes can map, if there is one."""

    tensor: Tensor  # uint8, (nbytes,)
    fd: int | None = None

    def elements(self, dtype: torch.dtype) -> Tensor:
        """The whole segment as a flat tensor of ``dtype``."""
        with torch.inference_mode(False):  # it is kept
            return self.tensor.view(dtype)


def flat(x: Tensor) -> Tensor:
    """The memory of a contiguous ``x`` as (numel,).

    In a contiguous tensor a dim of length 1 may have any stride, but torch views only stride 1 in another
    dtype: so the stride is set.
    """
    return x.as_strided((x.numel(),), (1,))


def as_bytes(x: Tensor) -> Tensor:
    """The bytes of the values of ``x`` in logical order, (nbytes,).

    A view of its memory if ``x`` is contiguous and no lazy conjugate or negative, else a copy.
    """
    return flat(x.detach().resolve_conj().resolve_neg().contiguous()).view(torch.uint8)


def bytes_of(x: Tensor) -> bytes:
    """The values of ``x``, on any device, in logical order, as a message."""
    return bytes(as_bytes(x).cpu().numpy())


def tensor_of(data: bytes, dtype: torch.dtype) -> Tensor:
    """The values in a message of ``bytes_of``, flat, in memory of their own on the CPU."""
    if not data:  # frombuffer refuses it
        return torch.empty(0, dtype=dtype, device="cpu")
    return torch.frombuffer(bytearray(data), dtype=dtype)


def align_bytes(device: torch.device) -> int:
    """Alignment of every parameter, in bytes: a vector register on CPU, a cuBLASLt load on GPU."""
    return ALIGN_BYTES.get(device.type, 256)


def allocate(nbytes: int, align: int, device: torch.device | None = None) -> Segment:
    """``nbytes`` of private memory, not initialised, whose first address is a multiple of ``align`` bytes.

    Large CPU memory is mapped, and returned to the system with its last tensor. malloc would keep it in an
    arena of the allocating thread, 8 arenas per core: ranks that form new groups, with new threads each time,
    would keep their scratch memory many times.
    """
    if nbytes >= MAPPED_BYTES and (device is None or device.type == "cpu"):
        memory = mmap.mmap(-1, nbytes + align, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        raw = torch.frombuffer(memory, dtype=torch.uint8)
    else:
        raw = torch.empty(nbytes + align, dtype=torch.uint8, device=device)
    start = -raw.data_ptr() % align
    return Segment(raw[start : start + nbytes])
