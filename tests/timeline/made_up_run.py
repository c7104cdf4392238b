"""The files of a made-up run's ranks: steps of known length, in rings as a run writes them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from instep.ring_buffer import RingBuffer
from instep.timeline.run_setting import RunSetting

MS = 1_000_000
HOUR = 3600 * 1000 * MS
DATA, FORWARD, BACKWARD, FLIGHT, UPDATE, HOST = 1, 3, 6, 2, 4, 1  # ms
BEGIN_MS = 5_000


def setting(world_size: int = 2, micro_batches: int = 2) -> RunSetting:
    return RunSetting(
        "bucketed", "gloo", world_size, world_size, 1, 1, 8, 25.0, micro_batches * world_size, 4
    )


class MadeUpRun:
    """Writes the steps of ``world_size`` ranks into ``folder``, one after the other.

    Each rank has ``micro_batches``, then ``buckets`` are exchanged one by one, then it updates. Rank r
    computes ``slower(r)`` times as long, and reads its clock ``offset_ns[r]`` late.
    """

    def __init__(
        self,
        folder: Path,
        world_size: int,
        *,
        micro_batches: int = 2,
        buckets: int = 2,
        capacity: int = 4096,
        slower: Callable[[int], float] = lambda rank: 1.0,
        offset_ns: Mapping[int, int] | None = None,
        begin_ms: float = BEGIN_MS,
        only: Iterable[int] | None = None,
        head: Mapping[str, Any] | None = None,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.world_size, self.micro_batches = world_size, micro_batches
        self.buckets, self.slower = buckets, slower
        self.now = int(begin_ms * MS)
        self.offsets = {rank: (offset_ns or {}).get(rank, 0) for rank in range(world_size)}
        told = {
            "boot": "this one", "host": "here", "world_size": world_size, "error_ns": 0, "optimizer": "adamw",
            "setting": asdict(setting(world_size, micro_batches)), **(head or {}),
        }  # fmt: skip
        self.rings = {
            rank: RingBuffer(
                capacity, folder / name(rank), {**told, "rank": rank, "offset_ns": self.offsets[rank]}
            )
            for rank in (range(world_size) if only is None else only)
        }

    @property
    def compute_ms(self) -> float:
        """Of a rank that is not slow, in a step."""
        return self.micro_batches * (FORWARD + BACKWARD)

    def put(self, rank: int, step: int, lane: str, event: str, start: int, end: int, **more: int) -> None:
        if rank in self.rings:
            offset = self.offsets[rank]
            told = [more.get(key, default) for key, default in (("leaf", -1), ("bucket", -1), ("peer", -1))]
            size = more.get("num_bytes", 0)
            self.rings[rank].put(event, lane, start + offset, end + offset, size, step, *told)

    def step(self, step: int, *, ended: Iterable[int] | None = None) -> None:
        """One step; only on the ranks ``ended`` does it come to its end."""
        begin, last = self.now, set(range(self.world_size) if ended is None else ended)
        done = {rank: self._compute(rank, step, begin) for rank in range(self.world_size)}
        at = self._exchange(step, done)
        for rank in range(self.world_size):
            self.put(rank, step, "host", "gradient sync", done[rank], at)
            self.put(rank, step, "compute", "update", at, at + UPDATE * MS)
            self.put(rank, step, "host", "ledger", at + UPDATE * MS, at + (UPDATE + HOST) * MS)
        self.now = at + (UPDATE + HOST) * MS
        for rank in last:
            self.put(rank, step, "host", "step", begin, self.now)

    def steps(self, first: int, end: int) -> None:
        """Steps ``first`` to before ``end``."""
        for step in range(first, end):
            self.step(step)

    def _compute(self, rank: int, step: int, at: int) -> int:
        for leaf in range(self.micro_batches):
            for lane, event, ms in (("data", "data", DATA), ("compute", "forward", FORWARD),
                                    ("compute", "backward", BACKWARD)):  # fmt: skip
                length = int(ms * MS * (self.slower(rank) if lane == "compute" else 1))
                self.put(rank, step, lane, event, at, at + length, leaf=leaf)
                at += length
        return at

    def _exchange(self, step: int, ready: Mapping[int, int]) -> int:
        peer = max(ready, key=ready.__getitem__)
        free = whole = ready[peer]
        for bucket in range(self.buckets):
            for rank, at in ready.items():
                self.put(
                    rank, step, "communication", "queued", at, max(at, free if bucket else at), bucket=bucket
                )
                if not bucket and rank != peer:
                    self.put(rank, step, "communication", "wait", at, whole, bucket=bucket, peer=peer)
                self.put(rank, step, "communication", "agree", free, free + MS // 4, bucket=bucket)
                self.put(
                    rank, step, "communication", "exchange", free + MS // 4, free + FLIGHT * MS,
                    bucket=bucket, num_bytes=1 << 20,
                )  # fmt: skip
            free += FLIGHT * MS
        return free


def name(rank: int) -> str:
    return f"rank-{rank:05d}.ring"
