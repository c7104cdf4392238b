"""The README and the pages in docs/: examples run as they stand, flags exist, tables have their places."""

from __future__ import annotations

import contextlib
import doctest
import hashlib
import os
import re
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import instep
from instep.cli import show
from instep.launch.launch import launch
from instep.plan.step_time import TimePlan
from instep.recipes import text_config
from instep.run.toml import flatten

ROOT = Path(__file__).parent.parent
PAGES = {path.stem: path for path in (ROOT / "README.md", *(ROOT / "docs").glob("*.md"))}
EXAMPLE = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
FLAG = re.compile(r"--([a-z]+\.[a-z-]+)")  # one with a topic: others belong to other commands, too
# What most pages leave to the first example.
BEGUN = "mesh = instep.init()\nmodel = instep.DataParallel(model)\n"
STEPS = 2

PLAIN = [("README", "Use", ""), ("use", "The plain loop", "")]
SAVED = [
    ("README", "Use", BEGUN),
    ("checkpoint", "Checkpoint", BEGUN),
    ("shard", "Shard", ""),
    ("shard", "Muon", "instep.init()\nmodel = instep.fully_shard(model)\n"),
    ("use", "Data from a data set", BEGUN),
    ("tensor", "Tensor parallelism", ""),
]
SHARDS = """
paths = [f"{torch.rand(1).item()}.txt" for _ in range(12)]
for i, path in enumerate(paths):
    with open(path, "w") as file:
        file.writelines(f"{' '.join(map(str, row))}\\n" for row in torch.randn(i + 3, 9).tolist())
"""
AVERAGED = ("use", "An average of the weights", "")
DECLARED = [
    *SAVED,
    ("README", "Survive", ""),
    ("pipeline", "Pipeline", ""),
    ("experts", "Experts", ""),
    ("run", "A loop of your own", ""),
    ("run", "Arguments of a run", ""),
    ("use", "The declared loop", BEGUN),
    ("use", "The global batch", ""),
    ("use", "Samples in shards", SHARDS + BEGUN),
    AVERAGED,
]
OTHERS = [
    AVERAGED,
    ("use", "What you print and evaluate", BEGUN),
    ("timeline", "In a loop of your own", BEGUN),
    ("verify", "Your model", BEGUN),
    ("pipeline", "Where the time goes", ""),
    ("strategies", "Two older forms", "instep.init()\n"),
    ("strategies", "Fewer bytes", "instep.init()\n"),
    ("strategies", "The bucket size", "instep.init()\n"),
]
# Which the tests do not need.
FRAMEWORKS = {
    "transformers": ("huggingface", "Trainer", ""),
    "accelerate": ("huggingface", "accelerate", ""),
    "peft": ("huggingface", "peft", ""),
    "lightning": ("use", "Lightning", ""),
}
ALONE = ("strategies", "Threads", "")
CELLS = ("notebook", "In a program", "")
SHARED_MEMORY = ("shm", "Shared memory", "")


def examples(page: str) -> list[tuple[str, str]]:
    """Those of a page, each with the heading above it, that take ``STEPS`` steps instead of a thousand."""
    text = PAGES[page].read_text()
    found = []
    for match in EXAMPLE.finditer(text):
        heading = HEADING.findall(EXAMPLE.sub("", text[: match.start()]))[-1]
        found.append((heading, re.sub(r"\b1000\b", f"{STEPS}", match[1])))
    return found


def example(page: str, heading: str, begin: str, *, last: bool = False) -> str:
    """The first example below a heading, or the last, as a whole program."""
    return begin + [text for above, text in examples(page) if above == heading][-1 if last else 0]


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
        "held_out": [(x[i], y[i], i) for i in torch.arange(12).split(5)],
        "dataset": list(zip(x, y, strict=True)),
        "order": torch.randperm(len(x)),
    }


def run(text: str, directory: Path) -> None:
    """One rank's part; the hash of the weights that it ends with goes into a file of its own."""
    os.chdir(directory)
    place = "{RANK} of {WORLD_SIZE}".format_map(os.environ)  # which lightning takes out at its end
    names = program() | {"instep": instep}
    exec(compile(text, "<example>", "exec"), names)
    held = [instep.full_state_dict(names[kept]) for kept in ("model", "average") if kept in names]
    whole = b"".join(weights[name].numpy().tobytes() for weights in held for name in sorted(weights))
    Path(place).write_text(hashlib.sha256(whole).hexdigest())


def weights_of(text: str, directory: Path, ranks: int) -> str:
    """The hash of the weights that ``text`` ends with on so many ranks, which is the same on all."""
    directory.mkdir(exist_ok=True)
    launch(run, (text, directory), ranks=ranks)
    (found,) = {(directory / f"{rank} of {ranks}").read_text() for rank in range(ranks)}
    return found


@pytest.fixture(scope="module")
def untrained(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The hash of the weights that every example begins with."""
    return weights_of("", tmp_path_factory.mktemp("untrained"), ranks=1)


COURSE = [heading for heading, _ in examples("learn")]  # begins with the lines that the others import


def test_every_example_is_tried_here():
    tried = [
        place[:2] for place in (*PLAIN, *DECLARED, *OTHERS, *FRAMEWORKS.values(), ALONE, CELLS, SHARED_MEMORY)
    ]
    tried += [("learn", heading) for heading in COURSE]
    assert sorted(tried) == sorted((page, heading) for page in PAGES for heading, _ in examples(page))
    fenced = sum(path.read_text().count("```python") for path in PAGES.values())
    assert len(tried) == fenced


@pytest.mark.parametrize("place", PLAIN)
def test_the_plain_loop_ends_with_the_same_weights_on_every_rank(place, untrained, tmp_path):
    assert weights_of(example(*place), tmp_path, ranks=2) != untrained


@pytest.mark.parametrize("place", DECLARED)
def test_declared_steps_give_the_bits_of_one_rank_and_go_on_where_they_were_saved(place, untrained, tmp_path):
    text = example(*place, last=True)
    alone = weights_of(text, tmp_path / "alone", ranks=1)
    assert weights_of(text, tmp_path / "two", ranks=2) == alone != untrained
    if place in SAVED:
        saved = sorted((tmp_path / "two" / "checkpoints").iterdir())
        assert [path.name for path in saved] == [f"step-{step:08d}" for step in range(1, STEPS + 1)]
        assert weights_of(text, tmp_path / "two", ranks=1) == alone  # all of its steps were done already


@pytest.mark.parametrize("place", OTHERS)
def test_an_example_of_a_page_runs(place, tmp_path):
    weights_of(example(*place), tmp_path, ranks=2)


def run_chapter(text: str, directory: Path) -> None:
    """One rank's part; what it prints goes into a file of its own."""
    os.chdir(directory)
    sys.path.insert(0, str(directory))
    with Path(f"rank {os.environ['RANK']}").open("w") as out, contextlib.redirect_stdout(out):
        exec(compile(text, "<chapter>", "exec"), {})


def pattern(printed: str) -> list[str]:
    """The lines of ranks in ``printed``, with a number for each different number with a fraction."""
    found: dict[str, int] = {}
    lines = sorted(re.findall(r"^rank \d: .*$", printed, re.MULTILINE))
    return [re.sub(r"\d+\.\d+", lambda x: f"#{found.setdefault(x[0], len(found))}", line) for line in lines]


@pytest.mark.parametrize("heading", COURSE[1:])
def test_a_chapter_prints_what_its_page_shows_with_the_same_numbers_equal(heading, tmp_path):
    (tmp_path / "start.py").write_text(example("learn", COURSE[0], ""))
    launch(run_chapter, (example("learn", heading, ""), tmp_path), ranks=2)
    printed = "".join((tmp_path / f"rank {rank}").read_text() for rank in range(2))
    shown = PAGES["learn"].read_text().partition(f"## {heading}\n")[2].partition("\n## ")[0]
    assert pattern(printed) == pattern(EXAMPLE.sub("", shown)) != []


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_the_example_of_a_framework_runs_where_it_is_installed(framework, tmp_path):
    if find_spec(framework) is None:  # which imports nothing: lightning leaves a variable in the environment
        pytest.skip(f"{framework} is not installed")
    text = example(*FRAMEWORKS[framework])
    trained = weights_of(text, tmp_path / "two", ranks=2)
    if framework == "peft":  # a declared loop
        assert weights_of(text, tmp_path / "alone", ranks=1) == trained


def test_threads_are_of_one_process(untrained, tmp_path):
    assert weights_of(example(*ALONE), tmp_path, ranks=1) != untrained


def test_a_program_executes_cells_on_ranks():
    exec(example(*CELLS), {"__name__": "__main__"})


def test_shared_memory_is_a_backend_of_torch(tmp_path):
    """Where ranks meet is in the environment that torchrun makes; this one has it not."""
    meet = f"init_method='file://{tmp_path}/meet', rank=int(os.environ['RANK']), world_size=2"
    text = example(*SHARED_MEMORY).replace('init_process_group("shm")', f'init_process_group("shm", {meet})')
    check = "ones = torch.ones(3)\ndist.all_reduce(ones)\nassert ones.tolist() == [2, 2, 2]\n"
    weights_of(f"import os\n{text}{check}dist.destroy_process_group()\n", tmp_path, ranks=2)


def test_every_flag_of_training_is_on_its_page_and_every_flag_on_a_page_is_one():
    settings = {name.replace("_", "-") for name, _, _ in flatten(text_config.default())} | {"model.preset"}
    told = PAGES["command"].read_text()
    assert [name for name in sorted(settings) if f"`--{name}`" not in told] == []
    settings |= {name.replace("_", "-") for name, _, _ in flatten(TimePlan())}
    for path in PAGES.values():
        shown = {name.replace(".no-", ".") for name in FLAG.findall(path.read_text())}
        assert shown <= settings, path.name


def test_every_file_that_the_page_of_the_architecture_names_is_there():
    named = set(re.findall(r"[a-z_0-9]+(?:/[a-z_0-9]+)+\.py", PAGES["architecture"].read_text()))
    assert named
    assert {
        name for name in named if not (ROOT / "instep" / name).exists() and not (ROOT / name).exists()
    } == set()


@pytest.mark.parametrize("page", PAGES)
def test_a_page_has_no_merge_conflict(page):  # the map of the architecture had one
    assert not re.search(r"^(<{7}|={7}$|>{7})", PAGES[page].read_text(), re.MULTILINE)


def test_every_file_that_the_page_of_mechanisms_names_is_there():
    text = PAGES["mechanisms"].read_text()
    for name in set(re.findall(r"`([a-z_0-9]+/(?:[a-z_0-9]+\.py)?)`", text)):
        assert (ROOT / "instep" / name).exists() or (ROOT / name).exists(), name
    for page, anchor in re.findall(r"\(([a-z]+)\.md#([a-z-]+)\)", text):
        headings = [
            re.sub("[^a-z -]", "", heading.lower()) for heading in HEADING.findall(PAGES[page].read_text())
        ]
        assert anchor.replace("-", " ") in headings, f"{page}.md#{anchor}"


def test_every_page_is_in_the_index_and_begins_with_what_it_answers():
    index = PAGES["index"].read_text()
    for path in (ROOT / "docs").glob("*.md"):
        assert path.stem == "index" or f"({path.name})" in index
        title, blank, answer = path.read_text().splitlines()[:3]
        assert title.startswith("# ") and not blank and answer[:1].isupper()


@pytest.mark.parametrize("page", ["placement", "strategies", "shm", "tensor", "timeline"])
def test_the_answers_of_a_page_of_concepts_are_right(page):
    text = PAGES[page].read_text()
    exercises, answers = text.split("## Exercises\n")[1].split("<details><summary>Answers</summary>\n")
    assert "> [!TIP]\n" in text
    assert exercises.count("\n1. ") == exercises.count("\n2. ") == exercises.count("\n3. ") == 1
    code = re.sub("^ +```", "", answers, flags=re.MULTILINE)
    test = doctest.DocTestParser().get_doctest(code, {}, page, None, None)
    assert doctest.DocTestRunner().run(test).failed == 0


@pytest.mark.parametrize("page", PAGES)
def test_what_a_page_shows_of_a_collective_is_printed(page):
    printed: list[str] = []
    for block in re.findall(r"^ *```console\n(.*?)^ *```", PAGES[page].read_text(), re.MULTILINE | re.DOTALL):
        for line in block.splitlines():
            if found := re.match(r" *\$ instep show (\S+) -n (\d+)", line):
                printed = list(show.lines(*show.chosen(found[1]), int(found[2])))
            elif "$ " in line:
                printed = []
            elif printed:
                assert line == "..." or line.strip() in [one.strip() for one in printed]


def test_the_page_of_the_api_has_every_public_name():
    made = re.findall("<!-- made at build: api (.*) -->", PAGES["api"].read_text())
    public = {*instep.__all__, *(f"errors.{name}" for name in instep.errors.__all__)}
    kinds = {name: getattr(instep.tensor, name) for name in instep.tensor.__all__}
    layers = {name for name, x in kinds.items() if isinstance(x, type) and issubclass(x, nn.Module)}
    public |= {f"tensor.{name}" for name, x in kinds.items() if callable(x)} - {f"tensor.{x}" for x in layers}
    public |= {f"expert.{name}" for name in instep.expert.__all__}
    folders = {"tensor", "expert"}
    assert public - {"__version__", "errors", *folders} <= {name for line in made for name in line.split()}
