"""The scripts in examples/ do what they say, and what the library does."""

from __future__ import annotations

import importlib.util
from difflib import SequenceMatcher
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

import instep
from benchmarks.pages import write_between
from instep.mesh.mesh import Mesh
from tests.world import world

EXAMPLES = Path(__file__).parent.parent / "examples"
PAGE = EXAMPLES.parent / "docs" / "run.md"


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def trained(wrap, rank: int) -> list[torch.Tensor]:
    """The weights after three steps, from others on each rank."""
    torch.manual_seed(rank)
    module = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2))
    model = wrap(module)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(3):
        model(torch.randn(5, 4)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().clone() for p in module.parameters()]


@world(2, by="process")
def test_ddp_in_sixty_lines_trains_as_the_library_does(mesh: Mesh) -> None:
    short = example("ddp_in_sixty_lines")
    ours = trained(instep.DataParallel, mesh.rank)
    assert all(map(torch.equal, trained(short.DataParallel, mesh.rank), ours))
    assert short.main(steps=50) < 0.02
    torch.manual_seed(mesh.rank)
    with pytest.raises(ValueError, match="the ranks begin with different weights"):
        short.DataParallel(nn.Linear(2, 2), verify=True)


def test_the_sixty_lines_are_counted() -> None:
    lines = (EXAMPLES / "ddp_in_sixty_lines.py").read_text().split('"""', 2)[2].splitlines()
    code = [line for line in lines if line.strip() and not line.lstrip().startswith(("#", '"""'))]
    assert len(code) <= 60


def code(path: Path) -> list[str]:
    """Its lines, but for the docstring, in which the command is another one."""
    return path.read_text().split('"""\n', 1)[1].splitlines()


def changes(name: str, before: str, after: str) -> tuple[str, int]:
    """The lines that differ by more than their indentation, and how many of them are new."""
    old, new = code(EXAMPLES / before / name), code(EXAMPLES / after / name)
    same = SequenceMatcher(None, [x.strip() for x in old], [x.strip() for x in new], autojunk=False)
    hunks, num_new = [], 0
    for what, i, j, k, m in same.get_opcodes():
        if what != "equal":
            hunks.append("\n".join([f"-{x}" for x in old[i:j]] + [f"+{x}" for x in new[k:m]]))
            num_new += m - k
    return "```diff\n" + "\n\n".join(hunks) + "\n```", num_new


@pytest.mark.parametrize(
    ("name", "before", "after", "place", "most"),
    [
        ("gan.py", "ddp", "run", "changes", 7),
        ("language.py", "ddp", "run", "changes", 6),
        ("vision.py", "ddp", "run", "changes", 7),
        ("language.py", "run", "declared", "further changes", 1),
        ("gan.py", "run", "declared", "further changes", 4),
    ],
)
def test_the_changes_that_the_page_shows_are_those_of_the_files(name, before, after, place, most, tmp_path):
    shown, num_new = changes(name, before, after)
    assert num_new == most
    copy = tmp_path / "run.md"
    copy.write_text(PAGE.read_text())
    write_between(copy, f"{place} of {name}", shown)
    assert copy.read_text() == PAGE.read_text()
