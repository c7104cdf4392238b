"""Advice about how gradients are sent: in which buckets, when, over what, and how often. Pure.

All of it saves the same milliseconds, those that a step waits for its exchanges, so no two pieces claim
them: the best way to send is one piece, and what it leaves exposed is what sending less often is about.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

from instep.timeline.facts import EXPOSED, HOST, UPDATE, WAITING, Advice, Facts, in_ms, in_percent
from instep.timeline.predict import (
    CAPS_MB,
    MEBIBYTE,
    SHM_TO_SOCKETS,
    Exchange,
    Hiding,
    Outcome,
    busy_share,
    copying_s,
    over_shared_memory,
    pause_s,
    saved_s,
)

ONE_BUCKET = 0.8  # of all bytes in one bucket: little to send while it fills
DEFAULT_MB = 25.0
BY_ARITHMETIC = 0.03  # of a step: what other buckets must gain, which is the least sure prediction
AS_GOOD = 0.95  # of the best gain: then larger buckets, which need less luck with latencies
OFTEN = 0.15  # of a step exposed: then sending less often counts
OFTEN_ON_LINK = 0.05
LINK = "slow link"
NO_BUCKETS = ("server", "threads", "fully_shard")  # nothing that is sent is of a size to be chosen


@dataclass(frozen=True)
class Sending:
    """The facts about a run's exchanges, of which it has one or more."""

    facts: Facts
    exchange: Exchange
    hiding: Hiding

    @classmethod
    def of(cls, facts: Facts) -> Sending | None:
        """None where ranks do not exchange gradients with one another, or nothing is known of it."""
        setting = facts.setting
        rows = [row for row in facts.buckets if row.bytes and row.flight_ms > 0 and row.ready_ms]
        if setting.world_size == 1 or setting.strategy in NO_BUCKETS or not rows:
            return None
        exchange = Exchange(
            rows,
            strategy=setting.strategy,
            cap_mb=setting.bucket_mb,
            backward_s=facts.backward_s,
            pause_s=pause_s(rows, facts.sync_s),
        )
        return cls(facts, exchange, hiding(facts, exchange))

    @property
    def over_link(self) -> bool:
        """Whether bytes between hosts are most of what an exchange takes."""
        exchange = self.exchange
        return self.facts.setting.hosts > 1 and exchange.bytes_s > exchange.latencies_s

    @property
    def link(self) -> str:
        """The link in words. A host sends 2 (W - g)/W S bytes for each of its g ranks."""
        setting = self.facts.setting
        per_host = max(setting.world_size // setting.hosts, 1)
        sent = per_host * 2 * (setting.world_size - per_host) / setting.world_size
        rate = sent / self.exchange.cost.s_per_byte
        return (
            f"the link between the {setting.hosts} hosts carries {rate / 1e6:,.0f} MB/s "
            f"({rate * 8 / 1e9:.2g} Gbit/s)"
        )

    @property
    def limit(self) -> str:
        """That the link is the limit, if it is."""
        bytes_s, backward_s = self.exchange.bytes_s, self.exchange.backward_s
        if not self.over_link or bytes_s <= backward_s:
            return ""
        return (
            f" and takes {in_ms(bytes_s)} for the bytes of a step, longer than the {in_ms(backward_s)} of "
            "backward that could hide them, so that the link is the limit"
        )

    @property
    def most_s(self) -> float:
        """The most that a step can get shorter: what is exposed, and what hiding costs."""
        return self.facts.sync_s + self.hiding.cost_s(self.exchange.now())


@dataclass(frozen=True)
class Change:
    """Another way to send, and what would then be exposed."""

    advice: Advice
    then: Outcome


def hiding(facts: Facts, exchange: Exchange) -> Hiding:
    """What hiding costs: measured where something was hidden, else from who has an idle core.

    On one host an exchange is copying and adding. Over a link it waits for the bytes, but not for the rest: a
    bucket's latency is Python, waking up and the kernel's calls, all of them processor time.
    """
    setting = facts.setting
    if facts.slowdown is not None and setting.overlaps:
        slowdown = max(facts.slowdown, 0.0)
        return Hiding(measured=slowdown / (1 + slowdown))
    busy = busy_share(setting.ranks_per_host, setting.threads, setting.cores)
    if setting.hosts == 1:
        return Hiding(busy)
    copying = copying_s(exchange.bytes, setting.world_size, facts.memory_bytes_per_s)
    return Hiding(busy, copying, exchange.cost.latency_s)


def advise_sending(facts: Facts) -> list[Advice]:
    """At most two pieces: the best other way to send, and sending less often what is then left."""
    sending = Sending.of(facts)
    if sending is None:
        return [advice for advice in [server(facts)] if advice]
    changes = [change for change in (other_buckets(sending), shared_memory(sending)) if change]
    best = max(changes, key=lambda change: change.advice.gain_ms, default=None)
    left = sending.exchange.now()
    left_s = facts.sync_s
    if best is not None:
        left = best.then
        left_s = min(left.exposed_s, max(left_s - best.advice.gain_ms / 1e3, 0.0))
    named = best is not None and best.advice.cause == LINK
    seldom = less_often(sending, left_s, sending.hiding.cost_s(left), named=named)
    return [advice for advice in (best and best.advice, seldom) if advice]


def other_buckets(sending: Sending) -> Change | None:
    """Buckets of the best size, sent while backward runs."""
    facts, exchange, cost = sending.facts, sending.exchange, sending.exchange.cost
    bucketed = facts.setting.strategy == "bucketed"
    now = exchange.now()

    def gain_s(cap_mb: float) -> float:
        then = exchange.with_buckets(exchange.buckets_of(cap_mb))
        return min(saved_s(now, then, sending.hiding), sending.most_s)

    caps = [cap for cap in CAPS_MB if not bucketed or len(exchange.buckets_of(cap)) != len(exchange.sizes)]
    most_s = max(map(gain_s, caps), default=0.0)
    if most_s < BY_ARITHMETIC * facts.step_s:
        return None
    cap_mb = max(cap for cap in caps if gain_s(cap) >= AS_GOOD * most_s)
    sizes = exchange.buckets_of(cap_mb)
    then = exchange.with_buckets(sizes)
    cause, text = in_words(sending, cap_mb, len(sizes))
    how = (
        f"a bucket takes {in_ms(cost.latency_s)} + {cost.s_per_byte * 1e9:.2g} ns per byte in this run and "
        f"can leave when its last gradient is there, in a backward of {in_ms(exchange.backward_s)}: "
        f"{in_ms(then.exposed_s)} of {len(sizes)} buckets would stay exposed, where it is "
        f"{in_ms(now.exposed_s)} now{hiding_in_words(sending.hiding, then)}."
    )
    chosen = "" if bucketed else "--parallel.strategy bucketed "
    return Change(
        facts.advice(cause, gain_s(cap_mb), text, how, f"{chosen}--parallel.bucket-mb {cap_mb}"), then
    )


def in_words(sending: Sending, cap_mb: float, num_then: int) -> tuple[str, str]:
    """What is wrong with the buckets as they are: the key, and the sentence."""
    setting, exchange = sending.facts.setting, sending.exchange
    sizes, total = exchange.sizes, f"{exchange.bytes / MEBIBYTE:,.3g} MB"
    remedy = f"send buckets of {cap_mb:g} MB while backward runs"
    where = f" ({sending.link})" if sending.over_link else ""
    if setting.strategy == "naive":
        return "strategy", (
            f"Each of {len(sizes)} gradients is sent by itself, and only after backward, so that a step "
            f"waits {in_ms(exchange.now().exposed_s)} for them{where}: {remedy}."
        )
    if num_then < len(sizes):
        return "tiny buckets", (
            f"The {total} of gradients travel in {len(sizes)} buckets, each of which costs "
            f"{in_ms(exchange.cost.latency_s)} whatever its size, {in_ms(exchange.latencies_s)} per step"
            f"{where}: send fewer and larger ones, of {cap_mb:g} MB."
        )
    if sending.over_link and setting.strategy == "bucketed" and setting.bucket_mb <= DEFAULT_MB:
        return LINK, (
            f"The exchange of gradients takes {in_ms(exchange.now().total_s)}, because {sending.link}, and "
            f"buckets of {setting.bucket_mb:g} MB leave too late to hide it: send buckets of {cap_mb:g} MB."
        )
    if max(sizes) >= ONE_BUCKET * exchange.bytes:
        share = "All" if len(sizes) == 1 else in_percent(max(sizes) / exchange.bytes)
        return "giant bucket", (
            f"{share} of the {total} of gradients leave in one bucket when backward is over, so that nothing "
            f"hides its {in_ms(max(exchange.times_s))}{where}: {remedy}."
        )
    return "giant bucket", (
        f"The {total} of gradients travel in {len(sizes)} buckets, the first of which leaves late in "
        f"backward{where}: {remedy}."
    )


def hiding_in_words(costs: Hiding, then: Outcome) -> str:
    """What hiding was taken to cost."""
    share = costs.share_of(then)
    if share < 0.005 or not then.hidden_s:
        return ""
    source = "since too few cores are idle meanwhile" if costs.measured is None else "as this run measured"
    return f"; {in_percent(share)} of what is hidden slows backward down, {source}"


def shared_memory(sending: Sending) -> Change | None:
    """Ranks of one host need no sockets."""
    facts, setting, exchange = sending.facts, sending.facts.setting, sending.exchange
    if setting.backend != "gloo" or setting.hosts != 1:
        return None
    cost = over_shared_memory(exchange.cost, facts.memory_bytes_per_s)
    now, then = exchange.now(), exchange.with_cost(cost)
    others_s = facts.other_messages_s * (1 - SHM_TO_SOCKETS)
    source = "as the update shows it" if facts.measured_memory else "an assumption"
    return Change(
        facts.advice(
            "gloo",
            min(saved_s(now, then, sending.hiding), sending.most_s) + others_s,
            f"All {setting.world_size} ranks are on one host but exchange over sockets (gloo), which takes "
            f"{in_ms(now.total_s)} per step: through shared memory it takes about {in_ms(then.total_s)}.",
            f"in shared memory each rank reads and writes every byte once, at "
            f"{facts.memory_bytes_per_s / 1e9:.1f} GB/s ({source}), and a bucket costs "
            f"{in_ms(cost.latency_s)} besides; {in_ms(then.exposed_s)} would stay exposed, where it is "
            f"{in_ms(now.exposed_s)} now, and other messages save {in_ms(others_s)}.",
            "--parallel.backend shm",
        ),
        then,
    )


def less_often(sending: Sending, exposed_s: float, hiding_s: float, *, named: bool) -> Advice | None:
    """Twice the micro-batches per step: what is done once per step is then done half as often per sample.

    ``exposed_s`` and ``hiding_s``: what a step waits for its exchanges, and loses to those that are hidden;
    ``named``: a slow link has been named as the cause.
    """
    facts, link = sending.facts, sending.over_link
    share = exposed_s / facts.step_s
    if share < (OFTEN_ON_LINK if link else OFTEN):
        return None
    once_s = facts.part_s(UPDATE, HOST) + facts.other_messages_s
    still = "would still be" if exposed_s < facts.sync_s else "is"
    why = f", because {sending.link}{sending.limit}" if link else ""
    slower = f", of the {in_ms(hiding_s)} that those cost which are hidden" if hiding_s >= 5e-5 else ""
    return facts.advice(
        LINK if link and not named else "accumulate",
        (exposed_s + once_s + hiding_s) / 2,
        f"{in_percent(share)} of a step {still} exposed communication{why}: accumulate twice the "
        "micro-batches per step, which changes the training (a larger global batch).",
        f"half of the {in_ms(exposed_s)} of exposed exchanges{slower} and of the {in_ms(once_s)} of update, "
        "host code and other messages, which then serve twice the samples; the gain is per step of as many "
        "samples as now.",
        facts.with_leaves(2 * facts.setting.num_leaves),
        changes_training=True,
    )


def server(facts: Facts) -> Advice | None:
    """Over links, ranks that exchange with one another share what one server's link carries for all."""
    setting = facts.setting
    if setting.strategy != "server" or setting.hosts == 1 or facts.slow is not None:
        return None
    workers = [row for row in facts.breakdowns if row.rank != 0] or facts.breakdowns
    waits_s = median(row.parts.get(WAITING, 0.0) + row.parts.get(EXPOSED, 0.0) for row in workers)
    return facts.advice(
        "strategy",
        waits_s * (1 - 1 / setting.world_size),
        f"The gradients and weights of all {setting.world_size} ranks go through the link of rank 0, for "
        f"which they wait {in_ms(waits_s)} per step: let the ranks exchange with one another.",
        f"every link then carries 1/{setting.world_size} of what rank 0's carries now; what would be hidden "
        "under backward comes on top.",
        "--parallel.strategy bucketed",
    )
