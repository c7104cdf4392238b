"""Beside torch's DDP: what it trains rightly we train alike; where its ranks drift apart, ours do not."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from instep.mesh.mesh import Mesh
from instep.replicate.wrapper import DataParallel
from tests.parity import filled, numbers
from tests.replicate.nets import Dense, Twice, conv_net, gpt
from tests.replicate.replicas import assert_mean_gradients, equal_everywhere, samples, square
from tests.world import world

Wrap = Callable[[nn.Module], nn.Module]
Loop = Callable[[nn.Module, torch.optim.Optimizer, int], None]
"""One optimizer step, number k, of a wrapped model on this rank."""


def train(wrap: Wrap, module: nn.Module, loop: Loop, steps: int = 4) -> nn.Module:
    model = wrap(module)
    optimizer = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
    for step in range(steps):
        loop(model, optimizer, step)
    if isinstance(model, DataParallel):
        model.close()
    return module


def assert_close(ours: nn.Module, theirs: nn.Module) -> None:
    """To the rounding of float32, and the same bits on all ranks."""
    DataParallel(ours, init_sync="verify", broadcast_buffers=False).close()
    for x, y in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-6)


def assert_trains_as_ddp_does(module: nn.Module, loop: Loop, **options: object) -> None:
    theirs = train(DistributedDataParallel, copy.deepcopy(module), loop)
    before = [p.detach().clone() for p in module.parameters()]
    ours = train(lambda m: DataParallel(m, **{"find_unused_parameters": False, **options}), module, loop)
    assert_close(ours, theirs)
    moved = [not torch.equal(x, y) for x, y in zip(before, ours.parameters(), strict=True)]
    assert moved == [p.requires_grad for p in ours.parameters()]


def rank() -> int:
    return torch.distributed.get_rank()


def drawn(key: str, *shape: int) -> Tensor:
    return numbers(*shape, key=f"{key} rank {rank()}")


def text_loss(model: nn.Module, key: str) -> Tensor:
    tokens = (drawn(key, 3, 9).abs() * 1000).long() % 17
    return F.cross_entropy(model(tokens[:, :-1].contiguous()).flatten(0, 1), tokens[:, 1:].flatten())


def square_loss(model: nn.Module, key: str) -> Tensor:
    return model(drawn(key, 4, 6)).square().mean()


def penalty(model: nn.Module, key: str) -> Tensor:
    """``autograd.grad`` with respect to inputs, then backward through its result."""
    x = drawn(key, 4, 6).requires_grad_()
    out = model(x)
    (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    return out.square().mean() + (slope.norm(dim=1) - 1).square().mean()


def plain(loss: Callable[[nn.Module, str], Tensor]) -> Loop:
    def loop(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
        optimizer.zero_grad()
        loss(model, f"step {step}").backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return loop


def accumulating(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    with model.no_sync():
        for i in range(2):
            (square_loss(model, f"step {step} part {i}") / 3).backward()
    (square_loss(model, f"step {step} part 2") / 3).backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=step % 2 == 0)


def switching(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Accumulation as many loops have it: the attribute is set, and no block is entered."""
    for turn in range(3):
        model.require_backward_grad_sync = turn == 2
        (square_loss(model, f"{step} {turn}") / 3).backward()
    optimizer.step()
    optimizer.zero_grad()
    if isinstance(model, DataParallel):
        exchanges = [event.step for event in model.recorder.events if event.name == "exchange"]
        assert len(exchanges) == (step + 1) * len(model._reducer.buckets)


RIGHT: dict[str, tuple[Loop, dict[str, object]]] = {
    "no_sync": (accumulating, {"bucket_cap_mb": 1e-4}),
    "require_backward_grad_sync": (switching, {}),
    "gradient penalty": (plain(penalty), {}),
}


@world(2, by="process")
def test_a_transformer_begins_with_rank_0_s_weights(mesh: Mesh) -> None:
    torch.manual_seed(1 + mesh.rank)
    assert_trains_as_ddp_does(gpt(), plain(text_loss))


@pytest.mark.parametrize("name", RIGHT)
@world(2, by="process")
def test_what_ddp_trains_is_trained_alike(mesh: Mesh, name: str) -> None:
    loop, options = RIGHT[name]
    assert_trains_as_ddp_does(filled(Dense()), loop, **options)


@world(2, by="process")
def test_batch_norm_keeps_rank_0_s_statistics_after_each_step(mesh: Mesh) -> None:
    def image_loss(model: nn.Module, key: str) -> Tensor:
        return F.cross_entropy(model(drawn(key, 4, 3, 8, 8)), torch.arange(4) % 3)

    module = filled(conv_net(num_classes=3))
    alone = copy.deepcopy(module)
    assert_trains_as_ddp_does(copy.deepcopy(module), plain(image_loss))
    model = DataParallel(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for step in range(3):
        plain(image_loss)(model, optimizer, step)
        # Training mode normalises by the batch, so rank 0's statistics come from its weights and data alone.
        alone(numbers(4, 3, 8, 8, key=f"step {step} rank 0"))
        with torch.no_grad():
            for mine, theirs in zip(alone.parameters(), module.parameters(), strict=True):
                mine.copy_(theirs)
        for x, y in zip(module.buffers(), alone.buffers(), strict=True):
            torch.testing.assert_close(x, y)
    model.close()


class Gan(nn.Module):
    """A discriminator behind a wrapper, fed by a generator behind another one."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = Dense()
        self.discriminator = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


def train_gan(wrap: Wrap, freeze: bool) -> Gan:
    gan = filled(Gan())
    generator, discriminator = wrap(gan.generator), wrap(gan.discriminator)
    of_generator, of_discriminator = (
        torch.optim.AdamW(net.parameters(), lr=0.01) for net in (gan.generator, gan.discriminator)
    )
    for step in range(3):
        noise, real = drawn(f"noise {step}", 4, 6), drawn(f"real {step}", 4, 3)
        of_discriminator.zero_grad()
        F.softplus(-discriminator(real)).mean().backward()
        F.softplus(discriminator(generator(noise).detach())).mean().backward()
        of_discriminator.step()
        of_generator.zero_grad()
        gan.discriminator.requires_grad_(not freeze)
        F.softplus(-discriminator(generator(noise))).mean().backward()
        gan.discriminator.requires_grad_(True)
        of_generator.step()
    return gan


@pytest.mark.parametrize("freeze", [True, False])
@world(2, by="process")
def test_a_gan_of_two_wrappers(mesh: Mesh, freeze: bool) -> None:
    ours = train_gan(lambda m: DataParallel(m, find_unused_parameters=False, bucket_cap_mb=1e-5), freeze)
    assert_close(ours, train_gan(DistributedDataParallel, freeze))


# What lets the replicas of DDP drift apart without a word.

Step = Callable[[nn.Module, int], None]
"""Forwards and backwards of a wrapped model on one rank's data."""


def two_losses(model: nn.Module, rank: int) -> Tensor:
    return sum(model(samples(rank, key)).square().mean() for key in ("real", "fake"))


def two_forwards(model: nn.Module, rank: int) -> None:
    """As a GAN's discriminator is trained. DDP expects one backward per forward, and skips the second."""
    for loss in [model(samples(rank, key)).square().mean() for key in ("real", "fake")]:
        loss.backward()


def part(module: nn.Module, rank: int) -> Tensor:
    return module.layers[:2](samples(rank)).square().mean()


def without_sometimes(model: nn.Module, rank: int) -> Tensor:
    return model(samples(rank), False).square().mean()


def frozen() -> nn.Module:
    module = Dense()
    module.layers[0].requires_grad_(False)
    return module


def by_hand(model: nn.Module, rank: int) -> None:
    parameters = list(model.module.parameters())
    for p, g in zip(parameters, torch.autograd.grad(square(model, rank), parameters), strict=True):
        p.grad = g


def unfreeze(model: nn.Module, rank: int) -> None:
    model.module.layers[0].requires_grad_(True)
    square(model, rank).backward()


def unfreeze_unseen(model: nn.Module, rank: int) -> None:
    """Trained through a part of the model, so that only the optimizer can notice."""
    model.module.layers[0].requires_grad_(True)
    model.module.layers[0](samples(rank)).sum().backward()
    model.module.layers[0].requires_grad_(False)


def replace_layer(model: nn.Module, rank: int) -> None:
    model.module.layers[-1] = filled(nn.Linear(5, 2))
    square(model, rank).backward()


def assign(model: nn.Module, rank: int) -> None:
    weights = {name: x.clone() for name, x in model.module.state_dict().items()}
    model.module.load_state_dict(weights, assign=True)
    square(model, rank).backward()


def retain(model: nn.Module, rank: int) -> None:
    loss = square(model, rank)
    loss.backward(retain_graph=True)
    loss.backward()


def only_no_sync(model: nn.Module, rank: int) -> None:
    with model.no_sync():
        square(model, rank).backward()


def change_dtype(model: nn.Module, rank: int) -> None:
    model.module.double()
    model(samples(rank).double()).square().mean().backward()


# The model, what a loop does, and the loss of whose gradient we have the mean, or what our error says.
DRIFTS: dict[str, tuple[Callable[[], nn.Module], Step, Callable[[nn.Module, int], Tensor] | str]] = {
    "forward of the inner module": (Dense, lambda m, r: square(m.module, r).backward(), square),
    "not forward": (Dense, lambda m, r: part(m.module, r).backward(), part),
    "a layer that no rank uses": (Twice, lambda m, r: without_sometimes(m, r).backward(), without_sometimes),
    "two forwards, two backwards": (Dense, two_forwards, two_losses),
    "a graph that is retained": (Dense, retain, lambda m, r: 2 * square(m, r)),
    "set by hand": (Dense, by_hand, r"'layers.0.weight' has a gradient, but nothing was exchanged"),
    "unfrozen": (frozen, unfreeze, r"'layers.0.weight' was frozen when .*unfreeze first"),
    "unfrozen, unseen": (frozen, unfreeze_unseen, r"'layers.0.weight' was frozen when the model was wrapped"),
    "replaced": (Dense, replace_layer, r"'layers.5.weight' was not there when the model was wrapped.*wrap"),
    "assigned": (Dense, assign, r"was not there when the model was wrapped.*assign=True replaces them"),
    "no_sync alone": (Dense, only_no_sync, r"never exchanged.*outside of no_sync.*sync_gradients"),
    "another dtype": (Dense, change_dtype, r"float64.*wrap"),
}


def step_once(module: nn.Module) -> None:
    torch.optim.SGD(module.parameters(), lr=0.1).step()


@pytest.mark.parametrize("name", DRIFTS)
@world(2, by="process")
def test_where_ddp_drifts_the_gradient_is_right_or_an_error_says_what_to_do(mesh: Mesh, name: str) -> None:
    make, step, ours = DRIFTS[name]
    theirs = filled(make())
    step(DistributedDataParallel(theirs), mesh.rank)
    step_once(theirs)
    assert not equal_everywhere(mesh, theirs.parameters())
    model = DataParallel(filled(make()), find_unused_parameters=True)
    if isinstance(ours, str):
        with pytest.raises((ValueError, RuntimeError), match=ours):  # noqa: PT012
            step(model, mesh.rank)
            step_once(model.module)
        if name == "replaced":
            with pytest.raises(ValueError, match="was not there when the model was wrapped"):
                next(model.micro_batches(2))
    else:
        step(model, mesh.rank)
        assert_mean_gradients(mesh, model.module, ours)
    if name in ("set by hand", "no_sync alone"):  # the way out that the message names
        model.sync_gradients()
        assert_mean_gradients(mesh, model.module, square)
        step_once(model.module)
        assert equal_everywhere(mesh, model.parameters())
    model.close()
