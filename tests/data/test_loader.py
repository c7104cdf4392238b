"""Micro-batches are consecutive runs of the stream, whoever asks for them."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from instep.data.loader import micro_batch_indices, next_tokens
from instep.data.order import sample_at


@settings(deadline=None, max_examples=50)
@given(num_samples=st.integers(1, 100), num_leaves=st.integers(1, 6), micro_size=st.integers(1, 5))
def test_the_leaves_of_the_steps_are_the_stream_in_order(
    num_samples: int, num_leaves: int, micro_size: int
) -> None:
    dealt = [
        sample
        for step in range(3)
        for leaf in range(num_leaves)
        for sample in micro_batch_indices(
            num_samples, step=step, leaf=leaf, num_leaves=num_leaves, micro_size=micro_size, seed=1
        )
    ]
    assert dealt == [sample_at(p, num_samples, 1) for p in range(3 * num_leaves * micro_size)]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"leaf": 4}, r"0 <= leaf < num_leaves\(4\), got 4"),
        ({"leaf": -1}, "got -1: count leaves from 0"),
        ({"step": -1}, "step >= 0, got -1"),
        ({"micro_size": 0}, "micro_size >= 1, got 0"),
    ],
)
def test_a_place_outside_the_step_is_refused(wrong: dict[str, int], message: str) -> None:
    place = {"step": 0, "leaf": 0, "num_leaves": 4, "micro_size": 2, "seed": 0} | wrong
    with pytest.raises(ValueError, match=message):
        micro_batch_indices(10, **place)


@pytest.mark.parametrize("batch", [1, 2, 3])
def test_targets_are_the_next_tokens_in_memory_of_their_own(batch: int) -> None:
    windows = torch.randint(256, (batch, 9))
    inputs, targets = next_tokens(windows)
    assert torch.equal(inputs, windows[:, :8])
    assert torch.equal(targets, windows[:, 1:])
    for half in (inputs, targets):
        assert half.is_contiguous()
        assert half.data_ptr() % 64 == 0
        assert half.untyped_storage().data_ptr() != windows.untyped_storage().data_ptr()


@pytest.mark.parametrize("shape", [(9,), (2, 1), (2, 3, 4)])
def test_windows_of_another_shape_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"expected windows of shape \(B, T \+ 1\)"):
        next_tokens(torch.zeros(shape, dtype=torch.int64))
