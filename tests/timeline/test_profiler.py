"""Profiles of torch as timelines: figures computed by hand, real profiles, a report, broken files."""

from __future__ import annotations

import gzip
import json
import os
import re
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function, schedule
from torch.utils.data import DataLoader, TensorDataset

from instep.cli.exit_codes import DONE
from instep.cli.report import main
from instep.events import Event, Timeline
from instep.mesh.mesh import Mesh
from instep.replicate.wrapper import DataParallel
from instep.shard.fully import fully_shard
from instep.timeline import profiler
from instep.timeline.breakdown import parts
from instep.timeline.chrome_trace import write_traces
from instep.timeline.profile_tables import NamedTimes, operator_times
from instep.timeline.profiler import DeviceTimes, ProfileFigures, read_profile, read_records
from tests.parity import filled
from tests.replicate.nets import Dense
from tests.replicate.replicas import square
from tests.world import world

BASE_NS = 1_790_857_026_000_000_000


def told(
    category: str, name: str, start: float, end: float, thread: object = 1, **args: object
) -> dict[str, Any]:
    """An event as kineto writes it; times in microseconds."""
    event = {
        "ph": "X",
        "cat": category,
        "name": name,
        "pid": 9,
        "tid": thread,
        "ts": start,
        "dur": end - start,
    }
    return {**event, "args": args}


def write(path: Path, events: list[dict[str, Any]], **head: object) -> Path:
    text = json.dumps({"schemaVersion": 1, "baseTimeNanoseconds": BASE_NS, **head, "traceEvents": events})
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


# Step 4, in microseconds; the gemm at 950 reaches 100 into step 5:
#
#     data            ||||~~                                                 ||| loader, ~~ copy to the device
#     issuing               ======
#     gemm                     |200---------500|                  |950--1100|
#     gelu                               |450--------600|
#     nccl                                        |550----------800|
#     adam                                                          |800-900|
GPU = [
    {"ph": "M", "name": "process_name", "pid": 9, "tid": 0, "args": {"name": "python"}},
    told("user_annotation", "ProfilerStep#4", 0, 1000),
    told("user_annotation", "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 0, 100),
    told("cpu_op", "aten::stack", 10, 20),
    told("gpu_memcpy", "Memcpy HtoD (Pageable -> Device)", 100, 150, "stream 7", stream=7),
    told("cpu_op", "aten::linear", 150, 250),
    told("cpu_op", "aten::addmm", 160, 240),
    told("cuda_runtime", "cudaLaunchKernel", 230, 235, correlation=8),
    told("kernel", "gemm", 200, 500, "stream 7", stream=7, correlation=8),
    told("kernel", "gelu", 450, 600, "stream 8", stream=8),
    told("user_annotation", "nccl:all_reduce", 540, 545),
    told("kernel", "ncclDevKernel_AllReduce_Sum_f32_RING_LL(x)", 550, 800, "stream 20", stream=20),
    told("user_annotation", "Optimizer.step#AdamW.step", 700, 720),
    told("cuda_runtime", "cudaLaunchKernel", 705, 707, correlation=9),
    told("kernel", "adam", 800, 900, "stream 7", stream=7, correlation=9),
    told("kernel", "gemm", 950, 1100, "stream 7", stream=7),
    told("user_annotation", "ProfilerStep#5", 1000, 2000),
    told("kernel", "ncclDevKernel_AllReduce_Sum_f32_RING_LL(x)", 1100, 1300, "stream 20", stream=20),
    told("kernel", "gemm", 1150, 1250, "stream 7", stream=7),
    told("cuda_runtime", "cudaLaunchKernel", 1390, 1395, correlation=10),
    told("kernel", "attention", 1400, 1700, "stream 7", stream=7, correlation=10),
    told("kernel", "ncclDevKernel_AllReduce_Sum_f32_RING_LL(x)", 1500, 1600, "stream 20", stream=20),
    told("gpu_memset", "Memset (Device)", 1900, 1950, "stream 7", stream=7),
    told("gpu_user_annotation", "ProfilerStep#4", 200, 900, "stream 7"),
    {"ph": "i", "s": "g", "name": "Record Window End", "pid": "", "tid": "", "ts": 3000.0},
]  # fmt: skip


def rounded(shares: DeviceTimes) -> tuple[int, ...]:
    times = (shares.wall, shares.busy, shares.kernels, shares.communication, shares.overlap)
    return tuple(round(time * 1e6) for time in times)


def test_figures_of_a_gpu_are_those_that_its_kernels_make(tmp_path):
    _, figures = read_profile(write(tmp_path / "gpu.json", GPU))
    # Busy: 200 to 900 and 950 to 1000, kernels of ours without 600 to 800; then 1000 to 1300, 1400 to 1700.
    assert figures.device == "GPU" and [shares.step for shares in figures.steps] == [4, 5]
    assert rounded(figures.steps[0]) == (1000, 750, 550, 250, 50)
    assert rounded(figures.steps[1]) == (1000, 600, 500, 300, 200)
    assert rounded(figures.total) == (2000, 1350, 1050, 550, 250)
    total = figures.total
    assert (total.utilisation, total.kernel_share) == pytest.approx((0.675, 0.525))
    assert (total.communication_share, total.overlap_share) == pytest.approx((0.275, 250 / 550))


def test_a_gpu_s_step_has_a_breakdown_that_sums_to_its_wall_time(tmp_path):
    timeline, _ = read_profile(write(tmp_path / "gpu.json.gz", GPU))
    found = parts(timeline.of(0, 4))
    in_us = {name: round(seconds * 1e6) for name, seconds in found.totals().items()}
    assert in_us == {
        "compute": 450,  # 200 to 600, 950 to 1000
        "exposed communication": 200,  # 600 to 800
        "waiting for a slower rank": 0,
        "pipeline bubble": 0,
        "waiting for data": 150,
        "update": 100,
        "host": 50,  # 150 to 200: operators before the first kernel
        "unattributed": 50,  # 900 to 950
    }
    assert round(found.hidden * 1e6) == 50
    assert found.wall == sum(found.totals().values()) == 1e-3


# On a processor: gloo works in a thread of its own, and autograd starts it from inside backward.
CPU = [
    told("user_annotation", "ProfilerStep#0", 0, 1000),
    told("user_annotation", "enumerate(DataLoader)#__next__", 0, 100),
    told("cpu_op", "aten::stack", 50, 90),
    told("user_annotation", "DistributedDataParallel.forward", 100, 300),
    told("cpu_op", "aten::t", 120, 125),
    told("cpu_op", "aten::linear", 120, 280),
    told("cpu_op", "aten::addmm", 130, 270),
    told("cpu_op", "autograd::engine::evaluate_function: AddmmBackward0", 300, 500),
    told("cpu_op", "c10d::allreduce_", 400, 420),
    told("user_annotation", "gloo:all_reduce", 420, 700, 2),
    told("cpu_op", "aten::add_", 600, 610, 2),
    told("user_annotation", "Optimizer.step#SGD.step", 720, 820),
    told("cpu_op", "aten::add_", 730, 800),
    told("user_annotation", "step", 850, 860),
]


def test_without_a_device_operators_and_gloo_make_the_figures(tmp_path):
    timeline, figures = read_profile(write(tmp_path / "cpu.json", CPU))
    # Operators: 120 to 280, 300 to 400, 420 to 500, the update; messages: 400 to 700.
    assert figures.device == "CPU" and rounded(figures.total) == (1000, 660, 440, 300, 80)
    backward = "autograd::engine::evaluate_function: AddmmBackward0"
    computed = [event.name for event in timeline.events if event.lane == "compute"]
    assert computed == ["aten::linear", backward, backward, "update"]
    found = parts(timeline.of(0, 0))
    in_us = {name: round(seconds * 1e6) for name, seconds in found.totals().items()}
    assert in_us == {
        "compute": 340,
        "exposed communication": 220,  # 400 to 420, 500 to 700
        "waiting for a slower rank": 0,
        "pipeline bubble": 0,
        "waiting for data": 100,
        "update": 100,
        "host": 50,  # forward around its operator, and what somebody called "step"
        "unattributed": 190,
    }
    assert found.wall == 1e-3


def test_what_is_written_for_hta_is_read_back_with_our_figures(tmp_path):
    def event(lane: str, name: str, start: int, end: int, **more: int) -> Event:
        return Event(1, lane, name, start * 1000, end * 1000, step=6, **more)

    timeline = Timeline(
        [
            event("host", "step", 0, 1000),
            event("compute", "backward", 100, 600, leaf=0),
            event("communication", "exchange", 400, 800, bucket=0),
            event("host", "gradient sync", 600, 800),
            event("compute", "update", 800, 900),
        ]
    )
    path = write_traces(timeline, tmp_path, world_size=2)[1]
    again, figures = read_profile(path)
    ours, theirs = parts(timeline.of(1, 6)), parts(again.of(1, 6))
    assert theirs.totals() == pytest.approx(ours.totals())
    assert theirs.hidden == pytest.approx(ours.hidden) and theirs.micro_batches == 1
    assert rounded(figures.total) == (1000, 800, 600, 400, 200)


@pytest.fixture(scope="module")
def real(tmp_path_factory) -> tuple[profile, Timeline, ProfileFigures]:
    """The second and the third step of a small net, under torch's profiler."""
    net = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    data = DataLoader(TensorDataset(torch.ones(48, 32)), batch_size=16)
    plan = schedule(wait=0, warmup=1, active=2, repeat=1)
    with profile(activities=[ProfilerActivity.CPU], schedule=plan, acc_events=True) as profiled:
        for (batch,) in data:
            net(batch).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            profiled.step()
    path = tmp_path_factory.mktemp("profile") / "real.json"
    profiled.export_chrome_trace(str(path))
    return profiled, *read_profile(path, rank=2)


def test_a_real_profile_has_the_operators_that_torch_counts(real):
    profiled, timeline, figures = real
    steps: dict[str, float] = defaultdict(float)
    operators: float = 0
    for event in profiled.events():  # torch's own reading of what it recorded
        if event.trace_name.startswith("ProfilerStep#"):
            steps[event.trace_name] += event.time_range.elapsed_us()
        above = event.cpu_parent
        while above is not None and above.name.startswith(("ProfilerStep", "Optimizer.zero_grad")):
            above = above.cpu_parent
        if above is None and (not event.is_user_annotation or event.name.startswith("Optimizer.step#")):
            operators += event.time_range.elapsed_us()
    assert figures.device == "CPU" and timeline.ranks == [2]
    walls = {f"ProfilerStep#{shares.step}": shares.wall * 1e6 for shares in figures.steps}
    assert walls == pytest.approx(steps, abs=0.01) and len(walls) == 2
    assert figures.total.kernels * 1e6 == pytest.approx(operators, rel=1e-3)
    assert 0 < figures.total.utilisation <= 1 and figures.total.communication == 0


@pytest.mark.parametrize("name", ['layer "head"', '{"head": "a", "b": 1}'])
def test_a_name_may_have_quotation_marks(name: str, tmp_path) -> None:
    with profile(activities=[ProfilerActivity.CPU]) as profiled, record_function(name):
        torch.ones(1) + 1
    profiled.export_chrome_trace(str(tmp_path / "named.json"))
    timeline, _ = read_profile(tmp_path / "named.json")
    assert timeline.events


GOOD = told("kernel", "gemm", 0, 10)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "is not JSON"),
        ('{"traceEvents": [{"ph": "X", "cat', "cut off"),
        ("[" * 100_000, "is not JSON"),
        ("[]", "traceEvents"),
        ('{"traceEvents": 5}', "traceEvents"),
        ('{"traceEvents": [7]}', "expected an object, got 7"),
        ('{"traceEvents": []}', "neither operators nor kernels"),
        ({"ts": "soon"}, "event 0: expected microseconds as \"ts\", got 'soon'"),
        ({"ts": float("nan")}, "ts"),
        ({"ts": 10**400}, "ts"),
        ({"dur": float("inf")}, "dur"),
        ({"dur": None}, "dur"),
        ({"dur": [[]]}, "got a list"),
        ({"dur": -3}, "at least 0, got -3.0 us"),
        ({"name": {"a": 1}}, "expected a name, got a dict"),
    ],
)
def test_a_broken_file_is_refused_in_plain_words(tmp_path, text, expected):
    path = tmp_path / "broken.json"
    path.write_text(text if isinstance(text, str) else json.dumps({"traceEvents": [{**GOOD, **text}]}))
    with pytest.raises(ValueError) as error:
        read_profile(path)
    assert expected in str(error.value) and str(error.value).startswith(str(path))


@pytest.mark.parametrize("keep", [1, 10, -9, -4])
def test_a_packed_file_that_is_cut_off_is_refused(tmp_path, keep):
    path = write(tmp_path / "whole.json.gz", GPU)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ValueError, match="damaged or cut off"):
        read_profile(path)


def test_a_small_file_that_unpacks_to_a_huge_one_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(profiler, "MAX_BYTES", 10_000)
    path = tmp_path / "bomb.json.gz"
    path.write_bytes(gzip.compress(b" " * 1_000_000))
    with pytest.raises(ValueError, match="more than 10000 bytes"):
        read_profile(path)


def ns(*rows: tuple[str, int, int, int]) -> list[NamedTimes]:
    return [NamedTimes(name, calls, total * 1000, own * 1000) for name, calls, total, own in rows]


def test_operators_have_the_time_of_those_that_they_call_in_all_and_not_by_themselves(tmp_path: Path) -> None:
    events = [
        told("cpu_op", "linear", 0, 100),
        told("cpu_op", "addmm", 10, 70),
        told("cpu_op", "linear", 20, 30),  # recursion: its time is in the outer one's
        told("cpu_op", "addmm", 100, 120),
        told("cpu_op", "addmm", 0, 50, "another thread"),
    ]
    records, _ = read_records(write(tmp_path / "nested.json", events))
    assert operator_times(records) == ns(("addmm", 3, 130, 120), ("linear", 2, 100, 50))


def test_the_report_of_a_profile_is_printed_and_nothing_is_written(tmp_path: Path, capsys) -> None:
    assert main([str(write(tmp_path / "gpu.json", GPU))]) == DONE
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "profile of rank 0: 2 steps on GPU, 1.000 ms each"
    # Both steps: kernels 1,050 us, communication 550, of which under kernels 250, nothing 650.
    words = [line.split() for line in lines[1:5]]
    assert [(line[-3], line[-1]) for line in words] == [
        ("0.400", "40.0%"),
        ("0.150", "15.0%"),
        ("0.125", "12.5%"),
        ("0.325", "32.5%"),
    ]
    shares = "67.5%: 52.5% compute and 27.5% communication, of which 45.5% ran under compute"
    assert lines[5] == f"  utilisation {shares}"
    assert any(line.split()[:3] == ["1", "gemm", "3"] for line in lines)
    assert os.listdir(tmp_path) == ["gpu.json"]
    assert "marks no steps" not in "".join(lines)
    assert main([str(write(tmp_path / "cpu.json", CPU))]) == DONE
    assert "kernels: none, because no device was profiled" in capsys.readouterr().out


def test_a_fifo_and_what_is_no_profile_are_refused_at_once(tmp_path: Path, capsys) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "text.json").write_text("no JSON")
    for name, message in (("fifo", "expected a regular file, got a pipe"), ("text.json", "not JSON")):
        assert main([str(tmp_path / name)]) != DONE
        said = capsys.readouterr().err
        assert said.startswith("instep report: error: ") and str(tmp_path / name) in said and message in said


def profiled(path: Path, train: Callable[[], object], *, all_threads: bool) -> Path:
    config = torch._C._profiler._ExperimentalConfig(profile_all_threads=all_threads)
    with profile(activities=[ProfilerActivity.CPU], experimental_config=config) as recorded:
        train()
    recorded.export_chrome_trace(str(path))
    return path


REFUSAL = r"handed to another thread.*profile_all_threads=True"


def check_of_wrappers(mesh: Mesh, tmp_path: Path) -> None:
    wrappers: dict[str, Callable[[nn.Module], nn.Module]] = {
        "naive": lambda module: DataParallel(module, process_group=mesh, strategy="naive"),
        "overlap": lambda module: DataParallel(module, process_group=mesh, strategy="overlap"),
        "stage 3": lambda module: fully_shard(module, process_group=mesh),
    }
    for name, wrap in wrappers.items():
        model = wrap(filled(Dense()))

        def train(model: nn.Module = model) -> None:
            square(model, mesh.rank).backward()

        for _ in range(2):  # in the first one nothing is sent before backward has ended
            train()
            model.zero_grad()
        path = profiled(tmp_path / f"{name} {mesh.rank}.json", train, all_threads=True)
        figures = read_profile(path)[1].total
        assert 0 < figures.communication < figures.wall, name
        model.zero_grad()
        path = profiled(path, train, all_threads=False)
        # The first has no other thread, and the others use theirs only where something waits in it, which a
        # rank that is late does itself.
        assert is_told(path) or (name != "naive" and is_refused(path)), name
        model.close()


def is_refused(path: Path) -> bool:
    try:
        read_profile(path)
    except ValueError as error:
        return re.search(REFUSAL, str(error)) is not None
    return False


def is_told(path: Path) -> bool:
    return not is_refused(path) and read_profile(path)[1].total.communication > 0


@world(2, by="process")
def test_exchanges_over_gloo_are_communication_or_the_profile_is_refused(mesh: Mesh, tmp_path: Path) -> None:
    check_of_wrappers(mesh, tmp_path)


@world(2, by="process", backend="shm")
def test_so_they_are_over_shared_memory(mesh: Mesh, tmp_path: Path) -> None:
    check_of_wrappers(mesh, tmp_path)
