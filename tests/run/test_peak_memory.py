"""What all ranks hear of the memory of each, and the line that people read."""

from typing import Any

import pytest
import torch

from instep.run.peak_memory import peak_memory, words
from tests.world import world


@world(2, by="process")
def test_every_rank_hears_of_all_and_the_host_is_more_than_one_and_less_than_all(mesh):
    found = peak_memory(mesh.world.group, torch.device("cpu"))
    assert [(row["rank"], row["gpu_peak"]) for row in found["ranks"]] == [(0, None), (1, None)]
    (host,) = found["hosts"]
    peaks = [row["resident_peak"] for row in found["ranks"]]
    if None not in peaks:
        assert max(peaks) < host["resident_peak"] < sum(peaks)  # both have torch loaded, once


def found(*peaks: int | None, hosts: tuple[int | None, ...], gpu: int | None = None) -> dict[str, Any]:
    rows = [{"resident_peak": peak, "gpu_peak": gpu} for peak in peaks]
    return {"ranks": rows, "hosts": [{"resident_peak": each} for each in hosts]}


@pytest.mark.parametrize(
    ("memory", "line"),
    [
        (found(3.1e8, 3e8, hosts=(5.12e8,)), "at most 310 MB per rank, 512 MB for all ranks of the host"),
        (found(3.1e8, 3e8, hosts=(5e8, 6e8)), "at most 310 MB per rank, 600 MB for all ranks of a host"),
        (found(3.1e8, hosts=(3.1e8,)), "at most 310 MB per rank"),
        (found(3e8, hosts=(3e8,), gpu=2.15e9), "at most 2,150 MB of GPU memory per rank, 300 MB per rank"),
        (found(None, None, hosts=(None,)), "not known"),
    ],
)  # fmt: skip
def test_the_line_tells_of_the_rank_and_the_host_that_took_most(memory: dict[str, Any], line: str) -> None:
    assert words(memory) == line
