"""Replicas that are threads: declared steps with the bits of one rank, random numbers, threads, names."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import weakref

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from instep.events import Recorder
from instep.ordered.hash import Entry, state_entries
from instep.ordered.norm import clip_grad_norm_
from instep.replicate.threads import ThreadedReplicas
from instep.step.leaves import Leaf
from tests.parity import Training, assert_same_bits, bits_of_one, filled, momentum, numbers
from tests.replicate.nets import OTHER, PLAIN, Dense, data, mean_square

WITHOUT_RANDOM = PLAIN | OTHER


def train(training: Training, num_replicas: int) -> list[Entry]:
    """The declared steps of ``training`` in threads."""
    module = filled(training.module())
    replicas = ThreadedReplicas(module, num_replicas)
    optimizer = training.optimizer(replicas.parameters())
    for step in range(training.num_steps):
        replicas.micro_batches(
            training.num_leaves, lambda model, leaf, step=step: training.leaf_step(model, leaf, step)
        )
        if training.clip is not None:
            clip_grad_norm_(replicas.parameters(), training.clip)
        optimizer.step()
        optimizer.zero_grad()
    replicas.close()
    return [(name, x.detach().clone()) for name, x in state_entries(module, optimizer)]


@pytest.mark.parametrize("num_replicas", [1, 2, 3])
def test_declared_steps_in_threads_give_the_bits_of_one_rank(num_replicas: int) -> None:
    for name, training in WITHOUT_RANDOM.items():
        try:
            assert_same_bits(train(training, num_replicas), bits_of_one(training))
        except BaseException as error:
            error.add_note(name)
            raise


class Images(nn.Module):
    """Convolutions in channels_last, whose gradients are rounded by the number of threads on some CPUs."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 40, 3), nn.ReLU(), nn.Conv2d(40, 36, 3))
        self.to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        return self.features(x.contiguous(memory_format=torch.channels_last))


def test_convolutions_in_threads_give_the_bits_of_one_rank() -> None:
    def leaf_step(model: nn.Module, leaf: Leaf, step: int) -> None:
        model(numbers(2, 3, 7, 7, key=f"images {step} {leaf.index}")).square().mean().backward()

    training = Training(Images, leaf_step, 3)
    assert_same_bits(train(training, 2), bits_of_one(training))


def test_operators_in_threads_take_as_many_threads_as_the_caller_s() -> None:
    replicas, before = ThreadedReplicas(filled(Dense()), 2), torch.get_num_threads()
    try:
        for num_threads in (2, 3, before):
            torch.set_num_threads(num_threads)
            found = replicas.micro_batches(4, _num_threads)
            assert found == [num_threads] * 4
            replicas.zero_grad()
    finally:
        torch.set_num_threads(before)
        replicas.close()


def _num_threads(model: nn.Module, leaf: Leaf) -> int:
    mean_square(model, leaf, 0)
    return torch.get_num_threads()


@pytest.mark.parametrize("num_leaves", [1, 2, 5, 12])
def test_five_threads_give_the_bits_of_one_rank_also_without_a_micro_batch(num_leaves: int) -> None:
    training = Training(Dense, mean_square, num_leaves, clip=0.1, num_steps=2)
    assert_same_bits(train(training, 5), bits_of_one(training))


def test_other_micro_batches_give_other_bits() -> None:
    """The negative control: these tests can fail."""
    with pytest.raises(AssertionError, match="elements differ"):
        assert_same_bits(
            train(Training(Dense, mean_square, 7), 2), bits_of_one(Training(Dense, mean_square, 8))
        )


def batch(num_rows: int) -> Tensor:
    return numbers(num_rows, 6, key="batch")


def gradients(module: nn.Module) -> list[Tensor | None]:
    return [parameter.grad for parameter in module.parameters()]


def test_both_replicas_are_at_work_at_once() -> None:
    both = threading.Barrier(2)
    module = filled(Dense())

    def meet(module: nn.Module, args: object) -> None:
        both.wait(10)

    module.register_forward_pre_hook(meet)
    replicas = ThreadedReplicas(module, 2)
    replicas(batch(4))
    replicas.micro_batches(2, lambda model, leaf: mean_square(model, leaf, 0))
    replicas.close()


@pytest.mark.parametrize(
    "module",
    [
        Dense(dropout=0.5),
        nn.LSTM(6, 4, num_layers=2, dropout=0.5),
        nn.MultiheadAttention(6, 2, dropout=0.5),
    ],
)
def test_dropout_is_refused_by_name_in_training_and_only_there(module: nn.Module) -> None:
    replicas = ThreadedReplicas(nn.Sequential(module), 2)
    args = (batch(4)[:, None],) * (3 if isinstance(module, nn.MultiheadAttention) else 1)
    replicas.module.forward = lambda *args: module(*args)
    with pytest.raises(ValueError, match=r"with dropout in training mode.* set its dropout to 0, call eval"):
        replicas(*args)
    with pytest.raises(ValueError, match=r"'0(\.layers\.2)?' is \w+ with dropout in training mode"):
        replicas.micro_batches(2, lambda model, leaf: model(*args))
    replicas.eval()
    replicas(*args)
    replicas.close()


class Noise(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x * self.weight, 0.5, self.training)


def test_random_numbers_that_no_layer_announces_are_found_out() -> None:
    replicas = ThreadedReplicas(Noise(), 2)
    with pytest.raises(ValueError, match="forward drew from torch's random generator"):
        replicas(batch(4))
    with pytest.raises(ValueError, match="forward drew from torch's random generator"):
        replicas.micro_batches(2, lambda model, leaf: mean_square(model, leaf, 0))
    replicas.eval()
    replicas(batch(4))
    replicas.close()
    alone = ThreadedReplicas(Noise(), 1)
    torch.manual_seed(3)
    ours = alone(batch(4))
    torch.manual_seed(3)
    assert torch.equal(ours, Noise()(batch(4)))


def without_backward(model: nn.Module, leaf: Leaf) -> None:
    model(data(leaf, 0))


def with_a_wrong_weight(model: nn.Module, leaf: Leaf) -> None:
    leaf.weight = 0.5  # type: ignore[assignment]
    mean_square(model, leaf, 0)


def weightless(model: nn.Module, leaf: Leaf) -> None:
    leaf.weight = 0


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (without_backward, "micro-batch 0 ended without a gradient: call backward"),
        (with_a_wrong_weight, "weight of micro-batch 0: expected a non-negative int .* got 0.5"),
        (weightless, "the weights of all micro-batches of the step sum to 0"),
    ],
)
def test_a_body_that_breaks_a_rule_is_told_which(body, message: str) -> None:
    module = filled(Dense())
    replicas = ThreadedReplicas(module, 2)
    with pytest.raises(ValueError, match=message):
        replicas.micro_batches(4, body)
    assert gradients(module) == [None] * 6
    replicas.micro_batches(4, lambda model, leaf: mean_square(model, leaf, 0))
    with pytest.raises(ValueError, match=r"parameter 'layers.0.weight' already has a gradient"):
        replicas.micro_batches(4, lambda model, leaf: mean_square(model, leaf, 0))
    replicas.close()


def test_what_the_body_returns_comes_in_the_order_of_micro_batches() -> None:
    replicas = ThreadedReplicas(filled(Dense()), 3)

    def body(model: nn.Module, leaf: Leaf) -> tuple[int, int]:
        mean_square(model, leaf, 0)
        return leaf.index, leaf.num_leaves

    assert replicas.micro_batches(7, body) == [(i, 7) for i in range(7)]
    assert replicas.contract == "declared"
    replicas.close()


def test_names_state_and_copies_are_the_module_s() -> None:
    module = filled(Dense())
    replicas = ThreadedReplicas(module, 2)
    assert list(replicas.state_dict()) == list(module.state_dict())
    assert dict(replicas.named_parameters()) == dict(module.named_parameters())
    replicas.load_state_dict({name: x + 1 for name, x in module.state_dict().items()})
    other = copy.deepcopy(replicas)
    assert_same_bits([*other.named_parameters()], [*module.named_parameters()])
    assert other.module is not module
    with pytest.raises(TypeError, match=r"pickle replicas\.module"):
        pickle.dumps(replicas)
    for number in (0, -1, 1.5, True):
        with pytest.raises(ValueError, match="num_replicas: expected an int of at least 1"):
            ThreadedReplicas(module, number)
    replicas.close()


def test_threads_end_with_the_replicas() -> None:
    before = set(threading.enumerate())
    replicas = ThreadedReplicas(filled(Dense()), 2)
    optimizer = momentum(replicas.parameters())
    replicas(batch(4)).mean().backward()
    optimizer.step()
    started = set(threading.enumerate()) - before
    assert len(started) == 2
    alive = weakref.ref(replicas)
    del replicas, optimizer
    gc.collect()
    assert alive() is None
    for thread in started:
        thread.join(5)
        assert not thread.is_alive()


def test_what_replicas_did_is_recorded() -> None:
    recorder = Recorder()
    replicas = ThreadedReplicas(filled(Dense()), 2, recorder=recorder)
    replicas(batch(4)).mean().backward()
    spans = [(event.name, event.lane) for event in recorder.events]
    both = [(what, f"replica {r}") for what in ("backward", "forward") for r in range(2)]
    mine = [("aggregate", "compute"), ("replicas", "compute"), ("replicas", "compute")]
    assert sorted(spans) == sorted([*both, *mine])
    assert spans[-1] == ("aggregate", "compute")
    replicas.close()
