"""Ranks that have one copy of the weights: the bits of the plain optimizer, in memory for one model."""

from __future__ import annotations

import gc
import json
import os
import re
import signal
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD, Adafactor, AdamW

import instep
from instep.errors import Desync, PeerLost, ReplicasDiffer
from instep.launch.launch import launch
from instep.launch.rank_exit import RankFailed
from instep.mesh.join import init
from instep.mesh.mesh import Mesh
from instep.replicate.strategies import STRATEGIES
from instep.replicate.wrapper import DataParallel
from instep.shard import one_copy as private_pages
from instep.shard.flat_parameters import WholeParameters
from instep.shard.fully import fully_shard
from instep.shard.layout import cut
from instep.shard.optimizer import ShardedOptimizer
from tests.kinds import assert_same_state, replicated_alone
from tests.parity import filled, numbers, world_of_one
from tests.shard.given import parameters, set_gradients, steps
from tests.shard.test_bad_use import LOOP, expected, undeclared
from tests.shard.trained import WIDTH, Wide, assert_same
from tests.step.test_every_kind_parity import PROGRAMS
from tests.world import world

MB = 1 << 20


def one_copy(given: list[nn.Parameter], mesh: Mesh, kind: type = AdamW) -> ShardedOptimizer:
    return ShardedOptimizer(given, kind, mesh, one_copy=True)


def plain_values(num_steps: int, kind: type = AdamW) -> list[Tensor]:
    given = parameters()
    steps(kind(given), given, num_steps)
    return [p.detach() for p in given]


def meet(mesh: Mesh) -> None:
    mesh.world.group.barrier("the meeting of a test")


def test_one_rank_is_the_plain_optimizer() -> None:
    for each in PROGRAMS.values():
        one_copy = replace(each, kind="stage 1", options={**each.options, "one_copy": True})
        assert_same_state(one_copy.trained(world_of_one()), replicated_alone(each))


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("wrapped_first", [True, False])
@world(2, backend="shm")
def test_data_parallel_of_any_strategy_may_wrap_before_or_after(
    mesh: Mesh, strategy: str, wrapped_first: bool
) -> None:
    wanted = expected(mesh)
    module = filled(Wide())
    if wrapped_first:
        model = DataParallel(module, process_group=mesh, strategy=strategy)
    optimizer = ShardedOptimizer(module.parameters(), SGD, mesh, one_copy=True, **LOOP)
    if not wrapped_first:
        model = DataParallel(module, process_group=mesh, strategy=strategy)
    undeclared(mesh, model, optimizer)
    assert_same({**module.state_dict()}, {**wanted}, "weights")
    optimizer.close()
    model.close()


def mul(given: list[nn.Parameter]) -> None:
    with torch.no_grad():
        for p in given:
            p.mul_(0.9)


def clamp_the_data(given: list[nn.Parameter]) -> None:
    """As in a Wasserstein GAN; autograd counts no version."""
    for p in given:
        p.data.mul_(1.5).clamp_(-1.0, 1.0)


def write_an_array(given: list[nn.Parameter]) -> None:
    for p in given:
        p.detach().numpy()[...] *= 2


def swap_in_an_average(given: list[nn.Parameter]) -> None:
    """To evaluate with it; then the weights come back."""
    with torch.no_grad():
        kept = [p.clone() for p in given]
        for p in given:
            p.mul_(0.5)
        for p, x in zip(given, kept, strict=True):
            p.copy_(x)


def one_row(given: list[nn.Parameter]) -> None:
    with torch.no_grad():
        given[0][3].neg_()


EDITS = [mul, clamp_the_data, write_an_array, swap_in_an_average, one_row]


@pytest.mark.parametrize("edit", EDITS)
@world(3, backend="shm")
def test_what_all_ranks_write_to_the_weights_counts_once(
    mesh: Mesh, edit: Callable[[list[nn.Parameter]], None]
) -> None:
    """Before the first step, between two, between backward and step, and after the last one."""
    ours, wanted = parameters(), parameters()
    optimizer, plain = one_copy(ours, mesh), AdamW(wanted)
    for given, stepping in ((ours, optimizer), (wanted, plain)):
        edit(given)
        for step in range(2):
            steps(stepping, given, 1, first=step)
            edit(given)
            set_gradients(given, step + 2)
            edit(given)
            stepping.step()
        edit(given)
        stepping.zero_grad()
    assert_same([p.detach() for p in ours], [p.detach() for p in wanted], "weights")
    optimizer.close()
    assert_same([p.detach() for p in ours], [p.detach() for p in wanted], "weights")


@pytest.mark.parametrize("edit", EDITS)
@world(2, backend="shm")
def test_what_all_ranks_write_counts_once_where_gradients_are_in_slices(
    mesh: Mesh, edit: Callable[[list[nn.Parameter]], None]
) -> None:
    """Stage 2, and the replica that ``DataParallel`` trains with the same edits."""
    modules = [filled(Wide()) for _ in range(2)]
    models = (
        fully_shard(modules[0], mesh, stage=2, one_copy=True),
        DataParallel(modules[1], process_group=mesh),
    )
    optimizers = (
        ShardedOptimizer(modules[0].parameters(), SGD, mesh, **LOOP),
        SGD(modules[1].parameters(), **LOOP),
    )
    for model, optimizer in zip(models, optimizers, strict=True):
        for step in range(2):
            edit(list(model.parameters()))
            model(numbers(4, WIDTH, key=f"{step} on rank {mesh.rank}")).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        edit(list(model.parameters()))
    assert_same(modules[0].state_dict(), modules[1].state_dict(), "weights")
    for ending in (optimizers[0], *models):
        ending.close()


@world(2, backend="shm")
def test_a_rank_that_writes_before_the_others_have_computed_does_not_change_their_weights(mesh: Mesh) -> None:
    ours = parameters()
    optimizer = one_copy(ours, mesh)
    if mesh.rank == 0:
        mul(ours)
    meet(mesh)
    if mesh.rank == 1:
        assert_same([p.detach() for p in ours], [p.detach() for p in parameters()], "weights")
        mul(ours)
    wanted = parameters()
    mul(wanted)
    steps(optimizer, ours, 1)
    steps(AdamW(wanted), wanted, 1)
    assert_same([p.detach() for p in ours], [p.detach() for p in wanted], "weights")
    optimizer.close()


@pytest.mark.parametrize("max_whole", [private_pages.MAX_WHOLE, 0])
def test_one_number_that_a_rank_writes_otherwise_is_seen_wherever_on_a_page_it_is(
    max_whole: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(private_pages, "MAX_WHOLE", max_whole)  # ranks are threads
    write_otherwise(num_steps=1 if max_whole else private_pages.PAGE // private_pages.SAMPLE_BYTES)


@world(2, backend="shm")
def write_otherwise(mesh: Mesh, num_steps: int) -> None:
    p = nn.Parameter(torch.zeros(private_pages.PAGE // 4))
    optimizer = ShardedOptimizer([("p", p)], SGD, mesh, one_copy=True, lr=0.1)

    def train() -> None:
        for _ in range(num_steps):
            p.data[100] = 1.0 + mesh.rank
            p.grad = torch.ones_like(p)
            optimizer.step()

    with pytest.raises(ReplicasDiffer, match="'p': they were written to since the last step"):
        train()
    optimizer.close()


@pytest.mark.parametrize("alone", [True, False])
@world(2, backend="shm")
def test_weights_that_are_not_written_to_alike_raise_by_name_and_nothing_is_changed(
    mesh: Mesh, alone: bool
) -> None:
    ours = parameters()
    named = [(f"layer.{i}", p) for i, p in enumerate(ours)]
    optimizer = ShardedOptimizer(named, AdamW, mesh, one_copy=True)
    before = ours[3].detach().clone()
    if mesh.rank == 1 or not alone:
        ours[3].data.add_(1.0 + mesh.rank)
    set_gradients(ours, 0)
    with pytest.raises(
        ReplicasDiffer, match=r"after step 0 .*'layer\.3': they were written to since"
    ) as caught:
        optimizer.step()
    assert caught.value.parameters == ("layer.3",)
    ours[3].data.copy_(before)
    steps(optimizer, ours, 2)
    assert_same([p.detach() for p in ours], plain_values(2), "weights")
    optimizer.close()


@world(2, backend="shm")
def test_pages_that_were_written_to_are_given_back_in_the_step(mesh: Mesh) -> None:
    ours = parameters()
    optimizer = one_copy(ours, mesh)
    shards = optimizer.shards
    assert not shards.edits()
    mul(ours)
    assert shards.edits()
    assert_same(
        [x for *_, x in optimizer.pieces()],
        [x.part_of(x.parameter).flatten() for x in shards.held.values()],
        "pieces",
    )
    steps(optimizer, ours, 1)
    assert not shards.edits()
    optimizer.close()


@world(2, backend="shm")
def test_weights_are_each_rank_s_own_when_it_is_closed(mesh: Mesh) -> None:
    ours = parameters()
    optimizer = one_copy(ours, mesh)
    assert all(p.data_ptr() % 64 == 0 for p in ours)
    optimizer.close()
    with torch.no_grad():
        ours[0].fill_(float(mesh.rank))
    meet(mesh)
    assert bool((ours[0] == mesh.rank).all())


@world(2, backend="shm")
def test_a_plain_optimizer_after_one_that_was_collected_steps_this_ranks_weights_once(mesh: Mesh) -> None:
    ours = parameters()
    optimizer = one_copy(ours, mesh)
    steps(optimizer, ours, 1)
    state = optimizer.state_dict()
    del optimizer
    gc.collect()
    alone = AdamW(ours)
    alone.load_state_dict(state)
    steps(alone, ours, 1, first=1)
    assert_same([p.detach() for p in ours], plain_values(2), "weights")


@world(2, backend="shm")
def test_all_ranks_begin_with_the_values_of_the_first(mesh: Mesh) -> None:
    ours = parameters()
    with torch.no_grad():
        ours[0].add_(mesh.rank)
    optimizer = one_copy(ours, mesh)
    assert_same([p.detach() for p in ours], [p.detach() for p in parameters()], "weights")
    optimizer.close()


@world(2, backend="shm")
def test_buffers_stay_each_rank_s_own(mesh: Mesh) -> None:
    module = nn.BatchNorm1d(3)
    optimizer = ShardedOptimizer(module.parameters(), AdamW, mesh, one_copy=True)
    module.running_mean.fill_(float(mesh.rank))
    meet(mesh)
    assert bool((module.running_mean == mesh.rank).all())
    optimizer.close()


@pytest.fixture
def noticed() -> threading.Event:
    return threading.Event()


@world(2, backend="shm")
def test_nobody_updates_before_all_have_come_nor_goes_on_before_all_have_updated(
    mesh: Mesh, noticed: threading.Event
) -> None:
    """Rank 1 comes late, then updates late: until it comes, the weights are the old ones."""
    ours = parameters()
    optimizer = one_copy(ours, mesh)
    meet(mesh)
    before = [p.detach().clone() for p in ours]
    set_gradients(ours, 0)
    if mesh.rank == 1:
        assert not noticed.wait(0.3)  # rank 0 is in step()
        assert_same([p.detach() for p in ours], before, "weights")

        def update_late(*_: object) -> None:
            assert not noticed.wait(0.3)  # rank 0 has updated, and waits

        optimizer._inner.register_step_pre_hook(update_late)
    optimizer.step()
    if mesh.rank == 0:
        noticed.set()
    assert_same([p.detach() for p in ours], plain_values(1), "weights")
    optimizer.close()


@world(2, backend="shm")
def test_a_rank_that_raises_before_its_update_leaves_everything_as_it_was(mesh: Mesh) -> None:
    ours = parameters()
    optimizer = one_copy(ours, mesh)
    set_gradients(ours, 0)

    def closure() -> float:
        if mesh.rank == 1:
            raise KeyError("no such batch")
        return 0.0

    kind, message = (
        (Desync, "rank 1 raised, its own traceback has the cause; nothing was changed"),
        (KeyError, "no such batch"),
    )[mesh.rank]
    with pytest.raises(kind, match=message):
        optimizer.step(closure)
    assert_same([p.detach() for p in ours], [p.detach() for p in parameters()], "weights")
    steps(optimizer, ours, 2)
    assert_same([p.detach() for p in ours], plain_values(2), "weights")
    optimizer.close()


@pytest.mark.parametrize("what", ["options", "gradients"])
@world(2, backend="shm")
def test_ranks_that_mean_different_steps_leave_everything_as_it_was(mesh: Mesh, what: str) -> None:
    ours = parameters()
    optimizer = one_copy(ours, mesh)
    set_gradients(ours, 0)
    if mesh.rank == 1 and what == "options":
        optimizer.param_groups[0]["lr"] = 0.5
    if mesh.rank == 1 and what == "gradients":
        ours[0].grad = None
    with pytest.raises(Desync, match=rf"{what}.* than rank 0.*; nothing was changed"):
        optimizer.step()
    meet(mesh)
    assert_same([p.detach() for p in ours], [p.detach() for p in parameters()], "weights")
    optimizer.param_groups[0]["lr"] = 1e-3
    steps(optimizer, ours, 1)
    assert_same([p.detach() for p in ours], plain_values(1), "weights")
    optimizer.close()


@world(2, backend="shm")
def test_a_rank_that_raises_in_its_update_stops_all(mesh: Mesh) -> None:
    ours = parameters()
    optimizer = one_copy(ours, mesh)
    if mesh.rank == 1:

        def broken(*_: object) -> None:
            raise ZeroDivisionError("in the update")

        optimizer._inner.register_step_pre_hook(broken)
    set_gradients(ours, 0)
    with pytest.raises((Desync, ZeroDivisionError), match=r"rank 1 raised|in the update"):
        optimizer.step()
    with pytest.raises(RuntimeError, match="not of the same step any more"):
        optimizer.step()
    optimizer.close()


@world(2, backend="shm")
def test_a_group_that_is_added_is_one_copy_too(mesh: Mesh) -> None:
    ours = parameters()
    optimizer = one_copy(ours[:3], mesh)
    optimizer.add_param_group({"params": ours[3:]})
    assert [space.one_copy for space in optimizer.shards.spaces] == [True, True]
    mul(ours)
    steps(optimizer, ours, 1)
    wanted = parameters()
    mul(wanted)
    steps(AdamW(wanted), wanted, 1)
    assert_same([p.detach() for p in ours], [p.detach() for p in wanted], "weights")
    optimizer.close()


@world(2, backend="shm")
def test_a_class_that_needs_whole_parameters_gives_the_bits_of_the_plain_one(mesh: Mesh) -> None:
    shapes = ((5, 4096), (131, 77), (33,))
    ours, wanted = parameters(shapes), parameters(shapes)
    optimizer = one_copy(ours, mesh, Adafactor)
    steps(optimizer, ours, 3)
    steps(Adafactor(wanted), wanted, 3)
    assert_same([p.detach() for p in ours], [p.detach() for p in wanted], "weights")
    optimizer.close()


@world(2, backend="shm")
def test_the_pieces_of_all_ranks_are_the_weights_once(mesh: Mesh) -> None:
    """An average of the weights in pieces is the average of the weights."""
    ours = parameters()
    optimizer = one_copy(ours, mesh)
    means = [x.clone() for _, _, _, x in optimizer.pieces()]
    reference = parameters()
    plain, wanted = AdamW(reference), [p.detach().clone() for p in parameters()]
    for step in range(3):
        steps(optimizer, ours, 1, first=step)
        steps(plain, reference, 1, first=step)
        for mean, (_, _, _, new) in zip(means, optimizer.pieces(), strict=True):
            mean.lerp_(new, 0.25)
        for mean, p in zip(wanted, reference, strict=True):
            mean.lerp_(p.detach(), 0.25)
    positions = {id(p): i for i, p in enumerate(ours)}
    mine = []
    for mean, (p, first, last, _) in zip(means, optimizer.pieces(), strict=True):
        assert torch.equal(mean, wanted[positions[id(p)]].flatten()[first:last])
        mine.append((positions[id(p)], first, last))
    rows = mesh.world.group.all_gather_bytes(json.dumps(mine).encode(), "the pieces of a test")
    ranges = sorted(tuple(x) for row in rows for x in json.loads(row))
    assert sum(last - first for _, first, last in ranges) == sum(p.numel() for p in ours)
    assert len({(i, first) for i, first, last in ranges if last > first}) == len(
        [x for x in ranges if x[2] > x[1]]
    )
    optimizer.close()


@world(2)
def test_without_shared_memory_it_is_refused_on_all_ranks(mesh: Mesh) -> None:
    ours = parameters()
    before = [p.data_ptr() for p in ours]
    with pytest.raises(ValueError, match=r"one_copy=True needs ranks that share memory.*'gloo'.*\"shm\""):
        one_copy(ours, mesh)
    assert [p.data_ptr() for p in ours] == before
    ShardedOptimizer(ours, AdamW, mesh).close()  # they are free


@world(2, backend="shm")
def test_ranks_that_differ_in_it_raise(mesh: Mesh) -> None:
    with pytest.raises(ValueError, match="one_copy=True on rank 0, but one_copy=False on rank 1"):
        ShardedOptimizer(parameters(), AdamW, mesh, one_copy=mesh.rank == 0)


def die_in_the_update(path: str) -> None:
    mesh = init(timeout_s=30)
    ours = parameters()
    optimizer = ShardedOptimizer(ours, AdamW, dist.new_group(backend="shm"), one_copy=True)
    steps(optimizer, ours, 1)
    if mesh.rank == 1:
        optimizer._inner.register_step_pre_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    set_gradients(ours, 1)
    try:
        optimizer.step()
    except PeerLost as error:
        (Path(path) / "report").write_text(json.dumps([error.ranks, error.operation]))
    with pytest.raises(RuntimeError, match="closed, because"):
        optimizer.step()
    steps(ShardedOptimizer(ours, AdamW, world_of_one()), ours, 1)  # the parameters can go on


def test_a_rank_that_dies_in_its_update_is_named(tmp_path: Path) -> None:
    with pytest.raises(RankFailed, match=r"rank 1 of 2 .* was killed by SIGKILL"):
        launch(die_in_the_update, (str(tmp_path),), ranks=2)
    assert json.loads((tmp_path / "report").read_text()) == [[1], "the vote on step 1"]


def memory_of_all(mesh: Mesh) -> int:
    """Bytes of all ranks: anonymous pages, which no other process changes, and shared ones once."""
    gc.collect()
    meet(mesh)
    told = dict(re.findall(r"^(\w+): +(\d+) kB$", Path("/proc/self/smaps_rollup").read_text(), re.M))
    mine = (int(told["Anonymous"]) + int(told["Pss_Shmem"])) << 10
    rows = mesh.world.group.all_gather_bytes(str(mine).encode(), "the memory of a test")
    meet(mesh)
    return sum(map(int, rows))


@pytest.mark.parametrize("shared", [True, False])
@world(2, by="process", backend="shm")
def test_the_host_has_the_weights_once_and_the_moments_once(mesh: Mesh, shared: bool) -> None:
    size = 2 * 36 * MB  # glibc gives what is larger than 32 MB back at once
    warm = parameters()
    optimizer = ShardedOptimizer(warm, AdamW, mesh, one_copy=shared, fused=True)
    steps(optimizer, warm, 2)  # what is loaded on first use, and the first part of each arena
    optimizer.close()
    before = memory_of_all(mesh)
    ours = [nn.Parameter(torch.full((size // 8,), 0.5)) for _ in range(2)]
    optimizer = instep.ShardedOptimizer(ours, AdamW, mesh, one_copy=shared, fused=True)
    for p in ours:
        p.grad = torch.full_like(p, 0.25)
    for _ in range(2):
        optimizer.step()
    optimizer.zero_grad()
    taken = memory_of_all(mesh) - before
    copies = 1 if shared else 2
    assert abs(taken - (copies * size + 2 * size)) < 0.1 * size, f"{taken / MB:.1f} MB"
    optimizer.close()


class Late(WholeParameters):
    """Whose first rank copies its values late."""

    noticed: threading.Event

    def _move(self, *args: Any) -> None:
        if self.group.rank == 0:
            assert not self.noticed.wait(0.1), "a rank has gone on without them"
        super()._move(*args)


@world(2, backend="shm")
def test_nobody_has_the_space_before_the_first_values_are_there(mesh: Mesh, noticed: threading.Event) -> None:
    Late.noticed = noticed
    given = parameters(((3,), (5,)))
    space = Late(given, cut, mesh.world.group, one_copy=True)
    noticed.set()
    assert space.one_copy
    assert_same([p.detach() for p in given], [p.detach() for p in parameters(((3,), (5,)))], "weights")
    meet(mesh)
