"""Arithmetic of sharding: which unit, which slice, which round, and which rank has which micro-batch."""

from __future__ import annotations

import math
from collections import Counter
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from instep.mesh.mesh import Mesh
from instep.shard.fully import fully_shard
from instep.shard.layout import FlatLayout, cut, keep_whole
from instep.shard.partition import partition
from instep.shard.round_plan import plan_rounds
from tests.parity import filled, numbers
from tests.world import world

BLOCK = 4096
LENGTHS = st.lists(
    st.one_of(st.integers(0, 70), st.integers(0, 5000), st.integers(4000, 40_000)), min_size=1, max_size=12
)
RANKS = st.integers(1, 9)
GRANULES = st.sampled_from([16, 32, 64, 256])


def whole(lengths: list[int], num_ranks: int, granule: int) -> FlatLayout:
    return keep_whole(lengths, num_ranks, granule, lengths)


def spans(layout: FlatLayout) -> list[tuple[int, int]]:
    """Where the parameters with elements lie in the flat space, in its order."""
    both = zip(layout.offsets, layout.lengths, strict=True)
    return sorted((offset, offset + length) for offset, length in both if length)


def assert_each_element_has_one_owner(layout: FlatLayout) -> None:
    owned: Counter[tuple[int, int]] = Counter()
    empty: Counter[int] = Counter()
    for rank in range(layout.num_ranks):
        begin, end = rank * layout.slice_length, (rank + 1) * layout.slice_length
        for piece in layout.pieces(rank):
            assert begin <= piece.offset and piece.offset + piece.last - piece.first <= end
            assert piece.offset == layout.offsets[piece.parameter] + piece.first
            owned.update((piece.parameter, i) for i in range(piece.first, piece.last))
            empty[piece.parameter] += piece.first == piece.last
    assert set(owned) == {(i, k) for i, length in enumerate(layout.lengths) for k in range(length)}
    assert set(owned.values()) <= {1}
    assert [empty[i] for i, length in enumerate(layout.lengths) if length == 0] == [1] * layout.lengths.count(
        0
    )


@given(LENGTHS, RANKS, GRANULES)
def test_every_element_is_in_exactly_one_piece(lengths: list[int], ranks: int, granule: int) -> None:
    lengths = [min(length, 9000) for length in lengths[:5]]
    for place in (cut, whole):
        assert_each_element_has_one_owner(place(lengths, ranks, granule))


@given(LENGTHS, RANKS, GRANULES)
def test_no_parameter_lies_over_another_and_all_begin_aligned(
    lengths: list[int], ranks: int, granule: int
) -> None:
    for place in (cut, whole):
        layout = place(lengths, ranks, granule)
        found = spans(layout)
        assert len(found) == sum(length > 0 for length in lengths)
        assert all(end <= begin for (_, end), (begin, _) in pairwise(found))
        assert all(begin % granule == 0 for begin, _ in found)
        assert not found or found[-1][1] <= layout.num_elements


@given(LENGTHS, RANKS, GRANULES)
def test_pieces_begin_and_end_on_blocks_of_their_parameter(
    lengths: list[int], ranks: int, granule: int
) -> None:
    for place in (cut, whole):
        layout = place(lengths, ranks, granule)
        for rank in range(ranks):
            for piece in layout.pieces(rank):
                assert piece.first % BLOCK == 0
                assert piece.last % BLOCK == 0 or piece.last == lengths[piece.parameter]


@given(LENGTHS, RANKS, GRANULES)
def test_padding_is_bounded(lengths: list[int], ranks: int, granule: int) -> None:
    layout = cut(lengths, ranks, granule)
    assert layout.num_elements <= 2 * sum(lengths) + granule * len(lengths) + BLOCK * (ranks + 1)
    large = [length for length in lengths if length >= BLOCK]
    assert cut(large, ranks, granule).num_elements <= sum(large) + BLOCK * (len(large) + ranks)


def test_small_parameters_fill_the_room_that_a_large_one_leaves() -> None:
    layout = cut([BLOCK + 10, 100, 300, 2 * BLOCK, 4000, 5, BLOCK + 1, 4000], 1, 16)
    assert layout.offsets == (0, 4112, 4224, 8192, 16384, 20384, 20480, 24592)
    assert layout.num_elements == 7 * BLOCK


def test_the_largest_parameter_is_placed_first_and_loads_are_even() -> None:
    layout = whole([5, 5, 4, 4, 3, 3, 3], 3, 16)
    loads = [sum(piece.last for piece in layout.pieces(rank)) for rank in range(3)]
    assert loads == [11, 8, 8]  # by hand: 5 | 5 | 4, then 4 | 3 | 3 to the least of each time, then 3


def named(module: nn.Module, units: list[nn.Module] | None = None) -> dict[str, list[str]]:
    return {members.name: list(members.names) for members in partition(module, units)}


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(2, 2, bias=False)
        self.encoder = nn.Identity()
        self.encoder.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)) for _ in range(2)
        )
        self.tail = nn.Sequential(nn.ReLU(), nn.Linear(2, 2, bias=False))


def test_entries_of_the_outermost_lists_are_units_and_the_rest_is_the_root() -> None:
    assert named(Mixed()) == {
        "": ["stem.weight"],
        "encoder.layers.0": ["encoder.layers.0.0.weight", "encoder.layers.0.1.weight"],
        "encoder.layers.1": ["encoder.layers.1.0.weight", "encoder.layers.1.1.weight"],
        "tail.1": ["tail.1.weight"],
    }


def test_what_two_units_use_is_the_roots() -> None:
    module = Mixed()
    module.encoder.layers[1][0].weight = module.encoder.layers[0][0].weight
    assert named(module)[""] == ["stem.weight", "encoder.layers.0.0.weight"]
    assert named(module)["encoder.layers.1"] == ["encoder.layers.1.1.weight"]


def test_units_that_are_given_replace_the_lists_and_the_innermost_one_counts() -> None:
    module = Mixed()
    assert named(module, [module.encoder, module.encoder.layers[1]]) == {
        "": ["stem.weight", "tail.1.weight"],
        "encoder": ["encoder.layers.0.0.weight", "encoder.layers.0.1.weight"],
        "encoder.layers.1": ["encoder.layers.1.0.weight", "encoder.layers.1.1.weight"],
    }
    assert named(module, []) == {"": [name for name, _ in module.named_parameters()]}


def test_a_unit_that_is_no_part_of_the_module_is_refused() -> None:
    module = Mixed()
    with pytest.raises(ValueError, match=r"units\[1\], a Linear: expected a submodule"):
        partition(module, [module.stem, nn.Linear(1, 1)])
    with pytest.raises(ValueError, match=r"units\[0\], a ModuleList: expected .* with a forward"):
        partition(module, [module.encoder.layers])


def test_kinds_are_apart_and_whole_numbers_are_nobodys() -> None:
    module = nn.Module()
    module.a = nn.Parameter(torch.zeros(2))
    module.b = nn.Parameter(torch.zeros(2), requires_grad=False)
    module.c = nn.Parameter(torch.zeros(2, dtype=torch.float64))
    module.d = nn.Parameter(torch.zeros(2, dtype=torch.int64), requires_grad=False)
    module.e = nn.Parameter(torch.zeros(2))
    assert [unit.names for unit in partition(module)] == [("a", "e"), ("b",), ("c",)]


def of_tree(lo: int, hi: int) -> str:
    """The sum over leaves lo to hi, in brackets, by the definition of the tree."""
    if hi - lo == 1:
        return str(lo)
    half = 2 ** (math.ceil(math.log2(hi - lo)) - 1)
    return f"({of_tree(lo, lo + half)} {of_tree(lo + half, hi)})"


def of_rounds(num_leaves: int, num_ranks: int) -> str:
    kept: list[str] = []
    leaves = iter(range(num_leaves))
    for turn in plan_rounds(num_leaves, num_ranks):
        values = kept + [str(next(leaves)) for _ in turn.senders]
        for plan in turn.sums:
            for left, right in plan.adds:
                values[left] = f"({values[left]} {values[right]})"
        kept = [values[plan.root] for plan in turn.sums]
    (root,) = kept
    assert next(leaves, None) is None
    return root


@given(st.integers(1, 70), st.integers(1, 9))
def test_rounds_add_in_the_order_of_the_tree(num_leaves: int, num_ranks: int) -> None:
    assert of_rounds(num_leaves, num_ranks) == of_tree(0, num_leaves)
    assert len(plan_rounds(num_leaves, num_ranks)) == math.ceil(num_leaves / num_ranks)


@given(st.integers(0, 7), st.integers(0, 4))
def test_powers_of_two_keep_as_many_sums_as_a_binary_counter_has_digits(leaves: int, ranks: int) -> None:
    digits = max(leaves - ranks, 1)  # the last round ends with one carry
    assert max(len(x.sums) for x in plan_rounds(2**leaves, 2**ranks)) == digits


@world(2)
@pytest.mark.parametrize("stage", [2, 3])
def test_a_rank_has_a_slice_of_the_gradients_and_staging_for_two_units(mesh: Mesh, stage: int) -> None:
    width, depth, num_leaves = 128, 6, 8
    model = fully_shard(filled(nn.Sequential(*[nn.Linear(width, width) for _ in range(depth)])), mesh, stage)
    layers = model.sharding.reducer.buckets
    for micro_batch in model.micro_batches(num_leaves):
        model(numbers(4, width, key=str(micro_batch.index))).square().mean().backward()
        reducer = model.sharding.reducer
        waiting = [n for n, p in zip(reducer.names, reducer.parameters, strict=True) if p.grad is not None]
        assert waiting == ["0.weight", "0.bias"]  # the last to come wait for the word that all went well
    kept = [x for bucket in layers for x in [*bucket.kept, bucket.reduced]]
    most = sum({x.data_ptr(): x.nbytes for x in kept}.values())
    blocks = 2 * math.ceil((width * width / 4096 + 1) / 2)  # of a layer: whole ones, and one for the bias
    layer = blocks * 4096 * 4
    sums = int(math.log2(num_leaves / 2))
    assert most == depth * layer // 2 * sums
    assert sum(x.nbytes for x in model.sharding.reducer._staging) == 2 * layer
    model.close()
