"""The memory plan as text and as JSON: each line with its arithmetic, in GB and in GiB.

GB are 10^9 bytes and GiB 2^30; published tables have both, often under the name GB.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any

from instep.plan.memory_estimate import (
    MOST_SHARDS,
    RECIPES,
    MemoryPlan,
    RankMemory,
    kept_bytes,
    largest,
    memory,
    smallest_shard,
)
from instep.plan.model import block, embedding, head, kept_by_block, kept_by_ends

GB, GIB = 1e9, 1 << 30
SHARDS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
MORE_SHARDS = 4  # rows beyond the smallest number that fits


def aligned(rows: Iterable[Sequence[str]], words: int = 1) -> Iterator[str]:
    """Lines of columns: the first ``words`` to the left, numbers to the right."""
    rows = list(rows)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row[:words], widths, strict=False)]
        cells += [cell.rjust(width) for cell, width in zip(row[words:], widths[words:], strict=True)]
        yield "  " + "  ".join(cells).rstrip()


def sizes(num_bytes: float) -> list[str]:
    """The cells of a number of bytes: itself, in GB, in GiB."""
    return [f"{num_bytes:,.0f}", f"{num_bytes / GB:,.2f}", f"{num_bytes / GIB:,.2f}"]


def text(plan: MemoryPlan) -> Iterator[str]:
    """All lines that ``instep plan memory`` prints."""
    ranks = memory(plan)
    most = max(range(len(ranks)), key=lambda rank: ranks[rank].total)
    yield from model_text(plan)
    yield ""
    world, which = plan.parallel.world_size, f"pipeline stage {most}, which takes most" * (len(ranks) > 1)
    yield f"memory of a rank of {world}{which and ', in ' + which}, recipe {plan.recipe}"
    yield from rank_text(plan, ranks[most])
    yield ""
    yield verdict(plan, ranks[most])
    if len(ranks) > 1:
        yield ""
        yield "memory by pipeline stage"
        rows = [[f"{stage}", *sizes(rank.total)] for stage, rank in enumerate(ranks)]
        yield from aligned([["stage", "bytes", "GB", "GiB"], *rows])
    yield ""
    yield from shards_text(plan)


def model_text(plan: MemoryPlan) -> Iterator[str]:
    """Weights, and activations of a micro-batch, of one block and of both ends."""
    model, converted = plan.model, RECIPES[plan.recipe].autocast
    letters = {"h": model.width, "f": model.d_ff, "k": model.kv_width, "V": model.vocab_size}
    letters |= {"E": model.experts, "K": model.top_k if model.experts else 0, "T": plan.tokens}
    words = ", ".join(f"{letter} = {count:,}" for letter, count in letters.items() if count)
    yield f"model: {model.num_parameters:,} parameters, {model.layers} blocks; {words}"
    rows = [("weights", "numbers", "")]
    rows += [(f"block: {one.name}", one.form, f"{one.size:,}") for one in block(model)]
    rows += [(one.name, one.form, f"{one.size:,}") for one in (*embedding(model), *head(model))]
    yield from aligned(rows, 2)
    yield f"kept for backward, of a micro-batch of T = {plan.batch.micro_size} x {model.context:,} tokens"
    rows = [("activations", "numbers", "bytes on a rank")]
    for one in kept_by_block(model, plan.tokens, converted=converted):
        rows.append((f"block: {one.name}", one.form, f"{kept_bytes([one], plan):,}"))
    for one in kept_by_ends(model, plan.tokens, converted=converted):
        rows.append((one.name, one.form, f"{kept_bytes([one], plan):,}"))
    yield from aligned(rows, 2)


def rank_text(plan: MemoryPlan, rank: RankMemory) -> Iterator[str]:
    """A line for each part, and their sum."""
    capacity = plan.device.memory_gb * GB
    rows = [["part", "arithmetic", "bytes", "GB", "GiB", f"devices of {plan.device.memory_gb:g} GB"]]
    rows += [
        [line.part, line.form, *sizes(line.num_bytes), f"{-(-line.num_bytes // capacity):.0f}"]
        for line in rank.lines
    ]
    rows.append(["total", "", *sizes(rank.total), f"{-(-rank.total // capacity):.0f}"])
    yield from aligned(rows, 2)


def verdict(plan: MemoryPlan, rank: RankMemory) -> str:
    """Whether the rank's device holds it, and if not, what would."""
    capacity = plan.device.memory_gb * GB
    left = capacity - rank.total
    if left >= 0:
        return f"fits a device of {plan.device.memory_gb:g} GB: {left / GB:.2f} GB are left"
    words = f"does not fit a device of {plan.device.memory_gb:g} GB: {-left / GB:,.2f} GB are missing"
    kept = rank.of("activations", "recomputation", "constants")
    if kept < capacity and plan.parallel.stage < 3:
        found = "--parallel.stage 3 and the --parallel.shard that instep plan memory finds"
        return f"{words}; share the state: pass {found}"
    fixes = ["a smaller --batch.micro-size"] * (plan.batch.micro_size > 1)
    fixes += ["--model.checkpoint"] * (not plan.model.checkpoint)
    fixes += ["more ranks for each layer, --parallel.tp"]
    return f"{words}; activations and constants take {kept / GB:,.2f} GB: pass {', or '.join(fixes)}"


def shards(plan: MemoryPlan) -> tuple[int | None, dict[int, RankMemory]]:
    """The smallest number of ranks that fits if they share the state, and a rank of so many and of others."""
    stage, smallest = plan.parallel.stage or 3, smallest_shard(plan)
    plan = replace(plan, parallel=replace(plan.parallel, stage=stage, shard=2))
    last = next((n for n in SHARDS if n >= (smallest or SHARDS[-1])), SHARDS[-1])
    counts = sorted({*(n for n in SHARDS if n <= MORE_SHARDS * last), *([smallest] if smallest else [])})
    return smallest, {count: largest(plan.sharded(count)) for count in counts}


def shards_text(plan: MemoryPlan) -> Iterator[str]:
    """Bytes of a rank against the number of ranks that share the state, and the smallest that fits."""
    smallest, found = shards(plan)
    plan = replace(plan, parallel=replace(plan.parallel, stage=plan.parallel.stage or 3, shard=2))
    yield f"memory of a rank when ranks share the state in stage {plan.parallel.stage}"
    rows = [["ranks", "state GB", "activations GB", "other GB", "total GB", "GiB", "fits"]]
    for count, rank in found.items():
        kept = rank.of("activations", "recomputation")
        cells = [rank.state, kept, rank.total - rank.state - kept, rank.total]
        fits = "yes" if rank.total <= plan.device.memory_gb * GB else "no"
        rows.append([f"{count}", *(f"{cell / GB:,.2f}" for cell in cells), f"{rank.total / GIB:,.2f}", fits])
    yield from aligned(rows, 0)
    if smallest is None:
        yield f"no number of ranks makes it fit: it {verdict(plan, largest(plan.sharded(MOST_SHARDS)))}"
        return
    yield f"smallest number of ranks that fits {plan.device.memory_gb:g} GB: {smallest}"
    yield from batch_text(plan, smallest)


def batch_text(plan: MemoryPlan, smallest: int) -> Iterator[str]:
    """The ways to make the global batch: with more ranks, or with more accumulation."""
    whole, micro = plan.batch.global_size, plan.batch.micro_size
    if not whole:
        return
    ways = [ranks for ranks in range(smallest, whole // micro + 1) if whole % (micro * ranks) == 0]
    if not ways:
        yield (
            f"global batch {whole}: {smallest} ranks x micro-batches of {micro} are more, "
            f"or do not divide it: pass a multiple of {micro * smallest}"
        )
    for ranks in ways[:MORE_SHARDS]:
        total = largest(replace(plan, parallel=replace(plan.parallel, shard=ranks))).total
        words = f"micro {micro} x accumulation {whole // (micro * ranks)} x {ranks} ranks"
        yield f"global batch {whole} = {words}: {total / GB:,.2f} GB per rank"


def as_json(plan: MemoryPlan) -> dict[str, Any]:
    """The same numbers, of every pipeline stage."""
    ranks = memory(plan)
    return {
        "plan": asdict(plan),
        "parameters": plan.model.num_parameters,
        "stages": [{"total": rank.total, "lines": [line._asdict() for line in rank.lines]} for rank in ranks],
        "fits": max(rank.total for rank in ranks) <= plan.device.memory_gb * GB,
        "smallest_shard": smallest_shard(plan) if plan.parallel.pp == 1 else None,
    }
