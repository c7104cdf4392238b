"""Executes a schedule in virtual time, and reads a timeline, simulated or measured.

Every rank does its program (``instep.pipeline.communication``) in order; an action begins when the one before
it has ended and what it needs is there:

    rank 0   |0F0|0F1|  wait  |0B0|0B1|
                 \\0F0     /            a message is under way from when it is sent, and its receive posted,
    rank 1        |1F0|1B0|1F1|1B1|     for ``message_s``

The model of communication is *latency alone*: a message takes neither the sender's nor the receiver's time,
and any number of them are under way at once, each as fast as if it were alone. So what the simulator leaves
out is what sending costs a rank that computes, and links that are full: it is a lower bound, and exact
where messages are small beside computation. These are the semantics of the tables of P. Qi et al., "Zero
Bubble Pipeline Parallelism", 2024, which it gives to their last digit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

from instep.events import PIPELINE, STEP, Event, Timeline
from instep.pipeline.actions import (
    BACKWARD,
    COMPUTE,
    FORWARD,
    INPUT_GRADIENT,
    RECEIVES,
    SPANS,
    Action,
    Schedule,
    in_order,
)
from instep.pipeline.communication import AHEAD, needs_of_program, programs, send_of

NS = 1e9
COMPUTED = {SPANS[kind] for kind in COMPUTE}

Times = float | Sequence[float]  # of every stage, or by stage


@dataclass(frozen=True)
class StageTimes:
    """What the actions of each stage take for one micro-batch, in seconds.

    A full backward takes ``input_gradient_s`` and ``weight_gradient_s``; a message ``message_s``, by the
    stage that sends it. ``single`` has actions of which more is known: what each takes itself.
    """

    forward_s: Times
    input_gradient_s: Times
    weight_gradient_s: Times
    message_s: Times = 0.0
    single: Mapping[Action, float] = field(default_factory=dict, kw_only=True)

    def of(self, action: Action) -> float:
        """What one of ``COMPUTE`` takes."""
        if action in self.single:
            return self.single[action]
        if action.kind == BACKWARD:
            return _at(self.input_gradient_s, action) + _at(self.weight_gradient_s, action)
        times = {FORWARD: self.forward_s, INPUT_GRADIENT: self.input_gradient_s}
        return _at(times.get(action.kind, self.weight_gradient_s), action)

    def expect(self, num_stages: int) -> None:
        """Refuse times by stage that are not those of ``num_stages``.

        Raises:
            ValueError: with the name of the times.
        """
        for name, times in vars(self).items():
            if isinstance(times, Sequence) and len(times) != num_stages:
                raise ValueError(f"expected {name} of {num_stages} stages, got {len(times)}")


def _at(times: Times, action: Action) -> float:
    return times[action.stage] if isinstance(times, Sequence) else times


def simulate(schedule: Schedule, times: StageTimes, *, step: int = 0, ahead: int = AHEAD) -> Timeline:
    """The timeline of one step, as a run of the schedule would record it.

    On lane "compute" what each rank computes (``stage``, and ``leaf``: the micro-batch), on "communication"
    the messages to it, on "host" when it waits, for a rank (``peer``) or for a message under way, and the
    step, which ends on all ranks when the last one has done its work.

    Raises:
        ValueError: the schedule does not come to its end, and ``instep.pipeline.check`` says why; or there
            are times of more or fewer stages than it has.
    """
    times.expect(schedule.num_stages)
    rows = programs(schedule, ahead)
    free = [0.0] * schedule.num_ranks
    sent: dict[Action, float] = {}  # by the send
    posted: dict[Action, float] = {}  # by the receive
    events: list[Event] = []
    num_done = 0

    def put(
        rank: int, lane: str, name: str, start: float, end: float, peer: int = -1, of: Action | None = None
    ) -> None:
        if end > start or name == STEP:
            stage, leaf = (-1, -1) if of is None else (of.stage, of.micro_batch)
            span = round(start * NS), round(end * NS)
            events.append(Event(rank, lane, name, *span, step=step, leaf=leaf, peer=peer, stage=stage))

    @cache
    def needs(action: Action) -> list[Action]:
        return needs_of_program(schedule, action)

    for (rank, _), action in in_order(rows, needs):
        num_done += 1
        if action.kind in RECEIVES:
            posted[action] = free[rank]
        elif action.kind not in COMPUTE:
            sent[action] = free[rank]
        else:
            begin, last, peer = free[rank], free[rank], -1
            for receive in (one for one in needs(action) if one.kind in RECEIVES):
                send = send_of(receive)
                source, start = schedule.stage_ranks[send.stage], max(sent[send], posted[receive])
                arrived = start + _at(times.message_s, send)
                put(rank, "communication", SPANS[receive.kind], start, arrived, source, receive)
                if arrived > begin:
                    begin, last, peer = arrived, max(free[rank], sent[send]), source
            put(rank, "host", PIPELINE, free[rank], last, peer, action)
            put(rank, "host", PIPELINE, last, begin, of=action)
            free[rank] = begin + times.of(action)
            put(rank, "compute", SPANS[action.kind], begin, free[rank], of=action)
    if num_done < sum(map(len, rows)):
        raise ValueError("the schedule does not come to its end: instep.pipeline.check.check says why")
    for rank, its_end in enumerate(free):
        put(rank, "host", PIPELINE, its_end, max(free), free.index(max(free)))
        put(rank, "host", STEP, 0.0, max(free))
    return Timeline(events)


def makespan_s(timeline: Timeline) -> float:
    """From the first rank's first computation to the last one's last, in seconds."""
    spans = rank_spans(timeline).values()
    return (max(end for _, end, _ in spans) - min(start for start, _, _ in spans)) / NS


def bubble_rate(timeline: Timeline) -> float:
    """The share of the step in which a rank does not compute: (cost - work) / cost.

    The cost is the longest time of any rank from its first computation to its last, the work what a rank
    computes, on average: m (T_F + T_B + T_W). A rank that begins later than another and ends later than it
    waits for nothing in this sense; from the first to the last of all ranks it is ``makespan_s``.
    """
    spans = rank_spans(timeline).values()
    cost = max(end - start for start, end, _ in spans)
    return (cost - sum(work for _, _, work in spans) / len(spans)) / cost


def rank_spans(timeline: Timeline) -> dict[int, tuple[int, int, int]]:
    """Of each rank: when its first computation begins, when its last one ends, and what it computes, in ns.

    Raises:
        ValueError: there is none.
    """
    found: dict[int, tuple[int, int, int]] = {}
    for event in timeline.events:
        if event.lane == "compute" and event.name in COMPUTED:
            start, end, work = found.get(event.rank, (event.start_ns, event.end_ns, 0))
            found[event.rank] = start, max(end, event.end_ns), work + event.end_ns - event.start_ns
    if not found:
        raise ValueError("expected a timeline with forwards and backwards, got one without")
    return found
