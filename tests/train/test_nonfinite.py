"""A number that is not finite is found: rank, micro-batch, parameter, and every rank says the same."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from instep.elastic.faults import poison, poisoned
from instep.errors import Diverged, InstepError
from instep.mesh.mesh import Mesh
from instep.step.micro_batches import MicroBatch
from instep.train.nonfinite import NonFinite, first_nonfinite
from instep.train.run_config import ChecksConfig
from tests.parity import world_of_one
from tests.train.tiny import Fault, Tiny, flawed
from tests.world import world

UP = "blocks.1.feed_forward.up.weight"


def search(tiny: Tiny) -> NonFinite | None:
    own = tiny.plan[tiny.group.rank]
    return first_nonfinite(tiny.compute, own, tiny.group, tiny.module.named_parameters())


def poisoning(name: str, leaf_index: int) -> Fault:
    """Makes the gradient of parameter ``name`` nan in one micro-batch."""

    def fault(tiny: Tiny, model: nn.Module, leaf: MicroBatch, loss: Tensor) -> Tensor:
        return poisoned(loss, dict(model.named_parameters())[name]) if leaf.index == leaf_index else loss

    return fault


@pytest.mark.parametrize("leaf", [0, 2, 3])
@world(3)
def test_a_gradient_is_named_with_its_parameter_and_rank(mesh: Mesh, leaf: int) -> None:
    tiny = Tiny(mesh, fault=poisoning(UP, leaf))
    owner = next(rank for rank, own in enumerate(tiny.plan) if leaf in own)
    found = search(tiny)
    assert found == NonFinite(leaf, (owner,), UP, UP, loss=False)
    assert str(found) == (
        f"the gradient of '{UP}' in micro-batch {leaf}, which rank {owner} computed, is not finite"
    )


@world(2)
def test_a_loss_is_named_with_all_the_gradients_that_it_spoils(mesh: Mesh) -> None:
    tiny = Tiny(mesh, fault=flawed(math.inf, leaves={1, 3}, steps={0}))
    names = [name for name, _ in tiny.module.named_parameters()]
    assert search(tiny) == NonFinite(1, (0,), names[0], names[-1], loss=True)


def test_a_loss_alone_is_enough():
    def fault(tiny: Tiny, model: nn.Module, leaf: MicroBatch, loss: Tensor) -> Tensor:
        return loss + math.inf

    found = search(Tiny(world_of_one(), fault=fault))
    assert found == NonFinite(0, (0,), "", "", loss=True)
    assert "though all its gradients are" in str(found)


@world(3)
def test_a_weight_goes_before_the_gradients_that_it_spoils(mesh: Mesh) -> None:
    tiny = Tiny(mesh, fault=poisoning(UP, 0))
    if mesh.rank > 0:
        poison(tiny.module.get_parameter("blocks.0.attention.qkv.bias"), 5)
    found = search(tiny)
    assert str(found) == "'blocks.0.attention.qkv.bias' itself is not finite on ranks 1 and 2"


@world(3)
def test_a_healthy_step_has_no_culprit(mesh: Mesh) -> None:
    tiny = Tiny(mesh)
    for _ in range(2):
        assert search(tiny) is None
        assert tiny.step() is None


@world(2)
def test_an_error_of_one_rank_in_the_search_is_every_rank_s(mesh: Mesh) -> None:
    def fault(tiny: Tiny, model: nn.Module, leaf: MicroBatch, loss: Tensor) -> Tensor:
        if mesh.rank == 1:
            raise MemoryError("no memory for a second set of weights")
        return loss

    with pytest.raises(MemoryError if mesh.rank else InstepError, match="no memory for a second set"):
        search(Tiny(mesh, fault=fault))


def fields(error: BaseException) -> tuple[bool, bool]:
    """Whether it is the base class, and whether another rank tells it."""
    return isinstance(error, InstepError), getattr(error, "told", False)


@world(2)
def test_a_run_ends_on_every_rank_with_the_culprit_and_the_weights_of_before(mesh: Mesh) -> None:
    tiny = Tiny(mesh, checks=ChecksConfig(max_skipped=2), fault=flawed(math.nan, leaves={3}, steps={2, 3, 4}))
    tiny.step()
    tiny.step()
    weights = [p.detach().clone() for p in tiny.module.parameters()]
    assert tiny.step() == tiny.step() == "gradient norm is nan"
    first, *_, last = [name for name, _ in tiny.module.named_parameters()]
    with pytest.raises(Diverged) as caught:
        tiny.step()
    assert str(caught.value) == (
        "step 4: gradient norm is nan; 3 steps in a row were skipped, and checks.max_skipped is 2. First of "
        f"all, the loss and the gradient of '{first}', and others up to '{last}', where backward came first, "
        "in micro-batch 3, which rank 1 computed, are not finite. Lower optim.lr, or resume from an earlier "
        "checkpoint with these steps in checks.skip_steps"
    )
    assert (caught.value.ranks, caught.value.parameter) == ((1,), first)
    assert fields(caught.value) == (True, mesh.rank == 1)
    assert all(map(torch.equal, weights, tiny.module.parameters()))


@world(2)
def test_what_nobody_computes_again_is_laid_on_exchange_or_memory(mesh: Mesh) -> None:
    tiny = Tiny(mesh, checks=ChecksConfig(max_skipped=0))
    tiny.gradients()
    tiny.health.judge(math.nan)
    with pytest.raises(
        Diverged, match=r"1 step was skipped, .* No micro-batch shows it .* checks.leaves_every"
    ):
        tiny.give_up("gradient norm is nan", math.nan)


@world(2)
def test_spikes_that_last_end_a_run_without_a_search(mesh: Mesh) -> None:
    tiny = Tiny(mesh, checks=ChecksConfig(max_skipped=1, spike=10.0), fault=poisoning(UP, 0))
    tiny.health.restore({"skipped": 0, "in_a_row": 0, "norms": [1.0] * 20})
    reasons = [tiny.health.judge(9.0) for _ in range(2)]
    assert tiny.health.exhausted
    with pytest.raises(
        Diverged, match=r"spike: norm 9, .* 2 steps in a row .* raise checks.spike$"
    ) as caught:
        tiny.give_up(str(reasons[-1]), 9.0)
    assert (caught.value.ranks, caught.value.parameter) == ((), "")
