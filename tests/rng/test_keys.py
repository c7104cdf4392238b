"""Random numbers belong to their (seed, step, leaf, block), whoever draws them and when."""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from instep.rng.generators import seed_generator
from instep.rng.keys import LeafKeys, derive, initialize

GENERATORS = [torch.default_generator]


class Draws(nn.Module):
    """Draws ``count`` numbers, and hands on the last."""

    def __init__(self, count: int = 1, *, block: bool = True) -> None:
        super().__init__()
        self.count = count
        self.rng_block = block

    def forward(self, _: Tensor) -> Tensor:
        return torch.rand(self.count)[-1]


class Chain(nn.Module):
    """Runs ``parts`` one after the other and returns what each drew."""

    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self) -> list[float]:
        return [part(torch.zeros(())).item() for part in self.parts]


def drawn(model: Chain, leaves: Iterable[int], *, seed: int = 7, step: int = 3) -> dict[int, list[float]]:
    """What every leaf draws, in the order of ``leaves``."""
    keys = LeafKeys(model, seed, GENERATORS)
    found = {}
    for leaf in leaves:
        with keys.leaf(step, leaf):
            found[leaf] = model()
    return found


@given(st.permutations(range(5)), st.integers(0, 5))
@settings(deadline=None, max_examples=25)
def test_a_leaf_draws_the_same_whichever_leaves_come_before(order, skipped):
    model = Chain(Draws(), Draws(3, block=False))
    whole = drawn(model, range(5))
    for leaf, numbers in drawn(model, order[skipped:]).items():
        assert numbers == whole[leaf]


def test_seed_step_leaf_and_block_all_have_numbers_of_their_own():
    model = Chain(Draws(), Draws(block=False), Draws(), Draws())
    found = [
        number
        for seed in (1, 2)
        for step in (1, 2)
        for numbers in drawn(model, (1, 2), seed=seed, step=step).values()
        for number in numbers
    ]
    assert len(found) == len(set(found)) == 2 * 2 * 2 * 4


@pytest.mark.parametrize("count", [2, 17, 1000])
def test_a_block_draws_the_same_whatever_the_blocks_before_it_drew(count):
    one, many = Chain(Draws(1), Draws()), Chain(Draws(count), Draws())
    assert drawn(one, [0])[0][1] == drawn(many, [0])[0][1]


@pytest.mark.parametrize("fails", [False, True])
def test_the_user_s_own_numbers_go_on_as_if_nothing_had_been(fails):
    model = Chain(Draws(5))
    keys = LeafKeys(model, 0, GENERATORS)
    torch.manual_seed(3)
    expected = torch.rand(10).tolist()
    torch.manual_seed(3)
    found = torch.rand(5).tolist()
    try:
        with keys.leaf(0, 0):
            model()
            if fails:
                raise LookupError
    except LookupError:
        pass
    assert found + torch.rand(5).tolist() == expected


def test_copies_of_a_model_and_models_that_outlive_their_keys_are_not_seeded():
    model = Chain(Draws(), Draws())
    keys = LeafKeys(model, 0, GENERATORS)
    with keys.leaf(0, 0):
        own = model()
        assert model() == own
        assert copy.deepcopy(model)() != own
    del keys
    gc.collect()
    assert model() != model()


class Dropped(nn.Module):
    """A linear layer with dropout, recomputed in backward if ``recompute`` says how."""

    rng_block = True

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.linear(x), 0.5)


def gradients(blocks: nn.Sequential, leaf: int, recompute: dict[str, bool] | None) -> list[list[float]]:
    """Of one micro-batch with ``blocks``, straight through or checkpointed."""
    keys = LeafKeys(blocks, 0, GENERATORS)
    x = torch.linspace(-1, 1, 64).view(4, 16).requires_grad_()
    blocks.zero_grad()
    with keys.leaf(0, leaf):
        y = x
        for block in blocks:
            y = block(y) if recompute is None else checkpoint(block, y, **recompute)
        y.square().sum().backward()
    return [p.grad.flatten().tolist() for p in blocks.parameters() if p.grad is not None]


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("preserve", [True, False])
def test_recomputing_a_block_draws_what_its_forward_drew(reentrant, preserve):
    blocks = nn.Sequential(Dropped(), Dropped(), Dropped())
    straight = gradients(blocks, 0, None)
    assert len(straight) == 6
    assert gradients(blocks, 1, None) != straight
    recompute = {"use_reentrant": reentrant, "preserve_rng_state": preserve}
    assert gradients(blocks, 0, recompute) == straight


class Named(nn.Module):
    """Parameters of 3 x 5 by the names given, in that order."""

    def __init__(self, *names: str, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        for name in names:
            self.register_parameter(name, nn.Parameter(torch.empty(3, 5, dtype=dtype)))

    def init_parameter(self, name: str, parameter: Tensor, generator: torch.Generator) -> None:
        parameter.normal_(generator=generator)


def weights(model: nn.Module, seed: int = 0) -> dict[str, list[float]]:
    initialize(model, seed)
    return {name: parameter.flatten().tolist() for name, parameter in model.named_parameters()}


def test_initial_weights_depend_on_name_and_seed_alone():
    whole = weights(Named("a", "b", "c"))
    assert weights(Named("c", "a")) == {"c": whole["c"], "a": whole["a"]}
    assert len({tuple(values) for values in whole.values()}) == 3
    assert weights(Named("a"), seed=1)["a"] != whole["a"]


def test_initial_weights_keep_dtype_and_identity_and_leave_the_default_generator_alone():
    model, before = Named("a", dtype=torch.bfloat16), torch.get_rng_state()
    parameter, version = model.a, model.a.data_ptr()
    initialize(model, 0)
    assert model.a is parameter and torch.equal(torch.get_rng_state(), before)
    assert (model.a.dtype, model.a.data_ptr(), model.a.requires_grad) == (torch.bfloat16, version, True)
    assert model.a.grad_fn is None


@given(st.integers(0, (1 << 64) - 1))
@settings(deadline=None)
def test_a_key_is_folded_to_the_32_bits_that_the_cpu_generator_uses(key):
    high, low = divmod(key, 1 << 32)
    folded = torch.Generator()
    seed_generator(folded, key)
    expected = torch.Generator().manual_seed(high ^ low)
    assert torch.equal(folded.get_state(), expected.get_state())


def test_every_path_has_a_key_of_its_own():
    paths = [(), (0,), (1,), (0, 1), (1, 0), (0, 1, 2), (1, 2), (12,), ("1", 2), ("12",), ("init", "a")]
    keys = [derive(seed, *path) for seed in (0, 1, 10) for path in paths]
    assert len(set(keys)) == len(keys)
    assert all(0 <= key < 1 << 64 for key in keys)
    assert max(keys) >= 1 << 60
