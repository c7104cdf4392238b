"""The GPU path on one card within minutes: bits, recovery, NCCL, timings; exit code 1 if anything is amiss.

python benchmarks/gpu/run.py --device cuda:0 --minutes 9 --output DIR       on a machine with a GPU
python benchmarks/gpu/run.py --device cpu --quick                           the same parts without one

Each part is a process in a session of its own, which is killed when its time is over; the others still run.
What a part finds goes into DIR/results.jsonl at once, a line per finding, so that a run that is cut off keeps
what it has. report.py makes tables of that file, DIR/tables.md; what parts print is in DIR/log.txt.

This file needs nothing but Python: torch and instep are imported by the parts alone.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
AMISS = ("differs", "failed", "cut off")
SHORTEST = 0.25  # of its seconds: a part that would get less is skipped
ended_by: list[int] = []  # the signals that have come
GRACE_S = 3.0  # between SIGTERM, at which launchers end their ranks, and SIGKILL
LOOK_S = 0.1
TAIL_BYTES = 3000  # of what a part has printed, kept with its failure


class Part(NamedTuple):
    """A script of this folder, and the seconds that it may take in a run of ten minutes."""

    script: str
    seconds: float
    needs_gpu: bool = False


PARTS = {
    "environment": Part("environment.py", 40),
    "one rank twice": Part("bits.py", 35),
    "1 rank": Part("bits.py", 40),
    "2 ranks": Part("bits.py", 45),
    "3 ranks": Part("bits.py", 45),
    "4 ranks": Part("bits.py", 50),
    "kill": Part("recovery.py", 70),
    "spare": Part("recovery.py", 30),
    "tests": Part("environment.py", 110, needs_gpu=True),
    "nccl, one rank": Part("nccl.py", 25, needs_gpu=True),
    "timings": Part("timings.py", 120),
    "streams": Part("streams.py", 40),
    "nccl, two ranks": Part("nccl.py", 45, needs_gpu=True),
}
SMOKE = "nccl, two ranks"  # with --nccl alone


def main() -> int:
    wanted = arguments()
    # Noted, and not raised: in the middle of a poll it would leave a lock of subprocess taken.
    signal.signal(signal.SIGTERM, lambda number, frame: ended_by.append(number))
    parts = {name: part for name, part in PARTS.items() if name != SMOKE or wanted.nccl}
    with tempfile.TemporaryDirectory(prefix="wheels-") as packages:
        run = Run(wanted, packages)
        if wanted.wheels:
            pip = [sys.executable, "-m", "pip", "install", "--no-index", "--no-deps", "--target", packages]
            run.execute("wheels", [*pip, *map(str, sorted(wanted.wheels.glob("*.whl")))], 120)
        try:
            run.all_of(parts)
        finally:
            run.report()
    print((run.output / "tables.md").read_text())
    print(f"To send: results.jsonl and step.png in {wanted.output}")
    return 1 if run.amiss else 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    found = "cuda:0" if shutil.which("nvidia-smi") else "cpu"
    parser.add_argument("--device", default=found, help="of every rank; here %(default)s")
    parser.add_argument("--minutes", type=float, default=9.0, help="after which everything has ended")
    parser.add_argument("--quick", action="store_true", help="small models, few steps")
    parser.add_argument("--nccl", type=Path, metavar="LIBRARY", help="libnccl.so.2 of NCCL 2.30 or later")
    parser.add_argument("--wheels", type=Path, metavar="DIR", help="packages that the machine lacks")
    parser.add_argument("--output", type=Path, default=Path("runs/gpu"), metavar="DIR")
    return parser.parse_args()


class Run:
    """One run of the parts; ``amiss`` names what was not as it should be."""

    def __init__(self, wanted: argparse.Namespace, packages: str) -> None:
        self.wanted = wanted
        self.deadline = time.monotonic() + 60 * wanted.minutes
        self.output: Path = wanted.output.resolve()
        self.results, self.log = self.output / "results.jsonl", self.output / "log.txt"
        self.amiss: list[str] = []
        self._seen = 0  # bytes of the results
        path = os.pathsep.join([str(ROOT), packages, *filter(None, [os.environ.get("PYTHONPATH")])])
        self._environ = {**os.environ, "PYTHONPATH": path}
        self.output.mkdir(parents=True, exist_ok=True)
        for file in (self.results, self.log):
            file.write_bytes(b"")

    def all_of(self, parts: Mapping[str, Part]) -> None:
        """Run ``parts``; each has its share of the time left, so that what one leaves the later ones have."""
        on_gpu = self.wanted.device.startswith("cuda")
        due = {name: part for name, part in parts.items() if on_gpu or not part.needs_gpu}
        for name, part in parts.items():
            left = self.deadline - time.monotonic()
            limit = left * part.seconds / sum(x.seconds for x in due.values()) if name in due else 0.0
            if name not in due:
                self.found(name, "skipped", why="no GPU")
            elif limit < SHORTEST * part.seconds:
                self.found(name, "skipped", why=f"{left:.0f} s left")
            else:
                self.execute(name, self._command(name, part, limit), limit)
            due.pop(name, None)
            self.report()

    def _command(self, name: str, part: Part, limit: float) -> list[str]:
        words = [sys.executable, str(HERE / part.script), name, "--device", self.wanted.device]
        words += ["--output", str(self.output), "--seconds", f"{limit:.1f}"]
        words += ["--quick"] if self.wanted.quick else []
        return words + (["--nccl", str(self.wanted.nccl.resolve())] if self.wanted.nccl else [])

    def execute(self, name: str, command: list[str], limit: float) -> None:
        """Run a process in a session of its own; at its limit it is killed, and all that it has started."""
        began = time.monotonic()
        minutes, seconds = divmod(round(self.deadline - began), 60)
        print(f"[{minutes}:{seconds:02d} left] {name}: at most {limit:.0f} s", file=sys.stderr, flush=True)
        with self.log.open("ab") as log:
            log.write(f"\n== {name}\n".encode())
            log.flush()
            start = log.tell()
            streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
            process = subprocess.Popen(
                command, cwd=ROOT, env=self._environ, start_new_session=True, **streams
            )
            try:
                while (code := process.poll()) is None and time.monotonic() < began + limit and not ended_by:
                    time.sleep(LOOK_S)
                    self._look()
            finally:
                end_session(process)
        if ended_by:
            sys.exit(128 + ended_by[0])
        self._look()
        data: dict[str, object] = {"seconds": round(time.monotonic() - began, 1)}
        if code != 0:
            data["why"] = "its time was over" if code is None else f"exit code {code}"
            data["log"] = self.log.read_bytes()[start:][-TAIL_BYTES:].decode(errors="replace")
        self.found(name, "cut off" if code is None else "failed" if code else "done", **data)

    def report(self) -> None:
        """Write the tables of what there is by now."""
        subprocess.run([sys.executable, str(HERE / "report.py"), str(self.output)], check=False)

    def found(self, part: str, verdict: str, **data: object) -> None:
        """Report how a part has ended, as parts report what they find (``part.py``)."""
        line = json.dumps({"part": part, "what": "", "verdict": verdict, **data}) + "\n"
        with self.results.open("a+b") as file:
            is_whole = file.tell() == 0 or self.results.read_bytes().endswith(b"\n")
            file.write((line if is_whole else "\n" + line).encode())  # a killed process may have left a part
        self._look()

    def _look(self) -> None:
        """Print the findings that have come, and remember what is amiss."""
        data = self.results.read_bytes()[self._seen :]
        whole = data[: data.rfind(b"\n") + 1]  # a line may still be written
        self._seen += len(whole)
        for line in whole.splitlines():
            with suppress(ValueError):  # of one that is not whole
                self._show(json.loads(line))

    def _show(self, finding: dict[str, Any]) -> None:
        name = ": ".join(filter(None, (finding["part"], finding["what"])))
        hidden = ("part", "what", "verdict", "log", "sha256", "ratios")
        told = {key: value for key, value in finding.items() if key not in hidden and value is not None}
        more = [
            f"{key} {value:.4g}" if type(value) is float else f"{key} {value}" for key, value in told.items()
        ]
        print(" ".join(f"{name}: {finding['verdict']}  {', '.join(more)}".split()), flush=True)
        if finding["verdict"] in AMISS:
            self.amiss.append(name)


def end_session(process: subprocess.Popen[bytes]) -> None:
    """End ``process`` and what it has started, which may go on when itself has ended."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


if __name__ == "__main__":
    sys.exit(main())
