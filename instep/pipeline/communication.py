"""What ranks send and receive, derived from the order in which they compute.

A schedule is written as computation alone. What one stage makes and a stage on another rank needs is a
message; between stages of one rank nothing is sent. A rank's *program* is its row with the messages in it:

    row       0F0                   0F1                   0B0     0B1
    program   0F0 0SEND_F0 0RECV_B0 0F1 0SEND_F1 0RECV_B1 0B0     0B1
                           for the action after the next

No action of a program waits but those that compute. A send goes out as soon as there is something to send.
A receive is *posted*, which is why it stands early: memory is there when the message comes, and it travels
under the action in between. The computation that needs it waits until it is there.

Between two ranks, messages are received in the order in which they are sent, so a channel needs no tags, and
a receive that waits at its place for an earlier message of that sender waits for nothing that comes later.
"""

from __future__ import annotations

from collections import defaultdict

from instep.pipeline.actions import (
    COMPUTE,
    FORWARD,
    INPUT_GRADIENT,
    RECEIVE_BACKWARD,
    RECEIVE_FORWARD,
    RECEIVES,
    SEND_BACKWARD,
    SEND_FORWARD,
    WEIGHT_GRADIENT,
    Action,
    Schedule,
)

AHEAD = 1  # actions that compute between the place of a receive and its use


def message_of(schedule: Schedule, action: Action) -> tuple[Action, Action] | None:
    """The two ends, send and receive, of the message that a rank sends after ``action``, if it sends one."""
    stage, kind, micro_batch = action
    if kind == WEIGHT_GRADIENT:
        return None
    to = stage + 1 if kind == FORWARD else stage - 1
    if not 0 <= to < schedule.num_stages or schedule.stage_ranks[to] == schedule.stage_ranks[stage]:
        return None
    if kind == FORWARD:
        return Action(stage, SEND_FORWARD, micro_batch), Action(to, RECEIVE_FORWARD, micro_batch)
    return Action(stage, SEND_BACKWARD, micro_batch), Action(to, RECEIVE_BACKWARD, micro_batch)


def send_of(receive: Action) -> Action:
    """The other end of the message that ``receive`` is for."""
    if receive.kind == RECEIVE_FORWARD:
        return Action(receive.stage - 1, SEND_FORWARD, receive.micro_batch)
    return Action(receive.stage + 1, SEND_BACKWARD, receive.micro_batch)


def programs(schedule: Schedule, ahead: int = AHEAD) -> tuple[tuple[Action, ...], ...]:
    """What each rank executes: its row, each send after what it sends, each receive ``ahead`` of its use.

    A receive stands earlier still where another message of the same sender, sent later, is used before.
    """
    used: dict[Action, int] = {}  # by what is needed: where in its row a rank needs it
    for row in schedule.rows:
        for index, action in enumerate(row):
            for needed in schedule.needs(action):
                if schedule.stage_ranks[needed.stage] != schedule.stage_ranks[action.stage]:
                    used[needed] = index
    posts: list[list[tuple[int, Action]]] = [[] for _ in schedule.rows]
    for row in schedule.rows:
        sent: dict[int, list[tuple[int, Action]]] = defaultdict(list)  # by receiver, in order
        for action in row:
            if (ends := message_of(schedule, action)) and action.result in used:
                sent[schedule.stage_ranks[ends[1].stage]].append((used[action.result], ends[1]))
        for receiver, messages in sent.items():
            first = len(schedule.rows[receiver])
            from_last = []
            for index, receive in reversed(messages):
                first = min(first, index)
                from_last.append((first, receive))
            posts[receiver] += from_last[::-1]
    return tuple(
        _program(schedule, rank, sorted(post, key=lambda one: one[0]), ahead)
        for rank, post in enumerate(posts)
    )


def _program(schedule: Schedule, rank: int, post: list[tuple[int, Action]], ahead: int) -> tuple[Action, ...]:
    program: list[Action] = []
    posted = 0
    for index, action in enumerate(schedule.rows[rank]):
        while posted < len(post) and post[posted][0] - ahead <= index:
            program.append(post[posted][1])
            posted += 1
        program.append(action)
        if ends := message_of(schedule, action):
            program.append(ends[0])
    return tuple(program)


def needs_of_program(schedule: Schedule, action: Action) -> list[Action]:
    """What ``action`` of a program cannot begin without.

    A computation needs what its own rank has made, and messages, which must have been sent and have a
    receive; a send needs what it sends; a receive is posted whenever its turn comes.
    """
    stage, kind, micro_batch = action
    if kind in RECEIVES:
        return []
    if kind not in COMPUTE:
        return [Action(stage, FORWARD if kind == SEND_FORWARD else INPUT_GRADIENT, micro_batch)]
    found: list[Action] = []
    for needed in schedule.needs(action):
        if schedule.stage_ranks[needed.stage] == schedule.stage_ranks[stage]:
            found.append(needed)
        else:
            receive = Action(
                stage, RECEIVE_FORWARD if needed.kind == FORWARD else RECEIVE_BACKWARD, micro_batch
            )
            found += [send_of(receive), receive]
    return found
