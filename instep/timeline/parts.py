"""The parts of one rank's step: which of its time was compute, which was waiting, and for what."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from instep.events import Event
from instep.timeline.bubbles import find
from instep.timeline.intervals import Stretch, common, length, minus, union
from instep.timeline.window import Window

PARTS = (
    "compute",
    "exposed communication",
    "waiting for a slower rank",
    "waiting for data",
    "update",
    "host",
    "unattributed",
)


@dataclass(frozen=True)
class Parts:
    """One rank's step, in seconds; the parts are disjoint and sum to ``wall``."""

    rank: int
    step: int
    start_ns: int
    end_ns: int
    compute: float
    exposed: dict[str, float]  # by cause: waited while messages travelled
    waiting: dict[int, float]  # by peer: waited because that rank was not ready
    data: float
    update: float
    host: dict[str, float]  # by name
    unattributed: float
    hidden: float  # communication that ran while this rank did something else: an "of which", not a part
    leaves: int  # micro-batches; 0: unknown
    gathers: float = 0.0  # weights were gathered, hidden or exposed
    gathers_hidden: float = 0.0

    @property
    def wall(self) -> float:
        return (self.end_ns - self.start_ns) / 1e9

    @property
    def exposed_s(self) -> float:
        return sum(self.exposed.values())

    @property
    def waiting_s(self) -> float:
        return sum(self.waiting.values())

    @property
    def host_s(self) -> float:
        return sum(self.host.values())

    def totals(self) -> dict[str, float]:
        """Seconds by the names ``PARTS``."""
        figures = (
            self.compute,
            self.exposed_s,
            self.waiting_s,
            self.data,
            self.update,
            self.host_s,
            self.unattributed,
        )
        return dict(zip(PARTS, figures, strict=True))


def parts(events: Sequence[Event]) -> Parts | None:
    """The parts of one rank's step, from its events; None if the step has not ended.

    Where events overlap, bubbles come first (``instep.timeline.bubbles``), then compute, update and data,
    then host code, of which the innermost span counts.
    """
    window = Window.of(events)
    if window is None:
        return None
    waited = find(window)
    exposed: dict[str, int] = {}
    waiting: dict[int, int] = {}
    for start, end, cause, peer in waited:
        if peer < 0:
            exposed[cause] = exposed.get(cause, 0) + end - start
        else:
            waiting[peer] = waiting.get(peer, 0) + end - start
    known = idle = union([(start, end) for start, end, _, _ in waited])
    own = []
    for kind in (window.compute, window.update, window.data):
        found = minus(union(kind), known)
        own.append(length(found))
        known = union(known + found)
    host = _host(window, known)
    known = union(known + [(start, end) for start, end, _ in window.host])

    def hidden_of(messages: list[Stretch]) -> float:
        whole = union(messages)
        return _seconds(length(common(whole, known)) - length(common(whole, idle)))

    compute, update, data = (_seconds(figure) for figure in own)
    return Parts(
        rank=window.rank,
        step=window.step,
        start_ns=window.start_ns,
        end_ns=window.end_ns,
        compute=compute,
        exposed={cause: _seconds(figure) for cause, figure in exposed.items()},
        waiting={peer: _seconds(figure) for peer, figure in waiting.items()},
        data=data,
        update=update,
        host={name: _seconds(figure) for name, figure in host.items()},
        unattributed=_seconds(window.end_ns - window.start_ns - length(known)),
        hidden=hidden_of(window.travel),
        leaves=window.leaves,
        gathers=_seconds(length(union(window.gathers))),
        gathers_hidden=hidden_of(window.gathers),
    )


def _host(window: Window, known: list[Stretch]) -> dict[str, int]:
    """Nanoseconds of host code by name, without what is ``known`` to be something else."""
    stretches: dict[str, list[Stretch]] = {}
    for start, end, name in _innermost(window.host):
        stretches.setdefault(name, []).append((start, end))
    figures = {name: length(minus(found, known)) for name, found in stretches.items()}
    return {name: figure for name, figure in figures.items() if figure}


def _innermost(spans: list[tuple[int, int, str]]) -> list[tuple[int, int, str]]:
    """The same spans without those parts in which another, that began later, is going on."""
    found = []
    going: list[tuple[int, str]] = []  # end and name, the innermost last
    at = min((start for start, _, _ in spans), default=0)
    for start, end, name in [*sorted(spans, key=_outermost_first), _LAST]:
        while going and going[-1][0] <= start:
            stop, inner = going.pop()
            if at < stop:
                found.append((at, stop, inner))
                at = stop
        if going and at < start:
            found.append((at, start, going[-1][1]))
        at = max(at, start)
        going.append((end, name))
    return found


_LAST = (1 << 63, 1 << 63, "")


def _outermost_first(span: tuple[int, int, str]) -> tuple[int, int, str]:
    return span[0], -span[1], span[2]


def _seconds(figure_ns: int) -> float:
    return figure_ns / 1e9
