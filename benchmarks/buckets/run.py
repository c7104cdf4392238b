"""Step time against bucket size, over sockets and over shared memory, beside what arithmetic predicts.

python benchmarks/buckets/run.py            writes results.json, results.csv, chart-gloo and chart-shm (SVG,
                                            PNG) and the tables in README.md beside it; some minutes
python benchmarks/buckets/run.py --quick    the same with a small model, in a minute, to see that it works
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from instep.bench import tables
from instep.bench.buckets import draw, measure, notes, title_of
from instep.bench.options import BucketsOptions
from instep.shm.futex import available

HERE = Path(__file__).parent
COMMAND = "python benchmarks/buckets/run.py"
SIZES = (1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)
BACKENDS = ("gloo", "shm") if available() else ("gloo",)


def block(runs: Sequence[Mapping[str, Any]], environment: Mapping[str, Any], minutes: float) -> str:
    """The tables and what they were made on."""
    parts = []
    for results in runs:
        parts += [f"**{title_of(results)}**", tables.markdown(results["rows"])]
        parts.append("\n".join(f"- {note}" for note in notes(results)))
    parts.append(
        f"Made by `{environment['command']}` on {environment['cores']} cores ({environment['cpu']}), torch "
        f"{environment['torch']}, {environment['date']}, in {minutes:g} minutes."
    )
    return "\n\n".join(parts)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args().quick
    began = time.monotonic()
    command = COMMAND + (" --quick" if quick else "")
    runs = []
    for backend in BACKENDS:
        options = (
            BucketsOptions(sizes=SIZES, params="5M", samples=4, backend=backend)
            if quick
            else BucketsOptions(sizes=SIZES, samples=20, rounds=2, backend=backend)
        )
        runs.append(measure(options))
        draw(runs[-1], HERE / f"chart-{backend}.svg")
    minutes = round((time.monotonic() - began) / 60, 1)
    tables.write_json(HERE / "results.json", {"minutes": minutes, "runs": runs}, command=command)
    tables.write_csv(
        HERE / "results.csv", [{"backend": r["backend"], **row} for r in runs for row in r["rows"]]
    )
    text = block(runs, tables.environment(command), minutes)
    tables.write_between(HERE / "README.md", "buckets", text)
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
