"""A script for ``instep run``: each process writes down whether it has CUDA before it asks for its device.

Rank 1 waits in step 3 for a spare, so that there is one, and is then killed by a fault. Arguments: the device
and the file that is written.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
from pathlib import Path

import torch

import instep

DEVICE, TOLD = sys.argv[1], Path(sys.argv[2])
WAIT_S = 20.0


def has_cuda() -> bool:
    """Whether torch has started CUDA here, or anything else has a context on the device."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    driver.cuInit(0)
    flags, active = ctypes.c_uint(), ctypes.c_int()
    driver.cuDevicePrimaryCtxGetState(
        torch.device(DEVICE).index or 0, ctypes.byref(flags), ctypes.byref(active)
    )
    return torch.cuda.is_initialized() or bool(active.value)


def tell(at: str) -> None:
    line = {"pid": os.getpid(), "at": at, "s": time.monotonic(), "cuda": has_cuda()}
    with TOLD.open("a") as file:
        file.write(json.dumps(line) + "\n")


def told(at: str) -> int:
    """By how many processes."""
    return TOLD.read_text().count(f'"{at}"')


run = instep.Run("run", mesh={"device": DEVICE, "backend": "gloo", "deterministic": True})
tell("before")
device = run.mesh.device
print("place", run.mesh.local_rank)  # on a CPU the device is known at once, and only this waits
tell("after")
model = instep.DataParallel(torch.nn.Linear(64, 64).to(device), run.mesh)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in run.steps(6, model=model, optimizer=optimizer):
    with step:
        if step == 3 and run.rank == 1 and not told("waited"):
            until = time.monotonic() + WAIT_S
            while told("before") < 3 and time.monotonic() < until:
                time.sleep(0.05)
            time.sleep(1.0)  # in which the spare would come to its device, if nothing held it
            tell("waited")  # and is killed
        for micro_batch in model.micro_batches(4):
            model(torch.full((8, 64), 1.0 + micro_batch.index, device=device)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
tell("done")
