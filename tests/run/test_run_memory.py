"""What all ranks hear of the memory of each, and the line that people read."""

import re

import pytest

from instep.run.memory_usage import everyone, run_memory, words
from tests.run.text_training import tiny, trained
from tests.world import world


@world(2, by="process")
def test_every_rank_hears_of_all_and_the_host_is_more_than_one_and_less_than_all(mesh):
    group = mesh.world.group
    found = everyone(group, {"parameters": 100 + group.rank})
    assert [row["rank"] for row in found["ranks"]] == [0, 1]
    assert [row["parameters"] for row in found["ranks"]] == [100, 101]
    (host,) = found["hosts"]
    assert host["ranks"] == [0, 1]
    peaks = [row["resident_peak"] for row in found["ranks"]]
    if None not in peaks:
        assert max(peaks) < host["resident_peak"] < sum(peaks)  # both have torch loaded, once


@world(2)
def test_a_run_tells_its_memory_and_is_none_the_worse_for_it(mesh, data):
    each, undisturbed = trained(tiny(data), mesh, 1), trained(tiny(data), mesh, 2)
    training = each.training
    before = training.state_sha256()
    memory = run_memory(training)
    assert training.state_sha256() == before
    assert all(p.grad is None for p in each.module.parameters())
    size = 4 * sum(p.numel() for p in each.module.parameters())
    for row in memory["ranks"]:
        assert row["parameters"] == size
        assert row["gradients"] == pytest.approx(size, rel=0.05)
        assert row["optimizer"] == pytest.approx(2 * size, rel=0.05)
    assert "MB of state per rank" in words(memory)
    each.step()  # goes on as if nothing had been
    assert training.state_sha256() == undisturbed.training.state_sha256()
    for of_both in (each, undisturbed):
        of_both.close()


ROW = {"parameters": 4_000_000, "gradients": 4_000_000, "optimizer": 8_000_000, "buffers": 0}
ROW |= {"scratch": 0, "resident_peak": 310_000_000}
FORMULA = {"bytes_per_parameter": 16, "parameters": 4_000_000, "gradients": 4_000_000, "optimizer": 8_000_000}


def told(*rows, hosts=(512_000_000,)):
    return {"ranks": rows, "hosts": [{"resident_peak": each} for each in hosts], "formula": FORMULA}


def test_the_line_says_state_and_what_is_resident():
    assert words(told(ROW, ROW)) == (
        "16.0 MB of state per rank (16 bytes per parameter, as the formula says); 310 MB resident, "
        "512 MB for all ranks of the host"
    )


def test_ranks_that_differ_are_told_by_the_one_that_has_most():
    other = {**ROW, "optimizer": 0, "scratch": 3_000_000}
    assert words(told(ROW, other)).startswith("up to 16.0 MB of state per rank (16 bytes per parameter, as")
    assert "+ 3.00 MB scratch;" in words(told(ROW, other))


def test_the_line_does_not_say_that_the_formula_says_what_it_does_not():
    half = {**ROW, "optimizer": 4_000_000}
    assert "(12.0 bytes per parameter; the formula says 16)" in words(told(half, half))


def test_the_largest_of_several_hosts_is_told():
    assert words(told(ROW, ROW, hosts=(5e8, 6e8))).endswith("600 MB for all ranks of a host")


def test_one_rank_is_its_host():
    assert words(told(ROW)).endswith("; 310 MB resident")


def test_what_nobody_knows_is_left_out():
    row = {**ROW, "resident_peak": None}
    assert re.fullmatch(r"16\.0 MB of state per rank \([^)]*\)", words(told(row, row, hosts=(None,))))
