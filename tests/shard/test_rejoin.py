"""Divided state goes on over other ranks, in the same modules and optimizers, with the same bits."""

from __future__ import annotations

import pytest
import torch
from torch.optim import SGD, Adagrad

from instep.mesh.mesh import Mesh
from tests.rejoin import Kind, Meetings, divided, in_generations, lose_rank, stage1
from tests.shard.trained import TiedWide, Wide, WideImages, images_step, tokens_step, wide_step
from tests.world import world

TIED, IMAGES = (TiedWide, tokens_step), (WideImages, images_step)
KINDS = {
    "sharded optimizer": Kind(*TIED, stage1),
    "sharded optimizer of images": Kind(*IMAGES, stage1),
    "stage 2": Kind(*TIED, divided, {"stage": 2}),
    "stage 2 of images, sharded optimizer": Kind(*IMAGES, divided, {"stage": 2, "sharded": True}),
    "stage 3": Kind(*TIED, divided),
    "stage 3 of images, sharded optimizer": Kind(*IMAGES, divided, {"sharded": True}),
    "stage 2 in bfloat16": Kind(*TIED, divided, {"stage": 2, "compute_dtype": torch.bfloat16}),
    "stage 3 in bfloat16": Kind(Wide, wide_step, divided, {"compute_dtype": torch.bfloat16}),
}
ONE_COPY = {
    "sharded optimizer": Kind(*TIED, stage1, {"one_copy": True}),
    "stage 2": Kind(*TIED, divided, {"stage": 2, "one_copy": True}),
    "stage 2 of images, sharded optimizer": Kind(
        *IMAGES, divided, {"stage": 2, "one_copy": True, "sharded": True}
    ),
}

SHARED = {
    "stage 3": KINDS["stage 3"],
    "sharded optimizer": KINDS["sharded optimizer"],
    **{f"{name}, one copy": kind for name, kind in ONE_COPY.items()},
}
OTHER_OPTIMIZERS = {
    "Adagrad, sharded": Kind(*TIED, stage1, {"optimizer": Adagrad}),
    "Adagrad, stage 2": Kind(*TIED, divided, {"stage": 2, "optimizer": Adagrad}),
    "Adagrad, stage 3, sharded": Kind(*TIED, divided, {"optimizer": Adagrad, "sharded": True}),
    "SGD, sharded": Kind(*TIED, stage1, {"optimizer": SGD}),
    "SGD, stage 3": Kind(*TIED, divided, {"optimizer": SGD}),
}


@pytest.fixture
def meetings() -> Meetings:
    return Meetings(3)


@world(3, deadline_s=120)
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_two_ranks_then_three_then_one_give_the_bits_of_one_process(
    mesh: Mesh, kind: Kind, meetings: Meetings
) -> None:
    in_generations(kind, meetings, mesh.rank, "gloo", [2, 3, 1, 3])


@world(3, deadline_s=120)
@pytest.mark.parametrize("kind", OTHER_OPTIMIZERS.values(), ids=OTHER_OPTIMIZERS)
def test_any_optimizer_begins_and_goes_on_elsewhere(mesh: Mesh, kind: Kind, meetings: Meetings) -> None:
    in_generations(kind, meetings, mesh.rank, "gloo", [2, 3])


@world(3, deadline_s=120)
@pytest.mark.parametrize("kind", ONE_COPY.values(), ids=ONE_COPY)
def test_memory_that_a_host_has_once_is_made_anew(mesh: Mesh, kind: Kind, meetings: Meetings) -> None:
    in_generations(kind, meetings, mesh.rank, "shm", [2, 3, 1, 2])


@world(3, deadline_s=120)
@pytest.mark.parametrize("place", ["backward", "undeclared", "update"])
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_survivors_of_a_lost_rank_give_the_bits_of_one_process(
    mesh: Mesh, kind: Kind, place: str, meetings: Meetings
) -> None:
    lose_rank(kind, meetings, mesh.rank, "gloo", place)


@world(3, deadline_s=120)
@pytest.mark.parametrize("place", ["backward", "undeclared", "update"])
@pytest.mark.parametrize("kind", SHARED.values(), ids=SHARED)
def test_survivors_that_had_shared_memory_give_them_too(
    mesh: Mesh, kind: Kind, place: str, meetings: Meetings
) -> None:
    lose_rank(kind, meetings, mesh.rank, "shm", place)
