"""What to do about a run: sentences with a predicted gain, from what the run measured. Pure.

Every piece can be checked by following it. What would gain less than 1 % of a step is not said; a healthy
run gets no advice. None promises more than the median step waits for its cause, and none is said where that
wait comes and goes: its ``confidence`` is the lower quartile of the wait, over the steps, by the median. One
that is there in every step has 1; one that a quarter of the steps do not have has 0, and waits like noise,
which are short more often than long, have less than a half.

Four pieces are about what ranks do by themselves: one is slow, all wait for data, too many threads, unequal
shares. The others are about the exchange of gradients: in which buckets, when, over what, and how often. All
of those save the same milliseconds, the ones that a step waits for its exchanges, so no two of them may claim
the same: the best other way to exchange is one piece, and what it leaves exposed is what exchanging less
often is about. That is why they stand in one file.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import NamedTuple

from instep.comm.cost import busy_share
from instep.events import GRADIENT_SYNC
from instep.pipeline.cuts import COST
from instep.timeline.breakdown import (
    BUBBLE,
    COMPUTE,
    DATA,
    EXPOSED,
    HOST,
    IDLE,
    UPDATE,
    WAITING,
    RankBreakdown,
    Waited,
)
from instep.timeline.bucket_times import BucketRow
from instep.timeline.predict import (
    CAPS_MB,
    MEBIBYTE,
    OVERLAPPING,
    SHM_TO_SOCKETS,
    ExchangeModel,
    ExchangeTimes,
    HidingCost,
    copying_s,
    over_shared_memory,
    pause_s,
    saved_s,
)
from instep.timeline.run_setting import RunSetting
from instep.timeline.stages import SlowStage
from instep.timeline.straggler import DATA as DATA_PHASE
from instep.timeline.straggler import PHASES, SlowRank

WORTH_IT = 0.01  # of the median step
CONFIDENT = 0.5  # in three of four steps at least half of what is promised is waited for
ADAMW_BYTES = 28  # moved per parameter: reads p, g, m, v, writes p, m, v, four bytes each
ASSUMED_BYTES_PER_S = 5e9  # of a rank's share of the memory, where no update shows it
LOADING = 0.05  # of a step, in which batches are read
SLOW_IN = dict(
    zip(
        PHASES,
        (
            "computes longer than the others",
            "waits longer for its data than the others",
            "spends longer than the others in host code, outside forward, backward and data",
        ),
        strict=True,
    )
)
ONE_BUCKET = 0.8  # of all bytes in one bucket: little to send while it fills
DEFAULT_MB = 25.0
BY_ARITHMETIC = 0.03  # of a step: what other buckets must gain, which is the least sure prediction
AS_GOOD = 0.95  # of the best gain: then larger buckets, which need less luck with latencies
OFTEN = 0.15  # of a step exposed: then exchanging less often counts
OFTEN_ON_LINK = 0.05
LINK = "slow link"
NO_BUCKETS = ("server", "fully_shard")  # nothing that is sent is of a size to be chosen


@dataclass(frozen=True)
class Advice:
    """One thing to do.

    ``cause``: "slow rank", "slow stage", "loader", "threads", "uneven", "strategy", "giant bucket", "tiny
    buckets", "gloo", "slow link" or "accumulate".
    """

    cause: str
    text: str  # the cause in a sentence, and what to do about it
    gain_ms: float  # per step
    gain_share: float  # of the median step
    try_: str  # what to run; "" if it is no flag
    how: str  # how the gain was predicted
    confidence: float  # the share of ``gain_ms`` that three of four steps would gain at least: 0 to 1
    changes_training: bool = False  # and not only how the same training is done


@dataclass(frozen=True)
class RunMeasurements:
    """What one run measured. ``backward_s`` is the median backward of a last micro-batch."""

    breakdowns: Sequence[RankBreakdown]
    buckets: Sequence[BucketRow]
    slow: SlowRank | None
    setting: RunSetting
    backward_s: float
    optimizer: str = "adamw"
    num_parameters: int = 0
    slowdown: float | None = None  # None: as the breakdowns have it

    @property
    def step_s(self) -> float:
        """The median step."""
        return median(row.median_s for row in self.breakdowns)

    @property
    def others(self) -> list[RankBreakdown]:
        """All ranks but the slow one."""
        return [row for row in self.breakdowns if self.slow is None or row.rank != self.slow.rank]

    def part_s(self, *parts: str) -> float:
        """Seconds of the median step on ``parts``: the median of the ranks that are not slow."""
        rows = self.others or self.breakdowns
        return median(sum(row.parts.get(part, 0.0) for part in parts) * _typical(row) for row in rows)

    @property
    def waited_s(self) -> float:
        """Seconds per step that the others wait for the slow rank, some of it perhaps as a message's time."""
        return 0.0 if self.slow is None else min(self.slow.excess_s, self.part_s(WAITING, EXPOSED, BUBBLE))

    @property
    def sync_s(self) -> float:
        """Seconds per step of exposed exchanges of gradients, without waiting for the slow rank."""
        rows = self.others or self.breakdowns
        measured_s = median(row.causes.get(GRADIENT_SYNC, 0.0) * _typical(row) for row in rows)
        return max(measured_s - max(self.waited_s - self.part_s(WAITING), 0.0), 0.0)

    @property
    def other_messages_s(self) -> float:
        """Seconds per step that ranks wait for messages other than gradients, such as the loss."""
        return max(self.part_s(EXPOSED) - self.sync_s - max(self.waited_s - self.part_s(WAITING), 0.0), 0.0)

    def waited(self, name: str, ranks: Sequence[RankBreakdown] = ()) -> Waited:
        """What a step loses to ``name``, of ``Parts.losses``, on ``ranks``: by default, those not slow."""
        rows = ranks or self.others or self.breakdowns
        found = [row.losses.get(name, Waited(0.0, 0.0)) for row in rows]
        return Waited(median(low for low, _ in found), median(middle for _, middle in found))

    @property
    def measured_memory(self) -> bool:
        """Whether the update shows how fast the memory is."""
        return self.optimizer == "adamw" and self.part_s(UPDATE) > 0 and self.num_elements > 0

    @property
    def memory_bytes_per_s(self) -> float:
        """A rank's share of the memory's rate: all ranks update at once."""
        if not self.measured_memory:
            return ASSUMED_BYTES_PER_S
        return ADAMW_BYTES * self.num_elements / self.part_s(UPDATE)

    @property
    def num_elements(self) -> int:
        """Of all parameters; where it is unknown, as many as the buckets have of four bytes."""
        return self.num_parameters or sum(row.bytes for row in self.buckets) // 4

    def advice(
        self,
        cause: str,
        gain_s: float,
        waited: Waited,
        text: str,
        how: str,
        try_: str = "",
        *,
        changes_training: bool = False,
    ) -> Advice:
        """What may gain ``gain_s`` per step, though no more than what is ``waited`` for."""
        gain_s, sure = min(gain_s, waited.median_s), waited.confidence
        return Advice(cause, text, gain_s * 1e3, gain_s / self.step_s, try_, how, sure, changes_training)

    def with_micro_batches(self, num_micro_batches: int) -> str:
        """The flag for so many micro-batches per step."""
        size = self.setting.micro_size
        return f"--batch.global-size {num_micro_batches * size}" if size and num_micro_batches else ""


def _typical(row: RankBreakdown) -> float:
    """The median step by the mean one, which single long steps have made longer."""
    return row.median_s / row.wall_s if row.wall_s > 0 else 1.0


def in_ms(seconds: float) -> str:
    """Seconds as a reader likes to see them: "41 ms", "4.1 ms"."""
    return f"{seconds * 1e3:,.0f} ms" if seconds >= 0.01 else f"{seconds * 1e3:.1f} ms"


def in_percent(share: float) -> str:
    """A share as a reader likes to see it: "12 %"."""
    return f"{share:.0%}".replace("%", " %")


def advise(
    breakdowns: Sequence[RankBreakdown],
    buckets: Sequence[BucketRow],
    slow: SlowRank | None,
    setting: RunSetting,
    *,
    backward_s: float,
    optimizer: str = "adamw",
    num_parameters: int = 0,
    slowdown: float | None = None,
    slow_stage: SlowStage | None = None,
) -> list[Advice]:
    """What is worth doing, the largest gain first; what changes the training, after all that does not.

    Args:
        breakdowns: one per rank.
        buckets: in plan order.
        slow: the rank that holds the others up.
        setting: what the run was told.
        backward_s: median backward of a rank's last micro-batch, under which buckets can be sent.
        optimizer: "adamw" shows by its update how fast the memory is.
        num_parameters: elements, of all parameters that the update changes; 0: as the buckets have.
        slowdown: as ``RankBreakdown.slowdown``; None: theirs, where they know it.
        slow_stage: the stage of a pipeline that takes longer than the others.
    """
    run = RunMeasurements(breakdowns, buckets, slow, setting, backward_s, optimizer, num_parameters, slowdown)
    if not breakdowns or run.step_s <= 0:
        return []
    own = [slow_rank(run), equal_stages(run, slow_stage), loader(run), threads(run), uneven(run)]
    worth_it = [
        advice
        for advice in [*own, *exchange_advice(run)]
        if advice and advice.gain_share >= WORTH_IT and advice.confidence >= CONFIDENT
    ]
    return sorted(worth_it, key=lambda advice: (advice.changes_training, -advice.gain_ms))


def slow_rank(run: RunMeasurements) -> Advice | None:
    """If it were as fast as the others, the step would be shorter by what they wait for it."""
    slow = run.slow
    if slow is None or (slow.phase == DATA_PHASE and run.setting.num_workers):
        return None  # while the others wait for it, their workers read ahead: they may be no faster
    what = SLOW_IN.get(slow.phase, f"is slower than the others in {slow.phase}")
    return run.advice(
        "slow rank",
        run.waited_s,
        Waited(slow.low_s, slow.excess_s),
        f"Rank {slow.rank} {what}, {in_ms(slow.excess_s)} in every step since step {slow.since}, "
        f"and all ranks wait for it: look at {slow.phase} on rank {slow.rank}.",
        f"the {in_ms(slow.excess_s)} that rank {slow.rank} takes longer than the median of the other ranks, "
        f"at most the {in_ms(run.part_s(WAITING, EXPOSED, BUBBLE))} that those wait.",
    )


def equal_stages(run: RunMeasurements, slow: SlowStage | None) -> Advice | None:
    """A pipeline goes as fast as its slowest stage: others have time for layers of it."""
    if slow is None:
        return None
    return run.advice(
        "slow stage",
        slow.gain_s,
        run.waited(BUBBLE, [row for row in run.breakdowns if row.rank not in slow.ranks]),
        f"Stage {slow.stage} takes {slow.times:.1f} times as long per micro-batch as the others, which wait "
        "for it: cut the model so that it has fewer layers.",
        f"the schedule simulated with what the stages take, a bubble of {in_percent(slow.bubble)}, and with "
        f"stages that take equally long, {in_percent(slow.even_bubble)}; messages are left out.",
        "" if run.setting.cuts == COST else f"--parallel.cuts {COST}",
    )


def loader(run: RunMeasurements) -> Advice | None:
    """One batch loaded ahead hides under the rest of the step, or the rest of the step under it.

    A little of a step is the reading itself: a loader in the background does it all the same.
    """
    setting = run.setting
    if setting.num_workers:
        return more_workers(run)
    data_s = run.part_s(DATA)
    if data_s < LOADING * run.step_s:
        return None
    rest_s = max(run.step_s - data_s, 0.0)
    how = (
        f"a step becomes the longer of loading ({in_ms(data_s)}) and everything else ({in_ms(rest_s)}) "
        "instead of their sum, if one batch is loaded ahead"
    )
    if setting.ranks_per_host * setting.threads >= setting.cores:
        how += "; less where loading is work and not waiting, since no core is idle"
    return run.advice(
        "loader",
        min(data_s, rest_s),
        run.waited(DATA),
        f"Every rank waits {in_ms(data_s)} per step ({in_percent(data_s / run.step_s)}) for its data while "
        "nothing computes: load the next batch in a worker process, num_workers=1 of the loader.",
        f"{how}.",
    )


def more_workers(run: RunMeasurements) -> Advice | None:
    """Workers that read ahead and are waited for deliver a batch per step; one more makes them faster.

    The rank that waits longest shows the most: the workers of the others read while these wait for it.
    """
    row = max(run.breakdowns, key=lambda row: row.parts.get(DATA, 0.0) * _typical(row))
    data_s, num = row.parts.get(DATA, 0.0) * _typical(row), run.setting.num_workers
    if (
        data_s < LOADING * run.step_s
        or run.setting.ranks_per_host * (run.setting.threads + num) >= run.setting.cores
    ):
        return None
    return run.advice(
        "loader",
        min(data_s, run.step_s / (num + 1)),
        run.waited(DATA, [row]),
        f"Rank {row.rank} waits {in_ms(data_s)} per step ({in_percent(data_s / run.step_s)}) for its data, "
        f"though the loader of each rank reads ahead with num_workers={num}: give it num_workers={num + 1}.",
        f"a batch every {in_ms(run.step_s * num / (num + 1))} instead of every {in_ms(run.step_s)}, as there "
        "are idle cores for more workers.",
    )


def threads(run: RunMeasurements) -> Advice | None:
    """Threads without a core of their own wait for one, and the others wait for them at every barrier."""
    setting = run.setting
    wanted = setting.ranks_per_host * setting.threads
    fewer = max(setting.cores // setting.ranks_per_host, 1)
    if wanted <= setting.cores or fewer >= setting.threads:
        return None
    compute_s = run.part_s(COMPUTE)
    share = 1 - max(setting.cores, setting.ranks_per_host * fewer) / wanted
    return run.advice(
        "threads",
        compute_s * share,
        run.waited(COMPUTE),
        f"The {setting.ranks_per_host} ranks of a host run {setting.threads} threads each on its "
        f"{setting.cores} cores, so that threads wait for a core: give each rank {fewer}, which may change "
        "the bits of the weights.",
        f"an upper estimate: {in_percent(share)} of the {in_ms(compute_s)} of compute, the share of the "
        "threads that have no core.",
        f"--parallel.threads {fewer}",
    )


def uneven(run: RunMeasurements) -> Advice | None:
    """All ranks wait for those with one micro-batch more."""
    setting = run.setting
    num, num_ranks = setting.num_leaves, setting.data_ranks
    if not num or num % num_ranks == 0:
        return None
    most = math.ceil(num / num_ranks)
    whole = most * num_ranks
    return run.advice(
        "uneven",
        run.step_s * (1 - num / whole),
        run.waited(IDLE, [max(run.breakdowns, key=_idle_s)]),
        f"{num} micro-batches on {num_ranks} ranks are {most} on some and {num // num_ranks} "
        f"on others, who wait: take {whole} micro-batches per step, which changes the training.",
        f"a step of {whole} micro-batches takes as long and does {whole / num:.2f} times the work; "
        "the gain is per step of as much work as now.",
        run.with_micro_batches(whole),
        changes_training=True,
    )


def _idle_s(row: RankBreakdown) -> float:
    return row.parts.get(WAITING, 0.0) + row.parts.get(EXPOSED, 0.0)


def exchange_advice(run: RunMeasurements) -> list[Advice]:
    """At most two pieces: the best other way to exchange, and exchanging less often what is then left."""
    exchanges = RunExchanges.of(run)
    if exchanges is None:
        return []
    changes = [change for change in (other_buckets(exchanges), shared_memory(exchanges)) if change]
    best = max(changes, key=lambda change: change.advice.gain_ms, default=None)
    left = exchanges.model.now()
    left_s = run.sync_s
    if best is not None:
        left = best.then
        left_s = min(left.exposed_s, max(left_s - best.advice.gain_ms / 1e3, 0.0))
    named = best is not None and best.advice.cause == LINK
    seldom = less_often(exchanges, left_s, exchanges.hiding.cost_s(left), named=named)
    return [advice for advice in (best and best.advice, seldom) if advice]


class BucketPlan(NamedTuple):
    """A way to exchange gradients, and the step with it; ``cap_mb`` of 0: as the strategy cuts."""

    strategy: str
    cap_mb: float
    num_buckets: int
    exposed_s: float
    step_s: float


@dataclass(frozen=True)
class RunExchanges:
    """A run that exchanges gradients, in one bucket or more: the model of it, and what hiding costs."""

    run: RunMeasurements
    model: ExchangeModel
    hiding: HidingCost

    @classmethod
    def of(cls, run: RunMeasurements) -> RunExchanges | None:
        """None where ranks do not exchange gradients with one another, or nothing is known of it."""
        setting = run.setting
        rows = [row for row in run.buckets if row.bytes and row.flight_ms > 0 and row.ready_ms]
        if setting.world_size == 1 or setting.strategy in NO_BUCKETS or setting.pp > 1 or not rows:
            return None
        model = ExchangeModel(
            rows,
            strategy=setting.strategy,
            # Unless the cap is known: a bucket closes when it has reached it.
            cap_mb=setting.bucket_mb or min(row.bytes for row in rows[:-1] or rows) / MEBIBYTE,
            backward_s=run.backward_s,
            pause_s=pause_s(rows, run.sync_s),
        )
        return cls(run, model, hiding_cost(run, model))

    @property
    def over_link(self) -> bool:
        """Whether bytes between hosts are most of what an exchange takes."""
        model = self.model
        return self.run.setting.hosts > 1 and model.bytes_s > model.latencies_s

    @property
    def link(self) -> str:
        """The link in words. A host sends 2 (W - g)/W S bytes for each of its g ranks."""
        setting = self.run.setting
        per_host = max(setting.world_size // setting.hosts, 1)
        sent = per_host * 2 * (setting.world_size - per_host) / setting.world_size
        rate = sent / self.model.cost.s_per_byte
        return (
            f"the link between the {setting.hosts} hosts carries {rate / 1e6:,.0f} MB/s "
            f"({rate * 8 / 1e9:.2g} Gbit/s)"
        )

    @property
    def limit(self) -> str:
        """That the link is the limit, if it is."""
        bytes_s, backward_s = self.model.bytes_s, self.model.backward_s
        if not self.over_link or bytes_s <= backward_s:
            return ""
        return (
            f" and takes {in_ms(bytes_s)} for the bytes of a step, longer than the {in_ms(backward_s)} of "
            "backward that could hide them, so that the link is the limit"
        )

    @property
    def most_s(self) -> float:
        """The most that a step can get shorter: what it waits for its exchanges."""
        return min(self.run.sync_s, self.run.waited(GRADIENT_SYNC).median_s)

    @property
    def words(self) -> str:
        """What a bucket takes, and what hides it."""
        cost = self.model.cost
        return (
            f"a bucket takes {in_ms(cost.latency_s)} + {cost.s_per_byte * 1e9:.2g} ns per byte in this run "
            f"and can leave when its last gradient is there, in a backward of {in_ms(self.model.backward_s)}"
        )

    @property
    def caps_mb(self) -> list[int]:
        """Those of ``CAPS_MB`` that cut the gradients, and the first one that holds all of them."""
        return [cap for less, cap in pairwise((0, *CAPS_MB)) if less * MEBIBYTE < self.model.bytes]

    def gain_s(self, then: ExchangeTimes) -> float:
        """Seconds that a step gets shorter if its exchanges become ``then``."""
        return min(saved_s(self.model.now(), then, self.hiding), self.most_s)

    def bucket_plans(self) -> Iterator[BucketPlan]:
        """The run as it was, then the strategies and caps that it might have had."""
        run, model, now = self.run, self.model, self.model.now()
        own = run.setting.strategy
        cap_mb = model.cap_mb if own == "bucketed" else 0
        yield BucketPlan(own, cap_mb, now.num_buckets, now.exposed_s, run.step_s)
        ways = [("flat", 0, [model.bytes])]
        if model.by_parameter:
            ways = [("naive", 0, model.sizes), *ways, ("overlap", 0, model.sizes)]
        for strategy, cap, sizes in ways + [("bucketed", cap, model.buckets_of(cap)) for cap in self.caps_mb]:
            then = model.with_buckets(sizes, strategy in OVERLAPPING)
            if strategy != own or then.num_buckets != now.num_buckets:
                step_s = run.step_s - self.gain_s(then)
                yield BucketPlan(strategy, cap, then.num_buckets, then.exposed_s, step_s)


def hiding_cost(run: RunMeasurements, model: ExchangeModel) -> HidingCost:
    """What hiding costs: measured where something was hidden, else from how many cores are idle.

    On one host an exchange is copying and adding. Over a link it waits for the bytes, but not for the rest: a
    bucket's latency is Python, waking up and the kernel's calls, all of them processor time.
    """
    setting = run.setting
    known = [x for x in (run.slowdown, *(row.slowdown for row in run.breakdowns)) if x is not None]
    if known and setting.overlaps:
        slowdown = median(known) if run.slowdown is None else run.slowdown
        return HidingCost(measured=slowdown / (1 + slowdown))
    busy = busy_share(setting.ranks_per_host, setting.threads, setting.cores)
    if setting.hosts == 1:
        return HidingCost(busy)
    copying = copying_s(model.bytes, setting.world_size, run.memory_bytes_per_s)
    return HidingCost(busy, copying, model.cost.latency_s)


@dataclass(frozen=True)
class Change:
    """Another way to exchange, and what would then be exposed."""

    advice: Advice
    then: ExchangeTimes


def other_buckets(exchanges: RunExchanges) -> Change | None:
    """Buckets of the best size, sent while backward runs."""
    run, model = exchanges.run, exchanges.model
    bucketed = run.setting.strategy == "bucketed"
    now = model.now()

    def gain_s(cap_mb: float) -> float:
        return exchanges.gain_s(model.with_buckets(model.buckets_of(cap_mb)))

    caps = [
        cap for cap in exchanges.caps_mb if not bucketed or len(model.buckets_of(cap)) != len(model.sizes)
    ]
    most_s = max(map(gain_s, caps), default=0.0)
    waited = run.waited(GRADIENT_SYNC)
    noise_s = waited.median_s - waited.low_s  # what that wait differs by from step to step
    if most_s < max(BY_ARITHMETIC * run.step_s, noise_s):
        return None
    cap_mb = max(cap for cap in caps if gain_s(cap) >= AS_GOOD * most_s)
    sizes = model.buckets_of(cap_mb)
    then = model.with_buckets(sizes)
    cause, text = describe_buckets(exchanges, cap_mb, len(sizes))
    how = (
        f"{exchanges.words}: {in_ms(then.exposed_s)} of {len(sizes)} buckets would stay exposed, where it is "
        f"{in_ms(now.exposed_s)} now{describe_hiding(exchanges.hiding, then)}."
    )
    chosen = "" if bucketed else "--parallel.strategy bucketed "
    return Change(
        run.advice(
            cause,
            gain_s(cap_mb),
            waited,
            text,
            how,
            f"{chosen}--parallel.bucket-mb {cap_mb}",
        ),
        then,
    )


def describe_buckets(exchanges: RunExchanges, cap_mb: float, num_then: int) -> tuple[str, str]:
    """What is wrong with the buckets as they are: the key, and the sentence."""
    setting, model = exchanges.run.setting, exchanges.model
    sizes, total = model.sizes, f"{model.bytes / MEBIBYTE:,.3g} MB"
    buckets = f"buckets of {cap_mb:g} MB" if num_then > 1 else "one bucket"
    remedy = f"send {buckets} while backward runs" if num_then > 1 else f"send {buckets}"
    where = f" ({exchanges.link})" if exchanges.over_link else ""
    if setting.strategy == "naive":
        return "strategy", (
            f"Each of {len(sizes)} gradients is sent by itself, and only after backward, so that a step "
            f"waits {in_ms(model.now().exposed_s)} for them{where}: {remedy}."
        )
    if num_then < len(sizes):
        return "tiny buckets", (
            f"The {total} of gradients travel in {len(sizes)} buckets, each of which costs "
            f"{in_ms(model.cost.latency_s)} whatever its size, {in_ms(model.latencies_s)} per step"
            f"{where}: send {buckets}."
        )
    if exchanges.over_link and setting.strategy == "bucketed" and model.cap_mb <= DEFAULT_MB:
        return LINK, (
            f"The exchange of gradients takes {in_ms(model.now().total_s)}, because {exchanges.link}, and "
            f"buckets of {model.cap_mb:.3g} MB leave too late to hide it: send {buckets}."
        )
    if max(sizes) >= ONE_BUCKET * model.bytes:
        share = "All" if len(sizes) == 1 else in_percent(max(sizes) / model.bytes)
        return "giant bucket", (
            f"{share} of the {total} of gradients leave in one bucket when backward is over, so that nothing "
            f"hides its {in_ms(max(model.times_s))}{where}: {remedy}."
        )
    return "giant bucket", (
        f"The {total} of gradients travel in {len(sizes)} buckets, the first of which leaves late in "
        f"backward{where}: {remedy}."
    )


def describe_hiding(costs: HidingCost, then: ExchangeTimes) -> str:
    """What hiding was taken to cost."""
    share = costs.share_of(then)
    if share < 0.005 or not then.hidden_s:
        return ""
    source = "since too few cores are idle meanwhile" if costs.measured is None else "as this run measured"
    return f"; {in_percent(share)} of what is hidden slows backward down, {source}"


def shared_memory(exchanges: RunExchanges) -> Change | None:
    """Ranks of one host need no sockets."""
    run, setting, model = exchanges.run, exchanges.run.setting, exchanges.model
    if setting.backend != "gloo" or setting.hosts != 1 or setting.device != "cpu":
        return None
    cost = over_shared_memory(model.cost, run.memory_bytes_per_s)
    now, then = model.now(), model.with_cost(cost)
    others_s = run.other_messages_s * (1 - SHM_TO_SOCKETS)
    source = "as the update shows it" if run.measured_memory else "an assumption"
    return Change(
        run.advice(
            "gloo",
            min(saved_s(now, then, exchanges.hiding), exchanges.most_s) + others_s,
            run.waited(EXPOSED),
            f"All {setting.world_size} ranks are on one host but exchange over sockets (gloo), which takes "
            f"{in_ms(now.total_s)} per step: through shared memory it takes about {in_ms(then.total_s)}.",
            f"in shared memory each rank reads and writes every byte once, at "
            f"{run.memory_bytes_per_s / 1e9:.1f} GB/s ({source}), and a bucket costs "
            f"{in_ms(cost.latency_s)} besides; {in_ms(then.exposed_s)} would stay exposed, where it is "
            f"{in_ms(now.exposed_s)} now, and other messages save {in_ms(others_s)}.",
            "--parallel.backend shm",
        ),
        then,
    )


def less_often(exchanges: RunExchanges, exposed_s: float, hiding_s: float, *, named: bool) -> Advice | None:
    """Twice the micro-batches per step: what is done once per step is then done half as often per sample.

    ``exposed_s`` and ``hiding_s``: what a step waits for its exchanges, and loses to those that are hidden;
    ``named``: a slow link has been named as the cause.
    """
    run, link = exchanges.run, exchanges.over_link
    share = exposed_s / run.step_s
    if share < (OFTEN_ON_LINK if link else OFTEN):
        return None
    once_s = run.part_s(UPDATE, HOST) + run.other_messages_s
    still = "would still be" if exposed_s < run.sync_s else "is"
    why = f", because {exchanges.link}{exchanges.limit}" if link else ""
    slower = f", of the {in_ms(hiding_s)} that those cost which are hidden" if hiding_s >= 5e-5 else ""
    return run.advice(
        LINK if link and not named else "accumulate",
        min((exposed_s + once_s + hiding_s) / 2, exposed_s),
        run.waited(GRADIENT_SYNC),
        f"{in_percent(share)} of a step {still} exposed communication{why}: accumulate twice the "
        "micro-batches per step, which changes the training (a larger global batch).",
        f"half of the {in_ms(exposed_s)} of exposed exchanges{slower} and of the {in_ms(once_s)} of update, "
        "host code and other messages, which then serve twice the samples; the gain is per step of as many "
        "samples as now.",
        run.with_micro_batches(2 * run.setting.num_leaves),
        changes_training=True,
    )
