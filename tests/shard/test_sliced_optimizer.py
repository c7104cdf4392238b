"""Plain torch optimizers on sharded modules: each rank steps its slices, with the bits of plain training."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, Adafactor, Adagrad, AdamW, Muon, Optimizer, SparseAdam

from instep.errors import Desync
from instep.mesh.mesh import Mesh
from instep.reduce.norm import clip_grad_norm_
from instep.replicate.wrapper import DataParallel
from instep.run.memory_usage import memory_usage
from instep.shard.fully import full_state_dict, fully_shard
from instep.shard.optimizer import ShardedOptimizer
from instep.state import homes
from tests.parity import filled, numbers
from tests.shard.trained import WIDTH, Wide, assert_same, copied
from tests.world import world

STAGES = pytest.mark.parametrize("stage", [2, 3])
ADAM = {"lr": 0.02, "fused": True}


def loss(model: nn.Module, key: str) -> Tensor:
    found: Tensor = model(numbers(4, WIDTH, key=key)).square().mean()
    return found


def assert_state_is_of_the_slices(optimizer: Optimizer, whole: Optimizer) -> None:
    """Per parameter what is here is this rank's part of what a plain optimizer has."""
    of_whole = dict(zip(all_of(optimizer), all_of(whole), strict=True))
    held = {id(x.parameter): x for p in all_of(optimizer) for x in homes.home(p).held}  # type: ignore[union-attr]
    for p, expected in of_whole.items():
        here = held.get(id(p))
        assert (p in optimizer.state) == (here is not None)
        if here is not None:
            cut = {k: here.part_of(v) if v.shape == p.shape else v for k, v in whole.state[expected].items()}
            assert_same(dict(optimizer.state[p]), cut, "state")


def all_of(optimizer: Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


class Sharded(nn.Module):
    """A wrapper as courses ask for one: around any model, before the optimizer is made."""

    def __init__(self, module: nn.Module, mesh: Mesh) -> None:
        super().__init__()
        self.module = fully_shard(module, mesh)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.module(x)
        return found

    def gather_full_parameters(self) -> dict[str, Tensor]:
        return full_state_dict(self.module)


class Toy(nn.Module):
    """As small as a test of a course has it; a frozen layer and one without a bias among it."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(10, 10, bias=False)
        self.fc2 = nn.Linear(10, 50, bias=False)
        self.ln = nn.LayerNorm(50)
        self.fixed = nn.Parameter(torch.tensor([2.0, 2.0]), requires_grad=False)
        self.fc3 = nn.Linear(50, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc3(self.ln(torch.relu(self.fc2(torch.relu(self.fc1(x)))))) * self.fixed.mean()


@world(2)
def test_a_wrapper_of_a_course_trains_as_one_process_does_to_the_bit(mesh: Mesh) -> None:
    alone, model = filled(Toy()), Sharded(filled(Toy()), mesh)
    plain_adam = AdamW(alone.parameters(), lr=0.1, weight_decay=0.1)
    optimizer = AdamW(model.parameters(), lr=0.1, weight_decay=0.1)
    x, y = numbers(20, 10, key="x"), numbers(20, 5, key="y")
    for _ in range(5):
        plain_adam.zero_grad()
        for part in range(2):
            mine = slice(10 * part, 10 * part + 10)
            (nn.functional.mse_loss(alone(x[mine]), y[mine]) * 0.5).backward()
        plain_adam.step()
        optimizer.zero_grad()
        mine = slice(10 * mesh.rank, 10 * mesh.rank + 10)
        nn.functional.mse_loss(model(x[mine]), y[mine]).backward()
        optimizer.step()
        assert_same(model.gather_full_parameters(), dict(alone.state_dict()), "weights")
    model.module.close()  # type: ignore[operator]


def adam(model: nn.Module) -> AdamW:
    return AdamW(model.parameters(), **ADAM)  # type: ignore[arg-type]


def step(model: nn.Module, optimizer: Optimizer, key: str = "x") -> None:
    loss(model, key).backward()
    optimizer.step()
    optimizer.zero_grad()


def stepped(num_steps: int) -> tuple[nn.Module, Optimizer]:
    """One process, that has made steps 0, 1, ..."""
    model = filled(Wide())
    optimizer = adam(model)
    for k in range(num_steps):
        step(model, optimizer, str(k))
    return model, optimizer


@contextmanager
def sharded(mesh: Mesh, stage: int = 3, **options: Any) -> Iterator[Any]:
    model = fully_shard(filled(Wide()), mesh, stage, **options)
    yield model
    model.close()


@world(2)
@STAGES
def test_its_memory_is_counted_by_slice(mesh: Mesh, stage: int) -> None:
    with sharded(mesh, stage) as model:
        optimizer = adam(model)
        step(model, optimizer)
        counted = memory_usage(model, optimizer, model).optimizer
        divided = ShardedOptimizer(model.parameters(), AdamW, mesh, **ADAM)
        step(model, divided)
        assert counted == memory_usage(model, divided, model).optimizer
        divided.close()


class Mine(AdamW):
    """May do anything."""


REFUSED: dict[str, tuple[Callable[[Any], Optimizer], str]] = {
    "Adafactor": (lambda ps: Adafactor(ps), "Adafactor looks at whole parameters.*such as torch.optim.AdamW"),
    "Muon": (lambda ps: Muon([p for p in ps if p.ndim == 2]), "Muon looks at whole parameters"),
    "one's own": (lambda ps: Mine(ps), "Mine may look at whole parameters, and fully_shard has cut these"),
    "LBFGS": (lambda ps: LBFGS(ps), "LBFGS cannot be sharded: its step is made of dot products"),
    "SparseAdam": (lambda ps: SparseAdam(list(ps)), "SparseAdam cannot be sharded: its gradients are lists"),
    "differentiable": (lambda ps: SGD(ps, differentiable=True), "differentiable=True cannot be sharded"),
}


@pytest.mark.parametrize("num_ranks", [1, 2])
@STAGES
def test_what_cannot_step_slices_is_refused_by_name(num_ranks: int, stage: int) -> None:
    @world(num_ranks)
    def body(mesh: Mesh) -> None:
        with sharded(mesh, stage) as model:
            loss(model, "x").backward()
            for make, message in REFUSED.values():
                optimizer = make(model.parameters())
                refused = rf"'layers\.0\.weight' has its gradient in slices, one on each rank: {message}"
                with pytest.raises(RuntimeError, match=refused):
                    optimizer.step(lambda: 0.0)
            optimizer = adam(model)
            optimizer.step()  # the gradient is still there
            assert len(all_of(optimizer)) == 6

    body()


@world(2)
@STAGES
def test_a_closure_and_the_hooks_of_a_user_see_what_they_always_do(mesh: Mesh, stage: int) -> None:
    """A hook before the step clips, one after it sees the new weights, and discards the gradient."""
    seen: list[dict[str, Tensor]] = []
    results = []
    for model in (filled(Wide()), fully_shard(filled(Wide()), mesh, stage)):
        optimizer = adam(model)
        parameters = all_of(optimizer)

        def before(optimizer: Optimizer, args: Any, kwargs: Any, ps: Any = parameters) -> None:
            clip_grad_norm_(ps, 0.01)

        def after(optimizer: Optimizer, args: Any, kwargs: Any, model: Any = model) -> None:
            assert len(all_of(optimizer)) == 6
            seen.append({name: x.clone() for name, x in model.state_dict().items()})
            optimizer.zero_grad()

        optimizer.register_step_pre_hook(before)
        optimizer.register_step_post_hook(after)

        def closure(model: Any = model, optimizer: Any = optimizer) -> Tensor:
            optimizer.zero_grad()
            found = loss(model, "closure")
            found.backward()
            return found

        loss(model, "x").backward()
        assert optimizer.step() is None
        assert all(p.grad is None for p in parameters)
        returned = [optimizer.step(closure), optimizer.step(closure=closure)]
        assert all(x.requires_grad for x in returned)
        results.append([x.detach() for x in returned])
    assert_same(results[1], results[0], "losses")
    assert_same(seen[3:], seen[:3], "weights")
    fully = model
    fully.close()  # type: ignore[operator]


@world(2)
@STAGES
def test_a_closure_that_does_not_exchange_is_an_error(mesh: Mesh, stage: int) -> None:
    with sharded(mesh, stage) as model:

        def closure() -> Tensor:
            with model.no_sync():
                found = loss(model, "x")
                found.backward()
                return found

        divided = ShardedOptimizer(model.parameters(), AdamW, mesh, **ADAM)
        for optimizer in (adam(model), divided):
            optimizer.zero_grad()
            with pytest.raises(RuntimeError, match="never exchanged with the other ranks"):
                optimizer.step(closure)
        divided.close()


@world(2)
@STAGES
def test_groups_are_added_and_several_optimizers_share_a_module(mesh: Mesh, stage: int) -> None:
    """And one has parameters that are not in slices beside those that are."""
    weights = []
    for model, head in (
        (filled(Wide()), filled(nn.Linear(WIDTH, 3))),
        (
            fully_shard(filled(Wide()), mesh, stage),
            DataParallel(filled(nn.Linear(WIDTH, 3)), process_group=mesh),
        ),
    ):
        first, *others = model.parameters()
        one = SGD([first], lr=0.1, momentum=0.9)
        two = AdamW([*others[:2], *head.parameters()], lr=0.01)
        for k in range(4):
            if k == 2:
                two.add_param_group({"params": others[2:], "lr": 0.1})
            head(model(numbers(4, WIDTH, key=str(k)))).square().mean().backward()
            one.step()
            two.step()
            model.zero_grad()
            head.zero_grad()
        both = {**full_state_dict(model), **{f"head.{k}": v for k, v in full_state_dict(head).items()}}
        weights.append({name.replace("module.", ""): x for name, x in both.items()})
    assert_same(weights[1], weights[0], "weights")
    head.close()
    model.close()  # type: ignore[operator]


@world(2)
@STAGES
def test_one_that_was_made_before_steps_slices_too_and_keeps_its_moments(mesh: Mesh, stage: int) -> None:
    model, optimizer = stepped(1)
    fully_shard(model, mesh, stage)
    step(model, optimizer, "1")
    alone, whole = stepped(2)
    assert_same(full_state_dict(model), dict(alone.state_dict()), "weights")
    assert_state_is_of_the_slices(optimizer, whole)
    model.close()  # type: ignore[operator]


@world(2)
@STAGES
def test_a_state_dict_has_slices_and_goes_back_to_the_rank_that_it_is_of(mesh: Mesh, stage: int) -> None:
    alone, whole = stepped(3)
    with sharded(mesh, stage) as model:
        optimizer = adam(model)
        for k in range(2):
            step(model, optimizer, str(k))
        again, saved = adam(model), copied(optimizer.state_dict())
        again.load_state_dict(saved)
        step(model, again, "2")
        assert_same(full_state_dict(model), dict(alone.state_dict()), "weights")
        assert_state_is_of_the_slices(again, whole)
        assert all("slices_of" not in group for group in again.param_groups)


@world(2)
def test_a_whole_state_is_cut_and_the_slices_of_another_rank_are_refused_on_all(mesh: Mesh) -> None:
    model, whole = stepped(1)
    saved = whole.state_dict()
    fully_shard(model, mesh)
    optimizer = adam(model)
    optimizer.load_state_dict(saved)
    step(model, optimizer, "1")
    assert_same(full_state_dict(model), dict(stepped(2)[0].state_dict()), "weights")
    strange = optimizer.state_dict()
    if mesh.rank == 1:
        for group in strange["param_groups"]:
            group["slices_of"] = "rank 0 of 2"
    optimizer.load_state_dict(strange)
    loss(model, "x").backward()
    kind, message = (ValueError, "given the slices of rank 0 of 2, on rank 1 of 2.*instep.save")
    if mesh.rank == 0:
        kind, message = (Desync, "rank 1 raised.*nothing was changed")
    with pytest.raises(kind, match=message):
        optimizer.step()
    model.close()  # type: ignore[operator]


@world(2)
def test_a_state_that_was_rounded_is_refused(mesh: Mesh) -> None:
    with sharded(mesh, compute_dtype=torch.bfloat16) as model:
        optimizer = adam(model)
        step(model, optimizer)
        optimizer.load_state_dict(optimizer.state_dict())
        loss(model, "x").backward()
        with pytest.raises((ValueError, Desync), match=r"got torch\.bfloat16.*instep\.save|raised"):
            optimizer.step()


@world(2)
@STAGES
def test_ranks_that_would_make_other_steps_all_raise(mesh: Mesh, stage: int) -> None:
    with sharded(mesh, stage) as model:
        optimizer = SGD(model.parameters(), lr=0.1 + mesh.rank)
        loss(model, "x").backward()
        with pytest.raises(Desync, match="rank 1 has other options in its parameter groups"):
            optimizer.step()


@world(2)
@STAGES
def test_zeros_that_are_asked_for_discard(mesh: Mesh, stage: int) -> None:
    for foreach in (False, True):
        with sharded(mesh, stage) as model:
            optimizer = SGD(model.parameters(), lr=0.1, foreach=foreach)
            for zero_grad in (optimizer.zero_grad, model.zero_grad):
                loss(model, "x").backward()
                zero_grad(set_to_none=False)
                assert all(p.grad is None for p in model.parameters())


@world(2)
@STAGES
@pytest.mark.parametrize("options", [{"foreach": False}, {"fused": True}])
def test_a_gradient_scaler_unscales_slices_and_skips_on_all_ranks(
    mesh: Mesh, stage: int, options: dict[str, Any]
) -> None:
    weights = []
    for model in (filled(Wide()), fully_shard(filled(Wide()), mesh, stage)):
        alone = type(model) is Wide
        optimizer = AdamW(model.parameters(), lr=0.01, **options)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
        for k in range(4):
            spoiled = float("inf") if k == 1 and (alone or mesh.rank == 1) else 1.0
            scaler.scale(loss(model, str(k)) * spoiled).backward()
            if k == 2:
                scaler.unscale_(optimizer)
                clip_grad_norm_(model.parameters(), 0.01)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        assert scaler.get_scale() == 1024.0
        weights.append({name: x.clone() for name, x in full_state_dict(model).items()})
    assert_same(weights[1], weights[0], "weights")
    model.close()  # type: ignore[operator]


@world(2)
def test_float16_trains_with_a_scaler(mesh: Mesh) -> None:
    with sharded(mesh, compute_dtype=torch.float16) as model:
        optimizer = adam(model)
        scaler = torch.amp.GradScaler("cpu", init_scale=128.0)
        before = loss(model, "x").item()
        for _ in range(4):
            scaler.scale(loss(model, "x")).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        assert loss(model, "x").item() < before
        assert all(x.dtype == torch.float32 for x in full_state_dict(model).values())


@world(2)
@STAGES
def test_its_slices_end_with_the_module(mesh: Mesh, stage: int) -> None:
    model = fully_shard(filled(Wide()), mesh, stage)
    optimizer = adam(model)
    step(model, optimizer)
    model.close()
    with pytest.raises(
        RuntimeError, match="AdamW has the state of slices of a sharded module, which was closed"
    ):
        optimizer.step()


@world(2)
def test_what_a_class_keeps_before_its_first_step_is_of_the_slices_in_their_dtype(mesh: Mesh) -> None:
    with sharded(mesh, compute_dtype=torch.bfloat16) as model:
        optimizer = Adagrad(model.parameters(), initial_accumulator_value=0.1)
        step(model, optimizer)
        for p in model.parameters():
            for x in optimizer.state[p].values():
                assert x.dtype == torch.float32 and x.numel() <= p.numel()
