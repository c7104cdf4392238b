"""A batch that is split over threads: the gradient of the whole batch, the same bits every time."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from instep.replicate.replica import Replica
from instep.replicate.split import tree_sum
from instep.replicate.threads import ThreadedReplicas
from tests.parity import _tree_sum, assert_same_bits, filled, numbers
from tests.replicate.nets import Dense, Segments, Tied, Twice, gpt, mean_square


def batch(num_rows: int) -> Tensor:
    return numbers(num_rows, 6, key="batch")


def gradients(module: nn.Module) -> list[Tensor | None]:
    return [parameter.grad for parameter in module.parameters()]


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], Tensor]]] = {
    "dense": (Dense, lambda model: model(batch(7)).square().mean()),
    "transformer": (gpt, lambda model: model((batch(7)[:, :5].abs() * 100).long() % 17).square().mean()),
    "tied": (Tied, lambda model: model((batch(4)[:, :4].abs() * 100).long() % 11).square().mean()),
    "an argument that is no tensor": (Twice, lambda model: model(batch(5), sometimes=True).square().mean()),
    "checkpointed": (lambda: Segments(False), lambda model: model(batch(5)).square().mean()),
    "two forwards": (Dense, lambda model: (model(batch(5)) * model(-batch(5))).mean()),
    "fewer rows than replicas": (Dense, lambda model: model(batch(2)).square().mean()),
    "recurrent": (lambda: Recurrent(), lambda model: model(sequence()).square().mean()),
    "attention": (lambda: nn.MultiheadAttention(6, 2, batch_first=True), lambda model: attention(model)),
}


def sequence() -> Tensor:
    return numbers(5, 3, 6, key="sequence")


class Recurrent(nn.LSTM):
    def __init__(self) -> None:
        super().__init__(6, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[0]


def attention(model: nn.Module) -> Tensor:
    return model(sequence(), sequence(), sequence())[0].square().mean()


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("num_replicas", [1, 2, 3])
def test_the_gradient_is_that_of_the_whole_batch(name: str, num_replicas: int) -> None:
    make, loss = CASES[name]
    alone = filled(make())
    replicas = ThreadedReplicas(filled(make()), num_replicas)
    expected = loss(alone)
    expected.backward()
    ours = loss(replicas)
    ours.backward()
    torch.testing.assert_close(ours, expected)
    for x, y in zip(gradients(replicas), gradients(alone), strict=True):
        assert (x is None) == (y is None)
        if x is not None:
            torch.testing.assert_close(x, y)
    replicas.close()


def test_every_run_gives_the_same_bits_those_of_the_tree_over_the_parts() -> None:
    module = filled(Dense())
    replicas = ThreadedReplicas(module, 5)
    by_part = []
    for part in batch(13).tensor_split(5):
        alone = filled(Dense())
        alone(part).square().sum().backward()
        by_part.append(gradients(alone))
    expected = [_tree_sum(list(parts)) for parts in zip(*by_part, strict=True)]
    for _ in range(20):
        replicas(batch(13)).square().sum().backward()
        assert_same_bits(
            [("g", x) for x in gradients(module)],
            [("g", x) for x in expected],
        )
        module.zero_grad()
    replicas.close()


def test_a_sum_in_another_order_has_other_bits() -> None:
    """The negative control of the test above."""
    parts = [numbers(1000, key=f"part {i}") for i in range(5)]
    total = tree_sum(parts)
    assert torch.equal(total, _tree_sum(list(parts)))
    assert not torch.equal(total, tree_sum(parts[::-1]))
    assert not torch.equal(total, sum(parts[1:], parts[0]))
    assert tree_sum([None, None]) is None
    assert torch.equal(tree_sum([None, parts[0], None]), parts[0])


def test_gradients_reach_the_input_and_accumulate_and_hooks_see_the_sum() -> None:
    alone, module = filled(Dense()), filled(Dense())
    replicas = ThreadedReplicas(module, 3)
    x, y = batch(7).requires_grad_(), batch(7).requires_grad_()
    seen = []
    module.layers[0].weight.register_hook(lambda gradient: seen.append(gradient.clone()))
    for _ in range(2):
        replicas(x.sin()).square().mean().backward()
        alone(y.sin()).square().mean().backward()
    torch.testing.assert_close(x.grad, y.grad)
    for ours, expected in zip(gradients(module), gradients(alone), strict=True):
        torch.testing.assert_close(ours, expected)
    assert len(seen) == 2
    torch.testing.assert_close(sum(seen), module.layers[0].weight.grad)
    replicas.close()


def test_a_graph_that_is_retained_can_be_used_again_and_another_cannot() -> None:
    module = filled(Dense())
    replicas = ThreadedReplicas(module, 2)
    loss = replicas(batch(4)).square().mean()
    loss.backward(retain_graph=True)
    once = [x.clone() for x in gradients(module)]
    loss.backward()
    for x, y in zip(gradients(module), once, strict=True):
        assert torch.equal(x, 2 * y)
    with pytest.raises(RuntimeError, match=r"second (backward|time)"):
        loss.backward()
    replicas.close()


class Says(nn.Module):
    """Returns in which thread and state it computed."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.seen: list[tuple[str, bool, bool, torch.dtype]] = []

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        product = x @ self.weight
        thread = threading.current_thread().name
        self.seen.append((thread, torch.is_grad_enabled(), torch.is_inference_mode_enabled(), product.dtype))
        return {"product": product, "rows": torch.tensor(len(x)), "index": x.argmax(1)}


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        (lambda: torch.enable_grad(), (True, False, torch.float32)),
        (lambda: torch.no_grad(), (False, False, torch.float32)),
        (lambda: torch.inference_mode(), (False, True, torch.float32)),
        (lambda: torch.autocast("cpu", dtype=torch.bfloat16), (True, False, torch.bfloat16)),
        (lambda: torch.autocast("cpu", dtype=torch.float16), (True, False, torch.float16)),
    ],
)
def test_every_replica_computes_in_a_thread_of_its_own_in_the_state_of_the_caller(state, expected) -> None:
    module = Says()
    replicas = ThreadedReplicas(module, 2)
    for _ in range(2):
        module.seen.clear()
        with state():
            found = replicas(torch.eye(2).repeat(3, 1)[:5])
        assert sorted(module.seen) == [(f"instep replica {r}", *expected) for r in range(2)]
        assert found["product"].requires_grad == expected[0] and found["product"].shape == (5,)
        assert found["rows"].tolist() == [3, 2]
        assert found["index"].tolist() == [0, 1, 0, 1, 0]
    module.seen.clear()
    replicas(torch.eye(2))
    assert [seen[1:] for seen in module.seen] == [(True, False, torch.float32)] * 2
    replicas.close()


def test_running_statistics_are_those_of_the_first_replica() -> None:
    module, alone = nn.BatchNorm1d(6), nn.BatchNorm1d(6)
    replicas = ThreadedReplicas(module, 2)
    for _ in range(2):
        replicas(batch(8)).sum().backward()
        alone(batch(8)[:4])
    assert_same_bits([*module.named_buffers()], [*alone.named_buffers()])
    assert module.num_batches_tracked == 2
    module.zero_grad()
    with pytest.raises(ValueError, match="forward changed buffer 'running_mean' in a declared step"):
        replicas.micro_batches(2, lambda model, leaf: mean_square(model, leaf, 0))
    assert_same_bits([*module.named_buffers()], [*alone.named_buffers()])
    replicas.close()


def test_an_error_in_a_replica_says_in_which_and_the_next_forward_works() -> None:
    module = filled(Dense())
    replicas = ThreadedReplicas(module, 3)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as failure:
        replicas(torch.ones(3, 5))
    assert failure.value.__notes__ == ["in replica 0 of 3"]
    with pytest.raises(ValueError, match=r"tensors of shape \(1, 3, 4\), \(1, 2, 4\): expected the batch"):
        ThreadedReplicas(nn.LSTM(6, 4, batch_first=True), 2)(batch(15).view(5, 3, 6))
    with pytest.raises(ValueError, match=r"one length along dim 0, the batch, got \[3, 4\]"):
        replicas(batch(3), batch(4))
    module.layers[0].weight.requires_grad_(True)
    replicas(batch(3)).sum().backward()
    assert None not in gradients(module)
    replicas.close()


def test_weights_that_are_changed_between_forward_and_backward_are_noticed() -> None:
    module = filled(Dense())
    replicas = ThreadedReplicas(module, 2)
    loss = replicas(batch(4)).square().mean()
    with torch.no_grad():
        module.layers[3].weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    replicas.close()


def test_frozen_parameters_get_no_gradient_and_tied_ones_stay_tied() -> None:
    module = filled(Tied())
    replica = Replica(module, owns_buffers=True)
    assert replica.module.out.weight is replica.module.tokens.weight
    assert replica.module.tokens.weight.data_ptr() == module.tokens.weight.data_ptr()
    assert not replica.module.positions.requires_grad
    assert len(replica.parameters) == sum(p.requires_grad for p in module.parameters())


def test_reentrant_checkpoints_work() -> None:
    alone, module = filled(Segments(True)), filled(Segments(True))
    replicas = ThreadedReplicas(module, 2)
    alone(batch(6).requires_grad_()).square().mean().backward()
    replicas(batch(6).requires_grad_()).square().mean().backward()
    for ours, expected in zip(gradients(module), gradients(alone), strict=True):
        torch.testing.assert_close(ours, expected)
    replicas.close()
