"""Replicas that are threads: declared steps with the bits of one rank, random numbers, threads, names.

A batch that is split over threads gives the gradient of the whole batch, the same bits every time.
"""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import instep
from instep.events import Recorder
from instep.launch.launch import launch
from instep.mesh.mesh import Mesh
from instep.reduce.norm import clip_grad_norm_
from instep.replicate.replica import Replica
from instep.replicate.threads import ThreadedReplicas, tree_sum
from instep.step.micro_batches import MicroBatch
from tests.parity import Training, _tree_sum, assert_same_bits, bits_of_one, filled, momentum, numbers
from tests.replicate.nets import OTHER, PLAIN, Dense, Segments, Tied, Twice, data, gpt, mean_square
from tests.state_oracle import Entry, state_entries
from tests.world import world

WITHOUT_RANDOM = PLAIN | OTHER


def train(training: Training, num_replicas: int) -> list[Entry]:
    """The declared steps of ``training`` in threads."""
    module = filled(training.module())
    replicas = ThreadedReplicas(module, num_replicas)
    optimizer = training.optimizer(replicas.parameters())
    for step in range(training.num_steps):
        replicas.micro_batches(
            training.num_leaves,
            lambda model, micro_batch, step=step: training.leaf_step(model, micro_batch, step),
        )
        if training.clip is not None:
            clip_grad_norm_(replicas.parameters(), training.clip)
        optimizer.step()
        optimizer.zero_grad()
    replicas.close()
    return [(name, x.detach().clone()) for name, x in state_entries(module, optimizer)]


def test_declared_steps_in_threads_give_the_bits_of_one_rank() -> None:
    for name, training in WITHOUT_RANDOM.items():
        try:
            assert_same_bits(train(training, 3), bits_of_one(training))
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
    def leaf_step(model: nn.Module, micro_batch: MicroBatch, step: int) -> None:
        model(numbers(2, 3, 7, 7, key=f"images {step} {micro_batch.index}")).square().mean().backward()

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


def _num_threads(model: nn.Module, micro_batch: MicroBatch) -> int:
    mean_square(model, micro_batch, 0)
    return torch.get_num_threads()


def batch(num_rows: int) -> Tensor:
    return numbers(num_rows, 6, key="batch")


def gradients(module: nn.Module) -> list[Tensor | None]:
    return [parameter.grad for parameter in module.parameters()]


def test_both_replicas_are_at_work_at_once() -> None:
    both = threading.Barrier(2)
    module = filled(Dense())

    def meet(module: nn.Module, args: object) -> None:
        both.wait(30)

    module.register_forward_pre_hook(meet)
    replicas = ThreadedReplicas(module, 2)
    replicas(batch(4))
    replicas.micro_batches(2, lambda model, micro_batch: mean_square(model, micro_batch, 0))
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
        replicas.micro_batches(2, lambda model, micro_batch: model(*args))
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
        replicas.micro_batches(2, lambda model, micro_batch: mean_square(model, micro_batch, 0))
    replicas.eval()
    replicas(batch(4))
    replicas.close()
    alone = ThreadedReplicas(Noise(), 1)
    torch.manual_seed(3)
    ours = alone(batch(4))
    torch.manual_seed(3)
    assert torch.equal(ours, Noise()(batch(4)))


def without_backward(model: nn.Module, micro_batch: MicroBatch) -> None:
    model(data(micro_batch, 0))


def with_a_wrong_weight(model: nn.Module, micro_batch: MicroBatch) -> None:
    micro_batch.weight = 0.5  # type: ignore[assignment]
    mean_square(model, micro_batch, 0)


def weightless(model: nn.Module, micro_batch: MicroBatch) -> None:
    micro_batch.weight = 0


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
    replicas.micro_batches(4, lambda model, micro_batch: mean_square(model, micro_batch, 0))
    with pytest.raises(ValueError, match=r"parameter 'layers.0.weight' already has a gradient"):
        replicas.micro_batches(4, lambda model, micro_batch: mean_square(model, micro_batch, 0))
    replicas.close()


def test_what_the_body_returns_comes_in_the_order_of_micro_batches() -> None:
    replicas = ThreadedReplicas(filled(Dense()), 3)

    def body(model: nn.Module, micro_batch: MicroBatch) -> tuple[int, int]:
        mean_square(model, micro_batch, 0)
        return micro_batch.index, micro_batch.num_micro_batches

    assert replicas.micro_batches(7, body) == [(i, 7) for i in range(7)]
    assert replicas.step_mode == "declared"
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
        thread.join(30)
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


def test_running_statistics_of_a_batch_that_is_split_are_those_of_the_first_replica() -> None:
    module, alone = nn.BatchNorm1d(6), nn.BatchNorm1d(6)
    replicas = ThreadedReplicas(module, 2)
    for _ in range(2):
        replicas(batch(8)).sum().backward()
        alone(batch(8)[:4])
    assert_same_bits([*module.named_buffers()], [*alone.named_buffers()])
    assert module.num_batches_tracked == 2
    replicas.close()


def test_a_buffer_that_a_replica_changes_is_refused_by_name() -> None:
    class Own(nn.BatchNorm1d):
        def forward(self, x: Tensor) -> Tensor:
            self.running_mean.add_(0.5)
            return super().forward(x)

    replicas = ThreadedReplicas(Own(6), 2)
    with pytest.raises(ValueError, match="forward changed buffer 'running_mean' in a declared step"):
        replicas.micro_batches(2, lambda model, micro_batch: mean_square(model, micro_batch, 0))
    assert replicas.module.running_mean.tolist() == [0.0] * 6  # changed was a copy
    assert replicas.module.num_batches_tracked == 0
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


def refused() -> None:
    """A rank of two, before it has joined, after torch alone has, and with a registered mesh."""
    with pytest.raises(ValueError, match=r"rank \d of 2 .*: call instep.init\(\) first"):
        ThreadedReplicas(filled(Dense()), 2)
    mesh = instep.init(backend="gloo")
    with pytest.raises(
        ValueError, match=r"^ThreadedReplicas adds .* one of 2 ranks, .* use instep.DataParallel"
    ):
        ThreadedReplicas(filled(Dense()), 1)
    instep.get.register_mesh(None)
    with pytest.raises(ValueError, match=r"one of 2 ranks"):
        ThreadedReplicas(filled(Dense()), 2)
    ThreadedReplicas(filled(Dense()), 2, alone=True).close()
    mesh.close()


def test_a_rank_of_several_does_not_train_alone_without_a_word() -> None:
    launch(refused, (), ranks=2)


@world(2)
def test_a_mesh_whose_batch_is_shared_out_refuses_threads(mesh: Mesh) -> None:
    instep.get.register_mesh(mesh)
    with pytest.raises(ValueError, match=r"one of 2 ranks"):
        ThreadedReplicas(filled(Dense()), 2)
    instep.get.register_mesh(mesh["pp"])
    ThreadedReplicas(filled(Dense()), 2).close()
    instep.get.register_mesh(None)
