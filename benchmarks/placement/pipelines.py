"""The default recipe in pipelines: every schedule and several cuts, beside the hash of one rank.

python benchmarks/placement/pipelines.py  some three minutes; writes pipelines.json and the table in README.md
                                          beside it; exit code 1 if an answer is not as promised
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from benchmarks.pages import README, Pages, Results, made
from benchmarks.placement.run import compare, grid
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

    kind = ""

    @property
    def title(self) -> str:
        return f"{self.row}, {self.column}"

    @property
    def shown(self) -> dict[str, Any]:
        return {**asdict(self), "row": self.row, "column": self.column}

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


def main() -> int:
    return compare(list(pipelined_runs()), "pipelines", pages, COMMAND)


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
