"""``instep.trace`` around loops of one's own: what is a step, whose time it was, what stays in the files."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from torch import nn

import instep
from instep.events import STEP
from instep.mesh.mesh import Mesh
from instep.replicate.wrapper import DataParallel
from instep.ring_buffer import read_head
from instep.timeline.trace import TraceSession
from instep.timeline.trace_files import FOLDER, path_of, read_traces
from tests.parity import numbers, world_of_one
from tests.timeline.test_trace_files import with_head
from tests.world import world

STEPS = 4


def wrapped(mesh: Mesh) -> DataParallel:
    torch.manual_seed(3)
    return DataParallel(nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2)), process_group=mesh)


def train(model: DataParallel, trace: TraceSession | None = None, steps: int = STEPS) -> None:
    """An ordinary loop; the loader takes a while."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = (numbers(3, 6, key=f"{model.group.rank} {step}") for step in range(steps))
    for x in batches if trace is None else trace.data(batches):
        optimizer.zero_grad()
        model(x).square().sum().backward()
        optimizer.step()


def names(trace: TraceSession, step: int) -> list[str]:
    """Of the events of a step, as it was made the last time, from wherever they are kept."""
    if trace.path:
        events = read_traces(trace.path / FOLDER).traces[trace.recorder.rank].events(step)
    else:
        events = [event for event in trace.recorder.events if event.step == step]
    begin = next(event.start_ns for event in events[::-1] if event.name == STEP)
    return [event.name for event in events if event.start_ns >= begin]


@pytest.mark.parametrize("to_disk", [False, True])
@world(2)
def test_each_step_of_a_loop_is_told_with_what_it_did(mesh: Mesh, tmp_path: Path, to_disk: bool) -> None:
    model = wrapped(mesh)
    with instep.trace(model, tmp_path if to_disk else None) as trace:
        train(model, trace)
    mesh.world.group.barrier("all have ended")
    rows = trace.analysis().rows
    assert sorted(rows) == ([0, 1] if to_disk else [mesh.rank])
    for rank, found in rows.items():
        assert [row.step for row in found] == [*range(STEPS)]
        for row in found:
            assert (
                row.rank == rank
                and row.micro_batches == 1
                and row.compute > 0
                and row.data > 0
                and row.update > 0
            )
            assert sum(row.totals().values()) == pytest.approx(row.wall)
    for step in range(STEPS):
        told = names(trace, step)
        assert [told.count(name) for name in ("data", "forward", "backward", "update", STEP)] == [1] * 5
    mesh.world.group.barrier("all have looked")


@world(2)
def test_with_a_path_every_rank_tells_of_both_and_print_shows_it(mesh: Mesh, tmp_path: Path) -> None:
    model = wrapped(mesh)
    with instep.trace(model, str(tmp_path)) as trace:
        train(model, trace)
    mesh.world.group.barrier("all have ended")
    traces = read_traces(tmp_path / FOLDER)
    assert {step: traces.ranks(step) for step in traces.steps} == {step: [0, 1] for step in range(STEPS)}
    assert traces.notes == [] and traces.world_size == 2
    setting = traces.traces[mesh.rank].head["setting"]
    assert (setting["strategy"], setting["backend"], setting["world_size"]) == ("bucketed", "gloo", 2)
    assert (setting["hosts"], setting["ranks_per_host"]) == (1, 2)
    assert traces.traces[mesh.rank].head["script"]  # so that advice names arguments, and no flags
    assert str(trace).startswith("time   ") and "compute" in str(trace)
    mesh.world.group.barrier("all have looked")


@pytest.mark.parametrize("to_disk", [False, True])
def test_what_came_before_is_no_part_of_it(tmp_path: Path, to_disk: bool) -> None:
    model = wrapped(world_of_one())
    train(model)
    began = time.monotonic_ns()
    with instep.trace(model, tmp_path if to_disk else None) as trace:
        train(model, trace)
    rows = trace.analysis().rows[0]
    assert [row.step for row in rows] == [*range(STEPS, 2 * STEPS)] and rows[0].start_ns >= began


def loop(model: DataParallel, path: Path | None, batches: Iterable[torch.Tensor]) -> None:
    with instep.trace(model, path) as trace:
        for x in trace.data(batches):
            with trace.span("mine"):
                model(x)


@pytest.mark.parametrize("to_disk", [False, True])
def test_after_an_error_in_the_loop_it_can_be_traced_again(tmp_path: Path, to_disk: bool) -> None:
    model, path = wrapped(world_of_one()), tmp_path if to_disk else None

    def failing():
        yield numbers(3, 6, key="a")
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="disk is gone"):
        loop(model, path, failing())
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        loop(model, path, [torch.zeros(1, 5)])
    with instep.trace(model, path) as again:
        train(model, again)
    assert [row.step for row in again.analysis().rows[0]] == [*range(STEPS)]
    told = names(again, 0)
    assert [told.count(name) for name in ("data", "forward", "backward", "update", STEP)] == [1] * 5


def test_what_an_earlier_process_left_there_is_no_part_of_it(tmp_path: Path) -> None:
    with instep.trace(model := wrapped(world_of_one()), tmp_path) as trace:
        train(model, trace, steps=9)
    file = path_of(tmp_path / FOLDER, 0)
    with_head(process=[1, 1])(file)
    with instep.trace(model := wrapped(world_of_one()), tmp_path) as trace:
        train(model, trace, steps=2)
    assert [row.step for row in trace.analysis().rows[0]] == [0, 1]


@world(2, pp=2, dp=1)
def test_steps_of_a_pipeline_are_told_with_its_setting(mesh: Mesh, tmp_path: Path) -> None:
    torch.manual_seed(3)
    model = instep.Pipeline(nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2)), mesh, "1f1b", 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with instep.trace(model, tmp_path) as trace:
        for _ in range(STEPS):
            model.step(
                lambda output, _: output.square().mean(), lambda one: numbers(3, 6, key=str(one.index))
            )
            optimizer.step()
            optimizer.zero_grad()
    mesh.world.group.barrier("all have ended")
    pipeline = trace.analysis().pipeline
    assert pipeline is not None and (pipeline.num_ranks, pipeline.schedule) == (2, "1f1b")
    head = read_head(path_of(tmp_path / FOLDER, mesh.rank))
    assert head is not None and head[0]["setting"]["cuts"] == [1]
    model.close()
