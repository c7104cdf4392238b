"""The canary: the same hash at every time and on every rank, and nothing of the model notices."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from instep.checkpoint.canary import agree_on_canary, canary
from instep.errors import ContractBroken
from instep.mesh.mesh import Mesh
from instep.replicate.wrapper import DataParallel
from tests.parity import filled, numbers, world_of_one
from tests.world import world

CPU = torch.device("cpu")
X = numbers(8, 6, key="the canary's micro-batch")


class Net(nn.Module):
    """Everything that a canary must leave alone or must not depend on."""

    def __init__(self, act: type[nn.Module] = nn.GELU) -> None:
        super().__init__()
        self.first, self.act, self.norm = nn.Linear(6, 5), act(), nn.BatchNorm1d(5)
        self.drop, self.last = nn.Dropout(0.3), nn.Linear(5, 2)
        self.register_buffer("constant", torch.tensor([2.0]), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.drop(self.norm(self.act(self.first(x))))) * self.constant


def run(module: nn.Module, seed: int = 0, x: Tensor = X) -> str:
    return canary(module, lambda model: model(x).square().mean(), seed=seed, device=CPU)


def test_it_does_not_depend_on_weights_statistics_or_the_random_state() -> None:
    module = Net()
    expected = run(module)
    for p in module.parameters():
        p.data.add_(1)
    module(X)
    torch.rand(3)
    assert run(module) == expected == run(Net())


def test_it_depends_on_what_is_computed() -> None:
    frozen = Net()
    frozen.first.bias.requires_grad_(False)
    other_dropout = Net()
    other_dropout.drop.p = 0.2
    constant = Net()
    constant.constant.fill_(3.0)
    variants = [Net(), Net(nn.Tanh), frozen, Net().eval(), other_dropout, constant, Net().double()]
    hashes = [run(module, x=X.to(module.last.weight.dtype)) for module in variants]
    assert len({*hashes, run(Net(), seed=1), run(Net(), x=X[:4])}) == len(variants) + 2


def test_one_ulp_in_one_gradient_is_seen() -> None:
    def flaw(gradient: Tensor) -> Tensor:
        gradient = gradient.clone()
        gradient[0, 0] = gradient[0, 0].nextafter(torch.tensor(torch.inf))
        return gradient

    def loss(model: nn.Module) -> Tensor:
        model.first.weight.register_hook(flaw)
        return model(X).square().mean()

    assert canary(Net(), loss, seed=0, device=CPU) != run(Net())


def test_it_leaves_everything_as_it_was() -> None:
    module = Net()
    module.last.weight.grad = torch.ones(2, 5)
    module.norm.eval()
    before, state = copy.deepcopy(module.state_dict()), torch.get_rng_state()
    gradient = module.last.weight.grad
    run(module)
    assert all(torch.equal(x, before[name]) for name, x in module.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)
    assert module.last.weight.grad is gradient and module.first.weight.grad is None
    assert (module.training, module.norm.training) == (True, False)


def test_a_loss_that_raises_leaves_the_random_state() -> None:
    module = Net()
    state = torch.get_rng_state()

    def loss(model: nn.Module) -> Tensor:
        torch.rand(5)
        raise RuntimeError("as planned")

    with pytest.raises(RuntimeError, match="as planned"):
        canary(module, loss, seed=0, device=CPU)
    assert torch.equal(torch.get_rng_state(), state)


def test_it_runs_under_no_grad_and_where_a_model_has_an_empty_tensor() -> None:
    module = nn.Sequential(nn.Linear(6, 3))
    module.register_parameter("nothing", nn.Parameter(torch.empty(0, 4)))
    expected = run(module)
    with torch.no_grad():
        assert run(module) == expected


@world(2)
def test_a_wrapper_s_hooks_do_not_run(mesh: Mesh) -> None:
    module = filled(nn.Linear(6, 2))
    alone = run(copy.deepcopy(module))
    model = DataParallel(module, process_group=mesh)
    assert run(module) == alone
    agree_on_canary(mesh.world.group, alone)
    assert [p.grad for p in module.parameters()] == [None, None]
    model.close()


@world(3)
def test_the_rank_that_computed_otherwise_is_named_on_all(mesh: Mesh) -> None:
    with pytest.raises(
        ContractBroken, match=r"^rank 1 would compute other bits than the majority, whose can"
    ):
        agree_on_canary(mesh.world.group, "b" * 64 if mesh.rank == 1 else "a" * 64)


@world(2)
def test_of_two_ranks_both_are_named(mesh: Mesh) -> None:
    with pytest.raises(
        ContractBroken, match=r"^ranks 0, 1 compute other bits.*rank 0 0{16}, rank 1 1{16}\. "
    ):
        agree_on_canary(mesh.world.group, str(mesh.rank) * 64)


@world(3)
def test_what_the_run_has_recorded_outweighs_a_majority(mesh: Mesh) -> None:
    mine = "a" * 64 if mesh.rank == 0 else "b" * 64
    with pytest.raises(
        ContractBroken, match=r"^ranks 1, 2 would compute other bits than this run, whose canary"
    ):
        agree_on_canary(mesh.world.group, mine, recorded="a" * 64)


def test_a_run_of_one_rank_is_held_to_its_record() -> None:
    group = world_of_one().world.group
    agree_on_canary(group, "a" * 64)
    agree_on_canary(group, "a" * 64, recorded="a" * 64)
    with pytest.raises(ContractBroken, match=r"^rank 0 would compute other bits than this run"):
        agree_on_canary(group, "b" * 64, recorded="a" * 64)
