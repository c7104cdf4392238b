"""Whatever in a graph needs a weight finds it, however early its unit went; and memory is given back."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from instep.mesh.mesh import Mesh
from instep.shard.buffer_pool import BufferPool
from tests.parity import filled, numbers
from tests.shard.gathered import (
    WIDTH,
    Stack,
    assert_same_gradients,
    built,
    gathered_units,
    in_slices,
    inputs,
    loss_of,
)
from tests.world import world


class Odd(Stack):
    """Layers that ``use`` their weights in a way of their own; ``told`` is what they leave in attributes."""

    def __init__(self, use: Callable[[Odd, nn.Module, Tensor], Tensor]) -> None:
        super().__init__(3)
        self.use = use
        self.told: list[Tensor] = []
        for layer in self.layers:
            layer.extra = nn.Parameter(numbers(WIDTH, WIDTH, key="extra"))
            layer.fixed = nn.Parameter(numbers(WIDTH, WIDTH, key="fixed"), requires_grad=False)
            layer.forward = _Forward(self, layer)

    def loss(self, rank: int) -> Tensor:
        self.told.clear()
        loss = loss_of(self, rank)
        return loss + torch.stack(self.told).sum() if self.told else loss


class _Forward:
    def __init__(self, stack: Odd, layer: nn.Module) -> None:
        self.stack, self.layer = stack, layer

    def __call__(self, x: Tensor) -> Tensor:
        return self.stack.use(self.stack, self.layer, x)

    def __deepcopy__(self, memo: dict[int, object]) -> _Forward:
        return _Forward(copy.deepcopy(self.stack, memo), copy.deepcopy(self.layer, memo))


def detached(stack: Odd, layer: nn.Module, x: Tensor) -> Tensor:
    """The input's gradient needs a weight after all gradients of the unit have come."""
    b = torch.sin(F.linear(x, layer.extra.detach()))
    return b + F.linear(x.detach(), layer.extra) * layer.gain


def told(stack: Odd, layer: nn.Module, x: Tensor) -> Tensor:
    """A loss beside the output, through a frozen weight."""
    stack.told.append(torch.tanh(x @ layer.fixed).square().sum())
    return x * layer.gain


def told_without_input(stack: Odd, layer: nn.Module, x: Tensor) -> Tensor:
    """The same through a trained one, which backward itself does not need."""
    stack.told.append(torch.softmax(x.detach() @ layer.extra, -1).square().sum())
    return x * layer.gain


def sliced(stack: Odd, layer: nn.Module, x: Tensor) -> Tensor:
    """Views with gaps and of another dtype, and a lazy negation."""
    pairs = torch.view_as_complex(layer.extra[:, : WIDTH - 8].reshape(WIDTH, -1, 2))
    imaginary = pairs.conj().imag
    return (
        x * layer.gain
        + F.pad(x @ imaginary, (0, WIDTH - imaginary.shape[1]))
        + x @ layer.extra.t()[::2].t() @ (layer.extra[: WIDTH // 2])
    )


@world(2)
@pytest.mark.parametrize("use", [detached, told, told_without_input, sliced])
def test_backward_finds_weights_by_whatever_way_it_comes(
    mesh: Mesh, use: Callable[[Odd, nn.Module, Tensor], Tensor]
) -> None:
    module = filled(Odd(use))
    plain = filled(Odd(use))
    with in_slices(mesh, module) as stage3:
        _close_when_whole(module, stage3)
        for step in range(2):
            loss, expected = module.loss(mesh.rank + step), plain.loss(mesh.rank + step)
            assert torch.equal(loss, expected)
            loss.backward()
            expected.backward()
            assert gathered_units(stage3) == []
        assert_same_gradients(module, plain)


def _close_when_whole(module: nn.Module, stage3: object) -> None:
    """Say ``closed`` after a unit's last gradient, as the reducer does."""
    for unit in stage3.units:  # type: ignore[attr-defined]
        came: set[int] = set()

        def arrived(p: Tensor, unit=unit, came=came) -> None:  # type: ignore[no-untyped-def]
            came.add(id(p))
            if len(came) == len(unit.parameters):
                came.clear()
                stage3.problem(p)  # type: ignore[attr-defined]
                stage3.closed(unit)  # type: ignore[attr-defined]

        if unit.trainable:
            for p in unit.parameters:
                p.register_post_accumulate_grad_hook(arrived)


@world(2)
def test_a_gradient_of_a_gradient_finds_weights_of_units_that_are_closed(mesh: Mesh) -> None:
    module, plain = built()
    with in_slices(mesh, module) as stage3:
        _close_when_whole(module, stage3)
        for m in (module, plain):
            x = inputs().requires_grad_()
            y = m(x)
            (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
            (slope.square().sum() + y.square().sum()).backward()
        assert_same_gradients(module, plain)


class Outer(nn.Module):
    """A unit around units, with a parameter of its own that it uses before they run."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(WIDTH))
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.gain
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class Around(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(12, WIDTH)
        self.outer = Outer()

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(self.into(x))


@world(2)
def test_a_unit_around_units_keeps_what_it_uses_before_they_run(mesh: Mesh) -> None:
    module, plain = built(Around)
    with in_slices(mesh, module, units=[module.outer, *module.outer.layers]) as stage3:
        _close_when_whole(module, stage3)
        for _ in range(2):
            loss_of(module).backward()
            loss_of(plain).backward()
        assert_same_gradients(module, plain)


class Positions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16, WIDTH))

    def forward(self, count: int) -> Tensor:
        return self.weight[:count] if count else self.weight


class Viewed(Stack):
    """The first layer returns ``count`` rows of its weight, or, with 0, the weight itself; used last."""

    count = 4

    def __init__(self) -> None:
        super().__init__(4)
        self.layers[0] = Positions()

    def forward(self, x: Tensor) -> Tensor:
        positions = self.layers[0](self.count)
        x = self.into(x)
        for layer in self.layers[1:]:
            x = layer(x)
        return self.out(x * positions[:4])


@world(2)
@pytest.mark.parametrize("count", [4, 0])
def test_a_weight_that_a_unit_returns_is_there_as_long_as_somebody_has_it(mesh: Mesh, count: int) -> None:
    module, plain = built(Viewed)
    module.count = plain.count = count
    with in_slices(mesh, module) as stage3:
        for _ in range(2):
            loss, expected = loss_of(module), loss_of(plain)
            assert torch.equal(loss, expected)
            loss.backward()
            expected.backward()
            assert gathered_units(stage3) == []
        assert_same_gradients(module, plain)
        with torch.no_grad():
            assert torch.equal(module(inputs()), plain(inputs()))
            kept = module.layers[0](4)
            for unit in stage3.units:
                unit.share("new masters")
            assert torch.equal(kept, plain.layers[0](4))
    assert torch.equal(kept, plain.layers[0](4))


@world(2)
def test_a_view_that_somebody_keeps_has_its_values_when_the_weights_have_gone(mesh: Mesh) -> None:
    module, _ = built()
    with in_slices(mesh, module) as stage3:
        layer = module.layers[1]
        with stage3.gathered([layer.gain]):
            kept = layer.gain.detach()
            values = kept.clone()
        loss_of(module).backward()
        assert torch.equal(kept, values)


@world(2)
def test_a_graph_does_not_hold_the_weights_between_forward_and_backward(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, _ = built()
    with in_slices(mesh, module) as stage3:
        buffers = stage3.units[0]._buffers
        taken: list[Tensor] = []
        given: list[Tensor] = []
        left: list[Tensor] = []
        monkeypatch.setattr(
            buffers, "take", lambda *args: taken.append(BufferPool.take(buffers, *args)) or taken[-1]
        )
        monkeypatch.setattr(buffers, "give_back", given.append)
        monkeypatch.setattr(buffers, "hand_over", left.append)
        losses = [loss_of(module), loss_of(module)]
        assert len(taken) == len(given) + 2  # the root's, and the last one's
        assert len(given) > 2 and not left
        sum(losses).backward()


@world(1)
def test_a_tensor_or_a_weight_that_was_changed_after_it_was_saved_is_still_an_error(mesh: Mesh) -> None:
    module, _ = built()
    with in_slices(mesh, module):
        seen: list[Tensor] = []
        module.into.register_forward_hook(lambda m, args, out: seen.append(out))
        loss = loss_of(module)
        with torch.no_grad():
            seen[0].add_(1.0)
        with pytest.raises(RuntimeError, match="has been modified by an inplace operation"):
            loss.backward()
        loss = loss_of(module)
        torch.autograd.graph.increment_version(module.layers[2].feed[2].weight)  # as an optimizer does
        with pytest.raises(
            RuntimeError, match=r"'layers\.2\.feed\.2\.weight' is at version \d+; expected .*optimizer step"
        ):
            loss.backward()


def as_an_extension(x: Tensor, weight: Tensor) -> Tensor:
    """In C++, where torch's dispatch does not see what is asked for."""
    with torch._C.DisableTorchFunctionSubclass():
        return F.linear(x, weight)


@world(2)
def test_weights_of_a_unit_that_is_not_gathered_are_an_error_where_they_are_used(mesh: Mesh) -> None:
    module, _ = built()
    with in_slices(mesh, module):
        module.layers[3].feed.forward = lambda x: as_an_extension(x, module.layers[0].feed[0].weight)
        with pytest.raises(RuntimeError, match=r"weights of unit 'layers\.0' .* are not gathered"):
            module(inputs().requires_grad_())
        assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


@world(2)
def test_a_weight_that_forward_writes_to_is_an_error_by_name(mesh: Mesh) -> None:
    module, plain = built()
    with in_slices(mesh, module):
        layer = module.layers[2]

        def write(*_: object) -> None:
            with torch.no_grad():
                layer.gain.mul_(0.5)

        hook = layer.norm.register_forward_hook(write)
        with pytest.raises(RuntimeError, match=r"'layers\.2\.gain' was written to in forward, which is lost"):
            module(inputs())
        hook.remove()
        assert torch.equal(module(inputs()), plain(inputs()))


@world(2)
@pytest.mark.parametrize("where", [0, 3])
def test_the_hook_is_gone_after_forward_also_after_one_that_raised(mesh: Mesh, where: int) -> None:
    def top() -> object:
        return torch._C._autograd._top_saved_tensors_default_hooks(True)

    module, plain = built()
    inside: list[bool] = []
    module.layers[where].register_forward_hook(lambda *_: inside.append(top() is not None))
    with in_slices(mesh, module):
        for error in (ValueError, KeyboardInterrupt):

            def fail(*_: object, error: type[BaseException] = error) -> None:
                raise error

            hook = module.layers[where].feed.register_forward_pre_hook(fail)
            with pytest.raises(error):
                module(inputs())
            hook.remove()
            loss_of(module)
            assert inside.pop() and top() is None
        with torch.no_grad():
            module(inputs())
            assert not inside.pop()
        module.zero_grad()
        loss_of(module).backward()
        loss_of(plain).backward()
        assert_same_gradients(module, plain)


def _on_cpu(m: nn.Module) -> Tensor:
    with torch.autograd.graph.save_on_cpu():
        return loss_of(m)


@world(2)
@pytest.mark.parametrize(
    "forward",
    [
        _on_cpu,
        lambda m: checkpoint(m, inputs().requires_grad_(), use_reentrant=False).square().sum(),
        lambda m: checkpoint(m, inputs().requires_grad_(), use_reentrant=True).square().sum(),
    ],
)
def test_hooks_of_the_user_around_the_module_stay_the_only_ones(
    mesh: Mesh, forward: Callable[[nn.Module], Tensor]
) -> None:
    module, plain = built()
    with in_slices(mesh, module) as stage3:
        for _ in range(2):
            forward(module).backward()
            forward(plain).backward()
        assert_same_gradients(module, plain)
        assert gathered_units(stage3) == []


@world(2)
@pytest.mark.parametrize("keep", [False, True])
def test_functional_transforms_inside_need_weights_that_stay(mesh: Mesh, keep: bool) -> None:
    module, plain = built()
    for m in (module, plain):
        feed = m.layers[1].feed
        feed.forward = lambda x, feed=feed: x + torch.func.grad(lambda y: (y**3).sum())(x.detach())
    with in_slices(mesh, module, reshard_after_forward=not keep):
        if keep:
            loss_of(module).backward()
            loss_of(plain).backward()
            assert_same_gradients(module, plain)
        else:
            with pytest.raises(RuntimeError, match="saved tensor hooks") as caught:
                module(inputs())
            assert any("reshard_after_forward=False" in note for note in caught.value.__notes__)


@world(1)
def test_a_backward_after_close_says_so(mesh: Mesh) -> None:
    module, _ = built()
    with in_slices(mesh, module):
        loss = loss_of(module)
    with pytest.raises(RuntimeError, match=r"call backward\(\) before close\(\)"):
        loss.backward()


@world(1)
def test_a_module_that_keeps_its_own_graph_is_collected(mesh: Mesh) -> None:
    module, _ = built()
    with in_slices(mesh, module) as stage3:
        module.kept = loss_of(module)
        gone = [weakref.ref(x) for x in (module, stage3)]
    del module, stage3
    gc.collect()
    assert [reference() for reference in gone] == [None, None]
