"""Tables of what a run has found: python benchmarks/gpu/report.py DIR reads DIR/results.jsonl.

It writes DIR/tables.md, and the same into DIR/README.md if there is one, as in this folder.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

BEGIN, END = "<!-- gpu tables -->\n", "<!-- end of gpu tables -->"
AMISS = ("differs", "failed", "cut off")
BITS = ("one rank twice", "1 rank", "2 ranks", "3 ranks", "4 ranks")
LONGEST = 300  # of a text in a table
Finding = Mapping[str, Any]


def main() -> int:
    folder = Path(sys.argv[1])
    text = "\n\n".join(sections(list(read(folder / "results.jsonl"))))
    (folder / "tables.md").write_text(text + "\n")
    readme = folder / "README.md"
    if readme.exists():
        head, _, rest = readme.read_text().partition(BEGIN)
        readme.write_text(f"{head}{BEGIN}{text}\n{END}{rest.partition(END)[2]}")
    return 0


def read(path: Path) -> Iterator[dict[str, Any]]:
    """The findings; a line that a killed process has not ended is passed over."""
    for line in path.read_text().splitlines() if path.exists() else ():
        with suppress(ValueError):
            yield json.loads(line)


def sections(found: Sequence[Finding]) -> Iterator[str]:
    """What is amiss, the hashes in one table, and a table for each other part."""
    amiss = [f"{x['part']}: {x['what']}".removesuffix(": ") for x in found if x["verdict"] in AMISS]
    yield f"Not as expected: {'; '.join(amiss)}." if amiss else "All results are as expected."
    ends = [x for x in found if not x["what"]]  # how each part has ended
    told = [x for x in found if x["what"]]
    if any(x["part"] in BITS for x in told):
        yield "**Same bits**\n\n" + grid([x for x in told if x["part"] in BITS])
    for part in dict.fromkeys(x["part"] for x in told if x["part"] not in BITS):
        yield f"**{part.capitalize()}**\n\n" + table(x for x in told if x["part"] == part)
    yield "**Parts**\n\n" + table({**x, "what": x["part"]} for x in ends)


def grid(found: Sequence[Finding]) -> str:
    """A row for each variant, a column for each number of ranks."""
    cells: dict[str, dict[str, str]] = {}
    for x in found:
        column = cells.setdefault(x["what"], {})
        earlier = [column[x["part"]]] if x["part"] in column else []
        column[x["part"]] = ", ".join([*earlier, x.get("answer", x["verdict"])])
    columns = [part for part in BITS if any(part in row for row in cells.values())]
    return markdown(
        ["", *columns], ([what, *(row.get(x, "") for x in columns)] for what, row in cells.items())
    )


def table(found: Iterable[Finding]) -> str:
    """A row for each finding; lists, logs and whole hashes are in the file alone."""
    rows = list(found)
    keys = [key for x in rows for key, value in x.items() if not isinstance(value, list)]
    columns = [key for key in dict.fromkeys(keys) if key not in ("part", "what", "log")]
    return markdown(
        ["", *(column.replace("_", " ") for column in columns)],
        ([x["what"], *(cell(x.get(column)) for column in columns)] for x in rows),
    )


def cell(value: Any) -> str:
    """Three digits that count of a number, the first sixteen of a hash, a text in one line."""
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    text = " ".join(str(value).replace("|", "/").split())
    if len(text) == 64 and " " not in text:
        return text[:16]
    return text if len(text) <= LONGEST else f"... {text[-LONGEST:]}"  # of an error the end says most


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    sys.exit(main())
