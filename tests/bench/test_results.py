"""From samples to rows: buckets, scaling, memory savers, threads, collectives, on times that are made up."""

from __future__ import annotations

import os
import statistics
import threading
import time
from dataclasses import asdict, replace

import pytest
import torch

from instep.bench import bandwidth, buckets, collectives, hosts
from instep.bench.buckets import MIB, place_of, summarise
from instep.bench.collectives import predicted, prediction
from instep.bench.data_parallel import WorkerResults
from instep.bench.exchange_cost import SIZES, ExchangeCost
from instep.bench.memory_savers import SAVERS, loss_row, notes, row
from instep.bench.options import BucketsOptions, CollectivesOptions, ScalingOptions
from instep.bench.scaling import Arm, crowded, plan_of, rows_of
from instep.bench.steps import StepResults
from instep.bench.steps_rank import measure_memory, measure_scaling
from instep.bench.tables import short
from instep.bench.thread_clock import ThreadClock, ThreadTimes
from instep.bench.variants import DECLARED_THREADS, NONE, ONE, THREADS, SharedModel, Variant
from instep.bench.workloads import Workload
from instep.bench.worlds import World
from instep.comm.cost import AlphaBeta
from tests.lab import why_not
from tests.world import world

TOTAL = 64 * MIB


def step(forward, backward, calls=0, busy=0.0):
    sizes = [TOTAL // calls] * calls if calls else []
    return {"forward": forward, "backward": backward, "sizes": sizes, "busy": busy}


@pytest.fixture
def found(monkeypatch):
    """Two ranks, alpha = 1 ms, beta = 1 ns/B, T_f = 20 ms, T_b = 40 ms; rank 1 is the slower one.

    A quarter of each exchange is processor time, and no core is idle.
    """
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    times = {size: 1e-3 + 1e-9 * size for size in (1000, 10**6, 10**7)}
    exchanges = {str(size): [[seconds] * 3, [seconds / 4] * 3] for size, seconds in times.items()}

    def rank(slowdown):
        turns = {
            "0": [step(0.02, 0.04)] * 3,
            "1.0": [step(0.02, 0.1 + slowdown, calls=64, busy=0.064)] * 3,
            "8.0": [step(0.02, 0.08 + slowdown, calls=8, busy=0.04)] * 3,
        }
        return {"exchanges": exchanges, "turns": turns, "gradient_bytes": TOTAL}

    return summarise([rank(0.0), rank(0.01)], [1.0, 8.0])


def test_a_step_takes_as_long_as_its_slowest_rank(found):
    assert [row["step(ms)"] for row in found["rows"]] == pytest.approx([130, 110])
    assert [row["exposed(ms)"] for row in found["rows"]] == pytest.approx([70, 50])
    assert found["best_measured_mib"] == 8


def test_calls_are_counted_and_timed(found):
    assert [row["calls"] for row in found["rows"]] == [64, 8]
    assert [row["call(ms)"] for row in found["rows"]] == pytest.approx([1, 5])


def test_the_model_is_fed_with_what_was_measured(found):
    flight, work = found["cost"]["flight"], found["cost"]["work"]
    assert (flight["latency_s"], flight["s_per_byte"]) == pytest.approx((1e-3, 1e-9))
    assert (work["latency_s"], work["s_per_byte"]) == pytest.approx((1e-3 / 4, 1e-9 / 4))
    assert (
        "alpha 1,000 us (1,000 bytes took 1,001), beta 1.000 ns/byte; of these 250 us" in found["exchanges"]
    )
    wire_ms = TOTAL * 1e-6
    expected = []
    for calls in (64, 8):
        # comm-bound: the first bucket fills, a latency per bucket, the bytes that backward does not hide
        exposed = 40 / calls + calls * 1 + wire_ms - 40
        hidden = calls * 1 + wire_ms - exposed
        expected.append(20 + 40 + exposed + hidden / 4)
    assert [row["model(ms)"] for row in found["rows"]] == pytest.approx(expected)
    assert [row["error(%)"] for row in found["rows"]] == pytest.approx(
        [100 * (model / step - 1) for model, step in zip(expected, (130, 110), strict=True)]
    )
    assert found["best_of_these_by_model_mib"] == 8
    assert found["regret"] == 0
    assert found["best_predicted_mib"] == pytest.approx(64 * (1 / 40) ** 0.5)


COST = ExchangeCost(AlphaBeta(0.1, 1e-3), AlphaBeta(0.05, 0.5e-3), busy=1.0, num_ranks=3)


def test_a_step_of_every_strategy_is_the_one_that_can_be_drawn():
    """Forward 1, backward 2; exchanges of 0.6 and 0.6, half of each is processor time.

    overlap   backward |----------|          2
              b0            ======           1 to 1.6, hidden
              b1                  ======     2 to 2.6, exposed
    """
    sizes, times_s = [500, 500], (1.0, 2.0)
    assert COST.step_s("flat", [1000], *times_s) == pytest.approx(3 + 1.1)
    assert COST.step_s("naive", sizes, *times_s) == pytest.approx(3 + 1.2)
    assert COST.step_s("bucketed", sizes, *times_s) == pytest.approx(3 + 0.6 + 0.6 / 2)
    assert replace(COST, busy=0.0).step_s("overlap", sizes, *times_s) == pytest.approx(3 + 0.6)
    assert COST.step_s("server", sizes, *times_s) == pytest.approx(3 + 0.1 + 3 * 1.0)


def test_a_link_is_recovered_from_exchanges_that_begin_with_a_burst():
    """1 ms and 8.4 ns per byte, but what a full token bucket holds passes at once, in each of two flights."""
    burst, alpha, beta = 125_000, 2e-3, 8.4e-9

    def flight(size: int) -> float:
        first = max(size / 2 - burst, 0)
        left = min(max(burst - size / 2, 0) + alpha / 3 / beta, burst)  # refilled while nothing is sent
        return alpha + (first + max(size / 2 - left, 0)) * beta

    samples = {str(size): [[flight(size)] * 3, [1e-3] * 3] for size in SIZES}
    found = ExchangeCost.of([samples, samples]).flight
    assert found.s_per_byte == pytest.approx(beta, rel=0.1)
    large = [size for size in SIZES if size >= 2_000_000]
    assert [found.time_s(size) for size in large] == pytest.approx([flight(size) for size in large], rel=0.06)


@pytest.mark.slow
def test_over_a_link_no_byte_is_faster_than_the_line():
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    found = buckets.measure(
        BucketsOptions(link=True, params="1M", batch=1, context=8, sizes=(1.0, 100.0), samples=2, rounds=1)
    )
    assert place_of(found) == "2 hosts with 1 Gbit/s between them"
    # 1 Gbit/s is 8 ns per byte, but for what a burst lets through.
    assert found["cost"]["flight"]["s_per_byte"] > 6e-9


@pytest.mark.parametrize(
    ("rate", "bytes_per_s", "text"),
    [("1gbit", 125e6, "1 Gbit/s"), ("2.5gbit", 312.5e6, "2.5 Gbit/s"), ("200mbit", 25e6, "200 Mbit/s")],
)
def test_a_rate_is_in_the_words_of_tc(rate, bytes_per_s, text):
    assert (hosts.bytes_per_s(rate), hosts.rate_text(rate)) == (bytes_per_s, text)


@pytest.mark.parametrize("rate", ["1", "gbit", "1.2.3gbit", "1 gbit", "1gbyte", "-1gbit"])
def test_what_is_no_rate_is_refused(rate):
    with pytest.raises(ValueError, match="expected a number with kbit, mbit or gbit, such as 1gbit"):
        hosts.bytes_per_s(rate)


BUCKETED = Variant("bucketed", "gloo")


@pytest.fixture
def plan():
    return plan_of(ScalingOptions(ranks=(4, 1, 2), batch=8), "gloo")


def test_one_rank_exchanges_nothing_and_is_measured_once(plan):
    of_one = [one for one in plan.arms.values() if one.ranks == 1]
    assert of_one == [Arm(1, 8, NONE)]
    assert len(plan.arms) == 1 + 2 * 2 * 2  # then: two numbers of ranks, two kinds of work, none and bucketed


def test_strong_work_is_divided_and_weak_work_is_not(plan):
    assert [plan.arm("strong", BUCKETED, ranks).batch for ranks in plan.ranks] == [8, 4, 2]
    assert [plan.arm("weak", BUCKETED, ranks).batch for ranks in plan.ranks] == [8, 8, 8]


@pytest.fixture
def rows(plan):
    """One rank takes 8 s, nothing sent is ideal, what is sent takes 1 s of strong steps, 2 s of weak ones."""

    def steps(one: Arm) -> float:
        sent = 0 if one.variant == NONE else 1 + (one.batch == 8)
        return one.batch + sent

    times = {name: {"step_s": [float(steps(one))] * 3} for name, one in plan.arms.items()}
    idle = {name: {"step_s": [0.0] * 3} for name in plan.arms}
    found = rows_of(plan, StepResults([idle, times]))
    return {(row["work"], row["ranks"], row["strategy"]): row for row in found}


def test_what_sends_nothing_is_ideal_here_and_what_sends_less_so(rows):
    efficiency = {key: row["efficiency(%)"] for key, row in rows.items()}
    assert efficiency["strong", 1, "one rank"] == efficiency["weak", 1, "one rank"] == 100
    assert efficiency["strong", 4, "none"] == efficiency["weak", 4, "none"] == pytest.approx(100)
    assert efficiency["strong", 4, "bucketed"] == pytest.approx(100 * 8 / (4 * 3))
    assert efficiency["weak", 4, "bucketed"] == pytest.approx(100 * 8 / 10)


def test_ranks_that_outnumber_the_cores_are_told_so():
    [said] = crowded({"cores": 2, "ranks": [1, 2, 4]})
    assert said.startswith("4 ranks on 2 cores: ranks outnumber cores, so at most 50 % is possible")
    assert crowded({"cores": 4, "ranks": [1, 2, 4]}) == crowded({"cores": None, "ranks": [1, 8]}) == []


@pytest.mark.slow
@world(3, by="process")
def test_the_first_two_of_three_ranks_exchange_among_themselves(mesh):
    one = Workload("tiny", 200_000, batch=2, what="tiny", tokens=8)
    arms = [Arm(1, 2, NONE), Arm(2, 1, BUCKETED), Arm(2, 2, BUCKETED), Arm(3, 2, BUCKETED)]
    task = {"workload": asdict(one), "arms": {arm.name: asdict(arm) for arm in arms}, "samples": 1}
    found = measure_scaling(World(), task)
    assert list(found) == [arm.name for arm in arms]
    for arm in arms:
        took_part = found[arm.name]["forward_s"][0] > 0
        assert took_part == (mesh.rank < arm.ranks), arm
        assert bool(found[arm.name]["agree_s"][0]) == (took_part and arm.ranks > 1), arm


WORKLOAD = Workload("memory-savers", 200_000, 8, "memory", tokens=64)


def test_a_loss_is_compared_with_that_of_the_same_seed() -> None:
    plain, bf16 = {"held_out_loss_first": 5.5, "held_out_loss": 2.0}, {"held_out_loss": 2.5}
    rows = [loss_row(seed, plain, bf16) for seed in range(2)]
    assert rows[1] == {"seed": 1, "before": 5.5, "float32": 2.0, "bf16": 2.5, "bf16 - float32": 0.5}
    runs = {"rows": rows, "steps": 9, "state_sha256": {"neither": "a" * 64, "bf16": "b" * 64}}
    said = notes({"text": "", "ranks": 2, "samples": 3, "runs": runs})
    assert "after 9 steps of instep train; bf16 - float32: +0.5000 (median), seeds alone: 0.0000" in said[2]
    assert "same bits" in said[3]


@pytest.mark.slow
@world(2, by="process")
def test_what_is_computed_again_is_not_kept(mesh) -> None:
    kept = {}
    for name, one in SAVERS.items():
        task = {"workload": asdict(WORKLOAD), "variant": asdict(one)}
        found = measure_memory(World(), task)
        kept[name] = found["activations"]
        said = (
            row(
                name,
                StepResults([{each.name: {"step_s": [1.0]} for each in SAVERS.values()}]),
                {"activations(MB)": None, "peak(MB)": None},
                WORKLOAD,
            )["formula(MB)"]
            * 1e6
        )
        assert said == pytest.approx(kept[name], rel=0.05), name
    assert kept["checkpoint"] < kept["neither"] / 3
    assert kept["both"] < kept["bf16"] < kept["neither"]


TINY = Workload("tiny", 200_000, batch=2, what="tiny", tokens=8)
ALONE = [ONE, THREADS, DECLARED_THREADS]


class RankZero:
    rank, size, device = 0, 2, torch.device("cpu")


def gradients(one):
    """What the optimizer is given in a step of ``one``."""
    runner = one.start(SharedModel(RankZero(), TINY))
    found = []
    runner.optimizer.register_step_pre_hook(
        lambda optimizer, *_: found.extend(
            p.grad.clone() for group in optimizer.param_groups for p in group["params"]
        )
    )
    runner.step()
    return found


def test_one_process_and_its_threads_make_the_same_step():
    """The mean over the micro-batches: threads that are declared have its very bits."""
    expected, split, declared = map(gradients, ALONE)
    assert all(map(torch.equal, expected, declared))
    for a, b in zip(expected, split, strict=True):
        torch.testing.assert_close(a, b)


def busy(seconds):
    """Compute for so long, by the clock of this thread alone."""
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


def test_a_thread_that_is_blocked_is_on_no_core():
    """Each of two threads computes for 10 ms, and one of them waits for the other meanwhile."""
    clock, begun, done = ThreadClock(), threading.Event(), threading.Event()

    def wait():
        with clock.as_lane("replica 0"):
            begun.set()
            done.wait()
            busy(0.01)

    waiting = threading.Thread(target=wait)
    waiting.start()
    begun.wait()
    with clock.as_lane("replica 1"):
        busy(0.01)
    done.set()
    waiting.join()
    found = clock.take()
    assert found.on_core >= 0.02
    assert found.blocked + found.for_core == pytest.approx(found.computing - found.on_core)
    assert found.computing - found.on_core > 0.009
    assert clock.take() == ThreadTimes()


def ranks_of(**by_name):
    """Two ranks with so many seconds of a step and of its threads, in each round."""
    measured = {
        name: dict(zip(("step_s", "threads"), zip(*rounds, strict=True), strict=True))
        for name, rounds in by_name.items()
    }
    return [measured, measured]


RESULTS = WorkerResults(
    ranks_of(
        one=[(2.0, [2.0, 1.9, 0.1])] * 3,
        threads=[(1.0, [1.0, 0.5, 0.25]), (2.0, [1.0, 0.5, 0.0]), (4.0, [1.0, 0.75, 0.0])],
    )
)


def test_speed_is_that_of_one_process_in_the_same_round():
    row = RESULTS.worker_row(THREADS, "tiny")
    assert (row["speed-up"], row["speed-up q25"], row["speed-up q75"]) == (1.0, 0.75, 1.5)
    assert row["lock(%)"] == 100 * statistics.median([0.25, 0.5, 0.25])
    assert short([row])[0]["speed-up"] == "1.00 (0.75 to 1.50)"


LET_THROUGH = 256_000  # bytes that the buckets at both ends of a link are full of when a message begins


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
        collectives.measure(CollectivesOptions(backends=("glo",)))
    with pytest.raises(ValueError, match="unknown backend 'ring' for all_to_all"):
        collectives.measure(CollectivesOptions(backends=("ring",), collective="all_to_all"))


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


@pytest.mark.slow
def test_over_a_link_every_rank_has_a_host_and_no_message_is_faster_than_the_link():
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    words = {"collective": "broadcast", "backends": ("tree", "shm"), "sizes": ("1MB",), "samples": 2}
    found = collectives.measure(CollectivesOptions(link=True, rate="100mbit", **words))
    (row,) = found["rows"]
    assert found["skipped"] == ["shm on 2 ranks: it is for ranks of one host"]
    assert (row["backend"], row["#wrong"], found["link"]) == ("tree", 0, "100mbit")
    least_us = (1e6 - LET_THROUGH) * 8 / 100
    assert row["min(us)"] > least_us
    assert row["predicted(us)"] > 1e6 * 8 / 100
