"""Sampled blocks: each has its turn, no bit escapes them, and nothing but they is read."""

from __future__ import annotations

import zlib

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from instep.ordered.blocks import BLOCK_ELEMENTS
from instep.ordered.hash import Entry, sampled_blocks

B = BLOCK_ELEMENTS


def state(*lengths: int) -> list[Entry]:
    return [(f"p{i}", torch.arange(n, dtype=torch.float32)) for i, n in enumerate(lengths)]


LENGTHS = st.lists(st.sampled_from([0, 1, 5, B - 1, B, B + 1, 3 * B]), max_size=6)


@given(LENGTHS, st.integers(1, 9), st.integers(0, 100))
def test_each_block_has_its_turn_once_in_so_many_steps(lengths: list[int], every: int, step: int) -> None:
    entries = state(*lengths)
    turns = [(name, b) for t in range(every) for name, b, _ in sampled_blocks(entries, step + t, every)]
    assert sorted(turns) == [(name, b) for name, x in entries for b in range(-(-len(x) // B))]


@given(LENGTHS, st.integers(1, 9), st.integers(0, 100))
def test_blocks_are_numbered_through_all_entries(lengths: list[int], every: int, step: int) -> None:
    entries = state(*lengths)
    numbered = [(name, b) for name, x in entries for b in range(-(-len(x) // B))]
    expected = [block for number, block in enumerate(numbered) if (number + step) % every == 0]
    assert [(name, b) for name, b, _ in sampled_blocks(entries, step, every)] == expected


@pytest.mark.parametrize("at", [0, 1, 5 * B + 3])
def test_one_ulp_in_one_element_is_found_within_a_round_and_named(at: int) -> None:
    every, entries = 7, [("a", torch.randn(3, B)), ("b", torch.randn(6 * B)), ("c", torch.randn(9))]
    changed = [(name, x.clone()) for name, x in entries]
    x = changed[1][1]
    x[at] = x[at].nextafter(torch.tensor(torch.inf))
    odd = {
        (name, block)
        for step in range(40, 40 + every)
        for (name, block, ours), (_, _, theirs) in zip(
            sampled_blocks(entries, step, every), sampled_blocks(changed, step, every), strict=True
        )
        if ours != theirs
    }
    assert odd == {("b", at // B)}


def test_the_digest_is_the_crc_of_the_block_s_bytes() -> None:
    x = torch.randn(2 * B + 3)
    expected = [f"{zlib.crc32(part.numpy().tobytes()):08x}" for part in x.split(B)]
    assert sampled_blocks([("x", x)], 0, 1) == [("x", b, crc) for b, crc in enumerate(expected)]


@pytest.mark.parametrize(
    "other",
    [
        lambda x: x.t().contiguous().t(),
        lambda x: torch.stack([x, x], dim=-1)[..., 0],
        lambda x: torch.cat([x, x], dim=1)[:, : x.shape[1]],
        lambda x: x.t().contiguous().t().requires_grad_(),
    ],
    ids=["transposed", "every other", "part of rows", "a parameter"],
)
def test_where_a_tensor_lies_in_memory_does_not_count(other) -> None:
    x = torch.randn(90, 1050)
    for step in range(5):
        assert sampled_blocks([("x", other(x))], step, 5) == sampled_blocks([("x", x)], step, 5)


def test_a_block_of_a_large_row_in_odd_memory_is_read_alone() -> None:
    x = torch.randn(4 * B, 2, 3).permute(2, 1, 0)  # 3 rows of 2 rows of 4 blocks, none of them contiguous
    assert not x[0][0].is_contiguous()
    assert sampled_blocks([("x", x)], 1, 4) == sampled_blocks([("x", x.contiguous())], 1, 4)


def test_all_nans_count_as_one() -> None:
    quiet = torch.tensor([1.0, torch.nan, torch.inf, -torch.inf])
    other = quiet.clone()
    other.view(torch.int32)[1] += 1
    assert sampled_blocks([("x", quiet)], 0, 1) == sampled_blocks([("x", other)], 0, 1)
    assert sampled_blocks([("x", quiet)], 0, 1) != sampled_blocks([("x", quiet.nan_to_num(1.0))], 0, 1)


def test_a_tensor_without_elements_and_a_scalar_have_their_places() -> None:
    entries: list[tuple[str, Tensor]] = [("empty", torch.empty(0, 3)), ("one", torch.tensor(3.0))]
    assert [(name, b) for name, b, _ in sampled_blocks(entries, 0, 1)] == [("one", 0)]


def test_a_round_of_no_steps_is_refused() -> None:
    with pytest.raises(ValueError, match="expected every >= 1, got 0"):
        sampled_blocks([], 0, 0)
