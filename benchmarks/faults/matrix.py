"""The matrix of faults: each row is a fault, what it does, and what shall become of the run then."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from signal import SIGABRT, SIGHUP, SIGINT, SIGKILL, SIGSEGV, SIGSTOP, SIGTERM, SIGUSR1

from benchmarks.faults.acts import (
    Act,
    AllKilled,
    Damage,
    Inside,
    Listens,
    ReadOnly,
    Restarted,
    Signalled,
    SmallDisk,
    Through,
    Told,
    all_flipped,
    flipped,
    missing,
    stale,
    torchrun,
    truncated,
)
from benchmarks.faults.judge import (
    DEADLINE,
    EXCEPTION,
    HEADER,
    LAUNCHER,
    MANIFEST,
    NOBODY,
    NORM,
    PROGRESS,
    REPLICAS,
    SENTINEL,
    SIGNAL,
    STATE,
    SYSTEM,
    Expect,
)

STEPS = 60
AT = 40  # steps done at the fault
EVERY = 20  # steps between two checkpoints, where there are any
COPIES = 5  # steps between two snapshots, at most, of a model whose steps are as short as these
SAVES = ("--checkpoint.every", str(EVERY))
RESUME = ("--resume",)


def slowly(*steps: int, seconds: float = 2.0) -> tuple[str, ...]:
    """Faults by which the run takes some seconds more after each of ``steps``."""
    return tuple(f"slow:rank=0,step={step},phase=ledger,seconds={seconds:g}" for step in steps)


# So that a spare worker is ready at the fault, as in any run that has lasted for some seconds.
PAUSES = slowly(10, 11, seconds=2.5)


@dataclass(frozen=True)
class Run:
    """One command of a row. ``faults`` are injected, ``act`` happens from outside, ``damage`` before it."""

    args: tuple[str, ...] = ()
    faults: tuple[str, ...] = ()
    ranks: int = 2
    act: Act | None = None
    damage: Damage | None = None
    through: Through | None = None
    pauses: bool = True

    @property
    def words(self) -> list[str]:
        """What comes after ``instep train`` and the recipe."""
        faults = [*(PAUSES if self.pauses else ()), *self.faults]
        return ["-n", str(self.ranks), *self.args, *(word for fault in faults for word in ("--fault", fault))]


@dataclass(frozen=True)
class Row:
    """A fault: the commands, one after the other in one run directory, and what is expected.

    ``program`` is one of ``programs`` in their place. ``alike`` are settings of the undisturbed run that the
    end is compared with; ``worlds`` the numbers of ranks, in turn, () for any. ``mounts``: the
    command needs mounts of its own. ``headline``: it is in docs/reliability.md, too.
    """

    group: str
    name: str
    what: str
    expect: Expect
    runs: tuple[Run, ...] = ()
    program: str = ""
    alike: tuple[str, ...] = ()
    worlds: tuple[int, ...] = ()
    mounts: bool = False
    headline: bool = False
    steps: int = STEPS


def lost(*ranks: int, noticed: str = SENTINEL, says: str = "", source: str = "", redone: int = 1) -> Expect:
    """A failure of each of ``ranks``, and the run ends as it would have."""
    return Expect(noticed, (0,), (len(ranks), len(ranks)), ranks, says, redone=redone, source=source)


def injected(kind: str, *, rank: int = 1, step: int = AT, phase: str = "exchange", **more: object) -> str:
    """A fault as ``--fault`` takes it."""
    options = {"rank": rank, "step": step, "phase": phase, **more}
    return f"{kind}:{','.join(f'{name}={value}' for name, value in options.items())}"


def matrix() -> list[Row]:
    """Every fault that is made."""
    return [*crash_rows(), *stall_rows(), *state_rows(), *surrounding_rows()]


STEP = ("data", "forward", "backward", "exchange", "loss", "update")
AFTER_STEP = ("ledger", "hash", "evaluate", "gather", "save")
OF_RANK_0 = ("ledger", "hash", "save")
OFTEN = (*SAVES, "--eval.every", str(EVERY), "--record.hash-every", str(EVERY))
HIT = f"after step {AT}, from outside"
GOES_ON = Run(RESUME, pauses=False)


def crash_rows() -> Iterator[Row]:
    """Ranks die: by signals from outside, in each phase of a step, and again and again."""
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
    run, expect = Run(act=AllKilled(AT)), lost(0, 1, source="snapshot", redone=COPIES)
    what = f"{HIT}, at once: the state is in the snapshot only"
    yield Row(group, "SIGKILL, all ranks", what, expect, (run,), headline=True)
    for number in (SIGTERM, SIGUSR1):
        run = Run(SAVES, act=Signalled(number, AT))
        expect = Expect(SIGNAL, (75, 0), says="stopped after")
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
    what = "rank 1; then rank 0 at the beginning of the first snapshot after the recovery"
    yield Row(group, "snapshot", what, lost(0, 1), (run,))
    run = Run(faults=(first, injected("kill", rank=0, phase="join")))
    what = "rank 1; then rank 0, while the ranks join again"
    yield Row(group, "join", what, lost(0, 1, source="snapshot", redone=COPIES), (run,))
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


# Programs, what they do, and what is said then.
DISAGREEMENTS = {
    "skipped": ("a rank skips a collective", "Desync.*rank 0 calls all_reduce.*rank 1 calls barrier"),
    "shape": ("a longer tensor on one rank", "Desync.*1000 float32; rank 1 calls.*1001 float32"),
    "dtype": ("another dtype on one rank", "Desync.*float32; rank 1 calls.*float64"),
    "fewer": ("a rank has a batch less", "PeerLost.*wait.* in the exchange.*for rank 1, which left"),
}


def stall_rows() -> Iterator[Row]:
    """Ranks live and do not go on, or do what the others do not."""
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


FILES = ("model.safetensors", "optimizer.safetensors", "manifest.json")
ENTRIES = {"parameter": "embedding.tokens.weight", "moment": "exp_avg/embedding.tokens.weight"}
LAG = 5  # steps that may be made until a save that goes on in the background has failed
DISK_KIB = 800  # room for one checkpoint and the rest of a run, and not for two
HALF = Run((*SAVES, "--stop-after", str(AT)), pauses=False)


def state_rows() -> Iterator[Row]:
    """The state is at stake: bad numbers, broken disks, damaged checkpoints."""
    yield from numbers()
    yield from disks()
    yield from damages()


def numbers() -> Iterator[Row]:
    group = "bad numbers"
    run = Run(faults=(injected("nan"),))
    expect, alike = Expect(NORM, skipped=1), ("--checks.skip-steps", str(AT))
    what = f"in one rank's gradient of step {AT}, which is skipped"
    yield Row(group, "nan", what, expect, (run,), alike=alike, headline=True)
    run = Run(faults=tuple(injected("nan", step=AT + i) for i in range(6)))
    expect = Expect(NORM, (1,), says=r"rank 1 computed, is not finite", same=False)
    yield Row(group, "nan, six in a row", "one more than may be skipped: the run ends", expect, (run,))
    for kind, entry in ENTRIES.items():
        args = (*SAVES, "--checks.replicas-every", "10")
        run = Run(args, (injected("flip", phase="data", name=entry),), ranks=3)
        expect = Expect(REPLICAS, (0,), (1, 3), (), rf"rank 1\b.*{entry}", redone=10)
        what = "in one of three ranks; compared every 10 steps, the last checkpoint is taken"
        yield Row(group, f"flipped bit, {kind}", what, expect, (run,), headline=kind == "parameter")


def disks() -> Iterator[Row]:
    group = "disks"
    run = Run(SAVES, through=Inside(("kill-at=rename:2",)))
    what = "before the rename by which the second would be there"
    yield Row(group, "killed in a save", what, lost(0), (run,))
    run = Run(SAVES, through=SmallDisk(DISK_KIB), pauses=False)
    expect = Expect(SYSTEM, (1, 0), says="[Nn]o space left on device", redone=EVERY + LAG)
    what = "no room for a second checkpoint: the run ends, and is resumed elsewhere"
    yield Row(group, "full disk", what, expect, (run, GOES_ON), mounts=True, headline=True)
    run = Run(SAVES, through=Inside(("disk=EIO:fsync:9",)), pauses=False)
    expect = Expect(SYSTEM, (1, 0), says="[Ii]nput/output error", redone=EVERY + LAG)
    yield Row(group, "EIO", "in the second checkpoint and from then on", expect, (run, GOES_ON))
    run = Run(RESUME, through=ReadOnly("checkpoints"), pauses=False)
    expect = Expect(SYSTEM, (75, 1, 0), says="[Rr]ead-only file system", redone=EVERY)
    what = "the run ends, and is resumed when they can be written"
    yield Row(group, "read-only checkpoints", what, expect, (HALF, run, GOES_ON), mounts=True)
    run = Run(RESUME, through=ReadOnly(), pauses=False)
    expect = Expect(SYSTEM, (75, 2, 0), says="cannot be written to")
    yield Row(group, "read-only directory", "refused", expect, (HALF, run, GOES_ON), mounts=True)


def damages() -> Iterator[Row]:
    group = "checkpoints"
    found = {f"flipped bit, {name}": flipped(name) for name in FILES}
    found |= {"truncated": truncated("model.safetensors"), "missing": missing("optimizer.safetensors")}
    expect = Expect(MANIFEST, (75, 0), says="passed over", redone=EVERY)
    for name, damage in found.items():
        runs = (HALF, Run(RESUME, damage=damage, pauses=False))
        what = "in the newest: the one before is taken"
        yield Row(group, name, what, expect, runs, headline=name == "truncated")
    runs = (HALF, Run(RESUME, damage=stale, pauses=False))
    what = "a temporary directory in the place of the newest"
    yield Row(group, "half a save", what, Expect(MANIFEST, (75, 0), redone=EVERY), runs)
    runs = (HALF, Run(RESUME, damage=all_flipped, pauses=False))
    says = "expected a checkpoint that verifies"
    expect = Expect(MANIFEST, (75, 3), says=says, same=False)
    yield Row(group, "all damaged", "a bit of each is flipped: refused", expect, runs)


LATE = AT + 8  # some time after a checkpoint, so that it is on the disk


def surrounding_rows() -> Iterator[Row]:
    """The surroundings change: the number of ranks, the command, the clock, the launcher."""
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
        expect = Expect(SIGNAL, (75, 0), says="stopped after")
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
