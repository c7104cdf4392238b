"""A small GPT with cut layers in training: two declared steps of AdamW with clipping."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import instep
from instep import tensor
from instep.checkpoint.registered import Registered
from instep.mesh.mesh import Mesh
from instep.models.transformer import GPT, GPTConfig
from instep.state.boxes import BoxHome
from instep.state.hash import SharedHash
from instep.state.homes import home
from tests.parity import filled, numbers
from tests.world import world

VOCABULARY, CONTEXT, MICRO_BATCHES = 200, 16, 4  # 200 is no multiple of 4 chunks of 16 rows
GPT_CONFIG = GPTConfig(
    vocab_size=VOCABULARY, context=CONTEXT, layers=2, width=64, heads=4, ff_width=64, dropout=0.0, tied=True
)


@dataclass(frozen=True)
class Placed:
    """A placement, and what its bits may depend on: ``chunks``, None for as many as ranks."""

    axes: dict[str, int] = field(default_factory=dict)
    chunks: int | None = 4
    sequence: bool = False
    gathers_logits: bool = False
    shards_optimizer: bool = False
    pipeline: bool = False
    nodes: str = "float32"

    def digest(self) -> str:
        """The hash of weights and moments, which all ranks agree on."""
        found: dict[int, str] = {}
        ranks = math.prod(self.axes.values())
        world(ranks, **self.axes)(train)(placed=self, found=found)
        assert len(found) == ranks
        (digest,) = set(found.values())
        return digest


def tokens(micro_batch: int) -> Tensor:
    """(2, T + 1), the same on every rank."""
    x = numbers(2, CONTEXT + 1, key=f"tokens {micro_batch}")
    return (x.abs() * VOCABULARY).long().clamp_(max=VOCABULARY - 1)


def cut_gpt(mesh: Mesh, placed: Placed) -> GPT:
    net = filled(GPT(GPT_CONFIG))
    plan = tensor.gpt_plan(net, gathers_logits=placed.gathers_logits)
    tensor.shard(net, mesh, plan, placed.chunks, sequence=placed.sequence)
    return net


def loss_of(net: GPT, logits: Tensor, targets: Tensor) -> Tensor:
    head: Any = net.head.out
    if isinstance(head, tensor.ColumnLinear) and not head.gathers_output:
        return tensor.cross_entropy(logits, targets, head)
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def train(mesh: Mesh, placed: Placed, found: dict[int, str]) -> None:
    net = cut_gpt(mesh, placed)
    model: Any
    if placed.pipeline:
        model = instep.Pipeline(net, mesh, schedule="1f1b", micro_batches=MICRO_BATCHES, nodes=placed.nodes)
    else:
        model = instep.DataParallel(net, mesh, nodes=placed.nodes)
    options: dict[str, Any] = {"lr": 1e-2, "foreach": False}
    optimizer: Any = (
        instep.ShardedOptimizer(model.parameters(), torch.optim.AdamW, mesh, **options)
        if placed.shards_optimizer
        else torch.optim.AdamW(model.parameters(), **options)
    )
    for _ in range(2):
        if placed.pipeline:
            model.step(
                lambda logits, micro_batch: loss_of(net, logits, tokens(micro_batch.index)[:, 1:]),
                lambda micro_batch: tokens(micro_batch.index)[:, :-1],
                MICRO_BATCHES,
            )
        else:
            for micro_batch in model.micro_batches(MICRO_BATCHES):
                x = tokens(micro_batch.index)
                loss_of(net, model(x[:, :-1]), x[:, 1:]).backward()
        instep.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    state = Registered({"model": model, "optimizer": optimizer}).state()
    found[mesh.rank] = SharedHash(state.group).digests(state.owned(), 2)[0]


def whole_gradients(module: nn.Module) -> dict[str, Tensor]:
    """The gradient of each parameter, all of it, by its name. Collective where layers are cut."""
    found = {}
    for name, p in module.named_parameters():
        there = home(p)
        assert p.grad is not None, name
        found[name] = there.whole(p, p.grad) if isinstance(there, BoxHome) else p.grad.clone()
    return found
