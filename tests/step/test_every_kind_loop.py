"""Loops of every kind: the bits of data parallelism, and what breaks a step or the agreement of the ranks."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

import instep
from instep.errors import Desync, PeerLost
from instep.mesh.mesh import Mesh
from instep.replicate.strategies import STRATEGIES
from instep.state.homes import offered
from tests.kinds import (
    KINDS,
    LOOPS,
    STAGES,
    WIDTH,
    WRAPPERS,
    Program,
    close,
    net,
    on_every_kind,
    rows,
    square,
)
from tests.parity import bits, filled, numbers
from tests.replicate.nets import Tied, Twice
from tests.shard.trained import assert_same
from tests.world import world

LOOP = {"lr": 0.05, "momentum": 0.9, "foreach": False, "fused": False}


def made(kind: str, mesh: Mesh, module: Callable[[], nn.Module] = net, **wrap: Any) -> tuple[Any, Optimizer]:
    return KINDS[kind].make(filled(module()), mesh, SGD, wrap=wrap, **LOOP)


def loss(model: nn.Module, key: str, rank: int) -> Tensor:
    x = numbers(4, WIDTH, key=f"{key} on rank {rank}")
    return model(x.to(next(model.parameters()).dtype)).square().mean()


def clipped(model: Any, optimizer: Optimizer, rank: int) -> None:
    for step in range(3):
        loss(model, str(step), rank).backward()
        instep.clip_grad_norm_(model.parameters(), 0.01)
        optimizer.step()
        optimizer.zero_grad()


def several_backwards(model: Any, optimizer: Optimizer, rank: int) -> None:
    for step in range(2):
        for part in ("a", "b", "c"):
            loss(model, f"{step}{part}", rank).backward()
        optimizer.step()
        optimizer.zero_grad()


def accumulated(model: Any, optimizer: Optimizer, rank: int) -> None:
    for step in range(2):
        with model.no_sync():
            loss(model, f"{step} first", rank).backward()
            loss(model, f"{step} second", rank).backward()
        loss(model, f"{step} third", rank).backward()
        optimizer.step()
        optimizer.zero_grad()


def accumulated_alone(model: Any, optimizer: Optimizer, rank: int) -> None:
    with model.no_sync():
        loss(model, "first", rank).backward()
    model.sync_gradients()
    model.sync_gradients()
    optimizer.step()


def discarded(model: Any, optimizer: Optimizer, rank: int) -> None:
    loss(model, "discarded", rank).backward()
    optimizer.zero_grad()
    loss(model, "used", rank).backward()
    optimizer.step()
    loss(model, "discarded later", rank).backward()
    with model.no_sync():
        loss(model, "discarded too", rank).backward()
    optimizer.zero_grad()
    loss(model, "used too", rank).backward()
    optimizer.step()


def looked_at(model: Any, optimizer: Optimizer, rank: int) -> None:
    """``autograd.grad`` of an input between backward and step accumulates nothing, and takes nothing away."""
    loss(model, "used", rank).backward()
    x = numbers(4, WIDTH, key="looked at").requires_grad_()
    torch.autograd.grad(model(x).sum(), x)
    optimizer.step()


SCRIPTS = (clipped, several_backwards, accumulated, accumulated_alone, discarded, looked_at)


def weights(kind: str, mesh: Mesh, script: Any, module: Callable[[], nn.Module] = net) -> dict[str, Tensor]:
    model, optimizer = made(kind, mesh, module)
    script(model, optimizer, mesh.rank)
    found = {name: x.clone() for name, x in instep.full_state_dict(model).items()}
    close(optimizer, model)
    return found


def assert_as_replicated(kind: str, mesh: Mesh, script: Any) -> None:
    """The same bits; but in stages 2 and 3 a second reduced gradient is added to the first, and not each
    rank's to the first."""
    ours, expected = weights(kind, mesh, script), weights("replicated", mesh, script)
    if script is several_backwards and kind in STAGES:
        for name, x in expected.items():
            torch.testing.assert_close(ours[name], x)
    else:
        assert_same(ours, expected, script.__name__)


@on_every_kind(3, LOOPS[1:])
def test_the_plain_loop_gives_the_bits_of_data_parallel(mesh: Mesh, kind: str) -> None:
    for script in SCRIPTS:
        assert_as_replicated(kind, mesh, script)


@on_every_kind(4, STAGES, dp=2, shard=2, backend="shm")
def test_shard_groups_give_them_too(mesh: Mesh, kind: str) -> None:
    for script in SCRIPTS:
        assert_as_replicated(kind, mesh, script)


@on_every_kind(3, WRAPPERS)
def test_the_norm_has_the_bits_of_replicas_and_shows_what_is_not_finite(mesh: Mesh, kind: str) -> None:
    whole, model = made("replicated", mesh)[0], made(kind, mesh)[0]
    for each in (whole, model):
        loss(each, "x", mesh.rank).backward()
    for some in (slice(None), slice(1, 3)):
        ours, expected = (
            instep.clip_grad_norm_(list(each.parameters())[some], 1e9) for each in (model, whole)
        )
        assert torch.equal(bits(ours), bits(expected))
    model.zero_grad()
    (loss(model, "x", mesh.rank) * (float("inf") if mesh.rank == 1 else 1.0)).backward()
    assert not instep.clip_grad_norm_(model.parameters(), 1.0).isfinite()
    with pytest.raises(RuntimeError, match="expected a finite number"):
        instep.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
    close(whole, model)


def sometimes(model: nn.Module, rank: int) -> Tensor:
    """Only rank 1 uses one of the layers, and no rank another."""
    return model(numbers(4, 6, key=f"on rank {rank}"), rank == 1).square().mean()


@on_every_kind(2, LOOPS)
def test_what_no_rank_uses_keeps_its_weights_and_what_some_use_is_trained(mesh: Mesh, kind: str) -> None:
    model, optimizer = KINDS[kind].make(
        filled(Twice()), mesh, SGD, wrap={"find_unused_parameters": True}, lr=0.1, weight_decay=0.5
    )
    before = {name: x.clone() for name, x in instep.full_state_dict(model).items()}
    for _ in range(2):
        sometimes(model, mesh.rank).backward()
        optimizer.step()
        optimizer.zero_grad()
    after = instep.full_state_dict(model)
    changed = {name for name in after if not torch.equal(before[name], after[name])}
    assert changed == {name for name in after if not name.startswith("never")}
    close(optimizer, model)


@on_every_kind(2, WRAPPERS, by="process")
def test_unused_parameters_warn_once_on_rank_0_or_are_quiet_or_raise(mesh: Mesh, kind: str) -> None:
    def backwards(times: int, **options: Any) -> list[str]:
        model, _ = made(kind, mesh, Twice, **options)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(times):
                model.zero_grad()
                sometimes(model, mesh.rank).backward()
        close(model)
        return [str(w.message) for w in caught if "no gradient came" in str(w.message)]

    found = backwards(3)
    assert len(found) == (mesh.rank == 0)
    assert all("'sometimes.weight' on rank 0" in x and "'never.bias' on any rank" in x for x in found)
    assert backwards(1, find_unused_parameters=True) == []
    with pytest.raises(ValueError, match=r"'sometimes.weight' on rank 0.*find_unused_parameters=False"):
        backwards(1, find_unused_parameters=False)


# What breaks the agreement of the ranks is an error on all of them.


@on_every_kind(2, LOOPS)
def test_a_gradient_that_was_never_exchanged_is_not_stepped_with(mesh: Mesh, kind: str) -> None:
    model, optimizer = made(kind, mesh)
    with model.no_sync():
        loss(model, "x", mesh.rank).backward()
    with pytest.raises(RuntimeError, match="never exchanged"):
        optimizer.step()
    close(optimizer, model)


def declared(model: Any, num_leaves: int = 5) -> None:
    Program("", num_leaves=num_leaves).backward(model, 0)


def declare(model: Any, step: int | None, num_leaves: int = 2) -> None:
    for micro_batch in model.micro_batches(num_leaves, step=step):
        Program("").leaf(model, micro_batch, 0)


def undeclared_on_one(model: Any, rank: int) -> None:
    declared(model) if rank else loss(model, "x", 0).backward()


def counts_from_another(model: Any, rank: int) -> None:
    offered(model).counter.next_step = 5 + rank
    declare(model, None)


# What a loop does that rank 1 does otherwise, and what all of them say.
OTHERWISE: list[tuple[Callable[[Any, int], None], str]] = [
    (lambda model, rank: declared(model, 2 + rank), r"expects (2|3) micro-batches in the step"),
    (undeclared_on_one, "is in a declared step"),
    # Its dropout was keyed by another step than that of the others.
    (lambda model, rank: declare(model, 7 + rank), r"rank \d declares step \d; rank.*the same step="),
    (counts_from_another, r"rank \d declares step .*load the same checkpoint on every rank"),
]


@on_every_kind(2, WRAPPERS, backend="shm")
@pytest.mark.parametrize(("act", "words"), OTHERWISE)
def test_what_ranks_do_otherwise_raises_on_all(
    mesh: Mesh, kind: str, act: Callable[[Any, int], None], words: str
) -> None:
    for strategy in STRATEGIES if kind == "replicated" else ("",):
        model, _ = made(kind, mesh, **({"strategy": strategy} if strategy else {}))
        with pytest.raises(Desync, match=words):
            act(model, mesh.rank)


@on_every_kind(2, STAGES)
@pytest.mark.parametrize("number", [None, 1])
def test_what_one_rank_discards_is_noticed_in_the_next_exchange(
    mesh: Mesh, kind: str, number: int | None
) -> None:
    model, _ = made(kind, mesh)
    loss(model, "first", mesh.rank).backward()
    for p in list(model.parameters())[:number] if mesh.rank else ():
        p.grad = None
    with pytest.raises(Desync, match=r"rank [01] has made updates .*zero_grad"):
        loss(model, "second", mesh.rank).backward()
    close(model)


# What rank 1 alone does in the second step of a loop.
ODD = {
    "skips": r"rank 1 is in the exchange of gradients; rank 0: optimizer.step\(\)",
    "repeats": r"rank 1 is in optimizer.step\(\); rank 0: the exchange of gradients",
    "clips": "",
    "keeps": "",
}


def oddly(kind: str, mesh: Mesh, odd: str) -> None:
    model, optimizer = made(kind, mesh)
    for step in range(3):
        alone = mesh.rank == step == 1
        loss(model, str(step), mesh.rank).backward()
        if alone and odd == "clips":
            instep.clip_grad_norm_(model.parameters(), 1.0)
        for _ in range(1 if not alone else {"skips": 0, "repeats": 2}.get(odd, 1)):
            optimizer.step()
        if alone and odd == "keeps":
            instep.full_state_dict(model)
        optimizer.zero_grad()


@on_every_kind(2, ("stage 1",), timeout_s=50.0)
@pytest.mark.parametrize("odd", ["skips", "repeats"])
def test_what_one_rank_alone_does_is_told_at_once(mesh: Mesh, kind: str, odd: str) -> None:
    """It waited in a group of the optimizer's, and the others for its gradients, until the deadline."""
    with pytest.raises(Desync, match=ODD[odd]):
        oddly(kind, mesh, odd)


@on_every_kind(2, (*STAGES, "stage 2, sharded optimizer"), timeout_s=2.0)
@pytest.mark.parametrize("odd", ODD)
def test_what_one_rank_alone_does_with_shards_is_told_by_the_deadline(
    mesh: Mesh, kind: str, odd: str
) -> None:
    with pytest.raises((Desync, PeerLost), match=r"rank [01]"):
        oddly(kind, mesh, odd)


@on_every_kind(2, ("stage 1", "stage 2, sharded optimizer"), timeout_s=50.0)
def test_the_error_of_the_rank_itself_comes_first(mesh: Mesh, kind: str) -> None:
    """It raises in its closure, and its own traceback has the cause."""
    model, optimizer = made(kind, mesh)
    loss(model, "x", mesh.rank).backward()

    def closure() -> float:
        if mesh.rank == 1:
            raise KeyError("mine")
        return 0.0

    with pytest.raises(KeyError if mesh.rank == 1 else Desync):
        optimizer.step(closure)
    close(model)


def leave_at(model: Any, rank: int, place: tuple[int, bool] | None) -> None:
    """Rank 1 leaves the loop at its micro-batch number ``place[0]``, after its backward or before."""
    for count, micro_batch in enumerate(model.micro_batches(7)):
        if rank == 1 and place == (count, False):
            return
        Program("").leaf(model, micro_batch, 0)
        if rank == 1 and place == (count, True):
            return


@on_every_kind(3, LOOPS, backend="shm")
def test_leaving_the_loop_makes_the_others_raise_and_all_can_go_on(mesh: Mesh, kind: str) -> None:
    expected, _ = made(kind, mesh)
    declared(expected)
    norm = instep.clip_grad_norm_(expected.parameters(), 1e9)
    close(expected)
    for strategy in STRATEGIES if kind == "replicated" else ("",):
        wrap = {"strategy": strategy, "bucket_cap_mb": 1e-4} if strategy else {}
        model, optimizer = made(kind, mesh, **wrap)
        for place in ((0, False), (0, True), (1, False), (1, True)):
            if mesh.rank == 1:
                leave_at(model, 1, place)
            else:
                with pytest.raises(Desync, match=r"rank 1 left .*step.* before its gradients were complete"):
                    leave_at(model, mesh.rank, place)
            assert all(p.grad is None for p in model.parameters())
            with pytest.raises(RuntimeError, match="after a step that was given up"):
                optimizer.step()
        declared(model)
        assert torch.equal(instep.clip_grad_norm_(model.parameters(), 1e9), norm)
        close(optimizer, model)


def norms_of(net: nn.Module, model: nn.Module, clip: Callable[..., Tensor]) -> list[float]:
    norms, optimizer = [], SGD([p for p in net.parameters() if p.requires_grad], lr=0.5)
    for _ in range(2):
        model(torch.arange(4)).square().sum().backward()
        norms.append(float(clip([*net.tokens.parameters(), *net.out.parameters()], 0.5)))
        optimizer.step()
        optimizer.zero_grad()
    return norms


@on_every_kind(2, WRAPPERS)
def test_a_tied_parameter_that_is_listed_twice_counts_and_is_scaled_twice_as_in_torch(
    mesh: Mesh, kind: str
) -> None:
    ours, theirs = filled(Tied()), filled(Tied())
    model = KINDS[kind].wrap(ours, mesh, **KINDS[kind].options)
    expected = norms_of(theirs, theirs, nn.utils.clip_grad_norm_)
    assert norms_of(ours, model, instep.clip_grad_norm_) == pytest.approx(expected, rel=1e-6)
    close(model)


class Plain(Optimizer):
    """One of one's own, whose ``step`` takes no closure."""

    @torch.no_grad()
    def step(self) -> None:
        for p in self.param_groups[0]["params"]:
            p.sub_(p.grad, alpha=0.1)


@on_every_kind(2, ("replicated",))
def test_an_optimizer_of_ones_own_trains_as_torchs_does(mesh: Mesh, kind: str) -> None:
    found = []
    for make in (lambda p: Plain(p, {}), lambda p: SGD(p, lr=0.1)):
        model = KINDS[kind].wrap(filled(net()), mesh, **KINDS[kind].options)
        declared(model)
        make(model.parameters()).step()
        found.append({name: x.clone() for name, x in instep.full_state_dict(model).items()})
        close(model)
    for name, x in found[0].items():
        torch.testing.assert_close(x, found[1][name], rtol=0, atol=1e-7)


class Backwards(nn.Module):
    """Layers that are registered in another order than they are used in."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.first, self.middle = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(self.first(x)))


@on_every_kind(2, ("replicated", "pipeline"))
def test_a_description_that_is_kept_follows_the_buckets(mesh: Mesh, kind: str) -> None:
    """Which the first step re-orders; those of before stayed in memory, as large as the gradients."""
    model, _ = KINDS[kind].make(nn.Sequential(Backwards(), Backwards()), mesh)
    kept = offered(model)
    for step in range(2):
        Program(kind).backward(model, step)
        model.zero_grad()
    assert [x.data_ptr() for x in kept.gradients()] == [x.data_ptr() for x in offered(model).gradients()]
    close(model)


def with_a_branch(model: nn.Module, step: int, index: int) -> Tensor:
    return model(numbers(2, 6, key=f"{step} {index}"), step in (0, 4)).square().mean()


@pytest.mark.parametrize("is_declared", [True, False])
@pytest.mark.parametrize("by_optimizer", [True, False])
@world(3)
def test_zeros_are_a_gradient(mesh: Mesh, is_declared: bool, by_optimizer: bool) -> None:
    """Of a branch that is unused for a while momentum and decay go on, where a loop zeroes in place.

    Declared steps took zeros for None. The third rank has no micro-batch.
    """
    alone, num_leaves = filled(Twice()), 2
    model = instep.DataParallel(filled(Twice()), process_group=mesh, find_unused_parameters=True)
    steps, optimizer = (SGD(x.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1) for x in (alone, model))
    for step in range(5):
        for index in range(num_leaves):
            (with_a_branch(alone, step, index) / num_leaves).backward()
        if is_declared:
            for micro_batch in model.micro_batches(num_leaves):
                with_a_branch(model, step, micro_batch.index).backward()
        else:
            (with_a_branch(model, step, mesh.rank % 2) * (1.5, 1.5, 0.0)[mesh.rank]).backward()
        steps.step()
        steps.zero_grad(set_to_none=False)
        optimizer.step()
        if by_optimizer:
            optimizer.zero_grad(set_to_none=False)
        else:
            for p in model.parameters():
                if p.grad is not None:
                    p.grad.zero_()
    torch.testing.assert_close(list(model.parameters()), list(alone.parameters()))
    close(model)


DECLARED = pytest.mark.parametrize("declared", [False, True], ids=["plain", "declared"])


class Breaks(nn.Module):
    """Its backward raises between two layers while ``broken``."""

    broken = False

    def __init__(self) -> None:
        super().__init__()
        self.below, self.above = net(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.below(x)
        if self.broken and x.requires_grad:
            x.register_hook(self.fail)
        return self.above(x)

    def fail(self, gradient: Tensor) -> None:
        raise ArithmeticError("planted")


@contextmanager
def broken(model: nn.Module) -> Iterator[None]:
    part: Any = next(x for x in model.modules() if isinstance(x, Breaks))
    part.broken = True
    yield
    part.broken = False


def backward(model: Any, rank: int, declared: bool) -> None:
    if declared:
        Program("", num_leaves=4).backward(model, 0)
    else:
        square(model, rows(f"on rank {rank}")).backward()


def norm_of(model: Any, rank: int, declared: bool) -> Tensor:
    model.zero_grad()
    backward(model, rank, declared)
    return instep.clip_grad_norm_(model.parameters(), 1e9)


def leave(model: Any) -> None:
    """After the last backward of the very first step, whose gradient this rank drops: the others stepped."""
    for count, micro_batch in enumerate(model.micro_batches(4)):
        Program("").leaf(model, micro_batch, 0)
        if count == 1:
            raise ArithmeticError("the loss is not a number")


def raises(model: Any, rank: int, act: Callable[[], None], words: str = r"rank 1 left (the )?step") -> None:
    """``act`` raises: "planted" by rank 1, and in the others that it left."""
    with pytest.raises(ArithmeticError) if rank else pytest.raises(Desync, match=words):
        act()


def in_backward(model: Any, rank: int, declared: bool) -> None:
    with broken(model) if rank else nullcontext():
        raises(model, rank, lambda: backward(model, rank, declared))


def after_the_last(model: Any, rank: int) -> None:
    raises(model, rank, lambda: leave(model) if rank else backward(model, rank, True))


def without_synchronisation(model: Any, rank: int) -> None:
    with model.no_sync(), broken(model), pytest.raises(ArithmeticError):
        backward(model, rank, False)


def in_an_evaluation(model: Any, rank: int) -> None:
    """Its own affair, where all ranks have all weights: it waited for the others, and they for it."""
    backward(model, rank, False)
    if rank == 1:
        with torch.no_grad(), pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            model(torch.ones(2, WIDTH + 1))


ACCIDENTS = [
    functools.partial(in_backward, declared=False),
    functools.partial(in_backward, declared=True),
    after_the_last,
    without_synchronisation,
]


def is_over(mesh: Mesh, kind: str, accident: Callable[[Any, int], None]) -> None:
    whole, model = made(kind, mesh, Breaks)[0], made(kind, mesh, Breaks)[0]
    expected = [norm_of(whole, mesh.rank, declared) for declared in (False, True)]
    close(whole)
    for _ in range(3):
        accident(model, mesh.rank)
        for declared in (False, True):  # the next forward gives up a backward that raised: none is in between
            assert torch.equal(norm_of(model, mesh.rank, declared), expected[declared])
        model.zero_grad()
    close(model)


@on_every_kind(2, WRAPPERS)
@pytest.mark.parametrize("accident", ACCIDENTS)
def test_an_accident_is_over_in_the_next_step(mesh: Mesh, kind: str, accident: Any) -> None:
    """A step given up twice was counted twice, and the old error was raised again by every later backward."""
    is_over(mesh, kind, accident)


@on_every_kind(2, ("replicated", "stage 2"))
def test_so_is_one_in_an_evaluation_where_all_ranks_have_all_weights(mesh: Mesh, kind: str) -> None:
    is_over(mesh, kind, in_an_evaluation)


# A layer frozen on one rank only: the mean lacked that rank's share, and all ranks agreed.


@pytest.mark.filterwarnings("ignore:no gradient came")
@on_every_kind(2, WRAPPERS)
@DECLARED
def test_a_weight_that_one_rank_has_frozen_is_an_error_on_all(mesh: Mesh, kind: str, declared: bool) -> None:
    model, _ = made(kind, mesh)
    norm_of(model, mesh.rank, declared)
    first = next(model.parameters())
    first.requires_grad_(mesh.rank == 0)
    with pytest.raises(Desync, match=r"frozen on some ranks alone .*: '0\.weight' on rank 1; in step 0 "):
        norm_of(model, mesh.rank, declared)
    for trained in (False, True):  # on all ranks
        first.requires_grad_(trained)
        norm_of(model, mesh.rank, declared)
        assert (first.grad is not None) == trained
    close(model)


# A gradient that ``zero_grad`` had discarded came back for a parameter that the next step did not use.


def weights_after(kind: str, mesh: Mesh, declared: bool) -> dict[str, Tensor]:
    model, optimizer = made(kind, mesh, Twice, find_unused_parameters=True)

    def once(key: str, sometimes: bool) -> None:
        x = rows(f"{key} on rank {mesh.rank}")[:, :6]
        model(x, sometimes).square().mean().backward()

    once("first", True)
    with model.no_sync():
        once("kept", True)
    optimizer.zero_grad()
    for _ in model.micro_batches(2) if declared else (None,):
        once("last", False)
    optimizer.step()
    found = {name: x.clone() for name, x in instep.full_state_dict(model).items()}
    close(optimizer, model)
    return found


@on_every_kind(2, STAGES)
@DECLARED
def test_a_discarded_gradient_does_not_come_back(mesh: Mesh, kind: str, declared: bool) -> None:
    assert_same(weights_after(kind, mesh, declared), weights_after("replicated", mesh, declared), "weights")


@on_every_kind(2, STAGES)
@pytest.mark.parametrize("discards", [True, False])
def test_after_a_backward_that_raised_the_sum_is_what_was_not_discarded(
    mesh: Mesh, kind: str, discards: bool
) -> None:
    sums = []
    for each in ("replicated", kind):
        model, _ = made(each, mesh, Breaks)
        square(model, rows(f"first {mesh.rank}")).backward()
        with model.no_sync(), broken(model), pytest.raises(ArithmeticError):
            square(model, rows(f"kept {mesh.rank}")).backward()
        if discards:
            model.zero_grad()
        last = square(model, rows(f"last {mesh.rank}"))
        assert all((p.grad is None) == discards for p in model.parameters())
        last.backward()
        sums.append(instep.clip_grad_norm_(model.parameters(), 1e9))
        close(model)
    torch.testing.assert_close(sums[1], sums[0], rtol=1e-6, atol=0)  # a sum over steps has no one order


# A load between forward and backward: gradients of old activations through new weights, without an error.


@on_every_kind(2, STAGES)
def test_a_graph_from_before_a_load_is_refused(mesh: Mesh, kind: str, tmp_path: Path) -> None:
    both: tuple[dict[str, Any], ...] = {}, {"compute_dtype": torch.bfloat16}
    for number, options in enumerate(both):
        model = KINDS[kind].wrap(filled(net()), mesh, **KINDS[kind].options, **options)
        x = rows(f"on rank {mesh.rank}").to(options.get("compute_dtype"))
        loss = model(x).square().mean()
        instep.save(tmp_path / str(number), step=0, model=model)
        instep.load(tmp_path / str(number), model=model)
        with pytest.raises(RuntimeError, match=r"modified by an inplace operation: .*is at version"):
            loss.backward()
        model(x).square().mean().backward()
        close(model)
