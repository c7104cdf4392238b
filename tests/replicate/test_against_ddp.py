"""The plain loop on two processes: what torch's DistributedDataParallel trains correctly, we train alike."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from instep.mesh.mesh import Mesh
from instep.replicate.strategies import STRATEGIES
from instep.replicate.wrapper import DataParallel
from tests.parity import filled, numbers
from tests.replicate.nets import Dense, Tied, conv_net, gpt
from tests.world import world

Loop = Callable[[nn.Module, torch.optim.Optimizer, int], None]
"""One optimizer step, number k, of a wrapped model on this rank."""


def train(wrap: Callable[[nn.Module], nn.Module], module: nn.Module, loop: Loop, steps: int = 4) -> nn.Module:
    model = wrap(module)
    optimizer = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
    for step in range(steps):
        loop(model, optimizer, step)
    if isinstance(model, DataParallel):
        model.close()
    return module


def assert_trains_as_ddp_does(
    module: nn.Module, loop: Loop, *, unused: bool = False, **options: object
) -> None:
    """Our parameters after a few steps are DDP's to float32 tolerance, and the same bits on all ranks."""
    theirs = train(
        lambda m: DistributedDataParallel(m, find_unused_parameters=unused), copy.deepcopy(module), loop
    )
    before = [p.detach().clone() for p in module.parameters()]
    ours = train(lambda m: DataParallel(m, find_unused_parameters=unused, **options), module, loop)
    DataParallel(ours, init_sync="verify", broadcast_buffers=False).close()
    for (name, x), y in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")
    moved = [not torch.equal(x, y) for x, y in zip(before, ours.parameters(), strict=True)]
    assert moved == [p.requires_grad for p in ours.parameters()]


def rank() -> int:
    return torch.distributed.get_rank()


def text_loss(model: nn.Module, key: str) -> Tensor:
    tokens = (numbers(3, 9, key=f"{key} rank {rank()}").abs() * 1000).long() % 17
    return F.cross_entropy(model(tokens[:, :-1].contiguous()).flatten(0, 1), tokens[:, 1:].flatten())


def square_loss(model: nn.Module, key: str) -> Tensor:
    return model(numbers(4, 6, key=f"{key} rank {rank()}")).square().mean()


def image_loss(model: nn.Module, key: str) -> Tensor:
    images = numbers(4, 3, 8, 8, key=f"{key} rank {rank()}")
    return F.cross_entropy(model(images), torch.arange(4) % 3)


def tied_loss(model: nn.Module, key: str) -> Tensor:
    tokens = (numbers(4, key=f"{key} rank {rank()}").abs() * 100).long() % 11
    return F.cross_entropy(model(tokens), tokens.flip(0))


def plain(loss: Callable[[nn.Module, str], Tensor], *, to_none: bool = True) -> Loop:
    def loop(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
        optimizer.zero_grad(set_to_none=to_none)
        loss(model, f"step {step}").backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return loop


def accumulating(loss: Callable[[nn.Module, str], Tensor], *, to_none: bool = True) -> Loop:
    def loop(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
        with model.no_sync():
            for i in range(2):
                (loss(model, f"step {step} part {i}") / 3).backward()
        (loss(model, f"step {step} part 2") / 3).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=to_none)

    return loop


@world(2, by="process")
def test_a_transformer(mesh: Mesh) -> None:
    torch.manual_seed(1 + mesh.rank)  # rank 0's weights are taken
    assert_trains_as_ddp_does(gpt(), plain(text_loss))


@world(2, by="process")
def test_tied_and_frozen_parameters(mesh: Mesh) -> None:
    assert_trains_as_ddp_does(filled(Tied()), plain(tied_loss))


@pytest.mark.parametrize("to_none", [True, False])
@world(2, by="process")
def test_gradients_that_are_zeroed_in_place(mesh: Mesh, to_none: bool) -> None:
    assert_trains_as_ddp_does(filled(Dense()), plain(square_loss, to_none=to_none))


@pytest.mark.parametrize("strategy", STRATEGIES)
@world(2, by="process")
def test_accumulation_under_no_sync(mesh: Mesh, strategy: str) -> None:
    for to_none in (True, False):
        loop = accumulating(square_loss, to_none=to_none)
        assert_trains_as_ddp_does(filled(Dense()), loop, strategy=strategy, bucket_cap_mb=1e-4)


def switching(loss: Callable[[nn.Module, str], Tensor]) -> Loop:
    """Accumulation as many loops have it: the attribute is set, and no block is entered."""

    def loop(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
        for turn in range(3):
            model.require_backward_grad_sync = turn == 2
            (loss(model, f"{step} {turn} {rank()}") / 3).backward()
        optimizer.step()
        optimizer.zero_grad()
        if isinstance(model, DataParallel):
            exchanges = [event.step for event in model.recorder.events if event.name == "exchange"]
            assert len(exchanges) == (step + 1) * len(model._reducer.buckets)

    return loop


@world(2, by="process")
def test_accumulation_by_setting_the_attribute(mesh: Mesh) -> None:
    assert_trains_as_ddp_does(filled(Dense()), switching(square_loss))


@world(2, by="process")
def test_batch_norm_keeps_rank_0_s_statistics_after_each_step(mesh: Mesh) -> None:
    module = filled(conv_net(num_classes=3))
    alone = copy.deepcopy(module)
    assert_trains_as_ddp_does(copy.deepcopy(module), plain(image_loss))
    model = DataParallel(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for step in range(3):
        plain(image_loss)(model, optimizer, step)
        # Training mode normalises by the batch, so rank 0's statistics come from its weights and data alone.
        images = numbers(4, 3, 8, 8, key=f"step {step} rank 0")
        alone(images)
        with torch.no_grad():
            for mine, theirs in zip(alone.parameters(), module.parameters(), strict=True):
                mine.copy_(theirs)
        for (name, x), (_, y) in zip(module.named_buffers(), alone.named_buffers(), strict=True):
            torch.testing.assert_close(x, y, msg=lambda text, name=name: f"{name}: {text}")
    model.close()


@world(2, by="process")
def test_two_forwards_and_backwards_in_turn(mesh: Mesh) -> None:
    def loop(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
        optimizer.zero_grad()
        square_loss(model, f"real {step}").backward()
        (-0.5 * square_loss(model, f"fake {step}")).backward()
        optimizer.step()

    assert_trains_as_ddp_does(filled(Dense()), loop)


class Gan(nn.Module):
    """A discriminator behind a wrapper, fed by a generator behind another one."""

    def __init__(self) -> None:
        super().__init__()
        self.generator, self.discriminator = (
            Dense(),
            nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)),
        )


def train_gan(wrap: Callable[[nn.Module], nn.Module], freeze: bool) -> Gan:
    gan = filled(Gan())
    generator, discriminator = wrap(gan.generator), wrap(gan.discriminator)
    of_generator = torch.optim.AdamW(gan.generator.parameters(), lr=0.01)
    of_discriminator = torch.optim.AdamW(gan.discriminator.parameters(), lr=0.01)
    for step in range(3):
        noise = numbers(4, 6, key=f"noise {step} rank {rank()}")
        real = numbers(4, 3, key=f"real {step} rank {rank()}")
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
    theirs = train_gan(DistributedDataParallel, freeze)
    ours = train_gan(lambda m: DataParallel(m, find_unused_parameters=False, bucket_cap_mb=1e-5), freeze)
    for x, y in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-6)
    DataParallel(ours, init_sync="verify").close()


@world(2, by="process")
def test_a_gradient_penalty(mesh: Mesh) -> None:
    """``autograd.grad`` with respect to inputs, then backward through its result."""

    def loop(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
        optimizer.zero_grad()
        x = numbers(4, 6, key=f"step {step} rank {rank()}").requires_grad_()
        out = model(x)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        (out.square().mean() + (slope.norm(dim=1) - 1).square().mean()).backward()
        optimizer.step()

    # The last bias does not influence any slope, but it has a gradient through the first term.
    assert_trains_as_ddp_does(filled(Dense()), loop)


@world(2, by="process")
def test_parameters_that_only_one_rank_uses(mesh: Mesh) -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.common = nn.Linear(6, 6)
            self.experts = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6)])

        def forward(self, x: Tensor) -> Tensor:
            return self.experts[rank()](torch.tanh(self.common(x)))

    def loop(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
        optimizer.zero_grad()
        square_loss(model, f"step {step}").backward()
        optimizer.step()

    assert_trains_as_ddp_does(filled(Experts()), loop, unused=True)
