"""Point-to-point messages between the ranks of one group: all that the collectives of this folder use.

A schedule says who sends what to whom; ``perform`` says it to what is here. A test puts a simulated network
in its place, a benchmark reads its counters. What many ranks send in parts is cut at ``edges``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from instep.errors import InstepError, PeerLost, clear_tracebacks
from instep.mesh.hang_report import words_of

if TYPE_CHECKING:  # so that ``cost``, which needs to know how x is cut, does not import torch
    from torch import Tensor
    from torch.distributed import ProcessGroup

T = TypeVar("T")


class Messages:
    """Sends and receives over ``pg``, and counts what this rank sends.

    ``pg`` None is a world of one. ``ranks[i]`` is the global rank of group rank i, for errors; everything
    else here is a group rank. Two messages of one ``tag`` between the same ranks arrive in the order in which
    they were sent, so the messages of a tag are sent by one thread, in an order that both ranks know.

    Both sides name the number of bytes. The backend takes a message that is shorter than its room for one
    that fills it, and ends the process for one that is longer. A message of no bytes is not sent and not
    waited for. What is begun has to be waited for, or kept until the connection is closed: else the backend
    lets no other message by. A wait ends at the deadline of ``pg``.
    """

    def __init__(self, pg: ProcessGroup | None, ranks: Sequence[int] | None = None, *, tag: int = 0) -> None:
        self.pg = pg
        self.rank = 0 if pg is None else pg.rank()
        self.size = 1 if pg is None else pg.size()
        self.ranks = tuple(range(self.size)) if ranks is None else tuple(ranks)
        self.tag = tag
        self.num_messages = 0
        self.bytes_sent = 0

    def send(self, x: Tensor, to: int) -> None:
        """Send ``x`` to rank ``to``; returns when ``x`` may be overwritten."""
        self.together([(x, to)], [])

    def recv(self, x: Tensor, source: int) -> Tensor:
        """Overwrite ``x`` with what rank ``source`` sends, and return it."""
        self.together([], [(x, source)])
        return x

    def together(self, sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]]) -> None:
        """Begin all of (tensor, rank), then wait for all.

        Raises:
            ValueError: a tensor whose memory is not its content in a row, or not on the CPU; a message to
                oneself.
            PeerLost: a rank did not come before the deadline, or its connection closed.
        """
        self.begin(sends, receives)()

    def begin(
        self, sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]]
    ) -> Callable[[], None]:
        """Begin all of (tensor, rank); what is returned waits for all, in any thread.

        Raises:
            ValueError, PeerLost: as ``together``; where a rank is lost already, also what is returned may.
        """
        begun: list[tuple[Any, int, str]] = []
        for x, source in receives:
            self._require_message(x, source, "from")
        for x, to in sends:
            self._require_message(x, to, "to")
        for x, source in receives:
            if x.numel():
                work = self._reach(self._pg.recv, source, "from", [x], source, self.tag)
                begun.append((work, source, "from"))
        for x, to in sends:
            if x.numel():
                begun.append((self._reach(self._pg.send, to, "to", [x], to, self.tag), to, "to"))
                self.num_messages += 1
                self.bytes_sent += x.numel() * x.element_size()

        def wait() -> None:
            for work, other, direction in begun:
                # Not in slices: gloo closes the connection of a wait that times out.
                self._reach(work.wait, other, direction)

        return wait

    @property
    def _pg(self) -> ProcessGroup:
        if self.pg is None:
            raise ValueError("expected a process group to send messages over, got a world of one rank")
        return self.pg

    def _require_message(self, x: Tensor, other: int, direction: str) -> None:
        require_flat(x)
        if other == self.rank:
            raise ValueError(f"expected a message between two ranks, got one {direction} rank {other} itself")

    def _reach(self, operate: Callable[..., Any], other: int, direction: str, *args: Any) -> Any:
        try:
            return operate(*args)
        except InstepError:  # one of ours knows more
            raise
        except RuntimeError as error:
            rank = self.ranks[other]
            operation = f"a message {direction} rank {rank}"
            raise lost_in(operation, error, [rank], f"rank {self.ranks[self.rank]} waited for ") from error


def lost_in(operation: str, error: RuntimeError, ranks: Sequence[int] = (), who: str = "") -> PeerLost:
    """What to raise of what a backend has raised in ``operation``."""
    said = f"{who}{operation}, which failed; the backend reports: {words_of(error)}"
    return PeerLost(said, ranks=ranks, operation=operation)


def awaited(wait: Callable[[], T], operation: str) -> T:
    """What ``wait()`` of a backend returns; what it raises comes as ``PeerLost``.

    So who waits for a thread knows it from what has failed in this process.
    """
    try:
        return wait()
    except InstepError:
        raise
    except RuntimeError as error:
        raise lost_in(operation, error) from error


def raising(error: Exception) -> Callable[[], NoReturn]:
    """What raises ``error`` where it is waited for: by then the frames that it came from are of no use."""
    clear_tracebacks(error)
    errors = [error]  # a frame that keeps what it raises keeps itself

    def wait() -> NoReturn:
        raise errors.pop()

    return wait


def require_flat(x: Tensor) -> None:
    """Raise ``ValueError`` unless the bytes of ``x`` in memory are its elements in order, in CPU memory."""
    if not x.is_cpu:
        raise ValueError(
            f"expected a tensor in CPU memory, got one on {x.device}: use the group's collectives"
        )
    if not x.is_contiguous():
        raise ValueError(
            f"expected a contiguous tensor, got shape {tuple(x.shape)} with strides {x.stride()}: "
            "pass x.contiguous()"
        )
    if x.is_conj() or x.is_neg():
        raise ValueError("expected a tensor that is stored as it reads: pass x.resolve_conj().resolve_neg()")


def flat(x: Tensor) -> Tensor:
    """``x`` as one row, sharing its memory.

    Raises:
        ValueError: as ``require_flat``.
    """
    require_flat(x)
    return x.view(-1)


def edges(num_elements: int, parts: int) -> list[int]:
    """The ``parts + 1`` edges of the chunks: chunk i is [edges[i], edges[i + 1]).

    Lengths differ by one element at most; with fewer elements than parts some chunks are empty.
    """
    return [i * num_elements // parts for i in range(parts + 1)]


def lengths(num_elements: int, parts: int) -> list[int]:
    """The length of each chunk."""
    return [hi - lo for lo, hi in pairwise(edges(num_elements, parts))]
