"""Tensor parallelism: what chunks cost, its speed beside torch's, a rank's memory beside the formula.

python benchmarks/tensor/run.py                     some eight minutes; writes into this folder
python benchmarks/tensor/run.py --samples 3 --out DIR

Products: forward and backward of each linear layer of a block, in 8 chunks and whole, in turns, on one rank.

Throughput: blocks of a GPT on two ranks of one thread, with SGD, in turns in the same processes: torch's
DTensor styles (``parallelize_module``) over gloo, instep over gloo and over shared memory, in 8 chunks and in
as many as ranks. Those of instep with the same chunks have to end with the same bits, torch's close to them,
or there is an error instead of a table.

Memory: bytes of tensors of the rank that has most, with AdamW; activations as autograd keeps them.
"""

from __future__ import annotations

import copy
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F

import instep
import instep.shm  # which makes the backend known
from benchmarks.pages import Pages, Results, parser_of, publish_tables, tables
from instep.bench.saved_bytes import saved_beside
from instep.bench.tables import paired_ratio, quantile
from instep.bench.worlds import World, on_ranks, slowest_rank
from instep.mesh.mesh import Mesh, build
from instep.models.config import PRESETS, GPTConfig, Preset
from instep.models.transformer import GPT
from instep.net.process_group import default_store, from_store
from instep.plan.memory_estimate import for_gpt, largest
from instep.tensor import Column, Row, cross_entropy, gpt_plan, products, shard

HERE = Path(__file__).parent
RANKS, CHUNKS, ROWS = 2, 8, 1024
SIZES = {
    "width 128": Preset(width=128, ff_width=512, layers=2, heads=4),
    **{name: PRESETS[name] for name in ("small", "medium")},
}
LAYERS, TOKENS, BATCH = 2, 256, 4
LEARNING_RATE = 1e-3
TOLERANCE = 1e-4
MOMENTS = 2
MEMORY = GPTConfig(layers=4, width=512, heads=8, context=128)
THEIRS = "torch DTensor, gloo"


class Block(nn.Module):
    """(B, T, D) to (B, T, D): attention and a feed-forward network, each product a layer of its own."""

    def __init__(self, width: int, ff_width: int, heads: int) -> None:
        super().__init__()
        self.head_width = width // heads
        self.norm, self.ff_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, ff_width), nn.Linear(ff_width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        heads = [
            each(y).unflatten(-1, (-1, self.head_width)).transpose(1, 2) for each in (self.q, self.k, self.v)
        ]
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.ff_norm(x))))


def blocks(size: str) -> nn.Sequential:
    found = SIZES[size]
    torch.manual_seed(0)
    return nn.Sequential(*(Block(found.width, found.ff_width, found.heads) for _ in range(LAYERS)))


class Contestant:
    """Trains ``net``; ``whole(p)`` is all of a parameter, for comparison."""

    def __init__(self, net: nn.Module, whole: Callable[[Tensor], Tensor]) -> None:
        self.net, self.whole, self.calls = net, whole, 0
        self.optimizer = torch.optim.SGD(net.parameters(), LEARNING_RATE)
        width = net[0].norm.normalized_shape[0]  # type: ignore[index, union-attr]
        torch.manual_seed(1)
        self.x, self.y = torch.randn(2, BATCH, TOKENS, width)

    def step(self) -> None:
        self.calls += 1
        F.mse_loss(self.net(self.x), self.y).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def weights(self) -> list[Tensor]:
        return [self.whole(p) for p in self.net.parameters()]


def theirs(net: nn.Sequential, mesh: DeviceMesh) -> Contestant:
    columns = [f"{i}.{name}" for i in range(LAYERS) for name in ("q", "k", "v", "up")]
    plan: dict[str, Any] = {name: ColwiseParallel() for name in columns}
    plan |= {f"{i}.{name}": RowwiseParallel() for i in range(LAYERS) for name in ("out", "down")}
    parallelize_module(net, mesh, plan)
    return Contestant(net, lambda p: p.full_tensor() if isinstance(p, DTensor) else p.detach())


def ours(net: nn.Sequential, mesh: Mesh, chunks: int | None, heads: int) -> Contestant:
    plan: dict[str, Any] = {f"*.{name}": Column(heads=heads) for name in ("q", "k", "v")}
    shard(net, mesh, {**plan, "*.up": Column(), "*.out": Row(), "*.down": Row()}, chunks)
    return Contestant(net, lambda p: instep.state.homes.home(p).whole(p, p.detach()))  # type: ignore[attr-defined, union-attr]


def race(world: World, task: dict[str, Any]) -> dict[str, list[float]]:
    """One rank: seconds per step of each contestant."""
    net, heads = blocks(task["size"]), SIZES[task["size"]].heads
    found = {THEIRS: theirs(copy.deepcopy(net), DeviceMesh("cpu", list(range(RANKS))))}
    for backend in ("gloo", "shm"):
        make = from_store(default_store(), world.rank, 60.0, config=f"cpu:{backend}")
        mesh = build(default_store(), world.rank, world.size, tp=RANKS, dp=1, timeout_s=60.0, make_group=make)
        for chunks in (CHUNKS, None):
            name = f"instep, {backend}, {chunks or RANKS} chunks"
            found[name] = ours(copy.deepcopy(net), mesh, chunks, heads)
    times, _ = world.interleave({name: one.step for name, one in found.items()}, task["samples"], warm_up=2)
    for one in found.values():
        while one.calls < max(other.calls for other in found.values()):
            one.step()
    weights = {name: one.weights() for name, one in found.items()}
    for name, mine in weights.items():
        apart = max(float((a - b).detach().abs().max()) for a, b in zip(mine, weights[THEIRS], strict=True))
        if apart > TOLERANCE:
            raise RuntimeError(f"{name}: weights are {apart:.1e} from those of torch")
        twin = weights[name.replace("gloo", "shm")] if name != THEIRS else mine
        if not all(map(torch.equal, mine, twin)):
            raise RuntimeError(f"{name}: expected the bits of shared memory")
    return times


def throughput(samples: int) -> list[dict[str, Any]]:
    rows = []
    for size in SIZES:
        ranks = on_ranks(race, {"size": size, "samples": samples}, ranks=RANKS)
        times = {name: slowest_rank([rank[name] for rank in ranks]) for name in ranks[0]}
        for name, seconds in times.items():
            ratio = paired_ratio(times[THEIRS], seconds)
            median = 1e3 * quantile(seconds, 0.5)
            against = f"{ratio.median:.2f} ({ratio.low:.2f} to {ratio.high:.2f})"
            rows.append({"blocks of": size, "way": name, "step(ms)": median, "throughput x torch": against})
    return rows


def chunked(samples: int) -> list[dict[str, Any]]:
    """Forward and backward of each product of a block, whole and in chunks."""
    torch.set_num_threads(1)
    rows = []
    for size in SIZES:
        h, f = SIZES[size].width, SIZES[size].ff_width
        sums = {"whole": [0.0] * samples, "chunks": [0.0] * samples}
        for name, k, n, parts in (("qkv", h, 3 * h, 3), ("out", h, h, 0), ("up", h, f, 1), ("down", f, h, 0)):
            x, w, dy = torch.randn(ROWS, k), torch.randn(n, k), torch.randn(ROWS, n)
            both = {"whole": lambda x=x, w=w, dy=dy: (x @ w.t(), dy @ w, dy.t() @ x, dy.sum(0))}
            both["chunks"] = lambda x=x, w=w, dy=dy, parts=parts: in_chunks(x, w, dy, parts)  # type: ignore[assignment, misc]
            times = in_turns(both, samples)
            for way, seconds in times.items():
                sums[way] = [a + b for a, b in zip(sums[way], seconds, strict=True)]
            rows.append(cost_row(f"{size}, {name}", f"{ROWS} x {k} x {n}", times))
        rows.append(cost_row(f"{size}, all four", "", sums))
    return rows


def in_chunks(x: Tensor, w: Tensor, dy: Tensor, parts: int) -> None:
    if parts:  # a column layer
        unit = len(w) // parts // CHUNKS
        products.times_rows(x, w, unit, parts)
        products.sum_over_rows(dy, w, unit, parts)
        products.gradient_of_rows(dy, x, unit, parts)
    else:
        unit = w.shape[1] // CHUNKS
        products.sum_over_columns(x, w, unit)
        products.gradient_of_columns(dy, x, w, unit)
        dy.sum(0)


def in_turns(ways: Mapping[str, Callable[[], object]], samples: int) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(samples + 1):
        for name, way in ways.items():
            began = time.perf_counter()
            way()
            if number:
                found[name].append(time.perf_counter() - began)
    return found


def cost_row(name: str, shape: str, times: Mapping[str, list[float]]) -> dict[str, Any]:
    ratio = paired_ratio(times["chunks"], times["whole"])
    ms = 1e3 * quantile(times["whole"], 0.5)
    took = f"{ratio.median:.3f} ({ratio.low:.2f} to {ratio.high:.2f})"
    return {"layer": name, "M x K x N": shape, "whole(ms)": ms, f"{CHUNKS} chunks / whole": took}


def held(world: World, task: dict[str, Any]) -> dict[str, int]:
    """One rank: bytes of tensors after a step."""
    make = from_store(default_store(), world.rank, 60.0, config="cpu:gloo")
    mesh = build(
        default_store(), world.rank, world.size, tp=world.size, dp=1, timeout_s=60.0, make_group=make
    )
    torch.manual_seed(0)
    net = GPT(MEMORY)
    shard(net, mesh, gpt_plan(net), CHUNKS, sequence=task["sequence"])
    optimizer = torch.optim.AdamW(net.parameters(), fused=True)
    tokens = torch.randint(0, MEMORY.vocab_size, (BATCH, MEMORY.context + 1))
    saved = saved_beside(net, [tokens])
    with saved.watch():
        loss = cross_entropy(net(tokens[:, :-1].contiguous()), tokens[:, 1:].contiguous(), net.head.out)
    activations = saved.nbytes
    loss.backward()
    optimizer.step()
    moments = [x for state in optimizer.state.values() for x in state.values() if x.numel() > 1]
    return {
        "parameters": sum(p.nbytes for p in net.parameters()),
        "gradients": sum(p.grad.nbytes for p in net.parameters() if p.grad is not None),
        "optimizer": sum(x.nbytes for x in moments),
        "activations": activations,
    }


def memory() -> list[dict[str, Any]]:
    rows = []
    for tp, sequence in ((2, False), (2, True), (4, False), (4, True)):
        ranks = on_ranks(held, {"sequence": sequence}, ranks=tp)
        expected = largest(for_gpt(MEMORY, BATCH, moments=MOMENTS, tp=tp, sequence=sequence))
        row: dict[str, Any] = {"tp": tp, "sequence": "slices" if sequence else ""}
        for what in ranks[0]:
            most = max(rank[what] for rank in ranks)
            row |= {f"{what}(MB)": most / 1e6, f"{what} / formula": round(most / expected.of(what), 3)}
        rows.append(row)
    return rows


def pages(results: Results) -> Pages:
    return tables(results, "products", "throughput", "memory")


def main() -> int:
    parser = parser_of(__doc__, HERE)
    parser.add_argument("--samples", type=int, default=20)
    wanted = parser.parse_args()
    began = time.monotonic()
    found: dict[str, Any] = {"memory": memory()}
    found |= {"throughput": throughput(wanted.samples), "products": chunked(wanted.samples)}
    publish_tables(found, wanted.out, HERE, {"minutes": (time.monotonic() - began) / 60}, pages)
    return 0


if __name__ == "__main__":
    sys.exit(main())
