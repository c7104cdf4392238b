"""NCCL in a world of one, and two ranks on one card, which NCCL allows from 2.30 on: a smoke test."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from datetime import timedelta

import torch
import torch.distributed as dist

import instep
from benchmarks.gpu.bits import setting_of, train
from benchmarks.gpu.part import Part, main
from instep.launch.launch import RankFailed, launch
from instep.mesh import deterministic

LIMIT_S = 30.0
MPS = "nvidia-cuda-mps-control"
# Without the first NCCL refuses a second rank. Kernels that wait for each other shall fit beside each other.
SWITCHES = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_MAX_CTAS": "1", "NCCL_NVLS_ENABLE": "0"}


def over_nccl(part: Part, store: dist.Store, rank: int, ranks: int) -> None:
    """An all-reduce, and some steps whose hash is compared with that of the other parts."""
    part.print_stacks_in_time()
    deterministic.enable()
    torch.cuda.set_device(part.device)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl",  # headers are in CPU memory
        store=store,
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=LIMIT_S),
    )
    x = torch.full((1 << 20,), float(rank + 1), device=part.device)
    dist.all_reduce(x)
    good = bool((x == sum(range(1, ranks + 1))).all())
    if rank == 0:
        part.found("all_reduce", "same" if good else "differs", nccl=loaded_version())
    with closing(instep.init(device=part.device, timeout_s=LIMIT_S)) as mesh:
        digest = train("bucketed", setting_of(part, mesh))
    if rank == 0:
        part.compare("DataParallel, bucketed", digest, device=str(mesh.device))
    dist.destroy_process_group()


def loaded_version() -> int:
    """That of the library in this process; ``torch.cuda.nccl.version`` is that which torch was built with."""
    version = ctypes.c_int()
    ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(version))
    return version.value


def one_rank(part: Part) -> None:
    over_nccl(part, dist.HashStore(), 0, 1)


def rank_of_two(part: Part, path: str) -> None:
    over_nccl(part, dist.FileStore(path, 2), int(os.environ["RANK"]), 2)


def two_ranks(part: Part) -> None:
    with private_mps(part), tempfile.TemporaryDirectory() as folder:
        os.environ |= {"LD_PRELOAD": part.nccl, **SWITCHES}  # for the ranks, which are started from here
        pids: list[int] = []
        timer = threading.Timer(LIMIT_S, kill, (pids,))
        timer.start()
        try:
            launch(rank_of_two, (part, f"{folder}/store"), ranks=2, on_start=pids.extend)
        except RankFailed as error:
            part.found("two ranks", "failed", why=str(error)[-500:])
        finally:
            timer.cancel()
            del os.environ["LD_PRELOAD"]


def kill(pids: list[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@contextmanager
def private_mps(part: Part) -> Iterator[None]:
    """A daemon of our own, with its files in a temporary folder, if there is one to start."""
    if shutil.which(MPS) is None:
        part.found("MPS", "info", value=f"there is no {MPS}: kernels of two ranks take turns")
        yield
        return
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {f"CUDA_MPS_{name}_DIRECTORY": folder for name in ("PIPE", "LOG")}
        part.found("MPS", "info", value=f"exit code {subprocess.run([MPS, '-d']).returncode}")
        try:
            yield
        finally:
            subprocess.run([MPS], input="quit\n", text=True, timeout=10)


if __name__ == "__main__":
    main({"nccl, one rank": one_rank, "nccl, two ranks": two_ranks})
