"""``instep bench buckets``: from samples to rows, and once from the command line to its files."""

import json

import pytest

from instep.bench import worlds
from instep.bench.buckets import MIB, measure, place_of, summarise
from instep.bench.options import BucketsOptions
from tests.lab import why_not
from tests.launched.command import instep

TOTAL = 64 * MIB


def step(forward, backward, calls=0, busy=0.0):
    return {"forward": forward, "backward": backward, "calls": calls, "busy": busy}


@pytest.fixture
def found():
    """Two ranks, alpha = 1 ms, beta = 1 ns/B, T_f = 20 ms, T_b = 40 ms; rank 1 is the slower one."""
    link = {str(size): [1e-3 + 1e-9 * size] * 3 for size in (1000, 10**6, 10**7)}

    def rank(slowdown):
        turns = {
            "0": [step(0.02, 0.04)] * 3,
            "1.0": [step(0.02, 0.1 + slowdown, calls=64, busy=0.064)] * 3,
            "8.0": [step(0.02, 0.08 + slowdown, calls=8, busy=0.04)] * 3,
        }
        return {"link": link, "turns": turns, "gradient_bytes": TOTAL}

    return summarise([rank(0.0), rank(0.01)], [1.0, 8.0])


def test_a_step_takes_as_long_as_its_slowest_rank(found):
    assert [row["step(ms)"] for row in found["rows"]] == pytest.approx([130, 110])
    assert [row["exposed(ms)"] for row in found["rows"]] == pytest.approx([70, 50])
    assert found["best_measured_mib"] == 8


def test_calls_are_counted_and_timed(found):
    assert [row["calls"] for row in found["rows"]] == [64, 8]
    assert [row["call(ms)"] for row in found["rows"]] == pytest.approx([1, 5])


def test_the_model_is_fed_with_what_was_measured(found):
    assert (found["alpha_us"], found["beta_ns_per_byte"]) == pytest.approx((1000, 1))
    wire_ms = TOTAL * 1e-6
    # comm-bound: the first bucket fills, a latency per bucket, the bytes that backward does not hide
    expected = [20 + 40 + 40 / calls + calls * 1 + wire_ms - 40 for calls in (64, 8)]
    assert [row["model(ms)"] for row in found["rows"]] == pytest.approx(expected)
    assert found["best_of_these_by_model_mib"] == 8
    assert found["best_predicted_mib"] == pytest.approx(64 * (1 / 40) ** 0.5)


@pytest.mark.slow
def test_the_command_writes_a_row_per_size(tmp_path):
    small = "--params 200K --tokens 8 --sizes 0.1 1 --samples 2 --rounds 1"
    files = "--json a.json --csv a.csv --chart a.svg"
    ended = instep("bench", "buckets", *small.split(), *files.split(), cwd=tmp_path)
    assert ended.code == 0, ended.err
    found = json.loads((tmp_path / "a.json").read_text())
    small, large = found["rows"]
    assert small["calls"] > large["calls"] >= 1
    assert found["best_predicted_mib"] > 0
    assert "best measured" in ended.out
    assert (tmp_path / "a.csv").exists() and (tmp_path / "a.svg").exists() and (tmp_path / "a.png").exists()
    assert found["workload"]["tokens"] == 8


@pytest.mark.slow
def test_over_a_link_no_byte_is_faster_than_the_line():
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    found = measure(
        BucketsOptions(link=True, params="1M", batch=1, context=8, sizes=(1.0, 100.0), samples=2, rounds=1)
    )
    assert place_of(found) == "2 hosts with 1 Gbit/s between them"
    assert found["beta_ns_per_byte"] > 6  # 1 Gbit/s is 8 ns per byte, but for what a burst lets through


def test_a_model_that_does_not_fit_is_refused_with_what_it_takes(monkeypatch):
    monkeypatch.setattr(worlds, "available_bytes", lambda: 16_000_000_000)
    with pytest.raises(
        ValueError, match=r"need about \d+\.\d GB .* and there are 16\.0 GB available: pass a sm"
    ):
        measure(BucketsOptions(preset="2.7B"))
