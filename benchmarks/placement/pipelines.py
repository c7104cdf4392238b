"""The default recipe in pipelines: every schedule and several cuts, beside the hash of one rank.

python benchmarks/placement/pipelines.py  some three minutes; writes pipelines.json and the table in README.md
                                          beside it; exit code 1 if an answer is not as promised
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TextIO

from benchmarks.pages import README, Pages, Results, made, save
from benchmarks.placement.run import HERE, grid, printing_to, trained
from instep.pipeline.schedules import NAMES, generate
from instep.recipes import text_config
from instep.recipes.text_config import Config

COMMAND = "python benchmarks/placement/pipelines.py"
STEPS = 6
EDGES = 2  # layers that are no blocks: the embedding and the output
LAYOUTS = (
    (2, 2, 0),
    (4, 4, 0),
    (2, 4, 0),
    (2, 2, 4),
)  # ranks of a pipeline, of the run, and when it is resumed
CUTS = ("1", "3", "cost")  # beside "layers", of two ranks
SEED, MICRO_SIZE = "--seed 1", "--batch.micro-size 8"


@dataclass(frozen=True)
class PipelinedRun:
    """Pipelines of ``pp`` ranks, on ``ranks``; from half-way on of ``resumed_pp``, 0: never stopped.

    ``cuts`` is how they are cut, if not by the number of layers. ``control`` is what is different from the
    run on one rank, and has to show.
    """

    schedule: str = ""
    pp: int = 1
    ranks: int = 1
    resumed_pp: int = 0
    cuts: str = ""
    control: str = ""

    @property
    def row(self) -> str:
        if self.control:
            return f"control: `{self.control}`"
        if self.cuts:
            return f"`{self.schedule}`, `--parallel.cuts {self.cuts}`"
        return f"`{self.schedule}`" if self.schedule else "no pipeline"

    @property
    def column(self) -> str:
        if self.resumed_pp:
            return f"{self.pp} → {self.resumed_pp}"
        return f"{self.pp}" if self.pp == self.ranks else f"{self.ranks // self.pp} x {self.pp}"

    @property
    def configs(self) -> tuple[Config, Config | None]:
        """What is trained; and what it is resumed with, if it is."""
        base = replace(text_config.default(), steps=STEPS)
        if self.control == SEED:
            base = replace(base, seed=1)
        elif self.control == MICRO_SIZE:
            base = replace(base, batch=replace(base.batch, micro_size=8))
        schedule = self.schedule or base.parallel.schedule
        if self.cuts:
            base = replace(base, parallel=replace(base.parallel, cuts=self.cuts))
        begun = _piped(base, self.pp, schedule, self.ranks)
        resumed = _piped(base, self.resumed_pp, schedule, self.resumed_pp) if self.resumed_pp else None
        return begun, resumed


def _piped(base: Config, pp: int, schedule: str, ranks: int) -> Config:
    return replace(base, ranks=ranks, parallel=replace(base.parallel, pp=pp, schedule=schedule))  # type: ignore[arg-type]


def pipelined_runs() -> Iterator[PipelinedRun]:
    """All of them; the first is what the others are compared with."""
    yield PipelinedRun()
    layers = text_config.default().model.layers + EDGES
    for name in NAMES:
        for pp, ranks, resumed_pp in LAYOUTS:
            if generate(name, max(pp, resumed_pp), 1).num_stages <= layers:
                yield PipelinedRun(name, pp, ranks, resumed_pp)
    for cuts in CUTS:
        yield PipelinedRun("1f1b", 2, 2, cuts=cuts)
    for control in (SEED, MICRO_SIZE):
        yield PipelinedRun("1f1b", 2, 2, control=control)


def measure(say: TextIO) -> list[dict[str, Any]]:
    """Every run, and whether its hash is that of one rank."""
    found: list[dict[str, Any]] = []
    reference = ""
    todo = list(pipelined_runs())
    for number, one in enumerate(todo, start=1):
        began = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="instep-placement-") as directory:
            begun, resumed = one.configs
            digest = trained(begun, Path(directory), resumed)
        reference = reference or digest
        found.append({**asdict(one), "row": one.row, "column": one.column, "same": digest == reference})
        answer = "same" if found[-1]["same"] else "differs"
        took = f"{time.monotonic() - began:.1f} s"
        print(f"[{number}/{len(todo)}] {one.row}, {one.column}: {answer} ({took})", file=say, flush=True)
    return found


def as_promised(runs: Sequence[dict[str, Any]]) -> bool:
    """One hash for all that compute the same, and another one for each control."""
    return all(run["same"] != bool(run["control"]) for run in runs)


def main() -> int:
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as directory, printing_to(Path(directory, "log")) as say:
        runs = measure(say)
    results = {"minutes": (time.monotonic() - began) / 60, "runs": runs}
    whole = save(HERE / "pipelines.json", results, pages, HERE, COMMAND)
    print(pages(whole)[README]["pipelines table"])
    return 0 if as_promised(runs) else 1


def pages(results: Results) -> Pages:
    answers = [(run["row"], run["column"], run["same"]) for run in results["runs"][1:]]
    layers = text_config.default().model.layers + EDGES
    text = (
        f"{grid(answers, 'ranks of a pipeline')}\n\n"
        "`2 x 2`: two pipelines of two ranks; `2 → 4`: stopped half-way, resumed as a pipeline of four. "
        f"Empty: the recipe's {layers} layers are too few for two stages on each of four ranks. "
        f"{made(results)}"
    )
    return {README: {"pipelines table": text}}


if __name__ == "__main__":
    sys.exit(main())
