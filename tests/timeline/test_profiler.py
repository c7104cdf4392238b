"""Profiles of torch as timelines: figures computed by hand, a real profile, and files that are broken."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, record_function, schedule
from torch.utils.data import DataLoader, TensorDataset

from instep.events import Event, Timeline
from instep.timeline import profiler
from instep.timeline.breakdown import parts
from instep.timeline.chrome_trace import write_traces
from instep.timeline.profiler import DeviceTimes, ProfileFigures, read_profile

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


def test_communication_inside_a_kernel_is_hidden_and_copies_are_compute_but_no_kernels(tmp_path):
    timeline, _ = read_profile(write(tmp_path / "gpu.json", GPU))
    found = parts(timeline.of(0, 5))
    # 1000 to 1100, 1150 to 1250, 1400 to 1700 and the memset, none of which the optimizer issued
    assert round(found.compute * 1e6) == 550 and found.update == 0
    assert round(found.exposed_s * 1e6) == 100 and round(found.hidden * 1e6) == 200


def test_what_reaches_into_the_next_step_is_cut_there(tmp_path):
    timeline, _ = read_profile(write(tmp_path / "gpu.json", GPU))
    for step in (4, 5):
        window = timeline.window(0, step)
        for event in timeline.of(0, step):
            assert window.start_ns <= event.start_ns < event.end_ns <= window.end_ns
    gemms = [event.duration_s for event in timeline.events if event.name == "gemm"]
    assert sorted(round(seconds * 1e6) for seconds in gemms) == [50, 100, 100, 300]


def test_operators_that_issue_to_a_device_are_host_code_outside_the_loader(tmp_path):
    timeline, _ = read_profile(write(tmp_path / "gpu.json", GPU))
    issuing = [event for event in timeline.events if event.name == "issuing"]
    assert [(event.start_ns - BASE_NS, event.end_ns - BASE_NS) for event in issuing] == [(150_000, 250_000)]


def test_times_are_those_of_the_profile_s_clock_in_nanoseconds(tmp_path):
    events = [told("kernel", "gemm", 4432805438559.664, 4432805438560.165)]
    timeline, _ = read_profile(write(tmp_path / "one.json", events))
    (event,) = (event for event in timeline.events if event.lane == "compute")
    assert event.start_ns == BASE_NS + 4432805438559664
    assert event.end_ns == pytest.approx(event.start_ns + 501, abs=1)


def test_without_steps_the_whole_profile_is_one(tmp_path):
    events = [told("kernel", "gemm", 10, 20), told("cpu_op", "aten::mm", 0, 5)]
    timeline, figures = read_profile(write(tmp_path / "one.json", events))
    assert timeline.steps == [0] and rounded(figures.steps[0]) == (20, 10, 10, 0, 0)


def test_the_rank_is_the_profile_s_unless_told_otherwise(tmp_path):
    path = write(
        tmp_path / "three.json", GPU, distributedInfo={"backend": "nccl", "rank": 3, "world_size": 4}
    )
    assert read_profile(path)[0].ranks == [3]
    assert read_profile(path, rank=5)[0].ranks == [5]
    assert read_profile(write(tmp_path / "none.json", GPU))[0].ranks == [0]


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
def real() -> tuple[profile, Timeline, ProfileFigures]:
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
    return profiled, *read_profile(profiled, rank=2)


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


def test_a_real_profile_s_steps_have_data_compute_and_update(real):
    _, timeline, _ = real
    for step in timeline.steps:
        found = parts(timeline.of(2, step))
        assert min(found.compute, found.data, found.update) > 0
        assert min(found.totals().values()) >= 0
        assert sum(found.totals().values()) == pytest.approx(found.wall)


def test_a_profile_that_was_exported_before_is_asked_for_as_a_file(real, tmp_path):
    profiled, _, _ = real
    with pytest.raises(ValueError, match="pass the file"):
        read_profile(profiled)


def test_a_profile_that_has_not_begun_cannot_be_read():
    with pytest.raises(ValueError, match="cannot be exported"):
        read_profile(profile(activities=[ProfilerActivity.CPU]))


@pytest.mark.parametrize("name", ['layer "head"', '{"head": "a", "b": 1}'])
def test_a_name_may_have_quotation_marks(name: str) -> None:
    with profile(activities=[ProfilerActivity.CPU]) as profiled, record_function(name):
        torch.ones(1) + 1
    timeline, _ = read_profile(profiled)
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
    assert expected in str(error.value) and str(error.value).startswith("broken.json")


def test_odd_things_that_do_not_matter_are_borne(tmp_path):
    odd = [{**GOOD, "pid": [1], "tid": {"a": 2}, "args": 3}, {"ph": "X", "cat": ["kernel"]}, {}, {"ph": "C"}]
    _, figures = read_profile(write(tmp_path / "odd.json", odd, distributedInfo=[1]))
    assert rounded(figures.total) == (10, 10, 10, 0, 0)


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
