"""Models that are unusual in what they return, hold or do: the gradient is right, under both contracts."""

from __future__ import annotations

import threading
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from instep.mesh.mesh import Mesh
from instep.replicate.strategies import STRATEGIES
from instep.replicate.wrapper import DataParallel
from tests.parity import filled, world_of_one
from tests.replicate.nets import WIDTH, Dense, Mixed, Twice, data
from tests.replicate.replicas import (
    assert_backwards,
    assert_mean_gradients,
    equal_everywhere,
    gradients,
    mean_gradients,
    samples,
    square,
)
from tests.world import world


@dataclass
class Record:
    logits: Tensor
    label: str = "a"


class Plain:
    """A class that torch knows nothing of."""

    def __init__(self, logits: Tensor) -> None:
        self.logits = logits


Pair = namedtuple("Pair", "logits other")

# How a model may return its logits, and how the loss finds them.
CONTAINERS = {
    "dict": (lambda x: {"logits": x, "n": 3}, lambda out: out["logits"]),
    "ordered dict in a list": (lambda x: [OrderedDict(a=(x,))], lambda out: out[0]["a"][0]),
    "named tuple": (lambda x: Pair(x, None), lambda out: out.logits),
    "dataclass": (Record, lambda out: out.logits),
    "dataclass in a tuple": (lambda x: (1, Record(x)), lambda out: out[1].logits),
    "object": (Plain, lambda out: out.logits),
}


class Returning(nn.Module):
    def __init__(self, pack: Any) -> None:
        super().__init__()
        self.dense, self.pack = Dense(), pack

    def forward(self, x: Tensor) -> Any:
        return self.pack(self.dense(x))


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.a, self.b = nn.Linear(6, 4), nn.Linear(4, 2), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = self.body(x)
        return self.a(h), self.b(h), h.detach()


class Scales(nn.Module):
    """``num`` weights, of which each rank leaves out some of its own."""

    def __init__(self, num: int, *shape: int) -> None:
        super().__init__()
        self.scales = nn.ParameterList([nn.Parameter(torch.ones(shape)) for _ in range(num)])

    def forward(self, x: Tensor, rank: int) -> Tensor:
        return x * torch.stack([s for i, s in enumerate(self.scales) if i % 7 != rank + 1]).sum(0)


# The model, and its output for the samples of a rank.
ODD: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module, int], Tensor]]] = {
    **{
        f"outputs in a {kind}": (
            partial(Returning, pack),
            lambda model, rank, unpack=unpack: unpack(model(samples(rank))),
        )
        for kind, (pack, unpack) in CONTAINERS.items()
    },
    "some outputs are used": (Heads, lambda model, rank: model(samples(rank))[rank]),
    "an output is changed in place": (Dense, lambda model, rank: model(samples(rank)).mul_(2.0)),
    "more parameters than a word has bits": (
        partial(Scales, 200, 6),
        lambda model, rank: model(samples(rank), rank),
    ),
    "one scalar": (partial(Scales, 1), lambda model, rank: model(samples(rank), rank)),
}


@pytest.mark.parametrize("kind", ODD)
@world(2)
def test_the_gradient_is_the_mean_where(mesh: Mesh, kind: str) -> None:
    make, output = ODD[kind]

    def loss(model: nn.Module, rank: int) -> Tensor:
        return output(model, rank).square().mean()

    model = DataParallel(filled(make()), process_group=mesh, find_unused_parameters=True)
    assert_backwards(mesh, model, loss, times=3)
    model.close()


@world(2)
def test_an_object_that_hides_its_tensors_still_heeds_no_sync(mesh: Mesh) -> None:
    model = DataParallel(filled(Returning(Plain)), process_group=mesh)
    with model.no_sync():
        model(samples(mesh.rank)).logits.square().mean().backward()
    assert not equal_everywhere(mesh, gradients(model.module))
    model.close()


@world(2)
def test_forwards_without_gradients_between(mesh: Mesh) -> None:
    model = DataParallel(filled(Dense()), process_group=mesh)
    loss = square(model, mesh.rank)
    with torch.no_grad():
        square(model, 5)
    with torch.inference_mode():
        square(model, 6)
    model.eval()
    square(model, 7)
    model.train()
    loss.backward()
    assert_mean_gradients(mesh, model.module, square)
    model.close()


@world(2)
def test_inputs_that_require_gradients_get_their_own(mesh: Mesh) -> None:
    model = DataParallel(filled(Dense()), process_group=mesh)
    x = samples(mesh.rank).requires_grad_()
    model(x).square().mean().backward()
    assert_mean_gradients(mesh, model.module, square)
    expected = samples(mesh.rank).requires_grad_()
    (g,) = torch.autograd.grad(model.module(expected).square().mean(), expected)
    torch.testing.assert_close(x.grad, g)
    model.close()


@world(2)
def test_five_dtypes_and_no_elements_and_no_dimensions(mesh: Mesh) -> None:
    for strategy in STRATEGIES:
        module = filled(Mixed())
        model = DataParallel(module, process_group=mesh, strategy=strategy)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            square(model, mesh.rank).backward()
            for p, expected in zip(module.parameters(), mean_gradients(module, square), strict=True):
                assert p.grad.dtype == p.dtype
                loose = {"rtol": 2e-2, "atol": 1e-3} if p.dtype == torch.bfloat16 else {}
                torch.testing.assert_close(p.grad, expected, **loose)
            assert equal_everywhere(mesh, gradients(module))
            optimizer.step()
        model.close()


@world(2)
def test_models_with_nothing_to_train_are_refused_as_by_torch(mesh: Mesh) -> None:
    for module in (nn.Identity(), nn.Linear(6, 3).requires_grad_(False), nn.ReLU()):
        with pytest.raises(RuntimeError, match="no parameter of the module requires a gradient"):
            DataParallel(module, process_group=mesh)


@world(2)
def test_a_wrapped_model_inside_checkpointing(mesh: Mesh) -> None:
    for reentrant in (True, False):
        model = DataParallel(filled(nn.Sequential(nn.Linear(6, 6), nn.Tanh())), process_group=mesh)

        def loss(module: nn.Module, rank: int, reentrant: bool = reentrant) -> Tensor:
            x = samples(rank).requires_grad_()
            for _ in range(2):
                x = checkpoint(module, x, use_reentrant=reentrant)
            return x.square().mean()

        for _ in range(2):
            model.zero_grad()
            loss(model, mesh.rank).backward()
            expected = mean_gradients(model.module, lambda m, r: square(lambda x: m(m(x)), r))
            torch.testing.assert_close(gradients(model.module), expected)
        model.close()


@world(2)
def test_backward_may_run_in_another_thread_than_forward(mesh: Mesh) -> None:
    model = DataParallel(filled(Dense()), process_group=mesh)
    for _ in range(2):
        model.zero_grad()
        loss = square(model, mesh.rank)
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()
        assert_mean_gradients(mesh, model.module, square)
    model.close()


@world(2)
def test_a_parameter_s_own_hook_changes_its_gradient_before_the_exchange(mesh: Mesh) -> None:
    model = DataParallel(filled(Dense()), process_group=mesh)
    first = next(iter(model.parameters()))
    first.register_hook(lambda gradient: 3 * gradient)
    square(model, mesh.rank).backward()
    expected = mean_gradients(filled(Dense()), square)
    torch.testing.assert_close(gradients(model.module), [3 * expected[0], *expected[1:]])
    model.close()


@world(2)
def test_backward_for_some_parameters_alone(mesh: Mesh) -> None:
    model = DataParallel(filled(Dense()), process_group=mesh, find_unused_parameters=True)
    chosen = [model.module.layers[3].weight]
    square(model, mesh.rank).backward(inputs=chosen)
    expected = mean_gradients(model.module, square)[2]
    torch.testing.assert_close(chosen[0].grad, expected)
    assert sum(p.grad is not None for p in model.parameters()) == 1
    model.close()


@world(2)
def test_a_number_of_uses_that_varies_from_step_to_step(mesh: Mesh) -> None:
    """Two segments, then three: by reentrant checkpointing each is a gradient of its own."""

    class Varying(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block, self.last = nn.Linear(6, 6), nn.Linear(6, 2)

        def forward(self, x: Tensor, uses: int, reentrant: bool = True) -> Tensor:
            for _ in range(uses):
                x = checkpoint(self.block, x, use_reentrant=reentrant)
            return self.last(x)

    model = DataParallel(filled(Varying()), process_group=mesh, strategy="flat")
    for uses in (2, 3, 1, 3, 2):
        model.zero_grad()
        model(samples(mesh.rank).requires_grad_(), uses).square().mean().backward()
        assert_mean_gradients(
            mesh, model.module, lambda m, r, n=uses: m(samples(r), n, False).square().mean()
        )
    model.close()


def test_forward_may_run_in_another_thread_than_the_loop_of_a_declared_step() -> None:
    model = DataParallel(filled(Twice()), process_group=world_of_one(), find_unused_parameters=True)
    outputs: list[Tensor] = []
    for micro_batch in model.micro_batches(2):
        worker = threading.Thread(
            target=lambda micro_batch=micro_batch: outputs.append(model(data(micro_batch, 0), True))
        )
        worker.start()
        worker.join()
        outputs.pop().square().mean().backward()
    assert model.module.shared.weight.grad is not None


@world(2)
def test_a_hook_that_returns_something_hears_of_it_from_torch(mesh: Mesh) -> None:
    model = DataParallel(filled(Dense()), process_group=mesh)
    next(model.parameters()).register_post_accumulate_grad_hook(lambda p: p.grad.mul_(2))
    with pytest.raises(RuntimeError, match="should return None"):
        model(torch.ones(2, WIDTH)).square().mean().backward()
    model.close()
