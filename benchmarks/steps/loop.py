"""A loop of one's own that makes each step twice: once as a step of a run, once as plain ``DataParallel``.

Started by run.py beside it, under ``instep run`` or torchrun. Both steps have models of their own, the same
batches, and the same ranks; after each the ranks wait for each other, so neither sees the other's tail.
"""

import argparse
import json
import time
from pathlib import Path

import torch
from torch import nn

import instep

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--width", type=int, default=512)
parser.add_argument("--out", type=Path, required=True)
args = parser.parse_args()

BATCH, CLASSES = 256, 16
run = instep.Run(args.out / "run", checkpoint={"every": 0})
torch.manual_seed(0)


def net() -> nn.Module:
    layers = [nn.Linear(args.width, args.width), nn.ReLU()]
    return nn.Sequential(*layers, *layers[:1], nn.ReLU(), nn.Linear(args.width, CLASSES))


def made(mesh):
    model = instep.DataParallel(net(), mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def train(model, optimizer, x, y):
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()


def wait():
    run.mesh.world.group.barrier("the end of a step that is timed")


model, optimizer = made(run.mesh)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)
x, y = torch.randn(BATCH, args.width), torch.randint(CLASSES, (BATCH,))
plain, times, before = None, [], 0.0
for step in run.steps(args.steps, model=model, optimizer=optimizer, schedule=schedule):
    after = time.perf_counter()  # what follows a step, in the run, is part of it
    if plain is None:
        plain = made(run.mesh)
        plain_schedule = torch.optim.lr_scheduler.CosineAnnealingLR(plain[1], args.steps)
    began = time.perf_counter()
    with step:
        train(model, optimizer, x, y)
        schedule.step()
    wait()
    of_run = time.perf_counter() - began + (after - before if before else 0.0)
    began = time.perf_counter()
    train(*plain, x, y)
    plain_schedule.step()
    wait()
    times.append((of_run, time.perf_counter() - began))
    if run.rank == 0 and step.is_last:
        (args.out / "times.json").write_text(json.dumps(times))
    before = time.perf_counter()
