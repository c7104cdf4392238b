"""Small programs in which two ranks disagree: what the library says then, as one line of JSON.

python -m benchmarks.faults.programs NAME      exit code 1 and the error; 0 if nobody has noticed anything
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

import instep
from benchmarks.faults.command import MOMENT
from instep.launch.launch import RankFailed, launch

ODD = 1
LENGTH = 1000


def _now() -> None:
    """What comes next is the fault."""
    MOMENT.write_text(str(time.monotonic_ns()))


def _all_reduce(length: int = LENGTH, dtype: torch.dtype = torch.float32) -> None:
    dist.all_reduce(torch.ones(length, dtype=dtype))


def skipped(rank: int) -> None:
    """One rank leaves a collective out, and comes to the next one."""
    _all_reduce()
    if rank == ODD:
        _now()
    else:
        _all_reduce()
    dist.barrier()


def shape(rank: int) -> None:
    """One rank's tensor is longer."""
    _all_reduce()
    if rank == ODD:
        _now()
    _all_reduce(LENGTH + (rank == ODD))


def dtype(rank: int) -> None:
    """One rank's tensor has another dtype."""
    _all_reduce()
    if rank == ODD:
        _now()
    _all_reduce(dtype=torch.float64 if rank == ODD else torch.float32)


def fewer(rank: int) -> None:
    """One rank has a batch less, so it makes a step less, and leaves the loop."""
    model = instep.DataParallel(nn.Linear(8, 8))
    for _ in range(2 if rank == ODD else 3):
        model(torch.ones(4, 8)).sum().backward()
    _now()


PROGRAMS: dict[str, Callable[[int], None]] = {
    program.__name__: program for program in (skipped, shape, dtype, fewer)
}


def part(name: str) -> None:
    """A rank's part in program ``name``."""
    mesh = instep.init(timeout_s=20.0)
    PROGRAMS[name](mesh.rank)
    mesh.close()


def main(name: str) -> int:
    try:
        launch(part, (name,), ranks=2)
    except RankFailed as failed:
        error = failed.exit.error
        told = {"type": failed.type_name, "message": str(failed), "noticed_ns": error.time_ns if error else 0}
        print(json.dumps(told))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
