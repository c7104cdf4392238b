"""What a run costs a loop of one's own: a step of ``instep.Run`` beside one of plain ``DataParallel``.

python benchmarks/steps/own_loop.py        a minute or two; writes own_loop.json, and the table in README.md
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.pages import README, Pages, Results, made, parser_of, prepare, save
from instep.bench import tables

HERE = Path(__file__).parent
COMMAND = "python benchmarks/steps/own_loop.py"
WARM_UP = 10  # steps
BIN = Path(sys.executable).parent
LAUNCHERS = {
    "instep run": [str(BIN / "instep"), "run", "-n", "2"],
    "torchrun": [str(BIN / "torchrun"), "--standalone", "--nproc-per-node", "2"],
}


def measure(launcher: str, width: int, steps: int) -> dict[str, Any]:
    """Medians and quartiles of pairs of steps, after some to warm up."""
    with tempfile.TemporaryDirectory() as folder:
        own = ["--steps", str(steps), "--width", str(width), "--out", folder]
        command = [*LAUNCHERS[launcher], str(HERE / "loop.py"), *own]
        subprocess.run(command, check=True, capture_output=True)
        pairs = json.loads((Path(folder) / "times.json").read_text())[WARM_UP:]
    ratio = tables.paired_ratio([run for run, _ in pairs], [plain for _, plain in pairs])
    run_ms, plain_ms = (median(its) * 1e3 for its in zip(*pairs, strict=True))
    return {
        "started by": f"`{launcher}`",
        "plain step (ms)": round(plain_ms, 1),
        "step of a run (ms)": round(run_ms, 1),
        "ratio": f"{ratio.median:.3f} ({ratio.low:.3f}-{ratio.high:.3f})",
    }


def main(words: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__, HERE)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--widths", type=int, nargs="+", default=[512, 1024])
    wanted = parser.parse_args(words)
    began = time.monotonic()
    rows = [measure(launcher, width, wanted.steps) for width in wanted.widths for launcher in LAUNCHERS]
    print(tables.markdown(rows))
    prepare(wanted.out, HERE)
    results = {"minutes": (time.monotonic() - began) / 60, "rows": rows}
    save(wanted.out / "own_loop.json", results, pages, HERE, COMMAND)
    return 0


def pages(results: Results) -> Pages:
    note = f"Medians (and quartiles) of pairs of alternating steps. {made(results)}"
    return {README: {"own loop table": f"{tables.markdown(results['rows'])}\n\n{note}"}}


if __name__ == "__main__":
    sys.exit(main())
