"""Rows in which ranks live and do not go on, or do what the others do not."""

from __future__ import annotations

from collections.abc import Iterator
from signal import SIGSTOP

from benchmarks.faults.acts import Signalled
from benchmarks.faults.judge import DEADLINE, HEADER, NOBODY, PROGRESS, SENTINEL, STATE, Expect
from benchmarks.faults.row import AT, Row, Run, injected, lost, slowly

# Programs, what they do, and what is said then.
DISAGREEMENTS = {
    "skipped": ("a rank skips a collective", "Desync.*rank 0 calls all_reduce.*rank 1 calls barrier"),
    "shape": ("a longer tensor on one rank", "Desync.*1000 float32; rank 1 calls.*1001 float32"),
    "dtype": ("another dtype on one rank", "Desync.*float32; rank 1 calls.*float64"),
    "fewer": ("a rank has a batch less", "PeerLost.*wait.* in the exchange.*for rank 1, which left"),
}


def rows() -> Iterator[Row]:
    """All of them."""
    yield from stopped()
    yield from stuck()
    yield from disagreements()


def stopped() -> Iterator[Row]:
    group = "stopped"
    expect = lost(1, noticed=STATE)
    run = Run(act=Signalled(SIGSTOP, AT))
    yield Row(group, "SIGSTOP", f"after step {AT}, forever", expect, (run,), headline=True)
    run = Run(faults=slowly(*range(41, 46)), act=Signalled(SIGSTOP, AT, cont_s=10.0))
    yield Row(group, "SIGSTOP, 10 s", "SIGCONT after 10 s finds nobody", expect, (run,))
    run = Run(act=Signalled(SIGSTOP, AT, cont_s=0.5))
    yield Row(group, "SIGSTOP, 0.5 s", "too short to be taken for an end", Expect(NOBODY), (run,))


def stuck() -> Iterator[Row]:
    group = "stalls"
    expect = lost(1, noticed=PROGRESS)
    run = Run(faults=(injected("hang", phase="forward"),))
    yield Row(group, "sleep", "forever, in the forward", expect, (run,))
    run = Run(faults=(injected("spin", phase="forward"),))
    what = "in the forward; other threads go on"
    yield Row(group, "endless loop", what, expect, (run,), headline=True)
    run = Run(faults=(injected("hold", phase="forward"),))
    what = "held forever by native code"
    yield Row(group, "interpreter lock", what, expect, (run,), headline=True)
    run = Run(("--timeout-s", "8"), (injected("hang"),))
    what = "where ranks wait for each other; deadline 8 s"
    yield Row(group, "sleep in the exchange", what, lost(1, noticed=DEADLINE), (run,))
    often = (injected("slow", step=step, seconds=0.3) for step in range(25, 35))
    run = Run(faults=(*often, injected("slow", phase="forward", seconds=4)))
    what = "0.3 s in each of 10 steps, then 4 s in one"
    yield Row(group, "slow rank", what, Expect(NOBODY), (run,), headline=True)


def disagreements() -> Iterator[Row]:
    for program, (name, says) in DISAGREEMENTS.items():
        expect = Expect(SENTINEL if program == "fewer" else HEADER, (1,), says=says, same=False)
        what = "in a program of two ranks: all raise, and name both sides"
        row = Row("disagreement", name, what, expect, program=program, headline=program == "skipped")
        yield row
