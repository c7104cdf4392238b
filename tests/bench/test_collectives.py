"""``instep bench collectives`` from the command line to its files, on two real ranks."""

import csv
import json

import pytest

from instep.bench.bandwidth import figures
from instep.bench.collectives import beside_the_bound, measure
from instep.bench.options import CollectivesOptions
from tests.launched.command import instep

NCCL_TESTS = ["size(B)", "count", "type", "redop", "root", "time(us)", "algbw(GB/s)", "busbw(GB/s)", "#wrong"]


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """The command with three backends of different kinds, and the folder with its files."""
    path = tmp_path_factory.mktemp("bench")
    words = "--sizes 1KB,3KB --samples 3 --backends gloo,shm,shm-in-place,direct --json a.json --csv a.csv"
    ended = instep("bench", "collectives", "-n", 2, *words.split(), "--chart", "a.svg", cwd=path)
    assert ended.code == 0, ended.err
    return ended, path


def test_the_table_has_the_columns_of_nccl_tests(measured):
    ended, path = measured
    with open(path / "a.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert set(NCCL_TESTS) | {"effbw(GB/s)", "min(us)", "p99(us)"} <= set(rows[0])
    assert len(rows) == 2 * 4
    assert {row["#wrong"] for row in rows} == {"0"}
    for name in NCCL_TESTS:
        assert name.partition("(")[0] in ended.out


def test_the_results_say_how_they_were_made(measured):
    found = json.loads((measured[1] / "a.json").read_text())
    assert found["environment"]["command"].startswith("instep bench collectives -n 2")
    assert (found["samples"], found["warm_up"]) == (3, 2)
    assert found["memory_bytes_per_s"]["2"] > 0


def test_bandwidths_follow_from_the_time(measured):
    for row in json.loads((measured[1] / "a.json").read_text())["rows"]:
        assert 0 < row["min(us)"] <= row["time(us)"] <= row["p99(us)"]
        expected = figures("all_reduce", row["size(B)"], 2, row["time(us)"])
        assert {name: row[name] for name in expected} == pytest.approx(expected)


def test_the_chart_is_there_twice(measured):
    assert (measured[1] / "a.svg").read_bytes().startswith(b"<?xml")
    assert (measured[1] / "a.png").read_bytes().startswith(b"\x89PNG")


def test_results_go_to_stdout_and_progress_to_stderr(measured):
    ended, _ = measured
    assert "all_reduce on 2 ranks" in ended.out
    assert "GB/s when all ranks copy" in ended.out
    assert "all_reduce, 2 ranks, 1 KB" in ended.err
    assert "all_reduce, 2 ranks, 1 KB" not in ended.out


def test_a_way_that_does_not_exist_is_answered_with_those_that_do():
    with pytest.raises(ValueError, match="unknown backend 'glo' for all_reduce: expected one of gloo, shm"):
        measure(CollectivesOptions(backends=("glo",)))
    with pytest.raises(ValueError, match="unknown backend 'ring' for all_to_all"):
        measure(CollectivesOptions(backends=("ring",), collective="all_to_all"))


def test_times_are_compared_with_the_bound_where_it_applies():
    rows = [
        {"backend": "gloo", "size(B)": 1000},
        {"backend": "gloo", "size(B)": 10**8, "bound(us)": 100.0, "time/bound": 6.5},
        {"backend": "shm", "size(B)": 10**8, "bound(us)": 100.0, "time/bound": 1.5},
    ]
    table, note = beside_the_bound(rows, 20e9)
    assert table == [{"backend": "gloo", "100 MB": 6.5}, {"backend": "shm", "100 MB": 1.5}]
    assert "20.0 GB/s" in note and "100 us for 100 MB" in note
