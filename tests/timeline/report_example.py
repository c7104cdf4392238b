"""A made-up report for the page: ranks that train, one slow among them, and names that try to break out."""

from __future__ import annotations

from typing import Any

SCRIPT = "<script>window.hacked=1</script>"
IMAGE = "</script><img src=x onerror=window.hacked=2>"
PARTS = (
    "compute", "exposed communication", "waiting for a slower rank", "waiting for data", "update", "host",
    "unattributed",
)  # fmt: skip
SLOW, SINCE = 2, 12


def example(ranks: int = 4) -> dict[str, Any]:
    """Everything that a finished run of ``ranks`` ranks tells."""
    return {
        "format": 1,
        "run": _run(ranks),
        "advice": _advice(),
        "slow": {
            "rank": SLOW, "phase": "its own compute", "since": SINCE, "excess_ms": 14.4, "share": 0.176,
        },
        "breakdown": {"parts": list(PARTS), "ranks": [_breakdown(rank) for rank in range(ranks)]},
        "over_time": _over_time(ranks),
        "buckets": [_bucket(bucket, ranks) for bucket in range(2)],
        "curves": _curves(),
        "timeline": {
            "clock_error_us": 12.0, "steps": [{"step": 40, "why": "median", "ranks": [*range(ranks)]}],
        },
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
        "timeline": {"clock_error_us": None, "steps": []},
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
            "cause": cause, "gain_ms": gain_ms, "gain_share": gain_ms / 94, "confidence": 0.9, "try": try_,
            "text": "Rank 2 computes longer than the others.", "how": "the median over 188 steps",
        }
        for cause, gain_ms, try_ in (("slow rank", 14.4, ""), ("gloo", 7.1, "--parallel.backend shm"))
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
    times = ("skew_ms", "wait_ms", "agree_ms", "exchange_ms", "flight_ms", "exposed_ms", "hidden_ms")
    return {
        "bucket": bucket, "mb": 25.0, "ready_ms": ready, "slowest": SLOW,
        **{name: 1.5 * (at + 1) for at, name in enumerate(times)},
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
