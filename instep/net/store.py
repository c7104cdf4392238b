"""Calls of a store that may be unreachable, and their uses: rendezvous, and the status of ranks.

A call of a store whose host is dead or unreachable blocks in native code until the store's own deadline, or
until TCP gives up after a quarter of an hour. So each call runs in a thread, which is abandoned at the
caller's deadline.
"""

from __future__ import annotations

import atexit
import ctypes
import hashlib
import json
import signal
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, NoReturn, TypeVar

import torch.distributed as dist

from instep.errors import PeerLost
from instep.net import device
from instep.net.hang_report import StatusRow, words_of
from instep.net.lane import Work

if TYPE_CHECKING:
    from torch.distributed import Store

PATIENCE_S = 1.0  # for one answer, on the way to an error
MAKING = "the making of a group"
T = TypeVar("T")

_unanswered: list[Work] = []


class StoreClient:
    """Calls one store for ``rank``, and makes no call while an earlier one is unanswered."""

    def __init__(self, rank: int) -> None:
        self._name = f"instep store client, rank {rank}"
        self._answered: Work | None = None  # of the last call

    def call(self, function: Callable[[], T], patience_s: float | None = None) -> T:
        """``function()``, which calls the store, within ``patience_s`` (by default ``PATIENCE_S``).

        Raises:
            TimeoutError: there is no answer in time, or still none to the call before.
            RuntimeError: no thread can be started.
            the error of ``function``.
        """
        limit_s = PATIENCE_S if patience_s is None else patience_s
        answers: list[T] = []
        errors: list[Exception] = []
        answered = Work("a call of the store")

        def run() -> None:
            try:
                answers.append(function())
            except Exception as error:
                errors.append(error)
            answered.end()

        if self._answered is None or self._answered.happened:
            threading.Thread(target=run, name=self._name, daemon=True).start()
            self._answered = answered
            if answered.arrive(limit_s):
                return answers.pop() if answers else _raise(errors)
            _unanswered.append(answered)
        raise TimeoutError(f"no answer from the store within {limit_s:g} s")


@atexit.register
def _keep_exit_code() -> None:
    """Keep an answer during interpreter exit from turning the exit code into that of SIGABRT.

    A thread that returns from native code then is ended by force, which C++ answers with ``abort``. Nothing
    can wake or stop the thread before; but its handler of SIGABRT can sleep, as many seconds as the signal's
    number says, while the main thread ends. An abort of the main thread, and a SIGABRT from outside, which
    looks the same, are delayed as much; SIGTERM and SIGKILL are not.
    """
    if not all(answered.happened for answered in _unanswered):
        libc = ctypes.CDLL(None)
        libc.signal(signal.SIGABRT, ctypes.cast(libc.sleep, ctypes.c_void_p))


def _raise(errors: list[Exception]) -> NoReturn:
    raise errors.pop()  # a list that kept it would keep, by its traceback, everything that the call used


def backend_timeout(timeout_s: float) -> timedelta:
    """The deadline of a backend: a little later than ours, which names the rank.

    A process cannot end while gloo still waits.
    """
    return timedelta(seconds=1.1 * timeout_s + 2)


def rendezvous(
    store: Store, name: str, ranks: Sequence[int], rank: int, timeout_s: float, make: Callable[[Store], T]
) -> T:
    """Call ``make(store)``, in which all ``ranks`` wait for each other, with a prefix that no group has used.

    Backends call the store in their constructors, so ``make`` runs in a thread that is abandoned at the
    deadline. Each rank first counts its rendezvous in the store, which later shows who arrived. Collective
    over ``ranks``; each rank calls it equally often with a ``name``.

    Raises:
        PeerLost: a rank did not arrive, or cannot reach the store or another rank.
    """
    members = hashlib.sha256(repr(tuple(ranks)).encode()).hexdigest()[:16]
    key = f"instep/groups/{name}/{members}"
    number = 0

    def count_and_make() -> T:
        nonlocal number
        number = store.add(f"{key}/rank {rank}", 1)
        return make(dist.PrefixStore(f"{key}/{number}", store))

    began = time.monotonic()
    limit_s = backend_timeout(timeout_s).total_seconds() + PATIENCE_S  # the backend's own error comes first
    try:
        return StoreClient(rank).call(device.as_here(count_and_make), limit_s)
    except PeerLost as error:
        raise error.with_traceback(None) from None  # it says all, and the frames are of the thread
    except (RuntimeError, TimeoutError) as error:
        # Whether it may be due to other ranks, or to the way to them; gloo has no type of its own for those.
        if not (isinstance(error, dist.DistError | TimeoutError) or "connectFullMesh" in str(error)):
            raise
        late, why = _late(store, {other: f"{key}/rank {other}" for other in ranks}, number, rank, timeout_s)
        raise PeerLost(
            f"rank {rank} waited {time.monotonic() - began:.1f} s in the making of group {name!r} of ranks "
            f"{', '.join(map(str, ranks))}, {why}. Cause: {words_of(error)}",
            ranks=late,
            operation=MAKING,
        ) from None


def _late(
    store: Store, counts: dict[int, str], number: int, rank: int, timeout_s: float
) -> tuple[list[int], str]:
    """The ranks that have not come to rendezvous ``number``, and what to do; 0: this rank did not either."""
    try:
        if not number:
            raise TimeoutError
        late = StoreClient(rank).call(lambda: [i for i, key in counts.items() if store.add(key, 0) < number])
    except (RuntimeError, TimeoutError):
        return [], (
            "and the store gives no answer: rank 0 or its host has ended, or the network to it is cut: look "
            "there, then start again"
        )
    if late:
        return late, (
            f"and never came: rank {', '.join(map(str, late))}. Look whether it lives and its host can be "
            f"reached, make groups on every rank alike, or raise timeout_s ({timeout_s:g} s)"
        )
    return [], (
        "to which all came, but not all reach each other: look at the network between their hosts, a "
        "firewall, GLOO_SOCKET_IFNAME"
    )


class StatusStore:
    """The last status of every rank of one group, in the ``store`` of that group; without one it stays empty.

    For ranks of other hosts, which a debug server cannot ask: a rank that has waited for long writes there
    what the ranks of its host are doing. An ordinary step, also one with a slow rank, writes nothing.

    Reading and posting neither fail nor wait for long: they happen when something else has failed, perhaps
    the store's host, or the network to it. A store that is slow is asked again; one that is gone is not,
    because torch's client writes to stderr at each call.
    """

    def __init__(self, store: Store | None = None, rank: int = 0) -> None:
        self._store = store
        self._client = StoreClient(rank)

    def post(self, row: StatusRow) -> None:
        """Let all ranks read what ``row.rank`` is doing."""
        self._try(lambda store: store.set(_key(row.rank), row.to_bytes().decode()))

    def read(self, rank: int) -> StatusRow | None:
        """The last row that was posted about ``rank``."""

        def read(store: Store) -> StatusRow | None:
            return StatusRow.from_bytes(store.get(_key(rank))) if store.check([_key(rank)]) else None

        return self._try(read)

    def report_lost(self, ranks: Sequence[int], *, dead: bool) -> tuple[list[int], bool]:
        """Report lost ranks to all, and return what was reported first; a death takes precedence.

        Other ranks end because of the first one.
        """

        def report(store: Store) -> tuple[list[int], bool]:
            before = _lost(store)
            if before[1] or (before[0] and not dead) or not ranks:
                return before
            store.set(_key("lost"), json.dumps([[*ranks], dead]))
            return [*ranks], dead

        return self._try(report) or ([*ranks], dead)

    def lost(self) -> tuple[list[int], bool]:
        """The ranks that were reported lost, and whether they are dead."""
        return self._try(_lost) or ([], False)

    def _try(self, question: Callable[[Store], T]) -> T | None:
        """The store's answer; None if there is none in time, or no store."""
        store = self._store
        if store is not None:
            try:
                return self._client.call(lambda: question(store))
            except (TimeoutError, ValueError):  # it is slow; or others have written there
                pass
            except Exception:
                self._store = None
        return None


def _key(what: int | str) -> str:
    return f"instep/status/{what}"


def _lost(store: Store) -> tuple[list[int], bool]:
    if not store.check([_key("lost")]):
        return [], False
    ranks, dead = json.loads(store.get(_key("lost")))
    return [int(rank) for rank in ranks], dead is True
