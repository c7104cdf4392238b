"""The same losses as torch's own sharding, to rounding: FSDP2 and ZeroRedundancyOptimizer."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from instep.mesh.mesh import Mesh
from instep.models.config import GPTConfig
from instep.models.transformer import GPT
from instep.replicate.wrapper import DataParallel
from instep.shard.fully import fully_shard
from instep.shard.optimizer import ShardedOptimizer
from tests.replicate.nets import conv_net
from tests.world import world

STEPS = 4
ADAM = {"lr": 3e-3}


def transformer() -> nn.Module:
    torch.manual_seed(7)
    return GPT(GPTConfig(context=16, layers=3, width=32, heads=4, tied=True))


def conv() -> nn.Module:
    torch.manual_seed(7)
    return conv_net(lambda channels: nn.GroupNorm(8, channels))


def batch(kind: str, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rank)
    if kind == "transformer":
        tokens = torch.randint(256, (4, 17), generator=generator)
        return tokens[:, :-1], tokens[:, 1:]
    return torch.randn(4, 3, 8, 8, generator=generator), torch.randint(10, (4,), generator=generator)


MODELS: dict[str, Callable[[], nn.Module]] = {"transformer": transformer, "conv": conv}


def losses(kind: str, model: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> Tensor:
    found = []
    x, y = batch(kind, rank)
    for _ in range(STEPS):
        out = model(x)
        loss = F.cross_entropy(out.float().flatten(0, -2), y.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach())
    return torch.stack(found)


# Each two of the three settings together; the rest with `make slow`.
TWO_TOGETHER = [
    pytest.param(kind, stage, dtype, marks=[pytest.mark.slow] * ((i + stage + (dtype is torch.bfloat16)) % 2))
    for i, kind in enumerate(MODELS)
    for stage in (2, 3)
    for dtype in (torch.float32, torch.bfloat16)
]


@world(2, by="process")
@pytest.mark.parametrize(("kind", "stage", "dtype"), TWO_TOGETHER)
def test_the_losses_are_those_of_fsdp2(mesh: Mesh, kind: str, stage: int, dtype: torch.dtype) -> None:
    theirs, ours = MODELS[kind](), MODELS[kind]()
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for block in getattr(theirs, "blocks", ()):
        fsdp2(block, mp_policy=policy)
    fsdp2(theirs, mp_policy=policy)
    expected = losses(kind, theirs, torch.optim.AdamW(theirs.parameters(), **ADAM), mesh.rank)
    compute = None if dtype == torch.float32 else dtype
    fully_shard(ours, mesh, stage=stage, compute_dtype=compute)
    found = losses(kind, ours, torch.optim.AdamW(ours.parameters(), **ADAM), mesh.rank)
    assert expected[-1] < expected[0]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0.0)


@world(2, by="process")
@pytest.mark.parametrize("kind", list(MODELS))
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
def test_the_losses_are_those_of_zero_redundancy_optimizer(mesh: Mesh, kind: str) -> None:
    theirs, ours = DistributedDataParallel(MODELS[kind]()), DataParallel(MODELS[kind](), process_group=mesh)
    from torch.distributed.optim import ZeroRedundancyOptimizer  # its import warns

    zero = ZeroRedundancyOptimizer(theirs.parameters(), torch.optim.AdamW, **ADAM)
    expected = losses(kind, theirs, zero, mesh.rank)
    sharded = ShardedOptimizer(ours.parameters(), torch.optim.AdamW, mesh, **ADAM)
    torch.testing.assert_close(losses(kind, ours, sharded, mesh.rank), expected, rtol=1e-5, atol=0.0)
