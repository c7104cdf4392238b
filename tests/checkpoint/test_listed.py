"""The list of shards that is kept between calls: it is what a new one would be, whatever has happened."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW

from instep.checkpoint.registered import Registered
from instep.checkpoint.state import TrainingState
from instep.state.shards import Shard


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.norm = nn.BatchNorm1d(4)
        self.last = nn.Linear(4, 2)
        self.register_buffer("scale", torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.first(x))) * self.scale


def step(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    net(torch.randn(5, 3, generator=torch.Generator().manual_seed(0))).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def lies(shards: list[Shard]) -> list[object]:
    """All that a shard is, and where its memory is."""
    return [(x.layout, x.holders, x.tensor.data_ptr(), x.tensor.shape, x.tensor.stride()) for x in shards]


def assert_as_new(state: TrainingState) -> None:
    held = lies(state.hashed())
    assert held == lies(TrainingState.hashed(state))
    assert lies(state.hashed()) == held


def replace_data(net: Net, optimizer: AdamW) -> None:
    net.first.weight.data = net.first.weight.detach().clone() + 1


def replace_data_by_a_view_of_it(net: Net, optimizer: AdamW) -> None:
    net.norm.weight.data = net.norm.weight.data.flip(0).contiguous()
    with torch.no_grad():
        net.first.weight.set_(net.first.weight.detach().t())


def replace_data_by_another_dtype(net: Net, optimizer: AdamW) -> None:
    net.last.bias.data = net.last.bias.data.double()


def replace_buffers(net: Net, optimizer: AdamW) -> None:
    net.scale = torch.full((2,), 3.0)
    net.last.register_buffer("more", torch.ones(3))


def keep_a_buffer_no_longer(net: Net, optimizer: AdamW) -> None:
    net.register_buffer("scale", net.scale, persistent=False)


def replace_a_moment(net: Net, optimizer: AdamW) -> None:
    state = optimizer.state[net.last.weight]
    state["exp_avg"] = state["exp_avg"].clone()


def drop_the_moments_of_one(net: Net, optimizer: AdamW) -> None:
    del optimizer.state[net.last.weight]


def rename_a_moment(net: Net, optimizer: AdamW) -> None:
    state = optimizer.state[net.last.weight]
    state["mean"] = state.pop("exp_avg")


def exchange_the_moments_of_two(net: Net, optimizer: AdamW) -> None:
    a, b = net.first.bias, net.norm.bias
    optimizer.state[a], optimizer.state[b] = optimizer.state[b], optimizer.state[a]


def load_the_optimizer(net: Net, optimizer: AdamW) -> None:
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def clear_the_optimizer(net: Net, optimizer: AdamW) -> None:
    optimizer.state.clear()


@pytest.mark.parametrize(
    "change",
    [
        replace_data,
        replace_data_by_a_view_of_it,
        replace_data_by_another_dtype,
        replace_buffers,
        keep_a_buffer_no_longer,
        replace_a_moment,
        drop_the_moments_of_one,
        rename_a_moment,
        exchange_the_moments_of_two,
        load_the_optimizer,
        clear_the_optimizer,
    ],
)
def test_the_list_is_another_when_a_tensor_is(change: Callable[[Net, AdamW], None]) -> None:
    net = Net()
    optimizer = AdamW(net.parameters())
    state = Registered({"model": net, "optimizer": optimizer}).state()
    step(net, optimizer)
    before = lies(state.hashed())
    change(net, optimizer)
    assert_as_new(state)
    assert lies(state.hashed()) != before


def test_the_first_step_makes_moments_and_the_next_ones_leave_the_list_as_it_is() -> None:
    net = Net()
    optimizer = AdamW(net.parameters())
    state = Registered({"model": net, "optimizer": optimizer}).state()
    assert not any("exp_avg" in x.name for x in state.hashed())
    step(net, optimizer)
    assert_as_new(state)
    listed = state.hashed()
    assert sum("exp_avg/" in x.name for x in listed) == len(list(net.parameters()))
    step(net, optimizer)
    assert all(x is y for x, y in zip(state.hashed(), listed, strict=True))
    weight = next(x for x in listed if x.name == "model:last.weight")
    assert torch.equal(weight.tensor, net.last.weight)


def test_a_parameter_that_is_unfrozen_gets_its_moments_in_the_list_when_it_has_them() -> None:
    net = Net()
    net.first.requires_grad_(False)
    optimizer = AdamW(net.parameters())
    state = Registered({"model": net, "optimizer": optimizer}).state()
    step(net, optimizer)
    assert "optimizer:exp_avg/first.weight" not in [x.name for x in state.hashed()]
    net.first.requires_grad_(True)
    assert_as_new(state)
    step(net, optimizer)
    assert_as_new(state)
    assert "optimizer:exp_avg/first.weight" in [x.name for x in state.hashed()]


def test_a_group_that_is_added_is_in_the_list_of_the_next_state() -> None:
    net = Net()
    optimizer = SGD(net.first.parameters(), lr=0.1, momentum=0.9)
    registered = Registered({"model": net, "optimizer": optimizer})
    step(net, optimizer)
    registered.state().hashed()
    optimizer.add_param_group({"params": list(net.last.parameters())})
    step(net, optimizer)
    state = registered.state()
    assert_as_new(state)
    assert "optimizer:momentum_buffer/last.bias" in [x.name for x in state.hashed()]
