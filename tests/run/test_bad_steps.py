"""Steps of a script that are skipped: wherever the gradient is, all ranks skip them alike, for one reason."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from instep.mesh.mesh import Mesh
from tests.run.loops import ledger, metrics, summary
from tests.run.placements import PLACEMENTS, Placed, run_of
from tests.world import world


def told(mesh: Mesh, mine: object) -> list[object]:
    """What every rank says of itself."""
    everyone = mesh.world.group.all_gather_bytes(json.dumps(mine).encode(), "what a test compares")
    return [json.loads(said) for said in everyone]


def large_at(*steps: int, factor: float) -> object:
    """A loss whose gradient is multiplied in these steps, on rank 0 alone."""

    def loss(placed: Placed) -> object:
        def of(model: nn.Module, step: int, number: int) -> Tensor:
            value = placed.loss(model, step, number)
            return value * factor if step in steps and placed.run.rank == 0 else value

        return of

    return loss


def end(placed: Placed) -> None:
    placed.run.close()


@pytest.mark.parametrize("kind", PLACEMENTS)
@world(2, by="process", backend="shm")
def test_a_gradient_that_is_not_finite_is_used_on_no_rank(mesh: Mesh, kind: str, tmp_path: Path) -> None:
    placed = run_of(tmp_path / "run", kind)
    loss = large_at(1, factor=float("inf"))(placed)
    assert placed.train(3, loss=loss) == [0, 1, 2]
    last = placed.run._steps.training.last
    health = placed.run._steps.training.health
    assert health.state() == {"skipped": 1, "in_a_row": 0, "norms": []}
    assert len({str(x) for x in told(mesh, [last.norm, last.skipped, health.state()])}) == 1
    lines = ledger(tmp_path / "run")
    assert [line.get("skipped", "") for line in lines] == ["", "gradient norm is nan", ""]
    assert summary(tmp_path / "run")["skipped_steps"] == 1
    assert told(mesh, "done") == ["done"] * 2
    end(placed)


@pytest.mark.parametrize("kind", ["replicas", "stage2"])
@world(2, by="process", backend="shm")
def test_a_spike_is_skipped_on_all_ranks(mesh: Mesh, kind: str, tmp_path: Path) -> None:
    placed = run_of(tmp_path / "run", kind, checks={"spike": 50.0})
    loss = large_at(18, factor=1e6)(placed)
    placed.train(20, loss=loss)
    health = placed.run._steps.training.health
    assert len({str(x) for x in told(mesh, health.state())}) == 1
    assert health.skipped == 1
    assert "spike: norm" in ledger(tmp_path / "run")[18]["skipped"]
    norms = [line["norm"] for line in metrics(tmp_path / "run")]
    assert norms[18] > 1e3 * norms[17] > 0
    assert told(mesh, "done") == ["done"] * 2
    end(placed)


@pytest.mark.parametrize("kind", [*PLACEMENTS[2:], "replicas"])
@world(2, by="process", backend="shm")
def test_steps_on_the_list_have_the_same_bits_on_every_placement(
    mesh: Mesh, kind: str, tmp_path: Path
) -> None:
    placed = run_of(tmp_path / "run", kind, checks={"skip_steps": (1, 2)})
    assert placed.train(4) == [0, 1, 2, 3]
    told(mesh, "summed up")
    end(placed)
    lines = ledger(tmp_path / "run")
    assert [line.get("skipped", "") for line in lines] == [
        "",
        "it is 1 in skip_steps, which count from 0",
        "it is 2 in skip_steps, which count from 0",
        "",
    ]
    assert summary(tmp_path / "run")["skipped_steps"] == 0
    by_hand = run_of(tmp_path / "by hand", "replicas")

    def drop(step: int, module: nn.Module) -> None:
        if step in (1, 2):
            for p in module.parameters():
                p.grad = torch.full_like(p, torch.nan)

    by_hand.train(4, before=drop)
    told(mesh, "summed up")
    end(by_hand)
    hashes = {summary(tmp_path / name)["state_sha256"] for name in ("run", "by hand")}
    assert len(hashes) == 1
