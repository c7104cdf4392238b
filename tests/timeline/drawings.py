"""Timelines that are drawn: a line per lane, a letter per kind of event, 1 ms per character.

compute       |ffffbbbbb.........uu.|
host          |.........SSSSSSSSS...|     events in each other: more lines of the same lane
communication |.......222XXXXXXXX...|     a digit: "wait" for that rank
expected      |cccccccccxxxxxxxxxuu.|     the parts, which are counted: ``expected``
hidden        |..........#..........|     communication under something else
"""

from __future__ import annotations

from collections import Counter
from itertools import groupby

from instep.events import STEP, Event

MS = 1_000_000
LEGEND = {
    "f": "forward",
    "b": "backward",
    "u": "update",
    "c": "clip",
    "d": "data",
    "r": "replicas",
    "S": "gradient sync",
    "P": "parameter update",
    "G": "parameter gather",
    "L": "loss over the global batch",
    "N": "batch-norm statistics",
    "l": "ledger",
    "h": "hash",
    "e": "evaluate",
    "q": "queued",
    "A": "agree",
    "X": "exchange",
    ">": "send",
    "<": "receive",
    "+": "aggregate",
}


def draw(
    drawing: str, *, rank: int = 0, step: int = 0, begin_ms: int = 100, peer: int = -1, early_ms: int = 0
) -> list[Event]:
    """The events of a drawing; its first line is as wide as the step's window.

    "communication 3" is that lane with events of bucket 3. ``peer`` is whom "parameter update" waits for.
    Lines begin ``early_ms`` before the window, and the first is that much wider; a line may be longer.
    """
    lines = [line.strip() for line in drawing.strip().splitlines()]
    end_ms = begin_ms + len(lines[0].split("|")[1]) - early_ms
    events = []
    for line in lines:
        lane, columns = line.split("|")[:2]
        lane, _, bucket = lane.strip().partition(" ")
        at = begin_ms - early_ms
        for letter, run in groupby(columns if lane not in ("expected", "hidden") else ""):
            start, at = at, at + len(list(run))
            if letter == ".":
                continue
            name = "wait" if letter.isdigit() else LEGEND[letter]
            events.append(
                Event(
                    rank,
                    f"{lane} {bucket}" if lane == "replica" else lane,
                    name,
                    start * MS,
                    at * MS,
                    bytes=1000 if name == "exchange" else 0,
                    step=step,
                    bucket=int(bucket or 0) if lane == "communication" else -1,
                    peer=int(letter) if letter.isdigit() else peer if name == "parameter update" else -1,
                )
            )
    return [*events, Event(rank, "host", STEP, begin_ms * MS, end_ms * MS, step=step)]


def expected(drawing: str, line: str = "expected") -> Counter[str]:
    """How many columns of the drawing's ``line`` have which letter."""
    found = next(text for text in drawing.strip().splitlines() if text.strip().startswith(line))
    return Counter(found.split("|")[1])
