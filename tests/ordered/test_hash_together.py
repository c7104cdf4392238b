"""A state in parts has the hash and the samples that it has in one place, however the parts lie."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch

from instep.mesh.group import Group
from instep.mesh.mesh import Mesh
from instep.ordered.blocks import BLOCK_ELEMENTS
from instep.ordered.hash import Entry, own_digests, state_digests, whole_digests
from instep.ordered.parts import Part, Row, describe, own_runs, table
from instep.ordered.sample import own_samples, sampled_blocks, whole_samples
from tests.parity import numbers
from tests.world import world

EVERY = 5


def state() -> list[Entry]:
    """Weights and moments of all sizes, in the manifest's order; one with nans, one across its memory."""
    spoiled = numbers(2 * BLOCK_ELEMENTS, key="nan")
    spoiled[7] = -math.nan
    return [
        ("weight", numbers(70, 301, key="w").T),
        ("bias", numbers(301, key="b")),
        ("buffer", torch.arange(3)),
        ("exp_avg/weight", numbers(301, 70, key="m")),
        ("step/weight", torch.tensor(3.0)),
        ("exp_avg/bias", numbers(301, key="mb")),
        ("empty/bias", torch.zeros(0, 4)),
        ("nan/bias", spoiled),
    ]


def parts_of(rank: int, size: int, entries: Sequence[Entry]) -> list[Part]:
    """Moments cut on blocks as evenly as it goes, what is small on the last rank, the rest on all."""
    parts = []
    for place, (name, x) in enumerate(entries):
        num_blocks = math.ceil(x.numel() / BLOCK_ELEMENTS)
        if "/" not in name:
            parts.append(Part.whole(name, x, (place, "")))
        elif num_blocks < 2:
            parts += [Part.whole(name, x, (place, ""))] if rank == size - 1 else []
        else:
            edges = [i * num_blocks // size * BLOCK_ELEMENTS for i in range(size + 1)]
            first, last = edges[rank], min(edges[rank + 1], x.numel())
            if first < last:
                flat = x.reshape(-1)[first:last]
                parts.append(Part(name, tuple(x.shape), x.dtype, first, last, flat, (place, "")))
    return parts


def met(parts: Sequence[Part], group: Group) -> list[Row]:
    """The table of all ranks' parts."""
    return table(group.all_gather_bytes(describe(parts), "parts"), group.ranks)


def assert_hashed_as_one(mesh: Mesh) -> None:
    group, entries = mesh.world.group, state()
    parts = parts_of(group.rank, group.size, entries)
    rows = met(parts, group)
    assert [row.name for row in rows] == [name for name, _ in entries]
    told = group.all_gather_bytes(own_digests(parts, rows, group.rank), "digests")
    assert whole_digests(told, rows, 3) == state_digests(entries, 3)
    for step in range(EVERY):
        told = group.all_gather_bytes(own_samples(parts, rows, group.rank, step, EVERY), "samples")
        assert whole_samples(told, rows, step, EVERY) == sampled_blocks(entries, step, EVERY)


@world(1)
def test_one_rank_has_the_hash_and_the_samples(mesh: Mesh) -> None:
    assert_hashed_as_one(mesh)


@world(2)
def test_two_ranks_have_the_hash_and_the_samples_of_one(mesh: Mesh) -> None:
    assert_hashed_as_one(mesh)


@world(3)
def test_three_ranks_have_the_hash_and_the_samples_of_one(mesh: Mesh) -> None:
    assert_hashed_as_one(mesh)


@world(4)
def test_four_ranks_some_with_nothing_of_an_entry_have_the_hash_and_the_samples_of_one(mesh: Mesh) -> None:
    assert_hashed_as_one(mesh)


@world(2)
def test_a_block_that_all_hold_is_hashed_by_one_and_all_have_as_much_to_do(mesh: Mesh) -> None:
    group, x = mesh.world.group, numbers(8 * BLOCK_ELEMENTS, key="x")
    parts = [Part.whole("x", x)]
    rows = met(parts, group)
    runs = [(run.first, run.last) for _, run, _ in own_runs(parts, rows, group.rank)]
    assert runs == [(0, 4) if group.rank == 0 else (4, 8)]


@world(2)
def test_a_flipped_bit_of_any_rank_changes_the_hash_of_its_entry_alone(mesh: Mesh) -> None:
    group, entries = mesh.world.group, state()
    for culprit in range(group.size):
        parts = parts_of(group.rank, group.size, entries)
        rows = met(parts, group)
        if group.rank == culprit:
            (at,) = [i for i, part in enumerate(parts) if part.name == "exp_avg/weight"]
            spoiled_piece = parts[at].tensor.clone()
            spoiled_piece.view(torch.int32)[5] ^= 1
            parts[at] = parts[at]._replace(tensor=spoiled_piece)
        told = group.all_gather_bytes(own_digests(parts, rows, group.rank), "digests")
        (sound, before), (spoiled, after) = state_digests(entries, 3), whole_digests(told, rows, 3)
        assert spoiled != sound
        assert [name for name in before if before[name] != after[name]] == ["exp_avg/weight"]


def piece(
    first: int, last: int, *, length: int = 2 * BLOCK_ELEMENTS, dtype: torch.dtype = torch.float32
) -> Part:
    return Part("m", (length,), dtype, first, last, torch.zeros(last - first, dtype=dtype))


HALF, WHOLE = BLOCK_ELEMENTS, 2 * BLOCK_ELEMENTS


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ((piece(0, HALF), piece(0, HALF)), "up to its end at 8192, got 0 to 4096"),
        ((piece(0, HALF), piece(0, WHOLE)), "got 0 to 4096, 0 to 8192"),
        ((piece(0, 100), piece(100, WHOLE)), "at multiples of 4096"),
        (
            (piece(0, HALF), piece(HALF, WHOLE, dtype=torch.float64)),
            "torch.float64 of shape .8192. on rank 1",
        ),
        ((piece(0, HALF), piece(HALF, WHOLE, length=WHOLE + 1)), "shape .8193. on rank 1"),
    ],
    ids=["a gap", "an overlap", "an edge in a block", "another dtype", "another shape"],
)
@world(2)
def test_parts_that_are_not_those_of_one_state_are_refused_on_all_ranks(
    mesh: Mesh, parts: Sequence[Part], said: str
) -> None:
    with pytest.raises(ValueError, match=said) as caught:
        met([parts[mesh.rank]], mesh.world.group)
    assert "'m'" in str(caught.value)
