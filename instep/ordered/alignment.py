"""Weights where kernels take one path: on an aligned address, and without gaps.

Some matrix kernels choose another code path, and so other bits, for an operand that is not on a vector
boundary or whose rows lie apart. What torch allocates is aligned; but a weight that comes from a mapped file
by ``load_state_dict(assign=True)`` begins wherever the file's header ends, and a slice such as ``w[:, ::2]``
has gaps. In the flat memory of ``fully_shard`` and ``ShardedOptimizer`` weights are aligned and dense. So
they are made to be in memory of their own too, or the bits would depend on the file and on the stage.

What shares elements moves together:

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
from instep.ordered.homes import home


def align(tensors: Iterable[Tensor]) -> None:
    """Give each of ``tensors`` that begins off its alignment, or has gaps, memory with neither.

    They stay the same objects with the same values, and only ``.data`` is another, so optimizers that were
    made before go on working. Dense strides are kept; gaps are closed, in the same order of dimensions. What
    shares elements shares them afterwards too, and keeps its strides; so does a buffer that is expanded.
    A lazy conjugate or negative (``x.conj()``), whose memory has other values than it shows, becomes plain,
    because kernels take another path for it too; one that shares elements cannot.
    Nothing is done to what is aligned, dense and plain, or in a home.

    Other tensors on the old memory, such as a flat base of all weights that is kept elsewhere, stay there.
    """
    mine = [x for x in tensors if _has_memory(x) and home(x) is None]
    if all(_is_in_order(x) for x in mine):
        return
    with torch.inference_mode(False), torch.no_grad():
        for group in sharing(mine):
            if len(group) == 1 and not _is_expanded_buffer(group[0]):
                _move_alone(group[0])
            elif not _begins_aligned(group[0]):
                _move_together(group)


def sharing(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Those of ``tensors`` that have memory, in groups that share elements, each in the order of addresses.

    The left and the right columns of a matrix share none, though the ones begin before the others end.
    """
    stretches: list[list[Tensor]] = []
    end = ("", 0)
    for x in sorted(filter(_has_memory, tensors), key=_begin):
        if not stretches or _begin(x) >= end:
            stretches.append([])
        stretches[-1].append(x)
        end = max(end, _end(x))
    return [group for stretch in stretches for group in _sharing_within(stretch)]


def _sharing_within(stretch: Sequence[Tensor]) -> list[list[Tensor]]:
    """``sharing`` of tensors whose stretches of memory overlap, in the order of addresses.

    Each writes its number on a map of the memory; what it finds there before, it shares elements with.
    """
    if len(stretch) == 1:
        return [list(stretch)]
    offsets = [_begin(x)[1] - _begin(stretch[0])[1] for x in stretch]
    unit = math.gcd(*offsets, *(x.itemsize for x in stretch))  # bytes, of a place on the map
    length = max(begin + _num_bytes_spanned(x) for begin, x in zip(offsets, stretch, strict=True))
    on_map = torch.full((length // unit,), -1, dtype=torch.int32, device="cpu")
    group_of = list(range(len(stretch)))
    for i, (x, offset) in enumerate(zip(stretch, offsets, strict=True)):
        per_element = x.itemsize // unit
        # An expanded dimension counts once, because torch writes no element twice.
        sizes = [1 if stride == 0 else size for size, stride in zip(x.shape, x.stride(), strict=True)]
        strides = [stride * per_element for stride in x.stride()]
        places = on_map.as_strided((*sizes, per_element), (*strides, 1), offset // unit)
        met = {group_of[k] for k in places.unique().tolist() if k >= 0}
        group_of = [i if group in met else group for group in group_of]
        places.fill_(i)
    return [[x for x, own in zip(stretch, group_of, strict=True) if own == k] for k in sorted(set(group_of))]


def _move_alone(x: Tensor) -> None:
    if not _is_in_order(x):
        flat = allocate(x.nbytes, align_bytes(x.device), x.device).elements(x.dtype)
        x.data = flat.as_strided(x.shape, _dense_strides(x)).copy_(x)


def _move_together(group: Sequence[Tensor]) -> None:
    """``group``, in the order of addresses, moves so that its first one is aligned."""
    offsets = [_begin(x)[1] - _begin(group[0])[1] for x in group]
    fits = [offset % x.itemsize == 0 for offset, x in zip(offsets, group, strict=True)]
    if not all(fits) or any(map(_is_lazy, group)):
        return  # no one address suits their dtypes, or what they are is more than their bytes
    nbytes = max(offset + _num_bytes_spanned(x) for offset, x in zip(offsets, group, strict=True))
    memory = allocate(nbytes, align_bytes(group[0].device), group[0].device).tensor
    for x, offset in zip(group, offsets, strict=True):
        span = slice(offset, offset + _num_bytes_spanned(x))
        memory[span].copy_(_spanned(x))
        x.data = memory[span].view(x.dtype).as_strided(x.shape, x.stride())


def _has_memory(x: Tensor) -> bool:
    """Whether the address of ``x`` tells where its elements are."""
    plain = x.layout == torch.strided and not is_traceable_wrapper_subclass(x)
    return plain and not (x.is_meta or x.is_quantized) and x.numel() > 0


def _is_in_order(x: Tensor) -> bool:
    # Contiguous ones are dense, and asking costs less than making a tensor of the same strides.
    is_dense = x.is_contiguous() or x.stride() == _dense_strides(x)
    return is_dense and _begins_aligned(x) and not _is_lazy(x)


def _is_lazy(x: Tensor) -> bool:
    """Whether ``x`` is more than its bytes: the conjugate or the negative of what its memory holds."""
    return x.is_conj() or x.is_neg()


def _begins_aligned(x: Tensor) -> bool:
    return x.data_ptr() % align_bytes(x.device) == 0


def _dense_strides(x: Tensor) -> tuple[int, ...]:
    """The strides of ``x`` if it is dense, else those without gaps, in the same order of dimensions."""
    return torch.empty_like(x, device="meta").stride()


def _is_expanded_buffer(x: Tensor) -> bool:
    """Of a parameter, each element is stepped by itself."""
    return not isinstance(x, nn.Parameter) and x.nbytes > _num_bytes_spanned(x)


def _begin(x: Tensor) -> tuple[str, int]:
    return str(x.device), x.data_ptr()


def _end(x: Tensor) -> tuple[str, int]:
    device, begin = _begin(x)
    return device, begin + _num_bytes_spanned(x)


def _num_bytes_spanned(x: Tensor) -> int:
    """From the first element of ``x`` to its last."""
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return (last + 1) * x.itemsize


def _spanned(x: Tensor) -> Tensor:
    """The bytes from the first element of ``x`` to its last, gaps included."""
    flat = torch.empty(0, dtype=torch.uint8, device=x.device)
    begin = x.storage_offset() * x.itemsize
    return flat.set_(x.untyped_storage(), begin, (_num_bytes_spanned(x),), (1,))
