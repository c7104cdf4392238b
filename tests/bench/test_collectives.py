"""``instep bench collectives`` from the command line to its files, on two real ranks."""

import csv
import json

import pytest

from instep.bench import bandwidth, collectives
from instep.bench.bandwidth import figures
from instep.bench.collectives import beside_the_bound, by_backend, measure, predicted, prediction
from instep.bench.options import CollectivesOptions
from instep.comm.cost import AlphaBeta
from tests.lab import why_not
from tests.launched.command import instep

LET_THROUGH = 256_000  # bytes that the buckets at both ends of a link are full of when a message begins
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
    assert set(NCCL_TESTS) | {"min(us)", "p99(us)", "predicted(us)", "time/predicted"} <= set(rows[0])
    assert [name for name in rows[0] if "bw(" in name] == ["algbw(GB/s)", "busbw(GB/s)"]
    assert len(rows) == 2 * 4
    assert {row["#wrong"] for row in rows} == {"0"}
    for name in NCCL_TESTS:
        assert name.partition("(")[0] in ended.out


def test_the_results_say_how_they_were_made(measured):
    found = json.loads((measured[1] / "a.json").read_text())
    assert found["environment"]["command"].startswith("instep bench collectives -n 2")
    assert (found["samples"], found["warm_up"]) == (3, 2)
    assert found["memory_bytes_per_s"] == {}  # of messages that fit a cache nothing is said about memory


def test_bandwidths_follow_from_the_time(measured):
    for row in json.loads((measured[1] / "a.json").read_text())["rows"]:
        assert 0 < row["min(us)"] <= row["time(us)"] <= row["p99(us)"]
        expected = figures("all_reduce", row["size(B)"], 2, row["time(us)"])
        assert {name: row[name] for name in expected} == pytest.approx(expected)


def test_a_message_is_timed_and_what_sends_messages_has_a_prediction(measured):
    found = json.loads((measured[1] / "a.json").read_text())
    assert found["message"]["2"]["latency_s"] > 0
    for row in found["rows"]:
        if row["backend"] in ("gloo", "direct"):
            assert row["time/predicted"] == pytest.approx(row["time(us)"] / row["predicted(us)"])
        else:
            assert row["predicted(us)"] is None
    assert "a message between two ranks took alpha" in measured[0].out


def test_the_chart_is_there_twice(measured):
    assert (measured[1] / "a.svg").read_bytes().startswith(b"<?xml")
    assert (measured[1] / "a.png").read_bytes().startswith(b"\x89PNG")


def test_results_go_to_stdout_and_progress_to_stderr(measured):
    ended, _ = measured
    assert "all_reduce on 2 ranks" in ended.out
    assert "all_reduce, 2 ranks, 1 KB" not in ended.out


def test_messages_that_fit_no_cache_are_beside_what_the_memory_allows(monkeypatch, capsys):
    def in_world(options, task, ranks):
        part = {
            "size": 1000,
            "count": 250,
            "times": {"gloo": [1e-6]},
            "calls": {"gloo": 1},
            "wrong": {"gloo": 0},
        }
        messages = {"bytes": [4, 64_000], "seconds": [1e-4, 2e-4]}
        return [{"memory": 20e9 if task["bound"] else None, "messages": messages, "sizes": [part]}] * ranks

    monkeypatch.setattr(collectives, "_in_world", in_world)
    for cache, told in ((1001, False), (1000, True)):
        monkeypatch.setattr(bandwidth, "cache_bytes", lambda cache=cache: cache)
        collectives.run(CollectivesOptions(sizes=("1KB",), backends=("gloo",)))
        said = capsys.readouterr().out
        assert ("memory: 20.0 GB/s when all ranks copy." in said) == told
        assert ("Times as long as the memory allows" in said) == told


def test_a_way_that_does_not_exist_is_answered_with_those_that_do():
    with pytest.raises(ValueError, match="unknown backend 'glo' for all_reduce: expected one of gloo, shm"):
        measure(CollectivesOptions(backends=("glo",)))
    with pytest.raises(ValueError, match="unknown backend 'ring' for all_to_all"):
        measure(CollectivesOptions(backends=("ring",), collective="all_to_all"))


def test_a_prediction_is_the_formula_with_what_a_message_costs():
    """A ring of four: 6 rounds of 100 us, and 1.5 x 1 MB at 1 ns a byte; shared memory has no messages."""
    message = AlphaBeta(latency_s=100e-6, s_per_byte=1e-9)
    for backend in ("ring", "gloo"):
        found = predicted("all_reduce", backend, 4, 1_000_000, message, time_us=4200.0)
        assert found == pytest.approx({"predicted(us)": 2100.0, "time/predicted": 2.0})
    none = {"predicted(us)": None, "time/predicted": None}
    assert predicted("all_reduce", "shm", 4, 1_000_000, message, time_us=1.0) == none
    assert predicted("reduce_scatter", "gloo", 4, 1_000_000, message, time_us=1.0) == none
    note = prediction({"message": {"4": {"latency_s": 100e-6, "s_per_byte": 1e-9}}}, 4)
    assert "alpha 100 us" in note and "1 GB/s" in note


def test_what_only_some_backends_have_is_a_table_of_these():
    rows = [
        {"backend": "ring", "size(B)": 1000, "time/predicted": 2.0},
        {"backend": "ring", "size(B)": 10**6, "time/predicted": 1.5},
        {"backend": "shm", "size(B)": 1000, "time/predicted": None},
        {"backend": "nccl", "size(B)": 1000},
    ]
    assert by_backend(rows, "time/predicted") == [{"backend": "ring", "1 KB": 2.0, "1 MB": 1.5}]


@pytest.mark.slow
def test_over_a_link_every_rank_has_a_host_and_no_message_is_faster_than_the_link():
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    words = {"collective": "broadcast", "backends": ("tree", "shm"), "sizes": ("1MB",), "samples": 2}
    found = measure(CollectivesOptions(link=True, rate="100mbit", **words))
    (row,) = found["rows"]
    assert found["skipped"] == ["shm on 2 ranks: it is for ranks of one host"]
    assert (row["backend"], row["#wrong"], found["link"]) == ("tree", 0, "100mbit")
    least_us = (1e6 - LET_THROUGH) * 8 / 100
    assert row["min(us)"] > least_us
    assert row["predicted(us)"] > 1e6 * 8 / 100


def test_times_are_compared_with_the_bound_where_it_applies():
    rows = [
        {"backend": "gloo", "size(B)": 1000},
        {"backend": "gloo", "size(B)": 10**8, "bound(us)": 100.0, "time/bound": 6.5},
        {"backend": "shm", "size(B)": 10**8, "bound(us)": 100.0, "time/bound": 1.5},
    ]
    table, note = beside_the_bound(rows, 20e9)
    assert table == [{"backend": "gloo", "100 MB": 6.5}, {"backend": "shm", "100 MB": 1.5}]
    assert "20.0 GB/s" in note and "100 us for 100 MB" in note
