"""Ranks beside a notebook's kernel: started, asked to execute cells, interrupted, replaced, and shut down.

    kernel ──────────────────> forkserver (holds torch)        ends with the kernel
       │ socket pair, pipes      ├─ rank 0                      ends with the forkserver
       └─────────────────────────┴─ rank 1

A rank's channel is a pair of Unix sockets without a name, inherited by the rank: there is no port, no file
and no address that another process could connect to. Messages are JSON and raw bytes (``wire``).

A cell that fails on some ranks leaves the other ones waiting, so those are interrupted ``GRACE_S`` later.
After an interrupt the ranks may stand at different collectives: they leave their groups and join new ones,
and models follow. A rank that has died is replaced by a new process with an empty namespace.
"""

from __future__ import annotations

import atexit
import codecs
import itertools
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from instep.errors import InstepError
from instep.launch.launch import Children, place_of, surroundings, warm
from instep.launch.memory_file import MemoryFile
from instep.launch.process_state import look
from instep.launch.rank_exit import Exit, describe_exit
from instep.launch.rank_process import Child
from instep.notebook.attach import process_table
from instep.notebook.folding import STREAMS, Folding, Write, fold, span
from instep.notebook.rank import Seat, serve
from instep.notebook.values import MAX_NAMED, difference, named, odd_names, parts
from instep.notebook.wire import Message, Tensors, receive, send
from instep.state.objects import put_together

GRACE_S = 5.0  # for the other ranks, after a rank has failed
KILL_S = 10.0  # for a rank to follow an interrupt
PIPE_BYTES = 1 << 16
_decoder = codecs.getincrementaldecoder("utf-8")
END_S = 2.0  # for ranks to end at a shutdown
SYNC = """import torch
torch.distributed.barrier()
if device.type == "cuda":
    torch.cuda.synchronize()"""
PRELOAD = ("instep.notebook.rank", "instep.replicate.wrapper", "instep.shm.backend")


class CellFailed(InstepError):
    """A cell raised, was interrupted, or ended its process, on some ranks; their tracebacks were printed."""

    def _render_traceback_(self) -> list[str]:  # IPython's: the frames of the kernel say nothing
        return [f"CellFailed: {self}"]


@dataclass
class _Rank:
    pid: int
    connection: Connection
    pipes: dict[str, Connection]
    last: str = "no cell yet"
    decoders: dict[str, Any] = field(
        default_factory=lambda: {stream: _decoder("replace") for stream in STREAMS}
    )


@dataclass
class _Answers:
    """The answers to one message, while they come in. Late ranks are interrupted, then killed."""

    found: dict[int, tuple[Message, Tensors]] = field(default_factory=dict)
    ended: dict[int, Exit] = field(default_factory=dict)
    stage: int = 0  # 1: they were interrupted, 2: they were killed
    next_at: float = math.inf  # when the next stage begins

    @property
    def errors(self) -> dict[int, Message]:
        return {
            rank: answer["error"] for rank, (answer, _) in sorted(self.found.items()) if "error" in answer
        }


def prepare() -> None:
    """Load torch in the background, so that ranks start at once."""
    warm(*PRELOAD)


class Ranks:
    """``num_ranks`` processes that execute cells, until ``shutdown``; in the thread that made them alone.

    Args:
        device, backend, timeout_s, threads: as in ``instep.init``.
        write: shows output, ("stdout" or "stderr", text); by default on this process's own streams.

    Raises:
        CellFailed: a rank could not join, for want of a GPU, say.

    Example:
        >>> with Ranks(2) as ranks:
        ...     ranks.run("rank + 1")
        [0] 1
        [1] 2
        {0: '1', 1: '2'}
    """

    def __init__(
        self,
        num_ranks: int,
        *,
        device: str | None = None,
        backend: str | None = None,
        timeout_s: float = 60.0,
        threads: int = 1,
        write: Write | None = None,
    ) -> None:
        if num_ranks < 1:
            raise ValueError(f"expected at least 1 rank, got {num_ranks}")
        prepare()
        self._init = {"device": device, "backend": backend, "timeout_s": timeout_s, "threads": threads}
        self._threads, self.size = threads, num_ranks
        self._write = write or _print
        self._children = Children()
        self._ranks: dict[int, _Rank] = {}
        self._stores: list[MemoryFile] = []  # torch opens that of a world again when it forgets the world
        self._is_whole = True  # all ranks are in one world
        self._is_waiting = False
        self._numbers = itertools.count(1)
        atexit.register(self.shutdown)  # before multiprocessing's own, which waits for all children
        try:
            self._make_world()
        except BaseException:
            self.shutdown()
            raise

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    @property
    def pids(self) -> list[int]:
        """The processes, by rank."""
        return [self._ranks[rank].pid for rank in sorted(self._ranks)]

    def run(self, source: str, ranks: Sequence[int] | None = None, *, name: str = "") -> dict[int, str]:
        """Execute ``source`` on ``ranks`` (by default all), and show the output while it comes.

        Returns:
            The text of the last expression by rank, "" where it has none.

        Raises:
            CellFailed: it raised on a rank, was interrupted, or a rank died.
        """
        name = name or f"cell {next(self._numbers)}"
        found = self._request({"do": "cell", "source": source, "name": name}, ranks)
        return {rank: str(answer["value"]) for rank, (answer, _) in found.items()}

    def compare(self, expression: str) -> str:
        """Whether ``expression``, a tensor, module, optimizer or data, has the same bits on all ranks."""
        everyone = list(range(self.size))
        told = self._look(expression, everyone, digests=True)
        by_rank = {rank: dict[str, str](answer["digests"]) for rank, (answer, _) in told.items()}
        odd = odd_names(by_rank)
        if not odd:
            count = sum(not name.startswith("the ") for name in by_rank[0])
            tensors = f"{count} tensor{'s' * (count != 1)}"
            return f"{expression}: the same bits on ranks {span(everyone)}, {tensors}"
        lines = [f"{expression}: {len(odd)} of {len(by_rank[0])} differ"]
        for name, groups in list(odd.items())[:MAX_NAMED]:
            lines.append(f"  {name.removeprefix('/') or expression}: {named(groups)}")
            first, other = groups[0][0], groups[1][0]
            two = self._look(expression, [first, other], only=[name])
            a, b = (two[rank][1].get(name) for rank in (first, other))
            if a is not None and b is not None:
                lines.append(f"    ranks {first} and {other}: {difference(a, b)}")
        lines += [f"  and {len(odd) - MAX_NAMED} more"] if len(odd) > MAX_NAMED else []
        return "\n".join(lines)

    def pull(self, expression: str, rank: int = 0) -> Any:
        """The value of ``expression`` on ``rank``: tensors, on the CPU, and data that JSON can carry."""
        answer, tensors = self._look(expression, [rank])[rank]
        return put_together(expression, answer["body"], tensors)

    def push(self, name: str, value: Any, ranks: Sequence[int] | None = None) -> None:
        """Set the variable ``name`` to a copy of ``value``, tensors and data, on ``ranks`` or all."""
        body, tensors = parts(value)
        message = {"do": "push", "target": name, "body": body, "name": f"push of {name}"}
        self._request(message, ranks, tensors)

    def sync(self) -> None:
        """Wait until all ranks have come to a barrier, and their devices have done what was submitted."""
        self._request({"do": "cell", "source": SYNC, "name": "sync"})

    def _look(
        self, source: str, ranks: Sequence[int], *, digests: bool = False, only: Sequence[str] = ()
    ) -> dict[int, tuple[Message, Tensors]]:
        message = {"do": "look", "source": source, "name": source, "digests": digests, "only": list(only)}
        return self._request(message, ranks)

    def _request(
        self, message: Message, ranks: Sequence[int] | None = None, tensors: Tensors | None = None
    ) -> dict[int, tuple[Message, Tensors]]:
        """The answers of ``ranks``, by default all, in their order."""
        self._require_world()
        asked = list(range(self.size)) if ranks is None else list(ranks)
        output = Folding(asked, self._write)
        answers = self._ask(message, asked, output, tensors)
        output.show(everything=True)
        for rank, (answer, _) in answers.found.items():
            how = "failed" if "error" in answer else "done"
            if rank in self._ranks and message["do"] == "cell":
                self._ranks[rank].last = f"{message['name']}: {how} in {answer['seconds']:.2f} s"
        if answers.stage or answers.ended:
            self._renew(answers.ended)
        if answers.errors or answers.ended:
            raise CellFailed(_failures(answers))
        return dict(sorted(answers.found.items()))

    def status(self) -> str:
        """A table: each rank's process, its memory, where it is, and its last cell."""
        pids = {rank: each.pid for rank, each in self._ranks.items()}
        return process_table(pids, {rank: each.last for rank, each in self._ranks.items()})

    def shutdown(self) -> None:
        """End all ranks, and wait until their processes are gone."""
        atexit.unregister(self.shutdown)
        for each in self._ranks.values():
            each.connection.close()  # at which the rank ends
        self._children.wait_all(END_S)
        self._children.stop(0)
        for each in self._ranks.values():
            for pipe in each.pipes.values():
                pipe.close()
        left = [each.pid for each in self._ranks.values() if look(each.pid) is not None]
        assert not left, f"processes {left} are left"
        self._ranks.clear()
        while self._stores:
            self._stores.pop().close()

    def _start(self, rank: int, store: MemoryFile) -> None:
        ours, theirs = self._children.context.Pipe()
        out, err = (self._children.context.Pipe(duplex=False) for _ in STREAMS)
        environ = surroundings(self._threads, place_of(rank, self.size, store))
        child = Child(rank, self._threads, environ)
        try:
            pid = self._children.start(child, serve, (Seat(theirs, out[1], err[1], self._init),))
        finally:
            for their in (theirs, out[1], err[1]):
                their.close()
        self._ranks[rank] = _Rank(pid, ours, dict(zip(STREAMS, (out[0], err[0]), strict=True)))

    def _make_world(self) -> None:
        """Start the ranks that are missing, and let all join a new world."""
        self._stores.append(MemoryFile.create())
        missing = [rank for rank in range(self.size) if rank not in self._ranks]
        for rank in missing:
            self._start(rank, self._stores[-1])
        self._is_whole = False
        message = {"do": "join", "store": str(self._stores[-1].path), "is_new": bool(missing)}
        everyone = list(range(self.size))
        output = Folding(everyone, self._write)
        answers = self._ask(message, everyone, output)
        output.show(everything=True)
        if answers.errors or answers.ended:
            raise CellFailed(f"the ranks did not join: {_failures(answers)}")
        self._is_whole = True
        joins = {rank: answer for rank, (answer, _) in sorted(answers.found.items())}
        if lost := dict.fromkeys(name for answer in joins.values() for name in answer["lost"]):
            self._say(f"{', '.join(lost)}: made for ranks that are gone: run the cells again that make it")
        for name, groups in odd_names({rank: answer["joined"] for rank, answer in joins.items()}).items():
            self._say(
                f"{name} differs between {named(groups)}, which were interrupted in different steps: run the "
                f"cells again that make it (%compare {name} shows where)"
            )

    def _require_world(self) -> None:
        """Replace the ranks that have ended since the last cell."""
        if not self._ranks:
            raise RuntimeError("the ranks were shut down: start new ones")
        exits = self._children.wait(0)[0]
        if exits:
            ended = self._bury(exits, Folding(range(self.size), self._write))
            self._renew(ended)
            raise CellFailed(f"{_deaths(ended)}. The cell was not executed")
        if not self._is_whole:
            self._make_world()

    def _renew(self, ended: Mapping[int, Exit]) -> None:
        self._make_world()
        for rank in ended:
            self._say(f"rank {rank} is a new process (pid {self._ranks[rank].pid}) with an empty namespace")

    def _bury(self, exits: Sequence[Exit], output: Folding) -> dict[int, Exit]:
        """Show the last output of ranks that have ended, and forget them."""
        for end in exits:
            self._drain(end.rank, output)
            each = self._ranks.pop(end.rank)
            for connection in (each.connection, *each.pipes.values()):
                connection.close()
        if exits:
            output.show(everything=True)
        return {end.rank: end for end in exits}

    def _ask(
        self, message: Message, ranks: Sequence[int], output: Folding, tensors: Tensors | None = None
    ) -> _Answers:
        """Send ``message``, and wait for the answers of ``ranks``; their output is shown meanwhile."""
        answers = _Answers()
        for rank in ranks:
            with suppress(OSError):  # it has ended, which is noticed below
                send(self._ranks[rank].connection, message, tensors)
        with self._interrupts(answers):
            while waiting := [rank for rank in ranks if rank in self._ranks and rank not in answers.found]:
                if time.monotonic() >= answers.next_at:
                    self._hurry(waiting, answers)
                self._wait(waiting, answers, output)
        return answers

    @contextmanager
    def _interrupts(self, answers: _Answers) -> Iterator[None]:
        """In the block SIGINT is for the ranks: the first one interrupts them, the second one kills them."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def interrupt(*_: object) -> None:
            answers.next_at = time.monotonic()
            if self._is_waiting:  # else an answer could be lost
                raise KeyboardInterrupt

        before = signal.signal(signal.SIGINT, interrupt)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before or signal.default_int_handler)

    def _wait(self, waiting: Sequence[int], answers: _Answers, output: Folding) -> None:
        """Wait for output, an answer, the end of a rank, or the time of what is next."""
        times = [answers.next_at - time.monotonic()] if answers.next_at < math.inf else []
        if output.wait_s is not None:
            times.append(output.wait_s)
        answering = {self._ranks[rank].connection: rank for rank in waiting}
        printing = {
            pipe: (rank, stream) for rank in output.ranks if rank in self._ranks
            for stream, pipe in self._ranks[rank].pipes.items()
        }  # fmt: skip
        timeout_s = max(0.0, min(times)) if times else None
        ended: list[Exit] = []
        ready: list[Connection] = []
        with suppress(KeyboardInterrupt):
            self._is_waiting = True
            ended, ready = self._children.wait(timeout_s, [*answering, *printing])
        self._is_waiting = False
        for connection in ready:
            if connection in printing:
                self._read(*printing[connection], output)
        for connection in ready:
            if connection in answering:
                with suppress(EOFError, OSError, ValueError):  # it is about to end
                    self._take(answering[connection], answers, output)
        answers.ended |= self._bury([end for end in ended if end.rank in self._ranks], output)
        output.show()
        if (answers.errors or answers.ended) and answers.next_at == math.inf and not answers.stage:
            answers.next_at = time.monotonic() + GRACE_S

    def _take(self, rank: int, answers: _Answers, output: Folding) -> None:
        """Receive the answer of ``rank``, which has printed all of its output."""
        answer, _ = answers.found[rank] = receive(self._ranks[rank].connection)
        self._drain(rank, output)
        if "error" in answer and not answer["interrupted"]:
            output.add(rank, "stderr", answer["error"]["traceback"])
        elif answer.get("value"):
            output.add(rank, "stdout", f"{answer['value']}\n")

    def _hurry(self, waiting: Sequence[int], answers: _Answers) -> None:
        answers.stage += 1
        answers.next_at = time.monotonic() + KILL_S if answers.stage == 1 else math.inf
        for rank in waiting:
            if answers.stage == 1:
                with suppress(OSError):
                    send(self._ranks[rank].connection, {"do": "interrupt"})
            else:
                with suppress(ProcessLookupError):
                    os.kill(self._ranks[rank].pid, signal.SIGKILL)

    def _drain(self, rank: int, output: Folding) -> None:
        for stream, pipe in list(self._ranks[rank].pipes.items()):
            while not pipe.closed and pipe.poll(0):
                self._read(rank, stream, output)

    def _read(self, rank: int, stream: str, output: Folding) -> None:
        """Take what ``rank`` has printed; a stream that it has closed is not asked again."""
        each = self._ranks[rank]
        data = os.read(each.pipes[stream].fileno(), PIPE_BYTES)
        if not data:
            each.pipes.pop(stream).close()
        output.add(rank, stream, each.decoders[stream].decode(data, final=not data))

    def _say(self, text: str) -> None:
        self._write("stderr", f"{text}\n")


def _failures(answers: _Answers) -> str:
    """What happened to the ranks that failed, in one sentence."""
    cause = "by the notebook: the interrupt did not stop it" if answers.stage == 2 else ""
    reasons = [_deaths(answers.ended, cause)] if answers.ended else []
    told = {}
    for rank, error in answers.errors.items():
        if answers.found[rank][0]["interrupted"]:
            told[rank] = f"interrupted in {error['where']}"
        elif not answers.ended or error["type"] != "PeerLost":  # which is a consequence
            told[rank] = f"{error['type']}: {error['message']} ({error['where']})"
    reasons += [f"rank{'s' * (len(ranks) > 1)} {span(ranks)}: {text}" for text, ranks in fold(told).items()]
    return "; ".join(reasons)


def _deaths(ended: Mapping[int, Exit], cause: str = "") -> str:
    return "; ".join(
        f"rank {rank} (pid {end.pid}) {describe_exit(end, cause)}" for rank, end in ended.items()
    )


def _print(stream: str, text: str) -> None:
    print(text, end="", file=getattr(sys, stream), flush=True)
