"""``instep bench steps``: the same training step by every strategy, in turns, in one run of processes."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from instep.bench.charts import bars
from instep.bench.options import StepsOptions, split_words
from instep.bench.steps_rank import measure_memory, measure_steps, memory_columns
from instep.bench.tables import (
    Ratio,
    Row,
    cell,
    markdown,
    paired_ratio,
    quantile,
    quantiles,
    short,
    show,
    spread,
    with_quartiles,
    write,
)
from instep.bench.variants import (
    ALONE,
    DDP,
    DECLARED_VARIANTS,
    HOST_VARIANTS,
    NONE,
    SHARDED_VARIANTS,
    Variant,
    choose,
    over,
)
from instep.bench.workloads import Workload
from instep.bench.worlds import BEGAN, WHOLE, on_ranks, require_memory, slowest_rank
from instep.record.display import follow

MS = 1e3
MEMORY_SHARE = 0.4  # of the time, where the memory of each strategy is measured
GAP, LEAST_GAP = "gap closed", 0.03  # of DDP's step: a share of less is noise
WEIGHTS_AND_GRADIENTS = 2  # what all variants share, and what the one that steps has for a while
# What the table on stdout leaves to the files.
HIDDEN = (
    *("setting", "x none"),
    *("parameters(MB)", "gradients(MB)", "optimizer(MB)", "buffers(MB)", "scratch(MB)"),
    *("gathered(MB)", "activations(MB)"),
)
PANELS = {
    "": "nothing sent",
    "gloo": "over gloo (sockets)",
    "shm": "over shared memory",
    "nccl": "over NCCL, on GPUs",
}


@dataclass(frozen=True)
class HostResults:
    """One workload, measured."""

    workload: Workload
    rows: list[dict[str, Any]]
    notes: list[str]
    samples: dict[str, list[float]]  # milliseconds per step, by variant

    @property
    def declared(self) -> list[dict[str, Any]]:
        """A row per declared step: how many times as long it takes as the same in the plain loop."""
        return declared_rows(self.samples)

    def as_json(self) -> dict[str, Any]:
        return {"setting": asdict(self.workload), "rows": self.rows, "notes": self.notes, "ms": self.samples}


def run(options: StepsOptions) -> None:
    """Measure, print the tables, write the files."""
    found = []
    for number, name in enumerate(options.settings):
        part = number / len(options.settings), (number + 1) / len(options.settings)
        found.append(measure(options.workload(name), options, part))
        table(found[-1])

    def charts(path: Path) -> None:
        for one in found:
            suffix = f"-{one.workload.name}" if len(found) > 1 else ""
            chart(one, path.with_stem(path.stem + suffix), options.ranks)

    payload = {"ranks": options.ranks, "settings": [one.as_json() for one in found]}
    write(options, payload, [row for one in found for row in one.rows], charts)


def measure(chosen: Workload, options: StepsOptions, part: tuple[float, float] = WHOLE) -> HostResults:
    """All variants of one host on one workload."""
    more = (*SHARDED_VARIANTS, *DECLARED_VARIANTS)
    variants = choose(HOST_VARIANTS, split_words(options.strategies), more)
    if options.backend is not None:
        variants = over(options.backend, variants)
    require_room(chosen, variants, options.ranks, options.backend)
    task = {
        "workload": asdict(chosen),
        "variants": [asdict(one) for one in variants],
        "samples": options.samples,
    }
    backend = options.backend or "gloo"
    turns = part[0], part[1] - MEMORY_SHARE * (part[1] - part[0]) * options.memory
    results = StepResults(on_ranks(measure_steps, task, ranks=options.ranks, backend=backend, part=turns))
    there = [one for one in variants if one.name in results.names]
    counted = [one for one in there if options.memory and not chosen.mlp and one != ALONE]
    in_turn = follow(counted, "memory of strategy", part=(turns[1], part[1]), began=BEGAN)
    peaks = {one.name: _peak(one, chosen, options) for one in in_turn}
    rows = [{"setting": chosen.name, **results.row(one), **peaks.get(one.name, {})} for one in there]
    samples = {name: [step * 1e3 for step in results.steps(name)] for name in results.names}
    said = [memory(peaks[NONE.name])] if NONE.name in peaks else []
    return HostResults(chosen, rows, [*notes(results), *said], samples)


@dataclass(frozen=True)
class StepResults:
    """From the ranks' times to figures: how long each variant waits for communication, which gap it closes.

    ``by_rank[r][variant][what][round]`` has what the ranks measured. The time of a step is that of its
    slowest rank. What is compared is compared within rounds: the difference or the ratio of two variants in
    the same round, then the median over rounds.

        exposed       step - step of as many processes without any synchronisation
        busy          how long the communication lane was at work, on the rank where that was longest
        efficiency    (one step's time of rank 0 while the others wait) / step: the throughput of W ranks over
                      W times the throughput of one that has the machine to itself
        gap closed    (DDP - step) / (DDP - none): 0 is torch's DDP (over gloo, or NCCL where all are), 1 is
                      no synchronisation at all
    """

    by_rank: Sequence[Mapping[str, Mapping[str, Sequence[Any]]]]

    @property
    def names(self) -> list[str]:
        return list(self.by_rank[0])

    @property
    def ddp(self) -> str:
        """The name of the DDP that the others are held against."""
        return DDP.name if DDP.name in self.names else f"{DDP.strategy}-nccl"

    def steps(self, name: str) -> list[float]:
        """Seconds per step of the slowest rank, by round."""
        return self.slowest(name, "step_s")

    def slowest(self, name: str, what: str) -> list[float]:
        return slowest_rank([rank[name][what] for rank in self.by_rank])

    def exposed(self, name: str) -> list[float]:
        """Seconds per step more than without synchronisation, by round."""
        pairs = zip(self.steps(name), self.steps(NONE.name), strict=True)
        return [step - none for step, none in pairs]

    def against(self, name: str, other: str) -> Ratio:
        """How many times as long a step of ``name`` takes as one of ``other``."""
        return paired_ratio(self.steps(name), self.steps(other))

    def gap_closed(self, name: str) -> Ratio | None:
        """The share of what DDP takes more than the baseline, in the median, that ``name`` does not take."""
        gap = statistics.median(self.exposed(self.ddp))
        if gap <= LEAST_GAP * statistics.median(self.steps(self.ddp)):
            return None
        pairs = zip(self.steps(self.ddp), self.steps(name), strict=True)
        closed = [(ddp - step) / gap for ddp, step in pairs]
        return Ratio(statistics.median(closed), quantile(closed, 0.25), quantile(closed, 0.75))

    def busy_s(self, name: str) -> float | None:
        """None where nothing is recorded: torch tells nothing of DDP that could be set beside it."""
        found = statistics.median(self.slowest(name, "busy_s"))
        return found or None

    def agreement_s(self, name: str) -> list[float]:
        """Seconds per step in which ranks exchanged headers and checked them, by round.

        Of each bucket the least over the ranks: the rank that came last has waited for no other.
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

    def row(self, one: Variant) -> dict[str, Any]:
        """All figures of one variant; times in ms."""
        steps, exposed = self.steps(one.name), self.exposed(one.name)
        figures = quantiles(steps)
        waited = statistics.median(exposed)
        ratio, none = self.against(one.name, self.ddp), self.against(one.name, NONE.name)
        closed = None if one in (NONE, ALONE) else self.gap_closed(one.name)
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
            "exposed q25(ms)": quantile(exposed, 0.25) * MS if compared else None,
            "exposed q75(ms)": quantile(exposed, 0.75) * MS if compared else None,
            "exposed(%)": 100 * waited / figures.median if compared else None,
            "efficiency(%)": self._efficiency(one.name),
            **spread("x none", none),
            **spread("x DDP", ratio),
            **spread("gap closed", closed, "(%)", 100),
        }

    def _efficiency(self, name: str) -> float | None:
        return 100 * self.against(ALONE.name, name).median if ALONE.name in self.names else None


def declared_rows(steps: Mapping[str, Sequence[float]]) -> list[dict[str, Any]]:
    """A row per declared step, by the times of ``steps``: how many times as long as one of the plain loop."""
    rows = []
    for one in DECLARED_VARIANTS:
        plain = replace(one, declared=False)
        if one.name in steps and plain.name in steps:
            ratio = paired_ratio(steps[one.name], steps[plain.name])
            rows.append({"strategy": one.strategy, "over": one.backend, **spread("x undeclared", ratio)})
    return rows


def notes(results: StepResults) -> list[str]:
    """The figures that are no column."""
    lines = [
        f"{row['strategy']} over {row['over']}, declared: {with_quartiles(row, 'x undeclared', digits=3)} "
        "times a step that is not"
        for row in declared_rows({name: results.steps(name) for name in results.names})
    ]
    for backend in filter(None, PANELS):
        loose, ordered = f"unordered-{backend}", f"bucketed-{backend}"
        if loose in results.names and ordered in results.names:
            cost = results.against(ordered, loose)
            lines.append(
                f"the fixed order of sums over {backend}: {cost.median:.3f} times a step with ordered=False "
                f"(quartiles {cost.low:.3f} to {cost.high:.3f})"
            )
        if ordered in results.names:
            headers, hooks, share = results.checks(ordered)
            lines.append(
                f"checks that ranks agree, bucketed over {backend}: headers {headers:.2f} ms, optimizer "
                f"hooks {hooks:.2f} ms, together at most {100 * share:.2f} % of a step"
            )
    gap, ddp = results.gap_closed(NONE.name), results.ddp.replace("-", " over ")
    lines.append(
        f"torch's {ddp} is within {LEAST_GAP:.0%} of no synchronisation here: too little to compare"
        if gap is None
        else f"{GAP}: 0 % is torch's {ddp}, 100 % is no synchronisation"
    )
    return lines


def memory(figures: Row) -> str:
    """What a rank needs without any synchronisation: one that shards nothing needs as much, and more."""
    return (
        f"memory of a rank: {cell(figures['state(MB)'])} MB of state without exchange, "
        f"{cell(figures['formula(MB)'])} MB by the formula, and {cell(figures['activations(MB)'])} MB of "
        "activations; formula: of state, by stage and ranks; host: all ranks, shared pages once"
    )


def table(found: HostResults) -> None:
    """The rows on stdout, without shares of a gap that may be next to nothing."""
    print()
    rows = short(found.rows, (*HIDDEN, "exposed(%)", "gap closed(%)"))
    said = [note for note in found.notes if not note.startswith(GAP)]
    show(rows, f"{found.workload.what}: {found.workload.text}", notes=said)


def report(found: Mapping[str, Any]) -> str:
    """Table and notes of a workload, as ``as_json`` gives it, in Markdown."""
    lines = "\n".join(f"- {note}" for note in found["notes"])
    return f"{markdown(short(found['rows'], HIDDEN))}\n\n{lines}"


def chart(found: HostResults, path: Path, ranks: int) -> list[Path]:
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
        title=f"A training step on {ranks} ranks of one host: {found.workload.what}",
        subtitle=f"{found.workload.text}; median and quartiles of {len(found.samples[NONE.name])} steps",
        label="strategy", value="step(ms)", low="q25(ms)", high="q75(ms)", unit="ms", group="panel",
        reference=none["step(ms)"], reference_text="no synchronisation",
    )  # fmt: skip


def _peak(one: Variant, chosen: Workload, options: StepsOptions) -> dict[str, float | None]:
    task = {"workload": asdict(chosen), "variant": asdict(one)}
    by_rank = on_ranks(measure_memory, task, ranks=options.ranks, backend=options.backend or "gloo")
    return memory_columns([found for found in by_rank if found is not None], chosen, one)


def require_room(
    chosen: Workload, variants: Sequence[Variant], ranks: int, backend: str | None = None
) -> None:
    """Raise ``ValueError`` if what the variants hold will not fit side by side."""
    kept = sum(one.copies(ranks) + chosen.num_moments for one in variants)
    require_memory(
        chosen.rank_bytes(WEIGHTS_AND_GRADIENTS + kept),
        ranks=ranks,
        backend=backend or "gloo",
        fix="pass fewer --strategies, or a smaller --preset, --params or --batch",
    )
