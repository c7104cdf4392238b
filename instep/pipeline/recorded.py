"""What the ranks of a pipeline have recorded of a step, action by action: the one reader of it. Pure.

    host      |~~~~~ waits ~~~~~|
    compute   ..1B2|                  |1F3 .........|  |1B3 ....
                                ^     ^             ^
                           turned   start          end

A rank *turns to* an action when the one before has ended, or the last wait after that. What it does around a
computation, with a micro-batch or a message, is so a part of the action, and no bubble: an action *took* all
of that, of which the rank *computed* from start to end.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from statistics import fmean
from typing import NamedTuple

from instep.events import PIPELINE, Event, Timeline
from instep.pipeline.actions import (
    BACKWARD,
    COMPUTE,
    INPUT_GRADIENT,
    SPANS,
    WEIGHT_GRADIENT,
    Action,
    Schedule,
)
from instep.pipeline.simulate import NS

KINDS = {SPANS[kind]: kind for kind in COMPUTE}


class RecordedAction(NamedTuple):
    """An action, whose computation is ``event``; ``messages`` are those that it has waited for, each from
    when it was sent: one that was sent before may have been there.

    The number of its micro-batch is that of ``event``, and no place in the pipeline's order.
    """

    action: Action
    event: Event
    turned_ns: int
    messages: tuple[Event, ...]

    @property
    def took_s(self) -> float:
        return (self.event.end_ns - self.turned_ns) / NS

    @property
    def computed_s(self) -> float:
        return self.event.duration_s

    @property
    def whole(self) -> Event:
        """From when the rank turned to it."""
        return self.event._replace(start_ns=self.turned_ns)


def recorded_actions(events: Iterable[Event]) -> list[RecordedAction]:
    """The actions of one rank in one step, in order, among whatever it has recorded of it."""
    found: list[RecordedAction] = []
    messages: list[Event] = []
    free_ns: int | None = None
    computed_ns = 0  # until then
    for event in sorted(events, key=lambda event: event.end_ns):
        if event.stage < 0:  # of the step, and of no action
            continue
        if event.lane == "compute" and event.name in KINDS:
            action = Action(event.stage, KINDS[event.name], event.leaf)
            turned_ns = event.start_ns if free_ns is None else free_ns
            found.append(RecordedAction(action, event, turned_ns, tuple(messages)))
            free_ns = computed_ns = event.end_ns
            messages = []
        elif event.name == PIPELINE:
            free_ns = event.end_ns
        elif event.lane == "communication" and event.start_ns >= computed_ns:
            messages.append(event)
    return found


@dataclass(frozen=True)
class PipelineStep:
    """One step of the ranks of one pipeline, or of some of them: their ``rows`` of actions, by rank."""

    rows: Mapping[int, Sequence[RecordedAction]]

    @property
    def actions(self) -> Iterator[RecordedAction]:
        """Of all ranks."""
        return chain.from_iterable(self.rows.values())

    @cached_property
    def leaves(self) -> list[int]:
        """The numbers of its micro-batches."""
        return sorted({one.action.micro_batch for one in self.actions})

    @cached_property
    def timeline(self) -> Timeline:
        """The actions, each from when its rank turned to it."""
        return Timeline(one.whole for one in self.actions)

    @cached_property
    def times(self) -> dict[tuple[int, str], float]:
        """Seconds that an action took, by stage and kind: the mean over micro-batches."""
        found: dict[tuple[int, str], list[float]] = defaultdict(list)
        for one in self.actions:
            found[one.action.stage, one.action.kind].append(one.took_s)
        return {key: fmean(took) for key, took in found.items()}

    def schedule(self) -> Schedule:
        """The one that was executed.

        Raises:
            ValueError: it is not whole.
        """
        number = {leaf: k for k, leaf in enumerate(self.leaves)}
        actions = {one.action for one in self.actions}

        def numbered(action: Action) -> Action:
            stage, kind, leaf, _ = action
            if kind == WEIGHT_GRADIENT and Action(stage, INPUT_GRADIENT, leaf) not in actions:
                kind = BACKWARD  # of the first stage, which has no inputs to train
            return Action(stage, kind, number[leaf])

        return Schedule.of([[numbered(one.action) for one in row] for row in self.rows.values()])


def steps_of(timeline: Timeline, step: int) -> list[PipelineStep]:
    """Each pipeline's part of ``step``, as far as ranks have ended it.

    Ranks with the same micro-batches are one pipeline; where several share each stage, along tp or ep, they
    are as many pipelines. Of a step made twice, the last counts.
    """
    pipelines: dict[tuple[tuple[int, ...], int], dict[int, list[RecordedAction]]] = {}
    sharing = Counter[tuple[tuple[int, ...], frozenset[int]]]()  # by micro-batches and stages
    for rank in timeline.ranks:
        window = timeline.window(rank, step)
        if window is None:
            continue
        begin_ns, end_ns = window.start_ns, window.end_ns
        row = recorded_actions(x for x in timeline.of(rank, step) if begin_ns <= x.start_ns < end_ns)
        if row:
            leaves = tuple(sorted({one.action.micro_batch for one in row}))
            stages = leaves, frozenset(one.action.stage for one in row)
            pipelines.setdefault((leaves, sharing[stages]), {})[rank] = row
            sharing[stages] += 1
    return [PipelineStep(rows) for rows in pipelines.values()]
