"""Is a schedule legal? One that is not is refused, with the whole grid and the place in it.

Four questions, in this order, since each supposes the one before:

    whole           every stage makes every micro-batch's forward and backward once, B or both I and W
    happens-before  every action can run: none waits for what comes later, or for a rank that waits for it
    messages        so with what is sent and received, and every rank receives in the order of the sends
    memory          no rank holds more activations than it may

A refusal reads like this:

    rank 1 waits for ever: 1B0 needs 1F0, which comes later in its row: put 1F0 before it

    rank 0: 0F0 0F1  .  0B0 0B1
    rank 1:  .   .   .  1B0 1F0 1F1 1B1
                        ^^^ ^^^ <-- here
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import accumulate

from instep.pipeline.actions import (
    BACKWARD,
    COMPUTE,
    FORWARD,
    INPUT_GRADIENT,
    RECEIVES,
    WEIGHT_GRADIENT,
    Action,
    GridPlace,
    Rows,
    Schedule,
    in_order,
)
from instep.pipeline.communication import needs_of_program, programs, receiver, send_of


class IllegalSchedule(ValueError):
    """A schedule that cannot be executed, or not within its memory; ``places`` are where."""

    def __init__(self, schedule: Schedule, reason: str, places: Sequence[GridPlace]) -> None:
        super().__init__(f"{reason}\n\n{schedule.grid(places)}")
        self.places = tuple(places)


def check(schedule: Schedule, *, limit: float | Sequence[float] | None = None, kept: float = 1.0) -> None:
    """Refuse a schedule that is not legal.

    Args:
        limit: how many activations a rank may hold, or each of them: see ``peak_activations``.
        kept: the share of an activation that stays between I and W.

    Raises:
        IllegalSchedule: a ``ValueError``, with what is wrong, what to do, and the grid.
    """
    _check_whole(schedule)
    _check_order(schedule)
    check_programs(schedule, programs(schedule))
    if limit is not None:
        limits = limit if isinstance(limit, Sequence) else [limit] * schedule.num_ranks
        _check_memory(schedule, limits, kept)


def _check_whole(schedule: Schedule) -> None:
    found: dict[tuple[int, int], dict[str, GridPlace]] = {}
    for rank, row in enumerate(schedule.rows):
        for index, action in enumerate(row):
            place = GridPlace(rank, index)
            holder = schedule.stage_ranks[action.stage]
            if action.kind not in COMPUTE:
                reason = f"{action} is no computation: leave messages out, they are derived"
                raise IllegalSchedule(schedule, reason, [place])
            if holder != rank:
                reason = (
                    f"{action} is on rank {rank}, but stage {action.stage} is held by rank {holder}: move it"
                )
                raise IllegalSchedule(schedule, reason, [place])
            kinds = found.setdefault((action.stage, action.micro_batch), {})
            if other := _again(kinds, action.kind):
                reason = f"{_told(action, other)}: take one of them out"
                raise IllegalSchedule(schedule, reason, [kinds[other], place])
            kinds[action.kind] = place
    for stage in range(schedule.num_stages):
        for k in range(schedule.num_micro_batches):
            kinds = found.get((stage, k), {})
            if missing := _missing(kinds):
                holder = schedule.stage_ranks[stage]
                words = " or ".join(str(Action(stage, kind, k)) for kind in missing)
                reason = f"there is no {words}: add it to rank {holder}"
                raise IllegalSchedule(schedule, reason, [GridPlace(holder, len(schedule.rows[holder]))])


def _again(kinds: dict[str, GridPlace], kind: str) -> str:
    """What of ``kinds`` has already made what ``kind`` makes; nothing if none has."""
    same = {BACKWARD: (BACKWARD, INPUT_GRADIENT, WEIGHT_GRADIENT), FORWARD: (FORWARD,)}
    return next((one for one in same.get(kind, (kind, BACKWARD)) if one in kinds), "")


def _told(action: Action, other: str) -> str:
    if action.kind == other:
        return f"{action} is there twice"
    part = other if action.kind == BACKWARD else action.kind
    return f"{action._replace(kind=part)} is part of {action._replace(kind=BACKWARD)}"


def _missing(kinds: dict[str, GridPlace]) -> list[str]:
    """What a stage does not make of a micro-batch: one of these."""
    if FORWARD not in kinds:
        return [FORWARD]
    if BACKWARD in kinds or {INPUT_GRADIENT, WEIGHT_GRADIENT} <= set(kinds):
        return []
    if INPUT_GRADIENT in kinds:
        return [WEIGHT_GRADIENT]
    return [INPUT_GRADIENT] if WEIGHT_GRADIENT in kinds else [BACKWARD, INPUT_GRADIENT]


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
        circle = _circle(schedule, waits)
        words = ", ".join(
            f"rank {place.rank} at {_at(schedule, place)} for {waits[place]}" for place in circle
        )
        reason = f"these ranks wait for each other: {words}: put what is waited for before what waits"
        raise IllegalSchedule(schedule, reason, circle)


def _at(schedule: Schedule, place: GridPlace) -> Action:
    return schedule.rows[place.rank][place.position]


def _waits(schedule: Schedule) -> dict[GridPlace, Action]:
    """Where ranks wait for ever, and for which action; nothing if all of them come to their ends."""
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


def _circle(schedule: Schedule, waits: dict[GridPlace, Action]) -> list[GridPlace]:
    """The places that wait for each other, each for the rank of the next."""
    places = {place.rank: place for place in waits}
    path = [min(places)]
    while True:
        rank = schedule.stage_ranks[waits[places[path[-1]]].stage]
        if rank in path:
            return [places[one] for one in path[path.index(rank) :]]
        path.append(rank)


def check_programs(schedule: Schedule, rows: Rows) -> None:
    """Refuse programs (``instep.pipeline.communication``) that would not come to their ends.

    A send hands over and goes on, a receive is posted and goes on, a computation waits for what it needs.

    Raises:
        ValueError: ranks would wait for ever, with their places, or receive another message than they expect.
    """
    _check_messages(schedule, rows)

    def needs(action: Action) -> list[Action]:
        return needs_of_program(schedule, action)

    reached = [0] * len(rows)
    for place, _ in in_order(rows, needs):
        reached[place.rank] = place.position + 1
    waiting = [
        f"rank {rank} at {row[index]}, its action {index}"
        for rank, (row, index) in enumerate(zip(rows, reached, strict=True))
        if index < len(row)
    ]
    if waiting:
        raise ValueError(
            f"the messages leave ranks waiting for ever: {', '.join(waiting)}: every receive must stand "
            f"before the computation that needs it, every send after what it sends"
        )


def _check_messages(schedule: Schedule, rows: Rows) -> None:
    """Every rank receives what the others send it, in the order in which they send it."""
    sent: dict[tuple[int, int], list[Action]] = defaultdict(list)  # by sender and receiver
    received: dict[tuple[int, int], list[Action]] = defaultdict(list)
    for rank, row in enumerate(rows):
        for action in row:
            if action.kind in RECEIVES:
                end = send_of(action)
                received[schedule.stage_ranks[end.stage], rank].append(end)
            elif action.kind not in COMPUTE:
                to = receiver(schedule, action)
                assert to is not None
                sent[rank, to].append(action)
    for sender, taker in sorted({*sent, *received}):
        out, into = sent[sender, taker], received[sender, taker]
        for index in range(max(len(out), len(into))):
            one, other = (str(ends[index]) if index < len(ends) else "nothing" for ends in (out, into))
            if one != other:
                raise ValueError(
                    f"message {index} from rank {sender} to rank {taker}: rank {sender} sends {one}, "
                    f"rank {taker} receives {other}: receive in the order in which it is sent"
                )


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


def _check_memory(schedule: Schedule, limits: Sequence[float], kept: float) -> None:
    if len(limits) != schedule.num_ranks:
        raise ValueError(f"expected a limit for each of {schedule.num_ranks} ranks, got {len(limits)}")
    for rank, (row, limit) in enumerate(zip(schedule.rows, limits, strict=True)):
        for index, held in enumerate(activations(row, kept)):
            if held > limit + 1e-9:  # sums of ``kept``
                reason = (
                    f"rank {rank} holds {held:g} activations after {row[index]}, expected at most {limit:g}: "
                    f"put a backward before it"
                )
                raise IllegalSchedule(schedule, reason, [GridPlace(rank, index)])
