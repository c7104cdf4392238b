"""Runs of pipelines: steps made twice, and hashes of micro-batches, of which each stage has its part."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import instep
from instep.mesh.mesh import Mesh
from instep.record.compare import compare, differing_micro_batches
from instep.record.step_lines import read_run
from instep.step.micro_batches import MicroBatch
from tests.parity import filled, numbers
from tests.run.loops import Loss, squares, summary
from tests.world import world

G = 5
NAMES = ("0.weight", "0.bias", "2.weight", "2.bias")


def train(run: instep.Run, loss: Loss = squares, num_steps: int = 2) -> list[int]:
    """The steps that were made, in a pipeline where the mesh has one."""
    net = filled(nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)))
    model: Any = instep.Pipeline(net, run.mesh, cuts=[2] * (run.mesh.axes.size("pp") > 1))
    optimizer = instep.ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=0.1)
    made = []
    for step in run.steps(num_steps, model=model, optimizer=optimizer):

        def inputs(micro_batch: MicroBatch, step: int = int(step)) -> Tensor:
            return numbers(3, 4, key=f"{step}, {micro_batch.index}")

        with step:
            model.step(lambda y, _: loss(y), inputs, G)
            optimizer.step()
            optimizer.zero_grad()
        made.append(int(step))
    return made


@world(2, by="process")
def test_a_step_made_twice_is_the_step_and_micro_batches_have_the_hashes_of_one_rank(
    mesh: Mesh, tmp_path: Path
) -> None:
    for name, options, steps in (
        ("once", {}, [0, 1]),
        ("twice", {"checks": {"replay_every": 1}, "mesh": {"pp": 2}}, [0, 0, 1, 1]),
        ("otherwise", {"mesh": {"pp": 2}}, [0, 1]),
    ):
        run = instep.Run(tmp_path / name, record={"hash_every": 1, "leaves": True}, **options)
        wrong = 2.0 if name == "otherwise" else 1.0
        calls: list[Tensor] = []

        def one_is_wrong(y: Tensor, calls: list[Tensor] = calls, wrong: float = wrong) -> Tensor:
            calls.append(y)
            return squares(y) * (wrong if len(calls) == G + 3 else 1.0)

        assert train(run, one_is_wrong) == steps
        run.close()
    mesh.world.group.all_gather_bytes(b"", "the end of the runs")
    if mesh.rank:
        return
    assert summary(tmp_path / "twice")["state_sha256"] == summary(tmp_path / "once")["state_sha256"]
    once, twice, otherwise = (read_run(tmp_path / name) for name in ("once", "twice", "otherwise"))
    assert compare(once, twice).first is None
    leaves = twice.steps[0].leaves.values()
    assert [tuple(x.parameters) for x in leaves] == [NAMES] * G
    assert [set(map(x.rank_of, NAMES)) for x in leaves] == [{0, 1}] * G
    for step in (0, 1):
        assert once.steps[step].leaves.keys() == twice.steps[step].leaves.keys()
        assert once.steps[step].reduced == twice.steps[step].reduced
        assert not differing_micro_batches(once.steps[step], twice.steps[step])
    (odd,) = differing_micro_batches(twice.steps[1], otherwise.steps[1])
    assert (odd.leaf, odd.ranks, tuple(odd.parameters)) == (2, (0, 0), NAMES)
