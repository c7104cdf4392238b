"""Advice about how gradients are sent: buckets, strategies, transports and links, each with its gain."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from instep.events import GLOBAL_LOSS, GRADIENT_SYNC
from instep.timeline.straggler import Slow
from tests.timeline.advised import BACKWARD_S, HOST, LATENCY_S, LINK, MB, S_PER_BYTE, ask, buckets, rank


def test_one_giant_bucket_is_cut_so_that_it_hides() -> None:
    whole = LATENCY_S + S_PER_BYTE * 32 * MB  # 338 ms, all exposed
    ranks = [rank(r, exposed=whole) for r in range(2)]
    setting = replace(LINK, bucket_mb=1000)
    first, *_ = ask(ranks, buckets([32 * MB]), setting)
    assert (first.cause, first.try_) == ("giant bucket", "--parallel.bucket-mb 2")
    # Backward is longer than the bytes: only the last 2 MB stay, since a bucket fills in 25 ms and flies 23.
    assert first.gain_ms == pytest.approx(1e3 * (whole - LATENCY_S - S_PER_BYTE * 2 * MB))
    assert "All of the 32 MB of gradients leave in one bucket" in first.text
    assert "105 MB/s" not in first.text and "100 MB/s (0.8 Gbit/s)" in first.text


@pytest.mark.parametrize("strategy", ["server", "threads", "fully_shard"])
def test_a_size_of_buckets_is_advised_to_nobody_who_has_none(strategy: str) -> None:
    whole = LATENCY_S + S_PER_BYTE * 32 * MB
    ranks = [rank(r, exposed=whole) for r in range(2)]
    setting = replace(LINK, bucket_mb=1000)
    assert "giant bucket" in [advice.cause for advice in ask(ranks, buckets([32 * MB]), setting)]
    other = ask(ranks, buckets([32 * MB]), replace(setting, strategy=strategy))
    assert "giant bucket" not in [advice.cause for advice in other]


def test_flat_and_its_giant_bucket_are_one_cause() -> None:
    whole = LATENCY_S + S_PER_BYTE * 32 * MB
    found = ask(
        [rank(r, exposed=whole) for r in range(2)],
        buckets([32 * MB], late=True),
        replace(LINK, strategy="flat"),
    )
    assert [advice.cause for advice in found] == ["giant bucket"]
    assert found[0].try_ == "--parallel.strategy bucketed --parallel.bucket-mb 2"


def test_hiding_gains_nothing_where_no_core_is_idle() -> None:
    whole = LATENCY_S + S_PER_BYTE * 32 * MB
    ranks, rows = [rank(r, exposed=whole) for r in range(2)], buckets([32 * MB], late=True)
    flat = replace(HOST, strategy="flat")
    idle = ask(ranks, rows, flat)
    half = ask(ranks, rows, replace(flat, cores=3))
    busy = ask(ranks, rows, replace(flat, cores=2))
    assert idle[0].cause == half[0].cause == "giant bucket"
    assert half[0].gain_ms < 0.55 * idle[0].gain_ms
    assert "slows backward down" in half[0].how
    assert [advice.cause for advice in busy] == ["accumulate"]


def test_over_a_link_only_the_copying_needs_a_core() -> None:
    whole = LATENCY_S + S_PER_BYTE * 32 * MB
    ranks, rows = [rank(r, exposed=whole) for r in range(2)], buckets([32 * MB], late=True)
    flat = replace(LINK, strategy="flat")
    idle = ask(ranks, rows, flat, optimizer="sgd")[0]
    busy = ask(ranks, rows, replace(flat, cores=2, ranks_per_host=2), optimizer="sgd")[0]
    assert idle.try_ == "--parallel.strategy bucketed --parallel.bucket-mb 2"
    # Two ranks copy 5.5 bytes for each of the message, at 5 GB/s, and a latency is work: fewer buckets, then.
    assert busy.try_ == "--parallel.strategy bucketed --parallel.bucket-mb 4"
    flight_s, copying_s = LATENCY_S + S_PER_BYTE * 4 * MB, 5.5 * 32 * MB / 5e9
    work_s = copying_s + 8 * LATENCY_S
    assert 0.1 < work_s / (8 * flight_s) < 0.2
    assert busy.gain_ms == pytest.approx(1e3 * (whole - flight_s - work_s * 7 / 8))  # 7 of 8 are hidden


def test_a_measured_slowdown_is_what_hiding_costs() -> None:
    whole = LATENCY_S + S_PER_BYTE * 32 * MB
    ranks, rows = [rank(r, exposed=whole) for r in range(2)], buckets([32 * MB])
    setting = replace(LINK, bucket_mb=1000)
    free, slowed = ask(ranks, rows, setting)[0], ask(ranks, rows, setting, slowdown=0.25)[0]
    told = [replace(row, slowdown=0.25) for row in ranks]
    assert ask(told, rows, setting)[0] == slowed
    # 25 % slower: of a second that is hidden, 0.2 are lost. All buckets but the last are hidden.
    assert "20 % of what is hidden" in slowed.how
    cap_mb = int(slowed.try_.split()[-1])
    flight_s = LATENCY_S + S_PER_BYTE * cap_mb * MB
    assert slowed.gain_ms == pytest.approx(1e3 * (whole - flight_s - 0.2 * (32 / cap_mb - 1) * flight_s))
    assert slowed.gain_ms < free.gain_ms


def test_tiny_buckets_pay_a_latency_each() -> None:
    # 150 KB to 350 KB: 128 of them cost 2 ms besides their bytes, more than backward can hide.
    sizes = [(150 + 200 * (k % 2)) * 1024 for k in range(128)]
    total_s = 128 * LATENCY_S + S_PER_BYTE * sum(sizes)
    exposed = total_s - BACKWARD_S + BACKWARD_S / 128
    ranks = [rank(r, exposed=exposed) for r in range(2)]
    first, *_ = ask(ranks, buckets(sizes), replace(LINK, bucket_mb=0.1))
    assert first.cause == "tiny buckets"
    assert "128 buckets, each of which costs 2.0 ms" in first.text and "256 ms per step" in first.text
    # 31 MB that fill in 0.4 s and take 0.33: they drain from about 1 MB on, then only the last is exposed.
    assert first.try_ in ("--parallel.bucket-mb 1", "--parallel.bucket-mb 2")
    assert exposed - 0.030 < first.gain_ms / 1e3 < exposed


def test_naive_is_told_to_fill_buckets_and_to_overlap() -> None:
    sizes = [(150 + 200 * (k % 2)) * 1024 for k in range(128)]
    total_s = 128 * LATENCY_S + S_PER_BYTE * sum(sizes)
    ranks = [rank(r, exposed=total_s) for r in range(2)]
    first, *_ = ask(ranks, buckets(sizes, late=True), replace(LINK, strategy="naive"))
    assert first.cause == "strategy"
    assert first.try_.startswith("--parallel.strategy bucketed --parallel.bucket-mb ")
    assert "Each of 128 gradients is sent by itself" in first.text
    assert total_s - 0.050 < first.gain_ms / 1e3 < total_s


def test_naive_without_idle_cores_saves_its_latencies() -> None:
    sizes = [256 * 1024] * 64 + [512 * 1024] * 64  # 48 MB
    rows = buckets(sizes, late=True, s_per_byte=1e-9)
    ranks = [rank(r, exposed=0.306) for r in range(2)]
    first, *_ = ask(ranks, rows, replace(HOST, strategy="naive", cores=2))
    assert first.cause == "strategy"
    assert first.gain_ms == pytest.approx(127 * LATENCY_S * 1e3, rel=0.01)  # one bucket instead of 128


def test_a_slow_link_is_named_with_its_rate() -> None:
    # 80 MB in buckets of 4 MB: 0.88 s of messages, twice as long as backward.
    sizes = [4 * MB] * 20
    exposed = 20 * (LATENCY_S + S_PER_BYTE * 4 * MB) - BACKWARD_S + BACKWARD_S / 20
    ranks = [rank(r, exposed=exposed, update=0.06, host=0.02) for r in range(2)]
    (only,) = ask(ranks, buckets(sizes), replace(LINK, bucket_mb=4))
    assert only.cause == "slow link" and only.changes_training
    assert only.try_ == "--batch.global-size 64"  # twice 8 micro-batches of 4
    assert only.gain_ms == pytest.approx(1e3 * (exposed + 0.08) / 2)
    assert "the link between the 2 hosts carries 100 MB/s (0.8 Gbit/s)" in only.text
    assert "takes 839 ms for the bytes of a step, longer than the 400 ms of backward" in only.text


def test_what_hidden_messages_cost_is_paid_less_often_too() -> None:
    flight_s = LATENCY_S + S_PER_BYTE * 4 * MB
    exposed = 20 * flight_s - BACKWARD_S + BACKWARD_S / 20  # the rest is hidden
    ranks = [replace(rank(r, exposed=exposed), slowdown=0.25) for r in range(2)]
    (only,) = ask(ranks, buckets([4 * MB] * 20), replace(LINK, bucket_mb=4))
    assert only.gain_ms == pytest.approx(1e3 * (exposed + (20 * flight_s - exposed) / 5) / 2)
    assert "that those cost which are hidden" in only.how


def test_ranks_of_one_host_share_its_link() -> None:
    sizes = [4 * MB] * 20
    ranks = [rank(r, exposed=0.5) for r in range(8)]
    setting = replace(LINK, world_size=8, ranks_per_host=4, bucket_mb=4)
    (only,) = ask(ranks, buckets(sizes), setting)
    assert "carries 400 MB/s (3.2 Gbit/s)" in only.text  # 4 ranks, each 2 x 4/8 of every byte


def test_a_slow_link_with_the_default_buckets_is_told_smaller_ones_first() -> None:
    sizes = [25 * MB, 25 * MB, 18 * MB]
    ranks = [rank(r, exposed=0.46) for r in range(2)]
    first, second = ask(ranks, buckets(sizes), LINK)
    assert first.cause == "slow link" and first.try_.startswith("--parallel.bucket-mb ")
    assert "100 MB/s (0.8 Gbit/s)" in first.text and "buckets of 25 MB leave too late" in first.text
    assert second.cause == "accumulate" and "100 MB/s" in second.text


def test_what_two_pieces_promise_together_is_no_more_than_there_is() -> None:
    exposed = LATENCY_S + S_PER_BYTE * 100 * MB
    ranks = [rank(r, exposed=exposed) for r in range(2)]
    both = ask(ranks, buckets([100 * MB], late=True), replace(LINK, strategy="flat"))
    assert [advice.cause for advice in both] == ["giant bucket", "slow link"]
    left_s = exposed - both[0].gain_ms / 1e3
    assert both[1].gain_ms == pytest.approx(1e3 * left_s / 2)
    assert "would still be exposed" in both[1].text


def test_ranks_of_one_host_need_no_sockets() -> None:
    # AdamW moves 28 bytes for each of 25 million parameters in 0.14 s: 5 GB/s. An exchange moves 2 per byte.
    rows = buckets([100_000_000], latency_s=0.003, s_per_byte=3e-9, late=True)
    ranks = [rank(r, exposed=0.303, update=0.14) for r in range(2)]
    setting = replace(HOST, backend="gloo", strategy="flat", cores=2)
    first, *_ = ask(ranks, rows, setting, num_parameters=25_000_000)
    assert (first.cause, first.try_) == ("gloo", "--parallel.backend shm")
    assert first.gain_ms == pytest.approx(303 - 40 - 1)
    assert "5.0 GB/s (as the update shows it)" in first.how
    other, *_ = ask(ranks, rows, setting, optimizer="sgd")
    assert "5.0 GB/s (an assumption)" in other.how


def test_what_else_the_ranks_tell_each_other_needs_no_sockets_either() -> None:
    rows = buckets([100_000_000], latency_s=0.003, s_per_byte=3e-9, late=True)
    ranks = [rank(r, exposed=0.303, update=0.14) for r in range(2)]
    chatty = [rank(r, exposed=0.333, update=0.14) for r in range(2)]
    chatty = [replace(row, causes={GRADIENT_SYNC: 0.303, GLOBAL_LOSS: 0.030}) for row in chatty]
    setting = replace(HOST, backend="gloo", strategy="flat", cores=2)
    quiet, more = (ask(each, rows, setting, num_parameters=25_000_000)[0] for each in (ranks, chatty))
    assert more.gain_ms == pytest.approx(quiet.gain_ms + 20)  # a third of the time remains


def test_pauses_between_buckets_are_saved_with_the_buckets() -> None:
    sizes = [256 * 1024] * 128
    rows = buckets(sizes, late=True)
    flights_s = 128 * (LATENCY_S + S_PER_BYTE * 256 * 1024)
    setting = replace(LINK, strategy="naive")
    without = ask([rank(r, exposed=flights_s) for r in range(2)], rows, setting)[0]
    paused = ask([rank(r, exposed=flights_s + 0.128) for r in range(2)], rows, setting)[0]  # 1 ms each
    assert without.try_ == "--parallel.strategy bucketed --parallel.bucket-mb 2"
    assert "a bucket takes 3.0 ms + 10 ns per byte" in paused.how
    assert paused.try_ == "--parallel.strategy bucketed --parallel.bucket-mb 4"  # fewer, for they cost more
    last_s = LATENCY_S + 0.001 + S_PER_BYTE * 4 * MB
    assert paused.gain_ms == pytest.approx(1e3 * (flights_s + 0.128 - last_s))


def test_over_links_sockets_are_what_there_is() -> None:
    ranks = [rank(r, exposed=0.5) for r in range(2)]
    assert all(advice.cause != "gloo" for advice in ask(ranks, buckets([4 * MB] * 20), LINK))


def test_much_exposed_communication_is_paid_less_often() -> None:
    # Buckets are as good as they get: the shared memory is the limit, and no core is idle.
    ranks = [rank(r, compute=0.7, exposed=0.2, update=0.08, host=0.02) for r in range(2)]
    (only,) = ask(ranks, buckets([100 * MB], late=True), replace(HOST, strategy="flat", cores=2))
    assert (only.cause, only.changes_training) == ("accumulate", True)
    assert only.gain_ms == pytest.approx(150)
    assert "20 % of a step" in only.text and "changes the training" in only.text
    less = [rank(r, compute=0.8, exposed=0.1, update=0.08, host=0.02) for r in range(2)]
    assert ask(less, buckets([100 * MB], late=True), replace(HOST, strategy="flat", cores=2)) == []


def test_what_changes_the_training_comes_last() -> None:
    ranks = [rank(r, compute=0.5, exposed=0.45, data=0.05) for r in range(2)]
    found = ask(ranks, buckets([100 * MB], late=True), replace(HOST, strategy="flat", cores=2))
    assert [advice.cause for advice in found] == ["loader", "accumulate"]


def test_a_server_s_link_carries_everybody_s_gradients() -> None:
    ranks = [rank(0), *(rank(r, waiting=0.9) for r in range(1, 4))]
    setting = replace(LINK, strategy="server", world_size=4, hosts=4)
    (only,) = ask(ranks, setting=setting)
    assert (only.cause, only.try_) == ("strategy", "--parallel.strategy bucketed")
    assert only.gain_ms == pytest.approx(675)
    assert ask(ranks, setting=replace(setting, hosts=1, ranks_per_host=4)) == []
    slow = Slow(0, "its own compute", 0, 0.5, 0.5, 50)
    assert [advice.cause for advice in ask(ranks, setting=setting, slow=slow)] == ["slow rank"]


def test_a_world_of_one_exchanges_with_nobody() -> None:
    setting = replace(HOST, world_size=1, ranks_per_host=1)
    assert ask([rank(0, exposed=0.5)], buckets([32 * MB]), setting) == []


def test_buckets_of_which_nothing_is_known_are_left_out() -> None:
    ranks = [rank(r, exposed=0.5) for r in range(2)]
    rows = [replace(row, flight_ms=0.0) for row in buckets([32 * MB])]
    assert ask(ranks, rows, LINK) == []
    assert not math.isnan(ask(ranks, [*rows, *buckets([32 * MB])], LINK)[0].gain_ms)
