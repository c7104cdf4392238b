"""Divided state goes on over other ranks, in the same modules and optimizers, with the same bits."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import SGD, Adagrad

from instep.errors import PeerLost
from instep.launch.launch import RankFailed, launch
from instep.mesh.join import init
from instep.mesh.mesh import Mesh
from instep.state.homes import offered
from tests.parity import world_of_one
from tests.rejoin import (
    Kept,
    Kind,
    Meetings,
    Rejoined,
    divided,
    generation,
    in_generations,
    lose_rank,
    replicated,
    stage1,
    undisturbed,
)
from tests.replicate.nets import Residual, images
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
    "stage 3, running statistics": Kind(Residual, images, divided),
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

SOME_KINDS = {
    "replicated": Kind(*TIED, replicated),
    "sharded optimizer": KINDS["sharded optimizer"],
    "stage 2": KINDS["stage 2"],
    "stage 3": KINDS["stage 3"],
    "stage 3, sharded": Kind(*TIED, divided, {"sharded": True}),
}
HYBRID = {
    name: KINDS[name] for name in ("sharded optimizer", "stage 2", "stage 3 of images, sharded optimizer")
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

FROM_META = {
    "stage 3": Kind(*TIED, divided, from_meta=True),
    "stage 3, sharded optimizer": Kind(*TIED, divided, {"sharded": True}, from_meta=True),
    "stage 3, Adagrad, sharded": Kind(
        *TIED, divided, {"optimizer": Adagrad, "sharded": True}, from_meta=True
    ),
    "stage 3 in bfloat16": Kind(Wide, wide_step, divided, {"compute_dtype": torch.bfloat16}, from_meta=True),
}

# `make slow` has all of them.
PLACES = ["backward", *(pytest.param(place, marks=pytest.mark.slow) for place in ("undeclared", "update"))]
QUICK = ("sharded optimizer", "stage 2", "stage 3", "stage 3, running statistics")


def quick(kinds: dict[str, Kind], without: str = "") -> list[Any]:
    """All of ``kinds`` as parameters; most for `make slow`."""
    marks = {name: () if name in QUICK and name != without else pytest.mark.slow for name in kinds}
    return [pytest.param(kind, id=name, marks=marks[name]) for name, kind in kinds.items()]


@pytest.fixture
def meetings() -> Meetings:
    return Meetings(3)


@pytest.fixture
def pair() -> Meetings:
    return Meetings(2)


@pytest.fixture
def four() -> Meetings:
    return Meetings(4)


def num_hooks(joined: Rejoined) -> int:
    of_modules = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in joined.module.modules())
    of_parameters = sum(
        len(p._post_accumulate_grad_hooks or ()) + len(p._backward_hooks or ()) for p in joined.parameters
    )
    optimizer: Any = joined.optimizer
    of_optimizer = len(optimizer._optimizer_step_pre_hooks) + len(optimizer._optimizer_step_post_hooks)
    return of_modules + of_parameters + of_optimizer


@world(3, deadline_s=120)
@pytest.mark.parametrize("kind", quick(KINDS, without="stage 3, running statistics"))
def test_two_ranks_then_three_then_one_give_the_bits_of_one_process(
    mesh: Mesh, kind: Kind, meetings: Meetings
) -> None:
    in_generations(kind, meetings, mesh.rank, "gloo", [2, 3, 1, 3])


@world(3, deadline_s=120)
@pytest.mark.parametrize("kind", quick(FROM_META))
def test_what_comes_from_the_meta_device_is_whole_nowhere_and_has_the_bits_of_one_process(
    mesh: Mesh, kind: Kind, meetings: Meetings
) -> None:
    """The third rank has nothing before others have made steps; all but one leave, and meet again."""
    in_generations(kind, meetings, mesh.rank, "gloo", [2, 3, 1, 3])


@world(4, deadline_s=120)
def test_shard_groups_are_filled_alike(mesh: Mesh, four: Meetings) -> None:
    joined, kept = Rejoined(FROM_META["stage 3"]), list[Kept]()
    for number, axes in enumerate(({"dp": 2, "shard": 2}, {"shard": 4})):
        joined.leave()
        joined.join(generation(four.store, f"{number}", mesh.rank, 4, "gloo", **axes), kept)
        joined.steps(1)
        assert joined.sha256() in (None, undisturbed(joined.kind, number + 1))
        kept = four.keep(mesh.rank, joined.keep())
    joined.leave()


@world(3, deadline_s=120)
@pytest.mark.parametrize("kind", OTHER_OPTIMIZERS.values(), ids=OTHER_OPTIMIZERS)
def test_any_optimizer_begins_and_goes_on_elsewhere(mesh: Mesh, kind: Kind, meetings: Meetings) -> None:
    in_generations(kind, meetings, mesh.rank, "gloo", [2, 3])


@world(3, deadline_s=120)
@pytest.mark.parametrize("kind", ONE_COPY.values(), ids=ONE_COPY)
def test_memory_that_a_host_has_once_is_made_anew(mesh: Mesh, kind: Kind, meetings: Meetings) -> None:
    in_generations(kind, meetings, mesh.rank, "shm", [2, 3, 1, 2])


@world(3, deadline_s=120)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", quick(KINDS))
def test_survivors_of_a_lost_rank_give_the_bits_of_one_process(
    mesh: Mesh, kind: Kind, place: str, meetings: Meetings
) -> None:
    lose_rank(kind, meetings, mesh.rank, "gloo", place)


@world(3, deadline_s=120)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", SHARED.values(), ids=SHARED)
def test_survivors_that_had_shared_memory_give_them_too(
    mesh: Mesh, kind: Kind, place: str, meetings: Meetings
) -> None:
    lose_rank(kind, meetings, mesh.rank, "shm", place)


@world(3, deadline_s=120)
@pytest.mark.parametrize("kind", SOME_KINDS.values(), ids=SOME_KINDS)
def test_what_is_frozen_for_a_while_when_a_rank_is_lost_is_trained_again(
    mesh: Mesh, kind: Kind, meetings: Meetings
) -> None:
    """As the discriminator of a GAN is while the generator learns; a newcomer has not come to that yet."""
    joined = Rejoined(kind)
    kept = meetings.keep(mesh.rank, joined.keep() if mesh.rank == 0 else None)
    joined.leave()
    if mesh.rank < 2:
        joined.join(generation(meetings.store, "two", mesh.rank, 2, "gloo"), kept)
        joined.steps(2)
    kept = meetings.keep(mesh.rank, joined.keep() if mesh.rank < 2 else None)
    trained = [p for p in joined.parameters if p.requires_grad]
    if mesh.rank < 2:
        for p in trained:
            p.requires_grad_(False)
    joined.leave()
    joined.join(generation(meetings.store, "three", mesh.rank, 3, "gloo"), kept)
    assert [p.requires_grad for p in trained] == [mesh.rank == 2] * len(trained)
    for p in trained:
        p.requires_grad_(True)
    joined.steps(2)
    assert joined.sha256() == undisturbed(kind, 4) or (kind.make is replicated and mesh.rank)
    joined.leave()


@world(3, deadline_s=120)
@pytest.mark.slow
@pytest.mark.parametrize("kind", SOME_KINDS.values(), ids=SOME_KINDS)
def test_who_is_lost_while_the_others_join_is_no_end(mesh: Mesh, kind: Kind, meetings: Meetings) -> None:
    joined = Rejoined(kind)
    kept = meetings.keep(mesh.rank, joined.keep() if mesh.rank == 0 else None)
    joined.leave()
    three = generation(meetings.store, "three", mesh.rank, 3, "gloo", timeout_s=0.5)
    if mesh.rank < 2:
        with pytest.raises(PeerLost):
            joined.join(three, kept)
        joined.leave()
        joined.join(generation(meetings.store, "two", mesh.rank, 2, "gloo"), kept)
        joined.steps(2)
        assert joined.sha256() in (None, undisturbed(kind, 2))
        joined.leave()
    meetings.wait()
    three.close()


@world(3, deadline_s=120)
@pytest.mark.slow
@pytest.mark.parametrize("name", ["sharded optimizer", "stage 3, sharded"])
def test_who_is_lost_while_optimizers_join_is_no_end(mesh: Mesh, name: str, meetings: Meetings) -> None:
    joined = Rejoined(SOME_KINDS[name])
    kept = meetings.keep(mesh.rank, joined.keep() if mesh.rank == 0 else None)
    joined.leave()
    three = generation(meetings.store, "three", mesh.rank, 3, "gloo", timeout_s=0.5)
    offered(joined.model).join(three)
    if mesh.rank < 2:
        with pytest.raises(PeerLost):
            offered(joined.optimizer).join(three)
        joined.leave()
        joined.join(generation(meetings.store, "two", mesh.rank, 2, "gloo"), kept)
        joined.steps(2)
        assert joined.sha256() in (None, undisturbed(joined.kind, 2))
    meetings.wait()
    joined.leave()
    three.close()


@world(2, deadline_s=120)
@pytest.mark.parametrize("kind", SOME_KINDS.values(), ids=SOME_KINDS)
def test_a_generation_leaves_neither_hooks_nor_threads_behind(mesh: Mesh, kind: Kind, pair: Meetings) -> None:
    meetings = pair
    joined, found = Rejoined(kind), []
    kept = meetings.keep(mesh.rank, joined.keep() if mesh.rank == 0 else None)
    for number in range(3):
        joined.leave()
        meetings.await_ends(mesh.rank)
        joined.join(generation(meetings.store, f"{number}", mesh.rank, 2, "gloo"), kept)
        joined.steps(1)
        kept = meetings.keep(mesh.rank, joined.keep())
        found.append((num_hooks(joined), len(meetings.threads(mesh.rank))))
        meetings.wait()
    assert found[1] == found[2] == found[0]
    joined.leave()


@world(4, deadline_s=120)
@pytest.mark.parametrize("kind", HYBRID.values(), ids=HYBRID)
def test_shard_groups_are_other_ones_in_another_mesh(mesh: Mesh, kind: Kind, four: Meetings) -> None:
    joined = Rejoined(kind)
    kept = four.keep(mesh.rank, joined.keep() if mesh.rank == 0 else None)
    for number, axes in enumerate(({"dp": 2, "shard": 2}, {"shard": 4}, {"dp": 4}, {"dp": 2, "shard": 2})):
        joined.leave()
        joined.join(generation(four.store, f"{number}", mesh.rank, 4, "gloo", **axes), kept)
        joined.steps(1)
        assert joined.sha256() in (None, undisturbed(kind, number + 1))
        kept = four.keep(mesh.rank, joined.keep())
    joined.leave()


def lose_rank_by_signal(path: str, stage: int) -> None:
    """Rank 1 is killed in backward; rank 0 goes on alone from what it began with, with dropout."""
    mesh = init(timeout_s=30)
    kind = Kind(lambda: Wide(dropout=0.1), wide_step, divided, {"stage": stage})
    joined = Rejoined(kind)
    kept = [joined.keep()]
    joined.leave()
    joined.join(mesh, kept)
    joined.steps(1)
    iterator = joined.micro_batches()
    micro_batch = next(iterator)
    if mesh.rank == 1:
        joined.parameters[-1].register_hook(lambda gradient: os.kill(os.getpid(), signal.SIGKILL))
    try:
        joined.go_on(micro_batch, iterator)
    except PeerLost:
        began = time.monotonic()
        joined.leave()
        joined.join(world_of_one(), kept)
        took_s = time.monotonic() - began
        joined.steps(3)
        hashes = joined.sha256(), undisturbed(kind, 3)
        Path(path, "report").write_text(json.dumps([*hashes, took_s]))


@pytest.mark.parametrize("stage", [2, 3])
def test_who_survives_a_kill_goes_on_in_the_same_objects(tmp_path: Path, stage: int) -> None:
    with pytest.raises(RankFailed, match=r"rank 1 of 2 .* was killed by SIGKILL"):
        launch(lose_rank_by_signal, (str(tmp_path), stage), ranks=2, grace_s=30)
    found, expected, took_s = json.loads((tmp_path / "report").read_text())
    assert found == expected
    assert took_s < 15  # half the deadline: no rank is waited for
