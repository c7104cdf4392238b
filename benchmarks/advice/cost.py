"""What recording costs: steps of the default recipe with and without it, by turns, in the same ranks.

python benchmarks/advice/cost.py                some five minutes; writes cost.json and the README's table
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from benchmarks.pages import Pages, Results, one_table, parser_of, publish
from instep.bench.tables import paired_ratio
from instep.bench.worlds import World
from instep.events import Event, Recorder
from instep.launch.launch import launch
from instep.mesh.join import init
from instep.recipes import text_config
from instep.recipes.text_config import merge
from instep.timeline import trace_files
from tests.run.text_training import TextTraining

HERE = Path(__file__).parent
RANKS, PAIRS, WARM_UP = 2, 500, 10
STRATEGIES = ("bucketed", "naive")


class Nothing(nullcontext):
    """A span that times nothing."""

    def begin(self) -> Nothing:
        return self

    def end(self) -> None: ...

    def cancel(self) -> None: ...


NOTHING = Nothing()


class Silent(Recorder):
    """A recorder that records nothing."""

    def span(self, name: str, **fields: Any) -> Any:
        return NOTHING

    def put(self, name: str, start_ns: int, end_ns: int, **fields: Any) -> None: ...

    def put_all(self, told: Any, **fields: Any) -> None: ...

    def begin_step(self, step: int) -> None:
        self.step = step

    def so_far(self) -> list[Event]:
        return []


def measure(strategy: str, pairs: int, found: str) -> None:
    """One rank: writes seconds of steps with and without recording, which take turns, into file ``found``."""
    mesh = init()
    world = World()
    config = merge(text_config.default(), {"parallel": {"strategy": strategy}}, "the benchmark")
    training = TextTraining(config, mesh)
    training.begin()
    times: dict[str, list[float]] = {"with": [], "without": []}
    with tempfile.TemporaryDirectory() as folder:
        trace_files.record(
            mesh.recorder, Path(folder), config.record.events, {"boot": "", "world_size": world.size}
        )
        for number in range(2 * (WARM_UP + pairs)):
            silent = number % 4 in (1, 2)  # A B B A: neither always follows the other
            mesh.recorder.__class__ = Silent if silent else Recorder
            world.barrier()
            began = time.perf_counter()
            training.step()
            seconds = world.slowest(time.perf_counter() - began)
            if number >= 2 * WARM_UP:
                times["without" if silent else "with"].append(seconds)
    mesh.recorder.__class__ = Recorder
    if world.rank == 0:
        Path(found).write_text(json.dumps(times))
    training.leave()


def main() -> int:
    parser = parser_of(__doc__, HERE)
    parser.add_argument("--pairs", type=int, default=PAIRS)
    wanted = parser.parse_args()
    began = time.monotonic()
    rows = []
    for strategy in STRATEGIES:
        with tempfile.TemporaryDirectory() as folder:
            found = Path(folder, "found.json")
            launch(measure, (strategy, wanted.pairs, str(found)), ranks=RANKS)
            rows.append(row(strategy, json.loads(found.read_text())))
    publish(rows, "cost", wanted.out, HERE, {"minutes": (time.monotonic() - began) / 60}, pages)
    return 0


def pages(results: Results) -> Pages:
    return one_table("cost", results)


def row(strategy: str, times: dict[str, list[float]]) -> dict[str, Any]:
    """One line of the table."""
    ratio = paired_ratio(times["with"], times["without"])
    return {
        "strategy": strategy,
        "pairs of steps": len(times["with"]),
        "step(ms)": round(1e3 * statistics.median(times["without"]), 1),
        "cost(%)": round(100 * (ratio.median - 1), 2),
        "quartiles(%)": f"{100 * (ratio.low - 1):+.1f} to {100 * (ratio.high - 1):+.1f}",
    }


if __name__ == "__main__":
    sys.exit(main())
