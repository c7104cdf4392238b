"""What is held is counted in storages; the expected numbers are products of shapes."""

import pytest
import torch
from torch import nn

from instep.bench.memory_usage import MemoryUsage, count, memory_usage
from instep.replicate.wrapper import DataParallel
from instep.shard.optimizer import ShardedOptimizer
from tests.world import world

ALIGN = 64  # a granule of a buffer: what a bucket may be longer than its gradients, per parameter
OVERHEAD = 64  # and what a whole allocation is longer than it was asked for


class Tied(nn.Module):
    """512 x 32 weights with two names, 8 frozen ones, 3 integers."""

    def __init__(self):
        super().__init__()
        self.inside, self.outside = nn.Embedding(512, 32), nn.Linear(32, 512, bias=False)
        self.outside.weight = self.inside.weight
        self.frozen = nn.Parameter(torch.ones(8), requires_grad=False)
        self.register_buffer("seen", torch.zeros(3, dtype=torch.int64))

    def forward(self, tokens):
        return self.outside(self.inside(tokens))


WEIGHTS = 512 * 32 * 4
TOKENS = torch.arange(6).view(2, 3)


def test_ties_and_views_count_once_and_frozen_weights_have_no_gradient():
    model = Tied()
    optimizer = torch.optim.AdamW(model.parameters())
    model(TOKENS).sum().backward()
    optimizer.step()
    moments = 2 * WEIGHTS + 4  # and the number of its steps
    assert memory_usage(model, optimizer) == MemoryUsage(WEIGHTS + 32, WEIGHTS, moments, 24)
    optimizer.zero_grad()
    assert memory_usage(model, optimizer).state == WEIGHTS + 32 + moments


def test_a_view_counts_for_the_whole_of_its_memory():
    flat = torch.zeros(1000)
    assert count(parameters=[flat[:10], flat[20:30]]) == MemoryUsage(parameters=4000)


def test_memory_of_two_purposes_is_the_firsts():
    x = torch.zeros(100)
    assert count(gradients=[x], scratch=[x, torch.zeros(5)]) == MemoryUsage(gradients=400, scratch=20)


def test_storages_over_the_same_addresses_count_once():
    memory = bytearray(4096)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    part = torch.frombuffer(memory, dtype=torch.float32, offset=1024, count=256)
    beyond = torch.frombuffer(memory, dtype=torch.uint8, offset=4000)
    assert len({x.untyped_storage()._cdata for x in (whole, part, beyond)}) == 3
    assert count(parameters=[part, whole], buffers=[beyond]) == MemoryUsage(parameters=4096)


def test_what_is_on_no_device_takes_no_memory():
    assert memory_usage(nn.Linear(1000, 1000, device="meta")) == MemoryUsage()


def test_no_purpose_is_made_up():
    with pytest.raises(TypeError, match="luggage"):
        count(luggage=[torch.zeros(1)])


def step(model, module, num_leaves):
    for _ in model.micro_batches(num_leaves):
        module(TOKENS).float().pow(2).mean().backward()


@pytest.mark.parametrize(("num_leaves", "sums"), [(1, 0), (2, 0), (4, 1), (8, 2)])
def test_the_tree_over_k_micro_batches_takes_log2_of_k_gradients(num_leaves, sums):
    module = Tied()
    model = DataParallel(module)
    step(model, module, num_leaves)
    found = memory_usage(module, model=model)
    assert found.gradients == pytest.approx(WEIGHTS, abs=ALIGN + OVERHEAD)
    assert found.scratch == pytest.approx(sums * WEIGHTS, abs=sums * (ALIGN + OVERHEAD))
    module.zero_grad()
    assert memory_usage(module, model=model) == found, "buckets stay, whether or not .grad is a view of them"
    model.close()


@world(2)
@pytest.mark.parametrize(("at_once_bytes", "received"), [(0, 0.5), (1 << 20, 3)])
def test_over_messages_a_rank_receives_half_a_gradient_and_small_ones_whole(mesh, at_once_bytes, received):
    module = Tied()
    model = DataParallel(module, process_group=mesh)
    exchange = model._reducer.exchange
    exchange.transport.at_once_bytes = at_once_bytes
    step(model, module, 2)
    found = memory_usage(module, model=model)
    model.close()
    assert found.gradients == pytest.approx(WEIGHTS, abs=2 * ALIGN + OVERHEAD)
    assert found.scratch == pytest.approx(received * WEIGHTS, abs=4 * ALIGN + OVERHEAD)


@world(2)
def test_sharded_moments_count_where_they_are(mesh):
    module = nn.Linear(4096, 8, bias=False)  # 8 blocks of 4096 elements: 4 for each rank
    optimizer = ShardedOptimizer(module.parameters(), torch.optim.AdamW, mesh)
    module(torch.ones(1, 4096)).sum().backward()
    optimizer.step()
    found = memory_usage(module, optimizer)
    optimizer.close()
    size = 4096 * 8 * 4
    assert found == MemoryUsage(size + OVERHEAD, size, 2 * size // 2 + 4)
