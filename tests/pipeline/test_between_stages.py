"""What goes from one stage to the next is what one process would give to the next layer, and back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import instep
from instep.errors import Desync, PeerLost
from instep.mesh.mesh import Mesh
from instep.pipeline import connections, message_words
from instep.pipeline.actions import Action
from instep.pipeline.channel import StageChannel
from instep.pipeline.connections import SHORT_BYTES
from instep.step.micro_batches import MicroBatch
from tests.world import world

G = 4
X = torch.linspace(-1.0, 1.0, G * 3 * 4).view(G, 3, 4)


class Scale(nn.Module):
    """``x`` times a weight, which is not drawn: ranks that are threads share the generator."""

    def __init__(self, value: float = 0.5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-value, value, 4))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class Splits(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Scale(), Scale(0.25)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.first(x), self.second(x)


class Passes(nn.Module):
    """Two values, of which the second one has a weight of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = Scale(2.0)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x.tanh(), self.scale(y)


class Uses(nn.Module):
    """Of two values the second one in some micro-batches, or in none."""

    def __init__(self, *, second: bool) -> None:
        super().__init__()
        self.scale, self.second = Scale(), second

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        uses = self.second and x.detach().flatten()[0] > 0
        return self.scale(x + y) if uses else self.scale(x)


def splitting(*, second: bool) -> nn.Sequential:
    return Layered(Splits(), Passes(), Passes(), Uses(second=second))


class Layered(nn.Sequential):
    """A layer that gives a tuple gives the next one several arguments, in one process, too."""

    def forward(self, *values: Any) -> Any:
        for layer in self:
            found = layer(*values)
            values = found if isinstance(found, tuple) else (found,)
        return found


def in_one_process(net: nn.Module, inputs: list[Any]) -> list[Tensor | None]:
    model = instep.DataParallel(net, find_unused_parameters=True)
    for micro_batch in model.micro_batches(len(inputs)):
        model(inputs[micro_batch.index]).square().mean().backward()
    model.close()
    return [p.grad for p in net.parameters()]


def step(model: instep.Pipeline, inputs: list[Any]) -> None:
    def given(micro_batch: MicroBatch) -> Any:
        return inputs[micro_batch.index]

    model.step(lambda output, _: output.square().mean(), given, data=len(inputs))


def require_same(model: instep.Pipeline, expected: list[Tensor | None]) -> None:
    assert model.home is not None
    for p, gradient in zip(model.parameters(), expected, strict=True):
        if model.home.holds(p):
            assert (p.grad is None) == (gradient is None)
            assert gradient is None or torch.equal(p.grad, gradient)


@pytest.mark.parametrize(
    ("backend", "schedule"), [("gloo", "1f1b"), ("gloo", "zb-v"), ("shm", "zb-h1"), ("shm", "interleaved")]
)
@pytest.mark.parametrize("second", [False, True])
def test_what_led_to_an_output_that_no_stage_uses_has_no_gradient(
    backend: str, schedule: str, second: bool
) -> None:
    expected = in_one_process(splitting(second=second), [*X])
    assert [x is None for x in expected] == [False] + 3 * [not second] + [False]

    @world(2, pp=2, dp=1, backend=backend)
    def compared(mesh: Mesh) -> None:
        model = instep.Pipeline(splitting(second=second), mesh, schedule, find_unused_parameters=True)
        step(model, [*X])
        require_same(model, expected)
        model.close()

    compared()


class Masks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = Scale()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, None, Tensor]:
        return self.scale(x), x.gt(0).float(), None, x.argmax(-1)


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.told: list[tuple[bool, bool]] = []

    def forward(self, x: Tensor, mask: Tensor, nothing: None, indices: Tensor) -> Tensor:
        assert nothing is None and indices.dtype == torch.int64
        self.told.append((x.requires_grad, mask.requires_grad))
        return (x * mask).sum(-1)


@world(2, pp=2, dp=1)
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("trained", [False, True])
def test_what_needs_no_gradient_needs_none_in_the_next_stage(
    mesh: Mesh, schedule: str, trained: bool
) -> None:
    """Kernels of attention depend on whether their mask needs one, and so do bits."""
    net = Layered(Masks(), Layered(Masked(), Scale()))
    net[0].scale.requires_grad_(trained)
    inputs = [x[:, None].expand(3, 4, 4) for x in X]
    expected = in_one_process(net, inputs)
    net[1][0].told.clear()
    net.zero_grad()
    model = instep.Pipeline(net, mesh, schedule, find_unused_parameters=True)
    step(model, inputs)
    if mesh.along["pp"].rank == 1:
        assert net[1][0].told == [(trained, False)] * G
    require_same(model, expected)
    model.close()


@pytest.mark.parametrize("backend", ["gloo", "shm"])
@pytest.mark.parametrize(
    "steps",
    [[[3] * 3, [3] * 3], [[SHORT_BYTES // 16 + 1] * 2] * 2, [[2, 3], [3, 1], [200, 2], [1, 200]]],
    ids=["short", "long", "of several shapes"],
)
def test_micro_batches_of_all_sizes_and_shapes_have_the_gradients_of_one_process(
    backend: str, steps: list[list[int]]
) -> None:
    """A larger one than steps before have had comes in parts."""
    inputs = [[torch.linspace(-1.0, 1.0, rows * 4).view(rows, 4) for rows in step] for step in steps]
    expected = [in_one_process(nn.Sequential(Scale(), Scale(2.0), Sums()), its) for its in inputs]

    @world(2, pp=2, dp=1, backend=backend)
    def compared(mesh: Mesh) -> None:
        model = instep.Pipeline([Scale(), Scale(2.0), Sums()], mesh, "1f1b")
        for its, gradients in zip(inputs, expected, strict=True):
            step(model, its)
            require_same(model, gradients)
            model.zero_grad()
        model.close()

    compared()


@world(2, pp=2, dp=1, backend="shm")
def test_an_evaluation_in_inference_mode_may_come_before_the_first_step(mesh: Mesh) -> None:
    """The memory of messages was made in that mode, and no step could write to it."""
    model = instep.Pipeline([Scale(), Scale(2.0)], mesh, "1f1b")
    with torch.inference_mode():
        model(X[0])
    step(model, [*X])
    model.close()


class Sums(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sum(0)


@world(2, pp=2, dp=1)
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_a_parameter_of_the_loss_that_is_in_no_layer_is_refused(mesh: Mesh, schedule: str) -> None:
    model, criterion = instep.Pipeline([Scale(), Scale()], mesh, schedule), Splits()
    with pytest.raises(ValueError if mesh.rank else Desync) as raised:
        model.step(lambda output, _: criterion(output)[1].sum(), lambda one: X[one.index], data=G)
    told = "a parameter of shape (4,) is used by inputs or loss in stage 1, and is in none of its layers"
    assert told in str(raised.value)
    assert all(p.grad is None for p in (*model.parameters(), *criterion.parameters()))
    model.close()


@world(2, pp=2, dp=1)
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_a_tensor_of_ones_own_gets_its_gradient_where_it_is_used(mesh: Mesh, schedule: str) -> None:
    """In two parts, too, where its backward is one of weights."""
    given, target = (x.clone().requires_grad_() for x in (X, X))
    net = nn.Sequential(Scale(), Scale())
    for i in range(G):
        (net(given[i]) - target[i]).square().mean().backward()
    expected = [given.grad, target.grad]
    given.grad = target.grad = None
    net.zero_grad()
    model = instep.Pipeline(net, mesh, schedule)
    model.step(lambda y, one: (y - target[one.index]).square().mean(), lambda one: given[one.index], data=G)
    mine, others = (target, given) if mesh.rank else (given, target)
    assert mine.grad is not None and torch.equal(mine.grad, expected[mesh.rank]) and others.grad is None
    model.close()


@pytest.fixture
def all_but_integers_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (message_words, connections):
        monkeypatch.setattr(module, "is_on_device", torch.is_floating_point)


@world(2, pp=2, dp=1, backend="gloo")
def test_what_is_on_a_device_does_not_pass_through_the_hosts_memory(
    mesh: Mesh, all_but_integers_on_a_device: None
) -> None:
    """With two groups in the place of NCCL's; in a step in which routes are learnt, and in a later one."""
    ways = [mesh.along["pp"].duplicate() for _ in range(2)]
    for x, indices, nothing in passed(mesh, StageChannel(mesh.along["pp"].group, directions=ways)):
        assert x is not None and torch.equal(x, X[0].T) and x.stride() == (1, 4)
        assert indices is not None and indices.tolist() == [0, 1, 2] and nothing is None


def passed(mesh: Mesh, channel: StageChannel) -> list[list[Tensor | None]]:
    """What has come of two steps, in each of which both ranks send before they receive."""
    found = []
    forth, back = Action(0, "SEND_F", 0), Action(1, "SEND_B", 0)
    mine, theirs = (forth, Action(0, "RECV_B", 0)) if mesh.rank == 0 else (back, Action(1, "RECV_F", 0))
    for number in range(2):
        with channel.begun(number):
            channel.post(theirs, 1 - mesh.rank)
            channel.send(mine, 1 - mesh.rank, 0, [X[0].T, torch.arange(3), None])
            found.append(channel.take(theirs, 1 - mesh.rank).tensors)
            channel.flush()
    return found


@world(2)
@pytest.mark.parametrize("is_short", [True, False], ids=["looked for", "waited for by a thread"])
def test_a_stage_that_is_gone_is_a_lost_peer(
    mesh: Mesh, is_short: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_short:
        monkeypatch.setattr(connections, "LOOKS", 0)
    group = mesh.world.duplicate()
    ends = connections.Connections(group, torch.device("cpu"))
    if mesh.rank == 0:
        ends.post(Action(0, "RECV_B", 0), 1)
        with pytest.raises(PeerLost, match="a rank left 0RECV_B0"):
            ends.take(1, "0RECV_B0", lambda head: None)
    group.close()


@world(2, pp=2, dp=1)
@pytest.mark.parametrize(
    ("loss", "error"),
    [
        (lambda output, _: output.square().mean(1), r"micro-batch 0: expected a scalar tensor, got \(3,\)"),
        (lambda output, _: output.sum().item(), r"expected a scalar tensor, got a float"),
        (lambda output, _: None, r"expected a scalar tensor, got a NoneType"),
        (lambda output, _: output.detach().sum(), r"has no gradient: compute it from the output"),
    ],
)
def test_a_loss_that_cannot_be_is_refused_in_words(
    mesh: Mesh, loss: Callable[[Any, MicroBatch], Any], error: str
) -> None:
    last = mesh.along["pp"].rank == 1
    model = instep.Pipeline([Scale(), Scale()], mesh)
    with pytest.raises(
        (TypeError, ValueError) if last else Desync, match=error if last else f"rank 1: .*Error: .*{error}"
    ):
        model.step(loss, lambda one: X[one.index], data=G)
    model.close()


class Turn(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.transpose(1, 3)


class Watched(nn.Module):
    """Notes the strides of what comes to it, on both ways."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[tuple[str, tuple[int, ...]]] = set()

    def forward(self, x: Tensor) -> Tensor:
        self.seen.add(("forward", x.stride()))
        out = x * 2
        out.register_hook(lambda gradient: self.seen.add(("backward", gradient.stride())))
        return out


@world(2, pp=2, dp=1)
@pytest.mark.parametrize("schedule", ["gpipe", "zb-h1"])
@pytest.mark.parametrize("cut", [1, 3])
def test_what_goes_between_stages_keeps_its_strides(mesh: Mesh, cut: int, schedule: str) -> None:
    def net() -> nn.Sequential:
        found = nn.Sequential(nn.Conv2d(3, 4, 3), Watched(), Turn(), Watched(), nn.Linear(4, 4))
        return found.to(memory_format=torch.channels_last)

    def inputs(micro_batch: MicroBatch) -> Tensor:
        return torch.ones(2, 3, 8, 6).to(memory_format=torch.channels_last)

    alone, here = net(), net()
    alone(inputs(MicroBatch(0, G))).square().mean().backward()
    model = instep.Pipeline(here, mesh, schedule, cuts=[cut])
    model.step(lambda output, _: output.square().mean(), inputs, data=G)
    watched = [(one.seen, other.seen) for one, other in zip(here, alone, strict=True) if type(one) is Watched]
    seen = [pair for pair in watched if pair[0]]
    assert len(seen) == sum((i < cut) == (mesh.along["pp"].rank == 0) for i in (1, 3))
    assert all(one == other for one, other in seen)
    model.close()
