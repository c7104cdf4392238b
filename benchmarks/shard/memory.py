"""Memory of a rank in each stage, beside the formula and the figure of the system.

python benchmarks/shard/memory.py                   some minutes; writes memory.json and the README's table
python benchmarks/shard/memory.py --layers 2 --out /tmp/trial

Every way trains the same model for some steps with AdamW in processes of its own, through the library alone:
a run of the command would end with a checkpoint of 1.2 GB. All ways on as many ranks have to end with the
same weights and moments, or there is an error instead of a table.

    parameters ... scratch   bytes of tensors, of the rank that has most, between backward and ``zero_grad``
    formula                  16 bytes per parameter, divided as the stage says
    gathered                 the most that was gathered at once; the formula is of two blocks and the rest
    peak                     the most that was resident of a process, with the pages that it shares, and
                             before there was a model: Python, torch and what the forkserver has loaded
    host                     of all processes together, shared pages once
    x one                    weights and moments of all ranks together, over those of one
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import AdamW

import instep
import instep.shm  # which makes the backend known
from benchmarks.pages import Pages, Results, one_table, parser_of, publish
from instep.bench.memory_usage import memory_usage
from instep.bench.variants import full_model, sharded_model
from instep.bench.worlds import World, on_ranks
from instep.checkpoint.registered import Registered
from instep.launch.process_memory import ResidentMemory, resident_memory, total_resident
from instep.models.config import GPTConfig, num_parameters
from instep.plan.memory_estimate import for_gpt, largest
from instep.shard.unit import Unit
from instep.state.hash import SharedHash
from instep.state.homes import homes

HERE = Path(__file__).parent
MODEL = GPTConfig(layers=14, width=768, heads=12, context=32)  # 99 M parameters
STEPS, MOMENTS, FLOAT_BYTES = 3, 2, 4
OPTIONS: dict[str, Any] = {"lr": 1e-3, "fused": True}
STAGES = range(4)
STATES = ("parameters", "gradients", "optimizer")
CLOSE = 0.05  # how far from the formula a stage may be
MEGABYTE = 1e6


def main() -> int:
    parser = parser_of(__doc__, HERE)
    parser.add_argument("-n", "--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--layers", type=int, default=MODEL.layers)
    wanted = parser.parse_args()
    began = time.monotonic()
    wanted.out.mkdir(parents=True, exist_ok=True)
    model = replace(MODEL, layers=wanted.layers)
    rows = [row for ranks in wanted.ranks for row in measure(model, ranks)]
    about = {"model": asdict(model), "parameters": num_parameters(model)}
    about["minutes"] = (time.monotonic() - began) / 60
    publish(rows, "memory", wanted.out, HERE, about, pages)
    return 0


def pages(results: Results) -> Pages:
    return one_table("memory", results)


def measure(model: GPTConfig, ranks: int) -> list[dict[str, Any]]:
    """All ways on so many ranks, a line of the table each."""
    rows, hashes = [], {}
    for stage in STAGES:
        name = f"stage {stage}"
        found = on_ranks(train, {"model": asdict(model), "stage": stage}, ranks=ranks)
        hashes[name] = {each["state_sha256"] for each in found}
        rows.append({"way": name, "ranks": ranks, **figures(model, stage, found)})
        print(f"{name} on {ranks} ranks: x formula {rows[-1]['x formula']}", file=sys.stderr, flush=True)
    if len(set.union(*hashes.values())) > 1:
        raise RuntimeError(f"expected the same weights and moments, got {hashes}")
    return rows


def train(world: World, task: dict[str, Any]) -> dict[str, Any]:
    """One rank: some steps, and what it held in the last one."""
    config = GPTConfig(**task["model"])
    before = resident_memory()
    world.barrier()
    model, optimizer = make(task["stage"], config, world)
    module = model.module if isinstance(model, instep.DataParallel) else model
    with gathered(module) as most:
        for step in range(STEPS):
            for micro_batch in model.micro_batches(world.size):
                tokens = windows(config, step, micro_batch.index)
                F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
            instep.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            counted = memory_usage(module, optimizer, model)
            optimizer.zero_grad()
    world.barrier()
    now = resident_memory()
    world.barrier()  # what is hashed from here on takes memory of its own
    state = Registered({"model": model, "optimizer": optimizer}).state()
    digest, _ = SharedHash(state.group).digests(state.owned(state.hashed()), STEPS)
    return {
        "held": asdict(counted),
        "gathered": max(most, default=0),
        "before": None if before is None else asdict(before),
        "resident": None if now is None else asdict(now),
        "state_sha256": digest,
    }


def make(stage: int, config: GPTConfig, world: World) -> tuple[Any, torch.optim.Optimizer]:
    """The model and its optimizer over shared memory, with the same first weights in every way."""
    group = world.group("shm")
    if stage:
        return sharded_model(stage, config, group, AdamW, OPTIONS)
    model = instep.DataParallel(full_model(config), process_group=group, init_sync=False)
    return model, AdamW(model.parameters(), **OPTIONS)


def windows(config: GPTConfig, step: int, micro_batch: int) -> torch.Tensor:
    """(1, context + 1) bytes that nobody wrote."""
    generator = torch.Generator().manual_seed(1000 * step + micro_batch)
    return torch.randint(256, (1, config.context + 1), generator=generator)


@contextmanager
def gathered(module: nn.Module) -> Iterator[list[int]]:
    """Bytes of gathered weights, each time that a submodule has computed or a unit's backward begins."""
    units = [space for space in homes(module.parameters()) if isinstance(space, Unit)]
    seen: list[int] = []

    def look(*ignored: Any) -> None:
        seen.append(sum(x.nbytes for unit in units for x in unit.gathered))

    hooks: list[Any] = [m.register_forward_hook(look) for m in module.modules() if units]
    hooks += [unit.module.register_full_backward_pre_hook(look) for unit in units if unit.name]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def figures(model: GPTConfig, stage: int, found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """In MB. Of a rank, that of the rank that has most."""
    ranks, size = len(found), FLOAT_BYTES * num_parameters(model)
    place: dict[str, Any] = {"stage": stage, "shard": ranks} if stage else {}
    said = largest(for_gpt(model, 1, moments=MOMENTS, **place))
    states = max(sum(each["held"][name] for name in STATES) for each in found)
    expected = said.of(*STATES)
    if abs(states / expected - 1) > CLOSE:
        raise RuntimeError(f"stage {stage}, {ranks} ranks: expected {expected:,} bytes, got {states:,}")
    weights = sum(each["held"]["parameters"] for each in found)
    moments = sum(each["held"]["optimizer"] for each in found)
    return {
        **{f"{name}(MB)": max(each["held"][name] for each in found) / MEGABYTE for name in STATES},
        "sum(MB)": states / MEGABYTE,
        "formula(MB)": expected / MEGABYTE,
        "x formula": f"{states / expected:.3f}",
        "gathered(MB)": max(each["gathered"] for each in found) / MEGABYTE,
        "formula of gathered(MB)": said.of("gathered") / MEGABYTE,
        "scratch(MB)": max(each["held"]["scratch"] for each in found) / MEGABYTE,
        **processes(found),
        "weights and moments, x one": f"{(weights + moments) / (size * (1 + MOMENTS)):.3f}",
        "state sha256": found[0]["state_sha256"][:8],
    }


def processes(found: Sequence[dict[str, Any]]) -> dict[str, float | None]:
    """What the system says, if it does."""
    if any(each["resident"] is None for each in found):
        return {}
    now = [ResidentMemory(**each["resident"]) for each in found]
    before = [ResidentMemory(**each["before"]) for each in found]
    return {
        "peak(MB)": max(each.peak for each in now) / MEGABYTE,
        "before(MB)": max(each.peak for each in before) / MEGABYTE,
        "host(MB)": total_resident(now) / MEGABYTE,
        "host before(MB)": total_resident(before) / MEGABYTE,
    }


if __name__ == "__main__":
    sys.exit(main())
