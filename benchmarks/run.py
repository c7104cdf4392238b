"""Which experiments there are, when their results were made, and whether what they measure has changed since.

make bench                              lists all of them; measures nothing
make bench ARGS="steps link/nodes"      runs all of a folder, or one: a measurement wants an idle machine
make bench ARGS=--stale                 runs those whose files changed since their results, some hours
make bench ARGS=--tables                writes the tables of all pages anew from the results; measures nothing

Results are stale if a commit after theirs has changed a folder that the experiment measures, or if they were
made with uncommitted changes. Exit code 1 if an experiment failed, by its name.
"""

from __future__ import annotations

import argparse
import importlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.pages import ROOT, Pages, write_pages
from instep.bench.tables import show
from instep.record.display import LIVE_S, LongWork

HERE = Path(__file__).parent
EXCHANGE = ("reduce", "replicate", "step", "net", "shm", "native")
RUN = ("run", "elastic", "launch", "record", "checkpoint", "state")
SHOWN = 4000  # characters of what a failed experiment has printed


@dataclass(frozen=True)
class Experiment:
    """A script, the folders of instep that it measures, and how long it takes where no result says so."""

    name: str  # the script, below benchmarks/
    measures: tuple[str, ...]
    minutes: float
    results: tuple[str, ...] = ()  # beside the script: NAME.json, results.json of a run.py
    words: tuple[str, ...] = ()
    gpu: bool = False  # only run if it is named

    @property
    def files(self) -> list[Path]:
        script = HERE / self.name
        stem = "results" if script.name == "run" else script.name
        return [script.parent / name for name in self.results or (f"{stem}.json",)]

    @property
    def found(self) -> list[dict[str, Any]]:
        """What its files of results have; of the lines of a GPU's only the environment."""
        return [json.loads(x.read_text()) if x.suffix == ".json" else of_lines(x) for x in self.files]

    @property
    def command(self) -> str:
        return " ".join([f"{self.name}.py", *self.words])

    @property
    def expected_minutes(self) -> float:
        known = [one["minutes"] for one in self.found if "minutes" in one]
        return sum(known) if known else self.minutes

    def pages(self) -> Iterator[tuple[Path, Pages]]:
        """Its folder, and the tables that follow from its results."""
        if not self.gpu:
            module = importlib.import_module(f"benchmarks.{self.name.replace('/', '.')}")
            for file, one in zip(self.files, self.found, strict=True):
                yield file.parent, module.pages(one)


EXPERIMENTS = (
    Experiment("placement/run", (*EXCHANGE, *RUN, "data", "rng", "models", "recipes"), 15),
    Experiment("placement/pipelines", (*EXCHANGE, *RUN, "pipeline", "data", "rng", "models", "recipes"), 3),
    Experiment("placement/layers", (*EXCHANGE, *RUN, "tensor", "expert", "pipeline", "models", "recipes"), 8),
    Experiment(
        "placement/fuzz/run",
        (*EXCHANGE, "shard", "pipeline", "checkpoint", "state", "rng"),
        10,
        words=("--minutes", "10", "--write"),
    ),
    Experiment("faults/run", (*RUN, "net", "shm"), 90),
    Experiment("faults/soak", ("net", "shm", "native"), 10),
    Experiment("faults/leaks", (*RUN, "net", "shm"), 10),
    Experiment("collectives/run", ("net", "shm", "native", "comm"), 8),
    Experiment("collectives/broadcast", ("net", "comm"), 2),
    Experiment("steps/run", EXCHANGE, 30),
    Experiment("steps/small_steps", EXCHANGE, 8),
    Experiment("steps/scaling", EXCHANGE, 4),
    Experiment("steps/data_parallel", EXCHANGE, 3),
    Experiment("steps/own_loop", (*RUN, *EXCHANGE), 2),
    Experiment("steps/memory_savers", ("models", "step", "rng"), 4),
    Experiment("link/run", ("reduce", "replicate", "step", "net"), 10),
    Experiment(
        "link/buckets",
        EXCHANGE,
        10,
        results=tuple(f"buckets-{place}.json" for place in ("gloo", "shm", "link")),
    ),
    Experiment("link/formats", ("reduce", "replicate", "step", "net"), 15),
    Experiment("link/nodes", ("reduce", "rng"), 30),
    Experiment("experts/run", ("expert", "models", "net", "shm"), 10),
    Experiment("tensor/run", ("tensor", "state", "net", "shm"), 8),
    Experiment("plan/run", ("plan", "timeline", *EXCHANGE), 10),
    Experiment("shard/speed", ("shard", *EXCHANGE), 5),
    Experiment("shard/muon", ("shard",), 3),
    Experiment("shard/memory", ("shard", "plan"), 5),
    Experiment("shard/fits", ("shard",), 1),
    Experiment("pipeline/run", ("pipeline",), 0.5),
    Experiment("pipeline/measured", ("pipeline", "step", "net"), 7),
    Experiment("pipeline/against_torch", ("pipeline", "step", "net", "shm"), 2),
    Experiment("published/run", ("plan", "comm", "pipeline"), 0.5),
    Experiment("advice/run", ("timeline", "record"), 5),
    Experiment("advice/strategies", ("reduce", "replicate", "step", "net"), 3),
    Experiment("advice/account", ("timeline", *EXCHANGE), 2),
    Experiment("advice/cost", ("timeline", *EXCHANGE), 5),
    Experiment("loader/run", ("data", "rng"), 2),
    Experiment("notebook/run", ("notebook", "launch"), 10),
    Experiment("gpu/run", (*EXCHANGE, *RUN), 9, ("results.jsonl",), ("--device", "cuda:0"), gpu=True),
)


def of_lines(file: Path) -> dict[str, Any]:
    lines = map(json.loads, file.read_text().splitlines())
    return {"environment": {x["what"]: x["value"] for x in lines if "value" in x}}


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", nargs="*", help="a folder, or a script in it, such as steps or steps/scaling")
    parser.add_argument("--stale", action="store_true", help="run what is stale")
    parser.add_argument("--tables", action="store_true", help="write all tables from the results")
    wanted = parser.parse_args(words)
    for name in wanted.name:
        if not any(matches(one, name) for one in EXPERIMENTS):
            folders = sorted({one.name.split("/")[0] for one in EXPERIMENTS})
            parser.error(f"no experiment {name}: expected one of {', '.join(folders)}, or a script in one")
    if wanted.tables:
        for one in EXPERIMENTS:
            for folder, pages in one.pages():
                write_pages(pages, folder, folder)
        return 0
    chosen = [one for one in EXPERIMENTS if any(matches(one, name) for name in wanted.name)]
    if wanted.stale:
        chosen += [x for x in EXPERIMENTS if x not in chosen and not x.gpu and state(x) != "current"]
    if not wanted.name and not wanted.stale:
        show([row(one) for one in EXPERIMENTS], "python benchmarks/...", notes=[summary()])
        return 0
    return run(chosen)


def matches(one: Experiment, name: str) -> bool:
    name = name.removesuffix(".py").removesuffix("/")
    return one.name == name or one.name.startswith(f"{name}/")


def run(chosen: Sequence[Experiment]) -> int:
    """One after the other: they measure."""
    done, total = 0.0, sum(one.expected_minutes for one in chosen)
    failed = []
    with closing(LongWork()) as work:
        for number, one in enumerate(chosen, start=1):
            began, minutes = time.monotonic(), one.expected_minutes
            words = [sys.executable, f"benchmarks/{one.name}.py", *one.words]
            with tempfile.TemporaryFile() as log:
                child = subprocess.Popen(words, cwd=ROOT, stdout=log, stderr=log)
                while child.poll() is None:
                    share = done + min((time.monotonic() - began) / 60, minutes)
                    work.at(share / total, f"{one.name}, {number} of {len(chosen)}")
                    with suppress(subprocess.TimeoutExpired):
                        child.wait(LIVE_S)
                done += minutes
                log.seek(0)
                if child.returncode:
                    failed.append(one.name)
                    print(log.read().decode(errors="replace")[-SHOWN:], file=sys.stderr)
            took = (time.monotonic() - began) / 60
            ended = f"failed with code {child.returncode}" if child.returncode else "done"
            print(f"{one.name}: {ended} in {took:.1f} minutes", flush=True)
    return 1 if failed else 0


def row(one: Experiment) -> dict[str, Any]:
    made = [each["environment"] for each in one.found]
    return {
        "experiment": one.command,
        "minutes": f"{one.expected_minutes:.2g}",
        "made": min(each.get("date", "") for each in made),
        "commit": ", ".join(sorted({each.get("commit", "") for each in made} - {""})),
        "results": state(one),
    }


def summary() -> str:
    minutes = sum(one.expected_minutes for one in EXPERIMENTS if not one.gpu and state(one) != "current")
    return f"--stale would take {minutes / 60:.1f} hours; steps or steps/scaling runs a folder, or one of it"


def state(one: Experiment) -> str:
    """``current``, or why not, by the oldest of its results."""
    return max(stale(each["environment"], one.measures) for each in one.found) or "current"


def stale(made: dict[str, Any], measures: Sequence[str]) -> str:
    """Why results made in the environment ``made`` are stale; "" if they are not."""
    commit, date = made.get("commit", ""), made.get("date")
    if commit.endswith("-dirty"):
        return "stale: made with uncommitted changes"
    paths = ["--", *(f"instep/{folder}" for folder in measures)]
    since = [f"{commit}..HEAD"] if commit else [f"--since={date} 23:59:59", "HEAD"]
    if not commit and not date:
        return "stale: made at no known commit"
    found = subprocess.run(["git", "rev-list", *since, *paths], cwd=ROOT, capture_output=True, text=True)
    if found.returncode:
        return "stale: made at a commit that is not here"
    number = len(found.stdout.split())
    return f"stale: {number} commit{'s' * (number > 1)} since" if number else ""


if __name__ == "__main__":
    sys.exit(main())
