"""Drawings for the notebooks: collectives round by round, the sum tree, the memory of sharding stages."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb

from instep.comm.algorithms import SCHEDULES
from instep.comm.play import cells_of, play
from instep.comm.schedule import Schedule
from instep.reduce.tree import Node, rank_major, split

LIGHT, DARK, NEW = "#dcebf7", "#0072b2", "#d55e00"
GREY, WORDS = "#8a8f98", "#5f6368"
RANKS = "#56b4e9", "#e69f00", "#8fd0b0", "#cc79a7"
WHOLE = 2  # the width of a tensor that is not cut
APART = 0.7  # between two ranks
INCHES = 0.46  # of a part's width
ROW = 1.6


def plain(axes: Axes, **words: object) -> None:
    """The look of a chart: no frame, and a legend without a box."""
    axes.set(**words)
    axes.spines[["top", "right"]].set_visible(False)
    if axes.get_legend_handles_labels()[1]:
        axes.legend(frameon=False)


def before_and_after(operations: Mapping[str, str], size: int = 4) -> None:
    """Each collective of ``operations``, done by the algorithm beside it: a row per rank."""
    played = {name: play(name, SCHEDULES[name][algorithm], size) for name, algorithm in operations.items()}
    widths = {name: max(WHOLE, one.num_parts) for name, one in played.items()}
    spans = [2 * width + 1.9 for width in widths.values()]
    figure, panels = plt.subplots(
        1, len(played), figsize=(sum(spans) * INCHES, 0.6 * size + 0.4), width_ratios=spans, squeeze=False
    )
    figure.subplots_adjust(0, 0, 1, 0.86, wspace=0.05)
    for axes, (name, one) in zip(panels[0], played.items(), strict=True):
        *_, (_, last) = one.rounds()
        most, width = max(len(letters) for cells in last for letters in cells), widths[name]
        for rank, cells in enumerate(last):
            after = [letters if len(letters) == most else "" for letters in cells]
            axes.text(-0.2, -rank + 0.4, f"{rank}", ha="right", va="center", color=WORDS)
            _boxes(axes, (0, -rank), one.start[rank], most)
            _boxes(axes, (width + 0.9, -rank), after, most)
        ends = {"xy": (width + 0.8, 0.9 - size / 2), "xytext": (width + 0.1, 0.9 - size / 2)}
        axes.annotate("", arrowprops={"arrowstyle": "->"}, **ends)
        axes.set(xlim=(-0.7, 2 * width + 1.2), ylim=(0.8 - size, 1), title=name.replace("_", "-"))
        axes.axis("off")
    plt.show()


def rounds(collective: str, algorithm: str | Schedule, size: int) -> None:
    """Every message of an algorithm, a name or a schedule of your own: time runs downwards."""
    schedule = SCHEDULES[collective][algorithm] if isinstance(algorithm, str) else algorithm
    played = play(collective, schedule, size)
    parts, all_rounds = played.num_parts, list(played.rounds())
    width = max(WHOLE, parts)
    most = max(len(letters) for _, held in all_rounds for cells in held for letters in cells)
    across, down = size * (width + APART), 1 + len(all_rounds)
    _, axes = plt.subplots(figsize=(INCHES * across + 0.9, 0.62 * down + 0.4))
    for row, (messages, held) in enumerate([([], played.start), *all_rounds]):
        y = -ROW * row
        label = f"round {row}" if row else "start"
        axes.text(-0.4, y + 0.4, label, ha="right", va="center", color=WORDS)
        new = {(one.receiver, part) for one in messages for part in range(parts)[cells_of(one.piece, parts)]}
        for rank, cells in enumerate(held):
            arrived = {part for receiver, part in new if receiver == rank}
            _boxes(axes, (rank * (width + APART), y), cells, most, arrived)
        for one in messages:
            sent, received = cells_of(one.sent, parts), cells_of(one.piece, parts)
            (tail, head) = (
                rank * (width + APART) + (piece.start + piece.stop) / 2 * width / parts
                for rank, piece in ((one.sender, sent), (one.receiver, received))
            )
            look = {"arrowstyle": "-|>", "color": NEW, "shrinkA": 0, "shrinkB": 0}
            axes.annotate("", (head, y + 0.8), (tail, y + ROW), arrowprops=look)
    for rank in range(size):
        axes.text(rank * (width + APART) + width / 2, 1.2, f"rank {rank}", ha="center", color=WORDS)
    name = algorithm if isinstance(algorithm, str) else schedule.__name__
    axes.set_title(f"{collective}, {name}: {len(all_rounds)} rounds".replace("_", "-"), loc="left")
    axes.set(xlim=(-2.4, across), ylim=(1.4 - ROW * down, 1.8))
    axes.axis("off")
    plt.show()


def _boxes(
    axes: Axes, at: tuple[float, float], cells: Sequence[str], most: int, new: Collection[int] = ()
) -> None:
    """A rank's tensor: the more addends a part has, the darker; one that has just arrived has a frame."""
    (x, y), width = at, max(WHOLE, len(cells)) / len(cells)
    for part, letters in enumerate(cells):
        share = 1 if most == 1 else (len(letters) - 1) / (most - 1)
        blue = tuple(a + (b - a) * share for a, b in zip(to_rgb(LIGHT), to_rgb(DARK), strict=True))
        fill = blue if letters else (1.0, 1.0, 1.0)
        left, middle = x + part * width, x + (part + 0.5) * width
        axes.add_patch(plt.Rectangle((left, y), width, 0.8, facecolor=fill, edgecolor=GREY, lw=0.6))
        if part in new:
            inner = (left + 0.04, y + 0.04), width - 0.08, 0.72
            axes.add_patch(plt.Rectangle(*inner, facecolor="none", edgecolor=NEW, lw=1.8))
        ink = "white" if sum(fill) < 1.6 else "black"
        size = min(8.5, 44 * width / max(len(letters), 1))  # points, so that the letters fit
        axes.text(middle, y + 0.4, letters, ha="center", va="center", fontsize=size, color=ink)


def sum_trees(num_micro_batches: int, world_sizes: Sequence[int]) -> None:
    """Who computes which micro-batch, and which partial sums a rank can add without another rank."""
    figure, panels = plt.subplots(
        1, len(world_sizes), figsize=(3.6 * len(world_sizes), 2.7), squeeze=False, sharey=True
    )
    figure.subplots_adjust(0, 0.02, 1, 0.88, wspace=0.04)
    for axes, size in zip(panels[0], world_sizes, strict=True):
        owner = {i: rank for rank, own in enumerate(rank_major(num_micro_batches, size)) for i in own}
        _node(axes, (0, num_micro_batches), owner)
        height = (num_micro_batches - 1).bit_length()
        axes.set(xlim=(-0.6, num_micro_batches - 0.4), ylim=(-1.2, height + 0.5))
        axes.set_title(f"{size} rank{'s' * (size > 1)}")
        axes.axis("off")
    plt.show()


def _node(axes: Axes, node: Node, owner: Mapping[int, int]) -> tuple[float, float]:
    """Draw ``node`` and all below it; returns where it is."""
    lo, hi = node
    ranks = {owner[i] for i in range(lo, hi)}
    fill = RANKS[ranks.pop()] if len(ranks) == 1 else "white"
    if hi - lo == 1:
        x, y, text = float(lo), 0.0, f"{lo}"
        axes.text(x, -0.75, f"rank {owner[lo]}", ha="center", color=WORDS, fontsize=7)
    else:
        middle = split(lo, hi)
        below = [_node(axes, child, owner) for child in ((lo, middle), (middle, hi))]
        x, y, text = sum(x for x, _ in below) / 2, max(y for _, y in below) + 1, "+"
        for place in below:
            axes.plot(*zip((x, y), place, strict=True), color=GREY, lw=1, zorder=1)
    look = {"facecolor": fill, "edgecolor": GREY, "boxstyle": "circle,pad=0.25"}
    axes.text(x, y, text, ha="center", va="center", fontsize=9, bbox=look, zorder=2)
    return x, y
