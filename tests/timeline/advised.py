"""Ranks, buckets and settings to ask advice about; every answer is looked at as text, too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import pytest

from instep.events import GRADIENT_SYNC
from instep.timeline.advice import Advice, Setting, advise
from instep.timeline.breakdown import RankBreakdown
from instep.timeline.buckets import BucketRow
from instep.timeline.parts import PARTS
from instep.timeline.straggler import Slow

MB = 1 << 20
LATENCY_S, S_PER_BYTE = 0.002, 10e-9  # 100 MB/s between two ranks
BACKWARD_S = 0.4

HOST = Setting(
    "bucketed",
    "shm",
    world_size=2,
    ranks_per_host=2,
    hosts=1,
    threads=1,
    cores=8,
    bucket_mb=25,
    num_leaves=8,
    micro_size=4,
)
LINK = replace(HOST, backend="gloo", ranks_per_host=1, hosts=2)


def rank(
    number: int, *, compute: float = 0.9, exposed: float = 0.0, waiting: float = 0.0, **more: float
) -> RankBreakdown:
    """One rank's step, in seconds: what the parts leave of it is ``unattributed``."""
    parts = dict.fromkeys(PARTS, 0.0)
    parts |= {"compute": compute, "exposed communication": exposed, "waiting for a slower rank": waiting}
    parts |= {"waiting for data": more.get("data", 0.0), "update": more.get("update", 0.0)}
    parts["host"] = more.get("host", 0.0)
    wall = sum(parts.values())
    causes = {GRADIENT_SYNC: exposed}
    return RankBreakdown(number, 20, wall, wall, parts, causes, {}, 0.0, 0.0, None)


def buckets(
    sizes: Sequence[float],
    *,
    latency_s: float = LATENCY_S,
    s_per_byte: float = S_PER_BYTE,
    late: bool = False,
) -> list[BucketRow]:
    """Buckets that become ready evenly in a backward which ends at 1 s, or all at its end (``late``)."""
    rows, sent = [], 0.0
    for k, size in enumerate(sizes):
        sent += size
        ready_ms = 1e3 if late else 1e3 * (1 - BACKWARD_S * (1 - sent / sum(sizes)))
        flight_ms = 1e3 * (latency_s + s_per_byte * size)
        agree_ms = 1e3 * latency_s / 3
        ready = {0: ready_ms, 1: ready_ms}
        rows.append(
            BucketRow(
                k, int(size), ready, 0, 1, 0, flight_ms, agree_ms, flight_ms - agree_ms, flight_ms, 0.0, 20
            )
        )
    return rows


def ask(
    ranks: Sequence[RankBreakdown],
    rows: Sequence[BucketRow] = (),
    setting: Setting = HOST,
    slow: Slow | None = None,
    **more: Any,
) -> list[Advice]:
    found = advise(ranks, rows, slow, setting, backward_s=BACKWARD_S, **more)
    for advice in found:
        reads_as_a_sentence(advice.text)
        reads_as_a_sentence(advice.how[0].upper() + advice.how[1:])
        assert advice.gain_share >= 0.01
        assert advice.gain_ms == pytest.approx(advice.gain_share * median(r.median_s for r in ranks) * 1e3)
    assert found == sorted(found, key=lambda advice: (advice.changes_training, -advice.gain_ms))
    return found


def reads_as_a_sentence(text: str) -> None:
    assert text[0].isupper() or text[0].isdigit()
    assert text.endswith(".")
    assert "  " not in text and " ," not in text and "nan" not in text and "None" not in text
    assert text.count("(") == text.count(")")
