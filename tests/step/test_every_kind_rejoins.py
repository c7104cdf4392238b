"""Every kind goes on over other ranks, in the same objects, with the bits of one process."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Adagrad, Muon

from instep.errors import Desync, PeerLost
from instep.launch.launch import RankFailed, launch
from instep.mesh.join import init
from instep.mesh.mesh import Mesh
from instep.step.micro_batches import MicroBatch
from tests.kinds import LOOPS, STAGES, Program, net
from tests.parity import numbers, world_of_one
from tests.rejoin import Kept, Lost, Meetings, Rejoined, generation, slice_bytes
from tests.replicate.nets import Residual
from tests.shard.trained import TiedWide, WideImages
from tests.world import world


def tokens(step: int, micro_batch: MicroBatch) -> Tensor:
    return (numbers(6, key=f"tokens {step} {micro_batch.index}").abs() * 1000).long() % 130


def next_token(logits: Tensor, given: Tensor) -> Tensor:
    return F.cross_entropy(logits, given.flip(0))


def images(step: int, micro_batch: MicroBatch) -> Tensor:
    return numbers(2, 3, 7, 7, key=f"images {step} {micro_batch.index}")


def in_bfloat16(step: int, micro_batch: MicroBatch) -> Tensor:
    return numbers(4, 72, key=f"step {step} leaf {micro_batch.index}").bfloat16()


def tied(kind: str, **changes: Any) -> Program:
    """A tied parameter, and a frozen one."""
    return Program(kind, TiedWide, tokens, next_token, **changes)


def bare() -> nn.Sequential:
    """Matrices alone."""
    layers = (nn.Linear(width, other, bias=False) for width, other in ((72, 203), (203, 131), (131, 72)))
    return nn.Sequential(*layers)


LOW = {"compute_dtype": torch.bfloat16}
ADAGRAD = {
    "optimizer": Adagrad,
    "options": {"lr": 0.02, "initial_accumulator_value": 0.1},
}  # sums from the start
MOMENTUM = {"optimizer": SGD, "options": {"lr": 0.02, "momentum": 0.9}}  # nothing before the first step
MUON = {"optimizer": Muon, "options": {"lr": 0.02}}
TIED = {kind: tied(kind) for kind in LOOPS}
QUICK = {**TIED, "pipeline": Program("pipeline")}
PROGRAMS = {
    **QUICK,
    "small buckets": Program("replicated", wrap={"bucket_cap_mb": 1e-4}),
    "naive": tied("replicated", wrap={"strategy": "naive"}),
    "flat": tied("replicated", wrap={"strategy": "flat"}),
    "overlap": tied("replicated", wrap={"strategy": "overlap"}),
    "running statistics": Program("replicated", Residual, images),
    "running statistics, stage 3": Program("stage 3", Residual, images),
    **{f"images, {kind}": Program(kind, WideImages, images) for kind in LOOPS[1:]},
    **{f"bfloat16, {kind}": Program(kind, net, in_bfloat16, wrap=LOW) for kind in STAGES},
    **{f"{kind}, sharded optimizer": tied(f"{kind}, sharded optimizer") for kind in STAGES},
    **{f"Adagrad, {kind}": tied(kind, **ADAGRAD) for kind in (*LOOPS[1:], "stage 3, sharded optimizer")},
    **{f"momentum, {kind}": tied(kind, **MOMENTUM) for kind in ("stage 1", "stage 3")},
    **{f"Muon, {kind}": Program(kind, bare, **MUON) for kind in ("stage 1", "stage 3, sharded optimizer")},
}
FROM_META = {
    "stage 3": QUICK["stage 3"],
    "Adagrad": PROGRAMS["Adagrad, stage 3, sharded optimizer"],
    "bfloat16": PROGRAMS["bfloat16, stage 3"],
    "Muon": PROGRAMS["Muon, stage 3, sharded optimizer"],
}
EVERY = pytest.mark.parametrize("program", TIED.values(), ids=TIED)
PLACES = ["backward", *(pytest.param(place, marks=pytest.mark.slow) for place in ("undeclared", "update"))]


def quick(programs: dict[str, Program]) -> Any:
    """Those of ``QUICK``, and for `make slow` the others, too."""
    marks = {name: () if name in QUICK else pytest.mark.slow for name in programs}
    params = [pytest.param(program, id=name, marks=marks[name]) for name, program in programs.items()]
    return pytest.mark.parametrize("program", params)


@pytest.fixture
def meetings() -> Callable[[int], Meetings]:
    """One for all ranks."""
    made: dict[int, Meetings] = {size: Meetings(size) for size in (2, 3, 4)}
    return made.__getitem__


def ranks(program: Program, meetings: Meetings, rank: int, size: int, backend: str, name: str = "") -> Mesh:
    """A generation of ``size`` ranks; as many stages, if it is a pipeline."""
    axes = {"pp": size} if program.kind == "pipeline" else {}
    return generation(meetings.store, name or f"{size} ranks", rank, size, backend, **axes)


def first(joined: Rejoined, meetings: Meetings, rank: int) -> list[Kept]:
    """The state that rank 0 begins with; all have left their world of one."""
    kept = meetings.keep(rank, joined.keep() if rank == 0 else None)
    joined.leave()
    return kept


def in_generations(joined: Rejoined, kept: list[Kept], meetings: Meetings, rank: int, *sizes: int) -> None:
    """In each generation so many ranks make two steps, and have the hash of one process that made all."""
    for number, size in enumerate(sizes):
        if joined.program.kind == "stage 3":
            assert not slice_bytes(joined.model)
        mine = None
        if rank < size:
            joined.join(ranks(joined.program, meetings, rank, size, "gloo", f"generation {number}"), kept)
            joined.steps(2)
            joined.assert_undisturbed()
            mine = joined.keep()
        kept = meetings.keep(rank, mine)
        if rank < size:
            joined.leave()


@world(3, deadline_s=120)
@quick(PROGRAMS)
def test_two_ranks_then_three_then_one_give_the_bits_of_one_process(
    mesh: Mesh, program: Program, meetings: Any
) -> None:
    joined = Rejoined(program)
    kept = first(joined, meetings(3), mesh.rank)
    in_generations(joined, kept, meetings(3), mesh.rank, 2, 3, 1, 3)


@world(3, deadline_s=120)
@quick(FROM_META)
def test_what_comes_from_the_meta_device_is_whole_nowhere(
    mesh: Mesh, program: Program, meetings: Any
) -> None:
    """The third rank has nothing before others have made steps; all but one leave, and meet again."""
    joined = Rejoined(program, from_meta=True)
    joined.leave()
    in_generations(joined, [], meetings(3), mesh.rank, 2, 3, 1, 3)


def over_meshes(
    joined: Rejoined, kept: list[Kept], meetings: Meetings, rank: int, *meshes: dict[str, int]
) -> None:
    for number, axes in enumerate(meshes):
        joined.join(generation(meetings.store, f"{number}", rank, 4, "gloo", **axes), kept)
        joined.steps(1)
        joined.assert_undisturbed()
        kept = meetings.keep(rank, joined.keep())
        joined.leave()


GROUPS, ONE_GROUP = {"dp": 2, "shard": 2}, {"shard": 4}


@world(4, deadline_s=120)
@pytest.mark.parametrize("program", [QUICK["stage 1"], QUICK["stage 2"], PROGRAMS["images, stage 3"]])
def test_shard_groups_are_other_ones_in_another_mesh(mesh: Mesh, program: Program, meetings: Any) -> None:
    joined = Rejoined(program)
    kept = first(joined, meetings(4), mesh.rank)
    over_meshes(joined, kept, meetings(4), mesh.rank, GROUPS, ONE_GROUP, {"dp": 4}, GROUPS)


def die() -> None:
    raise Lost


def half_a_step(joined: Rejoined, rank: int, place: str, under_way: list[Iterator[MicroBatch]]) -> None:
    """Rank 2 is lost: in "backward" of a micro-batch, in a backward that is "undeclared", in the "update"."""
    model, leaf = joined.model, joined.program.leaf
    if joined.program.kind == "pipeline":
        if rank == 2:
            joined.in_backward(die)
        joined.program.backward(model, 2)
    if place == "undeclared":
        leaf(model, MicroBatch(rank, 3), 2)
    else:
        under_way.append(model.micro_batches(joined.program.num_leaves))  # kept, so that no collector ends it
        micro_batch = next(under_way[0])
    if rank == 2 and place != "update":
        joined.in_backward(die)
    if place == "undeclared":
        leaf(model, MicroBatch(rank, 3), 2)
        return
    while micro_batch is not None:
        leaf(model, micro_batch, 2)
        micro_batch = next(under_way[0], None)
    if rank == 2:
        raise Lost
    joined.optimizer.step()


# A plain optimizer steps what its rank has.
NO_EXCHANGE = {
    **dict.fromkeys(("replicated", "stage 2", "stage 3"), ("update",)),
    "pipeline": ("update", "undeclared"),
}


def lose_rank(program: Program, meetings: Meetings, rank: int, backend: str, place: str) -> None:
    """Of three ranks the last is lost in the third step; the others repeat it, and make another one."""
    if place in NO_EXCHANGE.get(program.kind, ()):
        pytest.skip("nothing is exchanged there")
    joined = Rejoined(program)
    kept = first(joined, meetings, rank)
    joined.join(ranks(program, meetings, rank, 3, backend), kept)
    joined.steps(2)
    kept = meetings.keep(rank, joined.keep())
    under_way: list[Iterator[MicroBatch]] = []
    with pytest.raises(Lost if rank == 2 else (PeerLost, Desync)):
        half_a_step(joined, rank, place, under_way)
    joined.leave()
    if rank < 2:
        joined.join(ranks(program, meetings, rank, 2, backend), kept)
        joined.steps(2)
        joined.assert_undisturbed()
        joined.leave()
    assert not [micro_batch for each in under_way for micro_batch in each]
    meetings.wait()


@world(3, deadline_s=120)
@pytest.mark.parametrize("place", PLACES)
@quick(PROGRAMS)
def test_survivors_of_a_lost_rank_give_the_bits_of_one_process(
    mesh: Mesh, program: Program, place: str, meetings: Any
) -> None:
    lose_rank(program, meetings(3), mesh.rank, "gloo", place)


@world(3, deadline_s=120)
@pytest.mark.parametrize("place", PLACES)
@EVERY
def test_survivors_that_had_shared_memory_give_them_too(
    mesh: Mesh, program: Program, place: str, meetings: Any
) -> None:
    lose_rank(program, meetings(3), mesh.rank, "shm", place)


@world(3, deadline_s=120)
@EVERY
def test_what_is_frozen_for_a_while_when_a_rank_is_lost_is_trained_again(
    mesh: Mesh, program: Program, meetings: Any
) -> None:
    """As the discriminator of a GAN is while the generator learns; a newcomer has not come to that yet."""
    joined = Rejoined(program)
    kept = first(joined, meetings(3), mesh.rank)
    if mesh.rank < 2:
        joined.join(generation(meetings(3).store, "two", mesh.rank, 2, "gloo"), kept)
        joined.steps(2)
    kept = meetings(3).keep(mesh.rank, joined.keep() if mesh.rank < 2 else None)
    trained = [p for p in joined.parameters if p.requires_grad]
    if mesh.rank < 2:
        for p in trained:
            p.requires_grad_(False)
        joined.leave()
    joined.join(generation(meetings(3).store, "three", mesh.rank, 3, "gloo"), kept)
    assert [p.requires_grad for p in trained] == [mesh.rank == 2] * len(trained)
    for p in trained:
        p.requires_grad_(True)
    joined.steps(2)
    joined.assert_undisturbed()
    joined.leave()


def num_hooks(joined: Rejoined) -> int:
    of_modules = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in joined.module.modules())
    of_parameters = sum(
        len(p._post_accumulate_grad_hooks or ()) + len(p._backward_hooks or ()) for p in joined.parameters
    )
    optimizer: Any = joined.optimizer
    return (
        of_modules
        + of_parameters
        + sum(map(len, (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks)))
    )


@world(2, deadline_s=120)
@EVERY
def test_a_generation_leaves_neither_hooks_nor_threads_behind(
    mesh: Mesh, program: Program, meetings: Any
) -> None:
    joined, found = Rejoined(program), []
    kept = first(joined, meetings(2), mesh.rank)
    for number in range(3):
        meetings(2).await_ends(mesh.rank)
        joined.join(generation(meetings(2).store, f"{number}", mesh.rank, 2, "gloo"), kept)
        joined.steps(1)
        kept = meetings(2).keep(mesh.rank, joined.keep())
        found.append((num_hooks(joined), len(meetings(2).threads(mesh.rank))))
        meetings(2).wait()
        joined.leave()
    assert found[1] == found[2] == found[0]


def noisy() -> torch.nn.Module:
    return net(dropout=0.1)


def lose_rank_by_signal(path: str, kind: str) -> None:
    """Rank 1 is killed in backward; rank 0 goes on alone from what it began with, with dropout."""
    mesh = init(timeout_s=30)
    joined = Rejoined(Program(kind, noisy))
    kept = [joined.keep()]
    joined.leave()
    joined.join(mesh, kept)
    joined.steps(1)
    if mesh.rank == 1:
        joined.in_backward(lambda: os.kill(os.getpid(), signal.SIGKILL))
    try:
        joined.program.backward(joined.model, 1)
    except PeerLost:
        began = time.monotonic()
        joined.leave()
        joined.join(world_of_one(), kept)
        took_s = time.monotonic() - began
        joined.steps(3)
        joined.assert_undisturbed()
        Path(path, "took").write_text(json.dumps(took_s))


@pytest.mark.parametrize("kind", LOOPS)
def test_a_survivor_of_a_kill_goes_on_in_the_same_objects(tmp_path: Path, kind: str) -> None:
    with pytest.raises(RankFailed, match=r"rank 1 of 2 .* was killed by SIGKILL"):
        launch(lose_rank_by_signal, (str(tmp_path), kind), ranks=2, grace_s=30)
    assert json.loads((tmp_path / "took").read_text()) < 15  # half the deadline: no rank is waited for
