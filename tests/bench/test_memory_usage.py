"""What is held is counted in storages; the expected numbers are products of shapes."""

import pytest
import torch
from torch import nn

from instep.bench.memory_usage import MemoryUsage, memory_usage
from instep.replicate.wrapper import DataParallel

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
