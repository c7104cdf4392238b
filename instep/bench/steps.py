"""``instep bench steps``: the same training step by every strategy, in turns, in one run of processes."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from instep.bench import link
from instep.bench.answers import Answers
from instep.bench.bound import available_bytes
from instep.bench.charts import bars
from instep.bench.contestants import ALONE, DDP, HOST, NONE, SHARDED, Contestant, choose
from instep.bench.options import Steps
from instep.bench.peak import columns, peak
from instep.bench.ranks import on_ranks
from instep.bench.rounds import perform
from instep.bench.settings import Setting, setting
from instep.bench.tables import Row, cell, markdown, show, write
from instep.bench.words import parse_count, words

# What the table on stdout leaves to the files.
FILES_ONLY = (
    *("setting", "q25(ms)", "q75(ms)", "x DDP q25", "x DDP q75"),
    *("parameters(MB)", "gradients(MB)", "optimizer(MB)", "buffers(MB)", "scratch(MB)"),
    *("gathered(MB)", "activations(MB)"),
)
PANELS = {"": "nothing sent", "gloo": "over gloo (sockets)", "shm": "over shared memory"}


@dataclass(frozen=True)
class Found:
    """One setting, measured."""

    setting: Setting
    rows: list[dict[str, Any]]
    notes: list[str]
    samples: dict[str, list[float]]  # milliseconds per step, by contestant

    def as_json(self) -> dict[str, Any]:
        return {"setting": asdict(self.setting), "rows": self.rows, "notes": self.notes, "ms": self.samples}


def run(options: Steps) -> int:
    """Measure, print the tables, write the files; 0, or an exception."""
    if options.link:
        return link.run(options)
    names = ("communication", "compute") if options.setting == "both" else (options.setting,)
    found = []
    for name in names:
        found.append(measure(_setting(name, options), options))
        table(found[-1])

    def charts(path: Path) -> None:
        for one in found:
            suffix = f"-{one.setting.name}" if len(found) > 1 else ""
            chart(one, path.with_stem(path.stem + suffix), options.ranks)

    payload = {"ranks": options.ranks, "settings": [one.as_json() for one in found]}
    write(options, payload, [row for one in found for row in one.rows], charts)
    return 0


def measure(chosen: Setting, options: Steps) -> Found:
    """All contestants of one host in one setting."""
    contestants = choose(HOST, words(options.strategies), SHARDED)
    _require_memory(chosen, contestants, options.ranks)
    print(f"{chosen.what}: {chosen.text}; {options.ranks} ranks", file=sys.stderr, flush=True)
    told = {
        "setting": asdict(chosen),
        "contestants": [asdict(one) for one in contestants],
        "samples": options.samples,
    }
    answers = Answers(on_ranks(perform, told, ranks=options.ranks))
    there = [one for one in contestants if one.name in answers.names]
    peaks = {one.name: _peak(one, chosen, options) for one in there if one != ALONE} if options.memory else {}
    rows = [
        {
            "setting": chosen.name,
            **answers.row(one),
            **peaks.get(one.name, {}),
        }
        for one in there
    ]
    samples = {name: [step * 1e3 for step in answers.steps(name)] for name in answers.names}
    said = [memory(peaks[NONE.name])] if NONE.name in peaks else []
    return Found(chosen, rows, [*notes(answers), *said], samples)


def notes(answers: Answers) -> list[str]:
    """The answers that are no column."""
    lines = []
    for backend in ("gloo", "shm"):
        loose, ordered = f"unordered-{backend}", f"bucketed-{backend}"
        if loose in answers.names and ordered in answers.names:
            cost = answers.against(ordered, loose)
            low, middle, high = (100 * (ratio - 1) for ratio in (cost.low, cost.median, cost.high))
            lines.append(
                f"the fixed order of sums over {backend}: {middle:+.1f} % of a step against ordered=False "
                f"(quartiles {low:+.1f} to {high:+.1f} %)"
            )
        if ordered in answers.names:
            headers, hooks, share = answers.checks(ordered)
            lines.append(
                f"never-silent checks, bucketed over {backend}: headers {headers:.2f} ms, optimizer hooks "
                f"{hooks:.2f} ms, together at most {100 * share:.2f} % of a step; headers are hidden where "
                "backward still runs"
            )
    gap = answers.gap_closed(NONE.name)
    lines.append(
        "torch's DDP over gloo is no slower than no synchronisation here: there is no gap to close"
        if gap is None
        else "gap closed: 0 % is torch's DDP over gloo, 100 % is no synchronisation"
    )
    return lines


def memory(figures: Row) -> str:
    """What a rank needs without any synchronisation: who shards nothing needs as much, and more."""
    return (
        f"memory of a rank: {cell(figures['state(MB)'])} MB of state where nothing is sent, "
        f"{cell(figures['formula(MB)'])} MB by the formula, and {cell(figures['activations(MB)'])} MB of "
        "activations; formula: of state, by stage and ranks; host: all ranks, shared pages once"
    )


def table(found: Found) -> None:
    """The rows on stdout."""
    print()
    show([short(row) for row in found.rows], f"{found.setting.what}: {found.setting.text}", notes=found.notes)


def short(row: Row) -> dict[str, Any]:
    """A row for people: the quartiles of the ratio beside it, the rest of the spread in the files."""
    ratio = f"{row['x DDP']:.2f} ({row['x DDP q25']:.2f} to {row['x DDP q75']:.2f})"
    return {
        name: ratio if name == "x DDP" else value for name, value in row.items() if name not in FILES_ONLY
    }


def report(found: Mapping[str, Any]) -> str:
    """Table and notes of a setting, as ``as_json`` gives it, in Markdown."""
    lines = "\n".join(f"- {note}" for note in found["notes"])
    return f"{markdown([short(row) for row in found['rows']])}\n\n{lines}"


def chart(found: Found, path: Path, ranks: int) -> list[Path]:
    """Bars of step time with their quartiles, a panel per backend."""
    parts = [
        {**row, "panel": PANELS[row["over"]]}
        for panel in PANELS
        for row in found.rows
        if row["over"] == panel and row["strategy"] != ALONE.strategy
    ]
    none = next(row for row in found.rows if row["strategy"] == NONE.strategy)
    return bars(
        parts, path,
        title=f"A training step on {ranks} ranks of one host: {found.setting.what}",
        subtitle=f"{found.setting.text}; median and quartiles of {len(found.samples[DDP.name])} steps",
        label="strategy", value="step(ms)", low="q25(ms)", high="q75(ms)", unit="ms", group="panel",
        reference=none["step(ms)"], reference_text="no synchronisation",
    )  # fmt: skip


def _setting(name: str, options: Steps) -> Setting:
    return setting(name, parse_count(options.params) if options.params else None, options.optimizer)


def _peak(one: Contestant, chosen: Setting, options: Steps) -> dict[str, float | None]:
    told = {"setting": asdict(chosen), "contestant": asdict(one)}
    return columns(
        [found for found in on_ranks(peak, told, ranks=options.ranks) if found is not None], chosen, one
    )


def _require_memory(chosen: Setting, contestants: Sequence[Contestant], ranks: int) -> None:
    """Raise ``ValueError`` if what the contestants hold will not fit side by side."""
    held = {"none": 0, "alone": 0, "flat": 2, "server": 1 + ranks, "threads": ranks}
    stepped = [one for one in contestants if one.strategy not in ("wire", "latency")]
    copies = 3 + sum(held.get(one.strategy, 1) for one in contestants)  # weights, gradients, activations
    copies += chosen.num_moments * len(stepped) + sum(one.kind.stage > 0 for one in contestants)
    needed = ranks * copies * chosen.gradient_bytes
    available = available_bytes()
    if needed > available:
        raise ValueError(
            f"{len(contestants)} contestants on {ranks} ranks need about {needed / 1e9:.1f} GB of memory for "
            f"what they hold, and {available / 1e9:.1f} GB are available: pass fewer --strategies, or "
            "smaller --params"
        )
