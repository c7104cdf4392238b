"""Traces for other people's viewers: slices nest, arrows begin and end in slices, the figures are ours."""

from __future__ import annotations

import gzip
import json
import re
import tracemalloc
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from instep.events import Event, Timeline
from instep.timeline import chrome_trace
from instep.timeline.breakdown import parts
from instep.timeline.chrome_trace import write_traces

US = 1000
NAMES = {"process_name", "process_sort_index", "thread_name", "thread_sort_index"}


def play(ranks: int = 2, steps: int = 3, base_ns: int = 77_000_000_123) -> Timeline:
    """Steps of 10 ms with two buckets; rank 1 hands over each of them half a millisecond after the others."""
    events = []
    for rank in range(ranks):
        for step in range(steps):
            events += _step(rank, step, base_ns + step * 10_000 * US)
    return Timeline(events)


def _step(rank: int, step: int, begin_ns: int) -> list[Event]:
    events = []

    def put(lane: str, name: str, start_us: float, end_us: float, **more: int) -> None:
        start_ns, end_ns = begin_ns + round(start_us * US), begin_ns + round(end_us * US)
        events.append(Event(rank, lane, name, start_ns, end_ns, step=step, **more))

    late = 500 * (rank == 1)
    put("host", "step", 0, 10_000)
    put("data", "data", 0, 1000, leaf=rank)
    put("compute", "forward", 1000, 3000, leaf=rank)
    put("compute", "backward", 3000, 7000 + late, leaf=rank)
    for bucket, ready in enumerate((5000, 7000)):
        put("communication", "queued", ready + late - 3, ready + late, bucket=bucket)
        if rank != 1:
            put("communication", "wait", ready, ready + 500, bucket=bucket, peer=1)
        put("communication", "agree", ready + 500, ready + 600, bucket=bucket)
        put("communication", "exchange", ready + 600, ready + 1600, bucket=bucket, bytes=4096)
    put("host", "gradient sync", 7000 + late, 8600)
    put("compute", "update", 8600, 9600)
    return events


def read(path: Path) -> dict[str, Any]:
    return json.loads(gzip.decompress(path.read_bytes()))


def slices(trace: dict[str, Any]) -> dict[tuple[int, int], list[tuple[int, int, dict[str, Any]]]]:
    """Begin and end in nanoseconds, by process and track."""
    found = defaultdict(list)
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            start_ns = round(event["ts"] * 1000)
            found[event["pid"], event["tid"]].append((start_ns, start_ns + round(event["dur"] * 1000), event))
    return found


def names(trace: dict[str, Any], what: str) -> dict[tuple[int, int], str]:
    told = [event for event in trace["traceEvents"] if event["name"] == what]
    return {(event["pid"], event["tid"]): event["args"]["name"] for event in told}


def check(trace: dict[str, Any]) -> int:
    """Viewers would show it as it is meant; the number of arrows."""
    tracks = slices(trace)
    for track in tracks.values():
        going: list[int] = []
        for start, end, _ in sorted(track, key=lambda one: one[0]):  # as viewers do, with ties as written
            while going and going[-1] <= start:
                going.pop()
            assert not going or end <= going[-1], "two slices of a track overlap, and neither holds the other"
            going.append(end)
    ends = defaultdict(dict)
    for event in trace["traceEvents"]:
        assert event["ph"] in "XsfM" and (event["ph"] != "M" or event["name"] in NAMES)
        if event["ph"] in "sf":
            at_ns = round(event["ts"] * 1000)
            assert any(start <= at_ns < end for start, end, _ in tracks[event["pid"], event["tid"]])
            assert event["ph"] not in ends[event["id"]]
            ends[event["id"]][event["ph"]] = at_ns
    assert all(set(arrow) == {"s", "f"} and arrow["s"] <= arrow["f"] for arrow in ends.values())
    named = set(names(trace, "thread_name"))
    assert set(tracks) <= named and {process for process, _ in named} == {
        process for process, _ in names(trace, "process_name")
    }
    return len(ends)


def test_each_rank_is_a_process_and_each_lane_a_track(tmp_path):
    whole, *_ = write_traces(play(), tmp_path, world_size=2, hosts={0: "alpha", 1: "beta"})
    trace = read(whole)
    check(trace)
    assert set(names(trace, "process_name").values()) == {"rank 0 (alpha)", "rank 1 (beta)"}
    by_process = defaultdict(set)
    for (process, _), name in names(trace, "thread_name").items():
        by_process[process].add(name)
    tracks = {"host", "data", "compute", "communication", "queued", "bubbles"}
    assert list(by_process.values()) == [tracks, tracks]


def test_times_are_microseconds_to_the_nanosecond_since_the_first_event(tmp_path):
    events = [
        Event(0, "host", "a", 5_000_000_001, 5_000_001_235),
        Event(0, "host", "b", 5_000_002_002, 5_000_002_003),
    ]
    whole, _ = write_traces(Timeline(events), tmp_path, world_size=1)
    text = gzip.decompress(whole.read_bytes()).decode()
    assert re.findall(r'"ts": ([\d.]+), "dur": ([\d.]+)', text) == [("0.000", "1.234"), ("2.001", "0.001")]
    assert read(whole)["otherData"]["base_ns"] == 5_000_000_001
    assert read(whole)["displayTimeUnit"] == "ms"


def test_a_slice_tells_what_is_known_of_its_event(tmp_path):
    event = Event(0, "communication", "exchange", 0, 10, bytes=12, step=3, leaf=0, bucket=2, peer=1)
    whole, _ = write_traces(Timeline([event, Event(0, "host", "b", 0, 1)]), tmp_path, world_size=1)
    told = {one["name"]: one["args"] for track in slices(read(whole)).values() for _, _, one in track}
    assert told == {"exchange": {"step": 3, "leaf": 0, "bucket": 2, "peer": 1, "bytes": 12}, "b": {}}


def test_bubbles_have_a_track_that_says_who_was_late(tmp_path):
    trace = read(write_traces(play(steps=1), tmp_path, world_size=2)[0])
    (first,) = [
        [(start // US, end // US, event["name"]) for start, end, event in track]
        for track in slices(trace).values()
        if track[0][2]["cat"] == "bubble" and track[0][2]["pid"] == 1
    ]
    assert first == [(7000, 7500, "gradient sync: rank 1 is late"), (7500, 8600, "gradient sync")]


def test_arrows_go_from_exchange_to_exchange_and_from_the_late_rank_to_who_waited(tmp_path):
    trace = read(write_traces(play(ranks=3, steps=2), tmp_path, world_size=3)[0])
    # Per step and bucket: 3 ranks to 2 others each, and 2 ranks that wait for rank 1.
    assert check(trace) == 2 * 2 * (3 * 2 + 2)
    late = [event for event in trace["traceEvents"] if event["ph"] == "s" and "waited" in event["name"]]
    tracks, titles = slices(trace), names(trace, "process_name")
    assert {titles[event["pid"], 0] for event in late} == {"rank 1"}
    assert {tracks[event["pid"], event["tid"]][0][2]["name"] for event in late} == {"queued"}


def test_an_arrow_leaves_from_the_bucket_that_was_late_when_it_was_handed_over(tmp_path):
    events = []
    for bucket, (ready, begun, waited_until) in enumerate([(0, 90, 95), (50, 100, 140)]):
        more = {"step": 0, "bucket": bucket}
        events.append(Event(1, "communication", "queued", ready, begun, **more))
        events.append(Event(0, "communication", "wait", begun - 30, waited_until, peer=1, **more))
    trace = read(write_traces(Timeline(events), tmp_path, world_size=2)[0])
    assert check(trace) == 2
    left = [event for event in trace["traceEvents"] if event["ph"] == "s"]
    tracks = slices(trace)
    from_ = [(tracks[event["pid"], event["tid"]][0][2]["args"]["bucket"], event["ts"]) for event in left]
    assert sorted(from_) == [(0, 0.089), (1, 0.099)]


def test_nine_ranks_send_to_the_next_only(tmp_path):
    trace = read(write_traces(play(ranks=9, steps=1), tmp_path, world_size=9)[0])
    assert check(trace) == 2 * (9 + 8)


def test_where_arrows_would_be_too_many_each_rank_sends_to_the_next_only(tmp_path, monkeypatch):
    monkeypatch.setattr(chrome_trace, "MAX_ARROWS", 23)
    trace = read(write_traces(play(ranks=3, steps=2), tmp_path, world_size=3)[0])
    assert check(trace) == 2 * 2 * (3 + 2)


def test_with_a_server_arrows_go_to_it_and_from_it(tmp_path):
    events = []
    for rank in range(3):
        lane, more = "communication", {"step": 0, "bucket": 0}
        if rank == 0:
            events += [Event(0, lane, "receive", 10, 30, **more), Event(0, lane, "aggregate", 30, 40, **more)]
            events.append(Event(0, lane, "send", 50, 70, **more))
        else:
            events += [Event(rank, lane, "send", 5, 20, **more), Event(rank, lane, "receive", 45, 80, **more)]
    trace = read(write_traces(Timeline(events), tmp_path, world_size=3)[0])
    assert check(trace) == 4
    arrows = defaultdict(list)
    for event in trace["traceEvents"]:
        if event["ph"] in "sf":
            arrows[event["id"]].append((event["pid"] - 1, round(event["ts"] * 1000)))
    assert sorted(arrows.values()) == [
        [(0, 45), (1, 74)], [(0, 45), (2, 74)], [(1, 0), (0, 24)], [(2, 0), (0, 24)],
    ]  # fmt: skip


def test_only_the_steps_asked_for_are_written(tmp_path):
    timeline = Timeline([*play(steps=4).events, Event(0, "host", "prepare", 0, 5)])
    trace = read(write_traces(timeline, tmp_path, world_size=2, steps={1, 3})[0])
    told = [one["args"].get("step") for track in slices(trace).values() for _, _, one in track]
    assert set(told) == {1, 3}
    everything = read(write_traces(timeline, tmp_path, world_size=2)[0])
    assert "prepare" in {event["name"] for event in everything["traceEvents"]}


def test_an_empty_timeline_is_a_trace_without_events(tmp_path):
    (path,) = write_traces(Timeline([]), tmp_path, world_size=2)
    assert read(path)["traceEvents"] == []


def test_names_that_are_no_names_stay_text(tmp_path):
    name = '"}],\n</script>\\ é'
    paths = write_traces(
        Timeline([Event(0, name, name, 0, 5, step=0)]), tmp_path, world_size=1, hosts={0: name}
    )
    for path in paths:
        assert name in {event["name"] for event in read(path)["traceEvents"]}


SPANS = st.lists(
    st.tuples(
        st.integers(0, 2),
        st.sampled_from(["compute", "communication", "host", "replica 0"]),
        st.sampled_from(["queued", "exchange", "wait", "backward", "step", "gradient sync"]),
        st.integers(0, 60),
        st.integers(0, 30),
        st.integers(0, 2),
    ),
    max_size=40,
)


@settings(max_examples=50)
@given(spans=SPANS)
def test_whatever_overlaps_the_slices_of_a_track_nest_and_arrows_end_in_slices(spans, tmp_path_factory):
    events = [
        Event(rank, lane, name, start, start + wide, step=step, bucket=step % 2, peer=(rank + 1) % 3)
        for rank, lane, name, start, wide, step in spans
    ]
    for path in write_traces(Timeline(events), tmp_path_factory.mktemp("trace"), world_size=3):
        check(read(path))


@pytest.mark.parametrize(("ranks", "expected"), [(2, "rank-1.json.gz"), (11, "rank-01.json.gz")])
def test_files_of_ranks_sort_by_rank_and_stand_alone_in_their_folder(tmp_path, ranks, expected):
    whole, *paths = write_traces(play(ranks=2, steps=1), tmp_path, world_size=ranks)
    assert paths[1].name == expected
    assert sorted((tmp_path / "hta").iterdir()) == paths and whole.parent == tmp_path


def test_a_rank_s_file_says_its_rank_where_hta_looks_for_it(tmp_path):
    for rank, path in enumerate(write_traces(play(), tmp_path, world_size=2, backend="gloo")[1:]):
        first = gzip.decompress(path.read_bytes()).splitlines()[0].decode()
        assert re.search(r'"rank":\s+(\d+)', first)[1] == str(rank)  # hta.common.trace_file
        trace = read(path)
        assert trace["schemaVersion"] == 1
        assert trace["distributedInfo"] == {"backend": "gloo", "rank": rank, "world_size": 2}


def test_kernels_have_our_figures_by_the_rules_of_hta(tmp_path):
    """HTA: kernels have a stream, those of communication match ``^nccl.*Kernel``, the rest is computation."""
    timeline = play(steps=1)
    for rank, path in enumerate(write_traces(timeline, tmp_path, world_size=2)[1:]):
        trace = read(path)
        check(trace)
        busy = defaultdict(set)  # microseconds, one by one
        for track in slices(trace).values():
            for start, end, event in track:
                if "stream" in event["args"]:
                    kind = "nccl" if re.match(r"^nccl.*Kernel", event["name"]) else "compute"
                    busy[kind, event["args"]["stream"]] |= set(range(start // US, end // US))
        (comm, comp) = (busy["nccl", 20], busy["compute", 7])
        found = parts(timeline.of(rank, 0))
        assert set(busy) == {("nccl", 20), ("compute", 7)}
        assert len(comp) == round((found.compute + found.update) * 1e6)
        assert len(comm & comp) == round(found.hidden * 1e6) == 1100
        assert len(comm) == round((found.hidden + found.exposed_s) * 1e6) == 2200


def test_each_kernel_was_issued_by_one_thing_on_a_thread_in_a_profiler_step(tmp_path):
    issue = Event(0, "host", "backward", 100, 200, step=4, leaf=2)  # on a GPU: the device is later
    done = Event(0, "compute", "backward", 500, 900, step=4, leaf=2)
    timeline = Timeline([Event(0, "host", "step", 0, 1000, step=4), issue, done, *play(ranks=1).events])
    events = [
        one
        for track in slices(read(write_traces(timeline, tmp_path, world_size=1)[1])).values()
        for one in track
    ]
    numbers = [event["args"]["correlation"] for _, _, event in events if event["cat"] == "kernel"]
    issuers = {
        event["args"].get("correlation"): (start, end)
        for start, end, event in events
        if event["cat"] == "cpu_op"
    }
    assert sorted(numbers) == sorted(issuers) and len(set(numbers)) == len(numbers)
    steps = [(start, end) for start, end, event in events if event["name"].startswith("ProfilerStep#")]
    assert len(steps) == 4
    assert all(
        any(begin <= start and end <= stop for begin, stop in steps) for start, end in issuers.values()
    )
    assert (100, 200) in issuers.values() and (500, 900) not in issuers.values()


def test_a_thread_of_replicas_is_a_track_and_a_stream(tmp_path):
    events = [Event(0, f"replica {k}", "forward", 0, 50, step=0) for k in range(2)]
    whole, one = write_traces(Timeline(events), tmp_path, world_size=1)
    assert {"replica 0", "replica 1"} <= set(names(read(whole), "thread_name").values())
    kernels = [event for event in read(one)["traceEvents"] if event.get("cat") == "kernel"]
    assert len({event["args"]["stream"] for event in kernels}) == 2


@pytest.mark.slow
def test_writing_needs_little_memory_beside_the_timeline(tmp_path):
    timeline = play(ranks=4, steps=250)
    tracemalloc.start()
    try:
        paths = write_traces(timeline, tmp_path, world_size=4)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    written = sum(len(gzip.decompress(path.read_bytes())) for path in paths)
    assert peak < written / 2
