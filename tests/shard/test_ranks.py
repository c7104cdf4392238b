"""Ranks that differ, fail or stay away: the others are told who and what, and soon."""

from __future__ import annotations

import json
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.optim import SGD, Adam, AdamW

from instep.errors import Desync, PeerLost
from instep.events import PARAMETER_UPDATE
from instep.launch.launch import RankFailed, launch
from instep.mesh.join import init
from instep.mesh.mesh import Mesh
from instep.shard.optimizer import ShardedOptimizer
from tests.parity import world_of_one
from tests.replicate.replicas import equal_everywhere
from tests.shard.given import SHAPES, parameters, set_gradients, steps
from tests.shard.trained import assert_same, copied
from tests.world import world


@pytest.fixture
def noticed() -> threading.Event:
    return threading.Event()


def of_rank_one(mesh: Mesh, name: str) -> tuple[Any, type, dict[str, Any]]:
    """Parameters, class and options; on rank 1 one thing is different."""
    given, kind, options = parameters(), AdamW, {"lr": 0.1}
    if mesh.rank == 1:
        match name:
            case "order":
                given[0], given[1] = given[1], given[0]
            case "dtype":
                given[2] = torch.nn.Parameter(given[2].double())
            case "frozen":
                given[3].requires_grad_(False)
            case "number":
                given.pop()
            case "class":
                kind = Adam
            case "option":
                options = {"lr": 0.2}
            case "groups":
                return [{"params": given[:3]}, {"params": given[3:]}], kind, options
            case "names":
                return [(str(i), p) for i, p in enumerate(given)], kind, options
            case "nothing at all":
                return [], kind, options
    return given, kind, options


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("order", r"parameter 0 of group 0: shape \(5, 4096\), .* rank 0, but .* shape \(4099,\)"),
        ("dtype", r"parameter 2 of group 0: .* float32, .* on rank 0, but .* float64, .* on rank 1"),
        ("frozen", r"parameter 3 of group 0: .* trainable on rank 0, but .* frozen on rank 1"),
        ("number", r"parameter 7 of group 0: .* on rank 0, but nothing on rank 1"),
        ("class", r"class torch.optim.adamw.AdamW on rank 0, but class torch.optim.adam.Adam on rank 1"),
        ("option", r"options lr=0.1 on rank 0, but options lr=0.2 on rank 1"),
        ("groups", r"parameter 3 of group 0: .* on rank 0, but parameter group 1: lr=0.1 on rank 1"),
        ("names", r"parameter 0 of group 0: .* on rank 0, but parameter 0 of group 0 '0'"),
        ("nothing at all", r"optimizer got an empty parameter list"),
    ],
)
@world(2)
def test_ranks_that_differ_at_construction_are_told_where(mesh: Mesh, name: str, message: str) -> None:
    given, kind, options = of_rank_one(mesh, name)
    with pytest.raises(ValueError, match=message):
        ShardedOptimizer(given, kind, mesh, **options)
    good = parameters()
    optimizer = ShardedOptimizer(good, SGD, mesh, lr=0.1)  # and can go on
    steps(optimizer, good, 1)
    optimizer.close()


@world(3)
def test_an_update_that_raises_on_one_rank_raises_on_all(mesh: Mesh) -> None:
    ours = parameters()
    optimizer = ShardedOptimizer(ours, AdamW, mesh)
    steps(optimizer, ours, 1)
    saved, weights = copied(optimizer.state_dict()), [p.detach().clone() for p in ours]
    if mesh.rank == 1:
        handle = optimizer._inner.register_step_pre_hook(lambda *_: 1 / 0)
    kind, message = (
        (ZeroDivisionError, "division by zero")
        if mesh.rank == 1
        else (
            Desync,
            "step 1 of the sharded optimizer: rank 1 raised, its own traceback has the cause; the ra",
        )
    )
    with pytest.raises(kind, match=message):
        steps(optimizer, ours, 1, first=1)
    for call in (optimizer.step, optimizer.state_dict, optimizer.sharded_state_dict):
        with pytest.raises(RuntimeError, match="cannot go on, because in step 1 rank 1 raised"):
            call()
    if mesh.rank == 1:
        handle.remove()
    with torch.no_grad():
        for p, x in zip(ours, weights, strict=True):
            p.copy_(x)
    optimizer.load_state_dict(saved)
    steps(optimizer, ours, 1, first=1)
    expected = parameters()
    plain = AdamW(expected)
    steps(plain, expected, 2)
    assert_same([p.detach() for p in ours], [p.detach() for p in expected], "weights")
    optimizer.close()


@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_other_learning_rates_and_other_gradients_are_an_error(backend: str) -> None:
    @world(2, backend=backend)
    def body(mesh: Mesh) -> None:
        ours = parameters()
        optimizer = ShardedOptimizer(ours, AdamW, mesh, lr=0.1)
        optimizer.param_groups[0]["lr"] = 0.1 * (1 + mesh.rank)
        with pytest.raises(Desync, match="rank 1 has other options in its parameter groups"):
            steps(optimizer, ours, 1)
        optimizer.close()
        optimizer = ShardedOptimizer(ours, AdamW, mesh, lr=0.1)
        set_gradients(ours, 0)
        if mesh.rank == 1:
            ours[1].grad = None
        with pytest.raises(Desync, match="rank 1 has gradients for other parameters than rank 0"):
            optimizer.step()
        optimizer.close()

    body()


@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_a_rank_that_does_not_step_is_found_by_the_deadline(backend: str, noticed: threading.Event) -> None:
    @world(2, backend=backend, timeout_s=2)
    def body(mesh: Mesh) -> None:
        ours = parameters()
        optimizer = ShardedOptimizer(ours, AdamW, mesh)
        steps(optimizer, ours, 1)
        if mesh.rank == 0:
            with pytest.raises(PeerLost, match=r"the vote on step 1, and never came: rank 1") as failure:
                steps(optimizer, ours, 1, first=1)
            assert failure.value.ranks == (1,)
            with pytest.raises(RuntimeError, match=r"is closed, because rank 0 waited .* make another one"):
                optimizer.step()
            noticed.set()
        assert noticed.wait(30)
        optimizer.close()

    body()


@world(2, backend="shm")
def test_nobody_s_memory_is_written_before_all_have_come_or_after_any_has_gone(
    mesh: Mesh, noticed: threading.Event
) -> None:
    """Rank 1 comes late, then writes late: rank 0 waits, and rank 1 keeps its weights until it comes."""
    ours = parameters()
    optimizer = ShardedOptimizer(ours, AdamW, mesh)
    before = [p.detach().clone() for p in ours]
    set_gradients(ours, 0)
    if mesh.rank == 1:
        assert not noticed.wait(0.3)  # rank 0 is in step()
        assert_same([p.detach() for p in ours], before, "weights")
        share = optimizer.shards.spaces[0].share

        def write_late(operation: str) -> bool:
            assert not noticed.wait(0.3)
            return share(operation)

        optimizer.shards.spaces[0].share = write_late
    optimizer.step()
    if mesh.rank == 0:
        noticed.set()
    assert equal_everywhere(mesh, ours)
    optimizer.close()


def lose_rank_one_in_its_update(path: str, backend: str) -> None:
    mesh = init(timeout_s=30)
    ours = parameters()
    optimizer = ShardedOptimizer(ours, AdamW, dist.new_group(backend=backend))
    steps(optimizer, ours, 1)
    if mesh.rank == 1:
        optimizer._inner.register_step_pre_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    try:
        steps(optimizer, ours, 1, first=1)
    except PeerLost as error:
        (Path(path) / "report").write_text(json.dumps([error.ranks, error.operation]))
    alone = ShardedOptimizer(ours, AdamW, world_of_one())  # the parameters can go on
    steps(alone, ours, 1)


@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_a_rank_that_dies_in_its_update_is_named(tmp_path: Path, backend: str) -> None:
    with pytest.raises(RankFailed, match=r"rank 1 of 2 .* was killed by SIGKILL"):
        launch(lose_rank_one_in_its_update, (str(tmp_path), backend), ranks=2)
    report = json.loads((tmp_path / "report").read_text())
    assert report == [[1], "the vote on step 1"]


@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_the_update_and_the_wait_for_others_are_recorded(backend: str) -> None:
    @world(2, backend=backend)
    def body(mesh: Mesh) -> None:
        ours = parameters()
        optimizer = ShardedOptimizer(ours, AdamW, mesh)
        steps(optimizer, ours, 1)
        (update,) = [event for event in mesh.recorder.events if event.name == "update"]
        (wait,) = [event for event in mesh.recorder.events if event.name == PARAMETER_UPDATE]
        assert (update.lane, wait.lane) == ("compute", "host")
        assert update.end_ns <= wait.start_ns
        # 5 + 2 (what is left of one holds the small ones) + 3 + 4 blocks, in two slices of whole blocks
        assert wait.bytes == 7 * 4096 * 4
        assert sum(shape.numel() for shape in map(torch.Size, SHAPES)) <= 14 * 4096
        optimizer.close()

    body()


@world(4)
def test_every_rank_keeps_its_part_of_the_moments_and_no_more(mesh: Mesh) -> None:
    given = parameters(((64, 4096), (4096, 16), (4096,), (16,), (8, 4096)))
    total = sum(p.numel() for p in given)
    optimizer = ShardedOptimizer(given, AdamW, mesh, fused=True)
    steps(optimizer, given, 2)
    held = sum(
        x.untyped_storage().nbytes()
        for state in optimizer._inner.state.values()
        for key, x in state.items()
        if key != "step"
    )
    assert held <= 8 * (total / 4 + 4096)
    piece_bytes = sum(
        x.nbytes
        for piece in optimizer.sharded_state_dict()["pieces"]
        for key, x in piece["state"].items()
        if key != "step"
    )
    assert piece_bytes == held
    sums = mesh.world.group.all_gather_bytes(str(held).encode(), "the sum of a test")
    assert sum(map(int, sums)) == 8 * total
    optimizer.close()
