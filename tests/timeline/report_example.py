"""A made-up report for the page: ranks that train, one slow among them, and names that try to break out."""

from __future__ import annotations

from typing import Any

SCRIPT = "<script>window.hacked=1</script>"
IMAGE = "</script><img src=x onerror=window.hacked=2>"
PARTS = (
    "compute", "exposed communication", "waiting for a slower rank", "waiting for data", "update", "host",
    "unattributed",
)  # fmt: skip
LANES = ["compute", "communication", "data", "host"]
NAMES = [
    "data", "forward", "backward", "gradient sync", "loss over the global batch", "clip", "update", "ledger",
    "queued", "wait", "agree", "exchange", IMAGE,
]  # fmt: skip
STEPS = {40: "median", 57: "slowest", 0: "first", 199: "last"}
SLOW, SINCE, BUCKETS, MICRO_BATCHES = 2, 12, 4, 2
MB = (4.0, 25.0, 25.0, 11.5)
EXCHANGE_US = (2600.0, 9800.0, 9400.0, 5200.0)


def example(ranks: int = 4, micro_batches: int = MICRO_BATCHES) -> dict[str, Any]:
    """Everything that a finished run of ``ranks`` ranks tells."""
    steps = [_step(step, why, ranks, micro_batches) for step, why in STEPS.items()]
    return {
        "format": 1,
        "run": _run(ranks),
        "advice": _advice(),
        "slow": {
            "rank": SLOW, "phase": "its own compute", "since": SINCE, "excess_ms": 14.4, "share": 0.176,
        },
        "breakdown": {"parts": list(PARTS), "ranks": [_breakdown(rank) for rank in range(ranks)]},
        "over_time": _over_time(ranks),
        "buckets": [_bucket(bucket, ranks) for bucket in range(BUCKETS)],
        "curves": _curves(),
        "timeline": {"lanes": [*LANES], "names": [*NAMES], "clock_error_us": 12.0, "steps": steps},
        "contract": {
            "model": {"preset": "bytes-small", "parameters": 16_402_176, "dtype": "float32"},
            "batch": {"global": 64, "micro": 8},
            "optimizer": {"name": "adamw", "lr": 0.0003, "betas": [0.9, 0.95]},
            "processor": "x86_64, AVX-512",
        },
        "starts": [
            {"step": 0, "restarts": 0, "world_size": ranks, "strategy": "bucketed"},
            {"step": 120, "restarts": 1, "world_size": ranks, "strategy": "bucketed"},
        ],
        "faults": [{"step": 117, "rank": 1, "what": "killed by signal 9", "resumed_after_s": 1.9}],
    }  # fmt: skip


def killed() -> dict[str, Any]:
    """What is left of a run that was killed before it had told anything."""
    return {
        "format": 1,
        "run": {"name": "cut short", "state": "ended early", "notes": ["the trace of rank 2 is missing"]},
        "slow": None,
        "breakdown": None,
        "over_time": {"steps": [], "ranks": []},
        "timeline": {"lanes": [], "names": [], "clock_error_us": None, "steps": []},
    }


def _run(ranks: int) -> dict[str, Any]:
    return {
        "name": SCRIPT, "state": "finished", "notes": ["the trace of rank 3 ends at step 188 of 200"],
        "command": "instep train --preset bytes-small --parallel.strategy bucketed --run '<b>out</b>'",
        "versions": {"instep": "0.1.0", "torch": "2.13.0", "python": "3.11.9"},
        "summary": {
            "loss_first": 5.57, "loss_last": 1.94, "held_out_loss": 2.013, "step_ms_median": 94.1,
            "tokens_per_s": 139_214.0, "state_sha256": "9f2c" * 16,
        },
        "strategy": "bucketed", "backend": "gloo", "world_size": ranks, "threads": 1,
        "config": '[parallel]\nstrategy = "bucketed"\nbucket_mb = 25\n\n[batch]\nglobal = 64\nmicro = 8\n',
    }  # fmt: skip


def _advice() -> list[dict[str, Any]]:
    return [
        {
            "cause": "slow rank", "gain_ms": 14.4, "gain_share": 0.153, "confidence": 0.9, "try": "",
            "text": "Rank 2 computes 14.4 ms longer per step than the others, and all of them wait for it.",
            "how": "the median over 188 steps of its own time, less that of the other ranks",
        },
        {
            "cause": "gloo", "gain_ms": 7.1, "gain_share": 0.075, "confidence": 0.8,
            "try": "--parallel.backend shm",
            "text": "All ranks are on one host, and gradients go through sockets: shared memory is faster.",
            "how": "65.5 MB at the 9.1 GB/s that instep bench has measured here, in place of 2.4 GB/s",
        },
        {
            "cause": "giant bucket", "gain_ms": 2.6, "gain_share": 0.028, "confidence": 0.6,
            "try": "--parallel.bucket-mb 8",
            "text": "The last bucket is ready when backward is over, so none of its 25 MB is hidden.",
            "how": "exposed time of the last bucket, scaled to 8 MB",
        },
    ]  # fmt: skip


def _slowness(rank: int, step: int = 100) -> float:
    return 1.3 if rank == SLOW and step >= SINCE else 1 + 0.012 * ((rank * 7 + step * 5) % 4)


def _breakdown(rank: int) -> dict[str, Any]:
    slow = rank == SLOW
    figures = (
        (62.4, 9.6, 1.2, 1.6, 4.4, 2.1, 0.3) if slow else (48.1 + rank, 9.9, 15.2 - rank, 1.6, 4.4, 2.1, 0.3)
    )
    return {
        "rank": rank, "steps": 188, "wall_ms": sum(figures), "median_ms": sum(figures) - 0.8,
        "parts": dict(zip(PARTS, figures, strict=True)),
        "causes": {"gradient sync": figures[1] - 0.6, "loss over the global batch": 0.6},
        "hosts": {"ledger": 1.4, "hash": 0.7}, "hidden_ms": 15.8, "unattributed_share": 0.0036,
        "slowdown": 0.08 if rank else None,
    }  # fmt: skip


def _bucket(bucket: int, ranks: int) -> dict[str, Any]:
    ready = {str(rank): (30 + 13 * bucket) * _slowness(rank) for rank in range(ranks)}
    return {
        "bucket": bucket, "mb": MB[bucket], "ready_ms": ready,
        "skew_ms": max(ready.values()) - min(ready.values()), "slowest": SLOW, "wait_ms": 2.5 * (bucket + 1),
        "agree_ms": 0.2, "exchange_ms": EXCHANGE_US[bucket] / 1e3,
        "flight_ms": EXCHANGE_US[bucket] / 1e3 + 0.2,
        "exposed_ms": 5.0 if bucket == BUCKETS - 1 else 0.4 * bucket, "hidden_ms": 2.0,
    }  # fmt: skip


def _over_time(ranks: int) -> dict[str, Any]:
    steps = list(range(200))
    rows = []
    for rank in range(ranks):
        slow = [_slowness(rank, step) for step in steps]
        late = [step >= SINCE for step in steps]
        parts = {
            "compute": [48 * factor for factor in slow],
            "exposed communication": [9.5 + (step * 7 % 5) / 4 for step in steps],
            "waiting for a slower rank": [1 + (12 if after and rank != SLOW else 0) for after in late],
            "waiting for data": [1.6 + 6 * (step % 50 == 0) for step in steps],
            "update": [4.4 for _ in steps],
            "host": [2.1 + 9 * (step % 40 == 39) for step in steps],
            "unattributed": [0.3 for _ in steps],
        }
        rows.append(
            {"rank": rank, "wall": [sum(at) for at in zip(*parts.values(), strict=True)], "parts": parts}
        )
    return {"steps": steps, "ranks": rows}


def _curves() -> dict[str, Any]:
    steps = list(range(200))
    step_ms = [410.0, 120.0, *(82.0 + 12.5 * (step >= SINCE) + (step * 13 % 7) / 2 for step in steps[2:])]
    return {
        "steps": steps,
        "loss": [1.7 + 3.9 / (1 + step / 14) + ((step * 37) % 11 - 5) / 90 for step in steps],
        "step_ms": step_ms,
        "tokens_per_s": [13_107_200 / each for each in step_ms],
        "held_out": [[step, 1.78 + 3.9 / (1 + step / 14)] for step in range(0, 200, 25)],
    }


def _step(step: int, why: str, ranks: int, micro_batches: int) -> dict[str, Any]:
    """One step, played: every bucket micro_batches when its last rank has it, one bucket after the other."""
    begins = [90.0 * (rank % 5) for rank in range(ranks)]
    pace = [1000 * _slowness(rank, step) * (1.5 if why == "slowest" else 1) for rank in range(ranks)]
    ready, done = [], []
    for rank in range(ranks):
        last = begins[rank] + 800 + (micro_batches - 1) * 24 * pace[rank] + 8 * pace[rank]
        ready.append([last + 16 * pace[rank] * (bucket + 1) / BUCKETS for bucket in range(BUCKETS)])
        done.append(last + 16 * pace[rank])
    rows = [_Row(rank, begins[rank], pace[rank], done[rank], micro_batches) for rank in range(ranks)]
    free = 0.0
    for bucket in range(BUCKETS):
        last_rank = max(range(ranks), key=lambda rank: ready[rank][bucket])
        whole = max(free, ready[last_rank][bucket])
        for row in rows:
            row.exchange(
                bucket, ready[row.rank][bucket], max(free, ready[row.rank][bucket]), whole, last_rank
            )
        free = whole + 200 + EXCHANGE_US[bucket]
    ended = [row.ended(free) for row in rows]
    return {"step": step, "why": why, "length_us": max(row["end_us"] for row in ended), "ranks": ended}


class _Row:
    """One rank's events and bubbles of a step, in microseconds."""

    def __init__(self, rank: int, begin: float, pace: float, done: float, micro_batches: int) -> None:
        self.rank, self.begin, self.done = rank, begin, done
        self.events: list[list[Any]] = []
        self.bubbles: list[list[Any]] = []
        now = begin
        for leaf in range(micro_batches):
            self.event("data", "data", now, 400, leaf=leaf)
            self.event("compute", "forward", now + 400, 8 * pace, leaf=leaf)
            self.event("compute", "backward", now + 400 + 8 * pace, 16 * pace, leaf=leaf)
            now += 400 + 24 * pace

    def event(self, lane: str, name: str, start: float, length: float, **more: int) -> None:
        details = [more.get(key, default) for key, default in DETAILS.items()]
        self.events.append([LANES.index(lane), NAMES.index(name), start, length, *details])

    def exchange(self, bucket: int, ready: float, begin: float, whole: float, last: int) -> None:
        send = whole + 200
        self.event("communication", "queued", ready, begin - ready, bucket=bucket)
        if whole > begin:
            self.event("communication", "wait", begin, whole - begin, bucket=bucket, peer=last)
            self.bubble(begin, whole, last)
        size = int(MB[bucket] * 1e6)
        self.event("communication", "agree", whole, 200, bucket=bucket)
        self.event("communication", "exchange", send, EXCHANGE_US[bucket], bytes=size, bucket=bucket)
        self.bubble(whole, send + EXCHANGE_US[bucket], -1)

    def bubble(self, start: float, end: float, peer: int) -> None:
        start = max(start, self.done)
        if end > start:
            self.bubbles.append([start, end - start, "gradient sync", peer])

    def ended(self, free: float) -> dict[str, Any]:
        self.event("host", "gradient sync", self.done, free - self.done)
        self.event("host", "loss over the global batch", free, 500)
        self.bubbles.append([free, 500, "loss over the global batch", -1])
        self.event("compute", "clip", free + 500, 700)
        self.event("compute", "update", free + 1200, 3800)
        self.event("host", "ledger", free + 5000, 1500)
        self.event("host", IMAGE, free + 5400, 600)
        end = free + 6800 + self.begin
        host = "node-a" if self.rank < 4 else "node-b"
        return {
            "rank": self.rank, "host": host, "begin_us": self.begin, "end_us": end,
            "events": self.events, "bubbles": self.bubbles,
        }  # fmt: skip


DETAILS = {"bytes": 0, "leaf": -1, "bucket": -1, "peer": -1}
