"""Charts of measurements, for a README and for a talk; each is written as SVG and as PNG.

    lines    measures over a size or a number, a panel per measure and value of a column
    bars     a row per thing, with its spread

Rows are those of ``tables``. This file, ``timeline.style`` and ``timeline.step_chart`` are the only ones that
import matplotlib, which takes half a second: modules that ranks import must not import it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from instep.bench.tables import Row, cell
from instep.timeline import style
from instep.timeline.palette import INK, MUTED, colours

PANEL = (4.2, 3.1)  # inches
BAR = 0.46
NARROWEST = 9.5
MOST_BANDS = 4  # more of them, one over the other, tell nothing
DASHES = (0, (4, 3))
MODELS = ("ideal", "model")  # series that are not measured


@dataclass(frozen=True)
class Measure:
    """What a row of panels shows: ``column``, in ``words``, from ``low`` to ``high`` where rows have these.

    The axis is logarithmic with ``text`` at its ticks, or begins at zero.
    """

    column: str
    words: str
    text: Callable[[float], str] | None = None
    low: str = ""
    high: str = ""


def lines(
    rows: Sequence[Row],
    path: str | Path,
    *,
    measures: Sequence[Measure],
    series: str,
    x: str,
    title: str,
    subtitle: str = "",
    x_label: str = "",
    x_text: Callable[[float], str] | None = None,
    panel: str | None = None,
    panels: Mapping[Any, str] | None = None,
) -> list[Path]:
    """A row of panels per measure, in each a line over ``x`` per value of ``series``; those of ``MODELS`` are
    dashed.

    Every value of the column ``panel`` has a column of panels, under the words that ``panels`` has for it.
    With ``x_text``, the words of a tick, x is logarithmic.
    """
    names = list(dict.fromkeys(row[panel] for row in rows)) if panel else [""]
    colour = colours([row[series] for row in rows]) | dict.fromkeys(MODELS, MUTED)
    with style.styled():
        right = 0.5 + 0.105 * max(len(row[series]) for row in rows)
        width = max(0.95 + PANEL[0] * len(names) + right, NARROWEST)
        top = style.head_inches(title, subtitle, width) + 0.75
        figure = Figure(figsize=(width, top + 0.65 + PANEL[1] * len(measures)))
        grid = figure.subplots(len(measures), len(names), squeeze=False, sharex=True, sharey="row")
        style.head(figure, title, subtitle)
        style.place(figure, left=0.95, right=right, top=top, bottom=0.65)
        figure.subplots_adjust(hspace=0.28, wspace=0.1)
        for across, measure in zip(grid, measures, strict=True):
            ends: dict[str, float] = {}
            for axes, name in zip(across, names, strict=True):
                mine = [row for row in rows if panel is None or row[panel] == name]
                ends |= _lines(axes, mine, series, x, measure, colour)
                if measure.text is not None:
                    style.log_axis(axes, "y", measure.text)
                if x_text is not None:
                    style.log_axis(axes, "x", x_text)
                else:
                    axes.set_xticks(sorted({row[x] for row in rows}))
            if measure.text is None:
                across[0].set_ylim(bottom=0)
            style.caption(across[0], measure.words)
            style.label_ends(across[-1], ends, colour)
        for axes, name in zip(grid[0], names, strict=True):
            axes.set_title((panels or {}).get(name, name), loc="left", fontsize=12, color=INK, pad=20)
        for axes in grid[-1]:
            axes.set_xlabel(x_label or x)
        return style.save(figure, path)


def _lines(
    axes: Axes, rows: Sequence[Row], series: str, x: str, measure: Measure, colour: Mapping[str, str]
) -> dict[str, float]:
    """Draw a line per value of ``series``, with its band; return the height of each one's end."""
    ends = {}
    names = list(dict.fromkeys(row[series] for row in rows))
    for name in names:
        mine = sorted((row for row in rows if row[series] == name), key=lambda row: row[x])
        xs, found = [row[x] for row in mine], [row[measure.column] for row in mine]
        if name in MODELS:
            axes.plot(xs, found, color=MUTED, linestyle=DASHES, linewidth=1.8, zorder=2)
        else:
            look: Any = {"marker": "o", "markeredgecolor": "white", "markeredgewidth": 1}
            axes.plot(xs, found, color=colour[name], **look)
            if len(names) <= MOST_BANDS and all({measure.low, measure.high} <= set(row) for row in mine):
                low, high = ([row[edge] for row in mine] for edge in (measure.low, measure.high))
                axes.fill_between(xs, low, high, color=colour[name], alpha=0.14, linewidth=0)
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
    colour = colours([str(row[label]) for row in rows])
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
