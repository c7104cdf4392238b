"""How much of a step is in no event: every strategy, 2 and 4 ranks, the default recipe.

python benchmarks/advice/account.py             some two minutes; writes account.json and the README's table
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, get_args, get_type_hints

from benchmarks.pages import Pages, Results, one_table, parser_of, publish
from instep.recipes.text_config import ParallelConfig
from instep.timeline.breakdown import Parts, parts
from instep.timeline.trace_files import FOLDER, read_traces

HERE = Path(__file__).parent
STRATEGIES = get_args(get_type_hints(ParallelConfig)["strategy"])
RANKS, WARM_UP = (2, 4), 3
QUIET = ("--eval.every", "0", "--eval.windows", "8", "--checkpoint.every", "0")


def main() -> int:
    parser = parser_of(__doc__, HERE)
    parser.add_argument("--steps", type=int, default=40)
    wanted = parser.parse_args()
    began = time.monotonic()
    rows = [row(strategy, ranks, wanted.steps) for strategy in STRATEGIES for ranks in RANKS]
    publish(rows, "account", wanted.out, HERE, {"minutes": (time.monotonic() - began) / 60}, pages)
    return 0 if all(row["least part(ms)"] >= 0 for row in rows) else 1


def pages(results: Results) -> Pages:
    return one_table("account", results)


def row(strategy: str, ranks: int, steps: int) -> dict[str, Any]:
    """One line of the table: of the rank that is worst."""
    print(f"  {strategy} on {ranks}", file=sys.stderr)
    with tempfile.TemporaryDirectory() as place:
        command = ["train", "-n", str(ranks), "--steps", str(steps), "--parallel.strategy", strategy]
        where = ["--run-dir", f"{place}/run"]
        subprocess.run(
            [sys.executable, "-m", "instep", *command, *where, *QUIET], check=True, capture_output=True
        )
        traces = read_traces(Path(place, "run", FOLDER)).traces
        found = [
            [_made(trace.events(step)) for step in list(trace.windows)[WARM_UP:]] for trace in traces.values()
        ]
    shares = [statistics.median(made.unattributed / made.wall for made in each) for each in found]
    every = [made for each in found for made in each]
    return {
        "strategy": strategy,
        "ranks": ranks,
        "step(ms)": round(1e3 * statistics.median(made.wall for made in every), 1),
        "unattributed(%)": round(100 * max(shares), 2),
        "least part(ms)": round(1e3 * min(min(made.totals().values()) for made in every), 3),
    }


def _made(events: Any) -> Parts:
    made = parts(events)
    assert made is not None
    return made


if __name__ == "__main__":
    sys.exit(main())
