"""What contestants hold, counted where each is by itself."""

from dataclasses import asdict

import pytest

from instep.bench.contestants import DDP, NONE, SHARDED, Contestant
from instep.bench.peak import MEGABYTE, columns, peak
from instep.bench.ranks import World
from instep.bench.settings import Setting
from instep.shm.futex import available
from tests.world import world

TINY = Setting("tiny", 200_000, batch=2, what="tiny", tokens=8)
# Slices end on blocks of 4,096 elements, which has to be little of a unit.
STEPPED = Setting("stepped", 2_000_000, batch=1, what="tiny", tokens=8, optimizer="adamw")


@world(2, by="process")
def test_contestants_hold_two_models_and_what_their_exchange_needs(mesh):
    size = TINY.gradient_bytes
    scratch = {NONE: 0, Contestant("bucketed", "gloo"): 1, Contestant("server", "gloo"): 1}
    for one, copies in scratch.items():
        found = peak(World(), {"setting": asdict(TINY), "contestant": asdict(one)})
        assert found["held"]["parameters"] == pytest.approx(size, rel=0.01)
        assert found["held"]["gradients"] == pytest.approx(size, rel=0.01)
        assert found["held"]["optimizer"] == 0
        assert found["held"]["scratch"] == pytest.approx(copies * size, rel=0.01)
        assert found["activations"] > 0
    ddp = peak(World(), {"setting": asdict(TINY), "contestant": asdict(DDP)})
    assert ddp["held"]["parameters"] + ddp["held"]["gradients"] == pytest.approx(2 * size, rel=0.01)
    assert ddp["activations"] == found["activations"]


SHARED = pytest.mark.skipif(not available(), reason="this platform has no backend shm")
SHARES = {  # of 4 bytes per parameter, on two ranks: weights, gradients, moments
    "stage1": (1, 1, 1),
    "stage1-one-copy": (0.5, 1, 1),
    "stage2": (1, 0.5, 1),
    "stage2-one-copy": (0.5, 0.5, 1),
    "stage3": (0.5, 0.5, 1),
}


@SHARED
@pytest.mark.parametrize("strategy", SHARES)
@world(2, by="process")
def test_who_shards_holds_what_the_formula_of_its_stage_says(mesh, strategy):
    one = Contestant(strategy, "shm")
    assert one in SHARDED
    found = peak(World(), {"setting": asdict(STEPPED), "contestant": asdict(one)})
    shares = dict(zip(("parameters", "gradients", "optimizer"), SHARES[strategy], strict=True))
    for purpose, share in shares.items():
        expected = pytest.approx(share * STEPPED.gradient_bytes, rel=0.05)
        assert found["held"][purpose] == expected, purpose
    said = columns([found, found], STEPPED, one)
    assert said["state(MB)"] == pytest.approx(said["formula(MB)"], rel=0.05)
    assert said["formula(MB)"] * MEGABYTE == pytest.approx(sum(shares.values()) * STEPPED.gradient_bytes)


@world(2, by="process")
def test_threads_keep_the_activations_of_all_ranks_on_one(mesh):
    alone = peak(World(), {"setting": asdict(TINY), "contestant": asdict(NONE)})
    found = peak(World(), {"setting": asdict(TINY), "contestant": asdict(Contestant("threads"))})
    if mesh.rank == 0:
        assert found["activations"] == pytest.approx(2 * alone["activations"], rel=0.01)
    else:
        assert found["held"] is found["activations"] is None
