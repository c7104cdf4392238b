"""What ranks send and receive, derived from the order in which they compute.

A schedule is written as computation alone. What one stage makes and a stage on another rank needs is a
message; between stages of one rank nothing is sent. A rank's *program* is its row with the messages in it:

    row       0F0                   0F1                   0B0     0B1
    program   0F0 0SEND_F0 0RECV_B0 0F1 0SEND_F1 0RECV_B1 0B0     0B1
                           for the action after the next

No action of a program waits but those that compute. A send goes out as soon as there is something to send.
A receive is *posted*, which is why it stands early: memory is there when the message comes, and it travels
under the action in between. The computation that needs it waits until it is there.

Between two ranks, messages are received in the order in which they are sent: a receive that waits at its
place for an earlier message of that sender waits for nothing that comes later.
"""

from __future__ import annotations

from collections import defaultdict

from instep.pipeline.actions import (
    COMPUTE,
    FORWARD,
    INPUT_GRADIENT,
    RECEIVE_BACKWARD,
    RECEIVE_FORWARD,
    RECEIVE_TIED,
    RECEIVES,
    SEND_BACKWARD,
    SEND_FORWARD,
    SEND_TIED,
    WEIGHT_GRADIENT,
    Action,
    Schedule,
    needs,
)

SENT = {SEND_FORWARD: FORWARD, SEND_BACKWARD: INPUT_GRADIENT, SEND_TIED: WEIGHT_GRADIENT}
AHEAD = 1  # actions that compute between the place of a receive and its use


def messages_to(schedule: Schedule, action: Action) -> list[Action]:
    """The receives, on its rank, of what ``action``, one of ``COMPUTE``, cannot begin without."""
    stage, _, micro_batch, _ = action
    rank = schedule.stage_ranks[stage]
    found = []
    for needed in needs(action, schedule.num_stages):
        if schedule.stage_ranks[needed.stage] != rank:
            kind = RECEIVE_FORWARD if needed.kind == FORWARD else RECEIVE_BACKWARD
            found.append(Action(stage, kind, micro_batch))
    for tie, user in schedule.tied_to(action):
        if schedule.stage_ranks[user] != rank:
            found.append(Action(user, RECEIVE_TIED, micro_batch, tie))
    return found


def messages_from(schedule: Schedule, action: Action) -> list[Action]:
    """The sends, on its rank, of what others need of ``action``, one of ``COMPUTE``."""
    stage, kind, micro_batch, _ = action
    found = []
    if kind == FORWARD:
        found = [Action(stage, SEND_FORWARD, micro_batch)]
    elif kind != WEIGHT_GRADIENT:
        found = [Action(stage, SEND_BACKWARD, micro_batch)]
    if Action(stage, WEIGHT_GRADIENT, micro_batch) in action.results:
        ties = enumerate(schedule.ties)
        found += [Action(stage, SEND_TIED, micro_batch, tie) for tie, its in ties if stage in its[1:]]
    rank = schedule.stage_ranks[stage]
    return [send for send in found if receiver(schedule, send) not in (rank, None)]


def receiver(schedule: Schedule, send: Action) -> int | None:
    """The rank that gets what ``send`` sends; None: no stage needs it."""
    if send.kind == SEND_TIED:
        return schedule.stage_ranks[schedule.ties[send.tie][0]]
    to = next_stage(send)
    return schedule.stage_ranks[to] if 0 <= to < schedule.num_stages else None


def next_stage(send: Action) -> int:
    """The stage that needs what ``send``, of no tie, sends, if there is one."""
    return send.stage + (1 if send.kind == SEND_FORWARD else -1)


def send_of(receive: Action) -> Action:
    """The other end of the message that ``receive`` is for."""
    if receive.kind == RECEIVE_TIED:
        return receive._replace(kind=SEND_TIED)
    if receive.kind == RECEIVE_FORWARD:
        return Action(receive.stage - 1, SEND_FORWARD, receive.micro_batch)
    return Action(receive.stage + 1, SEND_BACKWARD, receive.micro_batch)


def programs(schedule: Schedule, ahead: int = AHEAD) -> tuple[tuple[Action, ...], ...]:
    """What each rank executes: its row, each send after what it sends, each receive ``ahead`` of its use.

    A receive stands earlier still where another message of the same sender, sent later, is used before.
    """
    used: dict[Action, tuple[int, Action]] = {}  # by the send: where in its row a rank needs it, its receive
    for row in schedule.rows:
        for index, action in enumerate(row):
            used |= {send_of(receive): (index, receive) for receive in messages_to(schedule, action)}
    posts: list[list[tuple[int, Action]]] = [[] for _ in schedule.rows]
    for row in schedule.rows:
        sent: dict[int | None, list[tuple[int, Action]]] = defaultdict(list)  # by receiver, in order
        for action in row:
            for send in messages_from(schedule, action):
                if send in used:
                    sent[receiver(schedule, send)].append(used[send])
        for to, messages in sent.items():
            assert to is not None
            first = len(schedule.rows[to])
            from_last = []
            for index, receive in reversed(messages):
                first = min(first, index)
                from_last.append((first, receive))
            posts[to] += from_last[::-1]
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
        program += messages_from(schedule, action)
    return tuple(program)


def needs_of_program(schedule: Schedule, action: Action) -> list[Action]:
    """What ``action`` of a program cannot begin without.

    A computation needs what its own rank has made, and messages, which must have been sent and have a
    receive; a send needs what it sends; a receive is posted whenever its turn comes.
    """
    if action.kind in RECEIVES:
        return []
    if action.kind not in COMPUTE:
        return [Action(action.stage, SENT[action.kind], action.micro_batch)]
    rank = schedule.stage_ranks[action.stage]
    own = [needed for needed in schedule.needs(action) if schedule.stage_ranks[needed.stage] == rank]
    return own + [end for receive in messages_to(schedule, action) for end in (send_of(receive), receive)]
