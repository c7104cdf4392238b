"""``instep plan WORD``: predictions by arithmetic, which imports neither torch nor numpy."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import tyro

from instep.cli.exit_codes import DONE, report_error
from instep.plan import memory_table, run_check, search, step_table
from instep.plan.cluster import CLUSTERS
from instep.plan.memory_estimate import MemoryPlan
from instep.plan.model import MODELS
from instep.plan.search import SearchPlan
from instep.plan.step_table import BucketsPlan, ScalePlan, bucket_text
from instep.plan.step_time import TimePlan
from instep.record.directory import SUMMARY, config_of
from instep.record.jsonl import read_object
from instep.run import toml
from instep.timeline.analysis import exchanges_of

PROGRAM = "instep plan"
DESCRIPTION = f"""\
Plan a training run by arithmetic: no torch, no processes, answers at once.

  instep plan memory [MODEL]    what each rank's memory holds, line by line, and how many ranks it takes
  instep plan step [MODEL]      the time of a step, simulated, and where it goes on each kind of rank
  instep plan scale [MODEL]     the same on several numbers of ranks
  instep plan buckets [MODEL]   the step with each strategy and bucket size; of a run: instep plan buckets RUN
  instep plan search [MODEL]    the placements that fit, fastest first, and why the others are slower
  instep plan fit [RUN]         the [cluster] of this machine, or a run's, a file for step, scale and search
  instep plan check RUN...      runs beside their plans: step time and memory, planned and measured

MODEL is a file (.toml, .yaml) whose tables [model], [batch], [parallel], [device] and [cluster] have the
flags as keys, or one of {", ".join(MODELS)}. For step, scale and search a second
word, {" or ".join(CLUSTERS)}, sets the cluster. Flags override both.

Exit codes: 0 done, 1 failed, 2 usage.\
"""


@dataclass(frozen=True, kw_only=True)
class PrintFlags:
    """How results are printed."""

    json: bool = False
    """Print all numbers as JSON."""


@dataclass(frozen=True, kw_only=True)
class ChartFlags(PrintFlags):
    """And drawn."""

    chart: str = ""
    """Draw the answer into this file, as PNG and as SVG."""


@dataclass(frozen=True, kw_only=True)
class MemoryFlags(ChartFlags, MemoryPlan):
    """A memory plan as flags."""


@dataclass(frozen=True, kw_only=True)
class StepFlags(ChartFlags, TimePlan):
    """A step as flags."""


@dataclass(frozen=True, kw_only=True)
class ScaleFlags(ChartFlags, ScalePlan):
    """A step on several numbers of ranks as flags."""


@dataclass(frozen=True, kw_only=True)
class ModelBucketsFlags(PrintFlags, BucketsPlan):
    """A step with each bucket size as flags."""


@dataclass(frozen=True, kw_only=True)
class SearchFlags(PrintFlags, SearchPlan):
    """A search as flags."""


@dataclass(frozen=True, kw_only=True)
class CheckFlags(PrintFlags):
    """Runs that have ended, and the one that calibrates their plans."""

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """Directories of runs."""
    base: Path | None = None
    """Calibrate by this run; without it each run calibrates its own plan."""


@dataclass(frozen=True, kw_only=True)
class FitFlags:
    """A run that has ended, or none."""

    run: Annotated[Path | None, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")] = None
    """Directory of a run of instep train, without tp, ep and pp; by default one is made, in half a minute."""


@dataclass(frozen=True, kw_only=True)
class EndedRunFlags(PrintFlags):
    """A run that has ended."""

    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """Directory of the run."""


FIT, CHECK, BUCKETS = "fit", "check", "buckets"
CALIBRATION = "-n 2 --steps 40 --parallel.strategy naive --eval.windows 1 --checkpoint.every 0"
CODES = "\n\nExit codes: 0 done, 1 failed, 2 usage."
FIT_DESCRIPTION = f"""\
Fit rates and links to a run, and print them as the table [cluster] of a plan, with 95 % confidence intervals.

Without RUN, a run is made and removed: instep train {CALIBRATION},
with the words after -- behind these: instep plan fit -- -n 4 --model.width 512{CODES}\
"""
BUCKETS_DESCRIPTION = (
    "Predict the step of a run with other strategies and bucket sizes, by its measured exchanges." + CODES
)
CHECK_DESCRIPTION = "Compare runs with their plans: step time and memory, planned and measured." + CODES
WORDS = {
    "memory": (MemoryFlags, memory_table),
    "step": (StepFlags, step_table),
    "scale": (ScaleFlags, step_table),
    "search": (SearchFlags, search),
    BUCKETS: (ModelBucketsFlags, step_table),
}
ALL_WORDS = (*WORDS, FIT, CHECK)


def main(args: Sequence[str]) -> int:
    """Answer what ``args`` ask; return the exit code."""
    try:
        word, rest = (args[0], list(args[1:])) if args else ("--help", [])
        if word in ("-h", "--help"):
            print(f"usage: {PROGRAM} {{{','.join(ALL_WORDS)}}} [OPTIONS]\n\n{DESCRIPTION}")
            return DONE
        if word not in ALL_WORDS:
            raise ValueError(f"expected one of {', '.join(ALL_WORDS)}, got {word!r}")
        if word == FIT:
            return fit_run(rest)
        if word == CHECK:
            return check_runs(rest)
        if word == BUCKETS and any(Path(name).is_dir() for name in rest):
            return buckets_of_run(rest)
        kind, answer = WORDS[word]
        options = parse(kind(), rest, f"{PROGRAM} {word}")
        options.check()
        lines = [json.dumps(answer.as_json(options), indent=1)] if options.json else answer.text(options)
        print("\n".join(lines))
        if getattr(options, "chart", ""):  # matplotlib takes half a second
            written = importlib.import_module("instep.cli.plan_chart").draw(options, options.chart)
            print("chart:", *written, file=sys.stderr)
        return DONE
    except BrokenPipeError:  # the reader has seen enough
        return DONE
    except (Exception, KeyboardInterrupt) as error:
        return report_error(PROGRAM, error)


def fit_run(args: Sequence[str]) -> int:
    """Print the cluster of the run that ``args`` name, or of a run that is made for it."""
    own = [*args, "--"].index("--")
    options = tyro.cli(FitFlags, prog=f"{PROGRAM} {FIT}", description=FIT_DESCRIPTION, args=list(args[:own]))
    with TemporaryDirectory(prefix="instep-fit-") as folder:
        path = options.run or Path(folder, "run")
        if options.run is None:
            words = [*CALIBRATION.split(), "--run-dir", str(path), *args[own + 1 :]]
            command = [sys.executable, "-m", "instep", "train", *words]
            if code := subprocess.run(command, stdout=subprocess.DEVNULL, check=False).returncode:
                return code  # it has said why
        run = figures_of(path)
    ranges = {
        name: f"  # 95 %: {low:.3g} to {high:.3g}" for name, (low, high) in run_check.intervals(run).items()
    }
    cluster = run_check.fitted(run)
    short: Any = {name: float(f"{x:.4g}") for name, x in asdict(cluster).items() if isinstance(x, float)}
    lines = toml.to_toml(replace(cluster, **short)).strip().splitlines()
    print("\n".join(["[cluster]", *(line + ranges.get(line.partition(" ")[0], "") for line in lines)]))
    return DONE


def buckets_of_run(args: Sequence[str]) -> int:
    """Print the run that ``args`` name with other buckets."""
    options = tyro.cli(
        EndedRunFlags, prog=f"{PROGRAM} {BUCKETS}", description=BUCKETS_DESCRIPTION, args=list(args)
    )
    exchanges = exchanges_of(read_object(options.run / SUMMARY))
    if exchanges is None:
        raise ValueError(
            f"{options.run}: expected a run whose ranks exchange buckets: two ranks or more, one of the four "
            "strategies, no pipeline; or it is a run of an earlier version"
        )
    plans = list(exchanges.bucket_plans())
    lines = [exchanges.words, *bucket_text(plans, plans[0])]
    found = {"buckets": [one._asdict() for one in plans]}
    print(json.dumps(found, indent=1) if options.json else "\n".join(lines))
    return DONE


def check_runs(args: Sequence[str]) -> int:
    """Print the runs that ``args`` name beside their plans."""
    options = tyro.cli(CheckFlags, prog=f"{PROGRAM} {CHECK}", description=CHECK_DESCRIPTION, args=list(args))
    if not options.runs:
        raise ValueError("expected the directory of one run or more, got none")
    base = None if options.base is None else figures_of(options.base)
    found = {path: run_check.check(figures_of(path), base) for path in options.runs}
    lines = run_check.table(found)
    if options.json:
        lines = iter([json.dumps({str(path): asdict(one) for path, one in found.items()}, indent=1)])
    print("\n".join(lines))
    return DONE


def figures_of(path: Path) -> run_check.RunFigures:
    """The figures of the run in ``path``.

    Raises:
        ValueError: it is no run that has ended, or no step of it was looked at.
    """
    ended = (path / SUMMARY).is_file()
    found = run_check.run_figures(config_of(path), read_object(path / SUMMARY)) if ended else None
    if found is None:
        raise ValueError(f"{path}: expected the directory of a run that has ended and kept its trace")
    return found


def parse(default: Any, args: Sequence[str], program: str) -> Any:
    """``default`` with what MODEL and then the flags among ``args`` say.

    Raises:
        ValueError: a plan that makes no sense, with one that would.
        SystemExit: 0 after ``--help``; 2 after a flag that does not exist, with the nearest that do.
    """
    args = list(args)
    while args and not args[0].startswith("-"):
        default = _preset(default, args.pop(0))
        toml.check(default)
    options = tyro.cli(type(default), prog=program, description=DESCRIPTION, args=args, default=default)
    toml.check(options)
    return options


def _preset(default: Any, name: str) -> Any:
    if name in MODELS:
        return replace(default, model=MODELS[name])
    clusters, path = CLUSTERS if hasattr(default, "cluster") else {}, Path(name)
    if name in clusters:
        return replace(default, cluster=clusters[name])
    if not path.exists():
        raise ValueError(f"{name}: expected a file, or one of {', '.join([*MODELS, *clusters])}")
    tables = _tables(path)
    if not clusters:  # one file for all words
        tables.pop("cluster", None)
    return toml.merge(default, tables, str(path))


def _tables(path: Path) -> dict[str, Any]:
    """The nested tables of a TOML or YAML file."""
    if path.suffix not in (".yaml", ".yml"):
        return toml.load_toml(path)
    try:
        yaml: Any = importlib.import_module("yaml")
    except ImportError:
        raise ValueError(f"{path}: YAML needs the package pyyaml: install it, or write TOML") from None
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ValueError(f"{path}: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path}: expected tables, got {type(found).__name__}")
    return found
