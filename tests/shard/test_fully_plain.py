"""Sharded modules in the plain loop do what ``DataParallel`` does, to the bit; misuse raises on all ranks."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from instep.errors import Desync
from instep.mesh.mesh import Mesh
from instep.reduce.norm import clip_grad_norm_
from instep.replicate.wrapper import DataParallel
from instep.shard.fully import full_state_dict, fully_shard
from instep.shard.optimizer import ShardedOptimizer
from tests.parity import bits, filled, numbers
from tests.replicate.nets import Twice
from tests.shard.trained import WIDTH, Wide, assert_same
from tests.world import world

LOOP = {"lr": 0.05, "momentum": 0.9, "foreach": False, "fused": False}
Script = Callable[[nn.Module, torch.optim.Optimizer, int], None]
STAGES = pytest.mark.parametrize("stage", [2, 3])


@world(2)
@STAGES
def test_gradients_in_slices_are_discarded_also_where_zeros_are_asked_for(mesh: Mesh, stage: int) -> None:
    model: Any = fully_shard(filled(Wide()), mesh, stage=stage)
    loss(model, "first", mesh.rank).backward()
    once = clip_grad_norm_(model.parameters(), float("inf"))
    model.zero_grad(set_to_none=False)
    assert clip_grad_norm_(model.parameters(), float("inf")) == 0
    loss(model, "first", mesh.rank).backward()
    assert clip_grad_norm_(model.parameters(), float("inf")) == once
    model.close()


@world(2)
@STAGES
def test_a_gradient_in_slices_that_was_filled_is_an_error_by_name(mesh: Mesh, stage: int) -> None:
    model: Any = fully_shard(filled(Wide()), mesh, stage=stage)
    optimizer = ShardedOptimizer(model.parameters(), SGD, mesh, **LOOP)
    loss(model, "first", mesh.rank).backward()
    for parameter in model.parameters():
        with torch._C.DisableTorchFunctionSubclass():  # as native code, which does not ask
            parameter.grad.zero_()
    with pytest.raises(ValueError, match=r"the \.grad of '.*' was written to.*zero_grad"):
        optimizer.step()
    optimizer.close()
    model.close()


def loss(model: nn.Module, key: str, rank: int) -> Tensor:
    return model(numbers(4, WIDTH, key=f"{key} on rank {rank}")).square().mean()


def clipped(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> None:
    for step in range(3):
        loss(model, str(step), rank).backward()
        clip_grad_norm_(model.parameters(), 0.01)
        optimizer.step()
        optimizer.zero_grad()


def two_backwards(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> None:
    for step in range(2):
        for part in ("a", "b", "c"):
            loss(model, f"{step}{part}", rank).backward()
        optimizer.step()
        optimizer.zero_grad()


def accumulated(model: Any, optimizer: torch.optim.Optimizer, rank: int) -> None:
    for step in range(2):
        with model.no_sync():
            loss(model, f"{step} first", rank).backward()
            loss(model, f"{step} second", rank).backward()
        loss(model, f"{step} third", rank).backward()
        optimizer.step()
        optimizer.zero_grad()


def switched(model: Any, optimizer: torch.optim.Optimizer, rank: int) -> None:
    """As ``accumulated``, by the word that each kind of wrapper has for it in torch."""
    for step in range(2):
        for turn in ("first", "second", "third"):
            if isinstance(model, DataParallel):
                model.require_backward_grad_sync = turn == "third"
            else:
                model.set_requires_gradient_sync(turn == "third")
            loss(model, f"{step} {turn}", rank).backward()
        optimizer.step()
        optimizer.zero_grad()


def accumulated_alone(model: Any, optimizer: torch.optim.Optimizer, rank: int) -> None:
    with model.no_sync():
        loss(model, "first", rank).backward()
    model.sync_gradients()
    model.sync_gradients()
    optimizer.step()


def discarded(model: Any, optimizer: torch.optim.Optimizer, rank: int) -> None:
    loss(model, "discarded", rank).backward()
    optimizer.zero_grad()
    loss(model, "used", rank).backward()
    optimizer.step()
    loss(model, "discarded later", rank).backward()
    with model.no_sync():
        loss(model, "discarded too", rank).backward()
    optimizer.zero_grad()
    loss(model, "used too", rank).backward()
    optimizer.step()


def looked_at(model: Any, optimizer: torch.optim.Optimizer, rank: int) -> None:
    """``autograd.grad`` between backward and step accumulates nothing, and takes nothing away."""
    loss(model, "used", rank).backward()
    torch.autograd.grad(loss(model, "looked at", rank), list(model.parameters()))
    optimizer.step()


def replaced(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> None:
    loss(model, "used", rank).backward()
    for p in list(model.parameters())[::2]:
        p.grad = torch.full_like(p, 0.25)
    optimizer.step()


SCRIPTS = {
    script.__name__: script
    for script in (
        clipped,
        two_backwards,
        accumulated,
        switched,
        accumulated_alone,
        discarded,
        looked_at,
        replaced,
    )
}


_replicated: dict[Any, dict[str, Tensor]] = {}  # each rank asks for its own: all find it, or none


def replicated(mesh: Mesh, make: Callable[[], nn.Module], script: Script) -> dict[str, Tensor]:
    """The weights that data parallelism comes to on as many ranks, once in this process."""
    key = make, script, mesh.world_size, mesh.rank
    if key not in _replicated:
        module = filled(make())
        model = DataParallel(module, process_group=mesh)
        script(model, SGD(module.parameters(), **LOOP), mesh.rank)
        model.close()
        _replicated[key] = {**module.state_dict()}
    return _replicated[key]


def sharded(mesh: Mesh, make: Callable[[], nn.Module], script: Script, stage: int) -> dict[str, Tensor]:
    model = fully_shard(filled(make()), mesh, stage)
    optimizer = ShardedOptimizer(model.parameters(), SGD, mesh, **LOOP)
    script(model, optimizer, mesh.rank)
    result = full_state_dict(model)
    optimizer.close()
    model.close()
    return result


@pytest.mark.parametrize(("backend", "stage"), [("gloo", 2), ("shm", 3)])
def test_the_plain_loop_gives_the_bits_of_data_parallel(backend: str, stage: int) -> None:
    @world(3, backend=backend)
    def body(mesh: Mesh) -> None:
        for name, script in SCRIPTS.items():
            expected = replicated(mesh, Wide, script)
            assert_same(sharded(mesh, Wide, script, stage), expected, name)

    body()


def in_bfloat16() -> nn.Module:
    return Wide().to(torch.bfloat16)


def twice_in_bfloat16(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> None:
    for part in ("a", "b"):
        x = numbers(4, WIDTH, key=f"{part} on rank {rank}").bfloat16()
        model(x).square().mean().backward()
    clip_grad_norm_(model.parameters(), 0.01)
    optimizer.step()


@world(3)
def test_gradients_in_bfloat16_add_and_are_clipped_in_bfloat16(mesh: Mesh) -> None:
    expected = replicated(mesh, in_bfloat16, twice_in_bfloat16)
    assert_same(sharded(mesh, in_bfloat16, twice_in_bfloat16, 2), expected, "weights")


@world(2)
@STAGES
def test_what_no_rank_uses_has_no_gradient_and_what_some_use_has(mesh: Mesh, stage: int) -> None:
    model = fully_shard(filled(Twice()), mesh, stage, find_unused_parameters=True)
    before = full_state_dict(model)
    optimizer = ShardedOptimizer(model.parameters(), SGD, mesh, lr=0.1, weight_decay=0.5)
    for _ in range(2):
        model(numbers(4, 6, key="x"), mesh.rank == 1).square().mean().backward()
        assert [name for name, p in model.named_parameters() if p.grad is None] == [
            "never.weight",
            "never.bias",
        ]
        optimizer.step()
        optimizer.zero_grad()
    after = full_state_dict(model)
    changed = {name for name in after if not torch.equal(before[name], after[name])}
    assert changed == {name for name in after if not name.startswith("never")}
    optimizer.close()
    model.close()


@world(2)
def test_unused_parameters_warn_once_or_raise(mesh: Mesh) -> None:
    def once(model: nn.Module) -> None:
        model(numbers(4, 6, key="x"), False).square().mean().backward()
        model.zero_grad()

    model = fully_shard(filled(Twice()), mesh, 2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        once(model)
        once(model)
    mine = [w for w in caught if "sometimes.weight" in str(w.message)]
    assert len(mine) <= 1  # threads share the list: rank 0 alone warns
    model.close()
    strict = fully_shard(filled(Twice()), mesh, 2, find_unused_parameters=False)
    with pytest.raises(ValueError, match=r"no gradient came for .sometimes\.weight. on any rank"):
        once(strict)
    strict.close()


@world(3)
@STAGES
def test_the_norm_has_the_bits_of_whole_gradients_and_shows_what_is_not_finite(
    mesh: Mesh, stage: int
) -> None:
    module = filled(Wide())
    whole = DataParallel(filled(Wide()), process_group=mesh)
    model = fully_shard(module, mesh, stage)
    for m in (whole, model):
        loss(m, "x", mesh.rank).backward()
    expected = clip_grad_norm_(whole.parameters(), 1e9)
    ours = clip_grad_norm_(model.parameters(), 1e9)
    assert torch.equal(bits(ours), bits(expected))
    some = list(whole.parameters())[1:3]
    expected = clip_grad_norm_(some, 1e9)
    assert torch.equal(bits(clip_grad_norm_(list(model.parameters())[1:3], 1e9)), bits(expected))
    model.zero_grad()
    (loss(model, "x", mesh.rank) * (float("inf") if mesh.rank == 1 else 1.0)).backward()
    assert not clip_grad_norm_(model.parameters(), 1.0).isfinite()
    with pytest.raises(RuntimeError, match="expected a finite number"):
        clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
    whole.close()
    model.close()


# Gradients in slices that one rank alone has discarded: an error on all, never a sum of two kinds.


def backward(model: nn.Module, mesh: Mesh, step: int) -> None:
    model(numbers(2, 8, key=f"step {step} of rank {mesh.rank}")).square().mean().backward()


@world(2)
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("everything", [True, False])
def test_what_one_rank_discards_is_noticed_in_the_next_exchange(
    mesh: Mesh, stage: int, everything: bool
) -> None:
    model = fully_shard(filled(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 3))), mesh, stage)
    backward(model, mesh, 0)
    if mesh.rank == 1:
        if everything:
            model.zero_grad()
        else:
            model[0].weight.grad = None
    with pytest.raises(Desync, match=r"rank [01] accumulates into . existing gradients.*zero_grad"):
        backward(model, mesh, 1)
    model.close()


@world(2)
@pytest.mark.parametrize("stage", [2, 3])
def test_what_all_discard_or_keep_is_no_matter(mesh: Mesh, stage: int) -> None:
    model = fully_shard(filled(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 3))), mesh, stage)
    for step in range(4):
        if step == 2:
            model.zero_grad()
        backward(model, mesh, step)
    model.close()
