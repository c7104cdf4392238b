"""Is a better cut proposed for a slow stage, and does it gain what is predicted? Measures before and after.

python benchmarks/pipeline/balance.py                         one to two minutes; writes into this folder
python benchmarks/pipeline/balance.py --samples 3 --out DIR   a trial, which leaves this folder alone

Two ranks, one of which takes three times as long: because its layers are three times as costly, or because
the rank computes three times slower; and for control, none is slow. Exit code 1 if the slow stage is not
named, no better cut is proposed, or one is where there is none.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.pipeline.balance_rank import measure
from instep.bench import tables
from instep.bench.worlds import slowest_rank
from instep.launch.launch import launch

HERE = Path(__file__).parent
COMMAND = "python benchmarks/pipeline/balance.py"
RANKS, LAYERS, TIMES = 2, 12, 3
NAMED = "stage 1 takes"
Found = dict[str, Any]


def main() -> int:
    wanted = arguments()
    began = time.monotonic()
    found = [measured(*case, wanted) for case in cases(wanted.hidden)]
    rows = [row_of(one) for one in found]
    tables.prepare(wanted.out, HERE)
    tables.show(rows, "a better cut")
    for one in found:
        print(f"{one['slow']}: {one['text']}")
    made = tables.environment(COMMAND)
    minutes = (time.monotonic() - began) / 60
    tables.write_json(wanted.out / "balance.json", {"minutes": minutes, "cases": found}, command=COMMAND)
    said = "\n".join(f'- {one["slow"]}: "{one["text"]}"' for one in found)
    text = f"{tables.markdown(rows)}\n\n{said}\n\n{tables.made_where(made, minutes)}"
    tables.write_between(wanted.out / "README.md", "a better cut", text)
    return 0 if all(map(is_right, found)) else 1


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--samples", type=int, default=20, help="pairs of steps, one of each cut")
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--hidden", type=int, default=512, help="of a layer that is not costly")
    parser.add_argument("--rows", type=int, default=64, help="of a micro-batch")
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--schedule", default="1f1b")
    parser.add_argument("--backend", default="shm", choices=["shm", "gloo"])
    parser.add_argument("--out", type=Path, default=HERE)
    return parser.parse_args()


def is_right(one: Found) -> bool:
    """The slow stage is named and gets fewer layers; where none is slow, the cut stays."""
    if one["slow"] == "none":
        return bool(one["proposed"] == one["cuts"])
    return NAMED in one["text"] and one["proposed"] > one["cuts"]


def cases(hidden: int) -> list[tuple[str, list[int], float]]:
    """What is slow, the hidden widths of the layers, and by how many times rank 1 is slowed."""
    half = LAYERS // 2
    return [
        ("layers", [hidden] * half + [TIMES * hidden] * half, 1.0),
        ("rank", [hidden] * LAYERS, float(TIMES)),
        ("none", [hidden] * LAYERS, 1.0),
    ]


def measured(slow: str, hidden: Sequence[int], slow_rank: float, wanted: argparse.Namespace) -> Found:
    """One case: what was proposed, and the seconds of the slowest rank in steps of both cuts, by turns."""
    sizes = {name: getattr(wanted, name) for name in ("samples", "width", "rows", "micro_batches")}
    task = {
        **sizes,
        "schedule": wanted.schedule,
        "backend": wanted.backend,
        "hidden": list(hidden),
        "slow_rank": slow_rank,
        "cuts": [LAYERS // RANKS],
    }
    with tempfile.TemporaryDirectory(prefix="instep-balance-") as folder:
        launch(measure, (task, folder), ranks=RANKS)
        ranks = [json.loads((Path(folder) / str(rank)).read_text()) for rank in range(RANKS)]
    both = {name: slowest_rank([rank[name] for rank in ranks]) for name in ("before", "after")}
    return {**ranks[0], **both, "slow": slow, "cuts": task["cuts"]}


def row_of(one: Found) -> dict[str, Any]:
    """The gains are shares of a step: predicted from the steps before the proposal, measured in pairs."""
    ratio = tables.paired_ratio(one["after"], one["before"])
    return {
        "three times slower": one["slow"],
        "cut": _listed(one["cuts"]),
        "proposed": _listed(one["proposed"]),
        "before (ms)": f"{median(one['before']) * 1e3:.1f}",
        "simulated (ms)": f"{one['simulated_s'] * 1e3:.1f}",
        "after, predicted (ms)": f"{one['expected_s'] * 1e3:.1f}",
        "after (ms)": f"{median(one['after']) * 1e3:.1f}",
        "gain, predicted": f"{1 - one['expected_s'] / one['step_s']:.1%}",
        "gain": f"{1 - ratio.median:.1%} ({1 - ratio.high:.1%} to {1 - ratio.low:.1%})",
    }


def _listed(cuts: Sequence[int]) -> str:
    return ", ".join(map(str, cuts))


if __name__ == "__main__":
    sys.exit(main())
