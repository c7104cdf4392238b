"""How much memory each rank takes to train a transformer, line by line.

State per parameter, on W ranks that share it (``shard``); the moments are AdamW's. Source: S. Rajbhandari et
al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", arXiv 1910.02054, section 3.1.

    recipe     float32                                   mixed
    stage 0    weight 4    gradient 4    moments 8       weight 2    gradient 2    master 4, moments 8
    stage 1    4           4             8 / W           2           2             12 / W
    stage 2    4           4 / W         8 / W           2           2 / W         12 / W
    stage 3    4 / W       4 / W         8 / W           2 / W       2 / W         12 / W

Stage 3 gathers two units at a time, the one that computes and the next; and all that is in no block.
Stages 2 and 3 stage the gradients of two units on the way to their owners (``instep.shard.reduce_scatter``).
A declared step of k micro-batches on a rank keeps log2(k) partial sums of the gradient, the gradient one of
them (``instep.reduce.buckets``). A pipeline's rank holds the activations of as many micro-batches as its
schedule has under way: the schedule itself is walked.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import pairwise
from typing import Any, Literal, NamedTuple

from instep.models.config import GPTConfig
from instep.pipeline.actions import BACKWARD, FORWARD, WEIGHT_GRADIENT, Schedule
from instep.pipeline.cuts import balanced, edges_at
from instep.pipeline.schedules import generate
from instep.plan.model import (
    Saved,
    Transformer,
    Weights,
    block,
    embedding,
    gpt,
    head,
    kept_by_block,
    kept_by_ends,
)

MIB = 1 << 20
MOST_SHARDS = 1 << 20  # that a search tries


class Recipe(NamedTuple):
    """Bytes per number: weights and gradients as the optimizer's loop sees them, a ``master`` copy of the
    weights (0: none), moments, what products compute in, and the sum that runs through the blocks.

    ``compute_copy``: the weights are also there in the type of the products, all of them or, in stage 3,
    those that are gathered. ``autocast``: forward keeps converted weights for backward.
    """

    weight: int
    gradient: int
    master: int
    moment: int
    compute: int
    residual: int
    compute_copy: bool = False
    autocast: bool = False


RECIPES = {
    "float32": Recipe(4, 4, 0, 4, 4, 4),
    "autocast": Recipe(4, 4, 0, 4, 2, 4, autocast=True),  # torch.autocast to bfloat16
    "bf16-compute": Recipe(4, 4, 0, 4, 2, 2, compute_copy=True),  # fully_shard(compute_dtype=torch.bfloat16)
    "mixed": Recipe(2, 2, 4, 4, 2, 2),  # that of the ZeRO paper
    "mixed-float32-gradients": Recipe(2, 4, 4, 4, 2, 2),  # that of Megatron-LM
    "bf16": Recipe(2, 2, 0, 2, 2, 2),
}


@dataclass(frozen=True, kw_only=True)
class Placement:
    """How many ranks the work is divided over, and how."""

    dp: int = 1
    """Ranks with copies of the state, each with its own micro-batches."""
    shard: int = 1
    """Ranks that share one copy of the state, each with its own micro-batches."""
    stage: Literal[0, 1, 2, 3] = 0
    """What they share: 1 optimizer state, 2 also gradients, 3 also weights."""
    tp: int = 1
    """Ranks that share each layer."""
    sequence: bool = False
    """Whether these have slices of the sequence between layers."""
    ep: int = 1
    """Ranks that share the experts."""
    pp: int = 1
    """Ranks that have the blocks one after the other."""
    schedule: str = "1f1b"
    """Order in which a pipeline computes."""
    chunks: int = 0
    """Stages per rank of a pipeline; 0: as the schedule has."""
    cuts: tuple[int, ...] = ()
    """First blocks of a pipeline's stages, but for the first stage; none: equal stages."""
    bucket_mb: float = 25
    """Bucket of gradients, in MiB."""
    nodes: Literal["float32", "bfloat16", "int8"] = "float32"
    """Format of the tree's sums that ranks exchange; smaller ones travel in fewer bytes."""
    declared: bool = True
    """Whether steps are declared, and keep partial sums; false: gradients accumulate in place."""
    sharded_activations: float = 0.0
    """Share of a micro-batch's activations that is divided over the shard ranks."""

    def check(self) -> None:
        """Raise ``ValueError`` for what makes no sense, with what would."""
        for name in ("dp", "shard", "tp", "ep", "pp"):
            if getattr(self, name) < 1:
                raise ValueError(f"parallel.{name}: expected 1 rank or more, got {getattr(self, name)}")
        if self.stage not in range(4):
            raise ValueError(f"parallel.stage: expected 0, 1, 2 or 3, got {self.stage}")
        if self.chunks < 0 or self.bucket_mb <= 0 or not 0 <= self.sharded_activations <= 1:
            raise ValueError(
                "parallel: expected chunks >= 0, bucket_mb > 0 and sharded_activations from 0 to 1, got "
                f"{self.chunks}, {self.bucket_mb} and {self.sharded_activations}"
            )
        if self.cuts and self.pp == 1:
            raise ValueError(f"parallel.cuts: one stage has no cuts, got {self.cuts}: pass pp, or no cuts")
        if self.shard > 1 and self.stage == 0:
            raise ValueError(
                f"parallel.shard: {self.shard} ranks share nothing in stage 0: pass stage 1, 2 or 3"
            )

    @property
    def data_ranks(self) -> int:
        """Ranks with different micro-batches."""
        return self.dp * self.shard

    @property
    def world_size(self) -> int:
        return self.dp * self.shard * self.tp * self.ep * self.pp


@dataclass(frozen=True, kw_only=True)
class Batch:
    """The samples of one optimizer step: ``global = micro x accumulation x dp x shard``."""

    global_size: int = 0
    """Windows of a step; 0: one micro-batch for each rank, or for each stage of its pipeline."""
    micro_size: int = 1
    """Windows of a micro-batch."""

    def check(self) -> None:
        """Raise ``ValueError`` for what makes no sense, with what would."""
        if self.global_size < 0 or self.micro_size < 1:
            raise ValueError(
                "batch: expected global_size >= 0 and micro_size >= 1, got "
                f"{self.global_size} and {self.micro_size}"
            )

    def accumulation(self, placement: Placement) -> int:
        """Micro-batches of a rank and step.

        Raises:
            ValueError: the global batch cannot be divided so.
        """
        if not self.global_size:
            return placement.pp
        each = self.micro_size * placement.data_ranks
        if self.global_size % each:
            near = max(self.global_size // each, 1) * each
            raise ValueError(
                f"batch.global_size: expected a multiple of micro_size({self.micro_size}) x "
                f"dp({placement.dp}) x shard({placement.shard}) = {each}, got {self.global_size}: "
                f"{near} is one"
            )
        return self.global_size // each


@dataclass(frozen=True, kw_only=True)
class Device:
    """Memory of a rank's device, and what of it is no tensor; constants to be replaced by measured ones."""

    memory_gb: float = 80
    """Memory in GB of 10^9 bytes."""
    kind: Literal["cuda", "cpu"] = "cuda"
    """On which constants depend."""
    context_mb: float = -1
    """MB of 10^6 bytes before the first tensor: CUDA context and kernels, or a process that imports torch;
    -1: a published figure."""
    communicator_mb: float = -1
    """MB of a communicator on the device; -1: from NCCL's defaults."""
    snapshots: bool = False
    """Whether a run on CPUs keeps two snapshots of weights and moments (instep train, instep run)."""

    def check(self) -> None:
        """Raise ``ValueError`` for what makes no sense, with what would."""
        if not self.memory_gb > 0:
            raise ValueError(f"device.memory_gb: expected more than 0, got {self.memory_gb}")
        for name in ("context_mb", "communicator_mb"):
            if getattr(self, name) < 0 and getattr(self, name) != -1:
                raise ValueError(f"device.{name}: expected 0 or more, or -1, got {getattr(self, name)}")


# Blocks of a stage, whether the output layer is in it, and how many micro-batches are under way there.
Flying = list[tuple[int, bool, int]]


class Line(NamedTuple):
    """``num_bytes`` of one rank for one purpose, and the arithmetic in words."""

    part: str
    form: str
    num_bytes: int


STATE = ("parameters", "gradients", "master weights", "optimizer")
KEPT = ("parameters", "master weights", "optimizer")  # from step to step


@dataclass(frozen=True)
class RankMemory:
    """What one rank takes; ``num_parameters`` of the whole model."""

    lines: tuple[Line, ...]
    num_parameters: int

    def of(self, *parts: str) -> int:
        """Bytes of these parts together."""
        return sum(line.num_bytes for line in self.lines if line.part in parts)

    @property
    def state(self) -> int:
        return self.of(*STATE)

    @property
    def total(self) -> int:
        return sum(line.num_bytes for line in self.lines)

    @property
    def bytes_per_parameter(self) -> float:
        """Of the state, without what is gathered."""
        return round(self.state / self.num_parameters, 2)


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """All that the memory of a rank depends on."""

    model: Transformer = field(default_factory=Transformer)
    batch: Batch = Batch()
    parallel: Placement = Placement()
    device: Device = Device()
    recipe: str = "float32"
    """Types of weights, gradients, master weights, moments and products: float32, autocast, bf16-compute,
    mixed (ZeRO), mixed-float32-gradients (Megatron), bf16."""
    moments: int = 2
    """Numbers per parameter that the optimizer keeps: 2 AdamW, 1 SGD with momentum, 0 SGD."""

    def check(self) -> None:
        """Raise ``ValueError`` for what makes no sense, with what would."""
        self.model.check()
        self.batch.check()
        self.parallel.check()
        self.device.check()
        if self.recipe not in RECIPES:
            raise ValueError(f"recipe: expected one of {', '.join(RECIPES)}, got {self.recipe!r}")
        if self.moments < 0:
            raise ValueError(f"moments: expected 0 or more, got {self.moments}: AdamW has 2")
        model, parallel = self.model, self.parallel
        if parallel.ep > max(model.experts, 1) or model.experts % parallel.ep:
            if not model.experts:
                raise ValueError(
                    f"parallel.ep: a model without experts has none for {parallel.ep} ranks: pass ep=1"
                )
            fits = max(n for n in range(1, parallel.ep) if model.experts % n == 0)
            wanted = f"a divisor of experts({model.experts}), got {parallel.ep}: {fits} is one"
            raise ValueError(f"parallel.ep: expected {wanted}")
        for name, count in (("heads", model.heads), ("kv_heads", model.kv_heads), ("ff_width", model.d_ff)):
            if count and count % parallel.tp:
                fits = max(n for n in range(1, parallel.tp) if count % n == 0)
                raise ValueError(f"parallel.tp: {parallel.tp} ranks cannot share {name}({count}): {fits} can")
        if parallel.pp > model.layers:
            raise ValueError(
                f"parallel.pp: expected at most one stage per block, got {parallel.pp} stages and "
                f"{model.layers} blocks: pass pp={model.layers} or less"
            )
        self.batch.accumulation(parallel)

    @property
    def tokens(self) -> int:
        """Of a micro-batch."""
        return self.batch.micro_size * self.model.context

    def sharded(self, shard: int) -> MemoryPlan:
        """The same with the state on ``shard`` ranks (1: replicated), and a micro-batch for each."""
        stage = self.parallel.stage if shard > 1 else 0
        return replace(
            self,
            parallel=replace(self.parallel, shard=shard, stage=stage),
            batch=replace(self.batch, global_size=0),
        )


def for_gpt(
    config: GPTConfig, micro_size: int, *, autocast: bool = False, moments: int = 2, **placement: Any
) -> MemoryPlan:
    """The plan of the model that ``instep train`` and the benchmarks train, in float32 or with autocast."""
    return MemoryPlan(
        model=gpt(config),
        batch=Batch(micro_size=micro_size),
        parallel=Placement(**placement),
        recipe="autocast" if autocast else "float32",
        moments=moments,
    )


def memory(plan: MemoryPlan) -> list[RankMemory]:
    """What each rank of a pipeline takes, or the one kind of rank there is.

    Raises:
        ValueError: a schedule that does not exist, or stages without a block.
    """
    parallel, blocks = plan.parallel, plan.model.layers
    count = plan.batch.accumulation(parallel)
    if parallel.pp == 1:
        return [_rank(plan, blocks, True, True, count, [(blocks, True, 1)])]
    shown = count  # what is under way at once is the same from 4 micro-batches per rank on, but for gpipe
    if parallel.schedule != "gpipe":
        shown = min(count, 4 * parallel.pp + count % parallel.pp)
    return [
        _rank(plan, sum(sizes), first, last, count, flying)
        for sizes, first, last, flying in _stages(
            parallel.schedule, parallel.pp, shown, parallel.chunks or None, blocks, parallel.cuts
        )
    ]


@cache
def _stages(
    name: str, pp: int, count: int, chunks: int | None, blocks: int, cuts: tuple[int, ...]
) -> list[tuple[list[int], bool, bool, Flying]]:
    """Of each rank of a pipeline: the blocks of its stages, whether it has the first and the last stage, and
    what it keeps at its fullest moment."""
    schedule = generate(name, pp, count, chunks)
    sizes = stage_sizes(blocks, cuts, schedule.num_stages)
    found = []
    for rank in range(pp):
        own = [stage for stage, place in enumerate(schedule.stage_ranks) if place == rank]
        flying = _in_flight(schedule, rank, sizes)
        found.append(([sizes[stage] for stage in own], 0 in own, schedule.num_stages - 1 in own, flying))
    return found


def stage_sizes(blocks: int, cuts: tuple[int, ...], num_stages: int) -> list[int]:
    """Blocks of each stage of a pipeline."""
    edges = edges_at(cuts, blocks, num_stages, f"parallel.cuts={cuts}") if cuts else None
    return [end - begin for begin, end in pairwise(edges or balanced([1] * blocks, num_stages))]


def largest(plan: MemoryPlan) -> RankMemory:
    """The rank that takes most."""
    return max(memory(plan), key=lambda rank: rank.total)


def smallest_shard(plan: MemoryPlan) -> int | None:
    """The fewest ranks that share the state, in the plan's stage or 3, and fit the device; None: none do."""
    plan = replace(plan, parallel=replace(plan.parallel, stage=plan.parallel.stage or 3, shard=2))

    def fits(shard: int) -> bool:
        return largest(plan.sharded(shard)).total <= plan.device.memory_gb * 1e9

    if fits(1):
        return 1
    high = 2
    while not fits(high):
        if high >= MOST_SHARDS:
            return None
        high *= 2
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high


def _in_flight(schedule: Schedule, rank: int, sizes: Sequence[int]) -> Flying:
    """What a rank keeps when it keeps most blocks."""
    held: dict[int, int] = {}
    now = most = 0
    fullest: dict[int, int] = {}
    for action in schedule.rows[rank]:
        change = (action.kind == FORWARD) - (action.kind in (BACKWARD, WEIGHT_GRADIENT))
        held[action.stage] = held.get(action.stage, 0) + change
        now += change * sizes[action.stage]
        if now > most:
            most, fullest = now, dict(held)
    last = schedule.num_stages - 1
    return [(sizes[stage], stage == last, count) for stage, count in fullest.items() if count]


def _rank(plan: MemoryPlan, blocks: int, first: bool, last: bool, count: int, flying: Flying) -> RankMemory:
    model, parallel = plan.model, plan.parallel
    ends = [*(embedding(model) if first else []), *(head(model) if last else [])]
    if last and not first and model.tied:
        ends += [line for line in embedding(model) if line.name == "tokens"]
    each, rest = of_rank(block(model), parallel), of_rank(ends, parallel)
    size, recipe = blocks * each + rest, RECIPES[plan.recipe]
    named = f"({blocks} blocks x {each:,} + {rest:,})" if parallel.world_size > 1 else f"{size:,}"
    lines = list(state_lines(recipe, plan.moments, size, parallel, named))
    lines += _buffer_lines(plan, blocks, each, rest, count)
    lines += _activation_lines(plan, flying)
    lines += _constant_lines(plan, sum(line.num_bytes for line in lines if line.part in KEPT))
    return RankMemory(tuple(line for line in lines if line.num_bytes), model.num_parameters)


def of_rank(lines: Iterable[Weights | Saved], parallel: Placement) -> int:
    """Numbers that one rank has of these."""
    parts = {"": 1, "tp": parallel.tp, "ep": parallel.ep, "sequence": parallel.tp if parallel.sequence else 1}
    return sum(-(-line.size // parts[line.cut]) for line in lines)


def state_lines(
    recipe: Recipe, moments: int, size: int, parallel: Placement, named: str = ""
) -> Iterator[Line]:
    """Bytes for the state of ``size`` parameters, ``named`` in the words."""
    named = f"{named or f'{size:,}'} parameters"
    for part, cut, item in (
        ("parameters", 2 if recipe.compute_copy else 3, recipe.weight),
        ("gradients", 2, recipe.gradient),
        ("master weights", 1, recipe.master),
        ("optimizer", 1, moments * recipe.moment),
    ):
        ranks = parallel.shard if parallel.stage >= cut else 1
        words = f"{moments} x {recipe.moment}" if part == "optimizer" else f"{item}"
        over = f" / {ranks} ranks" if ranks > 1 else ""
        yield Line(part, f"{named} x {words} bytes{over}", -(-size * item // ranks))
    if recipe.compute_copy and parallel.stage < 3:
        yield Line("compute copy", f"{named} x {recipe.compute} bytes", size * recipe.compute)


def _buffer_lines(plan: MemoryPlan, blocks: int, each: int, rest: int, count: int) -> Iterator[Line]:
    recipe, parallel = RECIPES[plan.recipe], plan.parallel
    gradient = (blocks * each + rest) * recipe.gradient
    units, staged = min(blocks, 2), 2 * max(each, rest) * recipe.gradient
    if parallel.stage >= 3 and parallel.shard > 1:
        item = recipe.compute if recipe.compute_copy else recipe.weight
        form = f"({units} blocks x {each:,} + {rest:,}) parameters x {item} bytes"
        yield Line("gathered", form, (units * each + rest) * item)
    if parallel.stage >= 2 and parallel.shard > 1:
        gradient = -(-gradient // parallel.shard)
        yield Line("buffers", "gradients of 2 units on their way", staged)
    elif parallel.data_ranks > 1 and plan.device.kind == "cpu":
        there = gradient * (parallel.data_ranks - 1) // parallel.data_ranks
        yield Line("buffers", "a rank's slice of the other ranks' gradients, in shared memory", there)
    elif parallel.data_ranks > 1:
        yield Line("buffers", "a bucket that is received", min(round(parallel.bucket_mb * MIB), gradient))
    sums = max(math.ceil(math.log2(count)), 1) - 1 if parallel.declared else 0
    form = f"{sums} beside the gradient, of {count} micro-batches"
    yield Line("partial sums", form, sums * gradient)


def kept_bytes(lines: Iterable[Saved], plan: MemoryPlan) -> int:
    """What a rank keeps of these lines."""
    recipe = RECIPES[plan.recipe]
    sizes = {"compute": recipe.compute, "residual": recipe.residual, "logits": 4}
    return sum(of_rank([line], plan.parallel) * sizes[line.kind] for line in lines)


def block_bytes(plan: MemoryPlan) -> int:
    """What one block keeps of a micro-batch; with ``checkpoint``, while backward is in it."""
    converted = RECIPES[plan.recipe].autocast
    return kept_bytes(kept_by_block(plan.model, plan.tokens, converted=converted), plan)


def _activation_lines(plan: MemoryPlan, flying: Flying) -> Iterator[Line]:
    model, parallel, recipe = plan.model, plan.parallel, RECIPES[plan.recipe]
    whole = each = block_bytes(plan)
    if model.checkpoint:
        slices = parallel.tp if parallel.sequence else 1
        each = plan.tokens * model.width * recipe.residual // slices
    num_blocks = sum(blocks * times for blocks, _, times in flying)
    ends = kept_bytes(kept_by_ends(model, plan.tokens, converted=recipe.autocast), plan)
    share = parallel.sharded_activations
    part = (1 - share) + share / parallel.shard
    over = f" x (1 - {share:g} + {share:g} / {parallel.shard} ranks)" if share else ""
    kept = "its input" if model.checkpoint else f"{each:,} bytes"
    form = f"{num_blocks} blocks x {kept} of {plan.tokens:,} tokens"
    if parallel.pp > 1:
        blocks = max(size for size, _, _ in flying)
        form += f" ({sum(times for _, _, times in flying)} times {blocks} blocks under way)"
    yield Line("activations", form + over, round(num_blocks * each * part))
    output = sum(times for _, last, times in flying if last)
    yield Line("activations", f"{output} x output layer and loss" + over, round(output * ends * part))
    if model.checkpoint:
        yield Line("recomputation", "one block, computed again in backward", round(whole * part))


def _constant_lines(plan: MemoryPlan, snapshot: int) -> Iterator[Line]:
    """What is no tensor of the training.

    Sources: of a process, benchmarks/shard/README.md, column "before"; of context and kernels, the page
    "Model training anatomy" of the documentation of transformers; of cuBLAS, its documentation of
    cublasSetWorkspace (Hopper), once for cuBLAS and once for cuBLASLt; of NCCL, its documentation of
    NCCL_BUFFSIZE (4 MiB), for two neighbours on each of at most 32 channels.
    """
    device, parallel = plan.device, plan.parallel
    if device.kind == "cpu":
        size = 262 if device.context_mb < 0 else device.context_mb
        yield Line("constants", "process that has imported torch", round(size * 1e6))
        yield Line("snapshots", "2 x weights and moments of rank 0", 2 * snapshot * device.snapshots)
        return
    size = 1343 if device.context_mb < 0 else device.context_mb
    yield Line("constants", "CUDA context and kernels", round(size * 1e6))
    yield Line("constants", "first forward: workspaces of cuBLAS", 2 * 32 * MIB)
    groups = sum(n > 1 for n in (parallel.dp, parallel.shard, parallel.tp, parallel.ep, parallel.pp))
    each = 2 * 32 * 4 * MIB if device.communicator_mb < 0 else round(device.communicator_mb * 1e6)
    yield Line("constants", f"{groups} NCCL communicators x {each:,} bytes", groups * each)
