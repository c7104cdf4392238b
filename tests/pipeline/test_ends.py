"""The ranks of a pipeline end a step together, or all of them raise, and name the one that has not."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

import instep
from instep.errors import Desync
from instep.mesh.mesh import Mesh
from instep.pipeline import pipeline
from instep.pipeline.actions import Action
from instep.pipeline.channel import StageChannel
from instep.pipeline.home import is_absent
from instep.pipeline.stage import Stage
from instep.step.micro_batches import MicroBatch
from tests.world import world

X = torch.linspace(-1.0, 1.0, 4 * 2 * 4).view(4, 2, 4)
SOON_S = 10.0  # the deadline of waits is 20 s


def filled(module: nn.Module) -> Any:
    """``module`` with values that are not drawn: ranks that are threads share the generator."""
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(torch.linspace(-1.0, 1.0, p.numel()).view(p.shape))
    return module


def linear() -> Any:
    return filled(nn.Linear(4, 4))


def step(model: instep.Pipeline, data: int = 2) -> list[Tensor]:
    return model.step(
        lambda output, _: output.square().mean(), lambda micro_batch: X[micro_batch.index], data=data
    )


def raised_soon(function: Callable[[], Any], kind: type[Exception] | tuple[type[Exception], ...]) -> str:
    began = time.monotonic()
    with pytest.raises(kind) as raised:
        function()
    assert time.monotonic() - began < SOON_S
    return str(raised.value)


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.spare = linear(), nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)


@world(3, pp=3, dp=1)
def test_a_stage_that_cannot_end_its_step_is_named_by_all_and_no_rank_has_gradients(mesh: Mesh) -> None:
    """The last to know would be the rank of the last stage: it waits for no message any more."""
    net = nn.Sequential(Unused(), linear(), nn.Sequential(nn.BatchNorm1d(4), linear()))
    norm, before = net[2][0], net[2][0].running_mean.clone()
    model = instep.Pipeline(net, mesh, "1f1b", 2, find_unused_parameters=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rank = mesh.along["pp"].rank
    told = raised_soon(lambda: step(model), Desync if rank else ValueError)
    assert "0.spare" in told or "spare" in told
    assert told.startswith("rank 0: ValueError") == bool(rank)
    assert all(p.grad is None for p in model.parameters())
    assert torch.equal(norm.running_mean, before) and norm.num_batches_tracked == 0
    if not rank:
        with pytest.raises(RuntimeError, match="after a step that was given up"):
            optimizer.step()
    assert "after step 0 was given up" in raised_soon(lambda: step(model), Desync)
    model.close()


@world(2, pp=2, dp=1)
def test_an_error_in_a_layer_says_in_which_action_it_was(mesh: Mesh) -> None:
    class Broken(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise KeyError("gone")

    model = instep.Pipeline([linear(), Broken()], mesh, "1f1b")
    with pytest.raises(KeyError if mesh.rank else Desync) as raised:
        step(model)
    if mesh.rank:
        assert "in 1F0, of micro-batch 0, in stage 1" in raised.value.__notes__
    model.close()


def test_the_news_of_an_error_comes_behind_what_was_sent_before_and_is_not_yet_wanted() -> None:
    told_them = threading.Event()

    class Held(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            assert told_them.wait(30)
            return x

    def inputs(micro_batch: MicroBatch) -> Tensor:
        if micro_batch.index == 3:
            raise KeyError("gone")
        return X[0]

    @world(2, pp=2, dp=1, backend="gloo")
    def both_raise(mesh: Mesh) -> None:
        model = instep.Pipeline([linear(), Held()], mesh, "gpipe", 4)
        if mesh.rank == 0:
            leave = model._channel.leave
            model._channel.leave = lambda error: (leave(error), told_them.set())
        told = raised_soon(
            lambda: model.step(lambda output, _: output.mean(), inputs), Desync if mesh.rank else KeyError
        )
        assert mesh.rank == 0 or "KeyError" in told
        model.close()

    both_raise()


@world(2, pp=2, dp=1)
def test_ranks_with_other_numbers_of_micro_batches_are_told_both(mesh: Mesh) -> None:
    with pytest.raises(ValueError, match=r"micro_batches=4 on rank 0, but micro_batches=2 on rank 1"):
        instep.Pipeline([linear(), linear()], mesh, "1f1b", 2 if mesh.rank else 4)
    model = instep.Pipeline([linear(), linear()], mesh, "1f1b")
    told = raised_soon(lambda: step(model, 2 if mesh.rank else 4), Desync)
    assert "rank 1 makes step 0 with 2 micro-batches, and rank 0 with 4: pass the same data=" in told
    model.close()


@world(2, pp=2, dp=1)
@pytest.mark.parametrize("other", ["seed", "samples", "position"])
def test_outputs_never_meet_the_targets_of_other_samples(mesh: Mesh, other: str) -> None:
    changed = mesh.rank == 1
    samples = [(X[0, 0] + i, i) for i in range(8 + (other == "samples" and changed))]
    loader = instep.Loader(samples, 4, 2, seed=int(other == "seed" and changed))
    if other == "position" and changed:
        loader.advance()
    model = instep.Pipeline([linear(), linear()], mesh, "1f1b")
    told = raised_soon(lambda: model.step(lambda output, _: output.mean(), data=loader), Desync)
    differ = "position" if other == "position" else "order, data set or sizes"
    assert f"{differ} of their loaders differ" in told
    assert "Pass as data=, on all ranks" in told
    assert all(p.grad is None for p in model.parameters())
    model.close()


@world(2, pp=2, dp=1)
def test_a_step_that_is_written_as_another_loop_is_told_how_to_write_it(mesh: Mesh) -> None:
    model = instep.Pipeline([linear(), linear()], mesh, "1f1b")
    with pytest.raises(TypeError, match=r"micro_batches\(\) of a pipeline.*: call model.step\(\) instead"):
        model.micro_batches(2)
    told = raised_soon(lambda: model.step(lambda output, _: output.mean(), data=2), (TypeError, Desync))
    assert "pass inputs=, a function of the micro-batch, or an instep.Loader as data=" in told
    model.close()


class Fails(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise ZeroDivisionError


@world(3, pp=3, dp=1)
def test_an_evaluation_that_fails_is_known_to_all_and_a_closed_pipeline_says_so(mesh: Mesh) -> None:
    model = instep.Pipeline([linear(), Fails(), linear()], mesh, "1f1b", 2)
    rank = mesh.along["pp"].rank

    def evaluated() -> None:
        with torch.no_grad():
            model(X[0])

    told = raised_soon(evaluated, ZeroDivisionError if rank == 1 else Desync)
    if rank == 2:
        assert told.startswith("rank 2 waits for rank 1 in an evaluation, which rank 1 has left")
    assert "after an evaluation was given up" in raised_soon(lambda: step(model), Desync)
    model.close()
    assert "closed" in raised_soon(evaluated, RuntimeError)


@world(2, pp=2, dp=1)
def test_losses_of_all_dtypes_are_the_same_bits_on_all_ranks(mesh: Mesh) -> None:
    losses = [torch.tensor(0.1, dtype=dtype) for dtype in (torch.float64, torch.float32, torch.bfloat16)]
    model = instep.Pipeline([linear(), linear()], mesh, "gpipe")
    told = model.step(
        lambda output, one: output.sum().to(losses[one.index].dtype) * 0 + losses[one.index],
        lambda one: X[one.index],
        data=len(losses),
    )
    assert [x.dtype for x in told] == [x.dtype for x in losses]
    assert all(torch.equal(a, b) and a.shape == () for a, b in zip(told, losses, strict=True))
    model.close()


@world(2, pp=2, dp=1)
def test_a_pipeline_that_cannot_be_made_leaves_the_model_whole(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second stage of each rank fails after the first one was made, with its thread and its hooks."""
    net = nn.Sequential(linear(), linear(), linear(), linear())

    def made(number: int, *args: Any, **kwargs: Any) -> Any:
        if number >= 2:
            raise MemoryError
        return Stage(number, *args, **kwargs)

    monkeypatch.setattr(pipeline, "Stage", made)
    with pytest.raises(MemoryError):
        instep.Pipeline(net, mesh, "interleaved", 2)
    mesh.world.group.barrier("both have failed")
    monkeypatch.setattr(pipeline, "Stage", Stage)
    assert not any(is_absent(p) for p in net.parameters())
    assert len(net.state_dict()) == 8
    model = instep.Pipeline(net, mesh, "interleaved", 2)
    assert len(step(model)) == 2
    model.close()


@world(2, pp=2, dp=1)
def test_what_was_sent_is_let_go_before_the_step_ends(mesh: Mesh) -> None:
    """Each message is answered; none is flushed."""
    channel = StageChannel(mesh.along["pp"].group)
    rank, sent = mesh.rank, []
    with channel.begun(0, 8):
        for k in range(8):
            give, take = Action(0, "SEND_F", k), Action(1, "RECV_F", k)
            answer, answered = Action(1, "SEND_B", k), Action(0, "RECV_B", k)
            if rank == 0:
                memory = numpy.full(1 << 17, k, numpy.float32)
                sent.append(weakref.ref(memory))
                channel.send(give, 1, 1, [torch.from_numpy(memory)])
                del memory
                channel.post(answered, 1)
                channel.take(answered, 1)
            else:
                channel.post(take, 0)
                (came,) = channel.take(take, 0).tensors
                assert torch.all(came == k)
                channel.send(answer, 0, 1, [torch.ones(1)])
        assert sum(one() is not None for one in sent) <= 2
        channel.flush()
