"""Collectives inside of ``torch.compile``: they break the graph, and give what they give without it.

torch.compile traced the Python methods of the group, and failed at the first attribute of it; after that the
eager barrier failed, too."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.world import world


def broadcast(x: Tensor) -> Tensor:
    dist.broadcast(x, 0)
    return x * 2


def all_reduce(x: Tensor) -> Tensor:
    dist.all_reduce(x, async_op=True).wait()
    return x * 2


def reduce_and_scatter(x: Tensor) -> Tensor:
    dist.reduce(x, 0)
    y = torch.empty(2)
    dist.scatter(y, list(x.chunk(2)) if dist.get_rank() == 0 else None, 0)
    return y


def gather(x: Tensor) -> Tensor:
    y = [torch.empty(4) for _ in range(2)] if dist.get_rank() == 0 else None
    dist.gather(x, y, 0)
    return x if y is None else y[1]


def send(x: Tensor) -> Tensor:
    if dist.get_rank() == 0:
        dist.send(x, 1)
    else:
        dist.recv(x, 0)
    return x


def all_to_all(x: Tensor) -> Tensor:
    y = [torch.empty(2), torch.empty(2)]
    dist.all_to_all(y, list(x.chunk(2)))
    return torch.cat(y)


def barrier(x: Tensor) -> Tensor:
    dist.barrier()
    return x * 2


def trained(x: Tensor) -> Tensor:
    torch.manual_seed(0)
    return nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))(
        x.view(1, 4).expand(2, 4)
    )


COLLECTIVES = (broadcast, all_reduce, reduce_and_scatter, gather, send, all_to_all, trained, barrier)


@pytest.mark.timeout(300)
@world(2, by="process", backend="shm")
def test_a_compiled_function_gives_what_it_gives_without(mesh):
    assert dist.get_backend() == "shm"
    for collective in COLLECTIVES:
        x = torch.arange(4.0) * (mesh.rank + 1)
        compiled = torch.compile(collective, backend="eager")(x.clone())
        assert torch.equal(compiled, collective(x)), collective.__name__
        torch._dynamo.reset()
    dist.barrier()
