"""Runs for tests: a small model trained on a mesh, with the files that ``instep compare`` reads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from instep.mesh.mesh import Mesh
from instep.record.directory import RECORD
from instep.record.jsonl import JsonLines
from instep.record.step_lines import Made, started, step_line
from instep.reduce.norm import grad_norm
from instep.replicate.gradient_hashes import observe_reduction
from instep.replicate.wrapper import DataParallel
from instep.run.writer import gather_leaves
from tests.parity import filled, numbers
from tests.state_oracle import sampled_blocks, state_digests, state_entries

WIDTH, NUM_LEAVES = 70, 4  # the weight of a layer has two blocks


@dataclass(frozen=True)
class Plan:
    """How a run is made, and what is done to it.

    ``gradient(step, leaf, name, x)`` is what a parameter's gradient becomes; ``updated(step, tensors)`` may
    write to the state, which it gets by name, after a step.
    """

    steps: int = 3
    every: int = 2  # steps between two hashes of the whole state
    ordered: bool = True
    leaves: bool = True
    sample: int = 5  # steps in which each block is sampled once
    gradient: Callable[[int, int, str, Tensor], Tensor] = lambda step, leaf, name, x: x
    updated: Callable[[int, dict[str, Tensor]], None] = lambda step, tensors: None


def record(path: Path, mesh: Mesh, plan: Plan) -> None:
    """Train on ``mesh``; its rank 0 writes the lines in ``path``."""
    module = filled(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 3)))
    model = DataParallel(module, process_group=mesh, ordered=plan.ordered)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.02, foreach=False)
    lines = JsonLines(path / RECORD, before_step=0) if mesh.rank == 0 else None
    now = {"step": 0, "leaf": 0}
    for name, p in module.named_parameters():
        p.register_hook(lambda x, name=name: plan.gradient(now["step"], now["leaf"], name, x))
    entries = state_entries(module, optimizer)
    numerical = {"ordered": plan.ordered, "batch.global_size": NUM_LEAVES}
    layout = {"world_size": mesh.world.size, "placement": {"dp": mesh.world.size}, "strategy": "bucketed"}
    start = started(
        0,
        layout,
        restarts=0,
        fingerprint="",
        numerical=numerical,
        state=state_digests(entries, 0),
    )
    if lines:
        lines.write(**start)
    for step in range(plan.steps):
        losses = {}
        with observe_reduction(model._reducer) as seen:
            for leaf in model.micro_batches(NUM_LEAVES):
                now |= {"step": step, "leaf": leaf.index}
                loss = module(numbers(4, WIDTH, key=f"{step}, {leaf.index}")).square().mean()
                loss.backward()
                losses[leaf.index] = loss.item()
        leaves = gather_leaves(mesh.world.group, seen) if plan.leaves else {}
        norm = grad_norm(p.grad for p in module.parameters() if p.grad is not None)
        optimizer.step()
        optimizer.zero_grad()
        entries = state_entries(module, optimizer)
        plan.updated(step, dict(entries))
        is_whole = step + 1 == plan.steps or (plan.every > 0 and (step + 1) % plan.every == 0)
        line = step_line(
            step,
            Made(loss=_mean(mesh, losses), norm=norm),
            cursor=(step + 1) * NUM_LEAVES,
            sampled=sampled_blocks(entries, step + 1, plan.sample),
            whole=state_digests(entries, step + 1) if is_whole else None,
            **leaves,
        )
        if lines:
            lines.write(**line)
    if lines:
        lines.close()
    model.close()


def _mean(mesh: Mesh, losses: dict[int, float]) -> float:
    all_losses = torch.zeros(NUM_LEAVES, dtype=torch.float64)
    for leaf, loss in losses.items():
        all_losses[leaf] = loss
    mesh.world.group.all_reduce(all_losses, "the losses of a test")
    return all_losses.sum().item()


def one_ulp(x: Tensor) -> None:
    """Move the first element of ``x`` by as little as can be."""
    with torch.no_grad():
        x.view(-1)[0] = x.view(-1)[0].nextafter(torch.tensor(torch.inf))
