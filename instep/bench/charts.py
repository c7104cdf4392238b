"""Charts of measurements, for a README and for a talk; each is written as SVG and as PNG.

    against_size     lines of time and bandwidth, a panel per number of ranks
    bars             a row per thing, with its spread
    sweep            a curve, its best point and the predicted one
    scaling          lines over the number of ranks, beside the ideal

Rows are those of ``tables``. This file, ``timeline.style`` and ``timeline.step_chart`` are the only ones that
import matplotlib, which takes half a second: modules that ranks import must not import it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from instep.bench.tables import Row, cell, duration_text, size_text
from instep.timeline import style
from instep.timeline.style import GRID, INK, MUTED

PANEL = (4.2, 3.1)  # inches
BAR = 0.46
NARROWEST = 9.5
MOST_BANDS = 4  # more of them, one over the other, tell nothing
DASHES = (0, (4, 3))


def against_size(
    rows: Sequence[Row],
    path: str | Path,
    *,
    title: str,
    subtitle: str = "",
    series: str = "backend",
    panel: str = "ranks",
    size: str = "size(B)",
    time: str = "time(us)",
    bandwidth: str = "busbw(GB/s)",
) -> list[Path]:
    """A row of panels per measure, a column per number of ranks, and in each panel a line per backend.

    ``series``, ``panel``, ``size`` (bytes), ``time`` (microseconds) and ``bandwidth`` name columns of the
    rows. The columns ``min(us)`` and ``p99(us)``, where there are such, are the band around a line of time.
    """
    kinds = {
        "time": (time, "time", duration_text),
        "bandwidth": (bandwidth, "bus bandwidth, GB/s", _plain),
    }
    worlds = sorted({row[panel] for row in rows})
    colour = style.colours([row[series] for row in rows])
    with style.styled():
        right = 0.5 + 0.105 * max(map(len, colour))
        width = max(0.9 + PANEL[0] * len(worlds) + right, NARROWEST)
        figure = Figure(figsize=(width, 1.25 + PANEL[1] * len(kinds)))
        grid = figure.subplots(len(kinds), len(worlds), squeeze=False, sharex=True, sharey="row")
        style.head(figure, title, subtitle)
        style.place(figure, left=0.85, right=right, top=1.35, bottom=0.65)
        figure.subplots_adjust(hspace=0.28, wspace=0.1)
        for across, measure in zip(grid, kinds, strict=True):
            column, words, text = kinds[measure]
            ends: dict[str, float] = {}
            for axes, world in zip(across, worlds, strict=True):
                style.log_axis(axes, "x", size_text)
                style.log_axis(axes, "y", text)
                mine = [row for row in rows if row[panel] == world]
                band = ("min(us)", "p99(us)") if column == "time(us)" else None
                ends = ends | _lines(axes, mine, series, size, column, colour, band)
            style.caption(across[0], words)
            style.label_ends(across[-1], ends, colour)
        for axes, world in zip(grid[0], worlds, strict=True):
            axes.set_title(f"{world} {panel}", fontsize=12, color=INK, pad=9)
        for axes in grid[-1]:
            axes.set_xlabel("message size")
        return style.save(figure, path)


def _lines(
    axes: Axes,
    rows: Sequence[Row],
    series: str,
    size: str,
    column: str,
    colour: dict[str, str],
    band: tuple[str, str] | None = None,
) -> dict[str, float]:
    """Draw a line per value of ``series``, with a ``band`` around it; return the height of each one's end."""
    ends = {}
    few = len(colour) <= MOST_BANDS
    for name in dict.fromkeys(row[series] for row in rows):
        mine = sorted((row for row in rows if row[series] == name), key=lambda row: row[size])
        sizes, found = [row[size] for row in mine], [row[column] for row in mine]
        axes.plot(sizes, found, color=colour[name], marker="o", markeredgecolor="white", markeredgewidth=1)
        if band and few and all(set(band) <= set(row) for row in mine):
            low, high = ([row[edge] for row in mine] for edge in band)
            axes.fill_between(sizes, low, high, color=colour[name], alpha=0.14, linewidth=0)
        ends[name] = found[-1]
    return ends


def bars(
    rows: Sequence[Row],
    path: str | Path,
    *,
    title: str,
    subtitle: str = "",
    label: str = "name",
    value: str = "median",
    low: str = "low",
    high: str = "high",
    unit: str = "",
    group: str | None = None,
    reference: float | None = None,
    reference_text: str = "",
) -> list[Path]:
    """Horizontal bars from zero, the first row at the top, each with its spread and its number.

    ``label``, ``value``, ``low``, ``high`` name columns; rows may lack the last two. Every value of the
    column ``group`` has a panel of its own. ``reference`` is a line across, such as the 1 of a ratio.
    """
    groups = list(dict.fromkeys(row[group] for row in rows)) if group else [None]
    parts = [[row for row in rows if group is None or row[group] == name] for name in groups]
    colour = style.colours([str(row[label]) for row in rows])
    with style.styled():
        counts = [len(part) for part in parts]
        height = 1.1 + BAR * len(rows) + 0.55 * len(parts) + (0.2 if reference_text else 0)
        figure = Figure(figsize=(NARROWEST, height))
        grid = figure.subplots(
            len(parts), 1, squeeze=False, sharex=True, gridspec_kw={"height_ratios": counts}
        )[:, 0]
        style.head(figure, title, subtitle)
        longest = max(len(str(row[label])) for row in rows)
        bottom = 0.55 if reference_text else 0.35
        style.place(figure, left=0.5 + 0.095 * longest, right=0.4, top=1.35 if group else 1.0, bottom=bottom)
        figure.subplots_adjust(hspace=0.55 / BAR / (len(rows) / len(parts)))
        for axes, name, part in zip(grid, groups, parts, strict=True):
            _bars(axes, part, (label, value, low, high), unit, colour)
            axes.set_title("" if name is None else str(name), loc="left", fontsize=12, color=INK, pad=6)
            if reference is not None:
                axes.axvline(reference, color=INK, linewidth=1, linestyle=DASHES, zorder=4)
        grid[0].set_xlim(0, max(row.get(high) or row[value] for row in rows) * 1.16)
        if reference is not None and reference_text:
            _below(grid[-1], reference, reference_text)
        return style.save(figure, path)


def _bars(
    axes: Axes, rows: Sequence[Row], columns: tuple[str, str, str, str], unit: str, colour: dict[str, str]
) -> None:
    label, value, low, high = columns
    for place, row in enumerate(rows):
        median, top = row[value], row.get(high) or row[value]
        axes.barh(place, median, height=0.62, color=colour[str(row[label])], zorder=2)
        if row.get(low) is not None:
            for shade, width in (("white", 3.4), (INK, 1.4)):  # a rim, to be seen on any colour
                axes.plot([row[low], top], [place, place], color=shade, linewidth=width, zorder=3)
        axes.annotate(
            f"{cell(float(median))} {unit}".strip(),
            (top, place),
            (7, 0),
            textcoords="offset points",
            va="center_baseline",
        )
    axes.set_yticks(range(len(rows)), [str(row[label]) for row in rows], color=INK)
    axes.set_ylim(len(rows) - 0.45, -0.55)
    axes.grid(visible=False, axis="y")
    axes.tick_params(axis="x", labelbottom=False)
    axes.spines["bottom"].set_visible(False)


def _below(axes: Axes, x: float, text: str) -> None:
    axes.annotate(
        text, (x, 0), (0, -6), xycoords=("data", "axes fraction"), textcoords="offset points", ha="center",
        va="top", fontsize=10,
    )  # fmt: skip


def sweep(
    rows: Sequence[Row],
    path: str | Path,
    *,
    title: str,
    subtitle: str = "",
    x: str,
    y: str,
    low: str | None = None,
    high: str | None = None,
    name: str = "bucketed",
    predicted: str | None = None,
    predicted_best: float | None = None,
    x_label: str = "",
    y_label: str = "",
    x_unit: str = "",
    y_unit: str = "",
) -> list[Path]:
    """Measured ``y`` over ``x``, on a logarithmic axis, with its least marked, beside what a model predicts.

    ``x``, ``y``, ``low``, ``high`` and ``predicted`` (the model's ``y``) name columns; ``predicted_best`` is
    the ``x`` that the model would choose.
    """
    rows = sorted(rows, key=lambda row: row[x])
    sizes, found = [row[x] for row in rows], [row[y] for row in rows]
    colour = style.colours([name])[name]
    with style.styled():
        figure = Figure(figsize=(NARROWEST, 5.4))
        axes = figure.subplots()
        style.head(figure, title, subtitle)
        style.place(figure, left=0.85, right=1.35, top=1.3, bottom=0.7)
        axes.set_xscale("log")
        axes.plot(sizes, found, color=colour, marker="o", markersize=8, markeredgecolor="white", zorder=3)
        ends, end_colours = {"measured": found[-1]}, {"measured": colour}
        if low and high:
            band = [row[low] for row in rows], [row[high] for row in rows]
            axes.fill_between(sizes, *band, color=colour, alpha=0.14, linewidth=0)
        if predicted:
            model = [row[predicted] for row in rows]
            axes.plot(sizes, model, color=MUTED, linestyle=DASHES, linewidth=1.8, zorder=2)
            ends["model"], end_colours["model"] = model[-1], MUTED
        axes.set_xticks(sizes, [f"{size:g}" for size in sizes])
        axes.xaxis.set_minor_locator(NullLocator())
        axes.margins(x=0.07)
        _make_room(axes)
        axes.set_xlabel(x_label or x)
        style.caption(axes, y_label or y)
        if predicted_best is not None:
            axes.axvline(predicted_best, color=MUTED, linewidth=1.4, linestyle=DASHES, zorder=1)
            text = f"model's choice: {predicted_best:.3g} {x_unit}"
            _say(axes, text, (predicted_best, axes.get_ylim()[1]), -12, color=MUTED)
        best = found.index(min(found))
        text = f"best measured: {sizes[best]:g} {x_unit}, {cell(float(found[best]))} {y_unit}"
        _mark_best(axes, (sizes[best], found[best]), text, colour)
        style.label_ends(axes, ends, end_colours)
        return style.save(figure, path)


def scaling(
    rows: Sequence[Row],
    path: str | Path,
    *,
    title: str,
    subtitle: str = "",
    series: str = "strategy",
    panel: str = "work",
    panels: Mapping[str, str] | None = None,
    x: str = "ranks",
    y: str = "tokens/s",
    low: str = "low",
    high: str = "high",
    cores: int | None = None,
) -> list[Path]:
    """Measured ``y`` over the number of ranks, a line per value of ``series``, beside one in proportion.

    Every value of ``panel`` has axes of its own, under the words that ``panels`` has for it. The ideal begins
    at the first point of each. Where there are more ranks than ``cores`` the ground is grey.
    """
    names = list(dict.fromkeys(row[panel] for row in rows))
    colour = style.colours([row[series] for row in rows]) | {"ideal": MUTED}
    with style.styled():
        right = 0.5 + 0.105 * max(map(len, colour))
        width = max(0.95 + PANEL[0] * len(names) + right, NARROWEST)
        figure = Figure(figsize=(width, 5.2))
        across = figure.subplots(1, len(names), squeeze=False, sharex=True, sharey=True)[0]
        style.head(figure, title, subtitle)
        style.place(figure, left=0.95, right=right, top=1.55, bottom=0.7)
        figure.subplots_adjust(wspace=0.1)
        for axes, name in zip(across, names, strict=True):
            mine = [row for row in rows if row[panel] == name]
            ends = _lines(axes, mine, series, x, y, colour, band=(low, high))
            ends["ideal"] = _ideal(axes, [(row[x], row[y]) for row in mine])
            axes.set_title((panels or {}).get(name, str(name)), loc="left", fontsize=12, color=INK, pad=20)
            axes.set_xlabel(x)
            style.caption(axes, y)
        counts = sorted({row[x] for row in rows})
        edge = 0.08 * (counts[-1] - counts[0])
        across[0].set_xticks(counts)
        across[0].set_xlim(counts[0] - edge, counts[-1] + edge)
        across[0].set_ylim(bottom=0)
        if cores is not None and cores < counts[-1]:
            for axes in across:
                _crowd(axes, cores, counts[-1] + edge)
        style.label_ends(across[-1], ends, colour)
        return style.save(figure, path)


def _ideal(axes: Axes, points: Sequence[tuple[float, float]]) -> float:
    """A dashed line in proportion to the first of ``points``, to the last of them; return where it ends."""
    (first, start), last = min(points), max(points)[0]
    ends = [start, start * last / first]
    axes.plot([first, last], ends, color=MUTED, linestyle=DASHES, linewidth=1.8, zorder=2)
    return ends[1]


def _crowd(axes: Axes, cores: int, right: float) -> None:
    """Grey ground from where ranks outnumber ``cores``."""
    axes.axvspan(cores, right, color=GRID, alpha=0.6, linewidth=0, zorder=0)
    axes.annotate(
        f"more ranks than cores ({cores})", (cores, 0), (6, 8), xycoords=("data", "axes fraction"),
        textcoords="offset points", color=MUTED, fontsize=10,
    )  # fmt: skip


def _make_room(axes: Axes) -> None:
    """For words above and below the curve; from zero, where the curve covers more than half of the height."""
    bottom, top = axes.get_ylim()
    room = 0.15 * (top - bottom)
    axes.set_ylim(0 if bottom < top / 2 else bottom - room, top + room)


def _mark_best(axes: Axes, at: tuple[float, float], text: str, colour: str) -> None:
    """A ring around the point, and words at the foot of a line from it."""
    ring: Any = {"markersize": 15, "markerfacecolor": "none", "markeredgecolor": colour, "markeredgewidth": 2}
    axes.plot(*at, marker="o", **ring)
    foot = axes.get_ylim()[0]
    axes.vlines(at[0], foot, at[1], color=colour, linewidth=1.4, linestyle=DASHES, zorder=2)
    axes.set_ylim(bottom=foot)
    _say(axes, text, (at[0], foot), 12, color=colour, fontweight="bold")


def _say(axes: Axes, text: str, at: tuple[float, float], rise: float, **look: Any) -> None:
    """Words beside a vertical line at a point, ``rise`` points above it, on the side where there is room."""
    across = axes.transAxes.inverted().transform(axes.transData.transform(at))[0]
    ha, aside = ("left", 6) if across < 0.55 else ("right", -6)
    box = {"facecolor": "white", "edgecolor": "none", "pad": 1.5, "alpha": 0.85}
    axes.annotate(
        text, at, (aside, rise), textcoords="offset points", ha=ha, va="center", bbox=box, zorder=5, **look
    )


def _plain(value: float) -> str:
    return f"{value:g}"
