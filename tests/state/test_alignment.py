"""What is off its alignment or has gaps gets other memory; what is in order, or shared, stays as it is."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from instep.state.alignment import align, sharing
from tests.reduce.mapped import off_by


def numbers(*shape: int) -> Tensor:
    return torch.arange(1.0, 1 + torch.Size(shape).numel()).view(shape)


def places(*tensors: Tensor) -> list[tuple[int, tuple[int, ...]]]:
    return [(x.data_ptr(), x.stride()) for x in tensors]


IN_ORDER = {
    "contiguous": numbers(5, 3),
    "transposed": numbers(5, 3).t(),
    "channels last": numbers(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "a row of a matrix": numbers(4, 16)[2],
    "one element with a stride": numbers(8)[:2].as_strided((1,), (2,)),
    "nothing": torch.empty(0, 3),
    "without dimensions": torch.tensor(2.0),
    "on the meta device": torch.empty(3, 5, device="meta")[:, 1:],
}


@pytest.mark.parametrize("name", IN_ORDER)
def test_what_is_in_order_stays_where_it_is(name: str) -> None:
    x = nn.Parameter(IN_ORDER[name])
    before = places(x)
    align([x])
    assert places(x) == before


OUT_OF_ORDER = {
    "4 bytes off": (off_by(4, numbers(17, 33)), (33, 1)),
    "16 bytes off": (off_by(16, numbers(17, 33)), (33, 1)),
    "transposed, 44 bytes off": (off_by(44, numbers(17, 33)).t(), (1, 33)),
    "every other column": (numbers(4, 6)[:, ::2], (3, 1)),
    "every other row, transposed": (numbers(4, 6)[::2].t(), (1, 6)),
    "some columns, transposed": (numbers(4, 6)[:, :4].t(), (1, 4)),
    "an expanded parameter": (numbers(3).expand(2, 3), (3, 1)),
    "a conjugate": (off_by(8, numbers(4, 2).to(torch.complex64)).conj(), (2, 1)),
    "an aligned conjugate": (numbers(4, 2).to(torch.complex64).mul(1 + 1j).conj(), (2, 1)),
    "an aligned negative": (torch._neg_view(numbers(4, 2)), (2, 1)),
}


@pytest.mark.parametrize("name", OUT_OF_ORDER)
def test_what_is_not_is_aligned_and_dense_after_it(name: str) -> None:
    value, strides = OUT_OF_ORDER[name]
    x, expected = nn.Parameter(value), value.resolve_conj().tolist()
    align([x])
    assert x.data_ptr() % 64 == 0
    assert x.stride() == strides
    assert not (x.is_conj() or x.is_neg())
    assert x.tolist() == expected


def test_ties_stay_tied() -> None:
    base = off_by(4, numbers(6, 4))
    whole, again = nn.Parameter(base), nn.Parameter(base)
    transposed, columns, apart = base.t(), base[:, ::2], nn.Parameter(off_by(4, numbers(2)))
    align([apart, columns, whole, again, transposed])
    assert whole.data_ptr() % 64 == apart.data_ptr() % 64 == 0
    with torch.no_grad():
        whole[1, 2] = 70
    assert again.tolist() == whole.tolist() == transposed.t().tolist()
    assert columns.tolist() == whole[:, ::2].tolist()
    assert whole.data_ptr() != base.data_ptr()


def test_halves_of_one_matrix_part() -> None:
    fused = numbers(4, 6)
    left, right = nn.Parameter(fused[:, :3]), nn.Parameter(fused[:, 3:])
    align([left, right])
    assert left.is_contiguous()
    assert right.is_contiguous()
    assert (left.tolist(), right.tolist()) == (fused[:, :3].tolist(), fused[:, 3:].tolist())


def test_an_expanded_buffer_takes_no_more_memory() -> None:
    buffer = off_by(4, numbers(1)).expand(1 << 40, 3)
    align([buffer])
    assert places(buffer) == [(buffer.untyped_storage().data_ptr(), (0, 0))]
    assert buffer[5].tolist() == [1, 1, 1]


def test_sharing_is_of_elements_and_goes_by_others() -> None:
    base = numbers(4, 8)
    left, middle, right, even, other = base[:, :4], base[:, 3:6], base[:, 6:], base[:, 6::2], numbers(2)
    found = {frozenset(map(id, group)) for group in sharing([right, other, left, even, middle])}
    assert found == {frozenset(map(id, group)) for group in ([left, middle], [right, even], [other])}
