"""Schedules as text: as drawn in golden/, as torch orders them, and as long as by formula and by paper."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.pipeline.published import (
    ROWS,
    WITHIN,
    Measured,
)
from benchmarks.pipeline.published import peak_activations as peak_by_formula
from instep.pipeline.actions import COMPUTE, Action, GridPlace, Schedule
from instep.pipeline.check import check, peak_activations
from instep.pipeline.closed_forms import cost_s
from instep.pipeline.schedules import NAMES, generate, own
from instep.pipeline.simulate import StageTimes, bubble_rate, makespan_s, simulate
from tests.pipeline.drawn import schedules

F, B, I, W = COMPUTE  # noqa: E741
TWO = """# 2 ranks, 2 stages, 3 micro-batches
rank 0: 0F0 0F1  .  0B0 0F2 0B1  .  0B2
rank 1:  .  1F0 1B0 1F1 1B1 1F2 1B2
"""


@pytest.mark.parametrize(
    "text", ["", "F0", "2F", "2X0", "2f0", "2F0 ", "-1F0", "2F-1", "2F0F0", "9" * 10 + "F0"]
)
def test_what_is_no_action_is_refused(text):
    with pytest.raises(ValueError, match=r"expected a stage, one of F, B, I, W, .* such as 2F0, got"):
        Action.parse(text)


def test_a_forward_needs_the_stage_before_and_a_backward_its_forward_and_the_stage_after():
    schedule = Schedule.parse("0F0 0B0\n1F0 1I0 1W0")
    assert schedule.needs(Action(0, F, 0)) == []
    assert schedule.needs(Action(1, F, 0)) == [Action(0, F, 0)]
    assert schedule.needs(Action(1, I, 0)) == [Action(1, F, 0)]
    assert schedule.needs(Action(0, B, 0)) == [Action(0, F, 0), Action(1, I, 0)]
    assert schedule.needs(Action(1, W, 0)) == [Action(1, I, 0)]


def test_a_schedule_prints_as_the_grid_that_it_is_read_from():
    schedule = Schedule.parse(TWO)
    assert str(schedule) == TWO
    assert (schedule.num_ranks, schedule.num_stages, schedule.num_micro_batches) == (2, 2, 3)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "expected a row of actions per rank, got none"),
        ("0F0 0B0\n,,", "rank 1 has no action"),
        ("0F0 2F0 2B0 0B0", "expected stages 0 to 2, but no rank has an action of stage 1"),
        ("0F0 999999999F0", "expected stages 0 to 999999999, but no rank has an action of stage 1"),
        ("# two\nrank 0: 0F0 0B0\nrank 2: 1F0 1B0", "line 3: expected rank 1, got rank 2"),
        ("rank 0: 0F0 0B0\nrank 0: 1F0 1B0", "line 2: expected rank 1, got rank 0"),
        ("0F0 0B0\n1F0 1Q0", "line 2: expected a stage, one of F, B, .* got '1Q0'"),
        ("(0F0;0B1)OVERLAP_F_B", "line 1: expected a stage, one of"),
    ],
)
def test_what_is_no_schedule_is_refused_with_its_line(text, words):
    with pytest.raises(ValueError, match=words):
        Schedule.parse(text)


def test_a_place_is_marked_under_its_action():
    grid = Schedule.parse(TWO).grid([GridPlace(0, 3), GridPlace(1, 0), GridPlace(1, 6)])
    assert grid == (
        "rank 0: 0F0 0F1  .  0B0 0F2 0B1  .  0B2\n"
        "                        ^^^ <-- here\n"
        "rank 1:  .  1F0 1B0 1F1 1B1 1F2 1B2\n"
        "            ^^^                     ^^^ <-- here"
    )


GOLDEN = sorted((Path(__file__).parent / "golden").glob("*.txt"))


@pytest.mark.parametrize("file", GOLDEN, ids=lambda file: file.stem)
def test_a_schedule_is_the_one_that_is_drawn(file):
    """golden/NAME-RANKSxMICROBATCHES.txt, with xCHUNKS where there is a choice."""
    name, _, counts = file.stem.rpartition("-")
    made = generate(name, *map(int, counts.split("x")))
    assert str(made) == file.read_text()
    assert Schedule.parse(file.read_text(), name) == made


def test_every_schedule_is_drawn():
    assert {file.stem.rpartition("-")[0] for file in GOLDEN} == set(NAMES)


@settings(max_examples=120)
@given(schedules())
def test_every_schedule_is_legal_whole_and_within_its_memory(schedule):
    p, m, v = schedule.num_ranks, schedule.num_micro_batches, schedule.num_stages // schedule.num_ranks
    check(schedule)
    most = [peak_by_formula(schedule.name, p, m, v, rank) for rank in range(p)]
    assert all(peak <= by_formula for peak, by_formula in zip(peak_activations(schedule), most, strict=True))
    per_stage = 3 if "I" in {action.kind for action in schedule.rows[0]} else 2
    assert sum(map(len, schedule.rows)) == per_stage * m * schedule.num_stages
    assert max(schedule.stage_ranks) == p - 1


@given(st.integers(1, 8), st.integers(1, 32), st.integers(1, 4))
def test_peaks_are_what_the_papers_say(p, m, v):
    """In micro-batches of a whole rank."""

    def peaks(name, chunks=None):
        schedule = generate(name, p, m, chunks)
        return [peak / (schedule.num_stages / p) for peak in peak_activations(schedule)]

    assert peaks("naive") == [1] * p
    assert peaks("gpipe") == [m] * p
    assert peaks("1f1b") == [min(m, p - rank) for rank in range(p)]
    assert peaks("zb-h1") == [min(m, p)] * p
    assert peaks("zb-h2") == [min(m, 2 * p - 1)] * p
    assert max(peaks("zb-v")) <= min(m, p)
    if m % p == 0:
        assert max(peaks("interleaved", v)) == pytest.approx(min(m, p * (1 + (p - 1) / (p * v))))


UNEVEN = (1.0, 1.25, 0.5)  # F, I, W


@given(schedules(), st.sampled_from([(1.0, 1.0, 1.0), UNEVEN]))
def test_without_messages_a_schedule_takes_what_its_formula_says(schedule, times):
    name, p, m = schedule.name, schedule.num_ranks, schedule.num_micro_batches
    v = schedule.num_stages // p
    fewest = {"interleaved": p, "zb-h1": p, "zb-h2": 2 * p - 1, "zb-v": 2 * p - 1}.get(name, 1)
    if m < fewest or (name == "zb-v" and times == UNEVEN):
        return
    timeline = simulate(schedule, StageTimes(*(time / v for time in times)))
    expected = cost_s(
        name, p, m, v, forward_s=times[0], input_gradient_s=times[1], weight_gradient_s=times[2]
    )
    assert m * sum(times) / (1 - bubble_rate(timeline)) == pytest.approx(expected, rel=1e-6)


@given(st.sampled_from(sorted(NAMES)), st.integers(2, 8), st.integers(2, 4), st.integers(1, 4))
def test_messages_cost_what_their_formula_says(name, p, groups, v):
    m, v = p * groups, {"interleaved": v, "zb-v": 2}.get(name, 1)
    timeline = simulate(generate(name, p, m, v), StageTimes(1 / v, 1 / v, 1 / v, 0.002))
    expected = cost_s(name, p, m, v, forward_s=1, input_gradient_s=1, weight_gradient_s=1, message_s=0.002)
    assert 3 * m / (1 - bubble_rate(timeline)) == pytest.approx(expected, rel=1e-6)


@given(st.integers(1, 6), st.integers(1, 20), st.integers(2, 4))
def test_interleaved_waits_no_longer_where_groups_are_uneven(p, more, v):
    """Whether p divides m or not, the bubble is a v-th of 1f1b's."""
    m = p + more
    timeline = simulate(generate("interleaved", p, m, v), StageTimes(1 / v, 1 / v, 1 / v))
    assert makespan_s(timeline) == pytest.approx(3 * (m + (p - 1) / v))


def test_what_is_no_name_is_the_text_of_a_schedule():
    assert own("zb-v") is None
    made = own("0F0 0B0")
    assert made is not None and made.rows == generate("naive", 1, 1).rows
    with pytest.raises(ValueError, match=r"expected a schedule of naive, .*zb-v, or the text.*got '2f2b'"):
        own("2f2b")
    with pytest.raises(ValueError, match=r"'my.txt'.* Pass the text of a file, not its path"):
        own("my.txt")
    with pytest.raises(
        ValueError, match=r"^the schedule of your own: line 2: expected a stage, .*got '1X0'$"
    ):
        own("0F0 0B0\n1F0 1X0")
    with pytest.raises(ValueError, match=r"there is no 0B0 or 0I0: add it to rank 0"):
        own("0F0")
    with pytest.raises(ValueError, match=r"says itself which stages a rank has, got chunks=2"):
        own("0F0 0B0", chunks=2)


def test_unknown_names_and_counts_are_refused():
    with pytest.raises(ValueError, match=r"expected a schedule of naive, gpipe, 1f1b, .*, got 'pipedream'"):
        generate("pipedream", 2, 2)
    with pytest.raises(ValueError, match="expected at least one of each, got 2 ranks, 0 micro-batches"):
        generate("1f1b", 2, 0)
    with pytest.raises(ValueError, match="1f1b has 1 stages per rank, got chunks=2: leave it out, or take"):
        generate("1f1b", 2, 2, 2)
    with pytest.raises(ValueError, match="zb-v has 2 stages per rank, got chunks=1"):
        generate("zb-v", 2, 2, 1)
    with pytest.raises(ValueError, match=r"expected a schedule of .* got 'pipedream'"):
        cost_s("pipedream", 2, 2, forward_s=1, input_gradient_s=1, weight_gradient_s=1)


of_torch = pytest.importorskip("torch.distributed.pipelining.schedules")


def rows_of(order):
    """torch's rows by rank, without idle steps and without what is no computation."""
    return tuple(
        tuple(str(action) for action in row if action is not None and action.is_compute_op)
        for _, row in sorted(order.items())
    )


def ours(name, *counts):
    return tuple(tuple(map(str, row)) for row in generate(name, *counts).rows)


def single(kind, ranks, micro_batches):
    """Its order is read off two numbers of the schedule, so they stand for it."""
    order = getattr(getattr(of_torch, kind, None), "_get_pipeline_order", None)
    if order is None:
        pytest.skip("this torch has no order to compare with")
    return rows_of(order(SimpleNamespace(_num_stages=ranks, _n_microbatches=micro_batches)))


def multiple(kind, ranks, micro_batches, chunks):
    """Likewise of a schedule of several stages per rank, with the attributes that its constructor sets."""
    order = getattr(getattr(of_torch, kind, None), "_calculate_single_rank_operations", None)
    if order is None:
        pytest.skip("this torch has no order to compare with")
    rounds = max(1, micro_batches // ranks)
    settings = SimpleNamespace(
        pp_group_size=ranks,
        n_local_stages=chunks,
        num_stages=ranks * chunks,
        number_of_rounds=rounds,
        microbatches_per_round=micro_batches // rounds,
        _n_microbatches=micro_batches,
        _num_stages=ranks * chunks,
    )
    return rows_of({rank: order(settings, rank) for rank in range(ranks)})


@pytest.mark.parametrize(("ranks", "micro_batches"), [(1, 1), (2, 2), (3, 7), (4, 8), (8, 32)])
def test_gpipe_and_1f1b_are_those_of_torch(ranks, micro_batches):
    """torch writes its order of 1f1b down to be looked at; on the last rank it counts forwards from 1."""
    assert ours("gpipe", ranks, micro_batches) == single("ScheduleGPipe", ranks, micro_batches)
    assert ours("1f1b", ranks, micro_batches)[:-1] == single("Schedule1F1B", ranks, micro_batches)[:-1]


@pytest.mark.parametrize(
    ("ranks", "micro_batches", "chunks"),
    [(2, 2, 2), (2, 8, 3), (4, 8, 2), (4, 10, 2), (3, 2, 2), (5, 5, 4), (8, 32, 2)],
)
def test_interleaved_is_that_of_torch(ranks, micro_batches, chunks):
    found = multiple("ScheduleInterleaved1F1B", ranks, micro_batches, chunks)
    assert ours("interleaved", ranks, micro_batches, chunks) == found


@pytest.mark.parametrize(("ranks", "micro_batches"), [(2, 4), (3, 3), (4, 8), (8, 32)])
def test_zb_h1_is_torchs_interleaved_zero_bubble_of_one_stage_per_rank(ranks, micro_batches):
    found = multiple("ScheduleInterleavedZeroBubble", ranks, micro_batches, 1)
    assert ours("zb-h1", ranks, micro_batches) == found


@pytest.mark.parametrize(("ranks", "micro_batches"), [(1, 2), (2, 2), (3, 9), (4, 8), (8, 32)])
def test_zb_v_is_that_of_torch(ranks, micro_batches):
    assert ours("zb-v", ranks, micro_batches) == multiple("ScheduleZBVZeroBubble", ranks, micro_batches, 2)


FEW = [row for row in ROWS if row.micro_batches == 3 * row.ranks and row.ranks < 32]  # the others take long


def work_of(row: Measured) -> tuple[float, float, float]:
    return row.forward_ms / 1e3, row.input_gradient_ms / 1e3, row.weight_gradient_ms / 1e3


def simulated(row: Measured, name: str) -> float:
    v = row.chunks if name == "interleaved" else 1
    times = StageTimes(*(time_s / v for time_s in work_of(row)), row.message_ms / 1e3)
    return bubble_rate(simulate(generate(name, row.ranks, row.micro_batches, v), times))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.model}-{row.micro_batches}")
def test_1f1b_waits_as_published_to_the_last_digit(row):
    assert simulated(row, "1f1b") == pytest.approx(row.rates["1f1b"], abs=WITHIN["1f1b"])


@pytest.mark.parametrize("name", ["interleaved", "zb-h1", "zb-h2"])
@pytest.mark.parametrize("row", FEW, ids=lambda row: f"{row.model}-{row.micro_batches}")
def test_the_others_wait_as_published_to_half_a_point(row, name):
    assert simulated(row, name) == pytest.approx(row.rates[name], abs=WITHIN[name])


def test_another_order_does_not_give_them():
    """A control: the same times by another schedule."""
    row = FEW[0]
    assert abs(simulated(row, "gpipe") - row.rates["1f1b"]) > 100 * WITHIN["1f1b"]
    assert abs(simulated(row, "zb-h1") - row.rates["zb-h2"]) > 5 * WITHIN["zb-h2"]


def test_messages_that_take_the_senders_time_do_not_give_them():
    """Another control: all stages but the ends compute a message longer, and nothing is under way."""
    for row in FEW:
        p, (forward_s, input_gradient_s, weight_gradient_s) = row.ranks, work_of(row)
        message_s = row.message_ms / 1e3
        longer = StageTimes(
            [forward_s + message_s] * (p - 1) + [forward_s],
            [input_gradient_s] + [input_gradient_s + message_s] * (p - 1),
            weight_gradient_s,
        )
        took_s = makespan_s(simulate(generate("1f1b", p, row.micro_batches), longer))
        rate = 1 - row.micro_batches * sum(work_of(row)) / took_s
        assert rate - row.rates["1f1b"] > 5 * WITHIN["1f1b"]
