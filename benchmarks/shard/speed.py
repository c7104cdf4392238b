"""A step of AdamW on ranks of one host: state on all, state in slices, one copy of the weights.

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
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer

import instep
from instep.bench.charts import bars
from instep.bench.contestants import Stage
from instep.bench.ranks import World, merge, on_ranks
from instep.bench.settings import Setting, setting
from instep.bench.tables import markdown, paired_ratio, quantile, show, write_between, write_json
from instep.bench.words import parse_count
from instep.events import LANES, PARAMETER_GATHER
from instep.ordered.hash import state_sha256

HERE = Path(__file__).parent
OPTIONS: dict[str, Any] = {"lr": 1e-4, "fused": True}
BUCKET_MB = 25.0
BASELINE = "none + AdamW"


def baseline(stage: Stage) -> tuple[nn.Module, Optimizer]:
    """As many processes at once, and nobody tells anybody anything."""
    module = copy.deepcopy(stage.module)
    return module, AdamW(module.parameters(), **OPTIONS)


def replicated(stage: Stage, backend: str) -> tuple[nn.Module, Optimizer]:
    module = copy.deepcopy(stage.module)
    model = instep.DataParallel(
        module, process_group=stage.world.group(backend), bucket_cap_mb=BUCKET_MB, init_sync=False
    )
    return model, AdamW(module.parameters(), **OPTIONS)


def sharded(stage: Stage, backend: str, *, one_copy: bool = False) -> tuple[nn.Module, Optimizer]:
    module = copy.deepcopy(stage.module)
    group = stage.world.group(backend)
    model = instep.DataParallel(module, process_group=group, bucket_cap_mb=BUCKET_MB, init_sync=False)
    return model, instep.ShardedOptimizer(module.parameters(), AdamW, group, one_copy=one_copy, **OPTIONS)


def ddp(stage: Stage) -> tuple[nn.Module, Optimizer]:
    module = copy.deepcopy(stage.module)
    model = DistributedDataParallel(module, process_group=stage.world.group("gloo"), init_sync=False)
    return model, AdamW(module.parameters(), **OPTIONS)


def zero(stage: Stage) -> tuple[nn.Module, Optimizer]:
    module = copy.deepcopy(stage.module)
    group = stage.world.group("gloo")
    model = DistributedDataParallel(module, process_group=group, init_sync=False)
    optimizer = ZeroRedundancyOptimizer(
        module.parameters(), optimizer_class=AdamW, process_group=group, **OPTIONS
    )
    return model, optimizer


def fully(shared: Stage, backend: str, **options: Any) -> tuple[nn.Module, Optimizer]:
    group = shared.world.group(backend)
    model = instep.fully_shard(copy.deepcopy(shared.module), group, **options)
    return model, instep.ShardedOptimizer(model.parameters(), AdamW, group, **OPTIONS)


def fsdp2(stage: Stage) -> tuple[nn.Module, Optimizer]:
    """As its users write it: a unit per block, and one of the rest."""
    module = copy.deepcopy(stage.module)
    mesh = DeviceMesh.from_group(stage.world.group("gloo"), "cpu")
    for block in module.blocks:
        torch_fully_shard(block, mesh=mesh)
    torch_fully_shard(module, mesh=mesh)
    return module, AdamW(module.parameters(), **OPTIONS)


Make = Callable[[Stage], tuple[nn.Module, Optimizer]]
SETS: dict[str, dict[str, Make]] = {
    "update": {
        BASELINE: baseline,
        "DataParallel + AdamW over shm": lambda stage: replicated(stage, "shm"),
        "DataParallel + ShardedOptimizer over gloo": lambda stage: sharded(stage, "gloo"),
        "DataParallel + ShardedOptimizer over shm": lambda stage: sharded(stage, "shm"),
        "DataParallel + ShardedOptimizer(one_copy=True) over shm": lambda s: sharded(s, "shm", one_copy=True),
        "fully_shard(stage=2, one_copy=True) over shm": lambda s: fully(s, "shm", stage=2, one_copy=True),
        "DDP + AdamW over gloo": ddp,
        "DDP + ZeroRedundancyOptimizer over gloo": zero,
    },
    "weights": {
        BASELINE: baseline,
        "fully_shard(stage=2) over gloo": lambda stage: fully(stage, "gloo", stage=2),
        "fully_shard(stage=2) over shm": lambda stage: fully(stage, "shm", stage=2),
        "fully_shard(stage=3) over gloo": lambda stage: fully(stage, "gloo", stage=3),
        "fully_shard(stage=3) over shm": lambda stage: fully(stage, "shm", stage=3),
        "FSDP2 per block over gloo": fsdp2,
    },
}
THEIRS = {"update": "DDP + ZeroRedundancyOptimizer over gloo", "weights": "FSDP2 per block over gloo"}
OURS = ("DataParallel", "fully_shard")


def body(world: World, told: dict[str, Any]) -> dict[str, Any]:
    """One rank: seconds per step, the weights of ours in the end, the share of gathers under compute."""
    stage = Stage(world, Setting(**told["setting"]))
    players = {name: make(stage) for name, make in SETS[told["set"]].items()}

    def step(model: nn.Module, optimizer: Optimizer) -> None:
        optimizer.zero_grad()
        stage.loss(model, stage.batch).backward()
        optimizer.step()

    steps = {
        name: (lambda model=model, optimizer=optimizer: step(model, optimizer))
        for name, (model, optimizer) in players.items()
    }
    times, calls = world.interleave(steps, told["samples"], warm_up=2)
    models = {name: model for name, (model, _) in players.items() if name.startswith(OURS)}
    bits = {name: weights_sha256(model) for name, model in models.items()}
    return {"times": times, "calls": calls, "bits": bits, "hidden": hidden(models)}


def weights_sha256(model: nn.Module) -> str:
    """The hash of the whole weights, of every stage. Collective."""
    whole = instep.full_state_dict(model.module if isinstance(model, instep.DataParallel) else model)
    return state_sha256(sorted(whole.items()), 0)


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
    size = setting("communication", parse_count(wanted.params))
    told = {"set": chosen, "setting": asdict(size), "samples": wanted.samples}
    found = on_ranks(body, told, ranks=wanted.ranks)
    require_same_bits(found)
    times = {name: merge([rank["times"][name] for rank in found]) for name in SETS[chosen]}
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
    if wanted.out == HERE:
        write_between(HERE / "README.md", f"{chosen} table", markdown(rows))
    samples = {name: [1e3 * s for s in seconds] for name, seconds in times.items()}
    return {"title": title, "rows": rows, "ms": samples}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-n", "--ranks", type=int, default=2)
    parser.add_argument("--samples", type=int, default=20)
    parser.add_argument("--params", default="50M")
    parser.add_argument("--set", choices=[*SETS], action="append")
    parser.add_argument("--out", type=Path, default=HERE)
    wanted = parser.parse_args()
    wanted.out.mkdir(parents=True, exist_ok=True)
    found = {chosen: measure(chosen, wanted) for chosen in wanted.set or SETS}
    write_json(wanted.out / "speed.json", found, command="python benchmarks/shard/speed.py")
    return 0


if __name__ == "__main__":
    sys.exit(main())
