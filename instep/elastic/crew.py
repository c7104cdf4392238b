"""The workers of a supervisor: started, heard, sent away, and gone."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

from instep.elastic.member import Desk
from instep.elastic.page import MAX_WORKERS, Page
from instep.elastic.worker import Worker
from instep.mesh.child import Child
from instep.mesh.exits import Exit
from instep.mesh.launch import Children, surroundings

Message = dict[str, Any]


class Crew:
    """Processes that run ``work(desk, *args)``, by number; none of them is left after ``stop``."""

    def __init__(
        self, work: Callable[..., object], args: tuple[Any, ...], threads: int, directory: Path
    ) -> None:
        self.workers: dict[int, Worker] = {}
        self.page = Page(directory / "page", create=True)
        self._work, self._args, self._threads, self._directory = work, args, threads, directory
        self._children = Children()
        self._number = 0

    @property
    def living(self) -> list[Worker]:
        """Those that nobody has sent away."""
        return [w for w in self.workers.values() if not w.dismissed and not w.killed]

    @property
    def step(self) -> int:
        """The most steps that one of them has made; -1: none has a state yet."""
        return max((self.page.position(w.slot).step for w in self.workers.values()), default=-1)

    def start(self) -> Worker:
        """One more."""
        taken = {worker.slot for worker in self.workers.values()}
        while self._number % MAX_WORKERS in taken:
            self._number += 1
        number, self._number = self._number, self._number + 1
        ours, theirs = self._children.context.Pipe()
        environ = surroundings(self._threads, {})
        child = Child(number, self._threads, str(self._directory), environ)
        slot = number % MAX_WORKERS
        self.page.reset(slot)
        pid = self._children.start(child, self._work, (Desk(slot, self.page.path, theirs), *self._args))
        theirs.close()
        self.workers[number] = Worker(child, pid, slot, ours, self.page)
        return self.workers[number]

    def wait(self, timeout_s: float) -> tuple[list[tuple[Worker, Message]], list[tuple[Worker, Exit]]]:
        """What was said, and who has ended, which is after all that it has said."""
        lines = {worker.connection: worker for worker in self.workers.values() if not worker.hung_up}
        ended, ready = self._children.wait(timeout_s, list(lines))
        said = [(lines[line], message) for line in ready if (message := lines[line].hear()) is not None]
        dead = [(self.workers.pop(end.rank), end) for end in ended]
        for worker, _ in dead:
            said += [(worker, message) for message in _rest(worker)]
            worker.connection.close()
        return said, dead

    def wait_all(self, timeout_s: float) -> list[tuple[Worker, Exit]]:
        """Who has ended when all have, or the time is up."""
        return [(self.workers.pop(end.rank), end) for end in self._children.wait_all(timeout_s)]

    def dismiss(self, worker: Worker) -> None:
        """It is not needed any more: it leaves, if it waits for a seat, or is ended."""
        worker.dismissed = True
        if worker.free:
            worker.give(None)
        else:
            worker.end()

    def disband(self, finished: Collection[Worker], grace_s: float) -> None:
        """The run is over: who has ``finished`` it has this long to leave, all others go now."""
        for worker in self.workers.values():
            if worker.free or worker not in finished:
                self.dismiss(worker)
            worker.connection.close()  # who asks for a seat from now on is sent away
        self._children.wait_all(grace_s)

    def stop(self) -> None:
        """End all that are left."""
        self._children.stop(0)
        for worker in self.workers.values():
            worker.connection.close()


def _rest(worker: Worker) -> Iterator[Message]:
    """What a worker has said that nobody has heard."""
    while not worker.hung_up and worker.connection.poll() and (message := worker.hear()) is not None:
        yield message
