"""Experts on several ranks: time of a step, a rank's memory beside the formula, loads with each remedy.

python benchmarks/experts/run.py                     some ten minutes; writes into this folder
python benchmarks/experts/run.py --samples 3 --steps 60 --out DIR
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import instep
import instep.shm  # which makes the backend known
from benchmarks.pages import Pages, Results, parser_of, publish_tables, tables
from instep.bench.saved_bytes import saved_beside
from instep.bench.tables import paired_ratio, quantile
from instep.bench.worlds import World, on_ranks, slowest_rank
from instep.cli.train import train
from instep.mesh.mesh import Mesh, build
from instep.models.config import GPTConfig
from instep.models.transformer import GPT
from instep.net.process_group import default_store, from_store
from instep.plan.memory_estimate import for_gpt, largest
from instep.recipes import text_config
from instep.record.directory import RECORD, SUMMARY
from instep.record.jsonl import read_lines

HERE = Path(__file__).parent
MODEL = GPTConfig(layers=4, width=256, heads=4, context=256, experts=4)
BATCH = 4
MOMENTS = 2
LAST = 50  # steps
ALONE = "alone"
REMEDIES = {"none": (0.0, 0.0), "auxiliary loss": (0.01, 0.0), "bias": (0.0, 0.001), "both": (0.01, 0.001)}


def mesh_of(world: World, backend: str, ep: int) -> Mesh:
    make = from_store(default_store(), world.rank, 60.0, config=f"cpu:{backend}")
    store, rank, size = default_store(), world.rank, world.size
    return build(store, rank, size, dp=-1, ep=ep, timeout_s=60.0, make_group=make)


class Trained:
    """A GPT that makes one step after the other, with its experts over ``mesh``."""

    def __init__(self, model: GPTConfig, mesh: Mesh | None = None) -> None:
        torch.manual_seed(0)
        self.net = GPT(model)
        if mesh is not None:
            instep.expert.shard(self.net, mesh)
        self.optimizer = torch.optim.SGD(self.net.parameters(), 1e-3)
        self.tokens = torch.randint(0, model.vocab_size, (BATCH, model.context + 1))

    def loss(self) -> Tensor:
        logits = self.net(self.tokens[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), self.tokens[:, 1:].flatten())

    def step(self) -> None:
        self.loss().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def race(world: World, task: dict[str, Any]) -> dict[str, list[float]]:
    """One rank: seconds per step of each contestant."""
    found = {"dense, alone": Trained(replace(MODEL, experts=0)), ALONE: Trained(MODEL)}
    for backend in ("shm", "gloo"):
        found[f"ep {world.size}, {backend}"] = Trained(MODEL, mesh_of(world, backend, world.size))
    times, _ = world.interleave({name: one.step for name, one in found.items()}, task["samples"], warm_up=2)
    return times


def speed(samples: int) -> list[dict[str, Any]]:
    ranks = on_ranks(race, {"samples": samples}, ranks=2)
    times = {name: slowest_rank([rank[name] for rank in ranks]) for name in ranks[0]}
    rows = []
    for name, seconds in times.items():
        ratio = paired_ratio(seconds, times[ALONE])
        against = f"{ratio.median:.2f} ({ratio.low:.2f} to {ratio.high:.2f})"
        rows.append({"way": name, "step(ms)": 1e3 * quantile(seconds, 0.5), "time / alone": against})
    return rows


def held(world: World, task: dict[str, Any]) -> dict[str, int]:
    """One rank: bytes of tensors after a step of AdamW."""
    one = Trained(MODEL, mesh_of(world, "gloo", task["ep"]))
    optimizer = torch.optim.AdamW(one.net.parameters(), fused=True)
    saved = saved_beside(one.net, [one.tokens])
    with saved.watch():
        loss = one.loss()
    activations = saved.nbytes
    loss.backward()
    optimizer.step()
    return {
        "parameters": sum(p.nbytes for p in one.net.parameters()),
        "gradients": sum(p.grad.nbytes for p in one.net.parameters() if p.grad is not None),
        "optimizer": sum(x.nbytes for its in optimizer.state.values() for x in its.values() if x.ndim),
        "activations": activations,
    }


def memory() -> list[dict[str, Any]]:
    rows = []
    for ep in (1, 2, 4):
        ranks = on_ranks(held, {"ep": ep}, ranks=max(ep, 2))
        expected = largest(for_gpt(MODEL, BATCH, moments=MOMENTS, ep=ep))
        row: dict[str, Any] = {"ep": ep}
        for what in ranks[0]:
            most = max(rank[what] for rank in ranks)
            row |= {f"{what}(MB)": most / 1e6, f"{what} / formula": round(most / expected.of(what), 3)}
        rows.append(row)
    return rows


def loads(steps: int) -> list[dict[str, Any]]:
    rows = []
    base = text_config.default()
    for name, (aux_loss, rate) in REMEDIES.items():
        with tempfile.TemporaryDirectory(prefix="instep-experts-") as directory:
            config = replace(
                base,
                steps=steps,
                ranks=2,
                run_dir=Path(directory) / "run",
                model=replace(base.model, experts=4),
                optim=replace(base.optim, aux_loss=aux_loss, balance_rate=rate),
                parallel=replace(base.parallel, ep=2),
            )
            if code := train(config, config.ranks):
                raise RuntimeError(f"{name}: the run ended with code {code}")
            lines = [line for line in read_lines(config.run_dir / RECORD) if "expert_load_max" in line][
                -LAST:
            ]
            found = json.loads((config.run_dir / SUMMARY).read_text())
        rows.append(
            {
                "remedy": name,
                "smallest load": round(fmean(line["expert_load_min"] for line in lines), 2),
                "largest load": round(fmean(line["expert_load_max"] for line in lines), 2),
                "held-out loss": round(found["held_out_loss"], 3),
            }
        )
    return rows


def pages(results: Results) -> Pages:
    return tables(results, "speed", "memory", "loads")


def main() -> int:
    parser = parser_of(__doc__, HERE)
    parser.add_argument("--samples", type=int, default=20)
    parser.add_argument("--steps", type=int, default=200)
    wanted = parser.parse_args()
    began = time.monotonic()
    found = {"memory": memory(), "speed": speed(wanted.samples), "loads": loads(wanted.steps)}
    publish_tables(found, wanted.out, HERE, {"minutes": (time.monotonic() - began) / 60}, pages)
    return 0


if __name__ == "__main__":
    sys.exit(main())
