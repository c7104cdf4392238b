"""The memory that the ranks of a run took at their peaks, as the kernel and CUDA count it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

import torch

from instep.launch.process_memory import ResidentMemory, resident_memory, total_resident
from instep.net.device import peak_bytes
from instep.net.process_group import Group


def peak_memory(group: Group, device: torch.device) -> dict[str, Any]:
    """``ranks`` and ``hosts``, each with the bytes that were resident at the peak, a shared page once; None
    where the kernel does not say. ``gpu_peak`` is what torch had allocated on a GPU, None on a CPU.

    Collective.
    """
    now = resident_memory()
    told = {"process": now and asdict(now), "gpu_peak": peak_bytes(device)}
    answers = group.all_gather_bytes(json.dumps(told).encode(), "the gathering of memory")
    ranks, hosts = [], dict[str, list[ResidentMemory | None]]()
    for rank, answer, peer in zip(group.ranks, map(json.loads, answers), group.peers.table, strict=True):
        process = answer["process"] and ResidentMemory(**answer["process"])
        ranks.append(
            {"rank": rank, "resident_peak": process and process.peak, "gpu_peak": answer["gpu_peak"]}
        )
        hosts.setdefault(peer.host, []).append(process)
    return {
        "ranks": ranks,
        "hosts": [
            {"resident_peak": total_resident([x for x in processes if x]) if all(processes) else None}
            for processes in hosts.values()
        ],
    }


def words(memory: Mapping[str, Any]) -> str:
    """A line about what ``peak_memory`` has found: the rank and the host that took most."""
    ranks, hosts = memory["ranks"], memory["hosts"]
    parts = []
    if gpu := _most(row["gpu_peak"] for row in ranks):
        parts.append(f"{_mb(gpu)} of GPU memory per rank")
    if resident := _most(row["resident_peak"] for row in ranks):
        parts.append(f"{_mb(resident)} per rank")
    if len(ranks) > 1 and (host := _most(row["resident_peak"] for row in hosts)):
        parts.append(f"{_mb(host)} for all ranks of {'the' if len(hosts) == 1 else 'a'} host")
    return f"at most {', '.join(parts)}" if parts else "not known"


def _most(numbers: Iterable[int | None]) -> int:
    return max((number for number in numbers if number is not None), default=0)


def _mb(nbytes: int) -> str:
    """Three digits that count, in MB of 10**6 bytes."""
    megabytes = nbytes / 1e6
    return f"{megabytes:,.{max(0, 2 - math.floor(math.log10(megabytes)))}f} MB"
