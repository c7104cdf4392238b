"""Pairs keep inputs and targets together."""

import pytest
import torch

from instep.data.pairs import Pairs


def test_a_batch_holds_the_rows_asked_for_in_fresh_memory() -> None:
    pairs = Pairs(torch.randn(9, 5), torch.arange(9))
    inputs, targets = pairs.batch([8, 2, 2])
    assert len(pairs) == 9
    assert torch.equal(inputs, torch.stack([pairs.inputs[8], pairs.inputs[2], pairs.inputs[2]]))
    assert targets.tolist() == [8, 2, 2]
    assert inputs.data_ptr() % 64 == targets.data_ptr() % 64 == 0


def test_unequal_lengths_are_refused_with_both_numbers() -> None:
    with pytest.raises(ValueError, match="got 9 inputs and 8 targets"):
        Pairs(torch.randn(9, 5), torch.arange(8))
