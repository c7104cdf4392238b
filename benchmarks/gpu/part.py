"""What every part is told, and how it reports what it finds: a JSON line at once, so that nothing is lost."""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
BEFORE_S = 3.0  # the limit, stacks are printed


@dataclass(frozen=True)
class Part:
    """One part of a run; ranks that it launches have a copy. ``until`` is of ``time.monotonic``."""

    name: str
    device: str
    quick: bool
    output: Path
    until: float
    nccl: str

    @property
    def on_gpu(self) -> bool:
        return self.device.startswith("cuda")

    @property
    def left_s(self) -> float:
        return self.until - time.monotonic()

    def print_stacks_in_time(self) -> None:
        """Have this process print where its threads are, shortly before it is cut off; its ranks too."""
        faulthandler.dump_traceback_later(max(1.0, self.left_s - BEFORE_S))

    def found(self, what: str, verdict: str, **data: object) -> None:
        """Report; ``verdict`` is "same", "differs", "passed", "failed", "skipped", "measured", or "info"."""
        line = json.dumps({"part": self.name, "what": what, "verdict": verdict, **data}) + "\n"
        with open(self.output / "results.jsonl", "ab", buffering=0) as file:
            file.write(line.encode())

    def findings(self) -> list[dict[str, Any]]:
        """All that was found so far, in this part and in those before."""
        found, path = [], self.output / "results.jsonl"
        for line in path.read_text().splitlines() if path.exists() else ():
            with suppress(ValueError):  # of one that was killed while it wrote
                found.append(json.loads(line))
        return found

    def reference(self) -> str:
        """The first ``sha256`` of the run; "" if there is none yet."""
        return next((line["sha256"] for line in self.findings() if "sha256" in line), "")

    def compare(self, what: str, sha256: str, **data: object) -> None:
        """Report whether a hash is the first one of the run."""
        expected = self.reference() or sha256
        self.found(what, "same" if sha256 == expected else "differs", sha256=sha256, **data)


def instep(*words: object, cwd: Path) -> None:
    """Run the command ``instep``; ``RuntimeError`` with what it has printed if it fails."""
    command = [sys.executable, "-m", "instep", *map(str, words)]
    ended = subprocess.run(command, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    print(ended.stdout)
    if ended.returncode:
        raise RuntimeError(f"instep {words[0]}: exit code {ended.returncode}: {ended.stdout[-1500:]}")


def main(functions: Mapping[str, Callable[[Part], None]]) -> None:
    """Call the function of the part that the command line names."""
    words = argparse.ArgumentParser()
    words.add_argument("name", choices=functions)
    words.add_argument("--device", required=True)
    words.add_argument("--output", type=Path, required=True)
    words.add_argument("--seconds", type=float, required=True)
    words.add_argument("--quick", action="store_true")
    words.add_argument("--nccl", default="")
    got = words.parse_args()
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # for ranks too, before they start CUDA
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # a machine may not know its own name
    until = time.monotonic() + got.seconds
    part = Part(got.name, got.device, got.quick, got.output, until, got.nccl)
    part.print_stacks_in_time()
    functions[part.name](part)
