"""Weights where kernels take one path: on an aligned address, and without gaps.

Some matrix kernels choose another code path, and so other bits, for an operand off a vector boundary or with
gaps between its rows. Torch allocates aligned memory; but a weight from a mapped file
(``load_state_dict(assign=True)``) begins wherever the file's header ends, and a slice such as ``w[:, ::2]``
has gaps. In the flat memory of ``fully_shard`` and ``ShardedOptimizer`` weights are aligned and dense, so
they must be so elsewhere, too, or the bits would depend on the file and on the stage.

Tensors that share elements move together:

    before    |header|--- a ---|--- b ---|          a and b begin 4 bytes off, t is a view of b
                                  |- t -|
    after     |--- a ---|       |--- b ---|         t is a view of b
                                   |- t -|
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from instep.memory import align_bytes, allocate
from instep.state.homes import dense_strides, home


def align(tensors: Iterable[Tensor]) -> None:
    """Move each of ``tensors`` that begins off its alignment, or has gaps, to memory with neither.

    They stay the same objects with the same values, and only ``.data`` changes, so optimizers made before go
    on working. Dense strides are kept; gaps are closed, in the same order of dims. Tensors that share
    elements go on to share them, and keep their strides; so does an expanded buffer. A lazy conjugate or
    negative (``x.conj()``) becomes plain, because kernels take another path for it, too, unless it shares
    elements. Tensors in order, or in a home, stay.

    Other tensors on the old memory, such as a flat base of all weights, stay there.
    """
    mine = [x for x in tensors if _has_memory(x) and home(x) is None]
    if all(map(_is_in_order, mine)):
        return
    with torch.inference_mode(False), torch.no_grad():
        for group in sharing(mine):
            x = group[0]
            # An expanded buffer is larger than its memory; an optimizer steps each element of a parameter.
            if len(group) > 1 or (not isinstance(x, nn.Parameter) and x.nbytes > _num_bytes_spanned(x)):
                _move_together(group)
            elif not _is_in_order(x):
                flat = allocate(x.nbytes, align_bytes(x.device), x.device).elements(x.dtype)
                x.data = flat.as_strided(x.shape, dense_strides(x)).copy_(x)


def sharing(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """``tensors`` that have memory, in groups that share elements, each in the order of addresses.

    The left and the right columns of a matrix share none, though their stretches of memory overlap.
    """
    stretches: list[list[Tensor]] = []
    end = ("", 0)
    for x in sorted(filter(_has_memory, tensors), key=_begin):
        if not stretches or _begin(x) >= end:
            stretches.append([])
        stretches[-1].append(x)
        device, begin = _begin(x)
        end = max(end, (device, begin + _num_bytes_spanned(x)))
    return [group for stretch in stretches for group in _sharing_within(stretch)]


def _sharing_within(stretch: Sequence[Tensor]) -> list[list[Tensor]]:
    """``sharing`` of tensors whose stretches of memory overlap, in the order of addresses.

    Each writes its number on a map of the memory, and shares elements with the numbers that it finds there.
    """
    if len(stretch) == 1:
        return [list(stretch)]
    offsets = _offsets(stretch)
    unit = math.gcd(*offsets, *(x.itemsize for x in stretch))  # bytes, of a place on the map
    length = max(begin + _num_bytes_spanned(x) for begin, x in zip(offsets, stretch, strict=True))
    on_map = torch.full((length // unit,), -1, dtype=torch.int32, device="cpu")
    group_of = list(range(len(stretch)))
    for i, (x, offset) in enumerate(zip(stretch, offsets, strict=True)):
        per_element = x.itemsize // unit
        # An expanded dim counts once, because torch writes no element twice.
        sizes = [1 if stride == 0 else size for size, stride in zip(x.shape, x.stride(), strict=True)]
        strides = [stride * per_element for stride in x.stride()]
        places = on_map.as_strided((*sizes, per_element), (*strides, 1), offset // unit)
        met = {group_of[k] for k in places.unique().tolist() if k >= 0}
        group_of = [i if group in met else group for group in group_of]
        places.fill_(i)
    return [[x for x, own in zip(stretch, group_of, strict=True) if own == k] for k in sorted(set(group_of))]


def _move_together(group: Sequence[Tensor]) -> None:
    """Move ``group``, in the order of addresses, so that its first tensor is aligned."""
    first, offsets = group[0], _offsets(group)
    fits = all(offset % x.itemsize == 0 for offset, x in zip(offsets, group, strict=True))
    if _is_aligned(first) or not fits or any(map(_is_lazy, group)):
        return  # also where no one address suits all dtypes, or values are not the bytes alone
    nbytes = max(offset + _num_bytes_spanned(x) for offset, x in zip(offsets, group, strict=True))
    memory = allocate(nbytes, align_bytes(first.device), first.device).tensor
    for x, offset in zip(group, offsets, strict=True):
        span = memory[offset : offset + _num_bytes_spanned(x)]
        old = torch.empty(0, dtype=torch.uint8, device=x.device)
        span.copy_(old.set_(x.untyped_storage(), x.storage_offset() * x.itemsize, (len(span),), (1,)))
        x.data = span.view(x.dtype).as_strided(x.shape, x.stride())


def _has_memory(x: Tensor) -> bool:
    """Whether the elements of ``x`` are at its address."""
    plain = x.layout == torch.strided and not is_traceable_wrapper_subclass(x)
    return plain and not (x.is_meta or x.is_quantized) and x.numel() > 0


def _is_in_order(x: Tensor) -> bool:
    # Contiguous ones are dense, and asking costs less than making a tensor of the same strides.
    is_dense = x.is_contiguous() or x.stride() == dense_strides(x)
    return is_dense and _is_aligned(x) and not _is_lazy(x)


def _is_aligned(x: Tensor) -> bool:
    return x.data_ptr() % align_bytes(x.device) == 0


def _is_lazy(x: Tensor) -> bool:
    """Whether ``x`` is the conjugate or the negative of the values in its memory."""
    return x.is_conj() or x.is_neg()


def _begin(x: Tensor) -> tuple[str, int]:
    return str(x.device), x.data_ptr()


def _offsets(group: Sequence[Tensor]) -> list[int]:
    return [x.data_ptr() - group[0].data_ptr() for x in group]


def _num_bytes_spanned(x: Tensor) -> int:
    """From the first element of ``x`` to its last."""
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return (last + 1) * x.itemsize
