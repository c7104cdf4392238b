"""What smaller tree nodes cost in loss and save in bytes; whether rounding is unbiased; one hash per format.

python benchmarks/link/nodes.py                   some half an hour; writes nodes.json, chart and tables
python benchmarks/link/nodes.py --steps 20 --seeds 1 --ranks 1 2 --out DIR        a trial
python benchmarks/link/nodes.py --runs DIR        keeps the runs there, and makes none again that has ended

Exit code 1 if a format has two hashes, two formats have one, the control does not differ, or the stochastic
roundings are not unbiased. Counting bytes at the link needs Linux, root and iproute2; without, that column is
empty.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.pages import README, Pages, Results, made, parser_of, prepare, save
from instep.bench.charts import bars
from instep.bench.steps_rank import measure_steps
from instep.bench.tables import markdown, quantile
from instep.bench.variants import Variant
from instep.bench.workloads import Workload
from instep.bench.worlds import over_link
from instep.cli.exit_codes import DONE
from instep.cli.train import train
from instep.net.process_group import alone
from instep.recipes import text_config
from instep.recipes.text_config import Config, ParallelConfig
from instep.record.directory import SUMMARY
from instep.reduce.buckets import Bucket, make_buckets
from instep.reduce.node_format import NodeFormat

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
COMMAND = "python benchmarks/link/nodes.py"
FORMATS = (
    NodeFormat(),
    NodeFormat("bfloat16"),
    NodeFormat("bfloat16", "stochastic"),
    NodeFormat("int8"),
    NodeFormat("int8", "stochastic"),
)
RANKS = (1, 2, 3, 4, 5)
PLACEMENT_STEPS = 6
LEAVES, STEPS, ELEMENTS = 8, 256, 1 << 16  # of the drawn gradients
TIMED_ELEMENTS, TIMES = 1 << 22, 15


@dataclass(frozen=True)
class Placement:
    """Where and how a run is made."""

    name: str
    layout: ParallelConfig


PLACEMENTS = (
    Placement("bucketed, shm", ParallelConfig(bucket_mb=0.1, backend="shm")),
    Placement("bucketed, gloo", ParallelConfig(bucket_mb=1.0, backend="gloo")),
    Placement("flat", ParallelConfig(strategy="flat")),
    Placement("stage 1", ParallelConfig(shard_stage=1)),
    Placement("stage 2", ParallelConfig(shard_stage=2)),
    Placement("stage 3, gloo", ParallelConfig(shard_stage=3, backend="gloo")),
)
UNORDERED = Placement("control: `--parallel.no-ordered`", ParallelConfig(ordered=False))


def main() -> int:
    wanted = arguments()
    began = time.monotonic()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="instep-nodes-") as directory:
        folder = Path(directory)
        text = folder / "text"  # a copy: somebody may be editing
        text.write_bytes(b"".join(path.read_bytes() for path in sorted((ROOT / "instep").rglob("*.py"))))
        runs = wanted.runs or folder / "runs"
        results: dict[str, Any] = {
            "rounding": [unbiased(nodes) for nodes in FORMATS[1:]],
            "cost": cost(),
            "bytes": sent_bytes(),
            "placement": placements(folder, text, wanted.ranks),
            "loss": losses(runs, text, wanted.steps, wanted.seeds),
        }
    write(results, wanted.out, (time.monotonic() - began) / 60)
    return 0 if as_promised(results) else 1


def arguments() -> argparse.Namespace:
    parser = parser_of(__doc__, HERE)
    parser.add_argument("--steps", type=int, default=text_config.default().steps, help="of the text recipe")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS, help="that the hashes are of")
    parser.add_argument("--runs", type=Path, help="folder to keep the runs of the text recipe in")
    return parser.parse_args()


# Loss.


def losses(folder: Path, text: Path, steps: int, seeds: int) -> list[dict[str, Any]]:
    """The default recipe to its end, per format and seed: on two ranks, which any other number equals."""
    found = []
    for seed in range(seeds):
        for nodes in FORMATS:
            run_dir = folder / f"{nodes.nodes}-{nodes.rounding}-{seed}"
            if not (run_dir / SUMMARY).exists():
                base = replace(text_config.default(), steps=steps, seed=seed, data=text, ranks=2)
                completed(rounded(replace(base, run_dir=run_dir), nodes))
            summary = json.loads((run_dir / SUMMARY).read_text())
            row = {"format": str(nodes), "seed": seed, "held_out_loss": summary["held_out_loss"]}
            found.append({**row, "state_sha256": summary["state_sha256"], "steps": summary["steps"]})
            print(f"  {row['format']}, seed {seed}: {row['held_out_loss']:.4f}", flush=True)
    return found


def rounded(config: Config, nodes: NodeFormat, layout: ParallelConfig | None = None) -> Config:
    """``config`` with ``nodes``, placed as ``layout`` says."""
    layout = config.parallel if layout is None else layout
    return replace(config, parallel=replace(layout, nodes=nodes.nodes, rounding=nodes.rounding))  # type: ignore[arg-type]


def completed(config: Config) -> None:
    code = train(config, config.ranks)
    if code != DONE:
        raise RuntimeError(f"expected a run that ends with code {DONE}, got {code}")


# One hash per format.


def placements(folder: Path, text: Path, ranks: Sequence[int]) -> list[dict[str, Any]]:
    """The hash of weights, moments and step after some steps, in every placement and format."""
    tiny = text_config.tiny()
    model = replace(tiny.model, width=128, heads=4, dropout=0.0)  # threads have no random numbers
    base = replace(tiny, steps=PLACEMENT_STEPS, data=text, model=model)
    found: list[dict[str, Any]] = []
    for nodes, placement in every_placement():
        for number in ranks:
            run_dir = folder / "placed" / f"{len(found)}"
            completed(rounded(replace(base, run_dir=run_dir, ranks=number), nodes, placement.layout))
            sha256 = json.loads((run_dir / SUMMARY).read_text())["state_sha256"]
            found.append(
                {"format": str(nodes), "placement": placement.name, "ranks": number, "sha256": sha256}
            )
        print(f"  {nodes}, {placement.name}", flush=True)
    return found


def every_placement() -> Iterator[tuple[NodeFormat, Placement]]:
    for nodes in FORMATS:
        for placement in PLACEMENTS:
            yield nodes, placement
    yield NodeFormat(), UNORDERED


def hashes(found: Sequence[Mapping[str, Any]]) -> dict[str, set[str]]:
    """By format, those of all ordered placements."""
    by_format: dict[str, set[str]] = {}
    for row in found:
        if row["placement"] != UNORDERED.name:
            by_format.setdefault(row["format"], set()).add(row["sha256"])
    return by_format


def placement_rows(found: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Rows are placements, columns formats: on how many numbers of ranks the hash is the format's one."""
    first = {row["format"]: row["sha256"] for row in reversed(found) if row["placement"] != UNORDERED.name}
    rows: dict[str, dict[str, Any]] = {}
    for row in found:
        same = row["sha256"] == first[row["format"]]
        cells = rows.setdefault(row["placement"], {"placement": row["placement"]})
        cells.setdefault(row["format"], []).append(str(row["ranks"]) if same else "differs")
    return [
        {name: x if name == "placement" else " ".join(x) for name, x in row.items()} for row in rows.values()
    ]


# Bytes.


def sent_bytes() -> dict[str, float | None]:
    """What one of two ranks sends in a step, over the bytes of its gradients; as its host sends it."""
    model = Workload("nodes", params=2_000_000, batch=1, what="", tokens=64)
    variants = [
        Variant("bucketed", "gloo", format="" if x == "float32" else x)
        for x in ("float32", "bfloat16", "int8")
    ]
    task = {"workload": asdict(model), "variants": [asdict(one) for one in variants], "samples": 3}
    try:
        ranks = over_link(measure_steps, task, hosts=2)
    except (RuntimeError, OSError, ValueError) as error:
        print(f"  bytes were not counted: {error}", flush=True)
        return {}
    return {
        one.format or "float32": statistics.median(ranks[0][one.name]["sent_bytes"]) / model.gradient_bytes
        for one in variants
    }


# Rounding.


def filled_bucket(num_elements: int, nodes: NodeFormat) -> Bucket:
    (bucket,) = make_buckets([torch.zeros(num_elements)], [[0]], alone(), ordered=True, nodes=nodes)
    return bucket


def unbiased(nodes: NodeFormat) -> dict[str, Any]:
    """How much is left of the error of a root when it is averaged over steps, all with the same drawn leaves.

    Errors that are independent and right on average leave 1 / sqrt(steps); those that are always the same, 1.
    """
    generator = torch.Generator().manual_seed(0)
    leaves = torch.randn(LEAVES, ELEMENTS, generator=generator) * torch.logspace(-3, 0, LEAVES)[:, None]
    exact = leaves.double().sum(0)
    bucket = filled_bucket(ELEMENTS, nodes)
    total, squares = torch.zeros(ELEMENTS, dtype=torch.float64), 0.0
    for step in range(STEPS):
        error = root_of(bucket, leaves, step).double() - exact
        total += error
        squares += error.square().mean().item()
    rms, left = (squares / STEPS) ** 0.5, (total / STEPS).square().mean().sqrt().item()
    size = exact.square().mean().sqrt().item()
    # In standard errors of what it would be, were it right on average; the mean over elements is the sharper.
    bias = total.sum().item() / (STEPS * ELEMENTS) / (rms / (STEPS * ELEMENTS) ** 0.5)
    return {
        "format": str(nodes),
        "error": rms / size,
        "left after 256 steps": left / rms,
        "if unbiased": STEPS**-0.5,
        "mean error(standard errors)": bias,
    }


def root_of(bucket: Bucket, leaves: Tensor, step: int) -> Tensor:
    bucket.begin(len(leaves), lambda _: 0, [range(len(leaves))])
    bucket.begin_nodes(1, step, 0)
    for number, leaf in enumerate(leaves):
        buffer = bucket.counter.open()
        buffer[: len(leaf)].copy_(leaf)
        bucket.counter.push(number, buffer)
    return bucket.counter.roots[0][1][: leaves.shape[1]]


def cost() -> list[dict[str, Any]]:
    """What it takes to round a node, and to make it ready for its way, beside adding two in float32."""
    x, y = torch.randn(TIMED_ELEMENTS), torch.randn(TIMED_ELEMENTS)
    found: dict[str, list[tuple[float, float, float]]] = {}
    buckets = {str(nodes): filled_bucket(TIMED_ELEMENTS, nodes) for nodes in FORMATS}
    for number in range(TIMES + 1):
        for name, bucket in buckets.items():
            bucket.home.copy_(x)
            plain = timed(lambda: torch.add(x, y, out=y))
            half = timed(lambda bucket=bucket: bucket.nodes.round(bucket.home, (0, 1)))
            wire = bucket.nodes.encode(bucket.home)
            travel = timed(lambda bucket=bucket: bucket.nodes.encode(bucket.home))
            travel += timed(lambda bucket=bucket, wire=wire: bucket.nodes.decode(wire))
            if number:
                found.setdefault(name, []).append((plain, half, travel))
    return [
        {
            "format": name,
            "round(ns per element)": 1e9 * quantile([half for _, half, _ in times], 0.5) / TIMED_ELEMENTS,
            "encode and decode(ns)": 1e9 * quantile([way for *_, way in times], 0.5) / TIMED_ELEMENTS,
            "round over add": quantile([half / plain for plain, half, _ in times], 0.5),
        }
        for name, times in found.items()
    ]


def timed(function: Any) -> float:
    began = time.perf_counter()
    function()
    return time.perf_counter() - began


# What is said of it.


def loss_rows(results: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A row per format: the loss of each seed, how far it is from float32's, and what travels."""
    by_format: dict[str, dict[int, float]] = {}
    for row in results["loss"]:
        by_format.setdefault(row["format"], {})[row["seed"]] = row["held_out_loss"]
    plain = by_format[str(FORMATS[0])]
    rows = []
    for nodes in FORMATS:
        own = by_format[str(nodes)]
        apart = [own[seed] - plain[seed] for seed in own]
        rows.append(
            {
                "format": str(nodes),
                "a step sends(S)": results["bytes"].get(nodes.nodes),
                **{f"seed {seed}": f"{loss:.4f}" for seed, loss in own.items()},
                "over float32's": statistics.median(apart),
                "largest": max(apart, key=abs),
            }
        )
    return rows


def as_promised(results: Mapping[str, Any]) -> bool:
    """One hash per format, each another; a control that differs; and random rounding that is unbiased."""
    found = hashes(results["placement"])
    control = {
        row["ranks"]: row["sha256"] for row in results["placement"] if row["placement"] == UNORDERED.name
    }
    loose = len(control) < 2 or max(control) < 3 or len(set(control.values())) > 1
    alone = all(len(each) == 1 for each in found.values()) and len(set.union(*found.values())) == len(found)
    random = [row for row in results["rounding"] if "stochastic" in row["format"]]
    fair = all(row["left after 256 steps"] < 1.1 * row["if unbiased"] for row in random)
    return alone and loose and fair and all(abs(row["mean error(standard errors)"]) < 4 for row in random)


def write(results: Mapping[str, Any], folder: Path, minutes: float) -> None:
    """Results, chart and tables into ``folder``, and a README with them."""
    prepare(folder, HERE)
    rows = loss_rows(results)
    ends = {row["format"]: [float(v) for k, v in row.items() if k.startswith("seed ")] for row in rows}
    bars(
        [
            {"name": name, "median": statistics.median(own), "low": min(own), "high": max(own)}
            for name, own in ends.items()
        ],
        folder / "nodes.svg",
        title="Held-out loss of the text recipe, by the format of tree nodes",
        subtitle=f"nats per byte after {results['loss'][0]['steps']} steps; median, least and largest of "
        f"{len(next(iter(ends.values())))} seeds",
    )
    whole = save(folder / "nodes.json", {"minutes": minutes, **results}, pages, HERE, COMMAND)
    print(*pages(whole)[README].values(), sep="\n\n")


def pages(results: Results) -> Pages:
    return {
        README: {
            "loss table": f"{markdown(loss_rows(results))}\n\n{made(results)}",
            "rounding table": markdown(results["rounding"]),
            "hashes table": markdown(placement_rows(results["placement"])),
            "cost table": markdown(results["cost"]),
        }
    }


if __name__ == "__main__":
    sys.exit(main())
