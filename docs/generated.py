"""Parts of pages that are made when the site is built, in the places of `<!-- made at build: ... -->`."""

import ast
import difflib
import html
import inspect
import os
import pydoc
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CODE = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
BEGIN = "mesh = instep.init()\nmodel = instep.DataParallel(model)\n"
GAP = "…"  # in the place of a value


def api(names: str) -> str:
    """The docstrings of names of the package."""
    blocks = []
    for name in names.split():
        found = pydoc.locate(f"instep.{name}")
        kinds = {"module": inspect.ismodule, "class": inspect.isclass, "function": inspect.isroutine}
        kind = next((kind for kind, holds in kinds.items() if holds(found)), "data")
        members = {"class": "\n   :members:\n   :show-inheritance:", "data": "\n   :no-value:"}.get(kind, "")
        blocks.append(f"```{{eval-rst}}\n.. auto{kind}:: instep.{name}{members}\n```\n")
    return "\n".join(blocks)


def command_help(words: str) -> str:
    """What ``instep WORDS --help`` prints."""
    environment = os.environ | {"COLUMNS": "90", "NO_COLOR": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "instep", *words.split(), "--help"]
    text = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
    return f"```text\n{text.rstrip()}\n```"


def coming_from(_: str) -> str:
    """The table of the README, with its links from here."""
    rows = re.search(r"^\| coming from .*?\n\n", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    assert rows
    return rows[0].replace("](docs/", "](")


def program(place: str) -> list[str]:
    """The lines of a script, or of an example of a page as a whole program: ``docs/use.md#Threads``."""
    path, _, heading = place.partition("#")
    text = (ROOT / path).read_text()
    if not heading:
        return text.splitlines()
    heading, _, number = heading.partition("/")
    code = CODE.findall(text.partition(f"# {heading}\n")[2])[int(number or 0)]
    if "import instep" not in code:  # a page leaves these lines to the first example
        code = "import instep\n\n" + BEGIN * ("model = instep." not in code) + code
    return code.splitlines()


def diff(text: str) -> str:
    """A whole program, folded, and what changes in it but indentation: ``TITLE: BEFORE -> AFTER``."""
    title, _, places = text.partition(": ")
    before, after = (program(place) for place in places.split(" -> "))
    lines, keys = [], [[line.partition("  #")[0].strip() for line in text] for text in (before, after)]
    for what, i, j, k, m in difflib.SequenceMatcher(None, *keys, autojunk=False).get_opcodes():
        lines += [f"-{line}" for line in before[i:j] if what != "equal"]
        lines += [f"{'+ '[what == 'equal']}{line}" for line in after[k:m]]
    first = f'<details name="diff"><summary>{title}</summary>\n\n```diff'
    return "\n".join([first, *lines, "```\n\n</details>"])


def errors(_: str) -> str:
    """Every message of an error that the package raises, by class, in alphabetical order."""
    from instep import errors as kinds

    about = {name: (inspect.getdoc(getattr(kinds, name)) or "").partition("\n")[0] for name in kinds.__all__}
    about |= {
        "ValueError": "A mistake in one call: a value.",
        "TypeError": "A mistake in one call: a type.",
        "RuntimeError": "A call at a moment when it is not possible.",
    }
    found = sorted(messages(set(about)), key=lambda one: re.sub(r"\W", "", one[0]).lower())
    sections = [FILTER]
    for name, meaning in about.items():
        rows = [
            f'<li><code>{html.escape(text)}</code> <a href="../source/{path}.html#L-{line}">{path}</a></li>'
            for text, kind, path, line in found
            if kind == name
        ]
        if rows:
            sections.append(f'## {name}\n\n{meaning}\n\n<ul class="errors">\n{chr(10).join(rows)}\n</ul>\n')
    return "\n".join(sections)


def messages(kinds: set[str]) -> Iterator[tuple[str, str, str, int]]:
    """Text, class, file and line of each error that is made in the package."""
    for path in sorted((ROOT / "instep").rglob("*.py")):
        tree = ast.parse(path.read_text())
        constants = {
            statement.targets[0].id: statement.value
            for statement in tree.body
            if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name)
        }
        for node in ast.walk(tree):
            match node:
                case ast.Call(func=ast.Name(id=kind), args=[first, *_]) if kind in kinds:
                    text = " ".join(words(first, constants).split())
                    if len(re.findall("[a-z]{2,}", text)) > 1:
                        yield text, kind, str(path.relative_to(ROOT)), node.lineno


def words(node: ast.expr, constants: dict[str, ast.expr]) -> str:
    """The text of an expression, as far as it stands in the source."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=parts):
            return "".join(words(part, constants) for part in parts)
        case ast.FormattedValue(value=ast.Name() as name) | (ast.Name() as name) if name.id in constants:
            return words(constants[name.id], constants)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return words(left, constants) + words(right, constants)
    return GAP


FILTER = """
<input id="message" type="search" placeholder="paste the message here" aria-label="the message of the error">
<script>
document.getElementById("message").addEventListener("input", event => {
  const clean = text => text.toLowerCase().replace(/\\s+/g, " ").trim(), typed = clean(event.target.value);
  for (const row of document.querySelectorAll(".errors li")) {
    const text = clean(row.querySelector("code").textContent);
    const pieces = text.split("…").map(piece => piece.replace(/[.*+?^${}()|[\\]\\\\]/g, "\\\\$&"));
    row.hidden = !text.includes(typed) && !new RegExp(pieces.join(".*")).test(typed);
  }
});
</script>
"""

MADE: dict[str, Callable[[str], str]] = {
    "api": api,
    "help": command_help,
    "coming_from": coming_from,
    "diff": diff,
    "errors": errors,
}
