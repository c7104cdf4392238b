"""The order of turns, what is read off a variant after each of its steps, and what it holds."""

from collections import Counter
from dataclasses import asdict

import pytest

from instep.bench.steps_rank import MEGABYTE, busy_s, measure_memory, memory_columns, order, traffic
from instep.bench.variants import DDP, NONE, SHARDED_VARIANTS, Variant
from instep.bench.workloads import Workload
from instep.bench.worlds import World
from instep.events import Event
from instep.shm.segment import available
from tests.world import world

NAMES = ["a", "b", "c", "d"]


def span(start, end, name="exchange", lane="communication"):
    return Event(0, lane, name, start * 10**9, end * 10**9)


def test_everybody_begins_and_ends_equally_often():
    rounds = [order(NAMES, number) for number in range(2 * len(NAMES))]
    assert (
        Counter(names[0] for names in rounds)
        == Counter(names[-1] for names in rounds)
        == dict.fromkeys(NAMES, 2)
    )


def test_nobody_always_follows_the_same_one():
    before = {
        names[names.index("b") - 1] for number in range(8) if (names := order(NAMES, number)).index("b") > 0
    }
    assert before == {"a", "c"}


def test_a_lane_is_busy_for_the_union_of_its_spans():
    assert busy_s([span(0, 2), span(1, 3), span(5, 6), span(5, 6)]) == 4


def test_waiting_and_other_lanes_are_not_busy():
    assert busy_s([span(0, 9, "queued"), span(0, 9, "wait"), span(0, 9, lane="compute"), span(3, 4)]) == 1


def test_a_variant_without_spans_is_not_busy():
    assert busy_s([]) == 0


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


TINY = Workload("tiny", 200_000, batch=2, what="tiny", tokens=8)
# Slices end on blocks of 4,096 elements, which has to be little of a unit.
STEPPED = Workload("stepped", 2_000_000, batch=1, what="tiny", tokens=8, optimizer="adamw")


@pytest.mark.slow
@world(2, by="process")
def test_variants_hold_two_models_and_what_their_exchange_needs(mesh):
    size = TINY.gradient_bytes
    scratch = {NONE: 0, Variant("bucketed", "gloo"): 1, Variant("server", "gloo"): 1}
    for one, copies in scratch.items():
        found = measure_memory(World(), {"workload": asdict(TINY), "variant": asdict(one)})
        assert found["held"]["parameters"] == pytest.approx(size, rel=0.01)
        assert found["held"]["gradients"] == pytest.approx(size, rel=0.01)
        assert found["held"]["optimizer"] == 0
        assert found["held"]["scratch"] == pytest.approx(copies * size, rel=0.01)
        assert found["activations"] > 0
    ddp = measure_memory(World(), {"workload": asdict(TINY), "variant": asdict(DDP)})
    assert ddp["held"]["parameters"] + ddp["held"]["gradients"] == pytest.approx(2 * size, rel=0.01)
    assert ddp["activations"] == found["activations"]


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


@world(2, by="process")
def test_threads_keep_the_activations_of_all_ranks_on_one(mesh):
    alone = measure_memory(World(), {"workload": asdict(TINY), "variant": asdict(NONE)})
    found = measure_memory(World(), {"workload": asdict(TINY), "variant": asdict(Variant("threads"))})
    if mesh.rank == 0:
        assert found["activations"] == pytest.approx(2 * alone["activations"], rel=0.01)
    else:
        assert found["held"] is found["activations"] is None
