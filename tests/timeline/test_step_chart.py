"""Charts of a step: nothing is lost or drawn twice, and words stay in their boxes."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.collections import PolyCollection

from instep.events import STEP, Event, Timeline
from instep.pipeline.schedules import generate
from instep.pipeline.simulate import StageTimes, simulate
from instep.timeline import style
from instep.timeline.bubbles import DRAIN, FILL, STEADY
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
    draw,
    merged,
    on_top,
    panel,
    rows,
    side_by_side,
    step_chart,
)

FORWARD_MS, BACKWARD_MS, UPDATE_MS, HOST_MS = 250.0, 500.0, 12.0, 3.0  # ms
NUM_PARAMETERS, MEGABYTES, MB_PER_MS, LATENCY = 48, 72.0, 0.119, 1.2
BUCKETS = {"naive": NUM_PARAMETERS, "flat": 1, "overlap": NUM_PARAMETERS, "bucketed": 12}


def made(strategy: str, slower: tuple[float, ...] = (1.0, 1.04), step: int = 7) -> Timeline:
    """One step of as many ranks as there are factors of ``slower``, by which each computes longer."""
    ranks = range(len(slower))
    begins = [1.7 * rank for rank in ranks]
    computed = [begins[rank] + 4 + (FORWARD_MS + BACKWARD_MS) * slower[rank] for rank in ranks]
    events = [event for rank in ranks for event in _computation(rank, begins[rank], slower[rank])]
    events += _loader(begins)
    count, free = BUCKETS[strategy], 0.0
    for bucket in range(count):
        ready = [computed[rank] - BACKWARD_MS * slower[rank] * (1 - (bucket + 1) / count) for rank in ranks]
        began = [
            max(free, ready[rank] if strategy in ("overlap", "bucketed") else computed[rank])
            for rank in ranks
        ]
        together, last = max(began), began.index(max(began))
        agreed = together + LATENCY
        free = agreed + LATENCY + MEGABYTES / count / MB_PER_MS
        for rank in ranks:
            at = [ready[rank], began[rank], together, agreed, free]
            for name, start, end in zip(
                ("queued", "wait", "agree", "exchange"), at[:-1], at[1:], strict=True
            ):
                peer = last if name == "wait" else -1
                num_bytes = round(MEGABYTES / count * 1e6) if name == "exchange" else 0
                if name != "wait" or rank != last:
                    events.append(_event(rank, "communication", name, start, end, num_bytes, bucket, peer))
    for rank in ranks:
        events += [
            _event(rank, "host", "gradient sync", computed[rank], free),
            _event(rank, "compute", "update", free, free + UPDATE_MS),
            _event(rank, "host", "ledger", free + UPDATE_MS, free + UPDATE_MS + HOST_MS),
            _event(rank, "host", "step", begins[rank], free + UPDATE_MS + HOST_MS + begins[rank] / 10),
        ]
    return Timeline(_of_step(event, step) for event in events)


def _computation(rank: int, begin: float, slower: float) -> list[Event]:
    forward = begin + 4 + FORWARD_MS * slower
    return [
        _event(rank, "compute", "forward", begin + 4, forward),
        _event(rank, "compute", "backward", forward, forward + BACKWARD_MS * slower),
    ]


def _loader(begins: list[float]) -> list[Event]:
    return [_event(rank, "data", "data", begin, begin + 4) for rank, begin in enumerate(begins)]


def _event(
    rank: int,
    lane: str,
    name: str,
    start: float,
    end: float,
    num_bytes: int = 0,
    bucket: int = -1,
    peer: int = -1,
) -> Event:
    times = round(start * 1e6) + 10**12, round(end * 1e6) + 10**12
    return Event(rank, lane, name, *times, bytes=num_bytes, bucket=bucket, peer=peer)


def _of_step(event: Event, step: int) -> Event:
    return Event(
        event.rank, event.lane, event.name, event.start_ns, event.end_ns, event.bytes, step, 0, event.bucket,
        event.peer,
    )  # fmt: skip


STEPS = {name: (made(name), 7) for name in BUCKETS}
DRAW = {
    "step": lambda path: step_chart(made("bucketed"), path, step=7, title="A title"),
    "many ranks": lambda path: step_chart(made("flat", (1.0,) * 9), path, step=7, ranks=range(9)),
    "side by side": lambda path: side_by_side(STEPS, path, title="A title", notes={"flat": "one message"}),
}
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


@pytest.mark.parametrize("picture", DRAW.values(), ids=DRAW)
def test_the_same_step_gives_the_same_bytes(picture, tmp_path):
    first, second = picture(tmp_path / "a.svg"), picture(tmp_path / "b.svg")
    assert [path.suffix for path in first] == [".svg", ".png"]
    for one, other in zip(first, second, strict=True):
        assert one.read_bytes() == other.read_bytes()


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


def test_a_bubble_inside_backward_is_seen():
    window = event("host", STEP, 0, 100)
    found = rows(
        [event("compute", "backward", 0, 100), event("host", "batch-norm statistics", 40, 60), window], window
    )
    assert drawn(found["compute"]) == [
        (BACKWARD, 0, 40),
        ("batch-norm statistics", 40, 60),
        (BACKWARD, 60, 100),
    ]


def test_replicas_have_rows_of_their_own_above_communication():
    window = event("host", STEP, 0, 9)
    lanes = ["communication", "replica 1", "replica 0"]
    found = rows([*(event(lane, "forward", 0, 5) for lane in lanes), window], window)
    assert list(found) == ["compute", "replica 0", "replica 1", "communication"]


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


def test_merged_boxes_are_of_the_kind_that_had_most_of_the_time():
    row = [Box(HEADERS, 0, 1), Box(EXCHANGE, 1, 4), Box(HEADERS, 4, 5), Box(EXCHANGE, 5, 10)]
    assert drawn(merged(row, 6)) == [(EXCHANGE, 0, 10)]


def test_a_hundred_thousand_short_messages_make_a_picture_of_few_boxes():
    row = [Box(EXCHANGE, 10 * i, 10 * i + 9) for i in range(100_000)]
    assert len(merged(row, 1_000_000 / 1000)) <= 1001


def test_the_end_of_each_step_is_marked_with_its_length():
    figure = draw([panel(*STEPS[name], (0, 1), name) for name in STEPS], SEVERAL, "A title")
    for axes, (timeline, step) in zip(figure.axes, STEPS.values(), strict=True):
        windows = [timeline.window(rank, step) for rank in (0, 1)]
        ms = (max(w.end_ns for w in windows) - min(w.start_ns for w in windows)) / 1e6
        assert f"{ms:,.0f} ms" in [text.get_text() for text in axes.texts]
    assert len({axes.get_xlim() for axes in figure.axes}) == 1


def test_words_lie_in_their_boxes_and_lengths_within_the_axes():
    with style.styled():
        figure = draw([panel(*STEPS[name]) for name in STEPS], SEVERAL)
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
    assert "gradient sync" in [text.get_text() for text in figure.axes[0].texts]


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


def test_the_legend_names_what_is_in_the_picture_and_nothing_else():
    figure = draw([panel(made("flat"), 7)], ONE)
    found = {text.get_text() for text in figure.texts}
    assert {
        "forward",
        "backward",
        "exchange",
        "bubble: gradient sync",
        "bubble: waits for a slower rank",
    } <= found
    assert not found & {"bubble: batch-norm statistics", "other compute"}


def test_of_a_step_that_was_done_again_the_last_time_is_drawn():
    again = Event(0, "host", STEP, 100, 200, step=3)
    lost = [Event(0, "host", STEP, 0, 50, step=3), event("compute", "forward", 10, 40)]
    one = panel(Timeline([*lost, event("compute", "backward", 120, 180), again]), 3)
    assert (one.start_ns, drawn(one.rows[0]["compute"])) == (100, [(BACKWARD, 120, 180)])


def test_a_step_that_did_not_end_is_drawn_as_far_as_it_went():
    events = [event for event in made("flat").events if event.name != STEP]
    one = panel(Timeline(events), 7)
    assert one.ms == pytest.approx(made("flat").window(0, 7).duration_s * 1e3, abs=1)
    assert "gradient sync" in one.kinds


def test_names_of_ranks_do_not_overlap_however_many_there_are():
    figure = draw([panel(made("flat", (1.0,) * 60), 7)], ONE)
    figure.draw_without_rendering()
    boxes = [label.get_window_extent() for label in figure.axes[0].get_yticklabels()]
    assert len(boxes) > 10
    assert all(above.y0 >= below.y1 for above, below in pairwise(boxes))


def test_a_step_without_events_is_said_with_those_that_have_some(tmp_path):
    with pytest.raises(ValueError, match=r"step 8: no events of ranks .*steps that have events: 7 to 7"):
        step_chart(made("flat"), tmp_path / "a", step=8)


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
    looks = [style.COLOURS[kind] for kind in (FORWARD, BACKWARD, INPUT_GRADIENT, WEIGHT_GRADIENT, UPDATE)]
    assert len(set(looks)) == 5


def test_forwards_of_two_stages_with_one_micro_batch_are_two_boxes():
    one = panel(simulate(generate("zb-v", 2, 4), StageTimes(0.01, 0.01, 0.01)), 0)
    boxes = [box for lanes in one.rows.values() for box in lanes["compute"] if box.kind not in BUBBLES]
    assert len(boxes) == 2 * 4 * 2 * 3  # ranks, micro-batches, stages, kinds
    assert {box.end_ns - box.start_ns for box in boxes} == {10_000_000}


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
    told = [text.get_text() for axes in figure.axes for text in axes.texts]
    assert {"fill", "steady state", "drain", "waits"} <= {*told}
    legend = {text.get_text() for text in figure.texts}
    assert {"bubble: fill", "bubble: steady state", "bubble: drain", "message between stages"} <= legend


def test_a_pipeline_in_which_one_rank_is_done_before_another_begins_has_no_steady_state_to_mark():
    whole = simulate(generate("gpipe", 3, 1), StageTimes(0.01, 0.01, 0.01)).events
    forwards = [event for event in whole if event.name in ("forward", STEP)]
    assert panel(Timeline(whole), 0).phases_ns is not None
    one = panel(Timeline(forwards), 0)
    assert one.phases_ns is None
    draw([one], ONE)
