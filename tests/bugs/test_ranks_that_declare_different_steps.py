"""Ranks declared different steps of their own, and trained together with random numbers of both.

A rank that had resumed at another step than the others counted on from there: its dropout was keyed by that
step, so that the gradient was that of no placement, and nothing said so. The declared step goes with every
exchange, and a difference is an error on all ranks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from instep.errors import Desync
from instep.mesh.mesh import Mesh
from instep.replicate.wrapper import DataParallel
from instep.shard.fully import fully_shard
from tests.world import world

KINDS = ["naive", "flat", "overlap", "bucketed", "stage 2", "stage 3"]


@contextlib.contextmanager
def wrapped(mesh: Mesh, kind: str) -> Iterator[Any]:
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    model: Any
    if kind.startswith("stage"):
        model = fully_shard(module, mesh, stage=int(kind[-1]))
    else:
        model = DataParallel(module, process_group=mesh, strategy=kind)
    yield model
    model.close(**({"wait": False} if kind.startswith("stage") else {}))


def declare(model: Any, step: int | None) -> None:
    for _ in model.micro_batches(2, step=step):
        getattr(model, "module", model)(torch.ones(2, 3)).sum().backward()


@world(3)
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_that_one_rank_declares_otherwise_raises_on_all(mesh: Mesh, kind: str) -> None:
    said = r"rank 2 declares step 8; ranks 0, 1: 7\. .*the same step="
    with wrapped(mesh, kind) as model, pytest.raises(Desync, match=said):
        declare(model, 8 if mesh.rank == 2 else 7)


@world(2, backend="shm")
@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_that_counts_from_another_step_raises_on_all(mesh: Mesh, kind: str) -> None:
    with wrapped(mesh, kind) as model:
        counter = type(model).__instep_state__(model).counter
        counter.next_step = 5 + mesh.rank
        with pytest.raises(Desync, match=r"rank \d declares step .*load the same checkpoint on every rank"):
            declare(model, None)
