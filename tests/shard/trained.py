"""Training with a sharded optimizer or module, and with plain ones on one rank, to be compared bit by bit."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import AdamW, Optimizer

from instep.mesh.mesh import Mesh
from instep.reduce.norm import clip_grad_norm_
from instep.replicate.wrapper import DataParallel
from instep.shard.fully import full_state_dict, fully_shard
from instep.shard.optimizer import ShardedOptimizer
from instep.shard.shard_groups import shard_group_of
from instep.step.micro_batches import MicroBatch
from tests.parity import LeafStep, bits, filled, numbers, world_of_one

FUSED = {"lr": 0.02, "fused": True}
Groups = Callable[[nn.Module], Iterable[Any]]


def all_in_one(module: nn.Module) -> Iterable[Any]:
    return module.parameters()


def matrices_and_vectors(module: nn.Module) -> Iterable[Any]:
    """Two groups, with other options each, as most people make them."""
    parameters = [*module.parameters()]
    return [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0, "lr": 0.01},
    ]


@dataclass(frozen=True)
class Run:
    """What is trained and how: all that the bits may depend on."""

    module: Callable[[], nn.Module]
    leaf_step: LeafStep
    kind: type[Optimizer] = AdamW
    options: dict[str, Any] = field(default_factory=lambda: FUSED)
    groups: Groups = all_in_one
    clip: float | None = None
    scheduled: bool = False
    num_leaves: int = 5
    num_steps: int = 2  # the second goes by what the first planned, with moments


@dataclass(frozen=True)
class Result:
    """The weights and buffers, and the whole state of the optimizer."""

    module: dict[str, Tensor]
    optimizer: dict[str, Any]


def train(run: Run, mesh: Mesh, *, sharded: bool = True, one_copy: bool = False) -> Result:
    """The declared steps of ``run`` on the ranks of ``mesh``."""
    module = filled(run.module())
    model = DataParallel(module, process_group=mesh, find_unused_parameters=True)
    optimizer = (
        ShardedOptimizer(run.groups(module), run.kind, mesh, one_copy=one_copy, **run.options)
        if sharded
        else run.kind(run.groups(module), **run.options)
    )
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5) if run.scheduled else None
    for step in range(run.num_steps):
        for micro_batch in model.micro_batches(run.num_leaves):
            run.leaf_step(model, micro_batch, step)
        if run.clip is not None:
            clip_grad_norm_(module.parameters(), run.clip)
        optimizer.step()
        optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()
    result = Result(
        {name: x.clone() for name, x in module.state_dict().items()}, copied(optimizer.state_dict())
    )
    if isinstance(optimizer, ShardedOptimizer):
        optimizer.close()
    model.close()
    return result


def copied(value: Any) -> Any:
    """A state dict with tensors of its own."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: copied(x) for key, x in value.items()}
    return [copied(x) for x in value] if isinstance(value, list) else value


_references: dict[int, tuple[Run, Result]] = {}
_lock = threading.Lock()


def plain(run: Run) -> Result:
    """``run`` with the plain optimizer on one rank, once for all who ask in this process."""
    with _lock:
        if id(run) not in _references:
            _references[id(run)] = run, train(run, world_of_one(), sharded=False)
        return _references[id(run)][1]


def assert_bits_of_plain(mesh: Mesh, run: Run, *, one_copy: bool = False) -> None:
    """Weights, moments and options on this rank are those of the plain optimizer on one rank."""
    ours, expected = train(run, mesh, one_copy=one_copy), plain(run)
    assert_same(ours.module, expected.module, "module")
    assert_same(ours.optimizer, expected.optimizer, "optimizer")


def assert_same(ours: Any, expected: Any, where: str) -> None:
    """The same structure, and the same bits in every tensor."""
    assert type(ours) is type(expected), where
    if isinstance(ours, Tensor):
        same_form = (ours.dtype, ours.shape, ours.stride()) == (
            expected.dtype,
            expected.shape,
            expected.stride(),
        )
        assert same_form, f"{where}: {ours.dtype} {ours.shape} {ours.stride()}"
        differ = (bits(ours) != bits(expected)).sum().item()
        assert not differ, f"{where}: {differ} bytes of {ours.numel()} elements differ"
    elif isinstance(ours, dict):
        assert set(ours) == set(expected), where
        for key in ours:
            assert_same(ours[key], expected[key], f"{where}/{key}")
    elif isinstance(ours, list):
        assert len(ours) == len(expected), where
        for i, (x, y) in enumerate(zip(ours, expected, strict=True)):
            assert_same(x, y, f"{where}/{i}")
    else:
        assert ours == expected, f"{where}: {ours} {expected}"


WIDTH = 72  # a matrix of WIDTH x 4 WIDTH has five blocks and a part of one


class Wide(nn.Module):
    """Parameters of several blocks: slices of two to four ranks begin in the middle of them."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH),
            nn.Tanh(),
            nn.Dropout(dropout),
            nn.Linear(4 * WIDTH, WIDTH),
            nn.LayerNorm(WIDTH),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def wide_step(model: nn.Module, micro_batch: MicroBatch, step: int) -> None:
    model(numbers(4, WIDTH, key=f"step {step} leaf {micro_batch.index}")).square().mean().backward()


class TiedWide(nn.Module):
    """Embedding and output layer are one parameter of two blocks and a bit; the positions are frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(130, WIDTH)
        self.positions = nn.Parameter(torch.zeros(6, WIDTH), requires_grad=False)
        self.middle = nn.Linear(WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, 130, bias=False)
        self.out.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(torch.tanh(self.middle(self.tokens(tokens) + self.positions)))


def tokens_step(model: nn.Module, micro_batch: MicroBatch, step: int) -> None:
    tokens = (numbers(6, key=f"tokens {step} {micro_batch.index}").abs() * 1000).long() % 130
    F.cross_entropy(model(tokens), tokens.flip(0)).backward()


class WideImages(nn.Module):
    """Convolutions in channels_last: in memory their weights are not in logical order."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 40, 3), nn.ReLU(), nn.Conv2d(40, 36, 3))
        self.out = nn.Linear(36, 3)
        self.to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.features(x.contiguous(memory_format=torch.channels_last)).mean((2, 3)))


def low(model: nn.Module, batch: Tensor) -> Tensor:
    """The loss of a model that computes in bfloat16."""
    return model(batch.bfloat16()).float().square().mean()


def images_step(model: nn.Module, micro_batch: MicroBatch, step: int) -> None:
    model(numbers(2, 3, 7, 7, key=f"images {step} {micro_batch.index}")).square().mean().backward()


def train_fully(run: Run, mesh: Mesh, **options: Any) -> Result:
    """The declared steps of ``run`` on the ranks of ``mesh``, with ``options`` for ``fully_shard``."""
    model = fully_shard(filled(run.module()), mesh, find_unused_parameters=True, **options)
    optimizer = ShardedOptimizer(run.groups(model), run.kind, shard_group_of(mesh), **run.options)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5) if run.scheduled else None
    for step in range(run.num_steps):
        for micro_batch in model.micro_batches(run.num_leaves):
            run.leaf_step(model, micro_batch, step)
        if run.clip is not None:
            clip_grad_norm_(model.parameters(), run.clip)
        optimizer.step()
        optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()
    result = Result(full_state_dict(model), copied(optimizer.state_dict()))
    optimizer.close()
    model.close()
    return result


def assert_bits_of_one(mesh: Mesh, run: Run, **options: Any) -> None:
    """Weights and moments on every rank are those of one process that shards nothing."""
    ours, expected = train_fully(run, mesh, **options), plain(run)
    assert_same(ours.module, expected.module, "module")
    assert_same(ours.optimizer, expected.optimizer, "optimizer")
