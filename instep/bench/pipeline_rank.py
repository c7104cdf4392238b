"""A rank's part of ``instep bench pipeline``: a step by each schedule in turn, and its stages' activations.

All schedules are in the same processes, each with a pipeline and a model of its own, and take turns as in
``bench.steps_rank``: what disturbs a round disturbs all of them. A step is forward and backward of all its
micro-batches; what is read of it is what a pipeline's ranks record in any case.

What stages keep for backward is counted in one more step of each, by autograd's own account: the most bytes
at any time, over the bytes that the forwards of one micro-batch keep on this rank.

Modules that ranks import must not import matplotlib, which costs half a second.
"""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from instep.bench.saved_bytes import saved_beside
from instep.bench.steps_rank import DROPPED, order
from instep.bench.worlds import World
from instep.events import PIPELINE
from instep.mesh.join import join_store
from instep.mesh.mesh import Mesh
from instep.models.config import GPTConfig
from instep.models.transformer import GPT
from instep.net.process_group import default_store
from instep.pipeline.actions import FORWARD, SPANS
from instep.pipeline.pipeline import Pipeline
from instep.pipeline.schedules import generate
from instep.rng.keys import initialize
from instep.step.micro_batches import MicroBatch

SEED = 0


class PipelineLoop:
    """Steps by one schedule, of a model of its own, in any number of micro-batches, all of ``windows``."""

    def __init__(self, mesh: Mesh, config: GPTConfig, schedule: str, windows: Tensor) -> None:
        module = GPT(config)
        initialize(module, SEED)
        num_stages = generate(schedule, mesh.world_size, 1).num_stages
        share = config.layers // num_stages
        cuts = [1 + share * stage for stage in range(1, num_stages)]  # the first layer is the embedding
        self.model, self.windows = Pipeline(module, mesh, schedule, cuts=cuts), windows

    def step(self, micro_batches: int) -> None:
        """Forward and backward; gradients are dropped."""
        self.model.step(self._loss, lambda _: self.windows[:, :-1], micro_batches)
        self.model.zero_grad()

    def _loss(self, logits: Tensor, micro_batch: MicroBatch) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), self.windows[:, 1:].flatten())


def measure_pipelines(world: World, task: dict[str, Any]) -> dict[str, Any]:
    """What this rank has measured, by schedule and number of micro-batches: "steps", and "kept".

    ``task``: "model" (the fields of its config), "micro_size", "schedules", "micro_batches", "backend",
    "samples".
    """
    config = GPTConfig(**task["model"])
    store = dist.PrefixStore("pipelines", default_store())
    mesh = join_store(store, world.rank, world.size, backend=task["backend"], dp=1, pp=world.size)
    mesh.recorder.by_optimizer = False
    generator = torch.Generator().manual_seed(SEED)
    shape = task["micro_size"], config.context + 1
    windows = torch.randint(config.vocab_size, shape, generator=generator)
    loops = {name: PipelineLoop(mesh, config, name, windows) for name in task["schedules"]}
    named = {variant(name, m): (loops[name], m) for name in loops for m in task["micro_batches"]}
    steps: dict[str, list[dict[str, Any]]] = {name: [] for name in named}
    for number in world.rounds(task["samples"], DROPPED):
        for name in order(list(named), number):
            found = _turn(world, mesh, *named[name])
            if number >= DROPPED:
                steps[name].append(found)
    kept = {name: count_kept(mesh, *of) for name, of in named.items()}
    for loop in loops.values():
        loop.model.close()
    mesh.close()
    return {"steps": steps, "kept": kept}


def variant(schedule: str, micro_batches: int) -> str:
    """What a schedule and a number of micro-batches are called together."""
    return f"{schedule}, {micro_batches}"


def _turn(world: World, mesh: Mesh, loop: PipelineLoop, micro_batches: int) -> dict[str, Any]:
    """The seconds of a step, and when this rank computed in it, and waited."""
    world.barrier()
    mesh.recorder.begin_step(0)
    began = time.perf_counter()
    loop.step(micro_batches)
    step_s = time.perf_counter() - began
    events = [one for one in mesh.recorder.so_far() if one.lane == "compute" or one.name == PIPELINE]
    mesh.recorder.drop_step()
    return {"step_s": step_s, "events": events}


def count_kept(mesh: Mesh, loop: PipelineLoop, micro_batches: int) -> dict[str, float]:
    """The most that autograd keeps in a step: in bytes, and in micro-batches of this rank's stages."""
    saved, recorder = saved_beside(loop.model.module, [loop.windows]), mesh.recorder
    sizes: list[int] = []  # when a forward begins, and when it ends

    def told(name: str, begins: bool) -> None:
        sizes.append(saved.nbytes)

    recorder.watched, recorder.watch = (SPANS[FORWARD],), told
    try:
        with saved.watch():
            loop.step(micro_batches)
    finally:
        recorder.watched, recorder.watch = (), None
    one = (sum(sizes[1::2]) - sum(sizes[::2])) / micro_batches
    return {"bytes": saved.peak, "micro_batches": saved.peak / one}
