"""A step by each strategy in one picture: records steps, draws the median ones, writes a table of parts.

python benchmarks/advice/strategies.py                      some minutes; writes into this folder
python benchmarks/advice/strategies.py --again              draws and writes anew what was recorded before
python benchmarks/advice/strategies.py --params 2M --turns 1 --out DIR    a trial

The ranks are on two hosts with 1 Gbit/s between them, which needs Linux, root and iproute2; where there are
no such, they are on this one.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.advice.rank import record
from benchmarks.pages import README, Pages, Results, made, parser_of, prepare, save
from instep.bench.hosts import RATE, network, obstacle, rate_text
from instep.bench.options import parse_count
from instep.bench.tables import markdown
from instep.bench.variants import OURS, Variant
from instep.bench.workloads import Workload, workload
from instep.bench.worlds import on_hosts, on_ranks
from instep.events import Event, Timeline
from instep.timeline import style
from instep.timeline.breakdown import Parts, parts
from instep.timeline.step_chart import panel, side_by_side, step_chart

HERE = Path(__file__).parent
COMMAND = "python benchmarks/advice/strategies.py"
RANKS = 2
# Near the best size for this link: ``benchmarks/link`` has the arithmetic.
BUCKET_MB = 4.0
NOTES = {
    "naive": "a message per parameter, after backward",
    "flat": "all in one message, after backward",
    "overlap": "a message per parameter, as soon as its gradient is there",
    "bucketed": f"a message per {BUCKET_MB:g} MiB, as soon as its gradients are there",
}


def main() -> int:
    wanted = arguments()
    if wanted.again:
        found = json.loads((HERE / "strategies.json").read_text())
        write(found, json.loads((HERE / "events.json").read_text()), wanted.out)
        return 0
    began = time.monotonic()
    chosen = workload("link", parse_count(wanted.params) if wanted.params else None)
    reason = obstacle()
    if reason is not None:
        print(f"on one host, for want of a second one: {reason}", file=sys.stderr)
    task = {
        "workload": asdict(chosen),
        "variants": [asdict(one) for one in variants("gloo" if reason is None else "shm")],
        "turns": wanted.turns,
        "steps": wanted.steps,
    }
    if reason is None:
        with network(RANKS, rate=RATE) as hosts:
            by_rank = on_hosts(record, task, network=hosts)
    else:
        by_rank = on_ranks(record, task, ranks=RANKS)
    timelines = {
        strategy: Timeline(Event(*fields) for rank in by_rank for fields in rank[strategy])
        for strategy in OURS
    }
    found = results(chosen, timelines, reason is None, time.monotonic() - began)
    events = {strategy: of_step(timelines[strategy], step) for strategy, step in found["steps"].items()}
    write(found, events, wanted.out)
    return 0


def arguments() -> argparse.Namespace:
    parser = parser_of(__doc__, HERE)
    parser.add_argument("--turns", type=int, default=3, help="of each strategy")
    parser.add_argument("--steps", type=int, default=5, help="that count, per turn")
    parser.add_argument("--params", default="")
    parser.add_argument("--again", action="store_true")
    return parser.parse_args()


def variants(backend: str) -> list[Variant]:
    """The strategies that are drawn."""
    return [Variant(strategy, backend, BUCKET_MB if strategy == "bucketed" else None) for strategy in OURS]


def results(
    chosen: Workload, timelines: Mapping[str, Timeline], over_link: bool, seconds: float
) -> dict[str, Any]:
    """What is written as JSON, but the events."""
    found: dict[str, Any] = {"setting": asdict(chosen), "over_link": over_link, "minutes": seconds / 60}
    found |= {"rows": [], "ms": {}, "steps": {}}
    for strategy, timeline in timelines.items():
        lengths = {step: panel(timeline, step).ms for step in whole_steps(timeline)}
        median = statistics.median_low(lengths.values())
        step = next(step for step, ms in lengths.items() if ms == median)
        found["rows"].append(row(strategy, timeline, median))
        found["ms"][strategy] = list(lengths.values())
        found["steps"][strategy] = step
    return found


def whole_steps(timeline: Timeline) -> list[int]:
    """The steps that have ended on every rank."""
    return [s for s in timeline.steps if all(timeline.window(rank, s) for rank in timeline.ranks)]


def of_step(timeline: Timeline, step: int) -> list[list[Any]]:
    """The events of ``step`` as fields, with times since it began."""
    begun_ns = panel(timeline, step).start_ns
    events = [event for rank in timeline.ranks for event in timeline.of(rank, step)]
    return [
        list(event._replace(start_ns=event.start_ns - begun_ns, end_ns=event.end_ns - begun_ns))
        for event in events
    ]


def row(strategy: str, timeline: Timeline, median_ms: float) -> dict[str, Any]:
    """Medians over the steps of the mean over the ranks."""
    steps = [
        [part for rank in timeline.ranks if (part := parts(timeline.of(rank, step))) is not None]
        for step in whole_steps(timeline)
    ]

    def median(figure: Callable[[Parts], float]) -> float:
        return 1e3 * statistics.median(statistics.mean(map(figure, ranks)) for ranks in steps)

    return {
        "strategy": strategy,
        "step(ms)": median_ms,
        "compute(ms)": median(lambda part: part.compute),
        "exposed(ms)": median(lambda part: part.exposed_s),
        "waiting(ms)": median(lambda part: part.waiting_s),
        "hidden(ms)": median(lambda part: part.hidden),
        "else(ms)": median(lambda part: part.wall - part.compute - part.exposed_s - part.waiting_s),
    }


def write(found: Mapping[str, Any], events: Mapping[str, Any], folder: Path) -> None:
    """Results, table and pictures into ``folder``, and a README with them."""
    prepare(folder, HERE)
    steps = {
        strategy: (Timeline(Event(*fields) for fields in events[strategy]), step)
        for strategy, step in found["steps"].items()
    }
    draw(steps, folder, what(found), found)
    whole = save(folder / "strategies.json", found, pages, HERE, COMMAND)
    (folder / "events.json").write_text(json.dumps(events, separators=(",", ":")) + "\n")
    print(pages(whole)[README]["parts table"])


def what(found: Results) -> str:
    where = (
        f"two hosts with {rate_text(RATE)} between them" if found["over_link"] else "two ranks on one host"
    )
    return f"{Workload(**found['setting']).text}; {where}"


def pages(results: Results) -> Pages:
    text = f"{what(results)}.\n\n{markdown(results['rows'])}\n\n{made(results)}"
    return {README: {"parts table": text}, "docs/strategies.md": {"strategies table": text}}


def draw(steps: Mapping[str, tuple[Timeline, int]], folder: Path, setting: str, found: Results) -> None:
    """Both pictures: all strategies, and the last one by itself."""
    count = len(found["ms"]["bucketed"])
    side_by_side(
        steps,
        folder / "strategies.svg",
        title="Why one strategy is faster than the other",
        subtitle=f"{setting}; of each strategy the step of median length, out of {count}",
        notes=NOTES,
    )
    timeline, step = steps["bucketed"]
    style.save(step_chart(timeline, step=step), folder / "step.svg")


if __name__ == "__main__":
    sys.exit(main())
