"""The plain loop: gradients are means over the ranks, whatever a model returns and a program does to them."""

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

from instep.errors import Desync
from instep.mesh.mesh import Mesh
from instep.reduce.norm import clip_grad_norm_
from instep.replicate.strategies import STRATEGIES
from instep.replicate.wrapper import DataParallel
from tests.parity import bits, filled, world_of_one
from tests.replicate.nets import WIDTH, Dense, Segments, Twice, data, gpt
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


def wrapped(mesh: Mesh, module: nn.Module | None = None, **options: Any) -> DataParallel:
    return DataParallel(filled(module or Dense()), process_group=mesh, **options)


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.1)


# Models that are unusual in what they return, hold or do.


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
        return x * sum(s for i, s in enumerate(self.scales) if i % 7 != rank + 1)


class Contrastive(nn.Module):
    """Returns a parameter: a hook on every output was a hook on that parameter, and stayed there."""

    def __init__(self) -> None:
        super().__init__()
        self.features, self.temperature = nn.Linear(WIDTH, 3), nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.features(x), self.temperature, x


def contrast(model: nn.Module, x: Tensor) -> Tensor:
    features, temperature, _ = model(x)
    return features * temperature


def sometimes(model: nn.Module, rank: int) -> Tensor:
    """Only rank 1 uses one of the layers, and nobody another."""
    return model(samples(rank), rank == 1)


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
    "some ranks use a layer": (Twice, sometimes),
    "a parameter is returned": (
        Contrastive,
        lambda model, rank: contrast(model, samples(rank).requires_grad_()),
    ),
}


@pytest.mark.parametrize("kind", ODD)
@world(2)
def test_the_gradient_is_the_mean_where(mesh: Mesh, kind: str) -> None:
    make, output = ODD[kind]

    def loss(model: nn.Module, rank: int) -> Tensor:
        return output(model, rank).square().mean()

    model = wrapped(mesh, make(), find_unused_parameters=True)
    assert_backwards(mesh, model, loss, times=3)
    model.zero_grad()
    with model.no_sync():
        loss(model, mesh.rank).backward()
    assert not equal_everywhere(mesh, gradients(model.module))
    loss(model, mesh.rank).backward()
    assert_mean_gradients(mesh, model.module, lambda module, rank: 2 * loss(module, rank))
    model.close()


def test_no_hook_stays_on_a_parameter_that_is_returned_nor_on_an_input() -> None:
    """The second micro-batch of a declared step then went "into the forward of" the first."""
    model = wrapped(world_of_one(), Contrastive())
    for micro_batch in model.micro_batches(3):
        x = data(micro_batch, 0).requires_grad_()
        contrast(model, x).square().mean().backward()
        assert not x._backward_hooks
    assert not model.module.temperature._backward_hooks
    model.close()


@world(2)
def test_models_with_nothing_to_train_are_refused_as_by_torch(mesh: Mesh) -> None:
    for module in (nn.Identity(), nn.Linear(6, 3).requires_grad_(False), nn.ReLU()):
        with pytest.raises(RuntimeError, match="no parameter of the module requires a gradient"):
            DataParallel(module, process_group=mesh)


@world(2)
def test_checkpointed_blocks_by_either_method(mesh: Mesh) -> None:
    """Reentrant, one block three times: DDP counts one gradient per parameter, and raises."""

    def loss(model: nn.Module, rank: int) -> Tensor:
        return model(samples(rank).requires_grad_()).square().mean()

    for strategy in STRATEGIES:
        module = Segments(reentrant=True)
        model = wrapped(mesh, module, strategy=strategy, bucket_cap_mb=1e-5)
        for _ in range(3):
            model.zero_grad()
            loss(model, mesh.rank).backward()
            module.reentrant = False  # autograd.grad, which the expected gradient is made with, needs it
            assert_mean_gradients(mesh, module, loss)
            module.reentrant = True
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

    model = wrapped(mesh, Varying(), strategy="flat")
    for uses in (2, 3, 1, 3, 2):
        model.zero_grad()
        model(samples(mesh.rank).requires_grad_(), uses).square().mean().backward()
        assert_mean_gradients(
            mesh, model.module, lambda m, r, n=uses: m(samples(r), n, False).square().mean()
        )
    model.close()


@world(2)
def test_forwards_without_gradients_and_inputs_with_their_own(mesh: Mesh) -> None:
    model, x = wrapped(mesh), samples(mesh.rank).requires_grad_()
    loss = model(x).square().mean()
    with torch.no_grad():
        square(model, 5)
    with torch.inference_mode():
        square(model, 6)
    model.eval()
    square(model, 7)
    model.train()
    loss.backward()
    assert_mean_gradients(mesh, model.module, square)
    expected = samples(mesh.rank).requires_grad_()
    (g,) = torch.autograd.grad(model.module(expected).square().mean(), expected)
    torch.testing.assert_close(x.grad, g)
    model.close()


def test_a_forward_that_raised_leaves_no_event_behind() -> None:
    """It was timed until the next one without gradients ended, minutes later."""
    model = DataParallel(nn.Linear(3, 2))
    with pytest.raises(RuntimeError):
        model(torch.zeros(1, 4))
    with torch.no_grad():
        model(torch.zeros(1, 3))
    assert not [event for event in model.recorder.events if event.name == "forward"]
    model.close()


@world(2)
def test_backward_and_forward_may_run_in_other_threads(mesh: Mesh) -> None:
    def elsewhere(function: Callable[[], object]) -> None:
        thread = threading.Thread(target=function)
        thread.start()
        thread.join()

    model, outputs = wrapped(mesh), []
    for _ in range(2):
        model.zero_grad()
        elsewhere(square(model, mesh.rank).backward)
        assert_mean_gradients(mesh, model.module, square)
    model.zero_grad()
    for micro_batch in model.micro_batches(2):
        elsewhere(lambda index=micro_batch.index: outputs.append(square(model, index)))
        outputs.pop().backward()
    assert_mean_gradients(mesh, model.module, square)
    model.close()


@world(2)
def test_hooks_of_parameters_change_the_gradient_before_the_exchange(mesh: Mesh) -> None:
    """Also one that comes later than ours, as in torch's tutorial: our lane was sending the same memory."""

    def clamp(parameter: Tensor) -> None:
        parameter.grad.clamp_(-0.01, 0.01)

    model = wrapped(mesh, bucket_cap_mb=1e-5)
    next(model.parameters()).register_hook(lambda gradient: 3 * gradient)
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(clamp)
    by_rank = [mean_gradients(filled(Dense()), lambda m, _, r=r: square(m, r), size=1) for r in range(2)]
    for parts in by_rank:
        parts[0] = 3 * parts[0]
    expected = [sum(g.clamp(-0.01, 0.01) for g in parts) / 2 for parts in zip(*by_rank, strict=True)]
    for _ in range(3):
        model.zero_grad()
        square(model, mesh.rank).backward()
        torch.testing.assert_close(gradients(model.module), expected)
    model.close()


# When it is exchanged.


def after_three_steps(mesh: Mesh, **options: object) -> list[Tensor]:
    """Parameters after plain steps in which the ranks see different text."""
    model = wrapped(mesh, gpt(), **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=False)
    for step in range(3):
        optimizer.zero_grad()
        tokens = (samples(mesh.rank, f"text {step}").abs() * 1000).long() % 17
        model(tokens).logsumexp(-1).mean().backward()
        clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
    model.close()
    return [p.detach().clone() for p in model.module.parameters()]


@world(3)
def test_every_strategy_and_bucket_size_gives_the_same_bits_on_three_ranks(mesh: Mesh) -> None:
    expected = after_three_steps(mesh)
    assert equal_everywhere(mesh, expected)
    caps = [{"bucket_cap_mb": cap} for cap in (1e-4, [1e-5, 1e-2], lambda sizes: [max(sizes) / 2**20])]
    for options in [*caps, *({"strategy": strategy} for strategy in STRATEGIES)]:
        ours = after_three_steps(mesh, **options)
        assert all(torch.equal(bits(x), bits(y)) for x, y in zip(ours, expected, strict=True)), options


@world(3)
def test_without_an_order_it_is_the_mean_too(mesh: Mesh) -> None:
    model = wrapped(mesh, ordered=False)
    assert_backwards(mesh, model)
    model.close()


@world(2)
def test_no_sync_counts_in_forward_as_in_ddp_and_ends_when_its_block_raises(mesh: Mesh) -> None:
    model = wrapped(mesh)
    loss = square(model, mesh.rank)
    with pytest.raises(LookupError), model.no_sync():  # noqa: PT012
        loss.backward()
        raise LookupError
    assert_mean_gradients(mesh, model.module, square)
    model.zero_grad()
    with model.no_sync():
        loss = square(model, mesh.rank)
    loss.backward()
    assert not equal_everywhere(mesh, gradients(model.module))
    model.sync_gradients()
    assert_mean_gradients(mesh, model.module, square)
    clip_grad_norm_(model.parameters(), 1e-3)
    clipped = [g.clone() for g in gradients(model.module)]
    model.sync_gradients()  # twice is once
    assert all(map(torch.equal, gradients(model.module), clipped))
    model.close()


@world(2)
def test_one_rank_alone_may_ask_for_gradients_that_are_not_accumulated(mesh: Mesh) -> None:
    """``autograd.grad``, or a backward through a frozen model: the exchange begins with the first gradient.

    It began where backward reached an output, and waited for the others until the deadline.
    """
    model = wrapped(mesh, find_unused_parameters=False)
    outside = samples(9).requires_grad_()
    out = model(outside).sum()
    if mesh.rank == 0:
        x = samples(0).requires_grad_()
        torch.autograd.grad(model(x).sum(), x)
        torch.autograd.grad(square(model, 0), list(model.parameters()))
        model.requires_grad_(False)
        model(x).sum().backward()
        assert x.grad is not None
        model.requires_grad_(True)
    assert all(p.grad is None for p in model.parameters())
    assert_backwards(mesh, model)
    model.zero_grad()
    for micro_batch in model.micro_batches(2):
        torch.autograd.grad(out, outside, retain_graph=True)  # of a forward before the loop
        square(model, micro_batch.index).backward()
    assert_mean_gradients(mesh, model.module, square)
    model.close()


# What a program does with it.


@world(2)
def test_a_reduced_gradient_that_a_user_keeps_is_not_overwritten(mesh: Mesh) -> None:
    """Gradients of two losses side by side, as PCGrad compares them."""

    def other(model: nn.Module, rank: int) -> Tensor:
        return model(samples(rank, "other")).exp().mean()

    model = wrapped(mesh)
    for _ in range(3):
        model.zero_grad()
        square(model, mesh.rank).backward()
        kept = gradients(model.module)
        before = [g.clone() for g in kept]
        model.zero_grad()
        other(model, mesh.rank).backward()
        assert all(map(torch.equal, kept, before))
        torch.testing.assert_close(kept, mean_gradients(model.module, square))
        assert_mean_gradients(mesh, model.module, other)
    model.close()


@pytest.mark.parametrize("strategy", STRATEGIES)
@world(2)
def test_a_list_of_gradients_holds_for_the_whole_training(mesh: Mesh, strategy: str) -> None:
    """``.grad`` became another tensor after the exchange; some loops and optimizers keep such lists."""
    for module in (Dense(), nn.Linear(6, 3).bfloat16()):  # of which gradients are copies of their bucket
        model = wrapped(mesh, module, strategy=strategy)
        dtype = next(module.parameters()).dtype

        def loss(module: nn.Module, rank: int, dtype: torch.dtype = dtype) -> Tensor:
            return square(lambda x: module(x.to(dtype)).float(), rank)

        loss(model, mesh.rank).backward()
        kept = gradients(module)
        for _ in range(3):
            for g in kept:
                g.detach_().zero_()  # which torch refuses for views
            loss(model, mesh.rank).backward()
            rounding = {"rtol": 2**-7, "atol": 2**-8} if dtype == torch.bfloat16 else {}
            torch.testing.assert_close(kept, mean_gradients(module, loss), **rounding)
            with torch.no_grad():
                for p, g in zip(module.parameters(), kept, strict=True):
                    p.sub_(g, alpha=0.1)
        model.close()


def edited(mesh: Mesh, model: DataParallel) -> None:
    square(model, mesh.rank).backward()
    first, *others = model.parameters()
    first.grad = torch.ones_like(first)
    for p in others:
        p.grad.add_(1.0)
    sgd(model.module).step()


def stepped_twice_and_without(mesh: Mesh, model: DataParallel) -> None:
    """With one gradient, with zeros, and with none."""
    optimizer = sgd(model.module)
    optimizer.step()
    square(model, mesh.rank).backward()
    optimizer.step()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    optimizer.step()


def by_two_optimizers(mesh: Mesh, model: DataParallel) -> None:
    layers = model.module.layers
    halves = [torch.optim.SGD(layers[0].parameters(), lr=0.1), torch.optim.AdamW(layers[3:].parameters())]
    for _ in range(3):
        model.zero_grad()
        square(model, mesh.rank).backward()
        for optimizer in halves:
            optimizer.step()


def by_lbfgs(mesh: Mesh, model: DataParallel) -> None:
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)

    def closure() -> Tensor:
        optimizer.zero_grad()
        square(model, mesh.rank).backward()
        # The same on all ranks, as the closure of a data-parallel LBFGS has to be.
        return sum(p.grad.square().sum() for p in model.parameters())

    for _ in range(2):
        optimizer.step(closure)


@pytest.mark.parametrize("use", [edited, stepped_twice_and_without, by_two_optimizers, by_lbfgs])
@world(2)
def test_the_ranks_have_the_same_weights_after(mesh: Mesh, use: Callable[[Mesh, DataParallel], None]) -> None:
    model = wrapped(mesh)
    use(mesh, model)
    assert equal_everywhere(mesh, model.parameters())
    model.close()


@world(2)
def test_a_closure_exchanges_what_was_accumulated_before_it(mesh: Mesh) -> None:
    """Lightning makes every step so: the gradients were looked at before the closure was called."""
    model = wrapped(mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with model.no_sync():
        (square(model, mesh.rank) / 4).backward()

    def closure() -> float:
        (square(model, mesh.rank) * 3 / 4).backward()
        return 7.0

    assert optimizer.step(closure) == 7.0
    assert_mean_gradients(mesh, model.module, square)
    model.close()


@world(2)
def test_a_closure_that_exchanges_nothing_is_refused(mesh: Mesh) -> None:
    model = wrapped(mesh)
    before = [p.detach().clone() for p in model.parameters()]

    def closure() -> None:
        with model.no_sync():
            square(model, mesh.rank).backward()

    with pytest.raises(RuntimeError, match="never exchanged"):
        sgd(model.module).step(closure)
    assert all(map(torch.equal, model.parameters(), before))
    model.close()


@pytest.mark.parametrize("zeroed", [True, False])
@world(2)
def test_a_gradient_from_before_freezing_is_no_obstacle(mesh: Mesh, zeroed: bool) -> None:
    """Pretrain all, freeze the body, wrap, and hand all parameters to the optimizer."""
    module = filled(Dense())
    square(module, 7).backward()
    module.layers[0].requires_grad_(False)
    if zeroed:
        module.zero_grad(set_to_none=False)
    model = DataParallel(module, process_group=mesh)
    optimizer = sgd(module)
    for _ in range(2):
        square(model, mesh.rank).backward()
        optimizer.step()
        for p in module.layers[3:].parameters():
            p.grad = None
    assert equal_everywhere(mesh, module.parameters())
    model.close()


# Gradients that a program sets, or reduces, by itself.


def summed(mesh: Mesh, x: Tensor) -> Tensor:
    mesh.world.group.all_reduce(x, "the program's own sum")
    return x


def by_autograd_grad(mesh: Mesh, model: DataParallel) -> None:
    parameters = list(model.parameters())
    for p, g in zip(parameters, torch.autograd.grad(square(model, mesh.rank), parameters), strict=True):
        p.grad = summed(mesh, g) / mesh.world.size


def under_no_sync(mesh: Mesh, model: DataParallel) -> None:
    with model.no_sync():
        square(model, mesh.rank).backward()
    for p in model.parameters():
        summed(mesh, p.grad).div_(mesh.world.size)


def to_the_same(mesh: Mesh, model: DataParallel) -> None:
    for p in model.parameters():
        p.grad = torch.ones_like(p)


@pytest.mark.parametrize("give", [by_autograd_grad, under_no_sync, to_the_same])
@world(2)
def test_what_is_alike_on_all_ranks_is_stepped(mesh: Mesh, give: Callable[[Mesh, nn.Module], None]) -> None:
    model = wrapped(mesh)
    optimizer = sgd(model)
    for _ in range(2):
        optimizer.zero_grad()
        give(mesh, model)
        before = [(p.detach().clone(), p.grad.clone()) for p in model.parameters()]
        optimizer.step()
        for p, (x, g) in zip(model.parameters(), before, strict=True):
            torch.testing.assert_close(p.detach(), x - 0.1 * g)
        assert_backwards(mesh, model)
        optimizer.step()
    assert equal_everywhere(mesh, model.parameters())
    model.close()


@world(3)
def test_what_differs_on_one_rank_is_an_error_on_all_and_names_it(mesh: Mesh) -> None:
    model = wrapped(mesh, find_unused_parameters=True)
    before = [p.detach().clone() for p in model.parameters()]
    to_the_same(mesh, model)
    model.module.layers[3].bias.grad[2] += mesh.rank == 1
    optimizer = sgd(model)
    with pytest.raises(RuntimeError, match=r"'layers\.3\.bias' has a gradient, but nothing was exchanged"):
        optimizer.step()
    assert all(map(torch.equal, model.parameters(), before))
    if mesh.rank == 1:
        model.module.layers[5].bias.grad = None
    with pytest.raises(RuntimeError, match="set the same on all ranks"):
        optimizer.step()
    model.sync_gradients()
    optimizer.step()
    assert equal_everywhere(mesh, model.parameters())
    model.close()


@world(2)
def test_a_rank_that_exchanges_while_another_steps_is_told(mesh: Mesh) -> None:
    model = wrapped(mesh)
    if mesh.rank == 0:
        to_the_same(mesh, model)
    act = square(model, mesh.rank).backward if mesh.rank else sgd(model).step
    with pytest.raises(Desync, match=r"with gradients that no exchange has reduced.*in the same order"):
        act()
    model.close()
