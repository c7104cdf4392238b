"""From times to answers, on times that were made up so that the answers are plain."""

import pytest

from instep.bench.answers import Answers
from instep.bench.contestants import ALONE, DDP, NONE, Contestant

BUCKETED = Contestant("bucketed", "gloo")


def measured(steps, busy=0.0, agree=(), guard=0.0, received=0):
    return {
        "step_s": steps,
        "busy_s": [busy] * len(steps),
        "agree_s": [list(agree)] * len(steps),
        "guard_s": [guard] * len(steps),
        "received_bytes": [received] * len(steps),
    }


@pytest.fixture
def answers():
    """DDP waits one second more than the floor of two; bucketed a quarter. Rank 1 is slower in round 0."""
    rank_0 = {
        NONE.name: measured([1.5, 2.0, 2.0]),
        ALONE.name: measured([1.8, 1.8, 1.8]),
        DDP.name: measured([3.0, 3.0, 3.0]),
        BUCKETED.name: measured([2.0, 2.25, 2.25], busy=0.9, agree=[0.1, 0.5], guard=0.05, received=7),
    }
    rank_1 = {
        NONE.name: measured([2.0, 1.9, 1.9]),
        ALONE.name: measured([0.0, 0.0, 0.0]),
        DDP.name: measured([3.0, 3.0, 3.0]),
        BUCKETED.name: measured([2.25, 2.0, 2.0], busy=1.0, agree=[0.4, 0.025], guard=0.1, received=9),
    }
    return Answers([rank_0, rank_1])


def test_a_step_takes_as_long_as_on_its_slowest_rank(answers):
    assert answers.steps(NONE.name) == [2.0, 2.0, 2.0]
    assert answers.steps(BUCKETED.name) == [2.25, 2.25, 2.25]


def test_a_strategy_that_waits_a_quarter_as_long_as_ddp_closes_three_quarters_of_the_gap(answers):
    assert answers.exposed(BUCKETED.name) == [0.25] * 3
    assert answers.gap_closed(BUCKETED.name) == 0.75
    assert answers.gap_closed(DDP.name) == 0
    assert answers.gap_closed(NONE.name) == 1


def test_there_is_no_gap_to_close_where_ddp_is_as_fast_as_the_floor(answers):
    for rank in answers.by_rank:
        rank[DDP.name]["step_s"] = [2.0, 2.0, 2.0]
    assert answers.gap_closed(BUCKETED.name) is None
    assert answers.row(BUCKETED)["gap closed(%)"] is None


def test_the_header_of_a_bucket_costs_what_the_last_rank_spends_on_it(answers):
    assert answers.agreement_s(BUCKETED.name) == [pytest.approx(0.1 + 0.025)] * 3
    headers, hooks, share = answers.checks(BUCKETED.name)
    assert (headers, hooks) == (pytest.approx(125), pytest.approx(100))
    assert share == pytest.approx(0.225 / 2.25)


def test_a_row_has_shares_of_the_step(answers):
    row = answers.row(BUCKETED)
    assert row["busy(%)"] == pytest.approx(100 * 1.0 / 2.25)
    assert row["exposed(%)"] == pytest.approx(100 * 0.25 / 2.25)
    assert row["efficiency(%)"] == pytest.approx(80)
    assert row["x DDP"] == 0.75


def test_what_nobody_records_is_left_empty_rather_than_zero(answers):
    assert answers.row(DDP)["busy(%)"] is None
    assert answers.row(NONE)["exposed(ms)"] is None


def test_bytes_are_those_of_the_asked_rank(answers):
    assert (answers.received_bytes(BUCKETED.name), answers.received_bytes(BUCKETED.name, 1)) == (7, 9)
