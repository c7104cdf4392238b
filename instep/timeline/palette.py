"""The palette: the one colour of each name, in every chart and on the page of the report.

Colours are those of M. Okabe and K. Ito, "Color universal design", 2008, which people with any common colour
vision tell apart.
"""

from __future__ import annotations

from collections.abc import Sequence

VIOLET, BROWN, GREY, OLIVE = "#5b3a9b", "#8c6d31", "#8a8f98", "#6b8e23"
INK, MUTED, GRID = "#1a1a1a", "#5f6368", "#e6e8eb"
SLATE, ORANGE, SKY, GREEN = "#4a4f57", "#e69f00", "#56b4e9", "#009e73"
BLUE, VERMILION, PURPLE, YELLOW = "#0072b2", "#d55e00", "#cc79a7", "#b8a200"
COLOURS = {
    # ways to do a collective
    "gloo": VERMILION,
    "shm": SKY,
    "shm-in-place": BLUE,
    "nccl": VIOLET,
    "naive": PURPLE,
    "ring": GREEN,
    "direct": ORANGE,
    "recursive_doubling": SLATE,
    "halving_doubling": BROWN,
    "reduce_broadcast": GREY,
    "tree": GREY,
    "scatter_allgather": OLIVE,
    # strategies, of which naive is above
    "flat": ORANGE,
    "overlap": GREEN,
    "bucketed": BLUE,
    "DDP": SLATE,
    "torch DDP": SLATE,
    "none": OLIVE,
    "threads": BROWN,
    "server": VIOLET,
    "bucketed unordered": SKY,
    "bucketed 4 MB": SKY,
    "DDP 4 MB": GREY,
    # what a rank does in a step
    "data": OLIVE,
    "forward": SKY,
    "backward": BLUE,
    "input gradient": "#123f73",
    "weight gradient": YELLOW,
    "other compute": VIOLET,
    "update": GREEN,
    "host code": "#c6cad0",
    "ready, queued": GREY,
    "ready, waits for another rank": "#ecd3e1",
    "headers": BROWN,
    "exchange": ORANGE,
    "message between stages": "#f3c56b",
    "waits for messages": VERMILION,
    "waits for a slower rank": PURPLE,
    "waits for another stage": GREY,
    # the parts of a step, of which update is above
    "compute": BLUE,
    "exposed communication": VERMILION,
    "waiting for a slower rank": PURPLE,
    "pipeline bubble": GREY,
    "waiting for data": OLIVE,
    "host": "#c6cad0",
    "unattributed": "#e6e8eb",
}
SPARE = (YELLOW, BROWN, GREY, VIOLET, OLIVE)


def colours(names: Sequence[str]) -> dict[str, str]:
    """The colour of each name; those that no chart knows take the spare ones in turn."""
    strangers = [name for name in dict.fromkeys(names) if name not in COLOURS]
    spare = {name: SPARE[i % len(SPARE)] for i, name in enumerate(strangers)}
    return {name: COLOURS.get(name) or spare[name] for name in names}
