"""A world that meets on its own needs no default group, and can end and be made again after a death."""

from __future__ import annotations

import json
import os
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import instep
from instep.errors import PeerLost
from instep.launch.launch import launch
from instep.launch.launch_environment import detect
from instep.mesh import join
from instep.mesh.join import join_store
from instep.net.process_group import _lost, _sweep

PATIENCE_S = 30
OPERATION = "the gathering of a test"


def of_one(directory: Path) -> None:
    mesh = instep.init()
    x = torch.ones(2)
    dist.all_reduce(x)
    sampler = torch.utils.data.DistributedSampler([1, 2, 3], shuffle=False)
    found = [dist.get_rank(), dist.get_world_size(), x.tolist(), list(sampler)]
    mesh.close()
    (directory / "found").write_text(json.dumps([*found, dist.is_initialized()]))


def test_a_launched_world_of_one_has_a_default_group(tmp_path):
    """Scripts with ``dist.*`` and a ``DistributedSampler`` ran on two ranks, and on one they did not."""
    launch(of_one, (tmp_path,), ranks=1)
    assert json.loads((tmp_path / "found").read_text()) == [0, 1, [1.0, 1.0], [0, 1, 2], False]


def place_and_store(directory: Path, name: str, size: int) -> tuple[int, dist.Store]:
    rank = detect(os.environ).rank
    return rank, dist.FileStore(str(directory / name), size)


def use(directory: Path, backend: str | None) -> None:
    rank, store = place_and_store(directory, "store", 4)
    mesh = join_store(store, rank, 4, backend=backend, dp=2, tp=2, timeout_s=PATIENCE_S)
    assert not dist.is_initialized()
    assert [mesh.along[name].size for name in ("dp", "tp")] == [2, 2]
    out = torch.empty(4, dtype=torch.int64)
    mesh.world.group.all_gather(out, torch.tensor([rank]), OPERATION)
    pg = mesh["tp"].whole.pg
    assert pg is not None and pg is mesh["tp"].whole.pg
    x = torch.tensor([rank])
    pg.allreduce([x]).wait()
    shared = mesh.world.group.map_all([mesh.world.group.allocate(64, 64, mesh.device).tensor], OPERATION)
    found = [out.tolist(), x.item(), shared is not None, _same_after(mesh, rank)]
    mesh.close()
    mesh.close()
    (directory / f"rank {rank}").write_text(json.dumps(found))


def _same_after(mesh: Any, rank: int) -> list[float]:
    model = instep.DataParallel(nn.Linear(2, 1, bias=False), process_group=mesh)
    model(torch.ones(1, 2) * rank).sum().backward()
    gradient = model.module.weight.grad
    model.close()
    return gradient.flatten().tolist()


@pytest.mark.parametrize(("backend", "shares"), [(None, True), ("gloo", False)])
def test_a_grid_without_a_default_group_computes(tmp_path, backend, shares):
    launch(use, (tmp_path, backend), ranks=4)
    for rank in range(4):
        tp, mean = (1 if rank < 2 else 5), (rank % 2 + rank % 2 + 2) / 2
        found = json.loads((tmp_path / f"rank {rank}").read_text())
        assert found == [[0, 1, 2, 3], tp, shares, [mean, mean]]


def leave_a_hanging_rank(directory: Path) -> None:
    """Rank 1 never comes; rank 0 is to be free of it at once, as is a thread of it, and to end."""
    join.backend_timeout = lambda timeout_s: timedelta(seconds=60)  # type: ignore[attr-defined]
    rank, store = place_and_store(directory, "store", 2)
    mesh = join_store(store, rank, 2, backend="gloo", timeout_s=1)
    if rank == 1:
        while not (directory / "closed").exists():
            pass
        mesh.close()
        return
    with pytest.raises(PeerLost, match="never came: rank 1"):
        mesh.world.group.all_gather(torch.empty(2), torch.ones(1), OPERATION)
    pg = mesh.world.group.pg
    assert pg is not None
    with pytest.raises(PeerLost, match="never came: rank 1"):
        mesh.world.group.run(lambda: pg.recv([torch.empty(1)], 1, 0).wait() and None, OPERATION)
    began = time.monotonic()
    mesh.close()
    while _lost:
        _sweep()
    (directory / "closed").write_text(json.dumps(time.monotonic() - began))


def test_what_a_closed_group_still_owes_ends_at_once(tmp_path):
    launch(leave_a_hanging_rank, (tmp_path,), ranks=2)
    assert json.loads((tmp_path / "closed").read_text()) < 30  # half of gloo's own deadline
