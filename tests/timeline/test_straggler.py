"""The slow rank is named, and nobody on a healthy run however noisy."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from instep.timeline.breakdown import parts
from instep.timeline.straggler import COMPUTE, DATA, HOST, OwnTimes, SlowRank, _median_without, find_slow_rank
from tests.timeline.drawings import draw

COMPUTE_S, DATA_S, HOST_S = 0.035, 0.005, 0.020  # per micro-batch, per micro-batch, per step


def run(
    ranks: int,
    steps: int,
    seed: int,
    plant: Callable[[OwnTimes], OwnTimes] = lambda own: own,
    *,
    micro_batches: Sequence[int] = (),
    noise: float = 0.08,
) -> list[OwnTimes]:
    """Steps of 100 ms: +-8 % noise on all, one figure in fifty takes three times as long."""
    chance = random.Random(seed)

    def noisy(seconds: float) -> float:
        return seconds * chance.uniform(1 - noise, 1 + noise) * (3 if chance.random() < 0.02 else 1)

    rows = []
    for step in range(steps):
        for rank in range(ranks):
            n = micro_batches[rank] if micro_batches else 2
            own = OwnTimes(rank, step, n, noisy(COMPUTE_S * n), noisy(DATA_S * n), noisy(HOST_S), 0.1)
            rows.append(plant(own))
    return rows


def slow_by(rank: int, phase: str, seconds: float, since: int = 0) -> Callable[[OwnTimes], OwnTimes]:
    field = {COMPUTE: "compute", DATA: "data", HOST: "host"}[phase]

    def plant(own: OwnTimes) -> OwnTimes:
        late = own.rank == rank and own.step >= since
        return replace(own, **{field: getattr(own, field) + seconds}) if late else own

    return plant


@given(st.integers(2, 9), st.integers(5, 120), st.integers(0, 10**9), st.sampled_from([(), (3, 3, 2)]))
def test_a_healthy_run_names_nobody(
    ranks: int, steps: int, seed: int, micro_batches: tuple[int, ...]
) -> None:
    assert find_slow_rank(run(len(micro_batches) or ranks, steps, seed, micro_batches=micro_batches)) is None


@given(st.integers(2, 9), st.integers(5, 40), st.integers(0, 10**9))
def test_nor_does_one_in_which_all_ranks_are_erratic(ranks: int, steps: int, seed: int) -> None:
    assert find_slow_rank(run(ranks, steps, seed, noise=0.4)) is None


@given(st.integers(2, 9), st.integers(30, 120), st.integers(0, 10**9), st.sampled_from([COMPUTE, DATA, HOST]))
def test_a_rank_that_is_slow_by_30_percent_is_named(ranks: int, steps: int, seed: int, phase: str) -> None:
    slow = find_slow_rank(run(ranks, steps, seed, slow_by(ranks - 1, phase, 0.030)))
    assert slow is not None
    assert (slow.rank, slow.phase) == (ranks - 1, phase)
    assert slow.excess_s == pytest.approx(0.030, abs=0.006)
    assert slow.share == pytest.approx(0.30, abs=0.06)
    assert slow.since <= 5


@settings(max_examples=20)
@given(st.integers(0, 10**9), st.sampled_from([COMPUTE, DATA, HOST]))
def test_the_step_is_found_at_which_a_rank_became_slow(seed: int, phase: str) -> None:
    slow = find_slow_rank(run(3, 400, seed, slow_by(1, phase, 0.030, since=250)))
    assert slow is not None
    assert (slow.rank, slow.phase) == (1, phase)
    assert abs(slow.since - 250) <= 8
    assert slow.steps == 400 - slow.since


def exact(
    ranks: int, steps: int, plant: Callable[[OwnTimes], OwnTimes], micro_batches: Sequence[int] = ()
) -> SlowRank | None:
    """Without noise, so that every figure can be told."""
    rows = [
        OwnTimes(r, s, micro_batches[r] if micro_batches else 2, 0.07, 0.01, 0.02, 0.1)
        for s in range(steps)
        for r in range(ranks)
    ]
    return find_slow_rank([plant(row) for row in rows])


def test_without_noise_the_figures_are_exact() -> None:
    slow = exact(4, 30, slow_by(2, DATA, 0.02, since=11))
    assert slow == SlowRank(2, DATA, 11, pytest.approx(0.02), pytest.approx(0.2), 19, pytest.approx(0.02))


@given(st.lists(st.integers(0, 9), min_size=2, max_size=9))
def test_the_median_of_the_others(figures: list[int]) -> None:
    for at, figure in enumerate(figures):
        others = figures[:at] + figures[at + 1 :]
        assert _median_without(sorted(figures), figure) == median(others)


@pytest.mark.parametrize(("excess_s", "named"), [(0.0099, False), (0.0101, True)])
def test_more_than_a_tenth_of_the_step_is_slow(excess_s: float, named: bool) -> None:
    assert (exact(2, 10, slow_by(1, HOST, excess_s)) is not None) is named


@pytest.mark.parametrize(("steps", "named"), [(4, False), (5, True)])
def test_five_steps_are_enough_to_tell(steps: int, named: bool) -> None:
    assert (exact(2, steps, slow_by(1, HOST, 0.05)) is not None) is named


def test_who_is_slow_only_now_and_then_is_not_named() -> None:
    def plant(own: OwnTimes) -> OwnTimes:
        return replace(own, host=0.08) if own.rank == 1 and own.step % 3 else own  # 67 % of the steps

    assert exact(2, 60, plant) is None


def test_of_two_causes_the_greater_is_named() -> None:
    one, other = slow_by(0, DATA, 0.02), slow_by(2, COMPUTE, 0.03)
    slow = exact(4, 20, lambda own: one(other(own)))
    assert slow is not None
    assert (slow.rank, slow.phase) == (2, COMPUTE)


def test_more_micro_batches_are_no_slowness_and_slow_ones_are() -> None:
    micro_batches = (3, 3, 2)

    def fair(own: OwnTimes) -> OwnTimes:
        return replace(own, compute=0.03 * own.micro_batches, data=0.005 * own.micro_batches)

    assert exact(3, 20, fair, micro_batches) is None
    slow = exact(3, 20, lambda own: slow_by(2, COMPUTE, 0.024)(fair(own)), micro_batches)
    assert slow == SlowRank(
        2, COMPUTE, 0, pytest.approx(0.024), pytest.approx(0.24), 20, pytest.approx(0.024)
    )


def test_a_rank_without_micro_batches_does_not_make_the_others_slow() -> None:
    def plant(own: OwnTimes) -> OwnTimes:
        return own if own.rank else replace(own, micro_batches=0, compute=0.0, data=0.0)

    assert exact(2, 20, plant) is None
    assert exact(3, 20, plant) is None


def test_where_no_micro_batches_are_known_whole_steps_are_compared() -> None:
    slow = exact(2, 20, slow_by(1, COMPUTE, 0.03), micro_batches=(0, 0))
    assert slow is not None
    assert slow.excess_s == pytest.approx(0.03)


@pytest.mark.parametrize("rows", [[], run(1, 50, 0)], ids=["no steps", "a world of one"])
def test_nobody_to_compare_with_is_nobody_slow(rows: list[OwnTimes]) -> None:
    assert find_slow_rank(rows) is None


def test_own_time_is_all_but_waits_and_the_update_and_travels_as_figures() -> None:
    found = parts(
        draw(
            """
            data            |dd...............|
            compute         |..ffbb......uuu..|
            host            |......SSSSSS...l.|
            communication 0 |......111AXX.....|
            """,
            rank=3,
            step=7,
        )
    )
    assert found is not None
    own = OwnTimes.of(found)
    assert own == OwnTimes(3, 7, 1, 0.004, 0.002, pytest.approx(0.001), 0.017)  # without the ledger
    assert OwnTimes.from_list(own.to_list()) == own
    with pytest.raises(ValueError, match="expected 8 figures of a rank's step, got 2"):
        OwnTimes.from_list([1.0, 2.0])
