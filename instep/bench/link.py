"""``instep bench steps --link``: strategies where they differ, on hosts with a link between them.

On one host communication takes time from the cores that compute, so overlapping the two gains little. Over a
link the bytes travel by themselves: what a strategy hides under backward is gone from the step. The table has
what arithmetic predicts beside what was measured.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from instep.bench.charts import bars
from instep.bench.exchange_cost import ExchangeCost, medians
from instep.bench.hosts import RATE, bytes_per_s, rate_text
from instep.bench.options import StepsOptions, split_words
from instep.bench.steps import StepResults, require_room
from instep.bench.steps_rank import measure_link
from instep.bench.tables import markdown, show, write
from instep.bench.variants import BUCKET_MB, DDP, LINK_VARIANTS, NONE, Variant, choose, new_model
from instep.bench.workloads import Workload
from instep.bench.worlds import over_link
from instep.replicate.strategies import STRATEGIES

DDP_FIRST_MB = 1.0  # torch's first bucket, where no size was chosen


@dataclass(frozen=True)
class LinkResults:
    """One network, measured."""

    workload: Workload
    num_hosts: int
    rate: str
    rows: list[dict[str, Any]]
    notes: list[str]
    cost: ExchangeCost
    samples: dict[str, list[float]]

    def as_json(self) -> dict[str, Any]:
        return {
            "setting": asdict(self.workload),
            "hosts": self.num_hosts,
            "rate": self.rate,
            "cost": asdict(self.cost),
            "rows": self.rows,
            "notes": self.notes,
            "ms": self.samples,
        }


def run(options: StepsOptions) -> None:
    """Measure over links, print the table, write the files."""
    chosen = options.workload("link")
    words = split_words(options.strategies)
    found = measure(chosen, options.ranks, words, options.samples, options.rate)
    print()
    show(found.rows, title(found), notes=found.notes)
    write(options, found.as_json(), found.rows, lambda path: chart(found, path))


def measure(
    chosen: Workload, num_hosts: int, strategies: Sequence[str], samples: int, rate: str = RATE
) -> LinkResults:
    """The variants of a link, on ``num_hosts`` hosts with one rank each.

    Raises:
        ValueError: one host, an unknown strategy, or too little memory.
        RuntimeError: this machine cannot have several hosts, or a rank failed.
    """
    variants = choose(LINK_VARIANTS, strategies)
    require_room(chosen, variants, num_hosts)
    task = {
        "workload": asdict(chosen),
        "variants": [asdict(one) for one in variants],
        "samples": samples,
    }
    by_rank = over_link(measure_link, task, hosts=num_hosts, rate=rate)
    results = StepResults([rank["steps"] for rank in by_rank])
    exchanges = [rank["exchanges"] for rank in by_rank]
    cost = ExchangeCost.of(exchanges)
    rows = [_row(one, chosen, results, cost) for one in variants]
    ms = {name: [step * 1e3 for step in results.steps(name)] for name in results.names}
    notes = _notes(chosen, results, cost, medians(exchanges, 0), rate)
    return LinkResults(chosen, num_hosts, rate, rows, notes, cost, ms)


def bucket_bytes(one: Variant, chosen: Workload) -> list[int]:
    """The sizes of the messages that ``one`` cuts its gradients into, in the order in which they leave."""
    with torch.device("meta"):
        parameters = list(new_model(chosen.model).parameters())
    caps = [one.bucket_mb] if one.bucket_mb else [BUCKET_MB]
    if one == DDP:
        caps = [DDP_FIRST_MB, BUCKET_MB]
    name = {"DDP": "bucketed", "server": "flat"}.get(one.strategy, one.strategy)
    groups = STRATEGIES[name].group(parameters, list(reversed(range(len(parameters)))), caps)
    return [sum(parameters[i].nbytes for i in group) for group in groups]


def title(found: LinkResults) -> str:
    """What the table is about."""
    return f"{found.num_hosts} hosts, {rate_text(found.rate)} between them; {found.workload.text}"


def report(found: Mapping[str, Any]) -> str:
    """Table and notes, as ``as_json`` gives them, in Markdown."""
    notes = "\n".join(f"- {note}" for note in found["notes"])
    return f"{markdown(found['rows'])}\n\n{notes}"


def chart(found: LinkResults, path: Path) -> list[Path]:
    """Bars of step time with their quartiles, and the bound of computation and link as a line."""
    wire_ms = 1e3 * found.cost.flight.time_s(found.workload.gradient_bytes)
    bounds = {"computation": statistics.median(found.samples[NONE.name]), "link": wire_ms}
    longer = max(bounds, key=bounds.__getitem__)
    return bars(
        found.rows, path,
        title=f"A training step on {found.num_hosts} hosts with {rate_text(found.rate)} between them",
        subtitle=f"{found.workload.text}; median and quartiles of {len(found.samples[NONE.name])} steps",
        label="strategy", value="step(ms)", low="q25(ms)", high="q75(ms)", unit="ms",
        reference=bounds[longer], reference_text=f"the {longer} alone",
    )  # fmt: skip


def _row(one: Variant, chosen: Workload, results: StepResults, cost: ExchangeCost) -> dict[str, Any]:
    figures = results.row(one)
    names = ("strategy", "step(ms)", "q25(ms)", "q75(ms)")
    row = {name: figures[name] for name in names}
    forward_s, backward_s = _compute_s(results)
    predicted = 1e3 * (forward_s + backward_s)
    if one != NONE:
        predicted = 1e3 * cost.step_s(one.strategy, bucket_bytes(one, chosen), forward_s, backward_s)
    longer_s = max(forward_s + backward_s, cost.flight.time_s(chosen.gradient_bytes))
    return {
        **row,
        "theory(ms)": predicted,
        "error(%)": 100 * (predicted / figures["step(ms)"] - 1),
        "x max(compute, wire)": figures["step(ms)"] / 1e3 / longer_s,
        "exposed(ms)": figures["exposed(ms)"],
        "x DDP": figures["x DDP"],
        "into rank 0(MB)": results.received_bytes(one.name) / 1e6,
    }


def _compute_s(results: StepResults) -> tuple[float, float]:
    """Seconds of forward, and of the rest of a step without synchronisation."""
    forward_s = statistics.median(results.slowest(NONE.name, "forward_s"))
    return forward_s, statistics.median(results.steps(NONE.name)) - forward_s


def _notes(
    chosen: Workload, results: StepResults, cost: ExchangeCost, alone_s: Mapping[int, float], rate: str
) -> list[str]:
    forward_s, backward_s = _compute_s(results)
    total, W = chosen.gradient_bytes, cost.num_ranks
    line_s, wire_s = 2 * (W - 1) / W * total / bytes_per_s(rate), cost.flight.time_s(total)
    least_s = forward_s + max(backward_s, wire_s)
    return [
        f"compute: {(forward_s + backward_s) * 1e3:.0f} ms, of which forward {forward_s * 1e3:.0f} ms",
        cost.words(alone_s),
        f"wire: {total / 1e6:.1f} MB of gradients in one exchange {wire_s * 1e3:.0f} ms, by the line rate "
        f"{line_s * 1e3:.0f} ms; no step is shorter than forward + max(backward, wire) = "
        f"{least_s * 1e3:.0f} ms",
    ]
