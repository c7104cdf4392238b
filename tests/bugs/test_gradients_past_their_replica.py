"""Gradients that came to the module's own parameters, past their replica, were G times too large.

``layer.compile()`` keeps a bound method of the layer it was made of, and so do attributes with bound methods;
closures, partial functions and plain lists keep layers and weights. Replicas are copies of the modules, which
still have those. In a declared step the gradient was then the sum over the micro-batches instead of their
mean, and where a parameter was used in both ways one of the two was lost.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from instep.replicate.threads import ThreadedReplicas
from instep.step.micro_batches import MicroBatch
from tests.parity import Training, assert_same_bits, bits_of_one, filled
from tests.replicate.nets import WIDTH, mean_square
from tests.replicate.test_threads import train


class Detour(nn.Module):
    """Calls its first layer through ``first``, which ``keep`` makes of the layer."""

    def __init__(self, keep: Callable[[nn.Linear], Any]) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, 5)
        self.out = nn.Linear(5, 3)
        self.first = (keep(self.layer),)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.first[0](x)))


class Both(Detour):
    """Uses the layer through its replica, too."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.out(torch.tanh(self.layer(x)))


def closure(layer: nn.Linear) -> Callable[[Tensor], Tensor]:
    weight = layer.weight
    return lambda x: F.linear(x, weight, layer.bias)


def partial_function(layer: nn.Linear) -> Callable[[Tensor], Tensor]:
    return partial(F.linear, weight=layer.weight, bias=layer.bias)


WAYS: dict[str, Callable[[nn.Linear], Any]] = {
    "the layer": lambda layer: layer,
    "bound method": lambda layer: layer.forward,
    "closure": closure,
    "partial function": partial_function,
}


@pytest.mark.parametrize("model", [Detour, Both])
@pytest.mark.parametrize("way", WAYS)
def test_parameters_that_are_reached_past_the_replica_have_the_bits_of_one_rank(way: str, model) -> None:
    training = Training(lambda: model(WAYS[way]), mean_square, 5)
    expected = bits_of_one(training)
    for num_replicas in (1, 2, 3):
        assert_same_bits(train(training, num_replicas), expected)


def compiled() -> nn.Module:
    net = nn.Sequential(nn.Linear(WIDTH, 5), nn.Tanh(), nn.Linear(5, 3))
    net[0].compile(backend="eager")
    return net


def hooked() -> nn.Module:
    net = nn.Sequential(nn.Linear(WIDTH, 5), nn.Tanh(), nn.Linear(5, 3))
    last = net[2]
    net[0].register_forward_hook(lambda module, args, out: out * last.weight.sum())
    last.weight.register_hook(lambda gradient: 2 * gradient)
    return net


@pytest.mark.parametrize("module", [compiled, hooked])
def test_compiled_layers_and_hooks_of_modules_and_parameters_have_the_bits_of_one_rank(module) -> None:
    training = Training(module, mean_square, 4, num_steps=2)
    assert_same_bits(train(training, 2), bits_of_one(training))


def test_a_backward_in_a_thread_of_its_own_is_refused_by_name() -> None:
    module = filled(Detour(WAYS["closure"]))
    replicas = ThreadedReplicas(module, 2)

    def body(model: nn.Module, micro_batch: MicroBatch) -> None:
        mean_square(model, micro_batch, 0)
        loss = module.layer.weight.square().sum()
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()

    with pytest.raises(ValueError, match=r"'layer\.weight' has a gradient that no replica's backward made"):
        replicas.micro_batches(2, body)
    replicas.close()


def test_a_hook_that_replicas_would_not_run_is_refused_by_name_until_it_is_removed() -> None:
    module = filled(Detour(WAYS["the layer"]))
    replicas = ThreadedReplicas(module, 2)
    hook = module.out.bias.register_post_accumulate_grad_hook(lambda parameter: None)
    with pytest.raises(ValueError, match=r"'out\.bias' has a post-accumulate hook.* use parameter\.regist"):
        replicas.micro_batches(2, lambda model, micro_batch: mean_square(model, micro_batch, 0))
    hook.remove()
    replicas.micro_batches(2, lambda model, micro_batch: mean_square(model, micro_batch, 0))
    assert not any(parameter._post_accumulate_grad_hooks for parameter in module.parameters())
    replicas.close()
