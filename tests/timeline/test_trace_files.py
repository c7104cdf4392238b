"""What is read of the ranks' files: steps as they were made last, and a note on what is not whole."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from instep.ring_buffer import FIRST, HEAD_BYTES, MAGIC, RECORD, RingBuffer
from instep.timeline.breakdown import parts
from instep.timeline.trace_files import MOST_NS, RunTraces, read_traces
from tests.timeline.made_up_run import FLIGHT, HOUR, MS, MadeUpRun, name

Damage = Callable[[Path], object]
QUICK = settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def whole_steps(traces: RunTraces) -> dict[int, list[int]]:
    return {step: traces.ranks(step) for step in traces.steps}


def keep(num_bytes: int) -> Damage:
    return lambda path: os.truncate(path, num_bytes)


def replace(data: bytes) -> Damage:
    return lambda path: path.write_bytes(data)


def as_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def as_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def as_link_to_itself(path: Path) -> None:
    path.unlink()
    path.symlink_to(path)


def with_head(**fields: object) -> Damage:
    def damage(path: Path) -> None:
        data = bytearray(path.read_bytes())
        head = json.loads(data[len(MAGIC) : HEAD_BYTES]) | fields
        data[len(MAGIC) : HEAD_BYTES] = json.dumps(head).encode().ljust(HEAD_BYTES - len(MAGIC))
        path.write_bytes(data)

    return damage


def test_what_was_recorded_is_read_step_by_step(tmp_path):
    run = MadeUpRun(tmp_path, 3, buckets=2)
    run.steps(0, 4)
    traces = read_traces(tmp_path, 3)
    assert traces.notes == [] and traces.world_size == 3
    assert whole_steps(traces) == {step: [0, 1, 2] for step in range(4)}
    events = traces.timeline(2).of(1, 2)
    assert [e.leaf for e in events if e.name == "backward"] == [0, 1]
    assert [e.bytes for e in events if e.name == "exchange"] == [1 << 20] * 2
    assert traces.traces[1].windows[3][1] == run.now


def test_a_step_made_twice_counts_once_as_it_was_the_last_time(tmp_path):
    run = MadeUpRun(tmp_path, 2)
    run.steps(0, 4)
    run.slower = lambda rank: 2.0
    again = run.now
    run.steps(2, 5)
    traces = read_traces(tmp_path)
    assert whole_steps(traces) == {step: [0, 1] for step in range(5)}
    for step in (2, 3):
        events = traces.timeline(step).of(1, step)
        assert len(events) == len(traces.timeline(4).of(1, 4))
        assert min(event.start_ns for event in events) >= again
        assert parts(events).compute == pytest.approx(2 * parts(traces.timeline(1).of(1, 1)).compute)


def test_ranks_of_an_earlier_world_are_in_no_later_step(tmp_path):
    run = MadeUpRun(tmp_path, 4)
    run.steps(0, 6)
    after = MadeUpRun(tmp_path, 2, begin_ms=run.now / MS + 800)
    after.steps(4, 9)
    traces = read_traces(tmp_path, 2)
    assert whole_steps(traces) == {s: [0, 1, 2, 3] if s < 4 else [0, 1] for s in range(9)}
    assert traces.world_size == 2 and traces.gone == {2: 5, 3: 5} and traces.notes == []


def test_clocks_that_are_an_hour_apart_give_one_timeline(tmp_path):
    slower = {0: 1.0, 1: 1.5, 2: 1.0}
    MadeUpRun(
        tmp_path / "apart", 3, slower=slower.get, offset_ns={1: -HOUR, 2: HOUR}, begin_ms=2 * HOUR / MS
    ).steps(0, 3)
    MadeUpRun(tmp_path / "same", 3, slower=slower.get, begin_ms=2 * HOUR / MS).steps(0, 3)
    apart, same = read_traces(tmp_path / "apart"), read_traces(tmp_path / "same")
    assert whole_steps(apart) == {step: [0, 1, 2] for step in range(3)}
    assert apart.timeline(1).events == same.timeline(1).events
    for one, two in pairwise(apart.traces[rank].windows[2] for rank in range(3)):
        assert one == two


def test_ranks_whose_clocks_may_be_wrong_by_a_step_still_made_it_together(tmp_path):
    """Rank 1's clock is read a whole step and a half late, by no more than is said to be possible."""
    step_ms = 2 * 10 + 2 * FLIGHT + 5
    told = {"error_ns": 2 * step_ms * MS}
    MadeUpRun(tmp_path, 2, only=[0], head=told).steps(0, 3)
    MadeUpRun(tmp_path, 2, only=[1], head=told, begin_ms=5000 + 1.5 * step_ms).steps(0, 3)
    assert whole_steps(read_traces(tmp_path)) == {step: [0, 1] for step in range(3)}


@pytest.mark.parametrize(
    ("damage", "note"),
    [
        (lambda path: path.unlink(), "no trace of rank 1: it is on another host"),
        (replace(b""), f"{name(1)} is not a trace"),
        (keep(100), f"{name(1)} is not a trace"),
        (keep(FIRST - 1), f"{name(1)} is not a trace"),
        (lambda path: path.write_bytes(bytes(path.stat().st_size)), f"{name(1)} is not a trace"),
        (lambda path: path.write_bytes(os.urandom(path.stat().st_size)), f"{name(1)} is not a trace"),
        (replace(MAGIC + b"[" * (FIRST - len(MAGIC))), f"{name(1)} is not a trace"),
        (replace((MAGIC + b"[]").ljust(FIRST)), f"{name(1)} is not a trace"),
        (as_directory, f"{name(1)} is not a file"),
        (as_pipe, f"{name(1)} is not a file"),
        (as_link_to_itself, f"{name(1)} is not a file"),
        (with_head(capacity="4096"), f"{name(1)} has a beginning that makes no sense"),
        (with_head(capacity=-3), f"{name(1)} has a beginning that makes no sense"),
        (with_head(rank=True), f"{name(1)} has a beginning that makes no sense"),
        (with_head(rank=10**30), f"{name(1)} has a beginning that makes no sense"),
        (with_head(offset_ns=10**30), f"{name(1)} has a beginning that makes no sense"),
        (with_head(offset_ns=float("inf")), f"{name(1)} has a beginning that makes no sense"),
        (with_head(rank=0), f"{name(1)} is of rank 0, as another file is"),
    ],
)  # fmt: skip
def test_one_file_that_is_lost_or_nonsense_is_noted_and_the_others_are_read(tmp_path, damage, note):
    MadeUpRun(tmp_path, 3).steps(0, 4)
    damage(tmp_path / name(1))
    traces = read_traces(tmp_path, 3)
    assert any(told.startswith(note) for told in traces.notes), traces.notes
    assert any(told.startswith("no trace of rank 1: ") for told in traces.notes)
    assert whole_steps(traces) == {step: [0, 2] for step in range(4)}


def test_a_record_that_was_being_written_is_left_out_and_counted(tmp_path):
    ring = RingBuffer(8, tmp_path / name(0), {"rank": 0})
    for i in range(8):
        ring.put("forward", "compute", 10 * i, 10 * i + 5, 0, 0, -1, -1, -1)
    for place, record in ((1, (99, 1, 2)), (2, (3, 7, 6)), (3, (4, -5, 6)), (4, (5, 1, MOST_NS))):
        RECORD.pack_into(ring._memory, FIRST + place * RECORD.size, *record, 0, 0, 0, 0, 0, 0, 0, 0)
    RECORD.pack_into(ring._memory, FIRST + 5 * RECORD.size, 6, 1, 2, 0, 0, 0, 0, 0, 77, 0, 0)
    traces = read_traces(tmp_path)
    assert traces.notes == [f"{name(0)}: 5 record(s) are not whole: left out"]
    assert traces.traces[0].records["start_ns"].tolist() == [0, 60, 70]


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(10**40), 10**40)
    | st.floats()
    | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
KEYS = ("capacity", "rank", "offset_ns", "error_ns", "world_size", "host", "boot", "begun_ns", "setting")


@QUICK
@given(fields=st.dictionaries(st.sampled_from(KEYS), json_values))
def test_whatever_stands_in_a_head_every_other_rank_is_read(tmp_path, fields):
    MadeUpRun(tmp_path, 2, capacity=64).steps(0, 3)
    with suppress(ValueError):  # too long for a head
        with_head(**fields)(tmp_path / name(1))
    traces = read_traces(tmp_path)
    assert 0 in traces.traces
    for step in traces.steps:
        assert traces.ranks(step) and traces.timeline(step).events
    assert isinstance(traces.world_size, int) and isinstance(traces.error_ns, int) and traces.gone is not None


numbers = st.integers(-(1 << 63), (1 << 63) - 1) | st.integers(-2, 70) | st.integers(0, 10**10)
small = st.integers(-(1 << 31), (1 << 31) - 1) | st.integers(-1, 4)
records = st.tuples(
    numbers, numbers, numbers, small, small, small, small, st.integers(0, 20), st.integers(0, 20), small
)


@QUICK
@given(rows=st.lists(records, max_size=40), noise=st.binary(max_size=200), at=st.integers(0, 63))
def test_whatever_stands_in_records_the_parts_of_a_step_are_disjoint(tmp_path, rows, noise, at):
    MadeUpRun(tmp_path, 1, capacity=64).steps(0, 1)
    data = bytearray((tmp_path / name(0)).read_bytes())
    for place, (start, end, size, *others) in enumerate(rows):
        RECORD.pack_into(data, FIRST + place * RECORD.size, place + 1, start, end, size, *others)
    data[FIRST + at * RECORD.size : FIRST + at * RECORD.size + len(noise)] = noise
    (tmp_path / name(0)).write_bytes(data)
    traces = read_traces(tmp_path)
    for step in traces.steps:
        found = parts(traces.timeline(step).of(0, step))
        assert found is not None and found.wall > 0
        assert min(found.totals().values()) >= 0
        assert sum(found.totals().values()) == pytest.approx(found.wall)
