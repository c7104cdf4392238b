"""Over 1 Gbit/s: torch's DDP and its float16 hook, and tree nodes of 4, 2 and 1 bytes; who sends how much.

python benchmarks/link/formats.py                    some ten minutes; writes formats.json, chart and tables
python benchmarks/link/formats.py --params 1M --samples 3 --sweep 2 --out DIR     a trial

Each contestant comes with the bucket size that suits it best: a sweep in turns finds it, and what is compared
is measured anew, so that a lucky sample of the sweep is none of the comparison. The hosts have the same work,
whether one rank does it or two share it. Needs Linux, root and iproute2.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks.pages import README, Pages, Results, made, parser_of, prepare, save
from instep.bench.charts import bars
from instep.bench.hosts import RATE, rate_text
from instep.bench.options import parse_count
from instep.bench.steps import MS, StepResults, require_room
from instep.bench.steps_rank import measure_steps
from instep.bench.tables import Row, markdown, quantile, show, spread, with_quartiles
from instep.bench.variants import NONE, Variant
from instep.bench.workloads import Workload, workload
from instep.bench.worlds import over_link

HERE = Path(__file__).parent
COMMAND = "python benchmarks/link/formats.py"
HOSTS = 2
PER_HOST = (1, 2)
PANELS = {1: "one rank on each host", 2: "two ranks on each host"}
DDP, HOOK = Variant("DDP", "gloo"), Variant("DDP", "gloo", format="float16")
OURS = Variant("bucketed", "gloo")
CONTESTANTS = (DDP, HOOK, OURS, replace(OURS, format="bfloat16"), replace(OURS, format="int8"))
SIZES_MB = (1.0, 4.0, 10.0, 25.0)
LARGEST = SIZES_MB[-1]  # of DDP as it comes, whose first bucket is smaller then


def main() -> int:
    wanted = arguments()
    began = time.monotonic()
    chosen = workload("link", parse_count(wanted.params) if wanted.params else None)
    contestants = [one for one in CONTESTANTS if not wanted.only or one.label in wanted.only.split(",")]
    found = [measure(chosen, contestants, per_host, wanted) for per_host in wanted.per_host]
    rows = [row for one in found for row in one["rows"]]
    show(shown(rows), text_of(chosen))
    write(chosen, found, rows, wanted.out, (time.monotonic() - began) / 60)
    return 0


def arguments() -> argparse.Namespace:
    parser = parser_of(__doc__, HERE)
    parser.add_argument("--samples", type=int, default=24, help="rounds of what is compared")
    parser.add_argument("--sweep", type=int, default=4, help="rounds of the sweep over bucket sizes")
    parser.add_argument(
        "--per-host", type=int, nargs="+", default=PER_HOST, choices=PER_HOST, help="ranks on each host"
    )
    parser.add_argument("--only", default="", help="contestants, separated by commas; DDP has to be one")
    parser.add_argument("--params", default="")
    return parser.parse_args()


def text_of(chosen: Workload) -> str:
    """The model and a host's batch in words."""
    return f"{chosen.model_text}, {chosen.batch} x {chosen.tokens} tokens per host"


def of_size(one: Variant, size_mb: float) -> Variant:
    """``one`` with buckets of a size; torch's own size is what it has where none is said."""
    return one if one.strategy == "DDP" and size_mb == LARGEST else replace(one, bucket_mb=size_mb)


def steps_of(chosen: Workload, variants: Sequence[Variant], per_host: int, samples: int) -> StepResults:
    """All ``variants`` and no exchange, in turns."""
    require_room(chosen, [NONE, *variants], HOSTS * per_host)
    task = {
        "workload": asdict(chosen),
        "variants": [asdict(one) for one in (NONE, *variants)],
        "samples": samples,
    }
    return StepResults(over_link(measure_steps, task, hosts=HOSTS, per_host=per_host))


def measure(
    chosen: Workload, contestants: Sequence[Variant], per_host: int, wanted: argparse.Namespace
) -> dict[str, Any]:
    """The sweep and the comparison on so many ranks per host, which share the batch of ``chosen``."""
    chosen = replace(chosen, batch=max(chosen.batch // per_host, 1))
    sizes = {one: {size: of_size(one, size) for size in SIZES_MB} for one in contestants}
    every = [variant for of_one in sizes.values() for variant in of_one.values()]
    swept = steps_of(chosen, every, per_host, wanted.sweep)
    medians = {
        one: {size: MS * statistics.median(swept.steps(variant.name)) for size, variant in of_one.items()}
        for one, of_one in sizes.items()
    }
    best = {one: min(found, key=found.__getitem__) for one, found in medians.items()}
    variants = {one: sizes[one][size] for one, size in best.items()}
    steps = steps_of(chosen, list(variants.values()), per_host, wanted.samples)
    names = {one.label: variant.name for one, variant in variants.items()}
    rows = [row_of(chosen, steps, names, one.label, best[one], per_host) for one in contestants]
    rows.insert(0, none_row(steps, names[DDP.label], per_host))
    sweep = [
        {
            "ranks per host": per_host,
            "contestant": one.label,
            **{f"{size:g} MB": ms for size, ms in of.items()},
        }
        for one, of in medians.items()
    ]
    ms = {name: [MS * s for s in steps.steps(name)] for name in steps.names}
    return {"per_host": per_host, "sweep": sweep, "rows": rows, "ms": ms}


def row_of(
    chosen: Workload, steps: StepResults, names: Mapping[str, str], label: str, size: float, per_host: int
) -> dict[str, Any]:
    """All figures of one contestant."""
    name = names[label]
    sent = statistics.median(steps.by_rank[0][name]["sent_bytes"])
    hook = steps.against(name, names[HOOK.label]) if HOOK.label in names else None
    return {
        "ranks per host": per_host,
        "contestant": label,
        "bucket(MB)": size,
        **_times(steps, name),
        "exposed(ms)": MS * statistics.median(steps.exposed(name)),
        "a host sends(MB)": sent / 1e6,
        "a host sends(S)": sent / chosen.gradient_bytes,
        **spread("x DDP", steps.against(name, names[DDP.label])),
        **spread("x DDP float16", hook),
    }


def none_row(steps: StepResults, ddp: str, per_host: int) -> dict[str, Any]:
    """The floor: nothing is sent."""
    return {
        "ranks per host": per_host,
        "contestant": NONE.label,
        **_times(steps, NONE.name),
        **spread("x DDP", steps.against(NONE.name, ddp)),
        **spread("x DDP float16", None),
    }


def _times(steps: StepResults, name: str) -> dict[str, float]:
    times = steps.steps(name)
    shares = {"step(ms)": 0.5, "q25(ms)": 0.25, "q75(ms)": 0.75}
    return {column: MS * quantile(times, share) for column, share in shares.items()}


def shown(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Rows for people: the quartiles of a ratio beside it."""
    order = list(rows[-1])  # the first row has fewer: nothing is sent
    ratios = ("x DDP", "x DDP float16")
    return [
        {
            name: with_quartiles(row, name) if name in ratios else row.get(name)
            for name in order
            if not name.startswith("x ") or name in ratios
        }
        for row in rows
    ]


def write(
    chosen: Workload, found: Sequence[Mapping[str, Any]], rows: Sequence[Row], folder: Path, minutes: float
) -> None:
    """Results, tables and chart into ``folder``, and a README with them."""
    prepare(folder, HERE)
    bars(
        [
            {**row, "panel": PANELS[row["ranks per host"]]}
            for row in rows
            if row["contestant"] != DDP.label
        ],
        folder / "formats.svg",
        title=f"A training step on {HOSTS} hosts with {rate_text(RATE)} between them",
        subtitle=f"{text_of(chosen)}; over that of torch's DDP, median and quartiles",
        label="contestant", value="x DDP", low="x DDP q25", high="x DDP q75", unit="x", group="panel",
        reference=1.0, reference_text="torch's DDP",
    )  # fmt: skip
    results = {"setting": asdict(chosen), "hosts": HOSTS, "sizes_mb": SIZES_MB, "found": list(found)}
    save(folder / "formats.json", {"minutes": minutes, **results}, pages, HERE, COMMAND)


def pages(results: Results) -> Pages:
    chosen, found = Workload(**results["setting"]), results["found"]
    rounds = len(found[0]["ms"][NONE.name])
    text = (
        f"{text_of(chosen)}; S: the gradients of a rank, {chosen.gradient_bytes / 1e6:.1f} MB.\n\n"
        f"{markdown(shown([row for one in found for row in one['rows']]))}\n\n"
        f"Medians of {rounds} rounds; ratios of steps of the same round, with quartiles. The hosts share the "
        f"cores. {made(results)}"
    )
    sweep = markdown([row for one in found for row in one["sweep"]])
    return {README: {"formats table": text, "sweep table": sweep}}


if __name__ == "__main__":
    sys.exit(main())
