"""Files of results that say where they were made, and the tables that pages have of them.

Every script has a function ``pages`` from its results, as its file has them, to the tables of its README and
of docs/: a dictionary from page to name to Markdown. With it tables are written anew, and compared with their
pages, without measuring.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from instep.bench.tables import Row, markdown, show, write_json

ROOT = Path(__file__).parents[1]
README = "README.md"

Results = Mapping[str, Any]
Pages = Mapping[str, Mapping[str, str]]


def made(results: Results) -> str:
    """The line below a table: command, machine, date, commit and minutes of ``results``."""
    found = results["environment"]
    where = f"{found['cores']} cores ({found['cpu']}), torch {found['torch']}, {found['date']}"
    commit = f", commit `{found['commit']}`" if "commit" in found else ""
    took = f", in {results['minutes']:.2g} minutes" if "minutes" in results else ""
    return f"Made by `{found['command']}` on {where}{commit}{took}."


def parser_of(doc: str | None, home: Path) -> argparse.ArgumentParser:
    """The parser of a script in ``home``: its docstring as help, and ``--out``."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=home, metavar="FOLDER", help="for the results")
    return parser


def prepare(folder: Path, home: Path) -> None:
    """Make ``folder``; where it is not the benchmark's ``home``, with a copy of the README for the tables."""
    folder.mkdir(parents=True, exist_ok=True)
    if folder.resolve() != home:
        shutil.copy(home / README, folder)


def save(
    file: Path, results: Results, pages: Callable[[Results], Pages], home: Path, command: str
) -> Results:
    """Write ``results`` with their environment to ``file``, and their tables; returns what the file has.

    Tables go into the README beside ``file``, and from the benchmark's ``home`` also into docs/.
    """
    write_json(file, results, command=command)
    whole: Results = json.loads(file.read_text(encoding="utf-8"))
    write_pages(pages(whole), file.parent, home)
    return whole


def write_pages(pages: Pages, folder: Path, home: Path) -> None:
    for page, tables in pages.items():
        if page == README or folder.resolve() == home:
            for name, text in tables.items():
                write_between((folder if page == README else ROOT) / page, name, text)


def publish(
    rows: Sequence[Row],
    name: str,
    folder: Path,
    home: Path,
    about: Results,
    pages: Callable[[Results], Pages],
) -> None:
    """Print the ``rows`` of the script ``name``, and write them with ``about`` to ``folder``."""
    print(markdown(rows))
    prepare(folder, home)
    command = f"python benchmarks/{home.name}/{name}.py"
    save(folder / f"{name}.json", {**about, "rows": rows}, pages, home, command)


def publish_tables(
    found: Mapping[str, Sequence[Row]],
    folder: Path,
    home: Path,
    about: Results,
    pages: Callable[[Results], Pages],
) -> None:
    """Print the tables that a script ``run`` has ``found``, by name, and write them with ``about``."""
    for name, rows in found.items():
        show(rows, name)
    prepare(folder, home)
    save(folder / "results.json", {**about, **found}, pages, home, f"python benchmarks/{home.name}/run.py")


def tables(results: Results, *names: str) -> Pages:
    """Those of ``results`` with these ``names``, as tables of the README."""
    return {README: {name: f"{markdown(results[name])}\n\n{made(results)}" for name in names}}


def one_table(name: str, results: Results) -> Pages:
    """The rows of ``results`` as a table of the README."""
    return {README: {f"{name} table": f"{markdown(results['rows'])}\n\n{made(results)}"}}


def between(path: Path, name: str) -> str:
    """The text of a Markdown file between its lines ``<!-- name -->`` and ``<!-- end of name -->``.

    Raises:
        ValueError: there is not exactly one such place.
    """
    begin, end = f"<!-- {name} -->\n", f"\n<!-- end of {name} -->"
    _, *rest = path.read_text(encoding="utf-8").split(begin)
    if len(rest) != 1 or rest[0].count(end) != 1:
        raise ValueError(f"{path}: expected one line {begin.strip()!r} and after it one {end.strip()!r}")
    return rest[0].partition(end)[0]


def write_between(path: Path, name: str, text: str) -> None:
    """Put ``text`` in the place of what ``between`` returns."""
    old = f"<!-- {name} -->\n{between(path, name)}\n<!-- end of {name} -->"
    new = f"<!-- {name} -->\n{text}\n<!-- end of {name} -->"
    path.write_text(path.read_text(encoding="utf-8").replace(old, new), encoding="utf-8")
