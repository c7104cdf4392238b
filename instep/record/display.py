"""Progress of a run on rank 0's stderr: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from instep.record.step_lines import BUBBLE_MS, Made, of_script
from instep.record.summary import throughput
from instep.timeline.straggler import SlowRank

LINES_PER_RUN = 20
ASK_S = 1.0  # how often the bar asks for the slow rank


class Display:
    """Shows ``num_steps`` steps; silent on every rank but 0."""

    def __init__(self, rank: int, num_steps: int) -> None:
        self.console = Console(stderr=True, highlight=False, markup=False, quiet=rank != 0, soft_wrap=True)
        self.num_steps = num_steps
        self.every = max(num_steps // LINES_PER_RUN, 1)
        self._bar: Progress | None = None
        if rank == 0 and self.console.is_terminal:
            columns = [
                TextColumn("step"),
                MofNCompleteColumn(),
                BarColumn(),
                TextColumn("{task.fields[figures]}"),
                TimeRemainingColumn(),
            ]
            self._bar = Progress(*columns, console=self.console, transient=True)
            self._task = self._bar.add_task("step", total=num_steps, figures="")
            self._bar.start()
        self._logged: dict[str, float] = {}  # by the script, the newest of each
        self._slow: SlowRank | None = None
        self._asked = -ASK_S

    def say(self, text: str) -> None:
        """One line, above the bar."""
        self.console.print(text)

    def step(self, step: int, made: Made, slow: Callable[[], SlowRank | None] = lambda: None) -> None:
        """``made`` is what ``step`` computed; ``slow()``, asked rarely, finds the slow rank."""
        if made.skipped:
            self.say(f"step {step} was skipped: {made.skipped}")
        if self.console.quiet:
            return
        self._logged |= of_script(made.logged)
        if self._bar is not None:
            if (now := time.monotonic()) > self._asked + ASK_S:
                self._asked, self._slow = now, slow()
            self._bar.update(self._task, completed=step + 1, figures=_figures(made, self._logged, self._slow))
        elif step % self.every == 0 or step + 1 == self.num_steps:
            figures = _figures(made, self._logged, slow())
            self.say(f"step {step:>{len(str(self.num_steps))}}/{self.num_steps}  {figures}")

    def close(self) -> None:
        """Give the terminal back."""
        if self._bar is not None:
            self._bar.stop()


def _plain(x: float) -> str:
    return f"{x:.4f}" if x == 0 or 1e-3 <= abs(x) < 1e5 else f"{x:.3e}"


def _figures(made: Made, logged: Mapping[str, float], slow: SlowRank | None) -> str:
    waiting = f", {made.waiting_ms:.0f} waiting" if made.waiting_ms >= 0.5 else ""
    if made.logged.get(BUBBLE_MS, 0.0) >= 0.5:
        waiting += f", {made.logged[BUBBLE_MS]:.0f} bubble"
    culprit = f"  rank {slow.rank} is slow: {slow.phase}, +{slow.excess_s * 1e3:.0f} ms" if slow else ""
    known = {"loss": (made.loss, ".3f"), "norm": (made.norm, ".2f"), "lr": (made.rate, ".1e")}
    shown = "  ".join(f"{name} {x:{form}}" for name, (x, form) in known.items() if x is not None)
    shown += "".join(f"  {name} {_plain(x)}" for name, x in logged.items())
    return (
        f"{shown}  {made.step_ms:.0f} ms"
        f" ({made.exposed_ms:.0f} exposed{waiting})  {throughput(made.logged)}{culprit}"
    )
