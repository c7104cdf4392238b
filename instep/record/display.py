"""Progress on stderr, with the time left: a live line on a terminal, elsewhere a plain line every 10 s."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from datetime import timedelta
from functools import cache
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from instep.record.step_lines import BUBBLE_MS, Made, of_script
from instep.record.summary import throughput
from instep.timeline.straggler import SlowRank

Thing = TypeVar("Thing")

LINES_PER_RUN = 20  # at least, where there is no terminal
SHORT_S = 2.0  # work that takes less shows no progress
LINE_S, LIVE_S = 10.0, 0.5  # between two plain lines, and two updates of a live one


@cache
def live() -> Progress:
    """What draws live lines: one for all work of a process, since a terminal has room for one."""
    console = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
    columns = BarColumn(bar_width=10), TextColumn("{task.description}")
    return Progress(*columns, console=console, transient=True)


class LongWork:
    """Work that takes a while: how much is done, and how long the rest will take.

    It may be the ``part`` from one share to another of a command that began at ``began`` (monotonic).
    """

    def __init__(
        self, *, quiet: bool = False, part: tuple[float, float] = (0.0, 1.0), began: float | None = None
    ) -> None:
        self.quiet, self._part = quiet, part
        self._began = time.monotonic() if began is None else began
        self._next = self._began + (SHORT_S if live().console.is_terminal else LINE_S)
        self._task: TaskID | None = None

    def at(self, done: float, text: str | Callable[[], str], *, always: bool = False) -> None:
        """``done`` of 1 is done; shows ``text``, or calls it, if it is time to, or ``always``."""
        now, is_terminal = time.monotonic(), live().console.is_terminal
        if self.quiet or (now < self._next and (is_terminal or not always)):
            return
        self._next = now + (LIVE_S if is_terminal else LINE_S)
        first, last = self._part
        whole = first + (last - first) * done
        left = _left((now - self._began) * (1 - whole) / whole) if 0 < whole < 1 else ""
        text = text if isinstance(text, str) else text()
        if not is_terminal:
            live().console.print(f"{text}{left}")
            return
        live().start()
        if self._task is None:
            self._task = live().add_task("", total=1.0)
        live().update(self._task, completed=whole, description=f"{left:13}{text}", refresh=True)

    def close(self) -> None:
        """Give the terminal back."""
        if self._task is not None:
            if len(live().tasks) == 1:
                live().stop()
            live().remove_task(self._task)
            self._task = None


def follow(things: Sequence[Thing], what: str, **options: Any) -> Iterator[Thing]:
    """``things``, one after the other, showing the progress of ``what``; ``options`` as of ``LongWork``."""
    with closing(LongWork(**options)) as work:
        for number, thing in enumerate(things):
            work.at(number / len(things), f"{what} {number}/{len(things)}")
            yield thing


class Display:
    """Shows steps, of ``num_steps`` in all; silent on every rank but 0."""

    def __init__(self, rank: int, num_steps: int) -> None:
        self.quiet, self.num_steps = rank != 0, num_steps
        self._logged: dict[str, float] = {}  # by the script, the newest of each
        self._work: LongWork | None = None
        self._first = 0

    def say(self, text: str) -> None:
        """One line, above the live one."""
        if not self.quiet:
            live().console.print(text)

    def step(self, step: int, made: Made, slow: Callable[[], SlowRank | None] = lambda: None) -> None:
        """``made`` is what ``step`` computed; ``slow()``, asked rarely, finds the slow rank."""
        if made.skipped:
            self.say(f"step {step} was skipped: {made.skipped}")
        if self._work is None:
            self._work, self._first = LongWork(quiet=self.quiet), step
        self._logged |= of_script(made.logged)
        number, last = f"step {step:>{len(str(self.num_steps))}}/{self.num_steps}", self.num_steps - 1
        self._work.at(
            (step - self._first) / max(last - self._first, 1),
            lambda: f"{number}  {step_figures(made, self._logged, slow())}",
            always=step % max(self.num_steps // LINES_PER_RUN, 1) == 0 or step == last,
        )

    def close(self) -> None:
        """Give the terminal back."""
        if self._work is not None:
            self._work.close()


def _left(seconds: float) -> str:
    return f"  {timedelta(seconds=round(seconds))} left".replace("  0:", "  ")


def _plain(x: float) -> str:
    return f"{x:.4f}" if x == 0 or 1e-3 <= abs(x) < 1e5 else f"{x:.3e}"


def step_figures(made: Made, logged: Mapping[str, float], slow: SlowRank | None) -> str:
    """The figures of one step, in words; ``logged`` by the script."""
    waiting = f", {made.waiting_ms:.0f} waiting" if made.waiting_ms >= 0.5 else ""
    if made.logged.get(BUBBLE_MS, 0.0) >= 0.5:
        waiting += f", {made.logged[BUBBLE_MS]:.0f} bubble"
    culprit = f"  rank {slow.rank} is slow: {slow.phase}, +{slow.excess_s * 1e3:.0f} ms" if slow else ""
    known = ("loss", made.loss, ".3f"), ("norm", made.norm, ".2f"), ("lr", made.rate, ".1e")
    shown = "  ".join(f"{name} {x:{form}}" for name, x, form in known if x is not None and name not in logged)
    shown += "".join(f"  {name} {_plain(x)}" for name, x in logged.items())
    return (
        f"{shown}  {made.step_ms:.0f} ms"
        f" ({made.exposed_ms:.0f} exposed{waiting})  {throughput(made.logged)}{culprit}"
    )
