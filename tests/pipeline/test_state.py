"""What holds a pipeline's state: sharded optimizers, models from the meta device, checkpoints, memory."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import instep
from instep.bench.memory_usage import memory_usage
from instep.mesh.mesh import Mesh, build
from tests.pipeline.test_runtime import STEPS, G, gpt, of_one_rank, sha256, train, unfilled
from tests.training_state import training_state
from tests.world import world

ADAMW = torch.optim.AdamW


def sharded(model: nn.Module, mesh: Mesh | None = None, **options: Any) -> instep.ShardedOptimizer:
    return instep.ShardedOptimizer(model.parameters(), ADAMW, mesh, lr=1e-2, **options)


def moments(optimizer: instep.ShardedOptimizer) -> Counter[int]:
    """How many elements this rank keeps moments for, by the parameter's number."""
    return Counter({i: x.last - x.first for i, x in optimizer.shards.held.items()})


@world(4, pp=2, dp=2, backend="shm")
@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
def test_a_sharded_optimizer_divides_what_the_ranks_of_a_stage_have(mesh: Mesh, schedule: str) -> None:
    net = gpt()
    sizes = [p.numel() for p in net.parameters()]
    model = instep.Pipeline(net, mesh, schedule, G)
    optimizer = sharded(model, mesh)
    train(model, optimizer)
    assert sha256(model, optimizer) == of_one_rank()
    told = mesh.world.group.all_gather_bytes(json.dumps([*moments(optimizer).items()]).encode(), "counts")
    counted = sum((Counter(dict(json.loads(row))) for row in told), Counter[int]())
    assert [counted[i] for i in range(len(sizes))] == sizes
    optimizer.close()
    model.close()


@world(4, pp=2, dp=2)
def test_its_state_dict_is_that_of_all_layers_and_fits_a_plain_optimizer(mesh: Mesh) -> None:
    model = instep.Pipeline(gpt(), mesh, "1f1b", G)
    optimizer = sharded(model, mesh)
    train(model, optimizer)
    whole, found = optimizer.state_dict(), sha256(model, optimizer)
    assert len(whole["state"]) == len(list(model.parameters()))
    with pytest.raises(RuntimeError, match=r"spread over 4 ranks"):
        len(optimizer.state)
    for state in optimizer.local_state.values():
        state["exp_avg"].zero_()
    assert sha256(model, optimizer) != found
    optimizer.load_state_dict(whole)
    assert sha256(model, optimizer) == found
    alone = gpt()
    plain = ADAMW(alone.parameters(), lr=1e-2)
    plain.load_state_dict(whole)
    assert all(plain.state[p]["exp_avg"].shape == p.shape for p in alone.parameters())
    optimizer.close()
    model.close()


@world(4, pp=2, dp=2)
def test_a_checkpoint_of_it_is_for_any_pipeline_and_for_none(mesh: Mesh, tmp_path: Path) -> None:
    model = instep.Pipeline(gpt(), mesh, "1f1b", G)
    optimizer = sharded(model, mesh)
    train(model, optimizer)
    instep.save(tmp_path, step=STEPS, model=model, optimizer=optimizer)
    expected = sha256(model, optimizer)
    optimizer.close()
    model.close()

    with torch.device("meta"):
        net = unfilled()
    other = instep.Pipeline(net, mesh, "zb-v", G, cuts=(1, 2, 4))
    again = ADAMW(other.parameters(), lr=1e-2)
    missing = r"have no values yet: call model.materialise\(\), or load a state"
    for early in (lambda: train(other, again), lambda: instep.full_state_dict(other)):
        with pytest.raises(ValueError, match=missing):
            early()
    assert instep.load(tmp_path, model=other, optimizer=again).step == STEPS
    assert sha256(other, again) == expected
    train(other, again)
    other.close()

    replicas = instep.DataParallel(gpt(), process_group=mesh["dp"])
    third = sharded(replicas, mesh["dp"])
    assert instep.load(tmp_path, model=replicas, optimizer=third).step == STEPS
    state = training_state(replicas, third)
    assert len(state.hashed()) > len(list(replicas.parameters()))
    third.close()
    replicas.close()


@world(2, pp=2, dp=1)
def test_what_cannot_divide_a_stage_is_refused(mesh: Mesh) -> None:
    expected = of_one_rank()
    instep.get.register_mesh(mesh)
    with pytest.raises(ValueError, match=r"nothing would use pp"):
        instep.ShardedOptimizer(gpt().parameters(), ADAMW)
    model = instep.Pipeline(gpt(), mesh, "1f1b", G)
    optimizer = sharded(model)  # of the registered mesh
    train(model, optimizer)
    assert sha256(model, optimizer) == expected
    optimizer.close()
    with pytest.raises(ValueError, match=r"ranks \[\d\] have the same ones, .* is for ranks \[0, 1\]"):
        sharded(model, mesh["pp"])
    for stage in (2, 3):
        with pytest.raises(ValueError, match=r"is in a pipeline already.*ShardedOptimizer"):
            instep.fully_shard(model.module, mesh["pp"], stage=stage)
    model.close()


@world(2, dp=2)
def test_a_sharded_module_makes_no_pipeline(mesh: Mesh) -> None:
    for stage in (2, 3):
        net = instep.fully_shard(gpt(), mesh, stage=stage)
        with pytest.raises(ValueError, match=r"is divided among ranks already.*ShardedOptimizer"):
            instep.Pipeline(net, build(None, 0, 1), "1f1b", G)
        net.close()


@world(2, pp=2, dp=1)
@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
def test_layers_of_a_model_from_the_meta_device_get_the_bits_of_one_rank(mesh: Mesh, schedule: str) -> None:
    with torch.device("meta"):
        net = unfilled()
    kept = list(net.parameters())
    model = instep.Pipeline(net, mesh, schedule, G)
    optimizer = sharded(model, mesh)
    model.materialise()
    assert all(a is b for a, b in zip(kept, net.parameters(), strict=True))
    train(model, optimizer)
    assert sha256(model, optimizer) == of_one_rank()
    optimizer.close()
    model.close()


@world(2, pp=2, dp=1)
def test_a_rank_fills_the_layers_that_it_has_and_no_others(mesh: Mesh) -> None:
    with torch.device("meta"):
        net = unfilled(tied=False)
    model = instep.Pipeline(net, mesh, "1f1b", G)
    filled: list[str] = []

    def init(name: str, values: Tensor) -> None:
        filled.append(name)
        values.fill_(1.0)

    model.materialise(init)
    assert filled == [name for name, p in net.named_parameters() if model.home.holds(p)]
    assert 0 < len(filled) < len(list(net.parameters()))
    assert all(bool((x == 1).all()) for x in instep.full_state_dict(model).values())
    model.close()


class Shifted(nn.Linear):
    """Fills its own weights, and a buffer."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.register_buffer("shift", torch.empty(4))

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if "shift" in self._buffers:
            self.shift.normal_()


@world(2, pp=2, dp=1, by="process")
def test_modules_that_fill_their_own_weights_do_so_alike_in_any_pipeline(mesh: Mesh) -> None:
    def made(among: Mesh) -> dict[str, Tensor]:
        with torch.device("meta"):
            net = nn.Sequential(*(Shifted() for _ in range(4)))
            net[3].weight = net[0].weight  # of two stages, and filled by both modules
        model = instep.Pipeline(net, among, "1f1b", G)
        model.materialise(seed=3)
        found = instep.full_state_dict(model)
        model.close()
        return found

    here, alone = made(mesh), made(build(None, 0, 1))
    assert list(here) == list(alone) and not torch.equal(here["0.bias"], here["1.bias"])
    assert all(torch.equal(here[name], alone[name]) for name in alone)


@world(2, pp=2, dp=1)
def test_a_model_is_from_the_meta_device_or_not(mesh: Mesh) -> None:
    net = nn.Sequential(nn.Linear(2, 2, device="meta"), nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"some parameters are on the meta device, and others are not"):
        instep.Pipeline(net, mesh)


@world(4, pp=2, dp=2)
@pytest.mark.parametrize("divided", [False, True])
def test_a_rank_holds_its_layers_and_their_moments(mesh: Mesh, divided: bool) -> None:
    net = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(3)))
    model = instep.Pipeline(net, mesh, "gpipe", 2)
    optimizer: Any = sharded(model, mesh) if divided else ADAMW(model.parameters())
    model.step(lambda output, _: output.square().mean(), lambda _: torch.ones(2, 256))
    optimizer.step()
    layers = 2 if mesh.along["pp"].rank == 1 else 1
    size = 4 * layers * 256 * 256
    said = {"parameters": size, "gradients": size, "optimizer": 2 * size // (1 + divided)}
    counted = memory_usage(net, optimizer, model)
    for name, nbytes in said.items():
        assert getattr(counted, name) == pytest.approx(nbytes, rel=0.01)
    if divided:
        optimizer.close()
    model.close()
