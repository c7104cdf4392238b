"""One model in every placement: trains it in each, compares the hashes, and writes the table of the answers.

python benchmarks/placement/run.py        writes results.json, the table in README.md beside it, and that in
                                          docs/placement.md; exit code 1 if an answer is not as promised
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol, TextIO

from benchmarks.pages import README, Pages, Results, made, save
from instep.checkpoint.contract import describe
from instep.cli.exit_codes import DONE, PREEMPTED
from instep.cli.train import train
from instep.recipes import text_config
from instep.recipes.text_config import Config, ParallelConfig, numerical
from instep.record.directory import SUMMARY

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
RESULTS = HERE / "results.json"
COMMAND = "python benchmarks/placement/run.py"

RANKS = (1, 2, 3, 4, 5)
ROWS = (
    ("naive", 25.0, "shm"),
    ("flat", 25.0, "shm"),
    ("overlap", 25.0, "shm"),
    ("bucketed", 0.1, "shm"),
    ("bucketed", 1.0, "shm"),
    ("bucketed", 25.0, "shm"),
    ("bucketed", 25.0, "gloo"),
)
STEPS = 10


@dataclass(frozen=True)
class Placement:
    """Where and how the one run is made; ``resumed_on`` ranks from half-way on, 0: never stopped."""

    strategy: str
    bucket_mb: float
    ranks: int
    resumed_on: int = 0
    ordered: bool = True
    backend: str = "shm"

    @property
    def row(self) -> str:
        if not self.ordered:
            return "control: `--parallel.no-ordered`"
        size = f", {self.bucket_mb:g} MB" if self.strategy == "bucketed" else ""
        return f"`{self.strategy}`{size}" + (f", {self.backend}" if self.backend != "shm" else "")

    @property
    def column(self) -> str:
        return f"{self.ranks} → {self.resumed_on}" if self.resumed_on else f"{self.ranks}"


def placements() -> Iterator[Placement]:
    """All of them; the first is what the others are compared with."""
    for strategy, bucket_mb, backend in ROWS:
        for ranks in RANKS:
            again = ranks % len(RANKS) + 1
            yield Placement(strategy, bucket_mb, ranks, backend=backend)
            yield Placement(strategy, bucket_mb, ranks, resumed_on=again, backend=backend)
    for ranks in RANKS:
        yield Placement("bucketed", 25.0, ranks, ordered=False)


def recipe(data: Path) -> Config:
    """Eight micro-batches a step, dropout, clipping, AdamW; 1.7 MB of gradients, so bucket sizes differ."""
    tiny = text_config.tiny()
    return replace(tiny, steps=STEPS, data=data, model=replace(tiny.model, width=128, heads=4))


def hash_of(placement: Placement, base: Config, directory: Path) -> str:
    """The hash of the run in this placement, made in ``directory``."""
    parallel = ParallelConfig(
        strategy=placement.strategy,  # type: ignore[arg-type]
        bucket_mb=placement.bucket_mb,
        ordered=placement.ordered,
        backend=placement.backend,  # type: ignore[arg-type]
    )
    config = replace(base, parallel=parallel, ranks=placement.ranks)
    resumed = replace(config, ranks=placement.resumed_on) if placement.resumed_on else None
    return trained(config, directory, resumed)


def trained(config: Config, directory: Path, resumed: Config | None = None) -> str:
    """The hash of weights, moments and step at the end of a run in ``directory``.

    ``resumed`` is what its second half is trained with, if it was stopped.
    """
    config = replace(config, run_dir=directory / "run")
    if resumed is not None:
        _expect(PREEMPTED, train(replace(config, stop_after=config.steps // 2), config.ranks))
        config = replace(resumed, run_dir=config.run_dir, resume=True)
    _expect(DONE, train(config, config.ranks))
    return str(json.loads((directory / "run" / SUMMARY).read_text())["state_sha256"])


def _expect(expected: int, code: int) -> None:
    if code != expected:
        raise RuntimeError(f"expected a run that ends with code {expected}, got {code}")


def measure(data: Path, say: TextIO) -> list[dict[str, Any]]:
    """Every placement with its hash, and whether that is the hash of one rank in its kind of sum."""
    runs: list[dict[str, Any]] = []
    references: dict[bool, str] = {}
    todo = list(placements())
    for number, placement in enumerate(todo, start=1):
        began = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="instep-placement-") as directory:
            found = hash_of(placement, recipe(data), Path(directory))
        same = found == references.setdefault(placement.ordered, found)
        runs.append({**asdict(placement), "same": same})
        took = f"{time.monotonic() - began:.1f} s"
        where = f"{placement.row} on {placement.column} ranks"
        print(
            f"[{number}/{len(todo)}] {where}: {'same' if same else 'differs'} ({took})", file=say, flush=True
        )
    return runs


def contract() -> dict[str, Any]:
    """What else the hash depends on."""
    known = describe(config={}, threads=1, device="cpu")
    return {name: known[name] for name in ("cpu.capability", "threads")}


def table(runs: Sequence[dict[str, Any]]) -> str:
    """Rows are strategies, columns are ranks; ``2 → 3`` began on two and was resumed on three."""
    placed = [
        (Placement(**{name: entry[name] for name in Placement.__dataclass_fields__}), entry["same"])
        for entry in runs
    ]
    return grid([(placement.row, placement.column, same) for placement, same in placed])


def grid(answers: Sequence[tuple[str, str, bool]], corner: str = "ranks") -> str:
    """A Markdown table of answers, each with its row and its column."""
    cells: dict[str, dict[str, str]] = {}
    for row, column, same in answers:
        cells.setdefault(row, {})[column] = "same" if same else "differs"
    columns = sorted(
        {column for row in cells.values() for column in row}, key=lambda column: (len(column), column)
    )
    lines = [[corner, *columns], ["---"] * (len(columns) + 1)]
    lines += [[row, *(found.get(column, "") for column in columns)] for row, found in cells.items()]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def pages(results: Results) -> Pages:
    text = (
        f"{table(results['runs'])}\n\n"
        f"`2 → 3`: stopped half-way on two ranks, resumed on three. {made(results)}"
    )
    return {page: {"placement table": text} for page in (README, "docs/placement.md")}


def as_promised(runs: Sequence[dict[str, Any]]) -> bool:
    """One hash where the sum is ordered; where it is not, another on 4 ranks than on 1."""
    loose = {entry["ranks"]: entry["same"] for entry in runs if not entry["ordered"]}
    return all(entry["same"] for entry in runs if entry["ordered"]) and not loose[4]


class ComparedRun(Protocol):
    """A run with ``configs`` to begin and to resume with; one that has a ``control`` has to differ.

    ``kind``: runs of a kind compute the same, and the first is the reference. ``shown``: its row of results.
    """

    control: str

    @property
    def kind(self) -> str: ...
    @property
    def title(self) -> str: ...
    @property
    def shown(self) -> dict[str, Any]: ...
    @property
    def configs(self) -> tuple[Config, Config | None]: ...


def compare(todo: Sequence[ComparedRun], name: str, pages: Callable[[Results], Pages], command: str) -> int:
    """Train ``todo``, write ``name``.json and its table, and return 0 if all answers are as promised."""
    began = time.monotonic()
    runs: list[dict[str, Any]] = []
    references: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as log, printing_to(Path(log, "log")) as say:
        for number, one in enumerate(todo, start=1):
            start = time.monotonic()
            with tempfile.TemporaryDirectory(prefix="instep-placement-") as directory:
                begun, resumed = one.configs
                digest = trained(begun, Path(directory), resumed)
            same = digest == references.setdefault(one.kind, digest)
            runs.append({**one.shown, "same": same})
            took = f"{'same' if same else 'differs'} ({time.monotonic() - start:.1f} s)"
            print(f"[{number}/{len(todo)}] {one.title}: {took}", file=say, flush=True)
    results = {"minutes": (time.monotonic() - began) / 60, "runs": runs}
    whole = save(HERE / f"{name}.json", results, pages, HERE, command)
    print(pages(whole)[README][f"{name} table"])
    return 0 if controls_differ(runs) else 1


def controls_differ(runs: Sequence[dict[str, Any]]) -> bool:
    """One hash for all that compute the same, and another one for each control."""
    return all(run["same"] != bool(run["control"]) for run in runs)


@contextmanager
def printing_to(log: Path) -> Iterator[TextIO]:
    """This process, and those it starts, print to ``log``; what the block receives is the real stderr."""
    sys.stdout.flush()
    kept = [os.dup(fd) for fd in (1, 2)]
    with log.open("wb") as file, os.fdopen(os.dup(2), "w") as say:
        for fd in (1, 2):
            os.dup2(file.fileno(), fd)
        try:
            yield say
        except BaseException:
            say.write(log.read_text()[-4000:])
            raise
        finally:
            sys.stdout.flush()
            for fd, before in zip((1, 2), kept, strict=True):
                os.dup2(before, fd)
                os.close(before)


def main() -> int:
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="instep-placement-") as directory:
        data = Path(directory, "text")
        # A copy: somebody may be editing.
        data.write_bytes(b"".join(path.read_bytes() for path in sorted((ROOT / "instep").rglob("*.py"))))
        with printing_to(Path(directory, "log")) as say:
            runs = measure(data, say)
        settings = numerical(recipe(data))
    minutes = (time.monotonic() - began) / 60
    results = {"settings": settings, "contract": contract(), "minutes": minutes, "runs": runs}
    save(RESULTS, results, pages, HERE, COMMAND)
    print(table(runs))
    return 0 if as_promised(runs) else 1


if __name__ == "__main__":
    sys.exit(main())
