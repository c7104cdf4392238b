"""Random collectives on shared memory for as long as you like, each compared with gloo's.

python benchmarks/faults/soak.py --minutes 10 --ranks 4     writes soak.json and the table in README.md
                                                         it; exit code 1 at the first difference

All ranks draw the same plan from the seed: operations on overlapping groups, some of them begun and left to
go on, then waited for in an order of each rank's own. Integers, and whatever is only moved, must be equal;
sums of floats may differ from gloo's by what another order of addition can do, and not from rank to rank.
"""

from __future__ import annotations

import gc
import json
import random
import sys
import tempfile
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import instep
from benchmarks.pages import README, Pages, Results, made, parser_of, prepare, save
from instep.bench import tables
from instep.launch.launch import launch
from instep.launch.rank_exit import RankFailed
from instep.shm.group_segment import HALF_BYTES

HERE = Path(__file__).parent
COMMAND = "python benchmarks/faults/soak.py"
TIMEOUT_S = 120.0
BATCH = 12  # operations that may be in flight at once
REMAKE = 20  # batches after which one group is destroyed and made again
WARM_UP = 2 * REMAKE  # batches before memory is looked at for the first time

# Newer torch has other names for these.
GATHER_SINGLE = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
REDUCE_SCATTER_SINGLE = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

# Elements for one rank: nothing, little, more than is added at once, more than a half.
LENGTHS = (0, 1, 3, 7, 64, 1000, 4097, 10_001, 70_003, HALF_BYTES // 4 + 11)
# How far a reduction of a handful of numbers between 1/2 and 3/2 may be from gloo's, relatively.
TOLERANCES = {torch.float16: 1e-2, torch.bfloat16: 8e-2, torch.float32: 1e-5, torch.float64: 1e-13}
INTEGERS = (torch.int8, torch.uint8, torch.int32, torch.int64)
DTYPES = (*TOLERANCES, *INTEGERS)
REDUCTIONS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")
MEMORY = ("private", "private", "strided", "shared")


@dataclass(frozen=True)
class Operation:
    """One call; ``number`` is what its inputs are drawn from, ``root`` a place in its group."""

    number: int
    kind: str
    group: int
    dtype: torch.dtype
    length: int
    reduction: str
    root: int
    memory: str
    begun: bool  # and left to go on

    def input(self, rank: int, num_elements: int) -> Tensor:
        """What global rank ``rank`` puts in."""
        generator = torch.Generator().manual_seed(self.number * 1009 + rank)
        if self.dtype in TOLERANCES:
            return (torch.rand(num_elements, generator=generator) + 0.5).to(self.dtype)
        return torch.randint(0, 127, (num_elements,), generator=generator).to(self.dtype)


def draw(plan: random.Random, number: int, groups: Sequence[Sequence[int]]) -> Operation:
    """The next operation, the same on every rank."""
    dtype = plan.choice(DTYPES)
    group = plan.randrange(len(groups))
    # Without AVG for integers, which gloo does not have, and bits for integers alone.
    reductions = REDUCTIONS[:5] if dtype in TOLERANCES else [r for r in REDUCTIONS if r != "AVG"]
    return Operation(
        number,
        plan.choice(list(KINDS)),
        group,
        dtype,
        plan.choices(LENGTHS, weights=[4, 4, 8, 8, 8, 8, 6, 4, 2, 1])[0],
        plan.choice(reductions),
        plan.randrange(len(groups[group])),
        plan.choice(MEMORY),
        plan.random() < 0.7,
    )


@dataclass
class Side:
    """One backend's group as one rank uses it; ``ranks`` are its members."""

    pg: Any
    ranks: Sequence[int]
    memory: str = "private"

    @property
    def size(self) -> int:
        return len(self.ranks)

    def place(self, x: Tensor) -> Tensor:
        """A copy of ``x`` in the kind of memory that is asked for."""
        if self.memory == "shared":
            nbytes = x.numel() * x.dtype.itemsize
            return self.pg.allocate(nbytes).elements(x.dtype).copy_(x)
        if self.memory == "strided":
            return x.new_empty(2 * x.numel())[::2].copy_(x)
        return x.clone()


Handle = tuple[Any, Sequence[Tensor]]  # the work, and what it writes to


def all_reduce(op: Operation, me: int, side: Side) -> Handle:
    x = side.place(op.input(me, op.length))
    return dist.all_reduce(x, reduction(op), side.pg, async_op=True), [x]


def reduce(op: Operation, me: int, side: Side) -> Handle:
    x, root = side.place(op.input(me, op.length)), side.ranks[op.root]
    return dist.reduce(x, root, reduction(op), side.pg, async_op=True), [x] if me == root else []


def broadcast(op: Operation, me: int, side: Side) -> Handle:
    x = side.place(op.input(me, op.length))
    return dist.broadcast(x, side.ranks[op.root], side.pg, async_op=True), [x]


def all_gather(op: Operation, me: int, side: Side) -> Handle:
    x = side.place(op.input(me, op.length))
    outs = [torch.zeros_like(x) for _ in side.ranks]
    return dist.all_gather(outs, x, side.pg, async_op=True), outs


def all_gather_single(op: Operation, me: int, side: Side) -> Handle:
    x = op.input(me, op.length)
    out = x.new_zeros(side.size * op.length)
    return GATHER_SINGLE(out, x, side.pg, async_op=True), [out]


def gather(op: Operation, me: int, side: Side) -> Handle:
    x, root = op.input(me, op.length), side.ranks[op.root]
    outs = [torch.zeros_like(x) for _ in side.ranks] if me == root else None
    return dist.gather(x, outs, root, side.pg, async_op=True), outs or []


def scatter(op: Operation, me: int, side: Side) -> Handle:
    root = side.ranks[op.root]
    xs = list(op.input(me, side.size * op.length).view(side.size, -1)) if me == root else None
    out = side.place(torch.zeros(op.length, dtype=op.dtype))
    return dist.scatter(out, xs, root, side.pg, async_op=True), [out]


def reduce_scatter(op: Operation, me: int, side: Side) -> Handle:
    xs = list(op.input(me, side.size * op.length).view(side.size, -1))
    out = torch.zeros(op.length, dtype=op.dtype)
    return dist.reduce_scatter(out, xs, reduction(op), side.pg, async_op=True), [out]


def reduce_scatter_single(op: Operation, me: int, side: Side) -> Handle:
    out = torch.zeros(op.length, dtype=op.dtype)
    x = op.input(me, side.size * op.length)
    return REDUCE_SCATTER_SINGLE(out, x, reduction(op), side.pg, async_op=True), [out]


def all_to_all(op: Operation, me: int, side: Side) -> Handle:
    """Of lengths that differ from pair to pair, some of them nothing."""
    table = [
        [(3 * a + 5 * b + op.number) % 4 * op.length // 4 for b in range(side.size)] for a in range(side.size)
    ]
    place = side.ranks.index(me)
    x = op.input(me, sum(table[place]))
    splits = [row[place] for row in table]
    out = x.new_zeros(sum(splits))
    return dist.all_to_all_single(out, x, splits, table[place], side.pg, async_op=True), [out]


def ring(op: Operation, me: int, side: Side) -> Handle:
    """Everybody sends to the next one, with a tag of the operation's own."""
    if side.size == 1:
        return None, []
    place, tag = side.ranks.index(me), op.number % 1000
    x = op.input(me, op.length)
    out = side.place(torch.zeros_like(x))
    following, preceding = (side.ranks[(place + step) % side.size] for step in (1, -1))
    return [dist.irecv(out, preceding, side.pg, tag), dist.isend(x, following, side.pg, tag)], [out]


def barrier(op: Operation, me: int, side: Side) -> Handle:
    return dist.barrier(side.pg, async_op=True), []


KINDS: dict[str, Callable[[Operation, int, Side], Handle]] = {
    function.__name__: function
    for function in (
        all_reduce,
        reduce,
        broadcast,
        all_gather,
        all_gather_single,
        gather,
        scatter,
        reduce_scatter,
        reduce_scatter_single,
        all_to_all,
        ring,
        barrier,
    )
}


def reduction(op: Operation) -> Any:
    return getattr(dist.ReduceOp, op.reduction)


def wait(work: Any) -> None:
    for part in work if isinstance(work, list) else [work]:
        if part is not None:
            part.wait()


def compare(op: Operation, found: Sequence[Tensor], expected: Sequence[Tensor]) -> str:
    """What is wrong with the result; empty if it is right."""
    inexact = "reduce" in op.kind and op.reduction not in ("MIN", "MAX")
    tolerance = TOLERANCES.get(op.dtype, 0.0) if inexact else 0.0
    for ours, theirs in zip(found, expected, strict=True):
        if not torch.allclose(ours.double(), theirs.double(), rtol=tolerance, atol=0.0):
            return f"{op}: expected {theirs}, got {ours}"
    return ""


def fingerprint(tensors: Sequence[Tensor]) -> int:
    """Equal for equal bits."""
    plain = (x.new_empty(x.shape).copy_(x) for x in tensors)  # also one element with a stride
    return zlib.crc32(b"".join(x.view(torch.uint8).numpy().tobytes() for x in plain))


class Rank:
    """One rank's way through the plan. ``pairs[g]`` are group g of shm and of gloo, None for strangers."""

    def __init__(self, me: int, members: Sequence[Sequence[int]], seed: int) -> None:
        self.me = me
        self.members = members
        self.plan = random.Random(seed)
        self.own = random.Random(seed + 1 + me)
        self.counts: Counter[str] = Counter()
        self.number = 0
        self.gloo = [dist.new_group(list(ranks), timedelta(seconds=TIMEOUT_S), "gloo") for ranks in members]
        self.shm = [self._make(ranks) for ranks in members]

    def _make(self, ranks: Sequence[int]) -> Any:
        return dist.new_group(list(ranks), timedelta(seconds=TIMEOUT_S), "shm")

    def batch(self) -> str:
        """Some operations at once; what went wrong, if anything."""
        operations = [draw(self.plan, self.number + i, self.members) for i in range(BATCH)]
        self.number += BATCH
        mine = [op for op in operations if self.me in self.members[op.group]]
        begun: list[tuple[Operation, Handle]] = []
        for op in mine:
            running = KINDS[op.kind](op, self.me, self._side(op, self.shm, op.memory))
            if not op.begun:
                wait(running[0])
            begun.append((op, running))
        shuffled = self.own.sample(begun, len(begun))
        for _, (work, _) in shuffled:
            wait(work)
        problems = []  # all are collected: the other ranks wait for this one in the rest of the batch
        for op, (_, found) in begun:
            work, expected = KINDS[op.kind](op, self.me, self._side(op, self.gloo, "private"))
            wait(work)
            self.counts[op.kind] += 1
            problems += [
                problem for problem in (self._different(op, found), compare(op, found, expected)) if problem
            ]
        return f"rank {self.me}: {problems[0]}" if problems else ""

    def _side(self, op: Operation, groups: Sequence[Any], memory: str) -> Side:
        return Side(groups[op.group], self.members[op.group], memory)

    def _different(self, op: Operation, found: Sequence[Tensor]) -> str:
        """Whether some rank has other bits, where all must have the same."""
        if op.kind != "all_reduce":
            return ""
        own = torch.tensor([fingerprint(found)])
        all_of_them = [torch.zeros_like(own) for _ in self.members[op.group]]
        dist.all_gather(all_of_them, own, self.gloo[op.group])
        return "" if len({int(x) for x in all_of_them}) == 1 else f"{op}: the ranks have different bits"

    def remake(self) -> None:
        """Destroy a group and make it again."""
        place = self.plan.randrange(len(self.members))
        if self.me in self.members[place]:
            dist.barrier(self.gloo[place])
            dist.destroy_process_group(self.shm[place])
        self.shm[place] = None
        self.shm[place] = self._make(self.members[place])

    def any(self, flag: bool) -> bool:
        """Whether ``flag`` is set on some rank."""
        found = torch.tensor([int(flag)])
        dist.all_reduce(found, dist.ReduceOp.MAX, self.gloo[0])
        return bool(found)


def members_of(size: int) -> list[list[int]]:
    """All, the even ones, neighbours that overlap, all but one, one alone."""
    ranks = list(range(size))
    groups = [
        ranks,
        ranks[::2],
        *([a, b] for a, b in pairwise(ranks)),
        ranks[1:],
        ranks[:1],
    ]
    return [list(group) for group in dict.fromkeys(map(tuple, groups)) if group]


@dataclass(frozen=True)
class Footprint:
    """What a process holds."""

    descriptors: int
    threads: int
    mapped_mb: float  # of nameless memory
    rss_mb: float

    @staticmethod
    def now() -> Footprint:
        gc.collect()
        spans = [
            line.split()[0].split("-")
            for line in Path("/proc/self/maps").read_text().splitlines()
            if "memfd:instep" in line
        ]
        mapped = sum(int(end, 16) - int(start, 16) for start, end in spans)
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        descriptors = len(list(Path("/proc/self/fd").iterdir()))
        return Footprint(descriptors, threading.active_count(), mapped / 1e6, pages * 4096 / 1e6)


def soak(directory: Path, minutes: float, seed: int) -> None:
    """A rank's life; it leaves what it has counted in ``directory``."""
    mesh = instep.init(backend="gloo", timeout_s=TIMEOUT_S)
    rank = Rank(mesh.rank, members_of(mesh.world.size), seed)
    until, batches, wrong = time.monotonic() + 60 * minutes, 0, ""
    before = Footprint.now()
    while not rank.any(bool(wrong) or (batches > WARM_UP and time.monotonic() > until)):
        wrong = rank.batch()
        batches += 1
        if batches % REMAKE == 0:
            rank.remake()
        if batches == WARM_UP:
            before = Footprint.now()
    facts = {
        "counts": dict(rank.counts),
        "operations": rank.number,
        "wrong": wrong,
        "before": asdict(before),
        "after": asdict(Footprint.now()),
    }
    (directory / str(mesh.rank)).write_text(json.dumps(facts))
    dist.barrier()
    mesh.close()


def pages(results: Results) -> Pages:
    found = results["ranks"]
    total = sum((Counter(facts["counts"]) for facts in found), Counter())
    counts = [{"operation": kind, "results compared": total[kind]} for kind in sorted(total)]
    names = {"descriptors": 0, "threads": 0, "mapped_mb": 1, "rss_mb": 0}
    held = [
        {
            "the most of a rank": name.replace("_mb", " (MB)"),
            **{
                when: round(max(facts[when][name] for facts in found), digits or None)
                for when in ("before", "after")
            },
        }
        for name, digits in names.items()
    ]
    wrong = [facts["wrong"] for facts in found if facts["wrong"]]
    verdict = f"{len(wrong)} ranks stopped at a difference" if wrong else "no difference"
    text = (
        f"{tables.markdown(counts)}\n\n{tables.markdown(held)}\n\n"
        f"{found[0]['operations']} operations, {sum(total.values())} results: {verdict}. {made(results)}"
    )
    return {README: {"soak": text}}


def main() -> int:
    parser = parser_of(__doc__, HERE)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    command = f"{COMMAND} --minutes {options.minutes:g} --ranks {options.ranks} --seed {options.seed}"
    with tempfile.TemporaryDirectory(prefix="instep-soak-") as folder:
        start = partial(launch, soak, (Path(folder), options.minutes, options.seed))
        try:
            start(ranks=options.ranks)
        except RankFailed as failed:
            print(failed, failed.rank_traceback or "", sep="\n", file=sys.stderr)
            return 1
        found = [json.loads((Path(folder) / str(rank)).read_text()) for rank in range(options.ranks)]
    wrong = [facts["wrong"] for facts in found if facts["wrong"]]
    for line in wrong:
        print(line, file=sys.stderr)
    if not wrong:
        prepare(options.out, HERE)
        results = {"minutes": options.minutes, "ranks": found}
        whole = save(options.out / "soak.json", results, pages, HERE, command)
        print(pages(whole)[README]["soak"])
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
