"""From the ranks' times to answers: who waits how long for communication, and who closes which gap.

The time of a step is that of its slowest rank. What is compared is compared within rounds: the difference or
the ratio of two contestants in the same round, then the median over rounds.

    exposed       step - step of as many processes without any synchronisation
    busy          how long the communication lane was at work, on the rank where that was longest
    efficiency    (one step's time of rank 0 while the others wait) / step: the throughput of W ranks over
                  W times the throughput of one that has the machine to itself
    gap closed    (DDP - step) / (DDP - none): 0 is torch's DDP over gloo, 1 is no synchronisation at all

W: ranks.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from instep.bench.contestants import ALONE, DDP, LATENCY, NONE, WIRE, Contestant
from instep.bench.ranks import merge
from instep.bench.tables import Ratio, paired_ratio, quantile, quantiles

MS = 1e3
NOT_STEPS = {WIRE.name, LATENCY.name}


@dataclass(frozen=True)
class Answers:
    """The measurements of all ranks: ``by_rank[r][contestant][what][round]``."""

    by_rank: Sequence[Mapping[str, Mapping[str, Sequence[Any]]]]

    @property
    def names(self) -> list[str]:
        return list(self.by_rank[0])

    def steps(self, name: str) -> list[float]:
        """Seconds per step of the slowest rank, by round."""
        return self.slowest(name, "step_s")

    def slowest(self, name: str, what: str) -> list[float]:
        return merge([rank[name][what] for rank in self.by_rank])

    def exposed(self, name: str) -> list[float]:
        """Seconds per step more than without synchronisation, by round."""
        pairs = zip(self.steps(name), self.steps(NONE.name), strict=True)
        return [step - none for step, none in pairs]

    def against(self, name: str, other: str) -> Ratio:
        """How many times as long a step of ``name`` takes as one of ``other``."""
        return paired_ratio(self.steps(name), self.steps(other))

    def gap_closed(self, name: str) -> float | None:
        """The share of what DDP over gloo takes more than the baseline that ``name`` does not take."""
        gap = statistics.median(self.exposed(DDP.name))
        if gap <= 0:
            return None
        pairs = zip(self.steps(DDP.name), self.steps(name), strict=True)
        return statistics.median([ddp - step for ddp, step in pairs]) / gap

    def busy_s(self, name: str) -> float | None:
        """None where nothing is recorded: torch tells nothing of DDP that could be set beside it."""
        found = statistics.median(self.slowest(name, "busy_s"))
        return found or None

    def agreement_s(self, name: str) -> list[float]:
        """Seconds per step in which ranks exchanged headers and checked them, by round.

        Of each bucket the least over the ranks: the rank that came last has waited for nobody.
        """
        rounds = zip(*(rank[name]["agree_s"] for rank in self.by_rank), strict=True)
        return [sum(map(min, zip(*ranks, strict=True))) for ranks in rounds]

    def checks(self, name: str) -> tuple[float, float, float]:
        """Milliseconds of the headers, of the optimizer's hooks, and the share of both in a step."""
        agreement = statistics.median(self.agreement_s(name))
        hooks = statistics.median(self.slowest(name, "guard_s"))
        return agreement * MS, hooks * MS, (agreement + hooks) / statistics.median(self.steps(name))

    def received_bytes(self, name: str, rank: int = 0) -> float:
        """Bytes per step that came in through the link of ``rank``."""
        return statistics.median(self.by_rank[rank][name]["received_bytes"])

    def row(self, one: Contestant) -> dict[str, Any]:
        """All figures of one contestant; times in ms."""
        steps, exposed = self.steps(one.name), self.exposed(one.name)
        figures = quantiles(steps)
        waited = statistics.median(exposed)
        ratio = self.against(one.name, DDP.name)
        busy = self.busy_s(one.name)
        compared = one not in (NONE, ALONE)
        return {
            "strategy": one.label,
            "over": one.backend,
            "step(ms)": figures.median * MS,
            "q25(ms)": quantile(steps, 0.25) * MS,
            "q75(ms)": quantile(steps, 0.75) * MS,
            "min(ms)": figures.min * MS,
            "p99(ms)": figures.p99 * MS,
            "busy(%)": None if busy is None else 100 * busy / figures.median,
            "exposed(ms)": waited * MS if compared else None,
            "exposed(%)": 100 * waited / figures.median if compared else None,
            "efficiency(%)": self._efficiency(one.name),
            "x DDP": ratio.median,
            "x DDP q25": ratio.low,
            "x DDP q75": ratio.high,
            "gap closed(%)": self._gap(one) if compared else None,
        }

    def _gap(self, one: Contestant) -> float | None:
        closed = self.gap_closed(one.name)
        return None if closed is None else 100 * closed

    def _efficiency(self, name: str) -> float | None:
        return 100 * self.against(ALONE.name, name).median if ALONE.name in self.names else None
