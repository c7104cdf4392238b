"""The check of a collective accepts the right result, made here in the plainest way, and nothing else."""

import pytest
import torch

from instep.bench import collectives_rank
from instep.bench.collectives_rank import (
    CollectiveBuffers,
    default_names,
    fits,
    memory_bytes_per_s,
    obstacle,
)
from instep.bench.worlds import World
from tests.world import world

COLLECTIVES = [
    "all_reduce",
    "reduce",
    "broadcast",
    "all_gather",
    "gather",
    "reduce_scatter",
    "scatter",
    "all_to_all",
]


def perform(collective, ranks):
    """What ``collective`` does, with all ranks' buffers at hand."""
    xs = [case.x.clone() for case in ranks]
    parts = [list(x.chunk(len(ranks))) for x in xs]
    results = {
        "all_reduce": lambda r: sum(xs),
        "reduce": lambda r: sum(xs),
        "broadcast": lambda r: xs[0],
        "all_gather": lambda r: torch.cat(xs),
        "gather": lambda r: torch.cat(xs),
        "reduce_scatter": lambda r: sum(parts[s][r] for s in range(len(ranks))),
        "scatter": lambda r: parts[0][r],
        "all_to_all": lambda r: torch.cat([parts[s][r] for s in range(len(ranks))]),
    }
    for case in ranks:
        case.out.copy_(results[collective](case.rank))


def filled_with(collective, monkeypatch):
    """Three ranks' buffers with their numbers, of messages that are checked in several blocks."""
    monkeypatch.setattr(collectives_rank, "BLOCK", 16)
    ranks = [CollectiveBuffers(collective, 1000, rank, 3) for rank in range(3)]
    for case in ranks:
        case.fill()
    return ranks


@pytest.fixture(params=COLLECTIVES)
def filled(request, monkeypatch):
    return filled_with(request.param, monkeypatch)


def test_the_right_result_has_no_wrong_element(filled):
    perform(filled[0].collective, filled)
    assert [case.wrong() for case in filled] == [0, 0, 0]


def test_one_wrong_element_is_counted(filled):
    perform(filled[0].collective, filled)
    filled[0].out[5] += 1
    assert filled[0].wrong() == 1


def test_doing_nothing_is_wrong(filled):
    case = filled[1 if filled[0].collective == "broadcast" else 0]  # its root has the result already
    assert case.wrong() > case.out.numel() / 2


@pytest.mark.parametrize("collective", ["all_gather", "gather", "all_to_all"])
def test_parts_in_another_order_are_wrong(collective, monkeypatch):
    ranks = filled_with(collective, monkeypatch)
    perform(collective, ranks)
    first, second = ranks[0].out_parts[:2]
    swapped = first.clone()
    first.copy_(second)
    second.copy_(swapped)
    assert ranks[0].wrong() > 0


def test_a_case_that_was_cleared_stays_finite_however_often_it_is_summed(filled):
    for case in filled:
        case.clear()
    for _ in range(200):
        perform(filled[0].collective, filled)
    assert all(not case.out.any() for case in filled)


def test_sizes_and_counts_are_those_of_nccl_tests():
    assert (
        CollectiveBuffers("all_reduce", 1000, 0, 2).size_bytes,
        CollectiveBuffers("all_reduce", 1000, 0, 2).count,
    ) == (1000, 250)
    gathered = CollectiveBuffers("all_gather", 1000, 0, 2)
    assert (gathered.size_bytes, gathered.count) == (1000, 125)
    assert (gathered.x.numel(), gathered.out.numel()) == (125, 250)
    scattered = CollectiveBuffers("reduce_scatter", 1000, 0, 2)
    assert (scattered.x.numel(), scattered.out.numel()) == (250, 125)


def test_hosts_share_no_memory():
    assert default_names("broadcast", hosts=True) == ["gloo", "naive", "tree", "scatter_allgather"]
    assert {"shm", "shm-in-place"} <= set(default_names("broadcast"))
    assert obstacle("shm", "broadcast", 2, hosts=True) == "it is for ranks of one host"


@world(2, by="process")
def test_all_ranks_know_how_fast_they_copy_together(mesh):
    ours = World()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collectives_rank, "array_bytes", lambda num_ranks: 1 << 20)
        found = memory_bytes_per_s(ours)
    assert 0 < found == ours.slowest(found) < 1e15


def test_what_needs_no_buffers_on_top_of_its_message_fits_where_an_algorithm_does_not(monkeypatch):
    monkeypatch.setattr(collectives_rank, "available_bytes", lambda: 10e9)
    size = 10**9  # of 6e9 bytes that may be taken
    assert fits("all_reduce", ["gloo", "shm", "shm-in-place"], size, 2)  # 2 x 2
    assert not fits("all_reduce", ["gloo", "shm", "shm-in-place", "ring"], size, 4)  # 4 x 3
    assert not fits("all_reduce", ["shm-in-place", "ring"], size, 2)  # 2 x (2 + 2)
