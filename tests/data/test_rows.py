"""Rows come as copies that begin at a 64-byte boundary, wherever they lay before."""

import pytest
import torch

from instep.data.text import take_rows


@pytest.mark.parametrize("indices", [[0], [3], [2, 3, 4], [6, 0, 6]])
def test_rows_are_aligned_copies_wherever_they_lay(indices: list[int]) -> None:
    source = torch.randn(7, 13)
    rows = take_rows(source, indices)
    assert torch.equal(rows, torch.stack([source[i] for i in indices]))
    assert rows.data_ptr() % 64 == 0
    before = source.clone()
    rows.zero_()
    assert torch.equal(source, before)


def test_no_rows_are_an_empty_batch() -> None:
    assert take_rows(torch.randn(7, 13), []).shape == (0, 13)


@pytest.mark.parametrize("index", [-1, 7])
def test_an_index_outside_is_named(index: int) -> None:
    with pytest.raises(IndexError, match=f"0 <= index < 7 samples, got {index}"):
        take_rows(torch.randn(7, 13), [0, index])
