"""The one parity assertion: k steps on any placement give the bits of one process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.optim import Optimizer

from instep.mesh.mesh import Mesh, build
from instep.reduce.norm import clip_grad_norm_
from instep.replicate.wrapper import DataParallel
from instep.rng.keys import derive
from instep.step.micro_batches import MicroBatch
from tests.state_oracle import Entry, state_entries

LeafStep = Callable[[nn.Module, MicroBatch, int], None]
"""Forward and backward of one leaf in step number k."""


def adamw(parameters: Iterable[Tensor]) -> Optimizer:
    return torch.optim.AdamW(parameters, lr=0.02, fused=False, foreach=False)


def momentum(parameters: Iterable[Tensor]) -> Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, fused=False, foreach=False)


@dataclass(frozen=True)
class Training:
    """What is trained: all that the bits may depend on, and no placement."""

    module: Callable[[], nn.Module]
    leaf_step: LeafStep
    num_leaves: int = 8
    optimizer: Callable[[Iterable[Tensor]], Optimizer] = adamw
    clip: float | None = None
    num_steps: int = 2  # the first plans, and the second goes by the plan


def numbers(*shape: int, key: str, dtype: torch.dtype = torch.float32) -> Tensor:
    """Normal numbers that depend on ``key`` alone; torch's default generator is left in peace."""
    generator = torch.Generator().manual_seed(derive(0, key) % (1 << 31))
    return torch.randn(shape, generator=generator, dtype=dtype)


def filled(module: nn.Module) -> nn.Module:
    """``module`` with parameters that depend on their names alone, the same in every thread."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            fill(name, parameter)
    return module


def fill(name: str, parameter: Tensor) -> None:
    """``parameter`` has values that depend on its name alone."""
    kind = parameter.dtype if parameter.is_complex() else torch.float32
    parameter.copy_(0.3 * numbers(*parameter.shape, key=name, dtype=kind))


def train(training: Training, mesh: Mesh, **options: Any) -> list[Entry]:
    """Parameters, buffers and moments after the declared steps of ``training`` on ``mesh``."""
    module = filled(training.module())
    model = DataParallel(module, process_group=mesh, find_unused_parameters=True, **options)
    optimizer = training.optimizer(module.parameters())
    for step in range(training.num_steps):
        for micro_batch in model.micro_batches(training.num_leaves):
            training.leaf_step(model, micro_batch, step)
        _update(training, module, optimizer)
    model.close()
    return _kept(module, optimizer)


def train_by_hand(training: Training) -> list[Entry]:
    """What ``train`` should give, for models without dropout: autograd, plain adds in the tree's order."""
    module = filled(training.module())
    optimizer = training.optimizer(module.parameters())
    for step in range(training.num_steps):
        leaves = [MicroBatch(index, training.num_leaves) for index in range(training.num_leaves)]
        gradients = []
        with norms_by_definition(module):
            for micro_batch in leaves:
                training.leaf_step(module, micro_batch, step)
                gradients.append([p.grad for p in module.parameters()])
                module.zero_grad()
        scale = 1.0 / sum(micro_batch.weight for micro_batch in leaves)
        for parameter, by_leaf in zip(module.parameters(), zip(*gradients, strict=True), strict=True):
            total = _tree_sum([None if x is None else wide(x) for x in by_leaf])
            if total is not None:
                parameter.grad = (total * scale).to(parameter.dtype)
        _update(training, module, optimizer)
    return _kept(module, optimizer)


@contextmanager
def norms_by_definition(module: nn.Module) -> Iterator[None]:
    """A declared step: running statistics follow those of its forwards, one after the other, at its end."""
    norms = [m for m in module.modules() if isinstance(m, _NormBase) and m.training and m.track_running_stats]
    before = [[x.clone() for x in m.buffers()] for m in norms]
    found: list[tuple[Any, Tensor, Tensor]] = []

    def measure(m: Any, args: Any, output: Any) -> None:
        if torch._C._current_graph_task_id() != -1:  # checkpointing computes it again
            return
        function = F.batch_norm if isinstance(m, _BatchNorm) else F.instance_norm
        mean, variance = torch.zeros_like(m.running_mean), torch.zeros_like(m.running_var)
        with torch.no_grad():
            function(args[0], mean, variance, None, None, True, momentum=1.0)
        found.append((m, mean, variance))

    handles = [m.register_forward_hook(measure) for m in norms]
    yield
    for handle, m, values in zip(handles, norms, before, strict=True):
        handle.remove()
        for x, value in zip(m.buffers(), values, strict=True):
            x.copy_(value)
    for m, mean, variance in found:
        m.num_batches_tracked += 1
        weight = 1.0 / float(m.num_batches_tracked) if m.momentum is None else m.momentum
        m.running_mean.copy_(torch.lerp(m.running_mean, mean, weight))
        m.running_var.copy_(torch.lerp(m.running_var, variance, weight))


def wide(x: Tensor) -> Tensor:
    """A leaf as a node of the tree: not narrower than float32."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def _tree_sum(leaves: list[Tensor | None]) -> Tensor | None:
    """The sum of ``leaves`` by the definition of the tree; None is a leaf without a gradient."""
    if len(leaves) == 1:
        return leaves[0]
    middle = 1
    while 2 * middle < len(leaves):
        middle *= 2
    left, right = _tree_sum(leaves[:middle]), _tree_sum(leaves[middle:])
    if left is None or right is None:
        return right if left is None else left
    return left + right


def _update(training: Training, module: nn.Module, optimizer: Optimizer) -> None:
    if training.clip is not None:
        clip_grad_norm_(module.parameters(), training.clip)
    optimizer.step()
    optimizer.zero_grad()


def _kept(module: nn.Module, optimizer: Optimizer) -> list[Entry]:
    return [(name, x.detach().clone()) for name, x in state_entries(module, optimizer)]


def world_of_one() -> Mesh:
    """A mesh of this process alone, also where there is a default group."""
    return build(None, 0, 1)


_references: dict[Training, list[Entry]] = {}
_lock = threading.Lock()


def bits_of_one(training: Training) -> list[Entry]:
    """``train`` on one rank, once for all who ask in this process."""
    with _lock:
        if training not in _references:
            _references[training] = train(training, world_of_one())
        return _references[training]


def assert_bits_of_one(mesh: Mesh, training: Training, **options: Any) -> None:
    """This rank of ``mesh``, trained with ``options`` for ``DataParallel``, has the bits of one process."""
    assert_same_bits(train(training, mesh, **options), bits_of_one(training))


def assert_same_bits(ours: list[Entry], expected: list[Entry]) -> None:
    assert [name for name, _ in ours] == [name for name, _ in expected]
    for (name, x), (_, y) in zip(ours, expected, strict=True):
        assert x.dtype == y.dtype and x.shape == y.shape, name
        differ = (bits(x) != bits(y)).sum().item()
        assert not differ, (
            f"{name}: {differ} of {x.numel()} elements differ, {x.flatten()[:3]} {y.flatten()[:3]}"
        )


def bits(x: Tensor) -> Tensor:
    """The bytes of ``x``, one row per element: unlike ==, they tell 0.0 from -0.0."""
    return x.detach().clone(memory_format=torch.contiguous_format).reshape(-1, 1).view(torch.uint8)
