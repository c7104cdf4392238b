"""What a step of torch.optim.Muon takes when ranks share the matrices out, in every stage.

python benchmarks/shard/muon.py                   some minutes; writes muon.json and the README's table

The stages take turns in the same processes, with the same gradients; one thread per rank.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch.optim import Muon

import instep
from benchmarks.pages import Pages, Results, one_table, parser_of, publish
from instep.bench.tables import paired_ratio, quantile
from instep.launch.launch import launch
from instep.mesh.join import init
from instep.models.config import GPTConfig
from instep.models.transformer import GPT
from instep.rng.keys import initialize
from instep.state.hash import SHORT, tensor_digest

HERE = Path(__file__).parent
RANKS, ROUNDS = 2, 24
MODEL = GPTConfig(context=16, layers=4, width=256, heads=4)
STAGES = ("replicated", "stage 1", "stage 2", "stage 3")


def main() -> int:
    parser = parser_of(__doc__, HERE)
    parser.add_argument("--ranks", type=int, default=RANKS)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    wanted = parser.parse_args()
    began = time.monotonic()
    rows: list[dict[str, Any]] = []
    for backend in ("gloo", "shm"):
        with tempfile.TemporaryDirectory() as folder:
            launch(measure, (backend, wanted.rounds, f"{folder}/rows.json"), ranks=wanted.ranks)
            rows += json.loads(Path(folder, "rows.json").read_text())
    about = {"ranks": wanted.ranks, "rounds": wanted.rounds, "minutes": (time.monotonic() - began) / 60}
    publish(rows, "muon", wanted.out, HERE, about, pages)
    return 0


def pages(results: Results) -> Pages:
    return one_table("muon", results)


def measure(backend: str, rounds: int, path: str) -> None:
    """One rank: all stages in turns; the first one writes their rows."""
    mesh = init(backend=backend)
    made = {stage: make(stage, mesh) for stage in STAGES}
    times: dict[str, list[float]] = {stage: [] for stage in STAGES}
    tokens = torch.randint(256, (mesh.world_size, MODEL.context), generator=torch.Generator().manual_seed(0))
    for _ in range(rounds + 1):  # the first one makes the state
        for stage, (model, muon) in made.items():
            for micro_batch in model.micro_batches(mesh.world_size):
                model(tokens[micro_batch.index : micro_batch.index + 1]).square().mean().backward()
            mesh.world.group.barrier("the start of an update")
            began = time.perf_counter()
            muon.step()
            mesh.world.group.barrier("the end of an update")
            times[stage].append(1e3 * (time.perf_counter() - began))
            model.zero_grad()
    rows = []
    for stage, (model, _) in made.items():
        weights = torch.cat([x.flatten() for x in instep.full_state_dict(model).values()])
        own, base = times[stage][1:], times["replicated"][1:]
        ratio = paired_ratio(own, base)
        rows.append(
            {
                "Muon": stage,
                "over": backend,
                "step(ms)": round(quantile(own, 0.5)),
                "q25(ms)": round(quantile(own, 0.25)),
                "q75(ms)": round(quantile(own, 0.75)),
                "x replicated": f"{ratio.median:.2f} ({ratio.low:.2f} to {ratio.high:.2f})",
                "weights sha256": tensor_digest(weights).hex()[:SHORT],
            }
        )
    if mesh.rank == 0:
        Path(path).write_text(json.dumps(rows))


def make(stage: str, mesh: instep.Mesh) -> tuple[Any, torch.optim.Optimizer]:
    """The model and Muon over its matrices; the same first weights for all."""
    module = GPT(MODEL)
    initialize(module, 0)
    if stage in ("replicated", "stage 1"):
        model: Any = instep.DataParallel(module, process_group=mesh)
    else:
        model = instep.fully_shard(module, mesh, stage=int(stage[-1]))
    matrices = [p for p in model.parameters() if p.ndim == 2]
    if stage == "replicated":
        return model, Muon(matrices)
    return model, instep.ShardedOptimizer(matrices, Muon, mesh)


if __name__ == "__main__":
    sys.exit(main())
