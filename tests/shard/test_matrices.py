"""Optimizers of whole matrices beside AdamW: the same bits in every stage and on any number of ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Adafactor, AdamW, Muon, Optimizer

import instep
from instep.checkpoint.load import verify
from instep.errors import Desync
from instep.mesh.mesh import Mesh
from instep.shard.checks import stepping_cost
from instep.shard.layout import newton_schulz, owners
from instep.state.homes import offered
from tests import kinds
from tests.kinds import KINDS, LOOPS, STAGES, WIDTH, Program, close
from tests.parity import filled, world_of_one
from tests.shard.trained import assert_same, copied
from tests.world import world


class Mixed(nn.Module):
    """Matrices of several shapes, whose rows no two or three ranks share evenly, and vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 61)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(61, width), nn.Tanh(), nn.Linear(width, 61)) for width in (203, 131)
        )
        self.unused = nn.Linear(9, 9)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return x


class AwayFromFirst(Optimizer):
    """A user's own: it looks at weights when it is made, and at whole gradients when it steps."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})
        for p in self.param_groups[0]["params"]:
            self.state[p]["first"] = p.detach().clone()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                p.add_(self.state[p]["first"] * p.grad.norm(), alpha=self.param_groups[0]["lr"])


class Both(Program):
    """Matrices are trained by ``optimizer``, all else by AdamW."""

    def make(self, module: nn.Module, mesh: Mesh) -> tuple[Any, Any]:
        kind = KINDS[self.kind]
        model = kind.wrap(module, mesh, find_unused_parameters=True, **kind.options)
        matrices, vectors = ([p for p in model.parameters() if (p.ndim == 2) is of] for of in (True, False))
        whole = kinds.plainly if self.kind == "replicated" else kinds.in_shards
        first = whole(model, mesh, self.optimizer, matrices, lr=0.02)
        return model, Pair([first, kind.optimizer(model, mesh, AdamW, vectors, **kinds.FUSED)])


class Pair:
    def __init__(self, optimizers: list[Any]) -> None:
        self.optimizers = optimizers

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def close(self) -> None:
        close(*self.optimizers)


MUON = Both("replicated", Mixed, optimizer=Muon, num_steps=3, clip=0.5)


@kinds.once_each
def alone(program: Both) -> kinds.State:
    return program.trained(world_of_one())


def assert_as_alone(mesh: Mesh, program: Both, kind: str) -> None:
    kinds.assert_same_state(replace(program, kind=kind).trained(mesh), alone(program))


PLACES: dict[str, tuple[Both, dict[str, Any]]] = {
    **{f"on {size} ranks": (MUON, {"size": size}) for size in (1, 2, 3)},
    "over shm": (MUON, {"size": 2, "backend": "shm"}),
    "in shard groups": (MUON, {"size": 4, "dp": 2, "shard": 2}),
    "in bfloat16": (
        replace(MUON, module=lambda: Mixed().bfloat16(), inputs=lambda *at: kinds.leaf_rows(*at).bfloat16()),
        {"size": 2},
    ),
    "by Adafactor": (replace(MUON, optimizer=Adafactor), {"size": 2}),
    "by a class of one's own": (replace(MUON, optimizer=AwayFromFirst), {"size": 2}),
}


@pytest.mark.parametrize("kind", [*LOOPS, "stage 3, sharded optimizer"])
@pytest.mark.parametrize("place", PLACES)
def test_bits_are_those_of_one_process(place: str, kind: str) -> None:
    program, options = PLACES[place]
    world(**options)(assert_as_alone)(program=program, kind=kind)


def train(mesh: Mesh, kind: str, directory: Path, steps: range) -> None:
    """Go on at ``steps`` with the state that is saved, and save."""
    model, both = replace(MUON, kind=kind).make(filled(Mixed()), mesh)
    objects = {"model": model, **{f"optimizer_{i}": x for i, x in enumerate(both.optimizers)}}
    assert instep.load(directory, **objects).step == steps.start
    for number in steps:
        MUON.step(model, both, number)
    instep.save(directory, step=steps.stop, **objects)
    mesh.world.group.barrier("the test")
    close(both, model)


def test_what_one_stage_has_saved_others_load_on_other_ranks(tmp_path: Path) -> None:
    places = [("stage 3", 3), ("stage 1", 2), ("stage 2", 3), ("replicated", 1), ("stage 3", 2)]
    for step, (kind, size) in enumerate(places):
        world(size, timeout_s=20.0)(train)(kind=kind, directory=tmp_path / "a", steps=range(step, step + 1))
    train(world_of_one(), "replicated", tmp_path / "b", range(len(places)))
    last = [verify(tmp_path / name / f"step-{len(places):08d}").state_sha256 for name in "ab"]
    assert last[0] == last[1]


@pytest.mark.parametrize("kind", LOOPS[1:])
@world(3)
def test_one_rank_keeps_the_state_of_a_matrix_and_its_weights_only_in_a_step(mesh: Mesh, kind: str) -> None:
    model, both = replace(MUON, kind=kind).make(filled(Mixed()), mesh)
    MUON.step(model, both, 0)
    muon = both.optimizers[0]
    kept = sum(x["momentum_buffer"].numel() for x in muon.local_state.values())
    held = sum(values.numel() for *_, values in muon.pieces())
    rows = mesh.world.group.all_gather_bytes(f"{kept} {held}".encode(), "the test")
    trained = 61 * (WIDTH + 2 * 203 + 2 * 131)
    assert [sum(map(int, x)) for x in zip(*map(bytes.split, rows), strict=True)] == [trained, trained + 81]
    if kind in STAGES:
        assert all(not x.tensor.untyped_storage().nbytes() for x in offered(muon).held.values())
    whole = copied(muon.state_dict())
    muon.load_state_dict(whole)
    assert_same(muon.state_dict(), whole, "state")
    close(both, model)


def test_owners_are_balanced_by_the_cost_of_newton_and_schulz() -> None:
    assert newton_schulz((3, 2)) == newton_schulz((2, 3)) == 2 * 3 * 2 + 2 * 2 * 2 + 2 * 2 * 3
    assert stepping_cost(Muon) is newton_schulz and stepping_cost(AdamW) is None
    shapes = [(512, 512), *[(64, 4096)] * 4]  # of as many elements each, and the first of 12 times the work
    assert owners([newton_schulz(shape) for shape in shapes], 2) == [0, 1, 1, 1, 1]
    assert owners([512 * 512] * 5, 2) == [0, 1, 0, 1, 0]


@world(2)
def test_what_cannot_be_is_refused(mesh: Mesh) -> None:
    model: Any = instep.fully_shard(filled(Mixed()), mesh, find_unused_parameters=True)
    matrices = [p for p in model.parameters() if p.ndim == 2]
    MUON.backward(model, 0)
    with pytest.raises(RuntimeError, match=r"Muon looks at whole .* make it instep.ShardedOptimizer\(.*Muon"):
        Muon(matrices).step()
    with pytest.raises(ValueError, match="pass both the same process_group"):
        instep.ShardedOptimizer(matrices, Muon, world_of_one())
    with pytest.raises(ValueError, match="Muon only supports 2D"):
        instep.ShardedOptimizer(model.parameters(), Muon, mesh)
    muon = instep.ShardedOptimizer(matrices, Muon, mesh)
    before, gradient = dict(instep.full_state_dict(model)), matrices[0].grad
    matrices[0].grad = None if mesh.rank else gradient
    with pytest.raises(Desync, match=r"rank 1 has gradients for other parameters .* nothing was changed"):
        muon.step()
    matrices[0].grad = gradient
    assert_same(dict(instep.full_state_dict(model)), before, "weights")
    muon.step()
    assert not torch.equal(instep.full_state_dict(model)["first.weight"], before["first.weight"])
    close(muon, model)
