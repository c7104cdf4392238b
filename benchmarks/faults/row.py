"""A row of the matrix: a fault, what it does, and what shall become of the run then."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.faults.acts import Act, Damage, Through
from benchmarks.faults.judge import SENTINEL, Expect

STEPS = 60
AT = 40  # steps done at the fault
EVERY = 20  # steps between two checkpoints, where there are any
COPIES = 5  # steps between two memory copies, at most, of a model whose steps are as short as these
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
    end is compared with; ``worlds`` the numbers of ranks in the ledger, in turn, () for any. ``mounts``: the
    command needs mounts of its own. ``headline``: it is in the project's README, too.
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
