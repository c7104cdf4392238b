"""Saving while training goes on: a copy in memory first, then a thread that writes the copy.

A save that reads the live tensors while the next step changes them gives a checkpoint of no step at all. So
``save`` returns only when everything has been copied, into memory that the next save uses again:

    step 10          step 11           step 12
    [copy]---- training goes on ------ check() raises what went wrong, if anything did
        [hash, write, sync, rename, read back, prune]      one at a time, in a thread

The price is one copy of the state in memory: in a supervised run the snapshot of that step, which is there
anyway. What fails is raised by the next call, because an error that waits for the end of the run is a run
without checkpoints. A process that ends in the middle leaves a directory that no one takes for a checkpoint.

An interpreter that shuts down under a thread which is inside torch aborts ("exception not rethrown"), and one
that waits for a disk that hangs never ends. So a save that was not closed is given some seconds at exit, and
then the process ends without shutting down.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from instep import memory
from instep.checkpoint import files
from instep.checkpoint import save as saving
from instep.checkpoint.image import copied, num_bytes
from instep.checkpoint.manifest import MAX_BYTES, Json, Manifest, canonical, parse_json, require_json
from instep.errors import PeerLost
from instep.net.peers import Peer, describe
from instep.net.process_group import Group
from instep.state.shards import Shard, State
from instep.state.stored import ALIGN_BYTES

Copy = Callable[[Sequence[Shard]], Sequence[Shard]]

EXIT_GRACE_S = 10.0
SLICE_S = 0.2  # of a wait, between two looks whether the save goes on


class Saver:
    """Writes one checkpoint at a time in a thread of its own.

    At construction: nothing. ``save`` waits for the one in flight, copies, and starts the thread. ``check``,
    once per step, costs next to nothing. ``close`` waits for the one in flight. At the exit of an interpreter
    that did not close, what is in flight has ten seconds to become whole; then the process ends with code 1.

    ``enter`` is told the phases that ``save`` enters: "gather" while ranks wait for each other, "save" when
    each goes on by itself; ``beat`` that progress is made, by the thread, too, while ``save`` waits for it.

    Only one thread may use it.
    """

    def __init__(
        self,
        *,
        timeout_s: float = 300.0,
        enter: Callable[[str], None] = lambda phase: None,
        beat: Callable[[], None] = lambda: None,
    ) -> None:
        self.timeout_s = timeout_s
        self._enter, self._beat = enter, beat
        self.last: Path | None = None  # the newest checkpoint that was written and verified
        self._memory = memory.allocate(0, ALIGN_BYTES)  # as much as the largest copy needed
        self._flight: _Flight | None = None

    def save(
        self,
        directory: Path,
        state: State,
        draft: Manifest,
        keep: int = 3,
        copy: Copy | None = None,
        frozen: bool = True,
    ) -> None:
        """As :func:`instep.checkpoint.save.save`, but return once the tensors are copied. Collective.

        ``copy`` makes the copies, which must stay what they are while ``is_writing``; by default they are in
        memory of this saver.

        All ranks of ``state.group`` have agreed by then on what each writes; the rest needs the file system
        alone, not the ranks' group. Ends at once if this very state is there already. Raises what the save
        before ended with, and then begins nothing; TimeoutError if that has not ended within ``timeout_s``,
        PeerLost as soon as it is seen that a rank is gone which it may be waiting for.
        """
        self._land(self.timeout_s)
        saving.require_keep(keep)
        directory, step = Path(directory), draft.step
        if state.group.size > 1:
            self._enter("gather")
        plan = saving.plan(state, directory / files.step_name(step), frozen, self._beat)
        final = plan.completed(draft)
        final = replace(final, extra=_frozen(final.extra))
        if plan.exists and saving.already_saved(directory, final, plan, keep, state.group, self._beat):
            self.last = directory / files.step_name(step)
        else:
            if state.group.size > 1:
                self._enter("save")
            copied = replace(plan, shards=tuple((copy or self._copy)(plan.shards)))

            def write(flight: _Flight) -> Path:
                wait = saving.Wait(self.timeout_s, flight.given_up, flight.beat)
                return saving.write(directory, final, copied, keep, wait)

            self._start(_Flight(directory, step, write, state.group))

    def _copy(self, shards: Sequence[Shard]) -> list[Shard]:
        """Copies of ``shards``; those of the call before are overwritten."""
        nbytes = num_bytes(shards)
        if self._memory.tensor.numel() < nbytes:
            self._memory = memory.allocate(0, ALIGN_BYTES)  # give the old one back first
            self._memory = memory.allocate(nbytes, ALIGN_BYTES)
        return copied(shards, self._memory.tensor, self._beat)

    @property
    def is_writing(self) -> bool:
        """Whether the save in flight may still read its copies."""
        return self._flight is not None and not self._flight.wait(0)

    def give_up(self) -> None:
        """A rank that this save waits for has died: it ends as soon as it can, and is no error."""
        if self._flight is not None:
            self._flight.given_up.set()

    def check(self) -> None:
        """Raise what the save in flight ended with, if it has ended."""
        if self._flight is not None and self._flight.wait(0):
            self._land(0)

    def close(self, timeout_s: float | None = None) -> None:
        """Wait for the save in flight and raise what it ended with; TimeoutError if it does not end, PeerLost
        if a rank is gone that has a part in it."""
        self._land(self.timeout_s if timeout_s is None else timeout_s)

    def _start(self, flight: _Flight) -> None:
        self._flight = flight
        atexit.register(flight.leave, EXIT_GRACE_S)
        flight.start()

    def _land(self, timeout_s: float) -> None:
        flight = self._flight
        if flight is None:
            return
        if not flight.wait(timeout_s, self._beat):
            flight.require_ranks()
            raise TimeoutError(
                f"{flight.directory}: expected the save of step {flight.step} to end within "
                f"{timeout_s:g} s, it still writes: the disk is too slow for this interval, or hangs"
            )
        self._flight = None
        atexit.unregister(flight.leave)
        if flight.given_up.is_set() and flight.error is not None:
            return
        if flight.error is not None:
            raise _with_step(flight.error, flight.step)
        self.last = flight.path


class _Flight:
    """One save under way."""

    def __init__(
        self, directory: Path, step: int, write: Callable[[_Flight], Path], group: Group | None = None
    ) -> None:
        self.directory, self.step = directory, step
        self._peers = group.peers if group is not None and group.size > 1 else None
        self.beats = 0
        self.given_up = threading.Event()
        self.path: Path | None = None
        self.error: BaseException | None = None
        self._write = write
        # A daemon: a disk that hangs must not keep the interpreter from ending.
        self._thread = threading.Thread(target=self._fly, name=f"saving step {step}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def beat(self) -> None:
        """Its thread makes progress."""
        self.beats += 1

    def wait(self, timeout_s: float, beat: Callable[[], None] = lambda: None) -> bool:
        """Whether it has ended, by ``timeout_s`` or when one of its ranks is gone; ``beat`` is called
        where it goes on."""
        until, seen = time.monotonic() + timeout_s, self.beats
        while self._thread.is_alive() and (left := until - time.monotonic()) > 0:
            self._thread.join(min(left, SLICE_S))
            if self._thread.is_alive() and self._dead():
                break
            if self.beats != seen:
                seen = self.beats
                beat()
        return not self._thread.is_alive()

    def require_ranks(self) -> None:
        """PeerLost if one of its ranks is gone, as far as can be seen from this host."""
        if dead := self._dead():
            names = ", ".join(map(describe, dead))
            operation = f"the save of step {self.step}"
            raise PeerLost(
                f"{names} died before its part of {operation} was on the disk",
                ranks=[peer.rank for peer in dead],
                operation=operation,
            )

    def _dead(self) -> list[Peer]:
        if self._peers is None:
            return []
        gone = self._peers.dead()
        return [peer for peer in self._peers.table if peer.rank in gone]

    def leave(self, grace_s: float) -> None:
        """At exit: say how the save ended, and let no interpreter shut down under the thread."""
        ended = self.wait(grace_s)
        said = self.error if ended else f"still writes after {grace_s:g} s"
        if said is not None:
            print(f"{self.directory}: the save of step {self.step}: {said}", file=sys.stderr, flush=True)
        if not ended:
            sys.stdout.flush()
            os._exit(1)

    def _fly(self) -> None:
        try:
            self.path = self._write(self)
        except BaseException as error:
            self.error = error
        if self.given_up.is_set():  # nobody asks for it any more
            atexit.unregister(self.leave)


def _frozen(extra: Mapping[str, Json]) -> Mapping[str, Json]:
    """A copy that no one else can reach into."""
    require_json("extra", extra)
    frozen: Mapping[str, Json] = parse_json(canonical(dict(extra)), MAX_BYTES)
    return frozen


def _with_step(error: BaseException, step: int) -> BaseException:
    """The error itself, which now says which save it ended."""
    said = f"saving step {step} in the background"
    if isinstance(error, OSError) and error.strerror is not None:
        error.strerror = f"{error.strerror}, {said}"
    elif len(error.args) == 1 and isinstance(error.args[0], str):
        error.args = (f"{said}: {error.args[0]}",)
    else:
        error.add_note(said)
    return error
