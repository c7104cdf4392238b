"""What the matrix leaves: results.json, the tables here and in docs/reliability.md, and the chart."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.faults import campaign, chart, kills
from benchmarks.faults.judge import PARTS
from benchmarks.faults.matrix import Row, matrix
from benchmarks.pages import README, Pages, Results, made, save
from instep.bench.tables import cell, environment, machine, markdown

HERE = Path(__file__).parent
RESULTS = HERE / "results.json"
COMMAND = "make faults"
CAMPAIGNS = ("campaign", "pipelines")
OTHERS = ("kills", "copy", *CAMPAIGNS)


def not_green(results: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What is not as expected: the name of the row or measurement, and what is wrong."""
    found = [
        (f"{row['group']}: {row['name']}", wrong)
        for row in results.get("rows", ())
        for made in row["made"]
        for wrong in made["wrong"]
    ]
    others = [(name, wrong) for name in OTHERS for wrong in results.get(name, {}).get("wrong", ())]
    return [*found, *others]


def write(results: Results) -> None:
    """Into this folder and docs/reliability.md, what there is anew; what is not there stays."""
    before = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    whole = save(RESULTS, {**before, "environment": environment(COMMAND), **results}, pages, HERE, COMMAND)
    if "rows" in whole:
        chart.recoveries(bars(matrix(), by_name(whole)), HERE / "chart.svg", subtitle=f"medians; {machine()}")


def by_name(results: Results) -> dict[tuple[str, str], Any]:
    return {(row["group"], row["name"]): row for row in results["rows"]}


def pages(results: Results) -> Pages:
    """Tables of what there is in ``results``."""
    texts, docs = {}, {}
    if "rows" in results:
        found = by_name(results)
        texts["faults table"] = f"{table(matrix(), found)}\n\n{made(results)}"
        texts["faults rows"] = legend(matrix())
        text = f"{headline(matrix(), found)}\n\n{verdict(results)} {made(results)}"
        docs["docs/reliability.md"] = {"reliability table": text}
    if "kills" in results:
        texts["kills table"] = kills_text(results["kills"])
    if "copy" in results:
        texts["copy table"] = copy_text(results["copy"])
    texts |= {f"{name} table": campaign_text(results[name]) for name in CAMPAIGNS if name in results}
    return {README: texts, **docs}


def verdict(results: Mapping[str, Any]) -> str:
    """How many rows are as expected, and which are not."""
    rows = [row for row in results["rows"] if row["made"]]
    green = [row for row in rows if not any(made["wrong"] for made in row["made"])]
    times = max((len(row["made"]) for row in rows), default=0)
    skipped = [row["name"] for row in results["rows"] if row["skipped"]]
    text = f"{len(green)} of {len(rows)} faults end as expected, each {times} times."
    return f"{text} Not made here: {', '.join(skipped)}." if skipped else text


Found = Mapping[tuple[str, str], Mapping[str, Any]]


def table(rows: Sequence[Row], found: Found) -> str:
    """Everything that was asked, a row per fault."""
    lines = []
    for row, entry in _both(rows, found):
        made = entry["made"]
        parts = {f"{part}(s)": _spread(made, part) for part in PARTS}
        lines.append(
            {
                "group": row.group,
                "fault": row.name,
                "noticed by": row.expect.noticed,
                **parts,
                "first new step(s)": _spread(made, "total"),
                "redone": _most(one["redone"] for one in made),
                "exit": _different(" → ".join(map(str, one["codes"])) for one in made),
                "named": _different(", ".join(map(str, one["named"])) for one in made),
                "same bits": _different(_same(one["same"]) for one in made),
                "left": _different(", ".join(_kind(name) for name in one["left"]) for one in made)
                or "nothing",
                "as expected": entry["skipped"] or _as_expected(made),
            }
        )
    return markdown(lines)


def headline(rows: Sequence[Row], found: Found) -> str:
    """What docs/reliability.md has of it."""
    lines = []
    for row, entry in _both([row for row in rows if row.headline], found):
        made = entry["made"]
        lines.append(
            {
                "fault": f"{row.name}: {row.what}",
                "noticed by": row.expect.noticed,
                "first new step after (s)": _spread(made, "total"),
                "steps redone": _most(one["redone"] for one in made),
                "exit": _different(" → ".join(map(str, one["codes"])) for one in made),
                "same bits": _different(_same(one["same"]) for one in made),
                "as expected": entry["skipped"] or _as_expected(made),
            }
        )
    return markdown(lines)


def legend(rows: Sequence[Row]) -> str:
    """What each row does."""
    return markdown([{"group": row.group, "fault": row.name, "what happens": row.what} for row in rows])


def bars(rows: Sequence[Row], found: Found) -> list[dict[str, Any]]:
    """The median of each part, of the rows with one recovery from one fault whose moment is known."""
    drawn = []
    for row, entry in _both(rows, found):
        seconds = [one["seconds"][0] for one in entry["made"] if len(one["seconds"]) == 1]
        seconds = [one for one in seconds if all(part in one for part in PARTS)]
        if seconds:
            medians = {part: statistics.median(one[part] for one in seconds) for part in PARTS}
            drawn.append({"name": f"{row.group}: {row.name}", **medians})
    return drawn


def kills_text(found: Mapping[str, Any]) -> str:
    """Thirty kills in words and as a table."""
    if not found["recoveries"]:
        return f"No recovery was made. {_wrong(found)}"
    during = sum(one["kills_during"] for one in found["recoveries"])
    twice = f" {during} of the kills came while the ranks were recovering from another." if during else ""
    return (
        f"{markdown(kills.summary(found))}\n\n"
        f"{found['kills']} kills, {len(found['recoveries'])} recoveries in {found['steps']} steps on "
        f"{found['ranks']} ranks; at most {found['redone']} steps redone per recovery; "
        f"{_same(found['same'])} bits as the undisturbed run on one rank.{twice} {_wrong(found)}"
    ).strip()


def copy_text(found: Mapping[str, Any]) -> str:
    """What the snapshot costs, in words."""
    text = (
        f"A copy takes {cell(found['copy_ms'])} ms, a step {cell(found['step_ms'])} ms; copied every "
        f"{found['interval']:g} steps, {found['share']:.2%} of the time"
    )
    if "paired" in found:
        ratio = found["paired"]
        text += (
            f". Blocks of {found['block']} steps with copies take {ratio['median'] - 1:+.1%} beside those "
            f"without (quartiles {ratio['low'] - 1:+.1%} to {ratio['high'] - 1:+.1%}, {found['pairs']} pairs)"
        )
    return f"{text}. Default recipe, {found['ranks']} ranks, {found['steps']} steps."


def campaign_text(found: Mapping[str, Any]) -> str:
    """A row per layout, and the sum."""
    rows = [
        {
            "layout": entry["layout"],
            "faults": entry["faults"],
            "noticed": ", ".join(f"{times} by {how}" for how, times in entry["failures"].items()),
            "recoveries": entry["recoveries"],
            "redone": entry["redone"],
            "exit": " → ".join(map(str, entry["codes"])),
            "same bits": _same(entry["same"]),
            "as expected": "yes" if not entry["wrong"] else "**no**",
        }
        for entry in found["layouts"]
    ]
    return f"{markdown(rows)}\n\n{campaign.summary(found)} {_wrong(found)}".strip()


def _both(rows: Sequence[Row], found: Found) -> list[tuple[Row, Mapping[str, Any]]]:
    nothing: dict[str, Any] = {"skipped": "not made", "made": []}
    return [(row, found.get((row.group, row.name), nothing)) for row in rows]


def _spread(made: Sequence[Mapping[str, Any]], part: str) -> str:
    """Median and maximum over all that were made; of several recoveries in one, each counts."""
    values = [float(one[part]) for single in made for one in single["seconds"] if part in one]
    if not values:
        return ""
    middle, most = cell(statistics.median(values), 3), cell(max(values), 3)
    return middle if len(values) == 1 else f"{middle} ({most})"


def _as_expected(made: Sequence[Mapping[str, Any]]) -> str:
    wrong = [one for one in made if one["wrong"]]
    return (
        "yes"
        if not wrong
        else f"**no**, {len(wrong)} of {len(made)}: {wrong[0]['wrong'][0]}".replace("|", "/")
    )


def _same(same: bool | None) -> str:
    return {True: "same", False: "other", None: ""}[same]


def _kind(name: str) -> str:
    """Of what was left only what it is: names are random."""
    return name.split()[0]


def _different(texts: Any) -> str:
    return "; ".join(dict.fromkeys(text for text in texts if text))


def _most(counts: Any) -> int | None:
    return max(counts, default=None)


def _wrong(found: Mapping[str, Any]) -> str:
    return f"**Not as expected**: {'; '.join(found['wrong'])}" if found["wrong"] else ""
