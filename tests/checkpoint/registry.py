"""Trainings of several models, optimizers and objects, to be saved on some ranks and to go on on others."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Muon, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler, MultiStepLR

from instep.checkpoint.registered import Registered
from instep.mesh.mesh import Mesh
from instep.replicate.wrapper import DataParallel
from instep.shard.fully import fully_shard
from instep.shard.optimizer import ShardedOptimizer
from instep.state.hash import SharedHash
from tests.parity import numbers

NUM_LEAVES = 4
Objects = dict[str, Any]


class Net(nn.Module):
    """Two layers, of which one is larger than a block of the hash, and a buffer."""

    def __init__(self, key: str) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(70, 70), nn.Linear(70, 70)
        self.register_buffer("scale", torch.tensor(1.0 + len(key) / 10))
        with torch.no_grad():
            for name, p in self.named_parameters():
                p.copy_(numbers(*p.shape, key=f"{key} {name}") / 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).relu()) * self.scale


class Average:
    """What users write: an average of weights, made in the first step, and a history of them."""

    def __init__(self) -> None:
        self.values: dict[str, Tensor] = {}
        self.best = float("inf")
        self.seen: tuple[int, ...] = ()

    def update(self, module: nn.Module) -> None:
        for name, p in module.named_parameters():
            self.values.setdefault(name, torch.zeros_like(p)).lerp_(p.detach(), 0.1)
        self.seen = (*self.seen[-3:], len(self.seen))

    def state_dict(self) -> Objects:
        return {"values": self.values, "best": self.best, "seen": self.seen}

    def load_state_dict(self, state: Objects) -> None:
        self.values, self.best, self.seen = state["values"], state["best"], state["seen"]


def gan(mesh: Mesh, key: str) -> Objects:
    generator, critic = (DataParallel(Net(f"{key} {name}"), process_group=mesh) for name in "gc")
    g, c = AdamW(generator.parameters(), lr=0.01), SGD(critic.parameters(), lr=0.01, momentum=0.9)
    plans = {"g_plan": CosineAnnealingLR(g, 9), "c_plan": MultiStepLR(c, [1, 2])}
    return {"generator": generator, "g": g, "critic": critic, "c": c, **plans}


def two_optimizers(mesh: Mesh, key: str) -> Objects:
    model = DataParallel(Net(key), process_group=mesh)
    matrices = [p for p in model.parameters() if p.dim() == 2]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    return {"model": model, "muon": Muon(matrices, lr=0.01), "adamw": AdamW(vectors, lr=0.01)}


def one_optimizer(mesh: Mesh, key: str) -> Objects:
    encoder, decoder = (DataParallel(Net(f"{key} {name}"), process_group=mesh) for name in "ed")
    both = [*encoder.parameters(), *decoder.parameters()]
    return {"encoder": encoder, "decoder": decoder, "optimizer": AdamW(both, lr=0.01)}


def averaged(mesh: Mesh, key: str) -> Objects:
    module = Net(key)
    model = DataParallel(module, process_group=mesh)
    objects = {"model": model, "ema": copy.deepcopy(module), "average": Average()}
    return {**objects, "optimizer": AdamW(model.parameters(), lr=torch.tensor(0.01))}


def sharded(mesh: Mesh, key: str) -> Objects:
    generator, critic = (DataParallel(Net(f"{key} {name}"), process_group=mesh) for name in "gc")
    g = ShardedOptimizer(generator.parameters(), AdamW, mesh, lr=0.01)
    c = ShardedOptimizer(critic.parameters(), SGD, mesh, lr=0.01, momentum=0.9)
    return {"generator": generator, "critic": critic, "g": g, "c": c, "average": Average()}


def stage_3(mesh: Mesh, key: str) -> Objects:
    model = fully_shard(Net(key), mesh, stage=3)
    optimizer = AdamW(model.parameters(), lr=0.01)
    return {"model": model, "optimizer": optimizer, "plan": CosineAnnealingLR(optimizer, 9)}


def two_in_slices(mesh: Mesh, key: str) -> Objects:
    first, second = (fully_shard(Net(f"{key} {name}"), mesh, stage=3) for name in "ab")
    both = [*first.parameters(), *second.parameters()]
    return {"first": first, "second": second, "optimizer": AdamW(both, lr=0.01)}


def some_in_slices(mesh: Mesh, key: str) -> Objects:
    large, small = (
        fully_shard(Net(f"{key} l"), mesh, stage=3),
        DataParallel(Net(f"{key} s"), process_group=mesh),
    )
    return {
        "large": large,
        "large_adamw": AdamW(large.parameters(), lr=0.01),
        "small": small,
        "small_sgd": SGD(small.parameters(), lr=0.01, momentum=0.9),
        "average": Average(),
    }


def tied(mesh: Mesh, key: str) -> Objects:
    module, head = Net(key), Net(f"{key} head")
    head.first.weight = module.last.weight
    model = DataParallel(module, process_group=mesh)
    return {"model": model, "head": head, "optimizer": AdamW(model.parameters(), lr=0.01)}


KINDS: dict[str, Callable[[Mesh, str], Objects]] = {
    "gan": gan,
    "two optimizers of one model": two_optimizers,
    "one optimizer of two models": one_optimizer,
    "averages": averaged,
    "sharded optimizers": sharded,
    "stage 3": stage_3,
    "one optimizer of two models in slices": two_in_slices,
    "one model in slices": some_in_slices,
    "tied": tied,
}


def train(objects: Objects, steps: range) -> None:
    """Every model by itself, then all that follows from it."""
    for step in steps:
        models = [model for model in objects.values() if hasattr(model, "micro_batches")]
        for number, model in enumerate(models):
            for micro_batch in model.micro_batches(NUM_LEAVES):
                x = numbers(2, 70, key=f"{number} {step} {micro_batch.index}")
                model(x).square().mean().backward()
        for kind, act in ((Optimizer, "step"), (LRScheduler, "step"), (Optimizer, "zero_grad")):
            for x in objects.values():
                if isinstance(x, kind):
                    getattr(x, act)()
        _average(objects, models[-1])


def _average(objects: Objects, model: nn.Module) -> None:
    module = getattr(model, "module", model)
    if "ema" in objects:
        for ours, p in zip(objects["ema"].parameters(), module.parameters(), strict=True):
            ours.detach().lerp_(p.detach(), 0.1)
    if "average" in objects:
        objects["average"].update(module)


def hash_of(objects: Objects, step: int) -> str:
    """The hash of all of it; collective where it is divided."""
    state = Registered(objects).state()
    return SharedHash(state.group).digests(state.owned(state.hashed()), step)[0]
