"""A pipelined training step beside torch.distributed.pipelining: same model, cut, micro-batches, processes.

python benchmarks/pipeline/against_torch.py                        three minutes; writes into this folder
python benchmarks/pipeline/against_torch.py --samples 3 --out DIR  a trial, which leaves this folder alone

All contestants of a model are in the same processes, with weights of their own, and take turns: torch's
pipelines over gloo, instep's over gloo and over shared memory, by each schedule. A step is forward and
backward of all micro-batches and SGD's update. Those of instep have to end with the same bits, and torch's
close to them, or there is an error instead of a table.
"""

from __future__ import annotations

import copy
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)
from torch.nn import functional as F

import instep
from benchmarks.pages import README, Pages, Results, made, parser_of, prepare, save
from instep.bench.tables import (
    markdown,
    paired_ratio,
    quantile,
    show,
)
from instep.bench.worlds import World, on_ranks, slowest_rank
from instep.mesh.mesh import Mesh, build
from instep.net.process_group import default_store, from_store

HERE = Path(__file__).parent
COMMAND = "python benchmarks/pipeline/against_torch.py"
RANKS, MICRO_BATCHES, CHUNKS = 2, 8, 2
LEARNING_RATE = 1e-3
SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B, "interleaved": ScheduleInterleaved1F1B}
BACKENDS = ("gloo", "shm")
TOLERANCE = 1e-4  # of torch's weights, which adds gradients of micro-batches in another order


@dataclass(frozen=True)
class Model:
    """What is trained: ``layers`` of one kind, and how large a micro-batch is."""

    text: str
    kind: str
    width: int
    rows: int  # of a micro-batch: sequences, or samples
    tokens: int = 0
    layers: int = 4

    def build(self) -> nn.Sequential:
        torch.manual_seed(0)
        if self.kind == "transformer":
            blocks = [
                nn.TransformerEncoderLayer(
                    self.width, 4, 4 * self.width, dropout=0.0, batch_first=True, norm_first=True
                )
                for _ in range(self.layers)
            ]
            return nn.Sequential(*blocks)
        return nn.Sequential(
            *(nn.Sequential(nn.Linear(self.width, self.width), nn.ReLU()) for _ in range(self.layers))
        )

    def batch(self) -> tuple[Tensor, Tensor]:
        """Inputs and targets of all micro-batches, one after the other."""
        shape = (MICRO_BATCHES * self.rows, *([self.tokens] if self.tokens else []), self.width)
        return torch.randn(shape), torch.randn(shape)

    @property
    def message_bytes(self) -> int:
        return 4 * self.rows * max(1, self.tokens) * self.width


MODELS = {
    "transformer": Model("transformer blocks of width 256", "transformer", width=256, rows=2, tokens=64),
    "wide": Model("linear layers of width 256", "linear", width=256, rows=2048),
    "tiny": Model("linear layers of width 8", "linear", width=8, rows=4),
}
MEASURED = ("transformer", "wide")


class Contestant(Protocol):
    """Trains a copy of the model, as one rank does its part of it."""

    def step(self) -> None: ...

    def weights(self) -> list[Tensor]: ...


def num_stages(schedule: str) -> int:
    return RANKS * (CHUNKS if schedule == "interleaved" else 1)


def edges(layers: int, stages: int) -> list[int]:
    return [layers * i // stages for i in range(stages + 1)]


class Theirs:
    """torch's pipeline over gloo."""

    def __init__(self, world: World, model: Model, net: nn.Sequential, schedule: str) -> None:
        stages = num_stages(schedule)
        parts = [net[a:b] for a, b in pairwise(edges(model.layers, stages))]
        mine = range(world.rank, stages, RANKS)
        group = world.group("gloo", f"torch {schedule}")
        self.parts = [parts[i] for i in mine]
        made = [PipelineStage(parts[i], i, stages, world.device, group=group) for i in mine]
        kind: Any = SCHEDULES[schedule]
        self.schedule = kind(
            made if schedule == "interleaved" else made[0],
            MICRO_BATCHES,
            loss_fn=lambda output, target: F.mse_loss(output, target),
        )
        self.optimizer = torch.optim.SGD([p for part in self.parts for p in part.parameters()], LEARNING_RATE)
        self.inputs, self.targets = model.batch()
        self.is_first, self.is_last = world.rank == 0, world.rank == RANKS - 1

    def step(self) -> None:
        inputs = (self.inputs,) if self.is_first else ()
        targets = {"target": self.targets, "losses": []} if self.is_last else {}
        self.schedule.step(*inputs, **targets, return_outputs=False)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def weights(self) -> list[Tensor]:
        return [p.detach() for part in self.parts for p in part.parameters()]


class Ours:
    """instep's pipeline over ``mesh``."""

    def __init__(self, mesh: Mesh, model: Model, net: nn.Sequential, schedule: str) -> None:
        cuts = edges(model.layers, num_stages(schedule))[1:-1]
        chunks = CHUNKS if schedule == "interleaved" else None
        self.pipeline = instep.Pipeline(net, mesh, schedule, MICRO_BATCHES, cuts=cuts, chunks=chunks)
        self.optimizer = torch.optim.SGD(self.pipeline.parameters(), LEARNING_RATE)
        inputs, targets = model.batch()
        self.inputs, self.targets = inputs.chunk(MICRO_BATCHES), targets.chunk(MICRO_BATCHES)

    def step(self) -> None:
        self.pipeline.step(
            lambda output, micro_batch: F.mse_loss(output, self.targets[micro_batch.index]),
            lambda micro_batch: self.inputs[micro_batch.index],
        )
        self.optimizer.step()
        self.optimizer.zero_grad()

    def weights(self) -> list[Tensor]:
        return [x.parameter.detach() for x in self.pipeline.home.held]


class Counted:
    """A step, and how often it was made."""

    def __init__(self, step: Callable[[], object]) -> None:
        self.step, self.calls = step, 0

    def __call__(self) -> None:
        self.calls += 1
        self.step()


def name_of(what: str, schedule: str, backend: str) -> str:
    return f"{what} {schedule} over {backend}"


def body(world: World, task: dict[str, Any]) -> dict[str, Any]:
    """One rank: seconds per step of each contestant, and how far apart their weights are in the end."""
    model = MODELS[task["model"]]
    net = model.build()
    meshes = {backend: mesh_over(world, backend) for backend in BACKENDS}
    found: dict[str, Contestant] = {}
    for schedule in SCHEDULES:
        torch.manual_seed(1)
        found[name_of("torch", schedule, "gloo")] = Theirs(world, model, copy.deepcopy(net), schedule)
        for backend in BACKENDS:
            torch.manual_seed(1)
            ours = Ours(meshes[backend], model, copy.deepcopy(net), schedule)
            found[name_of("instep", schedule, backend)] = ours
    steps: dict[str, Callable[[], object]] = {name: one.step for name, one in found.items()}
    counted = {name: Counted(step) for name, step in steps.items()}
    times, calls = world.interleave(counted, task["samples"], warm_up=3)
    for one in counted.values():  # short ones were called more often
        while one.calls < max(other.calls for other in counted.values()):
            one()
    for schedule in SCHEDULES:  # the k-th weights of a rank are the same ones in all
        first, *others = (found[name_of("instep", schedule, backend)].weights() for backend in BACKENDS)
        if not all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True)):
            raise RuntimeError(f"{schedule}: expected the same bits over {' and '.join(BACKENDS)}")
        theirs = found[name_of("torch", schedule, "gloo")].weights()
        apart = max(float((a - b).abs().max()) for a, b in zip(first, theirs, strict=True))
        if apart > TOLERANCE:
            raise RuntimeError(f"{schedule}: torch's weights are {apart:.1e} from those of instep")
    for mesh in meshes.values():
        mesh.close()
    return {"times": times, "calls": calls}


def mesh_over(world: World, backend: str) -> Mesh:
    """All ranks as one pipeline."""
    make = from_store(default_store(), world.rank, 60.0, config=f"cpu:{backend}")
    return build(default_store(), world.rank, world.size, pp=RANKS, dp=1, timeout_s=60.0, make_group=make)


def measure(name: str, samples: int) -> dict[str, Any]:
    """All contestants on one model."""
    model = MODELS[name]
    print(f"{model.text} ...", file=sys.stderr, flush=True)
    ranks = on_ranks(body, {"model": name, "samples": samples}, ranks=RANKS)
    times = {one: slowest_rank([rank["times"][one] for rank in ranks]) for one in ranks[0]["times"]}
    return {
        "model": name,
        "rows": rows_of(model, times),
        "ms": {k: [1e3 * s for s in v] for k, v in times.items()},
    }


def rows_of(model: Model, times: dict[str, list[float]]) -> list[dict[str, Any]]:
    """A row per contestant; throughput round by round, as a multiple of torch's by the same schedule."""
    rows = []
    for name, seconds in times.items():
        what, schedule, _, backend = name.split()
        ratio = paired_ratio(times[name_of("torch", schedule, "gloo")], seconds)
        rows.append(
            {
                "model": model.text,
                "message(MB)": model.message_bytes / 1e6,
                "schedule": schedule,
                "pipeline": what,
                "over": backend,
                "step(ms)": 1e3 * quantile(seconds, 0.5),
                "q25(ms)": 1e3 * quantile(seconds, 0.25),
                "q75(ms)": 1e3 * quantile(seconds, 0.75),
                "throughput x torch": f"{ratio.median:.3f} ({ratio.low:.2f} to {ratio.high:.2f})",
            }
        )
    return rows


def pages(results: Results) -> Pages:
    rows = [row for one in results["models"] for row in one["rows"]]
    return {README: {"against torch": f"{markdown(rows)}\n\n{made(results)}"}}


def main() -> int:
    parser = parser_of(__doc__, HERE)
    parser.add_argument("--samples", type=int, default=24)
    parser.add_argument("--model", choices=[*MODELS], action="append")
    wanted = parser.parse_args()
    began = time.monotonic()
    found = [measure(name, wanted.samples) for name in wanted.model or MEASURED]
    title = f"{RANKS} ranks, {MICRO_BATCHES} micro-batches; median of {wanted.samples} steps with SGD"
    show([row for one in found for row in one["rows"]], title)
    prepare(wanted.out, HERE)
    results = {"minutes": (time.monotonic() - began) / 60, "models": found}
    save(wanted.out / "against_torch.json", results, pages, HERE, COMMAND)
    return 0


if __name__ == "__main__":
    sys.exit(main())
