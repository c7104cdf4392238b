"""Does following the advice save the predicted time? Plants causes, follows it, and measures the gain.

python benchmarks/advice/run.py                     all causes, some eight minutes; writes into this folder
python benchmarks/advice/run.py --only giant naive  these causes; the others stay as they were
python benchmarks/advice/run.py --again             writes the tables anew from results.json
python benchmarks/advice/run.py --pairs 1 --out DIR a trial, which leaves this folder alone

Causes over a link need Linux, root and iproute2, and are left out where there are no such.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.advice.causes import CAUSES, Cause
from benchmarks.advice.runs import Made, train
from benchmarks.pages import README, Pages, Results, made, parser_of, prepare, save
from instep.bench.hosts import Network, network, obstacle
from instep.bench.tables import environment, markdown, show

HERE = Path(__file__).parent
COMMAND = "python benchmarks/advice/run.py"
RATE = "1gbit"
GOOD = (2 / 3, 4 / 3)  # of what was predicted
Found = dict[str, Any]


def main() -> int:
    wanted = arguments()
    found = before(wanted.out)
    if not wanted.again:
        began = time.monotonic()
        chosen = [cause for cause in CAUSES if not wanted.only or cause.name in wanted.only]
        rows = {row["name"]: row for row in found.get("rows", [])} if wanted.only else {}
        rows |= {row["name"]: row for row in measured(chosen, wanted.pairs)}
        found = {
            "environment": environment(COMMAND),
            "minutes": (time.monotonic() - began) / 60,
            "pairs": wanted.pairs,
            "rows": [rows[cause.name] for cause in CAUSES if cause.name in rows],
        }
    write(found, wanted.out)
    return 0 if all(row["named"] for row in found["rows"]) else 1


def arguments() -> argparse.Namespace:
    parser = parser_of(__doc__, HERE)
    names = [cause.name for cause in CAUSES]
    parser.add_argument("--only", nargs="+", default=[], choices=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--pairs", type=int, default=3, help="of runs, one planted and one as advised")
    parser.add_argument("--again", action="store_true")
    return parser.parse_args()


def before(folder: Path) -> Found:
    """What was written before, if anything."""
    path = folder / "results.json"
    return json.loads(path.read_text()) if path.is_file() else {}


def measured(causes: Sequence[Cause], num_pairs: int) -> Iterator[Found]:
    """A row per cause, on hosts of its own where it needs some."""
    reason = obstacle() if any(cause.over_link for cause in causes) else None
    with tempfile.TemporaryDirectory(prefix="instep-advice-") as directory:
        folders = (Path(directory) / str(number) for number in count())
        healthy_s = {
            ranks: _healthy_s(ranks, causes, folders)
            for ranks in {cause.ranks for cause in causes if cause.sleeps}
        }
        for cause in causes:
            if cause.over_link and reason is not None:
                print(f"{cause.name}: left out: {reason}", file=sys.stderr)
                continue
            with hosts(cause) as net:
                row = one(cause, healthy_s.get(cause.ranks, 0.0), folders, net, num_pairs)
            print(f"{cause.name:<10} {row['line']}", file=sys.stderr)
            yield row


def _healthy_s(ranks: int, causes: Sequence[Cause], folders: Iterator[Path]) -> float:
    """A step on so many ranks in which nobody sleeps."""
    cause = next(cause for cause in causes if cause.ranks == ranks and cause.sleeps)
    return train(cause.remedy(""), next(folders), ranks, None).step_ms / 1e3


@contextmanager
def hosts(cause: Cause) -> Iterator[Network | None]:
    """The hosts of a cause that needs some."""
    with network(cause.ranks, rate=RATE) if cause.over_link else nullcontext() as made:
        yield made


def one(
    cause: Cause, healthy_s: float, folders: Iterator[Path], net: Network | None, num_pairs: int
) -> Found:
    """Plant it, read the advice, follow it, and compare: A B, B A, A B, ..."""
    planted = [train(cause.words(healthy_s), next(folders), cause.ranks, net)]
    first = planted[0].advice[0] if planted[0].advice else None
    mended: list[Made] = []
    if first is not None and cause.followed:
        remedy = cause.remedy(first["try_"])
        for pair in range(num_pairs):
            mended += [train(remedy, next(folders), cause.ranks, net)] if pair % 2 == 0 else []
            if pair:
                planted.append(train(cause.words(healthy_s), next(folders), cause.ranks, net))
            mended += [train(remedy, next(folders), cause.ranks, net)] if pair % 2 else []
    return row_of(cause, planted, mended)


def row_of(cause: Cause, planted: Sequence[Made], mended: Sequence[Made]) -> Found:
    """What was advised in the first run, and what came of it in all pairs."""
    first = planted[0].advice[0] if planted[0].advice else None
    row: Found = {
        "name": cause.name,
        "planted": cause.text,
        "line": first["text"] if first else "none",
        "how": first["how"] if first else "",
        "try": first["try_"] if first else "",
        "named": is_named(cause, planted[0]),
        "slow": planted[0].slow,
        "steps_ms": [made.step_ms for made in planted],
        "mended_ms": [made.step_ms for made in mended],
        "predicted": [made.advice[0]["gain_ms"] for made in planted if made.advice],
        "samples": [planted[0].samples, mended[0].samples] if mended else [planted[0].samples],
    }
    return row | (compared(row) if mended else {})


def is_named(cause: Cause, made: Made) -> bool:
    """The first line names the cause; where nothing is planted, there is none, and nobody is slow."""
    if not cause.advised:
        return not made.advice and made.slow is None
    if not made.advice:
        return False
    first = made.advice[0]
    return first["cause"] in cause.advised and all(text in first["text"] for text in cause.says)


def compared(row: Mapping[str, Any]) -> Found:
    """Gains per step of as many samples as in the planted run; ``ratio``: measured to predicted."""
    before_samples, after_samples = row["samples"]
    gains = [
        planted - mended * before_samples / after_samples
        for planted, mended in zip(row["steps_ms"], row["mended_ms"], strict=True)
    ]
    step_ms, predicted_ms, gain_ms = median(row["steps_ms"]), median(row["predicted"]), median(gains)
    ratio = gain_ms / predicted_ms
    return {
        "step_ms": step_ms,
        "predicted_ms": predicted_ms,
        "gains_ms": gains,
        "gain_ms": gain_ms,
        "ratio": ratio,
        "good": GOOD[0] <= ratio <= GOOD[1],
    }


def gains(found: Found) -> list[Found]:
    """The table of what was promised and what was got."""
    return [
        {
            "planted": row["planted"],
            "followed by": f"`{row['try']}`" if row["try"] else "taking the sleep out",
            "step(ms)": row["step_ms"],
            "predicted(ms)": row["predicted_ms"],
            "predicted": f"{row['predicted_ms'] / row['step_ms']:.0%}",
            "measured(ms)": row["gain_ms"],
            "measured": f"{row['gain_ms'] / row['step_ms']:.0%}",
            "least to most(ms)": f"{min(row['gains_ms']):.0f} to {max(row['gains_ms']):.0f}",
            "measured / predicted": row["ratio"],
            "within a third": row["good"],
        }
        for row in found["rows"]
        if "ratio" in row
    ]


def lines(found: Found) -> list[Found]:
    """The table of what was said."""
    return [
        {"planted": row["planted"], "first line of the advice": row["line"], "named": row["named"]}
        for row in found["rows"]
    ]


def brief(row: Found) -> Found:
    """A line of ``gains`` as docs/timeline.md has it."""
    names = ("planted", "followed by", "step(ms)", "predicted(ms)", "measured(ms)", "least to most(ms)")
    return {name: row[name] for name in (*names, "measured / predicted")}


def write(found: Found, folder: Path) -> None:
    """Results and tables into ``folder``."""
    prepare(folder, HERE)
    show(gains(found), "what was promised, and what was got")
    save(folder / "results.json", found, pages, HERE, COMMAND)


def pages(results: Results) -> Pages:
    found = dict(results)
    table = gains(found)
    within = sum(row["within a third"] for row in table)
    text = f"{within} of {len(table)} are within a third.\n\n{markdown(table)}\n\n{results['pairs']} pairs. "
    return {
        README: {"gains table": text + made(results), "lines table": markdown(lines(found))},
        "docs/timeline.md": {"advice table": markdown([brief(row) for row in table])},
    }


if __name__ == "__main__":
    sys.exit(main())
