"""The process of a notebook's rank: executes cells in one namespace, and can be interrupted in each of them.

The main thread executes; a second one listens to the kernel, because the main thread may wait in native code,
where no Python signal arrives. An interrupt raises ``KeyboardInterrupt`` in the main thread. A collective of
torch does not notice that, so a second later the listener aborts the process groups, which ends it.

Stdout and stderr are pipes that the kernel reads, so that output of native code is shown, too. At the end of
its connection, however the kernel has ended, the rank ends.
"""

from __future__ import annotations

import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from types import ModuleType
from typing import Any

import torch.distributed as dist

import instep
from instep.launch.rank_process import exit_now
from instep.mesh.mesh import Mesh
from instep.net.device import close_connections
from instep.notebook.cell import described, evaluate, execute
from instep.notebook.values import digests, is_divided, parts
from instep.notebook.wire import Message, Tensors, receive, send
from instep.state.homes import DividedOptimizer, offered
from instep.state.objects import put_together

ABORT_S = 1.0  # from an interrupt to the end of native waits


@dataclass(frozen=True)
class Seat:
    """What a rank gets from its kernel at the start."""

    connection: Connection
    stdout: Connection
    stderr: Connection
    init: dict[str, Any]  # arguments of ``instep.init``


def serve(seat: Seat) -> None:
    """Execute cells until the kernel hangs up."""
    for fd, pipe in enumerate((seat.stdout, seat.stderr), start=1):
        os.dup2(pipe.fileno(), fd)
        pipe.close()
    main = sys.modules["__main__"] = ModuleType("__main__")  # so that classes of cells can be found by name
    _Cells(seat, main.__dict__).serve()


class _Cells:
    """Answers one message of the kernel after another: ``join`` first."""

    def __init__(self, seat: Seat, names: dict[str, Any]) -> None:
        self._seat, self._names = seat, names
        self._mesh: Mesh | None = None
        self._inbox: queue.SimpleQueue[tuple[Message, Tensors]] = queue.SimpleQueue()
        self._running = self._interrupted = False
        self._over = threading.Event()

    def serve(self) -> None:
        signal.signal(signal.SIGINT, self._on_interrupt)
        threading.Thread(target=self._listen, name="instep kernel", daemon=True).start()
        while True:
            message, tensors = self._inbox.get()
            answer, attached = self._answer(message, tensors)
            for stream in (sys.stdout, sys.stderr):
                with suppress(OSError, ValueError):
                    stream.flush()
            with suppress(OSError):  # the kernel has ended; the listener notices
                send(self._seat.connection, answer, attached)

    def _listen(self) -> None:
        while True:
            try:
                message, tensors = receive(self._seat.connection)
            except (EOFError, OSError, ValueError):
                exit_now(0)
            if message["do"] == "interrupt":
                self._interrupt()
            else:
                self._over.clear()
                self._inbox.put((message, tensors))

    def _interrupt(self) -> None:
        main = threading.main_thread().ident
        assert main is not None
        signal.pthread_kill(main, signal.SIGINT)
        if self._over.wait(ABORT_S) or not dist.is_initialized():
            return
        for group in list(dist.distributed_c10d._world.pg_map):
            with suppress(RuntimeError):  # a backend without an abort, or a group that has ended
                group.abort()
            close_connections(group)  # of gloo, whose abort does not end waits

    def _on_interrupt(self, *_: object) -> None:
        if self._running:
            self._interrupted = True
            raise KeyboardInterrupt

    def _answer(self, message: Message, tensors: Tensors) -> tuple[Message, Tensors]:
        """Do what ``message`` asks; an error of the cell, or of ours, is the answer, too."""
        actions: dict[str, Callable[[Message, Tensors], tuple[Message, Tensors]]] = {
            "join": self._join,
            "cell": self._cell,
            "look": self._look,
            "push": self._push,
        }
        name, began = str(message.get("name", message["do"])), time.monotonic()
        self._interrupted = False
        attached: Tensors = {}
        try:
            try:
                self._running = True
                answer, attached = actions[message["do"]](message, tensors)
            finally:
                self._running = False
        except BaseException as error:  # SystemExit and KeyboardInterrupt, too
            self._running = False
            answer = {"error": described(error, name), "interrupted": self._interrupted}
        self._over.set()
        return {"seconds": time.monotonic() - began, **answer}, attached

    def _cell(self, message: Message, tensors: Tensors) -> tuple[Message, Tensors]:
        return {"value": execute(message["source"], message["name"], self._names)}, {}

    def _look(self, message: Message, tensors: Tensors) -> tuple[Message, Tensors]:
        """The value of an expression: its digests, or its JSON and tensors, ``only`` some or all."""
        value = evaluate(message["source"], self._names)
        if message["digests"]:
            return {"digests": digests(value)}, {}
        body, found = parts(value)
        only = message["only"] or found
        return {"body": body}, {name: found[name] for name in only if name in found}

    def _push(self, message: Message, tensors: Tensors) -> tuple[Message, Tensors]:
        self._names[message["target"]] = put_together(message["target"], message["body"], tensors)
        return {}, {}

    def _join(self, message: Message, tensors: Tensors) -> tuple[Message, Tensors]:
        """Leave the world, and join that of the store in ``message``, with all models that can follow.

        The answer has the names of those that cannot: where a rank is new it does not have them, and what was
        divided among ranks has lost its parts with their groups.
        """
        found = {name: x for name, x in self._names.items() if offered(x) is not None}
        optimizers = {name: x for name, x in found.items() if isinstance(offered(x), DividedOptimizer)}
        models = {name: x for name, x in found.items() if name not in optimizers}
        lost = [name for name, x in found.items() if message["is_new"] or name in optimizers or is_divided(x)]
        for x in (*optimizers.values(), *models.values()):
            offered(x).leave()
        self._leave()
        os.environ["INSTEP_STORE"] = message["store"]
        self._mesh = mesh = instep.init(**self._seat.init)
        for name, x in models.items():
            if name not in lost:
                offered(x).join(mesh)
        place = {"rank": mesh.rank, "world_size": mesh.world_size, "device": mesh.device, "mesh": mesh}
        self._names.update(place)
        joined = {name: str(digests(x)) for name, x in models.items() if name not in lost}
        return {"lost": lost, "joined": joined}, {}

    def _leave(self) -> None:
        mesh, self._mesh = self._mesh, None
        if mesh is not None:
            if not dist.is_initialized():  # a cell has destroyed the default group
                mesh.on_close.clear()
            with suppress(RuntimeError):  # what was aborted
                mesh.close()
        if dist.is_initialized():
            dist.destroy_process_group()
