"""A micro-batch that is computed once more has the bits it had, and the training does not notice."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from instep.mesh.mesh import Mesh
from instep.ordered.tree import adds
from instep.step.micro_batches import MicroBatch
from instep.train.recompute import leaf_gradients
from tests.parity import assert_same_bits, world_of_one
from tests.replicate.nets import gpt
from tests.train.tiny import Tiny, same_bits
from tests.world import world

MODULES = {
    "plain": gpt,
    "dropout": lambda: gpt(dropout=0.2),
    "checkpointed, dropout": lambda: gpt(dropout=0.2, checkpointed=True),
}


@pytest.mark.parametrize("kind", MODULES)
def test_it_has_the_bits_of_a_step_of_one_micro_batch(kind):
    tiny = Tiny(world_of_one(), num_leaves=1, module=MODULES[kind]())
    tiny.step()
    computed = tiny.compute(0)
    for leaf in tiny.model.micro_batches(1, step=tiny.done):
        loss = tiny.loss(tiny.module, leaf)
        loss.backward()
    assert same_bits(computed.loss, loss)
    assert_same_bits(
        list(computed.gradients.items()), [(name, p.grad) for name, p in tiny.module.named_parameters()]
    )


def test_it_has_other_bits_in_another_step_where_numbers_are_random():
    tiny = Tiny(world_of_one(), module=gpt(dropout=0.2))
    options = {"num_leaves": 4, "seed": 7}
    one, other = (leaf_gradients(tiny.module, tiny.loss, 0, step=step, **options) for step in (0, 1))
    assert not same_bits(one.loss, other.loss)


@world(3)
def test_the_sum_of_all_micro_batches_is_the_gradient_whoever_computes_them(mesh: Mesh) -> None:
    tiny = Tiny(mesh, num_leaves=5)
    tiny.step()
    for leaf in tiny.model.micro_batches(5, step=tiny.done):
        tiny.loss(tiny.module, leaf).backward()
    computed = [tiny.compute(leaf).gradients for leaf in range(5)]
    for name, parameter in tiny.module.named_parameters():
        values = [gradients[name] for gradients in computed]
        for left, right in adds([(leaf, leaf + 1) for leaf in range(5)], 5):
            values[left] = values[left] + values[right]
        assert same_bits(values[0] * (1.0 / 5.0), parameter.grad), name


class WithBuffers(nn.Module):
    """A GPT whose forward counts, besides."""

    def __init__(self) -> None:
        super().__init__()
        self.gpt = gpt(dropout=0.2)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def init_parameter(self, name: str, parameter: Tensor, generator: torch.Generator) -> None:
        self.gpt.init_parameter(name.removeprefix("gpt."), parameter, generator)

    def forward(self, tokens: Tensor) -> Tensor:
        self.calls += 1
        return self.gpt(tokens)


def test_gradients_buffers_and_random_numbers_stay_as_they_are():
    module = WithBuffers()
    before = copy.deepcopy(module.state_dict())
    state = torch.get_rng_state()
    tiny = Tiny(world_of_one(), module=module)
    tiny.compute(1)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(p.grad is None for p in module.parameters())
    assert module.calls.item() == before["calls"].item() == 0


@world(2)
def test_it_can_be_done_between_a_forward_and_its_backward_without_moving_a_bit(mesh: Mesh) -> None:
    disturbed, quiet = Tiny(mesh), Tiny(mesh)

    def disturbing(tiny: Tiny, model: nn.Module, leaf: MicroBatch, loss: Tensor) -> Tensor:
        if model is tiny.module:
            tiny.compute((leaf.index + 1) % tiny.num_leaves)
        return loss

    disturbed.fault = disturbing
    for _ in range(3):
        disturbed.step()
        quiet.step()
    assert disturbed.state_sha256() == quiet.state_sha256()
