"""Rows in which ranks die: by signals from outside, in each phase of a step, and again and again."""

from __future__ import annotations

from collections.abc import Iterator
from signal import SIGABRT, SIGINT, SIGKILL, SIGSEGV, SIGTERM, SIGUSR1

from benchmarks.faults.acts import AllKilled, Signalled
from benchmarks.faults.judge import EXCEPTION, NOBODY, SENTINEL, SIGNAL, Expect
from benchmarks.faults.row import AT, COPIES, EVERY, RESUME, SAVES, Row, Run, injected, lost

STEP = ("data", "forward", "backward", "exchange", "loss", "update")
AFTER_STEP = ("ledger", "hash", "evaluate", "gather", "save")
OF_RANK_0 = ("ledger", "hash", "save")
OFTEN = (*SAVES, "--eval.every", str(EVERY), "--ledger.every", str(EVERY))
HIT = f"after step {AT}, from outside"
GOES_ON = Run(RESUME, pauses=False)


def rows() -> Iterator[Row]:
    """All of them."""
    yield from signals()
    yield from phases()
    yield from exits()
    yield from repeats()


def signals() -> Iterator[Row]:
    group = "signals to a rank"
    for number in (SIGKILL, SIGSEGV, SIGABRT):
        run = Run(act=Signalled(number, AT))
        expect = lost(1, says=number.name)
        yield Row(group, number.name, HIT, expect, (run,), headline=number is SIGKILL)
    run = Run(("--parallel.backend", "gloo"), act=Signalled(SIGKILL, AT))
    yield Row(group, "SIGKILL, gloo", f"{HIT}; over sockets", lost(1), (run,))
    run = Run(act=Signalled(SIGKILL, 5))
    what = "after step 5: nobody is ready to take its place"
    yield Row(group, "SIGKILL, no spare", what, lost(1), (run,), headline=True)
    run, expect = Run(act=AllKilled(AT)), lost(0, 1, source="memory copy", redone=COPIES)
    what = f"{HIT}, at once: the state is in the memory copy only"
    yield Row(group, "SIGKILL, all ranks", what, expect, (run,), headline=True)
    run = Run(("--parallel.strategy", "server"), act=Signalled(SIGKILL, AT, rank=0))
    what = f"{HIT}, rank 0, which alone has the moments"
    yield Row(group, "SIGKILL, the server", what, lost(0, source="memory copy", redone=COPIES), (run,))
    for number in (SIGTERM, SIGUSR1):
        run = Run(SAVES, act=Signalled(number, AT))
        expect = Expect(SIGNAL, (75, 0), says="stopped after step")
        what = f"{HIT}: the run ends after the step, and is resumed"
        yield Row(group, number.name, what, expect, (run, GOES_ON))
    run = Run(act=Signalled(SIGINT, AT))
    yield Row(group, "SIGINT", f"{HIT}: Ctrl-C is for the command", Expect(NOBODY), (run,))


def phases() -> Iterator[Row]:
    group = "SIGKILL in a phase"
    for phase in (*STEP, *AFTER_STEP):
        rank = 0 if phase in OF_RANK_0 else 1
        run = Run(OFTEN, (injected("kill", rank=rank, phase=phase),))
        yield Row(group, phase, f"rank {rank}, at the beginning of it", lost(rank), (run,))
    run = Run(faults=(injected("kill", phase="update", after_ms=0.3),))
    yield Row(group, "update, within", "rank 1, 0.3 ms after its beginning", lost(1), (run,))
    first = injected("kill")
    run = Run(faults=(first, injected("kill", rank=0, step=AT + 1, phase="snapshot")))
    what = "rank 1; then rank 0 at the beginning of the first memory copy after the recovery"
    yield Row(group, "snapshot", what, lost(0, 1), (run,))
    run = Run(faults=(first, injected("kill", rank=0, phase="join")))
    what = "rank 1; then rank 0, while the ranks join again"
    yield Row(group, "join", what, lost(0, 1, source="memory copy", redone=COPIES), (run,))
    run = Run(faults=(injected("kill", step=-1, phase="agree"),), pauses=False)
    yield Row(group, "agree", "rank 1, before the first step", lost(1), (run,))


def exits() -> Iterator[Row]:
    group = "exits and exceptions"
    run = Run(faults=(injected("exit"),))
    yield Row(group, "os._exit(1)", "in the exchange", lost(1, says="exited with code 1"), (run,))
    run = Run(faults=(injected("exit", code=0),))
    what = "in the exchange, as if all was done"
    yield Row(group, "os._exit(0)", what, lost(1, says="exited with code 0"), (run,))
    run = Run(faults=(injected("raise", phase="forward"),))
    expect = lost(1, noticed=EXCEPTION, says="RuntimeError: fault injected")
    yield Row(group, "exception", "in the forward", expect, (run,), headline=True)
    run = Run(faults=(injected("raise"),))
    what = "in one rank, when the others are in the exchange"
    yield Row(group, "exception before a collective", what, lost(1, noticed=EXCEPTION), (run,))


def repeats() -> Iterator[Row]:
    group = "again and again"
    run = Run(faults=(injected("raise"),) * 2)
    says = "the same exception came twice at the same step"
    expect = Expect(EXCEPTION, (1,), (2, 2), (1,), says, same=False)
    yield Row(group, "the same exception", "twice at one step: the run ends and lists both", expect, (run,))
    run = Run(faults=(injected("kill"),) * 5)
    says = r"5 failures in a row.*(\n  rank 1 .*){5}"
    expect = Expect(SENTINEL, (1,), (5, 5), (1,), says, same=False)
    what = "without a step between them: the run ends and lists all"
    yield Row(group, "five kills", what, expect, (run,), headline=True)
    run = Run(faults=tuple(injected("kill", step=AT + i) for i in range(5)))
    yield Row(group, "five kills, apart", "with a step between them", lost(1, 1, 1, 1, 1), (run,))
