"""A step of AdamW on ranks of one host: replicated state, and state that is sharded, by stage.

python benchmarks/shard/speed.py              some ten minutes; writes speed.json, charts, the README's tables
python benchmarks/shard/speed.py --params 2M --samples 3 --out /tmp/trial

Contestants of a set are in the same processes, with weights and moments of their own, and take turns. In both
sets the baseline is as many processes at once that tell each other nothing. Those of instep have to end with
the same bits, or there is an error instead of a table.
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer

import instep
from benchmarks.pages import README, Pages, Results, made, parser_of, prepare, save
from instep.bench.charts import bars
from instep.bench.options import parse_count
from instep.bench.tables import markdown, paired_ratio, quantile, show
from instep.bench.variants import SharedModel
from instep.bench.workloads import Workload, workload
from instep.bench.worlds import World, on_ranks, slowest_rank
from instep.events import LANES, PARAMETER_GATHER
from instep.state.hash import described, state_digests

HERE = Path(__file__).parent
OPTIONS: dict[str, Any] = {"lr": 1e-4, "fused": True}
# Nothing is sent where memory is shared: what is left to save is how often ranks wait for each other.
BUCKET_MB = {"gloo": 25.0, "shm": 64.0}
BASELINE = "none + AdamW"


def baseline(shared: SharedModel) -> tuple[nn.Module, Optimizer]:
    """As many processes at once, and nobody tells anybody anything."""
    module = copy.deepcopy(shared.module)
    return module, AdamW(module.parameters(), **OPTIONS)


def replicated(shared: SharedModel, backend: str) -> tuple[nn.Module, Optimizer]:
    module = copy.deepcopy(shared.module)
    model = instep.DataParallel(
        module, process_group=shared.world.group(backend), bucket_cap_mb=BUCKET_MB[backend], init_sync=False
    )
    return model, AdamW(module.parameters(), **OPTIONS)


def sharded(shared: SharedModel, backend: str) -> tuple[nn.Module, Optimizer]:
    module = copy.deepcopy(shared.module)
    group = shared.world.group(backend)
    model = instep.DataParallel(
        module, process_group=group, bucket_cap_mb=BUCKET_MB[backend], init_sync=False
    )
    return model, instep.ShardedOptimizer(module.parameters(), AdamW, group, **OPTIONS)


def ddp(shared: SharedModel) -> tuple[nn.Module, Optimizer]:
    module = copy.deepcopy(shared.module)
    model = DistributedDataParallel(module, process_group=shared.world.group("gloo"), init_sync=False)
    return model, AdamW(module.parameters(), **OPTIONS)


def zero(shared: SharedModel) -> tuple[nn.Module, Optimizer]:
    module = copy.deepcopy(shared.module)
    group = shared.world.group("gloo")
    model = DistributedDataParallel(module, process_group=group, init_sync=False)
    optimizer = ZeroRedundancyOptimizer(
        module.parameters(), optimizer_class=AdamW, process_group=group, **OPTIONS
    )
    return model, optimizer


def fully(shared: SharedModel, backend: str, **options: Any) -> tuple[nn.Module, Optimizer]:
    group = shared.world.group(backend)
    model = instep.fully_shard(copy.deepcopy(shared.module), group, **options)
    return model, instep.ShardedOptimizer(model.parameters(), AdamW, group, **OPTIONS)


def fsdp2(shared: SharedModel) -> tuple[nn.Module, Optimizer]:
    """As its users write it: a unit per block, and one of the rest."""
    module = copy.deepcopy(shared.module)
    mesh = DeviceMesh.from_group(shared.world.group("gloo"), "cpu")
    for block in module.blocks:
        torch_fully_shard(block, mesh=mesh)
    torch_fully_shard(module, mesh=mesh)
    return module, AdamW(module.parameters(), **OPTIONS)


Make = Callable[[SharedModel], tuple[nn.Module, Optimizer]]
SETS: dict[str, dict[str, Make]] = {
    "update": {
        BASELINE: baseline,
        "DataParallel + AdamW over shm": lambda shared: replicated(shared, "shm"),
        "DataParallel + ShardedOptimizer over gloo": lambda shared: sharded(shared, "gloo"),
        "DataParallel + ShardedOptimizer over shm": lambda shared: sharded(shared, "shm"),
        "DDP + AdamW over gloo": ddp,
        "DDP + ZeroRedundancyOptimizer over gloo": zero,
    },
    "weights": {
        BASELINE: baseline,
        "fully_shard(stage=2) over gloo": lambda shared: fully(shared, "gloo", stage=2),
        "fully_shard(stage=2) over shm": lambda shared: fully(shared, "shm", stage=2),
        "fully_shard(stage=3) over gloo": lambda shared: fully(shared, "gloo", stage=3),
        "fully_shard(stage=3) over shm": lambda shared: fully(shared, "shm", stage=3),
        "FSDP2 per block over gloo": fsdp2,
    },
}
THEIRS = {"update": "DDP + ZeroRedundancyOptimizer over gloo", "weights": "FSDP2 per block over gloo"}
OURS = ("DataParallel", "fully_shard")


def body(world: World, task: dict[str, Any]) -> dict[str, Any]:
    """One rank: seconds per step, the weights of ours in the end, the share of gathers under compute."""
    shared = SharedModel(world, Workload(**task["workload"]))
    runners = {name: make(shared) for name, make in SETS[task["set"]].items()}

    made = Counter[str]()

    def step(name: str) -> None:
        model, optimizer = runners[name]
        optimizer.zero_grad()
        shared.loss(model, shared.batch).backward()
        optimizer.step()
        made[name] += 1

    times, calls = world.interleave(
        {name: partial(step, name) for name in runners}, task["samples"], warm_up=2
    )
    models = {name: model for name, (model, _) in runners.items() if name.startswith(OURS)}
    for (
        name
    ) in models:  # a sample of a short step is the mean of several: bits are compared after equally many
        for _ in range(max(made.values()) - made[name]):
            step(name)
    bits = {name: weights_sha256(model) for name, model in models.items()}
    return {"times": times, "calls": calls, "bits": bits, "hidden": hidden(models)}


def weights_sha256(model: nn.Module) -> str:
    """The hash of the whole weights, of every stage. Collective."""
    whole = instep.full_state_dict(model.module if isinstance(model, instep.DataParallel) else model)
    return state_digests((described(name, x) for name, x in sorted(whole.items())), 0)[0]


def hidden(models: dict[str, nn.Module]) -> dict[str, float]:
    """Of the time that gathers took, the share in which compute did not wait for them."""
    found = {}
    for name, model in models.items():
        events = [event for event in model.recorder.events if event.name == PARAMETER_GATHER]
        took = {lane: sum(e.end_ns - e.start_ns for e in events if e.lane == lane) for lane in LANES}
        if took["communication"]:
            found[name] = 1 - took["host"] / took["communication"]
    return found


def rows_of(times: dict[str, list[float]], theirs: str, under: dict[str, float]) -> list[dict[str, Any]]:
    """A row per contestant, and how it compares round by round."""
    rows = []
    for name, seconds in times.items():
        what, _, over = name.partition(" over ")
        ratio, other = paired_ratio(seconds, times[BASELINE]), paired_ratio(seconds, times[theirs])
        rows.append(
            {
                "contestant": what,
                "over": over,
                "step(ms)": 1e3 * quantile(seconds, 0.5),
                "q25(ms)": 1e3 * quantile(seconds, 0.25),
                "q75(ms)": 1e3 * quantile(seconds, 0.75),
                "x baseline": f"{ratio.median:.3f} ({ratio.low:.2f} to {ratio.high:.2f})",
                "x torch": f"{other.median:.3f} ({other.low:.2f} to {other.high:.2f})",
                "gathers hidden(%)": round(100 * under[name]) if name in under else None,
            }
        )
    return rows


def require_same_bits(found: Sequence[dict[str, Any]]) -> None:
    """Raise ``RuntimeError`` unless all of ours have trained the same weights on all ranks."""
    kinds = {digest for rank in found for digest in rank["bits"].values()}
    if len(kinds) > 1:
        raise RuntimeError(f"expected the same bits, got {[rank['bits'] for rank in found]}")


def measure(chosen: str, wanted: argparse.Namespace) -> dict[str, Any]:
    """One set: the table on stdout, the chart, and what is to be kept."""
    size = workload("communication", parse_count(wanted.params))
    task = {"set": chosen, "workload": asdict(size), "samples": wanted.samples}
    found = on_ranks(body, task, ranks=wanted.ranks)
    require_same_bits(found)
    times = {name: slowest_rank([rank["times"][name] for rank in found]) for name in SETS[chosen]}
    least = {name: min(rank["hidden"][name] for rank in found) for name in found[0]["hidden"]}
    rows = rows_of(times, THEIRS[chosen], least)
    title = f"{size.text}; {wanted.ranks} ranks; median of {wanted.samples} steps of fused AdamW"
    torchs = f"x torch: against {THEIRS[chosen]}"
    show(rows, title, notes=["x: round by round, the median of the ratios and their quartiles", torchs])
    bars(
        [{**row, "name": name} for name, row in zip(times, rows, strict=True)],
        wanted.out / f"{chosen}.svg",
        title=f"A training step with AdamW on {wanted.ranks} ranks of one host", subtitle=title,
        label="name", value="step(ms)", low="q25(ms)", high="q75(ms)", unit="ms",
        reference=rows[0]["step(ms)"], reference_text="no synchronisation",
    )  # fmt: skip
    samples = {name: [1e3 * s for s in seconds] for name, seconds in times.items()}
    return {"title": title, "rows": rows, "ms": samples}


def main() -> int:
    parser = parser_of(__doc__, HERE)
    parser.add_argument("-n", "--ranks", type=int, default=2)
    parser.add_argument("--samples", type=int, default=20)
    parser.add_argument("--params", default="50M")
    parser.add_argument("--set", choices=[*SETS], action="append")
    wanted = parser.parse_args()
    prepare(wanted.out, HERE)
    began = time.monotonic()
    found = {chosen: measure(chosen, wanted) for chosen in wanted.set or SETS}
    results = {**found, "minutes": (time.monotonic() - began) / 60}
    save(wanted.out / "speed.json", results, pages, HERE, "python benchmarks/shard/speed.py")
    return 0


def pages(results: Results) -> Pages:
    return {
        README: {
            f"{chosen} table": f"{markdown(results[chosen]['rows'])}\n\n{made(results)}"
            for chosen in SETS
            if chosen in results
        }
    }


if __name__ == "__main__":
    sys.exit(main())
