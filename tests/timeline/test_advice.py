"""Advice: each cause is named with its gain, the sentences read as such, and a healthy run gets none."""

from __future__ import annotations

from dataclasses import replace

import pytest

from instep.timeline.straggler import Slow
from tests.timeline.advised import HOST, LINK, MB, ask, buckets, rank


def test_a_healthy_run_gets_no_advice() -> None:
    healthy = [rank(r, exposed=0.02, waiting=0.01 * r, data=0.004, update=0.05, host=0.01) for r in range(2)]
    assert ask(healthy, buckets([4 * MB] * 4, s_per_byte=5e-10)) == []
    assert ask([]) == []


def test_a_slow_rank_is_named_with_its_phase_and_what_the_others_wait() -> None:
    ranks = [rank(0, waiting=0.30), rank(1, waiting=0.28), rank(2, compute=1.2), rank(3, waiting=0.29)]
    slow = Slow(2, "its own compute", since=40, excess_s=0.30, share=0.33, steps=100)
    first, *rest = ask(ranks, slow=slow)
    assert (first.cause, rest) == ("slow rank", [])
    assert first.gain_ms == pytest.approx(290)  # the median of what 0, 1 and 3 wait, below the excess
    assert "Rank 2 computes longer" in first.text
    assert "300 ms in every step since step 40" in first.text


@pytest.mark.parametrize(
    ("phase", "words"), [("its data", "waits longer for its data"), ("its host code", "host code")]
)
def test_a_slow_rank_s_phase_is_in_the_text(phase: str, words: str) -> None:
    ranks = [rank(0, waiting=0.3), rank(1, data=0.3)]
    (only,) = ask(ranks, slow=Slow(1, phase, 0, 0.25, 0.3, 50))
    assert words in only.text
    assert only.gain_ms == pytest.approx(250)


def test_the_wait_for_a_slow_rank_is_no_matter_of_the_link() -> None:
    ranks = [rank(0, waiting=0.30, exposed=0.01), rank(1, compute=1.2, exposed=0.01)]
    slow = Slow(1, "its own compute", 0, 0.30, 0.33, 50)
    found = ask(ranks, buckets([4 * MB] * 2, s_per_byte=1e-10), LINK, slow)
    assert [advice.cause for advice in found] == ["slow rank"]


def test_a_slow_rank_s_milliseconds_are_not_given_away_again_where_they_look_like_messages() -> None:
    # Nobody saw that the 0.3 s were a wait for rank 1.
    ranks = [rank(0, exposed=0.32), rank(1, compute=1.2, exposed=0.02)]
    slow = Slow(1, "its own compute", 0, 0.30, 0.33, 50)
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


def test_one_rank_s_slow_loader_is_not_everybody_s() -> None:
    ranks = [rank(0, waiting=0.3), rank(1, data=0.3), rank(2, waiting=0.3)]
    found = ask(ranks, slow=Slow(1, "its data", 0, 0.3, 0.33, 50))
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
