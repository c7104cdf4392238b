"""Advice: each cause is named with its gain, the sentences read as such, and a healthy run gets none."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import pytest

from instep.events import GLOBAL_LOSS, GRADIENT_SYNC
from instep.timeline.advice import Advice, advise
from instep.timeline.breakdown import COMPUTE, DATA, EXPOSED, IDLE, PARTS, WAITING, RankBreakdown, Waited
from instep.timeline.bucket_times import BucketRow
from instep.timeline.run_setting import RunSetting
from instep.timeline.straggler import SlowRank

MB = 1 << 20
LATENCY_S, S_PER_BYTE = 0.002, 10e-9  # 100 MB/s between two ranks
BACKWARD_S = 0.4

HOST = RunSetting(
    "bucketed",
    "shm",
    world_size=2,
    ranks_per_host=2,
    hosts=1,
    threads=1,
    cores=8,
    bucket_mb=25,
    num_leaves=8,
    micro_size=4,
)
LINK = replace(HOST, backend="gloo", ranks_per_host=1, hosts=2)


def rank(
    number: int, *, compute: float = 0.9, exposed: float = 0.0, waiting: float = 0.0, **more: float
) -> RankBreakdown:
    """One rank's step, in seconds: what the parts leave of it is ``unattributed``."""
    parts = dict.fromkeys(PARTS, 0.0)
    parts |= {"compute": compute, "exposed communication": exposed, "waiting for a slower rank": waiting}
    parts |= {"waiting for data": more.get("data", 0.0), "update": more.get("update", 0.0)}
    parts["host"] = more.get("host", 0.0)
    wall = sum(parts.values())
    causes = {GRADIENT_SYNC: exposed}
    row = RankBreakdown(number, 20, wall, wall, parts, causes, {}, 0.0, 0.0, None)
    return replace(row, losses=steady(row))


def steady(row: RankBreakdown, low: float = 1.0) -> dict[str, Waited]:
    """What every step loses as much of as the mean one, but for a lower quartile of ``low`` times that."""
    lost = {name: row.parts[name] for name in (COMPUTE, DATA, EXPOSED)}
    lost |= {GRADIENT_SYNC: row.causes[GRADIENT_SYNC], IDLE: row.parts[EXPOSED] + row.parts[WAITING]}
    return {name: Waited(low * seconds, seconds) for name, seconds in lost.items()}


def buckets(
    sizes: Sequence[float],
    *,
    latency_s: float = LATENCY_S,
    s_per_byte: float = S_PER_BYTE,
    late: bool = False,
) -> list[BucketRow]:
    """Buckets that become ready evenly in a backward which ends at 1 s, or all at its end (``late``)."""
    rows, sent = [], 0.0
    for k, size in enumerate(sizes):
        sent += size
        ready_ms = 1e3 if late else 1e3 * (1 - BACKWARD_S * (1 - sent / sum(sizes)))
        flight_ms = 1e3 * (latency_s + s_per_byte * size)
        agree_ms = 1e3 * latency_s / 3
        ready = {0: ready_ms, 1: ready_ms}
        rows.append(
            BucketRow(
                k, int(size), ready, 0, 1, 0, flight_ms, agree_ms, flight_ms - agree_ms, flight_ms, 0.0, 20
            )
        )
    return rows


def ask(
    ranks: Sequence[RankBreakdown],
    rows: Sequence[BucketRow] = (),
    setting: RunSetting = HOST,
    slow: SlowRank | None = None,
    **more: Any,
) -> list[Advice]:
    found = advise(ranks, rows, slow, setting, backward_s=BACKWARD_S, **more)
    for advice in found:
        reads_as_a_sentence(advice.text)
        reads_as_a_sentence(advice.how[0].upper() + advice.how[1:])
        assert advice.gain_share >= 0.01 and 0.5 <= advice.confidence <= 1
        assert advice.gain_ms == pytest.approx(advice.gain_share * median(r.median_s for r in ranks) * 1e3)
    assert found == sorted(found, key=lambda advice: (advice.changes_training, -advice.gain_ms))
    return found


def reads_as_a_sentence(text: str) -> None:
    assert text[0].isupper() or text[0].isdigit()
    assert text.endswith(".")
    assert "  " not in text and " ," not in text and "nan" not in text and "None" not in text
    assert text.count("(") == text.count(")")


def test_a_healthy_run_gets_no_advice() -> None:
    healthy = [rank(r, exposed=0.02, waiting=0.01 * r, data=0.004, update=0.05, host=0.01) for r in range(2)]
    assert ask(healthy, buckets([4 * MB] * 4, s_per_byte=5e-10)) == []
    assert ask([]) == []


def test_a_slow_rank_is_named_with_its_phase_and_what_the_others_wait() -> None:
    ranks = [rank(0, waiting=0.30), rank(1, waiting=0.28), rank(2, compute=1.2), rank(3, waiting=0.29)]
    slow = SlowRank(2, "its own compute", since=40, excess_s=0.30, share=0.33, steps=100, low_s=0.24)
    first, *rest = ask(ranks, slow=slow)
    assert (first.cause, rest) == ("slow rank", [])
    assert first.gain_ms == pytest.approx(290)  # the median of what 0, 1 and 3 wait, below the excess
    assert first.confidence == pytest.approx(0.8)
    assert "Rank 2 computes longer" in first.text
    assert "300 ms in every step since step 40" in first.text


@pytest.mark.parametrize(
    ("phase", "words"), [("its data", "waits longer for its data"), ("its host code", "host code")]
)
def test_a_slow_rank_s_phase_is_in_the_text(phase: str, words: str) -> None:
    ranks = [rank(0, waiting=0.3), rank(1, data=0.3)]
    (only,) = ask(ranks, slow=SlowRank(1, phase, 0, 0.25, 0.3, 50, 0.25))
    assert words in only.text
    assert only.gain_ms == pytest.approx(250)


def test_the_wait_for_a_slow_rank_is_no_matter_of_the_link() -> None:
    ranks = [rank(0, waiting=0.30, exposed=0.01), rank(1, compute=1.2, exposed=0.01)]
    slow = SlowRank(1, "its own compute", 0, 0.30, 0.33, 50, 0.30)
    found = ask(ranks, buckets([4 * MB] * 2, s_per_byte=1e-10), LINK, slow)
    assert [advice.cause for advice in found] == ["slow rank"]


def test_a_slow_rank_s_milliseconds_are_not_given_away_again_where_they_look_like_messages() -> None:
    # Nobody saw that the 0.3 s were a wait for rank 1.
    ranks = [rank(0, exposed=0.32), rank(1, compute=1.2, exposed=0.02)]
    slow = SlowRank(1, "its own compute", 0, 0.30, 0.33, 50, 0.30)
    found = ask(ranks, buckets([20 * MB], late=True), replace(LINK, strategy="flat"), slow)
    assert [advice.cause for advice in found] == ["slow rank"]
    assert found[0].gain_ms == pytest.approx(300)


def test_a_slow_loader_everywhere_hides_under_the_rest() -> None:
    ranks = [rank(r, compute=0.7, data=0.3) for r in range(2)]
    (only,) = ask(ranks)
    assert (only.cause, only.try_) == ("loader", "")
    assert only.gain_ms == pytest.approx(300)
    assert "300 ms per step (30 %) for its data" in only.text
    assert "no core is idle" not in only.how
    assert "no core is idle" in ask(ranks, setting=replace(HOST, cores=2))[0].how


def test_reading_a_batch_takes_a_little_of_any_step() -> None:
    assert ask([rank(r, compute=0.96, data=0.04) for r in range(2)]) == []
    assert [advice.cause for advice in ask([rank(r, compute=0.94, data=0.06) for r in range(2)])] == [
        "loader"
    ]


def test_a_single_long_step_makes_no_part_longer() -> None:
    # Of a mean step of 1 s, 0.3 s are data; the median step takes 0.8 s, and its share of that is 0.24 s.
    ranks = [replace(rank(r, compute=0.7, data=0.3), median_s=0.8) for r in range(2)]
    assert ask(ranks)[0].gain_ms == pytest.approx(240)


def test_a_loader_that_takes_longer_than_all_else_stays_the_limit() -> None:
    (only,) = ask([rank(r, compute=0.2, data=0.8) for r in range(2)])
    assert only.gain_ms == pytest.approx(200)  # 1 s becomes 0.8 s


def test_a_loader_that_has_workers_is_advised_more_of_them_where_cores_are_idle() -> None:
    """While rank 0 waits for rank 1, its workers read ahead: it may be no faster, so no rank is to blame."""
    ranks = [rank(0, compute=0.4, waiting=0.6), rank(1, compute=0.4, data=0.6)]
    slow = SlowRank(1, "its data", 0, 0.6, 0.6, 50, 0.6)
    (only,) = ask(ranks, slow=slow, setting=replace(HOST, num_workers=2, cores=16))
    assert only.cause == "loader"
    assert "num_workers=3" in only.text
    assert only.gain_ms == pytest.approx(1000 / 3)
    assert ask(ranks, slow=slow, setting=replace(HOST, num_workers=2, cores=2)) == []


def test_one_rank_s_slow_loader_is_not_everybody_s() -> None:
    ranks = [rank(0, waiting=0.3), rank(1, data=0.3), rank(2, waiting=0.3)]
    found = ask(ranks, slow=SlowRank(1, "its data", 0, 0.3, 0.33, 50, 0.3))
    assert [advice.cause for advice in found] == ["slow rank"]


def test_more_threads_than_cores_are_too_many() -> None:
    ranks = [rank(r, compute=0.8) for r in range(4)]
    setting = replace(HOST, world_size=4, ranks_per_host=4, threads=4)
    (only,) = ask(ranks, setting=setting)
    assert (only.cause, only.try_) == ("threads", "--parallel.threads 2")
    assert only.gain_ms == pytest.approx(400)  # half of the 16 threads have no core
    assert "an upper estimate" in only.how
    assert ask(ranks, setting=replace(setting, threads=2)) == []
    (most,) = ask(ranks, setting=replace(setting, cores=2))
    assert most.gain_ms == pytest.approx(600)  # 16 threads become 4, one per rank
    assert ask(ranks, setting=replace(setting, threads=1, cores=2)) == []  # no fewer to have


def test_unequal_shares_of_the_micro_batches_leave_ranks_idle() -> None:
    ranks = [rank(0, compute=0.9), rank(1, compute=0.9), rank(2, compute=0.6, waiting=0.3)]
    (only,) = ask(ranks, setting=replace(HOST, world_size=3))
    assert (only.cause, only.try_) == ("uneven", "--batch.global-size 36")
    assert only.gain_ms == pytest.approx(900 / 9)  # 9 micro-batches take as long as 8
    assert "3 on some and 2 on others" in only.text
    assert ask(ranks, setting=replace(HOST, world_size=3, num_leaves=0)) == []
    assert ask(ranks, setting=replace(HOST, world_size=3, num_leaves=9)) == []


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


@pytest.mark.parametrize("strategy", ["server", "fully_shard"])
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


def test_no_bucket_is_larger_than_what_there_is_to_send() -> None:
    sizes = [32 * 1024] * 54  # 1.7 MB
    ranks = [rank(r, exposed=54 * LATENCY_S + S_PER_BYTE * sum(sizes)) for r in range(2)]
    naive, *_ = ask(ranks, buckets(sizes, late=True), replace(HOST, strategy="naive", cores=2))
    assert naive.try_ == "--parallel.strategy bucketed --parallel.bucket-mb 2"
    assert naive.text.endswith("for them: send one bucket.")
    tiny, *_ = ask(ranks, buckets(sizes), replace(HOST, bucket_mb=0.01, cores=2))
    assert (tiny.cause, tiny.try_) == ("tiny buckets", "--parallel.bucket-mb 2")


def test_other_buckets_must_gain_more_than_the_wait_for_them_differs_by() -> None:
    rows, exposed = buckets([8 * MB] * 4), 0.24
    ranks = [rank(r, exposed=exposed) for r in range(2)]
    gain_s = ask(ranks, rows, LINK)[0].gain_ms / 1e3
    for low, said in ((1 - 0.9 * gain_s / exposed, [True]), (1 - 1.1 * gain_s / exposed, [])):
        noisy = [replace(row, losses=steady(row, low)) for row in ranks]
        assert ["buckets" in one.text for one in ask(noisy, rows, LINK) if not one.changes_training] == said


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
    on_gpu = ask(ranks, rows, replace(setting, device="cuda"), num_parameters=25_000_000)
    assert "gloo" not in [advice.cause for advice in on_gpu]


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


def test_a_world_of_one_exchanges_with_nobody() -> None:
    setting = replace(HOST, world_size=1, ranks_per_host=1)
    assert ask([rank(0, exposed=0.5)], buckets([32 * MB]), setting) == []


def test_buckets_of_which_nothing_is_known_are_left_out() -> None:
    ranks = [rank(r, exposed=0.5) for r in range(2)]
    rows = [replace(row, flight_ms=0.0) for row in buckets([32 * MB])]
    assert ask(ranks, rows, LINK) == []
    assert not math.isnan(ask(ranks, [*rows, *buckets([32 * MB])], LINK)[0].gain_ms)


CAUSES = {
    "loader": ([rank(r, compute=0.7, data=0.3) for r in range(2)], [], HOST, None),
    "slow rank": (
        [rank(0, waiting=0.3), rank(1, compute=1.2)],
        [],
        HOST,
        SlowRank(1, "its own compute", 0, 0.30, 0.33, 50, 0.30),
    ),
    "giant bucket": (
        [rank(r, exposed=0.338) for r in range(2)],
        buckets([32 * MB]),
        replace(LINK, bucket_mb=1000),
        None,
    ),
    "gloo": (
        [rank(r, exposed=0.303, update=0.14) for r in range(2)],
        buckets([100_000_000], latency_s=0.003, s_per_byte=3e-9, late=True),
        replace(HOST, backend="gloo", strategy="flat", cores=2),
        None,
    ),
    "uneven": ([rank(0), rank(1), rank(2, compute=0.6, waiting=0.3)], [], replace(HOST, world_size=3), None),
}


@pytest.mark.parametrize("cause", CAUSES)
def test_a_wait_that_comes_and_goes_is_noise_and_no_cause(cause: str) -> None:
    """In a quarter of the steps there is less than half of it: what is gained then is anybody's guess."""
    ranks, rows, setting, slow = CAUSES[cause]

    def said(low: float) -> list[Advice]:
        noisy = [replace(row, losses=steady(row, low)) for row in ranks]
        found = ask(noisy, rows, setting, slow and replace(slow, low_s=low * slow.excess_s))
        return [advice for advice in found if advice.cause == cause]

    (sure,), (less,) = said(1.0), said(0.6)
    assert (sure.confidence, less.confidence) == (1.0, pytest.approx(0.6))
    assert less.gain_ms == sure.gain_ms
    assert said(0.4) == []


def test_what_is_not_known_step_by_step_is_not_promised() -> None:
    ranks = [replace(rank(r, compute=0.7, data=0.3), losses={}) for r in range(2)]
    assert ask(ranks) == []


def test_no_gain_is_more_than_the_wait() -> None:
    """Half as many exchanges save half of update and host code too, which would be 12 ms for a wait of 8."""
    ranks = [rank(r, compute=0.026, exposed=0.0079, update=0.012, host=0.004) for r in range(2)]
    (only,) = ask(ranks, buckets([100 * MB], late=True), replace(HOST, strategy="flat", cores=2))
    assert (only.cause, only.gain_ms) == ("accumulate", pytest.approx(7.9))


def test_a_few_long_waits_are_not_those_of_the_median_step() -> None:
    """A mean of 300 ms, because some steps wait for seconds."""
    ranks = [rank(r, compute=0.7, data=0.3) for r in range(2)]
    ranks = [replace(row, losses={**row.losses, DATA: Waited(0.05, 0.08)}) for row in ranks]
    assert ask(ranks)[0].gain_ms == pytest.approx(80)
