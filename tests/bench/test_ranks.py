"""What ranks of a benchmark check, how busy they are, and what they hold."""

from dataclasses import asdict

import pytest
import torch

from instep.bench import collectives_rank
from instep.bench.collectives_rank import CollectiveBuffers, fits
from instep.bench.steps_rank import MEGABYTE, busy_s, measure_memory, memory_columns, traffic
from instep.bench.variants import SHARDED_VARIANTS, Variant
from instep.bench.workloads import Workload
from instep.bench.worlds import World
from instep.events import Event
from instep.shm.segment import available
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


@pytest.fixture(params=COLLECTIVES)
def filled(request, monkeypatch):
    """Three ranks' buffers with their numbers, of messages that are checked in several blocks."""
    monkeypatch.setattr(collectives_rank, "BLOCK", 16)
    ranks = [CollectiveBuffers(request.param, 1000, rank, 3) for rank in range(3)]
    for case in ranks:
        case.fill()
    return ranks


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


def test_what_needs_no_buffers_on_top_of_its_message_fits_where_an_algorithm_does_not(monkeypatch):
    monkeypatch.setattr(collectives_rank, "available_bytes", lambda: 10e9)
    size = 10**9  # of 6e9 bytes that may be taken
    assert fits("all_reduce", ["gloo", "shm", "shm-in-place"], size, 2)  # 2 x 2
    assert not fits("all_reduce", ["gloo", "shm", "shm-in-place", "ring"], size, 4)  # 4 x 3
    assert not fits("all_reduce", ["shm-in-place", "ring"], size, 2)  # 2 x (2 + 2)


def span(start, end, name="exchange", lane="communication"):
    return Event(0, lane, name, start * 10**9, end * 10**9)


def test_a_lane_is_busy_for_the_union_of_its_spans():
    assert busy_s([span(0, 2), span(1, 3), span(5, 6), span(5, 6)]) == 4


def test_traffic_is_read_from_the_link_and_no_other_interface(tmp_path):
    table = tmp_path / "dev"
    table.write_text(
        "Inter-|   Receive                    |  Transmit\n"
        " face |bytes    packets errs drop ... |bytes    packets errs drop ...\n"
        "    lo:   11   1 0 0 0 0 0 0   12   1 0 0 0 0 0 0\n"
        "  eth0: 7000   9 0 0 0 0 0 0 5000   8 0 0 0 0 0 0\n"
    )
    assert traffic(table) == (5000, 7000)
    assert traffic(table, "eth1") == (0, 0)


# Slices end on blocks of 4,096 elements, which has to be little of a unit.
STEPPED = Workload("stepped", 2_000_000, batch=1, what="tiny", tokens=8, optimizer="adamw")


SHARED = pytest.mark.skipif(not available(), reason="this platform has no backend shm")
SHARES = {  # of 4 bytes per parameter, on two ranks: weights, gradients, moments
    "stage1": (1, 1, 1),
    "stage2": (1, 0.5, 1),
    "stage3": (0.5, 0.5, 1),
}


@pytest.mark.slow
@SHARED
@pytest.mark.parametrize("strategy", SHARES)
@world(2, by="process")
def test_who_shards_holds_what_the_formula_of_its_stage_says(mesh, strategy):
    one = Variant(strategy, "shm")
    assert one in SHARDED_VARIANTS
    found = measure_memory(World(), {"workload": asdict(STEPPED), "variant": asdict(one)})
    shares = dict(zip(("parameters", "gradients", "optimizer"), SHARES[strategy], strict=True))
    for purpose, share in shares.items():
        expected = pytest.approx(share * STEPPED.gradient_bytes, rel=0.05)
        assert found["held"][purpose] == expected, purpose
    said = memory_columns([found, found], STEPPED, one)
    assert said["state(MB)"] == pytest.approx(said["formula(MB)"], rel=0.05)
    assert said["formula(MB)"] * MEGABYTE == pytest.approx(sum(shares.values()) * STEPPED.gradient_bytes)
