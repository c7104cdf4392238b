"""A model that does not fit: under one limit of memory per process replication dies, and stage 3 trains.

python benchmarks/shard/fits.py                   about a minute; writes fits.json and the README's table

Every process may have ``--budget`` MB of private memory more than it has before the model is made
(``RLIMIT_DATA``). Replication is DataParallel with torch's AdamW; stage 3 is made on the meta device, so no
process ever holds the whole model. Over gloo: what lies in shared memory the limit would not see.
"""

from __future__ import annotations

import json
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import instep
from benchmarks.pages import Pages, Results, one_table, parser_of, publish
from instep.launch.launch import launch
from instep.mesh.join import init
from instep.models.config import GPTConfig
from instep.models.transformer import GPT
from instep.rng.keys import initialize

HERE = Path(__file__).parent
RANKS, STEPS, BUDGET_MB = 4, 3, 1200
MODEL = GPTConfig(context=32, layers=14, width=768, heads=12)
KINDS = ("replicated", "stage 1", "stage 2", "stage 3")
MEGABYTE = 1e6


def main() -> int:
    parser = parser_of(__doc__, HERE)
    parser.add_argument("--budget", type=int, default=BUDGET_MB, metavar="MB")
    parser.add_argument("--ranks", type=int, default=RANKS)
    wanted = parser.parse_args()
    began = time.monotonic()
    rows = [attempt(kind, wanted.budget, wanted.ranks) for kind in KINDS]
    about = {"ranks": wanted.ranks, "budget_mb": wanted.budget, "minutes": (time.monotonic() - began) / 60}
    publish(rows, "fits", wanted.out, HERE, about, pages)
    return 0


def pages(results: Results) -> Pages:
    return one_table("fits", results)


def attempt(kind: str, budget_mb: int, ranks: int) -> dict[str, Any]:
    """One line of the table."""
    with tempfile.TemporaryDirectory() as folder:
        launch(train, (kind, budget_mb, folder), ranks=ranks)
        found = [json.loads(path.read_text()) for path in sorted(Path(folder).iterdir())]
    errors = [each["error"] for each in found if each["error"]]
    return {
        "kind": kind,
        "budget(MB)": budget_mb,
        "most used by a rank(MB)": round(max(each["used"] for each in found) / MEGABYTE),
        "losses": "" if errors else ", ".join(f"{loss:.3f}" for loss in found[0]["losses"]),
        "ended with": errors[0] if errors else "done",
    }


def train(kind: str, budget_mb: int, folder: str) -> None:
    """One rank: some steps, or the error that ended them, into a file of ``folder``."""
    mesh = init(backend="gloo")
    before = private_bytes()
    limit = before + int(budget_mb * MEGABYTE)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    losses, error = [], ""
    try:
        model, optimizer = make(kind, mesh)
        for step in range(STEPS):
            for micro_batch in model.micro_batches(mesh.axes.world_size):
                generator = torch.Generator().manual_seed(1000 * step + micro_batch.index)
                tokens = torch.randint(256, (2, MODEL.context + 1), generator=generator)
                loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
                loss.backward()
            losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
    except (RuntimeError, MemoryError, OSError) as raised:
        error = str(raised).splitlines()[0][:120]
    told = {"losses": losses, "error": error, "used": private_bytes() - before}
    Path(folder, f"{mesh.rank}.json").write_text(json.dumps(told))


def make(kind: str, mesh: instep.Mesh) -> tuple[Any, torch.optim.Optimizer]:
    """The model and its optimizer, wrapped as ``kind`` says; the same first weights for all."""
    options = {"lr": 1e-3, "fused": True}
    if kind in ("replicated", "stage 1"):
        module: nn.Module = GPT(MODEL)
        initialize(module, 0)
        model = instep.DataParallel(module, process_group=mesh, init_sync=False)
        if kind == "replicated":
            return model, torch.optim.AdamW(module.parameters(), **options)
        return model, instep.ShardedOptimizer(module.parameters(), torch.optim.AdamW, mesh, **options)
    with torch.device("meta" if kind == "stage 3" else "cpu"):
        module = GPT(MODEL)
    if kind == "stage 2":
        initialize(module, 0)
    sharded = instep.fully_shard(module, mesh, stage=int(kind[-1]))
    if kind == "stage 3":
        sharded.materialise(seed=0)
    return sharded, instep.ShardedOptimizer(module.parameters(), torch.optim.AdamW, mesh, **options)


def private_bytes() -> int:
    """What ``RLIMIT_DATA`` counts of this process; what its allocator got back mostly stays counted."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmData:"):
            return 1024 * int(line.split()[1])
    raise OSError("no VmData in /proc/self/status")


if __name__ == "__main__":
    sys.exit(main())
