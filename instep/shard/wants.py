"""Slices of weights asked for and given: a rank gets what it wants without the others having to stop.

A rank skips a unit, runs one twice, evaluates alone, or has no micro-batch left: were a gather a collective,
it would pair with another one, or wait for ever. So every rank has a thread that gives its slices to whoever
asks, whatever its own computation does:

    rank 0   |= unit 3 =|= unit 4 ...        computes; its lane has asked everybody for unit 4 meanwhile
    rank 1   |= unit 2 =|= unit 5 ...        computes, with other units perhaps
      gives      ^ 4 to 0     ^ ...          waits for questions

A question is two numbers, the answer the slice: S bytes of weights, W ranks, S (W-1)/W bytes received in one
round trip, and as many given to each rank that asks. The group must have no other user.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from multiprocessing.util import Finalize
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from instep.comm.messages import Messages
from instep.errors import PeerLost
from instep.mesh.group import Group

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

ASK, GIVE = 1, 2  # tags: a question, an answer
BYE = -1  # in the place of a number: no more questions from this rank
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64, torch.complex128)
FOREVER = timedelta(days=3650)
FAREWELL = timedelta(seconds=3)


class Asked:
    """The slices of all ranks, ``slices[i]`` being this one's of number i. Collective, all of the same form.

    ``fetch`` whatever is wanted, whenever; ``close`` when no more is. A rank goes on to give until all others
    have closed, or one is gone; a process that ends waits ``FAREWELL`` for that, and no longer.
    """

    def __init__(self, group: Group, slices: Sequence[Tensor]) -> None:
        self._group, self._slices = group, list(slices)
        assert group.pg is not None
        self._pg = group.pg
        self._others = [(group.rank + k) % group.size for k in range(1, group.size)]
        self._questions = Messages(group.pg, group.ranks, tag=ASK)
        self._answers = Messages(group.pg, group.ranks, tag=GIVE)
        self._server = threading.Thread(
            target=_give,
            args=(group.pg, self._slices, group.size - 1),
            name=f"instep slices, rank {group.rank}",
            daemon=True,
        )
        self._server.start()
        # Of multiprocessing, because atexit knows nothing of the end of a process that it has started.
        self._wait = threading.Event()
        self._wait.set()
        arguments = (group.pg, self._others, self._server, self._wait)
        self._close = Finalize(self, _leave, arguments, exitpriority=0)

    def fetch(self, number: int, parts: Sequence[Tensor], operation: str) -> None:
        """``parts[r]`` becomes the slice of rank r, in the dtype of ``parts``."""
        try:
            self._group.run(lambda: self._ask(number, parts), operation)
        except PeerLost:
            self.abandon()
            raise

    def close(self) -> None:
        """Ask no more, and give those who are not as far yet the time to close too."""
        self._close()

    def abandon(self) -> None:
        """``close`` shall not wait for others: one is lost, or all have closed in some other way."""
        self._wait.clear()

    def _ask(self, number: int, parts: Sequence[Tensor]) -> None:
        row = torch.tensor([number, DTYPES.index(parts[0].dtype)], device="cpu")
        self._questions.together([(row, to) for to in self._others], [])
        parts[self._group.rank].copy_(self._slices[number])
        if parts[0].device.type == "cpu":
            self._answers.together([], [(parts[source], source) for source in self._others])
            return
        arrived = [(torch.empty_like(parts[source], device="cpu"), source) for source in self._others]
        self._answers.together([], arrived)
        for part, source in arrived:
            parts[source].copy_(part)


def _give(pg: ProcessGroup, slices: Sequence[Tensor], num_askers: int) -> None:
    """Answer until all have said that there are no more questions."""
    row = torch.empty(2, dtype=torch.int64, device="cpu")
    given: dict[int, tuple[Any, Tensor]] = {}  # to whom: what is on its way, with its memory
    with suppress(RuntimeError):  # a rank is gone: who misses it says so
        while num_askers:
            question = pg.recv_anysource([row], ASK)
            question.wait(FOREVER)
            number, dtype = row.tolist()
            if number == BYE:
                num_askers -= 1
                continue
            source = question._source_rank()
            if source in given:
                given[source][0].wait()  # it has arrived: who asks again has it
            answer = slices[number].to("cpu", DTYPES[dtype])
            given[source] = pg.send([answer], source, GIVE), answer


def _leave(pg: ProcessGroup, others: Sequence[int], server: threading.Thread, wait: threading.Event) -> None:
    if not wait.is_set():
        return  # closing the group ends the server
    row = torch.tensor([BYE, 0], device="cpu")
    with suppress(RuntimeError):  # who is gone needs no farewell
        for work in [pg.send([row], to, ASK) for to in others]:
            with suppress(RuntimeError):
                work.wait(FAREWELL)
    if server is not threading.current_thread():
        server.join(FAREWELL.total_seconds())
