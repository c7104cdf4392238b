"""What is planted: settings and faults that cost time, each with the advice that should name it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

SHARE = 0.3  # of a healthy step, for which a planted rank sleeps
AFTER = 2  # steps: the first ones are not looked at
STEPS = 20
TEXT = Path(__file__).parents[2] / "instep"  # soon read
COMMON = (
    *("--steps", str(STEPS), "--eval.every", "0", "--eval.windows", "8", "--checks.replicas-every", "0"),
    *("--record.hash-every", "0", "--timeout-s", "60", "--data", str(TEXT)),
)
# On one host, 0.4 M parameters: there is hardly anything to exchange.
SMALL = ("--batch.global-size", "32", "--batch.micro-size", "4")
# Over a link, 1.7 M: their 6.7 MB take 60 ms at 1 Gbit/s, which is about as long as backward does.
LARGE = (
    *("--model.width", "256", "--batch.global-size", "32", "--batch.micro-size", "8"),
    *("--parallel.backend", "gloo"),
)
# On one host, 6.4 M and few tokens: the exchange takes a good part of the step.
WIDE = (
    *("--model.width", "512", "--model.context", "32", "--batch.global-size", "8", "--batch.micro-size", "4"),
    *("--parallel.backend", "gloo"),
)
# Over a link, 0.4 M in many small parameters.
DEEP = (
    *("--model.layers", "8", "--model.width", "64", "--batch.global-size", "32", "--batch.micro-size", "8"),
    *("--parallel.backend", "gloo"),
)
PHASES = {"forward": "its own compute", "data": "its data", "ledger": "its host code"}


@dataclass(frozen=True)
class Cause:
    """Something that costs time, in a run of ``instep train``.

    ``sleeps``: (rank, phase) of faults that last ``SHARE`` of a healthy step; the advice about them is
    followed by taking them out. All other advice is followed by its flags. ``advised`` is what the first
    piece of advice may be called, () where there should be none, ``says`` what is then in its sentence.
    """

    name: str
    text: str
    advised: tuple[str, ...] = ()
    says: tuple[str, ...] = ()
    flags: tuple[str, ...] = SMALL
    sleeps: tuple[tuple[int, str], ...] = ()
    ranks: int = 2
    over_link: bool = False
    followed: bool = True  # and not only looked at

    def faults(self, step_s: float) -> tuple[str, ...]:
        """As ``--fault`` takes them, where a healthy step takes ``step_s``."""
        what = f"step={AFTER},steps={STEPS},seconds={SHARE * step_s:.4f}"
        return tuple(f"slow:rank={rank},phase={phase},{what}" for rank, phase in self.sleeps)

    def words(self, step_s: float) -> tuple[str, ...]:
        """What comes after ``instep train``."""
        return (*COMMON, *self.flags, *(word for fault in self.faults(step_s) for word in ("--fault", fault)))

    def remedy(self, try_: str) -> tuple[str, ...]:
        """What comes after ``instep train`` when the advice with the flags ``try_`` is followed."""
        return (*COMMON, *self.flags, *(() if self.sleeps else try_.split()))


def one_slow(phase: str, *, ranks: int = 2) -> Cause:
    """The last rank is slow in one phase."""
    rank, where = ranks - 1, "host code between steps" if phase == "ledger" else phase
    says = (f"Rank {rank} ", PHASES[phase])
    flags = SMALL if ranks == 2 else ("--batch.global-size", "36", "--batch.micro-size", "4")
    return Cause(
        f"{phase}-{ranks}",
        f"rank {rank} of {ranks} sleeps {SHARE:.0%} of a step in its {where}".replace("%", " %"),
        ("slow rank",),
        says,
        flags,
        ((rank, phase),),
        ranks,
        followed=ranks == 2,
    )


HEALTHY = Cause("healthy", "nothing")
CAUSES = (
    HEALTHY,
    *(one_slow(phase) for phase in PHASES),
    Cause(
        "loader",
        f"every rank sleeps {SHARE:.0%} of a step in its loader".replace("%", " %"),
        ("loader",),
        ("Every rank waits", "for its data"),
        sleeps=((0, "data"), (1, "data")),
    ),
    Cause(
        "sockets",
        "gloo on one host, flat",
        ("gloo",),
        ("sockets (gloo)",),
        (*WIDE, "--parallel.strategy", "flat"),
    ),
    Cause(
        "giant",
        "one bucket of 1000 MB over 1 Gbit/s",
        ("giant bucket",),
        ("in one bucket",),
        (*LARGE, "--parallel.bucket-mb", "1000"),
        over_link=True,
    ),
    Cause(
        "tiny",
        "buckets of 0.01 MB over 1 Gbit/s",
        ("tiny buckets",),
        ("buckets, each of which costs",),
        (*DEEP, "--parallel.bucket-mb", "0.01"),
        over_link=True,
    ),
    Cause(
        "naive",
        "`naive` over 1 Gbit/s",
        ("strategy",),
        ("gradients is sent by itself",),
        (*LARGE, "--parallel.strategy", "naive"),
        over_link=True,
    ),
    Cause(
        "link",
        "a link of 1 Gbit/s, buckets of 2 MB",
        ("slow link",),
        ("the link between the 2 hosts", "Gbit/s"),
        (*LARGE, "--parallel.bucket-mb", "2"),
        over_link=True,
    ),
    *(one_slow(phase, ranks=3) for phase in PHASES),
)
