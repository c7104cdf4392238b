"""Random models, each in random placements: are the bits those of one process, and those of plain torch?

python benchmarks/placement/fuzz/run.py --minutes 10                        other models every time
python benchmarks/placement/fuzz/run.py --seed 3 --models 100 --jobs 2      these, in two workers at a time
python benchmarks/placement/fuzz/run.py --seed 3 --model 17 --placement 2   one again, with all it says

A trial ends in the same bits, in an error of instep's own words, in other bits, in another error, or not at
all. The last three are findings: exit code 1, and the command that makes each again with only the layers that
it needs. ``--write`` writes results.json, and the tables of the README.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import secrets
import select
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, field
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.pages import Pages, Results, made, save
from benchmarks.placement.fuzz.programs import (
    CRASH,
    FINDINGS,
    HANG,
    KINDS,
    REFUSED,
    SAME,
    placements,
    program,
)
from instep.bench import tables

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
COMMAND = "python benchmarks/placement/fuzz/run.py"
PLACEMENTS = 4  # of a model
PATIENCE_S = 300.0  # for an answer; a trial has deadlines of its own
SHRINKS = 16  # times that a finding is tried with fewer layers

Task = tuple[int, int | None, tuple[int, ...] | None]
"""Model, placement (None: one process against plain torch), and the layers that stay (None: all)."""


class Worker:
    """A process that makes trials, one after the other; another one after a crash or a hang."""

    def __init__(self, seed: int, temporary: str) -> None:
        self.seed = seed
        self._temporary = temporary  # for what a worker that is killed leaves behind
        self._process: subprocess.Popen[bytes] | None = None

    def attempt(self, task: Task) -> dict[str, Any]:
        """The ``Outcome`` of ``task`` as a dictionary."""
        process = self._process = self._process or self._start()
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(json.dumps(task).encode() + b"\n")
            process.stdin.flush()
            ready = select.select([process.stdout], [], [], PATIENCE_S)[0]
            line = process.stdout.readline() if ready else b""
        except OSError:
            ready, line = [process.stdout], b""
        if line:
            found = json.loads(line)
            if found["kind"] in (CRASH, HANG):  # threads may still be in it
                self.close()
            return dict(found)
        self.close()
        if not ready:
            return {"kind": HANG, "text": f"no answer within {PATIENCE_S:g} s", "where": ""}
        return {"kind": CRASH, "text": f"the process ended with code {process.returncode}", "where": ""}

    def close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()

    def _start(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, str(Path(__file__).resolve()), "--seed", str(self.seed), "--worker"],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "TMPDIR": self._temporary},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            process_group=0,
        )


@dataclass
class Campaign:
    """All trials of a seed, by several workers at a time."""

    seed: int
    say: Callable[[str], None]
    models: Iterator[int]
    until: float  # time.monotonic()
    num_placements: int = PLACEMENTS
    without: frozenset[str] = frozenset()
    outcomes: Counter[str] = field(default_factory=Counter)
    forms: Counter[tuple[str, str]] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    refusals: dict[str, list[str]] = field(default_factory=dict)
    findings: list[dict[str, Any]] = field(default_factory=list)
    programs: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def run(self, jobs: int) -> None:
        threads = [threading.Thread(target=self._work) for _ in range(jobs)]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                thread.join()
        except KeyboardInterrupt:  # workers end after their trial, and take what is theirs with them
            self.until = 0.0
            raise

    def _work(self) -> None:
        with TemporaryDirectory(prefix="fuzz-") as temporary, closing(Worker(self.seed, temporary)) as worker:
            while time.monotonic() < self.until and (model := self._next()) is not None:
                self._model(worker, model)

    def _next(self) -> int | None:
        with self._lock:
            return next(self.models, None)

    def _model(self, worker: Worker, model: int) -> None:
        if program(self.seed, model).words & self.without:
            return
        found = self._trial(worker, model, None)
        with self._lock:
            self.programs += 1
            if found["kind"] == SAME:
                self.kinds.update(program(self.seed, model).kinds)
        if found["kind"] == SAME:
            for number in range(self.num_placements):
                if time.monotonic() < self.until:
                    self._trial(worker, model, number)

    def _trial(self, worker: Worker, model: int, number: int | None) -> dict[str, Any]:
        task: Task = (model, number, None)
        found = worker.attempt(task)
        kind = found["kind"]
        shrunk = self._shrink(worker, task, kind) if kind in FINDINGS else task
        with self._lock:
            if number is not None:
                self.outcomes[kind] += 1
                self.forms[(placements(self.seed, model, number)[0].form, kind)] += 1
            elif kind != SAME:
                self.outcomes[f"{kind} on one rank"] += 1
            if kind == REFUSED:
                self.refusals.setdefault(pattern(found["text"]), []).append(command(self.seed, task))
            if kind in FINDINGS:
                layers = "; ".join(map(str, program(self.seed, model, shrunk[2]).layers))
                self.findings.append({**found, "command": command(self.seed, shrunk), "layers": layers})
                said = kind.upper() + ": " + command(self.seed, shrunk)
                self.say(f"{said}\n    {layers}\n    {found['where']} {found['text']}")
        return found

    def _shrink(self, worker: Worker, task: Task, kind: str) -> Task:
        """``task`` with fewer layers, as long as it ends in the same kind of finding."""
        model, number, _ = task
        keep, left = list(range(len(program(self.seed, model).layers))), SHRINKS
        for layer in list(keep):
            fewer = tuple(x for x in keep if x != layer)
            if left and worker.attempt((model, number, fewer))["kind"] == kind:
                keep = list(fewer)
            left = max(0, left - 1)
        return model, number, tuple(keep)

    def results(self) -> dict[str, Any]:
        """For results.json."""
        by_refusal = sorted(self.refusals.items(), key=lambda item: -len(item[1]))
        return {
            "seed": self.seed,
            "models": self.programs,
            "placements": sum(self.outcomes[kind] for kind in (SAME, REFUSED, *FINDINGS)),
            "outcomes": dict(sorted(self.outcomes.items())),
            "kinds": {kind: self.kinds[kind] for kind in KINDS},
            "forms": [
                {
                    "form": form,
                    **{kind: self.forms[(form, kind)] for kind in (SAME, REFUSED, *FINDINGS)},
                }
                for form in sorted({form for form, _ in self.forms})
            ],
            "refusals": [
                {"times": len(commands), "message": message, "first": commands[0]}
                for message, commands in by_refusal
            ],
            "findings": self.findings,
        }


def pattern(message: str) -> str:
    """``message`` without names, places and numbers: those with the same cause are counted together."""
    first = re.sub(r"/\S+/[^\s:]+", "PATH", message.splitlines()[0])
    return re.sub(r"\d+", "N", re.sub(r"'[^']*'", "'...'", first))[:160]


def command(seed: int, task: Task) -> str:
    """The line that makes ``task`` again."""
    model, number, keep = task
    words = [COMMAND, f"--seed {seed} --model {model}"]
    words += [] if number is None else [f"--placement {number}"]
    words += [] if keep is None else [f"--keep {','.join(map(str, keep)) or 'none'}"]
    return " ".join(words)


def pages(results: Results) -> Pages:
    refusals = [
        {"times": entry["times"], "refused in these words": entry["message"].replace("|", "\\|")}
        for entry in results["refusals"]
    ]
    verdict = f"{len(results['findings'])} findings" if results["findings"] else "no finding"
    text = (
        f"{tables.markdown(results['forms'])}\n\n"
        + (f"{tables.markdown(refusals)}\n\n" if refusals else "")
        + f"{results['models']} models, {results['placements']} placements: {verdict}. "
        f"{made(results)}"
    )
    return {"benchmarks/placement/README.md": {"fuzz": text}}


def arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, help="another one every time unless it is given")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--models", type=int, help="at most so many")
    parser.add_argument("--placements", type=int, default=PLACEMENTS, help="of each model")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--model", type=int, help="this one alone")
    parser.add_argument("--placement", type=int, help="this one of --model; without it, one process")
    parser.add_argument("--keep", help="the places of the layers of --model that stay, or none")
    parser.add_argument("--without", default="", metavar="WORDS", help="no model with these, as in gap,empty")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    parser.add_argument("--write", action="store_true", help="write results.json and the README's tables")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    wanted = parser.parse_args(words)
    if wanted.seed is None:
        wanted.seed = secrets.randbelow(1_000_000)
    return wanted


def main(words: Sequence[str] | None = None) -> int:
    wanted = arguments(words)
    if wanted.worker:
        return serve(wanted.seed)
    if wanted.model is not None:
        return again(wanted)
    print(f"seed {wanted.seed}", file=sys.stderr, flush=True)
    campaign = Campaign(
        wanted.seed,
        lambda line: print(line, file=sys.stderr, flush=True),
        iter(range(wanted.models)) if wanted.models is not None else count(),
        time.monotonic() + 60 * wanted.minutes,
        wanted.placements,
        frozenset(wanted.without.split(",")),
    )
    began = time.monotonic()
    campaign.run(wanted.jobs)
    results = campaign.results()
    said = f"{COMMAND} --seed {wanted.seed} --models {results['models']} --placements {wanted.placements}"
    said += f" --without {wanted.without}" if wanted.without else ""
    results["minutes"] = (time.monotonic() - began) / 60
    print(tables.markdown(results["forms"]))
    if wanted.json is not None:
        tables.write_json(wanted.json, results, command=said)
    if wanted.write:
        save(HERE / "results.json", results, pages, HERE, said)
    return 1 if results["findings"] else 0


def again(wanted: argparse.Namespace) -> int:
    """One trial, with what is tried."""
    from benchmarks.placement.fuzz.trial import attempt

    keep = None if wanted.keep is None else [int(x) for x in wanted.keep.split(",") if x != "none"]
    print(program(wanted.seed, wanted.model, keep))
    if wanted.placement is not None:
        print(*placements(wanted.seed, wanted.model, wanted.placement), sep="\n")
    found = attempt(wanted.seed, wanted.model, wanted.placement, keep)
    print(*asdict(found).values(), sep="\n", flush=True)
    # Without waiting for threads that hang.
    os._exit(1 if found.kind in FINDINGS else 0)


def serve(seed: int) -> int:
    """A worker's life: a task a line, an answer a line, until there are no more."""
    import torch

    from benchmarks.placement.fuzz.trial import attempt
    from tests.pool import shut_down

    torch.set_num_threads(1)
    try:
        for line in sys.stdin:
            model, number, keep = json.loads(line)
            print(json.dumps(asdict(attempt(seed, model, number, keep))), flush=True)
    finally:
        shut_down()  # or the end of this process would wait for its ranks
    return 0


if __name__ == "__main__":
    sys.exit(main())
