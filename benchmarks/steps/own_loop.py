"""What a run costs a loop of one's own: a step of ``instep.Run`` beside one of plain ``DataParallel``.

python benchmarks/own_loop/run.py        writes results.json, and the table in README.md beside it
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from instep.bench import tables

HERE = Path(__file__).parent
COMMAND = "python benchmarks/own_loop/run.py"
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--widths", type=int, nargs="+", default=[512, 1024])
    parser.add_argument("--json", type=Path, default=HERE / "results.json")
    parser.add_argument("--readme", type=Path, default=HERE / "README.md")
    wanted = parser.parse_args(words)
    rows = [measure(launcher, width, wanted.steps) for width in wanted.widths for launcher in LAUNCHERS]
    made = tables.environment(COMMAND)
    note = f"Medians (and quartiles) of pairs of alternating steps. Made by `{COMMAND}` on {made['cores']} "
    note += f"cores ({made['cpu']}), torch {made['torch']}."
    tables.write_json(wanted.json, {"rows": rows}, command=COMMAND)
    tables.write_between(wanted.readme, "own loop table", f"{tables.markdown(rows)}\n\n{note}")
    print(tables.markdown(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
