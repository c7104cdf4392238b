"""Charts of a step: nothing is lost or drawn twice, and words stay in their boxes."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.collections import PolyCollection

from instep.events import STEP, Event, Timeline
from instep.pipeline.schedules import generate
from instep.pipeline.simulate import StageTimes, simulate
from instep.timeline import style
from instep.timeline.bubbles import DRAIN, FILL, STEADY
from instep.timeline.palette import COLOURS
from instep.timeline.step_chart import (
    BACKWARD,
    BUBBLES,
    DATA,
    EXCHANGE,
    FORWARD,
    HEADERS,
    HOST,
    INPUT_GRADIENT,
    LATE,
    MESSAGE,
    ONE,
    QUEUED,
    SEVERAL,
    SLOWER,
    UPDATE,
    WEIGHT_GRADIENT,
    Box,
    _label,
    draw,
    merged,
    on_top,
    panel,
    rows,
    step_chart,
)
from instep.timeline.trace_files import read_traces
from tests.timeline.made_up_run import MadeUpRun


def recorded(folder: Path, buckets: int = 2) -> Timeline:
    """Step 7 of a run of two ranks, of which the second is slower."""
    run = MadeUpRun(folder, 2, buckets=buckets, slower=lambda rank: 1 + 0.5 * rank)
    run.steps(7, 8)
    return read_traces(folder).timeline(7)


A_BOX = st.builds(
    lambda kind, start, length: Box(kind, start, start + length),
    st.sampled_from((FORWARD, UPDATE, HOST, "gradient sync")),
    st.integers(0, 60),
    st.integers(0, 30),
)


def event(lane, name, start, end, **more):
    return Event(0, lane, name, start, end, step=3, **more)


def drawn(kind_of_row):
    return [(box.kind, box.start_ns, box.end_ns) for box in kind_of_row]


def test_what_waits_is_drawn_as_bubbles_and_what_covers_is_on_top():
    window = event("host", STEP, 100, 200)
    found = rows(
        [
            event("data", "data", 90, 110),  # begins before the step
            event("compute", "forward", 110, 130),
            event("compute", "backward", 130, 150),
            event("host", "gradient sync", 150, 180),
            event("host", "books", 180, 200),
            event("compute", "update", 185, 190),
            event("communication", "queued", 135, 145, bucket=0),
            event("communication", "wait", 145, 160, bucket=0, peer=1),
            event("communication", "agree", 160, 162, bucket=0),
            event("communication", "exchange", 162, 180, bucket=0),
            window,
        ],
        window,
    )
    assert list(found) == ["compute", "communication"]
    assert drawn(found["compute"]) == [
        (DATA, 100, 110),
        (FORWARD, 110, 130),
        (BACKWARD, 130, 150),
        (SLOWER, 150, 160),
        ("gradient sync", 160, 180),
        (HOST, 180, 185),
        (UPDATE, 185, 190),
        (HOST, 190, 200),
    ]
    assert found["compute"][3].texts[0] == "waits for rank 1"
    assert drawn(found["communication"]) == [
        (QUEUED, 135, 145),
        (LATE, 145, 160),
        (HEADERS, 160, 162),
        (EXCHANGE, 162, 180),
    ]


@given(st.lists(A_BOX, max_size=12))
def test_what_is_on_top_is_what_painting_one_box_over_the_other_leaves(boxes):
    low, high = 10, 70
    canvas = [""] * 100
    layer = {HOST: 0, UPDATE: 1, FORWARD: 2, "gradient sync": 3}
    for box in sorted(boxes, key=lambda box: (layer[box.kind], box.start_ns)):
        canvas[box.start_ns : box.end_ns] = [box.kind] * (box.end_ns - box.start_ns)
    seen = on_top(boxes, low, high)
    painted = [""] * 100
    for box in seen:
        assert painted[box.start_ns : box.end_ns] == [""] * (box.end_ns - box.start_ns)
        painted[box.start_ns : box.end_ns] = [box.kind] * (box.end_ns - box.start_ns)
    assert painted == [""] * low + canvas[low:high] + [""] * 30


@given(
    st.lists(st.tuples(st.sampled_from((HEADERS, EXCHANGE)), st.integers(0, 40), st.integers(1, 40))),
    st.integers(1, 50),
)
def test_merging_keeps_every_box_in_sight_and_leaves_none_too_narrow(gaps, least):
    row, at = [], 0
    for kind, gap, length in gaps:
        row.append(Box(kind, at + gap, at + gap + length))
        at = row[-1].end_ns
    result = merged(row, least)
    assert all(box.end_ns - box.start_ns >= least for box in result)
    for box in row:
        assert any(one.start_ns <= box.start_ns and box.end_ns <= one.end_ns for one in result)
    assert all(box in result for box in row if box.end_ns - box.start_ns >= least)
    assert sorted(result, key=lambda box: box.start_ns) == result


def test_words_lie_in_their_boxes_and_lengths_within_the_axes(tmp_path):
    with style.styled():
        figure = draw([panel(recorded(tmp_path / f"{n}", n), 7) for n in (1, 2, 12)], SEVERAL)
        figure.draw_without_rendering()
    for axes in figure.axes:
        spans = [found for found in axes.collections if isinstance(found, PolyCollection)]
        boxes = [path.get_extents(axes.transData) for found in spans for path in found.get_paths()]
        for text in axes.texts:
            words = text.get_window_extent()
            around = [axes.bbox] if text.get_text().endswith(" ms") else boxes
            assert any(
                box.x0 <= words.x0 and words.x1 <= box.x1 and box.y0 <= (words.y0 + words.y1) / 2 <= box.y1
                for box in around
            ), text.get_text()
    assert "gradient sync" in [text.get_text() for text in figure.axes[-1].texts]


def test_a_bubble_that_slivers_cut_up_is_labelled_once():
    window = event("host", STEP, 0, 10**6)
    lengths = (1, 30_000)  # one is too narrow to be drawn as it is
    late = [
        event("communication", "wait", at, at + length, bucket=0, peer=1)
        for at, length in zip((500_000, 700_000), lengths, strict=True)
    ]
    one = panel(Timeline([event("host", "gradient sync", 100_000, 10**6), *late, window]), 3)
    figure = draw([one], ONE)
    assert [text.get_text() for text in figure.axes[0].texts].count("gradient sync") == 1


def test_a_step_without_events_is_said_with_those_that_have_some(tmp_path):
    with pytest.raises(ValueError, match=r"step 8: no events of ranks .*steps that have events: 7 to 7"):
        step_chart(recorded(tmp_path), step=8)


def test_micro_batches_are_numbered_and_gradients_of_inputs_and_weights_have_colours_of_their_own():
    timeline = simulate(generate("zb-h1", 2, 4), StageTimes(0.01, 0.01, 0.01, 0.001))
    one = panel(timeline, 0)
    for rank, lanes in one.rows.items():
        computed = [
            (event.name, str(event.leaf)) for event in timeline.of(rank, 0) if event.lane == "compute"
        ]
        assert [(box.kind, box.texts[0]) for box in lanes["compute"] if box.kind not in BUBBLES] == computed
        assert {box.kind for box in lanes["communication"]} == {MESSAGE}
    assert {INPUT_GRADIENT, WEIGHT_GRADIENT} < {box.kind for box in one.rows[0]["compute"]}
    looks = [COLOURS[kind] for kind in (FORWARD, BACKWARD, INPUT_GRADIENT, WEIGHT_GRADIENT, UPDATE)]
    assert len(set(looks)) == 5


def test_a_pipelines_waits_are_fill_steady_state_and_drain_and_no_slower_rank():
    """1f1b, 2 ranks, 2 micro-batches, forward 10 ms, backward 20 ms, a message 5 ms."""
    one = panel(simulate(generate("1f1b", 2, 2), StageTimes(0.01, 0.01, 0.01, 0.005)), 0)
    found = [
        [
            (box.kind, box.start_ns // 10**6, box.end_ns // 10**6)
            for box in lanes["compute"]
            if box.kind in BUBBLES
        ]
        for lanes in one.rows.values()
    ]
    assert found == [[(STEADY, 20, 50), (STEADY, 70, 80)], [(FILL, 0, 15), (DRAIN, 75, 100)]]
    assert one.phases_ns == (0, 15_000_000, 75_000_000, 100_000_000)
    figure = draw([one], ONE)
    assert _label("gradient sync") == "waits for gradient sync" and _label(SLOWER) == SLOWER  # of no pipeline
    told = [text.get_text() for axes in figure.axes for text in axes.texts]
    assert {"fill", "steady state", "drain", "waits"} <= {*told}
    legend = {text.get_text() for text in figure.texts}
    assert {"bubble: fill", "bubble: steady state", "bubble: drain", "message between stages"} <= legend
