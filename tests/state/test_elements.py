"""Ranges of elements of a tensor, in logical order, whatever its order in memory."""

from __future__ import annotations

import pytest
import torch

from instep.state.shards import elements, put_elements


@pytest.mark.parametrize("start", [0, 1, 5, 23])
@pytest.mark.parametrize("stop", [24, 25, 60, 119, 120])
@pytest.mark.parametrize(
    "order",
    [(0, 1, 2, 3), (3, 2, 1, 0), (0, 2, 3, 1), (2, 0, 1, 3)],
    ids=lambda order: "".join(map(str, order)),
)
def test_a_range_of_elements_in_logical_order_is_read_and_written_in_any_order_of_memory(
    order: tuple[int, ...], start: int, stop: int
) -> None:
    x = torch.arange(120.0).view(2, 3, 4, 5)
    back = sorted(range(4), key=order.__getitem__)
    y = x.permute(order).contiguous().permute(back)
    assert torch.equal(elements(y, start, stop), torch.arange(float(start), stop))
    put_elements(y, start, -torch.arange(float(start), stop))
    assert torch.equal(y.flatten(), torch.where((x >= start) & (x < stop), -x, x).flatten())
