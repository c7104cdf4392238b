"""What autograd keeps is counted while it is kept, and nothing else is other for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import instep
from instep.shard.saved_memory import Saved, saved_beside
from instep.shard.saved_weights import top


def squared_slope(module: nn.Module, x: Tensor) -> Tensor:
    """With a backward of its backward."""
    (slope,) = torch.autograd.grad(module(x).sum(), x, create_graph=True)
    return slope.square().sum()


def of_func(module: nn.Module, x: Tensor) -> Tensor:
    """With gradients that are computed where no hook may be."""
    slope = torch.func.grad(lambda x: module(x).sum())(x)
    return (module(x) * slope.sum()).sum() + torch.func.jacrev(module)(x).sum()


LOSSES: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "plain": lambda module, x: module(x).square().sum(),
    "autocast": lambda module, x: in_bf16(module, x).float().square().sum(),
    "checkpoint": lambda module, x: checkpoint(module, x, use_reentrant=False).square().sum(),  # type: ignore[no-untyped-call]
    "reentrant": lambda module, x: checkpoint(module, x, use_reentrant=True).square().sum(),  # type: ignore[no-untyped-call]
    "twice": squared_slope,
    "func": of_func,
}


def in_bf16(module: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found: Tensor = module(x)
        return found


def small() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.0), nn.Linear(8, 2))
    return module, torch.randn(3, 4, requires_grad=True)


def gradients(name: str, saved: Saved | None) -> list[Tensor]:
    module, x = small()
    if saved is None:
        LOSSES[name](module, x).backward()
    else:
        with saved.watch():
            LOSSES[name](module, x).backward()
    return [p.grad for p in module.parameters() if p.grad is not None]


@pytest.mark.parametrize("name", LOSSES)
def test_a_backward_within_has_the_bits_of_one_without(name: str) -> None:
    expected, saved = gradients(name, None), Saved()
    found = gradients(name, saved)
    assert len(found) == len(expected) > 0
    assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))
    assert saved.peak > 0
    assert saved.nbytes == 0
    assert saved.is_complete == (name != "func")
    assert top() is None


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_what_is_compiled_within_is_not_compiled_again_without(backend: str) -> None:
    module, x = small()
    graphs = []

    def compiled(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., object]:
        graphs.append(graph)
        found: Callable[..., object] = torch._dynamo.lookup_backend(backend)(graph, inputs)
        return found

    torch._dynamo.reset()
    fast, saved = torch.compile(module, backend=compiled), Saved(module.parameters())
    with saved.watch():
        fast(x).sum().backward()
    fast(x).sum().backward()
    torch._dynamo.reset()
    assert len(graphs) == 1
    assert saved.is_complete
    assert saved.peak > 0


def test_a_tensor_that_is_changed_before_backward_is_found() -> None:
    x = torch.ones(3, requires_grad=True)
    with Saved().watch():
        y = (2 * x).exp()
        y.add_(1)
        with pytest.raises(RuntimeError, match=r"inplace operation: .* is at version 1; expected version 0"):
            y.sum().backward()


def test_an_exception_leaves_no_hook_and_takes_no_other_one() -> None:
    others = lambda x: x, lambda x: x

    def leave() -> None:
        with Saved().watch():
            torch._C._autograd._push_saved_tensors_default_hooks(*others)
            raise KeyError

    with pytest.raises(KeyError):
        leave()
    found = top()
    torch._C._autograd._pop_saved_tensors_default_hooks()
    assert found == others
    assert top() is None


def test_under_a_hook_of_the_user_s_nothing_is_known_and_that_hook_stays() -> None:
    x, seen, saved = torch.ones(3, requires_grad=True), [], Saved()
    with saved_tensors_hooks(lambda x: seen.append(x) or x, lambda x: x), saved.watch():  # type: ignore[func-returns-value]
        (2 * x).exp().sum().backward()
    assert len(seen) == 1
    assert not saved.is_complete


def test_what_a_hook_within_moves_elsewhere_is_not_counted() -> None:
    x, saved = torch.ones(100, requires_grad=True), Saved()
    with saved.watch():
        with save_on_cpu():
            y = (2 * x).exp()
        y.sum().backward()
    assert saved.peak == 0
    assert torch.equal(x.grad, 2 * (2 * torch.ones(100)).exp())  # type: ignore[arg-type]


@pytest.mark.parametrize("stage", [2, 3])
def test_sharded_weights_are_noted_and_not_counted(stage: int) -> None:
    plain, x = small()
    model = instep.fully_shard(small()[0], stage=stage)
    alone, saved = saved_beside(plain), saved_beside(model)
    for module, its in ((plain, alone), (model, saved)):
        with its.watch():
            module(x).sum().backward()
    assert saved.peak == alone.peak > 0
    assert saved.nbytes == 0
    model.sharding.close()


def activations(module: nn.Module, forward: Callable[[], Tensor], inputs: Iterable[Tensor] = ()) -> int:
    """Bytes that ``forward``, with ``module``, keeps for a backward that does not follow."""
    saved = saved_beside(module, inputs)
    with saved.watch():
        forward()
    return saved.peak


def test_activations_are_what_backward_needs_but_for_weights_and_inputs():
    module = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 8))
    x = torch.zeros(10, 64)
    # GELU keeps what it is given, and the second layer what GELU gives.
    assert activations(module, lambda: module(x).sum(), [x]) == 2 * 10 * 256 * 4
    assert activations(module, lambda: module(x).sum()) == (2 * 256 + 64) * 10 * 4


def test_memory_that_is_kept_twice_counts_once():
    x = torch.zeros(100, requires_grad=True)

    def forward():
        y = x * 2.0  # keeps nothing
        return (y.sin() + y.cos()).sum()  # both keep y

    assert activations(nn.Identity(), forward) == 400


def test_what_is_kept_goes_with_its_graph():
    x = torch.zeros(100, requires_grad=True)
    saved = Saved()
    with saved.watch():
        first = (x * 2.0).exp().sum()
        assert saved.nbytes == 400
        first.backward()
        assert saved.nbytes == 0
        second = (x * 3.0).exp().sum()
        del second
        assert saved.nbytes == 0
    assert saved.peak == 400


def test_the_peak_is_of_one_micro_batch_at_a_time():
    x = torch.zeros(100, requires_grad=True)
    saved = Saved()
    with saved.watch():
        for _ in range(3):
            (x * 2.0).exp().sum().backward()
    assert saved.peak == 400


def test_a_checkpoint_keeps_its_input_alone():
    module = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
    x = torch.zeros(10, 64)
    y = nn.Parameter(torch.zeros(64))
    forward = lambda: checkpoint(module, x + y, use_reentrant=False).sum()  # noqa: E731
    assert activations(module, forward) == 10 * 64 * 4
