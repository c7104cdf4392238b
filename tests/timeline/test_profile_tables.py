"""What ``instep report`` says of a file of torch.profiler: overview, operators, kernels; what it refuses."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from instep.cli.exit_codes import DONE
from instep.cli.report import main
from instep.mesh.mesh import Mesh
from instep.replicate.wrapper import DataParallel
from instep.shard.fully import fully_shard
from instep.timeline.profile_tables import NamedTimes, kernel_times, operator_times
from instep.timeline.profiler import read_profile, read_records
from tests.parity import filled
from tests.replicate.nets import Dense
from tests.replicate.replicas import square
from tests.timeline.test_profiler import CPU, GPU, told, write
from tests.world import world


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


def test_kernels_are_ranked_by_their_time(tmp_path: Path) -> None:
    records, _ = read_records(write(tmp_path / "gpu.json", GPU))
    exchange = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(x)"
    expected = [
        ("gemm", 3, 550),
        (exchange, 3, 550),
        ("attention", 1, 300),
        ("gelu", 1, 150),
        ("adam", 1, 100),
    ]
    assert kernel_times(records) == ns(*[(name, calls, time, time) for name, calls, time in expected])


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


def test_a_profile_without_steps_says_why_it_counts_as_one(tmp_path: Path, capsys) -> None:
    assert main([str(write(tmp_path / "whole.json", [told("cpu_op", "linear", 0, 100)]))]) == DONE
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "profile of rank 0: 1 step on CPU, 0.100 ms each"
    assert (
        "marks no steps, so all of it counts as one: make it with torch.profiler.profile(schedule" in lines[6]
    )


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
