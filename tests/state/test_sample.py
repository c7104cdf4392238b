"""Sampled blocks: each has its turn, no bit escapes them, and where a tensor lies does not count."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from instep.net.process_group import alone
from instep.reduce.blocks import BLOCK_ELEMENTS
from instep.state.hash import Sampled, SharedHash
from instep.state.shards import MODEL, Shard
from tests.state_oracle import Entry, sampled_blocks

B = BLOCK_ELEMENTS
LENGTHS = st.lists(st.sampled_from([0, 1, 5, B - 1, B, B + 1, 3 * B]), max_size=6)


def samples(entries: list[Entry], step: int, every: int) -> list[Sampled]:
    shards = [Shard.whole(MODEL + name, x, order=(i, "")) for i, (name, x) in enumerate(entries)]
    return SharedHash(alone()).samples(shards, step, every)


@given(LENGTHS, st.integers(1, 9), st.integers(0, 100))
def test_each_block_has_its_turn_once_in_so_many_steps(lengths: list[int], every: int, step: int) -> None:
    entries = [(f"p{i}", torch.arange(n, dtype=torch.float32)) for i, n in enumerate(lengths)]
    found = [samples(entries, step + t, every) for t in range(every)]
    assert found == [sampled_blocks(entries, step + t, every) for t in range(every)]
    turns = sorted((name, block) for its in found for name, block, _ in its)
    assert turns == [(name, b) for name, x in entries for b in range(-(-len(x) // B))]


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
            samples(entries, step, every), samples(changed, step, every), strict=True
        )
        if ours != theirs
    }
    assert odd == {("b", at // B)}


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
        assert samples([("x", other(x))], step, 5) == sampled_blocks([("x", x)], step, 5)


def test_all_nans_count_as_one() -> None:
    quiet = torch.tensor([1.0, torch.nan, torch.inf, -torch.inf])
    other = quiet.clone()
    other.view(torch.int32)[1] += 1
    assert samples([("x", quiet)], 0, 1) == samples([("x", other)], 0, 1)
    assert samples([("x", quiet)], 0, 1) != samples([("x", quiet.nan_to_num(1.0))], 0, 1)
