"""Is a schedule legal? One that is not is refused, with the whole grid and the place in it.

    whole           every stage makes every micro-batch's forward and backward once, B or both I and W
    happens-before  every action can run: none waits for what comes later, or for a rank that waits for it

Messages are derived (``communication.py``), so that they leave no rank waiting where the schedule does not.
A refusal reads like this:

    rank 1 waits for ever: 1B0 needs 1F0, which comes later in its row: put 1F0 before it

    rank 0: 0F0 0F1  .  0B0 0B1
    rank 1:  .   .   .  1B0 1F0 1F1 1B1
                        ^^^ ^^^ <-- here
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from instep.pipeline.actions import (
    BACKWARD,
    COMPUTE,
    FORWARD,
    INPUT_GRADIENT,
    WEIGHT_GRADIENT,
    Action,
    GridPlace,
    Schedule,
    in_order,
)


class IllegalSchedule(ValueError):
    """A schedule that cannot be executed; ``places`` are where."""

    def __init__(self, schedule: Schedule, reason: str, places: Sequence[GridPlace]) -> None:
        super().__init__(f"{reason}\n\n{schedule.grid(places)}")
        self.places = tuple(places)


def check(schedule: Schedule) -> None:
    """Refuse a schedule that is not legal.

    Raises:
        IllegalSchedule: a ``ValueError``, with what is wrong, what to do, and the grid.
    """
    _check_whole(schedule)
    _check_order(schedule)


def _check_whole(schedule: Schedule) -> None:
    made: dict[Action, tuple[Action, GridPlace]] = {}  # by result: what makes it, and where
    for rank, row in enumerate(schedule.rows):
        for index, action in enumerate(row):
            place, holder = GridPlace(rank, index), schedule.stage_ranks[action.stage]
            if holder != rank:
                reason = (
                    f"{action} is on rank {rank}, but stage {action.stage} is held by rank {holder}: move it"
                )
                raise IllegalSchedule(schedule, reason, [place])
            for result in action.results:
                if result in made:
                    other, before = made[result]
                    whole = action._replace(kind=BACKWARD)
                    again = f"{action} is there twice" if other == action else f"{result} is part of {whole}"
                    raise IllegalSchedule(schedule, f"{again}: take one of them out", [before, place])
                made[result] = action, place
    for stage in range(schedule.num_stages):
        for k in range(schedule.num_micro_batches):
            forward, both, first, second = (Action(stage, kind, k) for kind in COMPUTE)
            for missing in (forward, first, second):
                if missing not in made:
                    has_neither = missing == first and second not in made
                    words = f"{both} or {first}" if has_neither else str(missing)
                    rank = schedule.stage_ranks[stage]
                    end = GridPlace(rank, len(schedule.rows[rank]))
                    raise IllegalSchedule(schedule, f"there is no {words}: add it to rank {rank}", [end])


def _check_order(schedule: Schedule) -> None:
    waits = _waits(schedule)
    for place, needed in waits.items():
        row = schedule.rows[place.rank]
        if needed in row[place.position :]:
            action = row[place.position]
            users = [user for _, user in schedule.tied_to(action)]
            why = f" (stages {action.stage} and {needed.stage} share a parameter)" * (needed.stage in users)
            reason = (
                f"rank {place.rank} waits for ever: {action} needs {needed}{why}, which comes later in its "
                f"row: put {needed} before it"
            )
            raise IllegalSchedule(schedule, reason, [place, GridPlace(place.rank, row.index(needed))])
    if waits:
        words = ", ".join(
            f"rank {place.rank} at {_at(schedule, place)} for {needed}" for place, needed in waits.items()
        )
        reason = f"deadlock: {words}: put what is waited for before what waits"
        raise IllegalSchedule(schedule, reason, [*waits])


def _at(schedule: Schedule, place: GridPlace) -> Action:
    return schedule.rows[place.rank][place.position]


def _waits(schedule: Schedule) -> dict[GridPlace, Action]:
    """Where ranks deadlock, and which action each waits for; nothing if all of them come to their ends."""
    reached = [0] * schedule.num_ranks
    actions = {result: action for row in schedule.rows for action in row for result in action.results}
    for place, action in in_order(schedule.rows, schedule.needs):
        reached[place.rank] = place.position + 1
        for result in action.results:
            del actions[result]
    waits = {}
    for rank, (row, position) in enumerate(zip(schedule.rows, reached, strict=True)):
        if position < len(row):
            needed = next(one for one in schedule.needs(row[position]) if one in actions)
            waits[GridPlace(rank, position)] = actions[needed]
    return waits


def activations(row: Sequence[Action], kept: float = 1.0) -> list[float]:
    """How many activations a rank holds after each action of its ``row``.

    The unit is what one stage keeps of one micro-batch: a forward adds one, a full backward or a
    weight-gradient frees it. An input-gradient frees what only it has needed: all but the share ``kept``.
    """
    change = {FORWARD: 1.0, BACKWARD: -1.0, INPUT_GRADIENT: kept - 1.0, WEIGHT_GRADIENT: -kept}
    return list(accumulate(change[action.kind] for action in row))


def peak_activations(schedule: Schedule, kept: float = 1.0) -> list[float]:
    """The most activations that each rank holds at any time, in stages times micro-batches."""
    return [max(activations(row, kept), default=0.0) for row in schedule.rows]
