"""Layers cut over ranks: tensor, sequence and expert parallelism beside data, shards and pipelines; one hash.

python benchmarks/placement/layers.py     some eight minutes; writes layers.json and the table in README.md
                                          beside it; exit code 1 if an answer is not as promised
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from benchmarks.pages import README, Pages, Results, made
from benchmarks.placement.run import compare
from instep.bench.tables import markdown
from instep.recipes import text_config
from instep.recipes.text_config import Config

COMMAND = "python benchmarks/placement/layers.py"
STEPS, CHUNKS, EXPERTS = 6, 4, 4
DENSE, SPARSE = "GPT", f"GPT of {EXPERTS} experts"
PHASES = ("forward", "backward", "exchange", "update", "save")

# Ranks along dp, shard, pp, ep and tp; what is not named has one.
Axes = dict[str, int]
LAYOUTS: dict[str, list[Axes]] = {
    DENSE: [
        {},
        {"tp": 2},
        {"tp": 4},
        {"dp": 2},
        {"dp": 2, "tp": 2},
        {"dp": 3, "tp": 2},
        {"dp": 2, "tp": 4},
        {"shard": 2, "tp": 2},
        {"dp": 2, "shard": 2, "tp": 2},
        {"pp": 2},
        {"pp": 2, "tp": 2},
        {"pp": 2, "tp": 4},
        {"dp": 2, "pp": 2, "tp": 2},
        {"shard": 2, "pp": 2, "tp": 2},
    ],
    SPARSE: [
        {},
        {"ep": 2},
        {"ep": 4},
        {"dp": 2, "ep": 2},
        {"shard": 2, "ep": 2},
        {"ep": 2, "tp": 2},
        {"dp": 2, "ep": 2, "tp": 2},
        {"pp": 2, "ep": 2},
        {"pp": 2, "ep": 2, "tp": 2},
    ],
}
RESUMED: dict[str, list[tuple[Axes, Axes]]] = {
    DENSE: [({"dp": 2, "tp": 2}, {"tp": 4}), ({"tp": 2}, {"pp": 2}), ({"pp": 2, "tp": 2}, {})],
    SPARSE: [({"ep": 2}, {"dp": 2, "ep": 2}), ({"ep": 4}, {"ep": 2, "tp": 2})],
}


@dataclass(frozen=True)
class LayeredRun:
    """``model`` on a mesh of ``axes``, with slices of the ``sequence``; half-way on ``resumed``, if given.

    A rank is killed in the phase ``killed`` of step 3. ``control`` is what is different from the run on one
    rank, and has to show.
    """

    model: str
    axes: Axes
    sequence: bool = False
    resumed: Axes | None = None
    killed: str = ""
    control: str = ""

    @property
    def kind(self) -> str:
        return self.model

    @property
    def title(self) -> str:
        return f"{self.model}, {self.layout}"

    @property
    def shown(self) -> dict[str, Any]:
        return {**asdict(self), "layout": self.layout, "ranks": self.configs[0].ranks}

    @property
    def layout(self) -> str:
        shown = in_words(self.axes) + ", sequence" * self.sequence
        if self.resumed is not None:
            shown += f" → {in_words(self.resumed)}"
        if self.killed:
            shown += f", a rank killed in {self.killed}"
        return f"control: {self.control}" if self.control else shown

    @property
    def configs(self) -> tuple[Config, Config | None]:
        """What is trained; and what it is resumed with, if it is."""
        base = replace(text_config.default(), steps=STEPS)
        base = replace(base, model=replace(base.model, dropout=0.1))
        if self.model == SPARSE:
            base = replace(base, model=replace(base.model, experts=EXPERTS))
            base = replace(base, optim=replace(base.optim, aux_loss=0.0, balance_rate=1e-3))
        chunks = 2 if self.control else CHUNKS
        base = replace(base, parallel=replace(base.parallel, tp_chunks=chunks, sequence=self.sequence))
        if self.killed:
            base = replace(base, fault=(f"kill:rank=1,step=3,phase={self.killed}",))
        return placed(base, self.axes), None if self.resumed is None else placed(base, self.resumed)


def placed(base: Config, axes: Axes) -> Config:
    sizes = {name: axes.get(name, 1) for name in ("shard", "pp", "ep", "tp")}
    ranks, stage = math.prod(axes.values()), int("shard" in axes)
    return replace(base, ranks=ranks, parallel=replace(base.parallel, shard_stage=stage, **sizes))  # type: ignore[arg-type]


def in_words(axes: Axes) -> str:
    return " x ".join(f"{name} {size}" for name, size in axes.items()) or "one rank"


def layered_runs() -> Iterator[LayeredRun]:
    """All of them; the first of a model is what the others are compared with."""
    for model, layouts in LAYOUTS.items():
        for axes in layouts:
            yield LayeredRun(model, axes)
            if axes.get("tp", 1) > 1:
                yield LayeredRun(model, axes, sequence=True)
        for axes, resumed in RESUMED[model]:
            yield LayeredRun(model, axes, resumed=resumed)
        several = {"dp": 2, "tp": 2} if model == DENSE else {"dp": 2, "ep": 2}
        for phase in PHASES:
            yield LayeredRun(model, several, killed=phase)
    yield LayeredRun(DENSE, {"tp": 2}, control="2 chunks, on tp 2")


def main() -> int:
    return compare(list(layered_runs()), "layers", pages, COMMAND)


def pages(results: Results) -> Pages:
    rows: dict[str, dict[str, Any]] = {}
    for run in results["runs"]:
        row = rows.setdefault(run["layout"], {"layout": run["layout"], "ranks": run["ranks"]})
        row[run["model"]] = "same" if run["same"] else "differs"
    every = [{"layout": "", "ranks": "", **dict.fromkeys(LAYOUTS, ""), **row} for row in rows.values()]
    text = (
        f"{markdown(every)}\n\n`→`: stopped half-way, and resumed on another mesh. Empty: not tried. "
        f"{made(results)}"
    )
    return {README: {"layers table": text}}


if __name__ == "__main__":
    sys.exit(main())
