"""What torch builds on a process group gives on shm what it gives on gloo, also inside of torch.compile."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

import instep
from instep.launch.launch import launch
from instep.launch.rank_exit import RankFailed
from tests.shm.numbers import same_bits
from tests.world import world

PATIENCE_S = 20
STEPS = 3
Numbers = dict[str, Tensor]


def gives_what_gloo_gives(run: Callable[..., Numbers], **kwargs: Any) -> Numbers:
    """``run`` on a group of each backend: the same tensors, in every bit."""
    found = {}
    for backend in ("gloo", "shm"):
        torch.manual_seed(7)
        found[backend] = run(dist.new_group(backend=backend), **kwargs)
    assert found["gloo"].keys() == found["shm"].keys() != set()
    for name, expected in found["gloo"].items():
        assert same_bits(found["shm"][name], expected), name
    return found["shm"]


class Net(nn.Module):
    """With a statistic, and a layer that is not always used."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.norm = nn.BatchNorm1d(16)
        self.second = nn.Linear(16, 16)
        self.last = nn.Linear(16, 3)

    def forward(self, x: Tensor, *, skip: bool = False) -> Tensor:
        x = self.norm(self.first(x)).relu()
        return self.last(x if skip else self.second(x).relu())


def batches(rank: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 + rank)
    return [torch.randn(5, 8, generator=generator) for _ in range(STEPS)]


def state(module: nn.Module) -> Numbers:
    grads = {f"{name}.grad": p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}
    return {**{name: x.clone() for name, x in module.state_dict().items()}, **grads}


def train(model: nn.Module, optimizer: torch.optim.Optimizer, *, skip: bool = False) -> None:
    for n, x in enumerate(batches(dist.get_rank())):
        optimizer.zero_grad()
        model(x, **({"skip": n % 2 == 0} if skip else {})).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"bucket_cap_mb": 0.0005},
        {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.001},
        {"find_unused_parameters": True},
        {"static_graph": True, "broadcast_buffers": False},
    ],
    ids=lambda options: ", ".join(options) or "default",
)
@world(2, by="process", backend="shm")
def test_distributed_data_parallel(mesh, options):
    gives_what_gloo_gives(data_parallel, **options)


def data_parallel(pg, **options):
    torch.manual_seed(dist.get_rank())  # the constructor makes them equal
    model = DistributedDataParallel(Net(), process_group=pg, **options)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    train(model, optimizer, skip="find_unused_parameters" in options)
    with model.no_sync():  # gradients accumulate
        model(batches(dist.get_rank())[0]).sum().backward()
    local = {f"local {name}": x for name, x in state(model).items()}
    model(batches(dist.get_rank())[1]).sum().backward()
    return {**local, **state(model)}


def die_in_backward(directory: Path) -> None:
    mesh = instep.init(backend="shm", timeout_s=PATIENCE_S)
    model = DistributedDataParallel(Net(), bucket_cap_mb=0.0005)
    train(model, torch.optim.SGD(model.parameters(), 0.1))
    if mesh.rank == 1:
        model.module.first.weight.register_hook(lambda grad: os.kill(os.getpid(), signal.SIGKILL))
    try:
        model(batches(0)[0]).sum().backward()
    except RuntimeError as error:
        (directory / "told").write_text(json.dumps([str(error), mesh.world.group.peers.table[1].pid]))


def test_the_death_of_a_rank_in_backward_is_told_by_data_parallel(tmp_path):
    with pytest.raises(RankFailed, match=r"rank 1 of 2 .* was killed by SIGKILL"):
        launch(die_in_backward, (tmp_path,), ranks=2, grace_s=PATIENCE_S)
    text, pid = json.loads((tmp_path / "told").read_text())
    assert "PeerLost" in text
    assert f"rank 1 (pid {pid} on " in text and " died: rank 0 waited " in text
    assert "in all_reduce" in text


@pytest.mark.parametrize("mixed", [False, True], ids=["float32", "bfloat16"])
@world(2, by="process", backend="shm")
def test_fully_shard(mesh, mixed):
    gives_what_gloo_gives(fully_sharded, mixed=mixed)


def fully_sharded(pg, mixed):
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3))
    own = DeviceMesh.from_group(pg, "cpu")
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if mixed else MixedPrecisionPolicy()
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=own, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    norms = []
    for x in batches(dist.get_rank()):
        optimizer.zero_grad()
        model(x).float().square().mean().backward()
        norm: Any = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        norms.append(norm.full_tensor())
        optimizer.step()
    whole = {name: x.full_tensor() for name, x in model.state_dict().items()}
    return {**whole, "norms": torch.stack(norms)}


@world(2, by="process", backend="shm")
def test_distributed_tensors(mesh):
    gives_what_gloo_gives(distributes)


def distributes(pg):
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

    own = DeviceMesh.from_group(pg, "cpu")
    whole = torch.arange(35.0).view(7, 5)
    rows, columns = (distribute_tensor(whole, own, [Shard(dim)]) for dim in (0, 1))
    assert same_bits(rows.full_tensor(), whole) and same_bits(columns.full_tensor(), whole)
    partial = DTensor.from_local(whole * (dist.get_rank() + 1), own, [Partial()])
    return {
        "product": (rows @ columns.t().contiguous().redistribute(own, [Replicate()])).full_tensor(),
        "across": rows.redistribute(own, [Shard(1)]).to_local().clone(),
        "sum": partial.redistribute(own, [Replicate()]).to_local().clone(),
        "share": partial.redistribute(own, [Shard(0)]).to_local().clone(),
        "norm": rows.norm().full_tensor(),
    }


@world(2, by="process", backend="shm")
def test_functional_collectives(mesh):
    gives_what_gloo_gives(functions)


def functions(pg):
    x = torch.arange(12.0).view(6, 2) * (dist.get_rank() + 1)
    pairs = [x, x[:2] + 1]
    found = {
        "all_reduce": functional.all_reduce(x, "sum", pg),
        "average": functional.all_reduce(x, "avg", pg),
        "broadcast": functional.broadcast(x, 1, pg),
        "gathered": functional.all_gather_tensor(x, 0, pg),
        "gathered aside": functional.all_gather_tensor(x, 1, pg),
        "share": functional.reduce_scatter_tensor(x, "sum", 0, pg),
        "exchanged": functional.all_to_all_single(x, [4 - 2 * dist.get_rank()] * 2, [4, 2], pg),
    }
    lists = {
        "coalesced": functional.all_reduce_coalesced(pairs, "sum", pg),
        "gathered coalesced": functional.all_gather_into_tensor_coalesced(pairs, pg),
        "shares": functional.reduce_scatter_tensor_coalesced(pairs, "sum", [0, 0], pg),
    }
    found |= {f"{name} {i}": part for name, parts in lists.items() for i, part in enumerate(parts)}
    return {name: functional.wait_tensor(part).clone() for name, part in found.items()}


@world(3, by="process", backend="shm")
def test_every_function_of_torch_distributed(mesh):
    """On three ranks and integers, where no order can show."""
    gives_what_gloo_gives(every_function)


def every_function(pg):
    me, x = dist.get_rank(), torch.arange(12) * (dist.get_rank() + 2)
    whole, share = torch.zeros(36, dtype=torch.int64), torch.zeros(4, dtype=torch.int64)
    rows, gathered = list(whole.clone().split(12)), list(whole.clone().split(12)) if me == 0 else None
    found = {name: x.clone() for name in ("SUM", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")}
    for name, y in found.items():
        dist.all_reduce(y, getattr(dist.ReduceOp, name), group=pg)
    found |= {name: x.clone() for name in ("broadcast", "reduce", "scatter", "reduce_scatter", "exchanged")}
    dist.broadcast(found["broadcast"], 2, group=pg)
    dist.reduce(found["reduce"], 1, group=pg)
    if me != 1:
        del found["reduce"]  # which gloo has changed
    dist.all_gather(rows, x, group=pg)
    dist.all_gather_into_tensor(whole, x, group=pg)
    dist.gather(x, gathered, 0, group=pg)
    dist.scatter(found["scatter"], gathered, 0, group=pg)
    dist.reduce_scatter_tensor(share, x, group=pg)
    dist.reduce_scatter(found["reduce_scatter"], [x + n for n in range(3)], group=pg)
    dist.all_to_all_single(found["exchanged"], x, group=pg)
    dist.barrier(group=pg)
    return {**found, "rows": torch.cat(rows), "whole": whole, "share": share}


def broadcast(x: Tensor) -> Tensor:
    dist.broadcast(x, 0)
    return x * 2


def all_reduce(x: Tensor) -> Tensor:
    dist.all_reduce(x, async_op=True).wait()
    return x * 2


def send(x: Tensor) -> Tensor:
    if dist.get_rank() == 0:
        dist.send(x, 1)
    else:
        dist.recv(x, 0)
    return x


def barrier(x: Tensor) -> Tensor:
    dist.barrier()
    return x * 2


def trained(x: Tensor) -> Tensor:
    torch.manual_seed(0)
    return nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))(
        x.view(1, 4).expand(2, 4)
    )


COLLECTIVES = (broadcast, all_reduce, send, trained, barrier)


@pytest.mark.timeout(300)
@world(2, by="process", backend="shm")
def test_a_compiled_function_gives_what_it_gives_without(mesh):
    """torch.compile traced the methods of the group and failed; after that the eager barrier failed, too."""
    assert dist.get_backend() == "shm"
    for collective in COLLECTIVES:
        x = torch.arange(4.0) * (mesh.rank + 1)
        compiled = torch.compile(collective, backend="eager")(x.clone())
        assert torch.equal(compiled, collective(x)), collective.__name__
        torch._dynamo.reset()
    dist.barrier()
