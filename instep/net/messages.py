"""Point-to-point messages between the ranks of one group: all that the collectives of this folder use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from instep.errors import InstepError, PeerLost, clear_tracebacks
from instep.net.hang_report import words_of

if TYPE_CHECKING:  # ``instep show`` prints schedules without importing torch
    from torch import Tensor
    from torch.distributed import ProcessGroup

T = TypeVar("T")
FAILED = "which failed; the backend reports:"


class Messages:
    """Sends and receives over ``pg``; None is a world of one.

    ``ranks[i]`` is the global rank of group rank i, for errors; all other ranks here are group ranks. Two
    messages of one ``tag`` between the same ranks arrive in the order of sending, so the messages of a tag
    are sent by one thread, in an order that both ranks know.

    Both sides state the number of bytes: the backend accepts a shorter message as a full one, and ends the
    process for a longer one. Empty messages are neither sent nor awaited. A wait ends at the deadline of
    ``pg``.
    """

    def __init__(self, pg: ProcessGroup | None, ranks: Sequence[int] | None = None, *, tag: int = 0) -> None:
        self.pg = pg
        self.rank = 0 if pg is None else pg.rank()
        self.size = 1 if pg is None else pg.size()
        self.ranks = tuple(range(self.size)) if ranks is None else tuple(ranks)
        self.tag = tag

    def together(self, sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]]) -> None:
        """Start all (tensor, rank), then wait for all.

        Raises:
            ValueError: a tensor that is not contiguous or not in CPU memory; a message to oneself.
            PeerLost: a rank missed the deadline, or its connection closed.
        """
        both = [(x, source, "from") for x, source in receives] + [(x, to, "to") for x, to in sends]
        started: list[tuple[Any, int, str]] = []
        other, direction = self.rank, ""
        try:
            for x, other, direction in both:
                flat(x)
                if other == self.rank:
                    raise ValueError(
                        f"expected a message between two ranks, got one {direction} rank {other} itself"
                    )
            for x, other, direction in both:
                if x.numel():
                    start = self.pg.send if direction == "to" else self.pg.recv  # type: ignore[union-attr]
                    started.append((start([x], other, self.tag), other, direction))
            for work, other, direction in started:  # noqa: B007 (an error names them)
                work.wait()  # not in slices: gloo closes the connection of a wait that times out
        except InstepError:  # one of ours knows more
            raise
        except RuntimeError as error:
            rank = self.ranks[other]
            operation = f"a message {direction} rank {rank}"
            said = f"rank {self.ranks[self.rank]} waited for {operation}, {FAILED} {words_of(error)}"
            raise PeerLost(said, ranks=[rank], operation=operation) from error


def awaited(wait: Callable[[], T], operation: str) -> T:
    """The result of a backend's ``wait()``, whose ``RuntimeError`` becomes ``PeerLost``.

    A thread that waits for the caller can then tell a lost peer from an error of this process.
    """
    try:
        return wait()
    except InstepError:
        raise
    except RuntimeError as error:
        raise PeerLost(f"{operation}, {FAILED} {words_of(error)}", operation=operation) from error


def raising(error: Exception) -> Callable[[], NoReturn]:
    """A wait that raises ``error``, without the frames of its origin, which nobody needs by then."""
    clear_tracebacks(error)
    errors = [error]  # a frame that keeps what it raises keeps itself

    def wait() -> NoReturn:
        raise errors.pop()

    return wait


def flat(x: Tensor) -> Tensor:
    """``x`` as one row, sharing its memory.

    Raises:
        ValueError: ``x`` is not contiguous, not in CPU memory, or lazily conjugated or negated.
    """
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
        raise ValueError("expected stored values, got a lazy view: pass x.resolve_conj().resolve_neg()")
    return x.view(-1)
