"""A run of ``instep train`` on ranks that are started as torchrun starts them: its steps and its advice.

No supervisor: its spare worker would start in the first seconds, on the same cores.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.advice.causes import AFTER
from instep.bench.hosts import Network
from instep.record.directory import SUMMARY
from instep.timeline.run_setting import setting_of
from instep.timeline.trace_files import FOLDER, read_traces

ROOT = Path(__file__).parents[2]
PATIENCE_S = 120


@dataclass(frozen=True)
class Made:
    """A run that has ended: the median step in ms, how many samples one takes, and what the run advises."""

    step_ms: float
    samples: int
    advice: Sequence[Mapping[str, Any]]
    slow: Mapping[str, Any] | None


def train(words: Sequence[str], folder: Path, ranks: int, network: Network | None) -> Made:
    """Run ``instep train`` with ``words``; with a ``network``, each rank is on a host of its own.

    Raises:
        RuntimeError: a rank failed.
    """
    command = [sys.executable, "-m", "instep", "train", *words, "--run-dir", folder]
    environments = network.environments() if network else on_one_host(ranks)
    path = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
    logs = [folder.with_name(f"{folder.name}-{rank}.log") for rank in range(ranks)]
    processes = []
    for rank, env in enumerate(environments):
        with logs[rank].open("w") as log:
            options = {"cwd": ROOT, "stdout": log, "stderr": log, "stdin": subprocess.DEVNULL}
            env = {**env, "PYTHONPATH": path}
            processes.append(
                network.hosts[rank].popen(command, env=env, **options)
                if network
                else subprocess.Popen(list(map(str, command)), env={**os.environ, **env}, **options)
            )
    try:
        codes = [process.wait(PATIENCE_S) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for rank, code in enumerate(codes):
        if code:
            raise RuntimeError(f"rank {rank} of {words} ended with code {code}:\n{logs[rank].read_text()}")
    return read(folder)


def on_one_host(ranks: int) -> list[dict[str, str]]:
    """What torchrun would set for each rank."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    world = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    texts = {name: str(value) for name, value in world.items()}
    return [{**texts, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]


def read(folder: Path) -> Made:
    """What a run left behind. A step is a whole one, host code between steps included."""
    traces = read_traces(folder / FOLDER)
    setting = setting_of(traces.traces[0].head.get("setting"))
    if setting is None:
        raise RuntimeError(f"no setting in the trace of {folder}: {traces.notes}")
    windows = traces.traces[0].windows
    # In the last one, the run is evaluated and saved.
    walls_ns = [end - begin for step, (begin, end) in windows.items() if AFTER <= step < max(windows)]
    summary = json.loads((folder / SUMMARY).read_text())
    return Made(
        median(walls_ns) / 1e6,
        setting.num_leaves * setting.micro_size,
        summary["advice"],
        summary["slow_rank"],
    )
