"""Parameters are this rank's shards between steps, and whole where their modules compute or on request."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW

import instep
from instep.errors import Desync
from instep.mesh.mesh import Mesh
from tests.parity import filled, numbers, world_of_one
from tests.shard.trained import assert_same
from tests.world import world

WIDTH = 72  # a matrix of WIDTH x WIDTH has a block and a part of one
STAGES = pytest.mark.parametrize("stage", [2, 3])


class Stack(nn.Module):
    """A root with parameters before and after a list of layers."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(12, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.out = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.into(x)
        for layer in self.layers:
            x = x + layer(x).tanh()
        return self.out(x)


def loss_of(module: nn.Module, key: str = "x") -> Tensor:
    loss: Tensor = module(numbers(4, 12, key=key)).square().mean()
    return loss


def gathered_units(model: Any) -> list[str]:
    return [unit.name for unit in model.sharding.units if unit.is_allocated]


@world(2)
def test_a_parameter_is_this_ranks_shard_with_as_many_dims(mesh: Mesh) -> None:
    plain = filled(Stack())
    model = instep.fully_shard(filled(Stack()), mesh)
    shards = dict(model.named_parameters())
    assert [p.dim() for p in shards.values()] == [p.dim() for p in plain.parameters()]
    sizes = json.dumps([p.numel() for p in shards.values()]).encode()
    by_rank = map(json.loads, mesh.world.group.all_gather_bytes(sizes, "sizes"))
    assert [sum(each) for each in zip(*by_rank, strict=True)] == [p.numel() for p in plain.parameters()]
    with instep.gathered(model):
        assert all(p is shards[name] for name, p in model.named_parameters())
        assert_same(dict(model.state_dict()), dict(plain.state_dict()), "whole")
    assert sum(p.numel() for p in shards.values()) < sum(p.numel() for p in plain.parameters())
    model.close()


@world(2)
def test_weights_come_for_a_unit_and_go_after_it(mesh: Mesh) -> None:
    model = instep.fully_shard(filled(Stack()), mesh)
    seen: list[list[str]] = []
    for layer in model.layers:
        layer.register_forward_hook(lambda *_: seen.append(gathered_units(model)))
        layer.register_full_backward_hook(lambda *_: seen.append(gathered_units(model)))
    for _ in range(2):  # the second knows the order, and prefetches
        seen.clear()
        loss_of(model).backward()
        assert max(map(len, seen)) <= 4  # the root, the one that computes, the one before or after it
        assert gathered_units(model) == []
    with torch.no_grad():
        loss_of(model)
    assert gathered_units(model) == []
    model.close()


@world(2)
def test_stage_2_keeps_the_weights_until_they_change(mesh: Mesh) -> None:
    model = instep.fully_shard(filled(Stack()), mesh, 2)
    asked: list[str] = []
    fill, gathers = model.sharding.gathers._fill, model.sharding.gathers
    gathers._fill = lambda unit, name: (asked.append(unit.name), fill(unit, name))[1]
    for _ in range(3):
        loss_of(model).backward()
    assert len(asked) == 5
    AdamW(model.parameters(), fused=True).step()  # which counts no writes
    with torch.no_grad():
        loss_of(model)
    assert len(asked) == 10
    model.close()


@world(2)
@STAGES
def test_what_is_written_inside_gathered_is_kept(mesh: Mesh, stage: int) -> None:
    model, other = instep.fully_shard(filled(Stack()), mesh, stage), Stack()
    with instep.gathered(model):
        model.load_state_dict(other_values := filled(nn.ModuleDict({"other": other}))["other"].state_dict())
        assert_same(instep.full_state_dict(model), dict(other_values), "loaded, and still inside")
    assert_same(instep.full_state_dict(model), dict(other_values), "loaded")
    torch.testing.assert_close(loss_of(model), loss_of(other))
    model.close()


@world(2)
@STAGES
def test_double_backward_has_the_bits_of_one_process(mesh: Mesh, stage: int) -> None:
    def penalty(module: nn.Module) -> Tensor:
        x = numbers(4, 12, key="x").requires_grad_()
        (gradient,) = torch.autograd.grad(module(x).square().sum(), x, create_graph=True)
        return gradient.square().mean()

    found = []
    for on in (mesh, world_of_one()):
        model = instep.fully_shard(filled(Stack()), on, stage)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in model.micro_batches(2):
            penalty(model).backward()
        optimizer.step()
        found.append(instep.full_state_dict(model))
        assert stage == 2 or on.world.size == 1 or gathered_units(model) == []
        model.close()
    assert_same(found[0], found[1], "weights")


@world(2)
@STAGES
def test_a_grad_scaler_skips_the_step_on_all_ranks_or_on_none(mesh: Mesh, stage: int) -> None:
    model = instep.fully_shard(filled(Stack()), mesh, stage)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    before = instep.full_state_dict(model)
    scaler.scale(loss_of(model)).backward()
    if mesh.rank == 1:
        next(p.grad for p in model.parameters() if p.numel()).view(-1)[0] = torch.inf
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0
    assert_same(instep.full_state_dict(model), before, "skipped")
    model.close()


def of_torch(model: Any, optimizer: Any) -> None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def of_torch_on_a_new_gradient(model: Any, optimizer: Any) -> None:
    for p in model.parameters():
        p.grad = p.grad / 2
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def of_the_optimizer(model: Any, optimizer: Any) -> None:
    optimizer.step()
    optimizer.state_dict()


def of_another_world(model: Any, optimizer: Any) -> None:
    whole = AdamW(Stack().parameters())
    for p in (p for group in whole.param_groups for p in group["params"]):
        p.grad = torch.ones_like(p)
    whole.step()
    optimizer.load_state_dict(whole.state_dict())
    optimizer.step()


def outside(model: Any, optimizer: Any) -> None:
    (loss_of(model) + sum(p.sum() for p in model.layers[0].parameters())).backward()


def hooked(model: Any, optimizer: Any) -> None:
    next(model.parameters()).register_hook(lambda gradient: gradient * 2)
    loss_of(model)


def written(model: Any, optimizer: Any) -> None:
    def write(module: Any, *_: Any) -> None:
        module.bias.detach().zero_()

    model.layers[1].register_forward_pre_hook(write)
    loss_of(model)


def within(model: Any, optimizer: Any) -> None:
    with instep.gathered(model):
        loss_of(model)


REFUSED: dict[str, tuple[Callable[[Any, Any], None], type[Exception], str]] = {
    "torch's clipping": (of_torch, RuntimeError, r"gradient shard.*instep\.clip_grad_norm_"),
    "torch's clipping of a new gradient": (of_torch_on_a_new_gradient, RuntimeError, "gradient shard"),
    "a norm by hand": (lambda m, o: m.into.weight.grad.data.norm(2), RuntimeError, "gradient shard"),
    "a state dict": (
        lambda m, o: m.state_dict(),
        RuntimeError,
        r"'into\.weight' is this rank's shard",
    ),
    "loading one": (lambda m, o: m.load_state_dict(Stack().state_dict()), RuntimeError, r"instep\.gathered"),
    "an optimizer's state": (
        of_the_optimizer,
        RuntimeError,
        r"this rank's part alone: save",
    ),
    "a whole optimizer's state": (of_another_world, ValueError, r"for a shard of shape"),
    "a weight outside of its unit": (
        outside,
        ValueError,
        r"'layers\.0\.\w+' was used outside",
    ),
    "a parameter's hook": (hooked, ValueError, r"'into\.weight' has a hook"),
    "writing in forward": (written, RuntimeError, r"'layers\.1\.bias' was written to in forward"),
    "Adafactor": (
        lambda m, o: torch.optim.Adafactor(m.parameters()).step(),
        RuntimeError,
        "Adafactor looks at whole parameters",
    ),
    "forward inside gathered": (within, ValueError, r"forward inside of instep\.gathered"),
    "a copy": (lambda m, o: copy.deepcopy(m), TypeError, "full_state_dict"),
}


@pytest.mark.parametrize("case", REFUSED)
@world(2)
def test_what_takes_a_shard_for_the_whole_is_refused(mesh: Mesh, case: str) -> None:
    misuse, error, match = REFUSED[case]
    model = instep.fully_shard(filled(Stack()), mesh)
    optimizer = AdamW(model.parameters())
    loss_of(model).backward()
    with pytest.raises(error, match=match):
        misuse(model, optimizer)
    model.close()


@world(2)
def test_ranks_that_run_other_units_all_raise_and_name_them(mesh: Mesh) -> None:
    class Either(Stack):
        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.layers[self.number](self.into(x)))

    model = instep.fully_shard(filled(Either()), mesh, find_unused_parameters=True)
    model.number = mesh.rank
    with pytest.raises(Desync, match=r"rank 0 gathers unit 'layers\.0'; rank 1 gathers unit 'layers\.1'"):
        loss_of(model)
    model.number = 2
    loss_of(model).backward()
    model.close()


def fail(*_: Any) -> None:
    raise ArithmeticError("planted")


@world(2)
def test_a_forward_that_raises_on_one_rank_is_told_to_the_other(mesh: Mesh) -> None:
    model = instep.fully_shard(filled(Stack()), mesh)

    handle = model.layers[1].register_forward_hook(fail) if mesh.rank else None
    with pytest.raises(ArithmeticError if mesh.rank else Desync, match=r"planted|rank 1 left"):
        loss_of(model).backward()
    if handle is not None:
        handle.remove()
    loss_of(model).backward()
    model.close()


@world(2)
@STAGES
def test_a_step_on_top_of_gradients_is_refused_by_all_ranks(mesh: Mesh, stage: int) -> None:
    """The second rank has no part of the weight, and went on alone until the deadline."""
    model = instep.fully_shard(filled(nn.Linear(12, 1, bias=False)), mesh, stage)
    loss_of(model).backward()
    with pytest.raises(ValueError, match="already has a gradient"):
        next(model.micro_batches(2))
    model.zero_grad(set_to_none=False)
    for _ in model.micro_batches(2):
        loss_of(model).backward()
    model.close()


@world(2)
@STAGES
def test_the_step_after_a_forward_that_raised_gathers_the_same_units(mesh: Mesh, stage: int) -> None:
    """In stage 2 the rank that raised gathered a unit again that the other one had kept."""
    model = instep.fully_shard(filled(Stack()), mesh, stage)
    loss_of(model).backward()  # from now on units are prefetched
    AdamW(model.parameters(), fused=True).step()

    handle = model.layers[0].register_forward_pre_hook(fail) if mesh.rank else None
    with pytest.raises((ArithmeticError, Desync)):
        loss_of(model)
    if handle is not None:
        handle.remove()
    loss_of(model).backward()
    model.close()


def test_a_rank_alone_computes_with_what_is_written_through_data() -> None:
    """Weights in another dtype were not cast again."""
    model = instep.fully_shard(nn.Linear(4, 4), world_of_one(), 2, compute_dtype=torch.bfloat16)
    x = torch.ones(2, 4)
    model(x)
    with instep.gathered(model):
        for p in model.parameters():
            p.data.zero_()
    assert not model(x).any()
    model.close()


@world(2)
@STAGES
def test_what_is_written_through_data_inside_gathered_is_kept(mesh: Mesh, stage: int) -> None:
    """Initialisation often writes so, and torch does not count it; a rank that had no part counted less."""
    model = instep.fully_shard(filled(Stack()), mesh, stage)
    loss_of(model).backward()  # stage 2 has all weights now
    with instep.gathered(model):
        model.layers[1].weight.data.mul_(2)
        model.into.weight.data[-1] = 5.0  # of one rank's shard alone
        expected = {name: x.clone() for name, x in model.state_dict().items()}
    assert_same(instep.full_state_dict(model), expected, "written")
    plain = Stack()
    plain.load_state_dict(expected)
    torch.testing.assert_close(loss_of(model), loss_of(plain))
    model.zero_grad()
    loss_of(model).backward()
    model.close()


@world(2)
@STAGES
def test_a_gradient_that_a_program_has_set_is_clipped_by_the_norm_over_all_ranks(
    mesh: Mesh, stage: int
) -> None:
    """Each rank took the norm of its own part, and scaled by another factor."""
    model = instep.fully_shard(filled(Stack()), mesh, stage)
    found = []
    for change in (lambda x: x.mul_(2), lambda x: x * 2, lambda x: x.clone() * 2):
        model.zero_grad()
        loss_of(model).backward()
        for p in model.parameters():
            p.grad = change(p.grad)
        found.append(instep.clip_grad_norm_(model.parameters(), 0.1).item())
    assert found[0] == found[1] == found[2]
    model.close()
