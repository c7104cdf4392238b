"""``instep bench steps --link``: strategies where they differ, on hosts with 1 Gbit/s between them.

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
from instep.bench.hosts import RATE, RATE_TEXT, bytes_per_s
from instep.bench.options import StepsOptions, split_words
from instep.bench.steps import NOT_STEPS, StepResults, require_room
from instep.bench.steps_rank import measure_steps
from instep.bench.tables import markdown, show, write
from instep.bench.variants import (
    BUCKET_MB,
    DDP,
    LATENCY,
    LINK_VARIANTS,
    NONE,
    NUM_LATENCIES,
    WIRE,
    Variant,
    choose,
    new_model,
)
from instep.bench.workloads import Workload
from instep.bench.worlds import over_link
from instep.replicate.strategies import STRATEGIES
from instep.timeline.predict import LinkModel

DDP_FIRST_MB = 1.0  # torch's first bucket, where no size was chosen


@dataclass(frozen=True)
class LinkResults:
    """One network, measured."""

    workload: Workload
    num_hosts: int
    rows: list[dict[str, Any]]
    notes: list[str]
    link: LinkModel
    samples: dict[str, list[float]]

    def as_json(self) -> dict[str, Any]:
        return {
            "setting": asdict(self.workload),
            "hosts": self.num_hosts,
            "rate": RATE,
            "link": asdict(self.link),
            "rows": self.rows,
            "notes": self.notes,
            "ms": self.samples,
        }


def run(options: StepsOptions) -> None:
    """Measure over links, print the table, write the files."""
    chosen = options.workload("link")
    found = measure(chosen, options.ranks, split_words(options.strategies), options.samples)
    print()
    show(found.rows, title(found), notes=found.notes)
    write(options, found.as_json(), found.rows, lambda path: chart(found, path))


def measure(chosen: Workload, num_hosts: int, strategies: Sequence[str], samples: int) -> LinkResults:
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
    results = StepResults(over_link(measure_steps, task, hosts=num_hosts))
    link = LinkModel(
        compute_s=statistics.median(results.steps(NONE.name)),
        wire_s=statistics.median(results.steps(WIRE.name)),
        latency_s=statistics.median(results.steps(LATENCY.name)) / NUM_LATENCIES,
        bytes_per_s=bytes_per_s(RATE),
        num_ranks=num_hosts,
    )
    rows = [_row(one, chosen, results, link) for one in variants if one.name not in NOT_STEPS]
    ms = {name: [step * 1e3 for step in results.steps(name)] for name in results.names}
    return LinkResults(chosen, num_hosts, rows, _notes(chosen, results, link), link, ms)


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
    return f"{found.num_hosts} hosts, {RATE_TEXT} between them; {found.workload.text}"


def report(found: Mapping[str, Any]) -> str:
    """Table and notes, as ``as_json`` gives them, in Markdown."""
    notes = "\n".join(f"- {note}" for note in found["notes"])
    return f"{markdown(found['rows'])}\n\n{notes}"


def chart(found: LinkResults, path: Path) -> list[Path]:
    """Bars of step time with their quartiles, and the bound of computation and link as a line."""
    bound = max(found.link.compute_s, found.link.wire_s) * 1e3
    longer = "computation" if found.link.compute_s > found.link.wire_s else "link"
    return bars(
        found.rows, path,
        title=f"A training step on {found.num_hosts} hosts with {RATE_TEXT} between them",
        subtitle=f"{found.workload.text}; median and quartiles of {len(found.samples[NONE.name])} steps",
        label="strategy", value="step(ms)", low="q25(ms)", high="q75(ms)", unit="ms",
        reference=bound, reference_text=f"the {longer} alone",
    )  # fmt: skip


def _row(one: Variant, chosen: Workload, results: StepResults, link: LinkModel) -> dict[str, Any]:
    figures = results.row(one)
    names = ("strategy", "step(ms)", "q25(ms)", "q75(ms)")
    row = {name: figures[name] for name in names}
    predicted = link.compute_s if one == NONE else link.predict(one.strategy, bucket_bytes(one, chosen))
    return {
        **row,
        "theory(ms)": predicted * 1e3,
        "x max(compute, wire)": figures["step(ms)"] / 1e3 / max(link.compute_s, link.wire_s),
        "exposed(ms)": figures["exposed(ms)"],
        "x DDP": figures["x DDP"],
        "into rank 0(MB)": results.received_bytes(one.name) / 1e6,
    }


def _notes(chosen: Workload, results: StepResults, link: LinkModel) -> list[str]:
    forward_s = statistics.median(results.slowest(NONE.name, "forward_s"))
    around_s, megabytes = link.around_s(chosen.gradient_bytes), chosen.gradient_bytes / 1e6
    least_s = forward_s + max(link.compute_s - forward_s, link.wire_s)
    return [
        f"compute: {link.compute_s * 1e3:.0f} ms, of which forward {forward_s * 1e3:.0f} ms",
        f"wire: {megabytes:.1f} MB of gradients in one all-reduce {link.wire_s * 1e3:.0f} ms, "
        f"{100 * around_s / link.wire_s:.0f} % of the line rate's {around_s * 1e3:.0f} ms; "
        f"4 bytes {link.latency_s * 1e6:.0f} µs",
        f"nothing can hide under forward, so no step is shorter than forward + max(backward, wire) = "
        f"{least_s * 1e3:.0f} ms",
    ]
