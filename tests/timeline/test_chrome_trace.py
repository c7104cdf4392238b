"""Traces for other people's viewers: slices nest, arrows begin and end in slices, the figures are ours."""

from __future__ import annotations

import gzip
import json
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from instep.events import Event, Timeline
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


def test_arrows_go_from_exchange_to_exchange_and_from_the_late_rank_to_who_waited(tmp_path):
    trace = read(write_traces(play(ranks=3, steps=2), tmp_path, world_size=3)[0])
    # Per step and bucket: 3 ranks to 2 others each, and 2 ranks that wait for rank 1.
    assert check(trace) == 2 * 2 * (3 * 2 + 2)
    late = [event for event in trace["traceEvents"] if event["ph"] == "s" and "waited" in event["name"]]
    tracks, titles = slices(trace), names(trace, "process_name")
    assert {titles[event["pid"], 0] for event in late} == {"rank 1"}
    assert {tracks[event["pid"], event["tid"]][0][2]["name"] for event in late} == {"queued"}


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
