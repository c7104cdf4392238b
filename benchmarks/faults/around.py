"""Rows in which the surroundings change: the number of ranks, the command, the clock, the launcher."""

from __future__ import annotations

from collections.abc import Iterator
from signal import SIGHUP, SIGINT, SIGKILL, SIGTERM, SIGUSR1

from benchmarks.faults.acts import Inside, Listens, Restarted, Told, torchrun
from benchmarks.faults.judge import LAUNCHER, NOBODY, SENTINEL, SIGNAL, Expect
from benchmarks.faults.row import AT, EVERY, RESUME, SAVES, Row, Run, injected, lost, slowly

LATE = AT + 8  # some time after a checkpoint, so that it is on the disk
GOES_ON = Run(RESUME, pauses=False)


def rows() -> Iterator[Row]:
    """All of them."""
    yield from moves()
    yield from command()
    yield from outside()


def moves() -> Iterator[Row]:
    group = "other numbers of ranks"
    resizes = ("resize:step=13,ranks=4", "resize:step=25,ranks=1", "resize:step=40,ranks=3")
    run = Run(faults=(*resizes, *slowly(14, 15, 16, 26, 27, 41, 42, 43)))
    worlds = (2, 4, 1, 3)
    what = "in one run, without an end"
    yield Row(group, "2 → 4 → 1 → 3", what, Expect(NOBODY), (run,), worlds=worlds, headline=True)
    stops = {2: 15, 4: 30, 1: 45, 3: 0}
    runs = tuple(
        Run((*(RESUME if number else ()), "--stop-after", str(stop)), ranks=ranks, pauses=False)
        for number, (ranks, stop) in enumerate(stops.items())
    )
    expect = Expect(NOBODY, (75, 75, 75, 0))
    yield Row(group, "2 → 4 → 1 → 3, resumed", "stopped and resumed", expect, runs, worlds=worlds)
    run = Run(("--min-ranks", "1"), (injected("kill", step=5),))
    what = "rank 1 killed with --min-ranks 1, before a spare is ready"
    yield Row(group, "fewer for a while", what, lost(1), (run,), worlds=(2, 1, 2))


def command() -> Iterator[Row]:
    group = "signals to the command"
    for number in (SIGTERM, SIGUSR1):
        run = Run(SAVES, act=Told((number,), AT))
        expect = Expect(SIGNAL, (75, 0), says="stopped after step")
        what = "preempted: ends after the step with a checkpoint, and is resumed"
        yield Row(group, number.name, what, expect, (run, GOES_ON), headline=number is SIGTERM)
    hold = (injected("slow", step=LATE, phase="forward", seconds=4),)  # a step that is under way
    endings = {
        "SIGTERM twice": ((SIGTERM, SIGTERM), 143, "the second ends it at once"),
        "SIGINT": ((SIGINT,), 130, "ends it at once"),
        "SIGHUP": ((SIGHUP,), 129, "the terminal is gone: ends it at once"),
    }
    for name, (numbers, code, what) in endings.items():
        run = Run(SAVES, hold, act=Told(numbers, LATE))
        yield Row(group, name, what, Expect(SIGNAL, (code, 0), redone=EVERY), (run, GOES_ON))
    run = Run(SAVES, hold, act=Told((SIGKILL,), LATE))
    # Whoever is killed like this cannot remove its temporary files.
    left = r"temporary (instep-|pymp-)|unfinished "
    expect = Expect(SENTINEL, (-9, 0), redone=EVERY, left=left)
    what = "the supervisor itself: no rank survives it; the run is resumed"
    yield Row(group, "SIGKILL to the command", what, expect, (run, GOES_ON), headline=True)


def outside() -> Iterator[Row]:
    group = "surroundings"
    run = Run(faults=(injected("kill"),), through=Inside(("clock=1",)))
    what = "the wall clock jumps by up to a day at every look, and rank 1 is killed"
    yield Row(group, "jumping clock", what, lost(1), (run,))
    run = Run(act=Listens(AT))
    yield Row(group, "nothing listens", "no port can be taken", Expect(NOBODY), (run,))
    run = Run(SAVES, act=Restarted(LATE), through=torchrun, pauses=False)
    expect = Expect(LAUNCHER, redone=EVERY + 10, left="temporary torchelastic_")  # its logs
    what = "rank 1 killed: torchrun restarts all, and they resume by themselves"
    yield Row(group, "under torchrun", what, expect, (run,), headline=True)
