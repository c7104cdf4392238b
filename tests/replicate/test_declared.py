"""The rules of declared steps: what breaks placement independence is an error that says so, on all ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from instep.checkpoint.shorthand import load, save
from instep.errors import Desync
from instep.mesh.mesh import Mesh
from instep.reduce.buckets import flat_real
from instep.replicate.strategies import STRATEGIES
from instep.replicate.wrapper import DataParallel
from instep.shard.fully import fully_shard
from tests.parity import filled, numbers, world_of_one
from tests.reduce.trees import tree_sum
from tests.replicate.nets import WIDTH, Dense, data, mean_square
from tests.replicate.replicas import assert_mean_gradients, failing_at, gradients, samples, square
from tests.world import world

NUM_LEAVES = 4
STAGES = pytest.mark.parametrize("stage", [0, 2, 3])


def wrapped(mesh: Any, stage: int = 0, module: nn.Module | None = None, **options: Any) -> Any:
    module = filled(module or Dense())
    if stage:
        return fully_shard(module, mesh, stage=stage)
    return DataParallel(module, process_group=mesh, **options)


def step(model: Any, edit: Callable[[], object] = lambda: None, num_leaves: int = NUM_LEAVES) -> None:
    for micro_batch in model.micro_batches(num_leaves):
        mean_square(model, micro_batch, 0)
        edit()


def alone(module: nn.Module | None = None) -> DataParallel:
    return wrapped(world_of_one(), module=module)


def expected_gradients(num_leaves: int = NUM_LEAVES) -> list[Tensor]:
    model = alone()
    step(model, num_leaves=num_leaves)
    return gradients(model.module)


def assert_can_go_on(model: DataParallel) -> None:
    model.zero_grad()
    step(model)
    assert all(map(torch.equal, gradients(model.module), expected_gradients()))
    model.close()


# Loops that break a rule: the error on each rank, after which all can go on.


def no_backward(model: DataParallel) -> None:
    losses = []
    try:
        for micro_batch in model.micro_batches(NUM_LEAVES):
            losses.append(model(data(micro_batch, 0)).square().mean())
    finally:
        with pytest.raises(ValueError, match="in no micro-batch went into the forward of micro-batch"):
            sum(losses).backward()


def backward_into_another(model: DataParallel) -> None:
    kept = []
    for micro_batch in model.micro_batches(NUM_LEAVES):
        kept.append(model(data(micro_batch, 0)).square().mean())
        sum(kept).backward(retain_graph=True)


def count_nothing(model: DataParallel) -> None:
    for micro_batch in model.micro_batches(NUM_LEAVES):
        micro_batch.weight = 0


def nested(model: DataParallel) -> None:
    step(model, lambda: step(model))


def sync_inside(model: DataParallel) -> None:
    step(model, model.sync_gradients)


def clip(model: DataParallel) -> None:
    step(model, lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3))


def replace_gradients(model: DataParallel) -> None:
    def edit() -> None:
        for p in model.parameters():
            p.grad = None if p.grad is None else 2 * p.grad

    step(model, edit)


def zero_inside(model: DataParallel) -> None:
    step(model, model.zero_grad)


def step_inside(model: DataParallel) -> None:
    step(model, torch.optim.SGD(model.parameters(), lr=0.1).step)


def left_over(model: DataParallel) -> None:
    model(torch.ones(1, 6)).sum().backward()
    step(model)


BROKEN: list[tuple[Callable[[DataParallel], None], str]] = [
    (no_backward, r"micro-batch \d ended without a gradient.*once per"),
    (backward_into_another, r"backward in micro-batch \d went into .* micro-batch \d"),
    (count_nothing, "sum to 0"),
    (nested, "began while another one was open, within it"),
    (sync_inside, r"sync_gradients\(\) inside micro_batches\(\)"),
    (clip, r"was changed .*: clip and edit .* after micro_batches\(\)"),
    (replace_gradients, r"was changed .*: clip and edit .* after micro_batches\(\)"),
    (zero_inside, r"was taken away .*zero_grad\(\) outside of micro_batches\(\)"),
    (step_inside, r"optimizer.step\(\) inside micro_batches\(\)"),
    (left_over, r"'layers.0.weight' already has a gradient.*zero_grad"),
    (lambda model: step(model, num_leaves=0), "at least one micro-batch"),
]


@pytest.mark.parametrize(("breaks", "words"), BROKEN)
@world(2)
def test_a_loop_that_breaks_a_rule_is_refused_on_all_ranks_and_all_can_go_on(
    mesh: Mesh, breaks: Callable[[DataParallel], None], words: str
) -> None:
    """Of edits inside the loop some were lost and others were not, by the number of ranks."""
    model = wrapped(mesh)
    with pytest.raises((ValueError, RuntimeError), match=words):
        breaks(model)
    assert_can_go_on(model)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_sees_edits_and_weights_that_change_after_backward(strategy: str) -> None:
    def weigh(model: DataParallel) -> None:
        for micro_batch in model.micro_batches(2):
            mean_square(model, micro_batch, 0)
            micro_batch.weight = 5

    weights = r"weight of micro-batch \d was 1 in backward and is 5 now"
    for breaks, words in (
        *[x for x in BROKEN if x[0] in (clip, replace_gradients, zero_inside)],
        (weigh, weights),
    ):
        model = wrapped(world_of_one(), strategy=strategy)
        for _ in range(2):  # gradients leave during backward from the second step on
            with pytest.raises(ValueError, match=words):
                breaks(model)
        assert_can_go_on(model)


@pytest.mark.parametrize("weight", [-1, 2.0, True, torch.tensor(3)])
def test_a_weight_is_a_count(weight: object) -> None:
    model = alone()
    micro_batch = next(loop := model.micro_batches(2))
    micro_batch.weight = weight
    with pytest.raises(ValueError, match="expected a non-negative int"):
        mean_square(model, micro_batch, 0)
    loop.close()


@world(2)
def test_two_backwards_after_one_that_was_caught_inside_the_loop(mesh: Mesh) -> None:
    """A micro-batch that did not fit into memory, done again in two halves."""
    model = wrapped(mesh, strategy="flat")
    for _ in range(2):
        for micro_batch in model.micro_batches(2):
            x = samples(micro_batch.index)
            with failing_at(model.module.layers[0].weight, MemoryError), pytest.raises(MemoryError):
                model(x).square().mean().backward()
            model.zero_grad()
            for half in x.split(2):
                (0.5 * model(half.clone()).square().mean()).backward()
        assert_mean_gradients(mesh, model.module, square)
        model.zero_grad()
    model.close()


# Ranks that leave, and iterators that are kept.


@world(3)
def test_all_ranks_may_leave_at_different_places(mesh: Mesh) -> None:
    model = wrapped(mesh, bucket_cap_mb=1e-5)
    step(model)
    model.zero_grad()
    for turn in range(3):
        parameter = list(model.parameters())[2 * mesh.rank]
        # Some ranks have sent several buckets by now, some none; a rank learns either way that it is over.
        with failing_at(parameter, KeyError), pytest.raises((KeyError, Desync)):
            step(model)
        assert all(p.grad is None for p in model.parameters()), turn
    assert_can_go_on(model)


@world(2)
def test_a_loop_that_was_left_by_keeping_its_iterator(mesh: Mesh) -> None:
    model = wrapped(mesh)
    kept = model.micro_batches(NUM_LEAVES)
    mean_square(model, next(kept), 0)
    with pytest.raises(ValueError, match=r"keeping its iterator: .* close\(\)"):
        step(model)
    with pytest.raises(ValueError, match=r"micro-batch \d was given up"):
        next(kept)
    running = model.micro_batches(NUM_LEAVES)
    mean_square(model, next(running), 0)
    kept.close()  # must not disturb the step that runs
    for micro_batch in running:
        mean_square(model, micro_batch, 0)
    assert all(map(torch.equal, gradients(model.module), expected_gradients()))
    model.close()


@world(2)
def test_zip_may_ask_micro_batches_first_and_else_the_optimizer_notices(mesh: Mesh) -> None:
    """``zip`` does not come back to its second argument: the loop was left on every rank, without a word."""
    model = wrapped(mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    batches = [samples(mesh.rank)]

    def train(pairs: Any, batch: int) -> None:
        for pair in pairs:
            model(pair[batch]).square().mean().backward()

    train(zip(batches, model.micro_batches(2), strict=False), 0)
    with pytest.raises(RuntimeError, match=r"leaving the loop over micro_batches\(\).*In zip\(\).* first"):
        optimizer.step()
    for pairs, batch in (
        (zip(model.micro_batches(2), batches, strict=False), 1),
        (zip(batches, model.micro_batches(2), strict=True), 0),
    ):
        train(pairs, batch)
        assert_mean_gradients(mesh, model.module, square)
        optimizer.step()
        optimizer.zero_grad()
    model.close()


@pytest.mark.parametrize(("size", "num_leaves"), [(3, 1), (2, 2)])
def test_a_rank_without_a_micro_batch_or_a_weight_leaves_nothing_unused(size: int, num_leaves: int) -> None:
    """With ``find_unused_parameters=False`` it raised in a correct step."""

    @world(size)
    def body(mesh: Mesh) -> None:
        model = wrapped(mesh, find_unused_parameters=False)
        for micro_batch in model.micro_batches(num_leaves):
            micro_batch.weight = 1 - micro_batch.index
            if micro_batch.weight:
                mean_square(model, micro_batch, 0)
        assert all(map(torch.equal, gradients(model.module), expected_gradients(1)))
        model.close()

    body()


# State that must not change between micro-batches: their placement would show.


class Cache(Dense):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("last", torch.zeros(4, 6))

    def forward(self, x: Tensor) -> Tensor:
        self.register_buffer("last", x.detach())
        return super().forward(x)


class OwnNorm(nn.Module):
    """The kernel of batch norm writes its statistics without moving their version counter."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 4)
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("variance", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(self.linear(x), self.mean, self.variance, training=self.training)


class Synchronised(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Conv2d(3, 4, 3), nn.SyncBatchNorm(4))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (Cache, "forward changed buffer 'last'"),
        (OwnNorm, "forward changed buffer 'mean' in a declared step"),
        (Synchronised, r"'1' is a SyncBatchNorm.*depend on the placement.*GroupNorm"),
    ],
)
@world(2)
def test_buffers_that_forward_changes_are_refused_by_name(
    mesh: Mesh, make: Callable[[], nn.Module], words: str
) -> None:
    model = wrapped(mesh, module=make())
    with pytest.raises(ValueError, match=words):
        step(model)
    if make is OwnNorm:
        model.eval()
        step(model)
    model.close()


WRITTEN = r"'layers\.0\.bias' was written to in micro-batch \d"
IN_FORWARD = r"'layers\.0\.weight' was written to in forward"
HEARD = r"rank \d left (the )?step"  # a rank may hear of the other one's error before it looks for its own


@torch.no_grad()
def decay(module: Dense) -> None:
    module.layers[0].bias.mul_(0.99)


@STAGES
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("frozen", [False, True])
def test_a_weight_that_is_written_between_micro_batches_is_refused(
    size: int, stage: int, frozen: bool
) -> None:
    @world(size)
    def body(mesh: Mesh) -> None:
        module = Dense()
        module.layers[0].bias.requires_grad_(not frozen)
        model = wrapped(mesh, stage, module)
        with pytest.raises((ValueError, Desync), match=WRITTEN if size == 1 else f"{WRITTEN}|{HEARD}"):
            step(model, lambda: decay(module), 6)
        model.close()

    body()


@world(2)
def test_on_one_rank_the_others_raise_too(mesh: Mesh) -> None:
    model = wrapped(mesh)
    with pytest.raises(ValueError if mesh.rank else Desync, match=r"written to|rank 1 left step 0"):
        step(model, lambda: mesh.rank and decay(model.module))
    model.close()


class Clamped(Dense):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.layers[0].weight.clamp_(-0.1, 0.1)
        return super().forward(x)


@STAGES
def test_a_write_that_is_taken_back_or_that_every_forward_repeats_is_legal(stage: int) -> None:
    model = wrapped(world_of_one(), stage, Clamped())

    @torch.no_grad()
    def aside() -> None:
        kept = [p.detach().clone() for p in model.parameters()]
        for p, value in zip(model.parameters(), kept, strict=True):
            p.add_(0.1)
            p.copy_(value)

    step(model, aside)
    model.close()


class ClampedLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.clamp_(-0.1, 0.1)
        return super().forward(x)


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("size", [1, 2])
def test_a_forward_that_writes_to_gathered_weights_is_refused(size: int, stage: int) -> None:
    @world(size)
    def body(mesh: Mesh) -> None:
        module = Dense()
        module.layers[0] = ClampedLinear(WIDTH, 9)
        model = wrapped(mesh, stage, module)
        with pytest.raises((RuntimeError, Desync), match=f"{IN_FORWARD}|{HEARD}"):
            step(model)
        model.close()

    body()


@STAGES
def test_a_load_in_the_loop_is_refused(stage: int, tmp_path: Path) -> None:
    model = wrapped(world_of_one(), stage)
    save(tmp_path, step=0, model=model)
    with pytest.raises(ValueError, match=r"instep\.load inside micro_batches\(\)"):
        step(model, lambda: load(tmp_path, model=model))
    load(tmp_path, model=model)
    step(model)
    model.close()


class OfManyKinds(nn.Module):
    """Its gradients take every way into a bucket; most parameters have none in some leaf."""

    def __init__(self) -> None:
        super().__init__()
        self.small = nn.Parameter(torch.zeros(3))
        self.narrow = nn.Parameter(torch.zeros(40_000, dtype=torch.bfloat16))
        self.pairs = nn.Parameter(torch.zeros(10_000, dtype=torch.complex64))
        self.turned = nn.Parameter(torch.zeros(130, 140))
        self.rows = nn.Embedding(130, 140)

    def forward(self, leaf: int) -> Tensor:
        used = [p for i, p in enumerate((self.small, self.narrow, self.pairs, self.turned)) if i != leaf % 4]
        found = [p * numbers(*p.shape, key=f"{leaf} {p.numel()}", dtype=p.dtype) for p in used]
        tokens = torch.arange(leaf, 130, 3 + leaf)
        weights = numbers(len(tokens), 140, key=str(leaf))
        return sum((x.real.sum() for x in found), (self.rows(tokens) * weights).sum())


@pytest.mark.parametrize("num_leaves", [2, 3, 8])
def test_leaves_of_all_kinds_of_gradients_are_added_as_the_tree_says(num_leaves: int) -> None:
    leaves = []
    for leaf in range(num_leaves):
        module = OfManyKinds()
        module(leaf).backward()
        leaves.append([-torch.zeros_like(p) if p.grad is None else p.grad for p in module.parameters()])
    model = DataParallel(OfManyKinds(), process_group=world_of_one())
    for step in range(2):  # how often gradients come is known in the second one
        model.zero_grad()
        for micro_batch in model.micro_batches(num_leaves):
            model(micro_batch.index).backward()
        for p, *own in zip(model.parameters(), *leaves, strict=True):
            wide = [flat_real(x).float() for x in own]
            mean = tree_sum(wide, torch.add) * (1 / num_leaves)
            assert torch.equal(flat_real(p.grad), mean.to(flat_real(p).dtype)), (step, tuple(p.shape))
    model.close()
