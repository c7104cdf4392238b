"""The examples in the README run as they stand, in a program that has a model, data, and nothing else."""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import instep
from instep.mesh.launch import launch

README = Path(__file__).parent.parent / "README.md"
EXAMPLE = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
AS_ABOVE = "mesh = instep.init()\nmodel = instep.DataParallel(model)\n"  # what a section leaves to the first
STEPS = 2


def examples(section: str) -> list[str]:
    """Those of a section, that take ``STEPS`` steps instead of a thousand."""
    (text,) = re.findall(rf"^## {section}$(.*?)(?=^## |\Z)", README.read_text(), re.MULTILINE | re.DOTALL)
    return [example.replace(", 1000)", f", {STEPS})") for example in EXAMPLE.findall(text)]


def program() -> dict[str, Any]:
    """What a reader's program has before the example begins, the same on every rank."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 96), nn.Tanh(), nn.Linear(96, 96), nn.Tanh(), nn.Linear(96, 1))
    x, y = torch.randn(32 * STEPS, 8), torch.randn(32 * STEPS, 1)
    return {
        "torch": torch,
        "model": model,
        "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True),
        "loss_function": nn.functional.mse_loss,
        "x": x,
        "y": y,
        "loader": [(x[:4], y[:4]), (x[4:8], y[4:8])],
        "order": torch.randperm(len(x)),
    }


def run(text: str, directory: Path) -> None:
    """One rank's part; the hash of the weights that it ends with goes into a file of its own."""
    os.chdir(directory)
    names = program() | {"instep": instep}
    exec(compile(text, str(README), "exec"), names)
    weights = instep.full_state_dict(names["model"])
    whole = b"".join(weights[name].numpy().tobytes() for name in sorted(weights))
    Path("{RANK} of {WORLD_SIZE}".format_map(os.environ)).write_text(hashlib.sha256(whole).hexdigest())


def weights_of(text: str, directory: Path, ranks: int) -> str:
    """The hash of the weights that ``text`` ends with on so many ranks, which is the same on all."""
    directory.mkdir(exist_ok=True)
    launch(run, (text, directory), ranks=ranks)
    (found,) = {(directory / f"{rank} of {ranks}").read_text() for rank in range(ranks)}
    return found


def test_every_example_is_tried_here():
    tried = [*examples("Use"), *examples("Fast on one host"), *examples("Where the time goes")]
    tried += [*examples("Strategies"), *examples("Sharding"), *examples("When something is wrong")]
    assert len(tried) == len(EXAMPLE.findall(README.read_text())) == 7


def test_the_plain_loop_ends_with_the_same_weights_on_every_rank(tmp_path):
    plain, _ = examples("Use")
    assert weights_of(plain, tmp_path, ranks=2) != weights_of("", tmp_path, ranks=1)


@pytest.mark.parametrize(("section", "begin"), [("Use", AS_ABOVE), ("Sharding", "")])
def test_declared_steps_give_the_bits_of_one_rank_and_go_on_where_they_were_saved(section, begin, tmp_path):
    text = begin + examples(section)[-1]
    alone = weights_of(text, tmp_path / "alone", ranks=1)
    assert weights_of(text, tmp_path / "two", ranks=2) == alone
    saved = sorted((tmp_path / "two" / "checkpoints").iterdir())
    assert [path.name for path in saved] == [f"step-{step:08d}" for step in range(1, STEPS + 1)]
    assert weights_of(text, tmp_path / "two", ranks=1) == alone  # all of its steps were done already


@pytest.mark.parametrize("section", ["Where the time goes", "When something is wrong"])
def test_an_example_that_goes_on_from_the_first_runs(section, tmp_path):
    (text,) = examples(section)
    weights_of(AS_ABOVE + text, tmp_path, ranks=2)


def test_the_older_forms_run(tmp_path):
    (text,) = examples("Strategies")
    weights_of(f"instep.init()\n{text}", tmp_path, ranks=2)


def test_shared_memory_is_a_backend_of_torch(tmp_path):
    """Where ranks meet is in the environment that torchrun makes; this one has it not."""
    (text,) = examples("Fast on one host")
    meet = f"init_method='file://{tmp_path}/meet', rank=int(os.environ['RANK']), world_size=2"
    begin = "import os\n" + text.replace('init_process_group("shm")', f'init_process_group("shm", {meet})')
    check = "ones = torch.ones(3)\ndist.all_reduce(ones)\nassert ones.tolist() == [2, 2, 2]\n"
    weights_of(f"{begin}{check}dist.destroy_process_group()\n", tmp_path, ranks=2)
