"""The architecture, held by machine: which way imports point, what is pure, what is too long or banned.

Whoever moves a border moves it here, in sight. The lists of excused files only shrink.
"""

import ast
import re
import subprocess
import sys
from collections import Counter as Tally
from collections.abc import Iterable, Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = sorted((ROOT / "instep").rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))

# From the bottom up; folders of one row do not know each other. "" is the package itself, its public names.
ROWS = (
    ("errors", "regular_files", "native"),
    ("ring_buffer", "hook"),
    ("events",),
    ("memory",),
    ("launch",),
    ("net",),
    ("mesh",),
    ("comm", "shm", "rng"),
    ("reduce",),
    ("state", "models"),
    ("step", "data"),
    ("verify",),
    ("replicate", "shard"),
    ("pipeline", "tensor", "expert"),
    ("checkpoint", "timeline"),
    ("elastic", "plan"),
    ("record",),
    ("run",),
    ("",),
    ("recipes", "integrations"),
    ("bench", "notebook"),
    ("cli",),
    ("__main__",),
)
ROW = {folder: row for row, folders in enumerate(ROWS) for folder in folders}

# These import neither torch nor numpy, and nothing that does.
PURE = (
    "instep.errors",
    "instep.events",
    "instep.regular_files",
    "instep.ring_buffer",
    "instep.native.build",
    "instep.native.library",
    "instep.mesh.axes",
    "instep.launch.rank_exit",
    "instep.launch.rank_process",
    "instep.launch.launch_environment",
    "instep.launch.memory_file",
    "instep.launch.output",
    "instep.launch.process_memory",
    "instep.launch.process_state",
    "instep.comm.algorithms",
    "instep.comm.cost",
    "instep.net.messages",
    "instep.comm.play",
    "instep.reduce.tree",
    "instep.pipeline.actions",
    "instep.pipeline.check",
    "instep.pipeline.closed_forms",
    "instep.pipeline.communication",
    "instep.pipeline.cuts",
    "instep.pipeline.recorded",
    "instep.pipeline.schedules",
    "instep.pipeline.simulate",
    "instep.plan.memory_estimate",
    "instep.data.length_groups",
    "instep.data.order",
    "instep.data.sample_shards",
    "instep.models.config",
    "instep.checkpoint.manifest",
    "instep.shard.layout",
    "instep.timeline.advice",
    "instep.timeline.breakdown",
    "instep.timeline.bubbles",
    "instep.timeline.bucket_times",
    "instep.timeline.chrome_trace",
    "instep.timeline.intervals",
    "instep.timeline.profile_tables",
    "instep.timeline.profiler",
    "instep.timeline.report",
    "instep.timeline.predict",
    "instep.timeline.straggler",
    "instep.timeline.analysis",
    "instep.verify.gradient_report",
    "instep.record.compare",
    "instep.record.directory",
    "instep.record.jsonl",
    "instep.record.shape",
    "instep.record.step_lines",
    "instep.record.summary",
    "instep.run.health",
    "instep.run.settings",
    "instep.run.toml",
    "instep.run.flags",
    "instep.recipes.text_config",
    "instep.bench.bandwidth",
    "instep.bench.workloads",
    "instep.bench.options",
    "instep.cli.bench",
    "instep.cli.doctor",
    "instep.cli.compare",
    "instep.cli.convert",
    "instep.cli.main",
    "instep.cli.report",
    "instep.cli.show",
    "instep.cli.train",
)

# Lines of the Python files of each folder, docstrings included. They only shrink, or a capability was added.
BUDGET = {
    "": 960,
    "bench": 5800,
    "checkpoint": 4085,
    "cli": 1040,
    "comm": 1000,
    "data": 1195,
    "elastic": 2040,
    "integrations": 195,
    "launch": 1490,
    "mesh": 1155,
    "models": 300,
    "native": 250,
    "net": 2870,
    "pipeline": 4120,
    "plan": 95,
    "recipes": 860,
    "record": 1895,
    "reduce": 2710,
    "replicate": 1690,
    "rng": 410,
    "run": 5125,
    "shard": 4205,
    "shm": 2040,
    "state": 1730,
    "step": 2705,
    "timeline": 4970,
    "verify": 745,
}
MAX_FILE_LINES = 800
MAX_FUNCTION_LINES = 60  # below the docstring
TOO_LONG: set[str] = set()  # "path", or "path:function"
# torch, after --help and usage errors
LAZY_IMPORTS = {f"instep/cli/{word}.py" for word in ("bench", "convert", "doctor", "report", "run", "train")}

ANYWHERE = {
    r"pickle\.loads?\(": "bytes from elsewhere are never unpickled",
    r"\btorch\.load\(": "it unpickles: use safetensors",
    r"all_gather_object|broadcast_object_list|gather_object|scatter_object": "they unpickle what a peer sent",
    r"\b(TODO|FIXME|XXX|HACK)\b": "an open end belongs into an issue",
}
BELOW_RUN = {r"os\.(environ|getenv|putenv)": "parts are handed what they need"}
ENVIRONMENT_READERS = {
    "instep/launch/forkserver.py",
    "instep/launch/launch.py",
    "instep/launch/rank_process.py",
    "instep/launch/script_imports.py",
    "instep/mesh/deterministic.py",
    "instep/mesh/join.py",
    "instep/record/loggers.py",  # that of W&B
    "instep/native/build.py",  # a command, not a part: CC says which compiler
}
ENVIRONMENT_WRITERS = {
    "instep/cli/run.py",  # what the forkserver is to import
    "instep/launch/script_imports.py",
    "instep/cli/main.py",  # takes out what a notebook has put there
    "instep/launch/rank_process.py",
    "instep/launch/forkserver.py",
    "instep/mesh/deterministic.py",
    "instep/mesh/join.py",
    "instep/record/loggers.py",  # a setting that W&B reads from there alone
}
# To the store of a launcher others may write: it says who is there and who waits, and no path, ever.
STORE = r"\bstore\.(get|wait|check|compare_set|queue_pop)\("
STORE_READERS = {"instep/net/store.py", "instep/shm/handshake.py"}
WRITES = r"os\.(environ(\[.*\] *=[^=]|\.(pop|update|setdefault|clear)\()|putenv|unsetenv)|del os\.environ"
IN_TESTS = {r"time\.sleep\(": "wait for the thing itself, or inject the fault"}
NO_IDEA = {"utils.py", "util.py", "helpers.py", "common.py", "misc.py"}


# What the folder run/ must not know.
WHAT_IS_TRAINED = ("instep.models", "instep.data", "instep.recipes")
# Files of one name, and why: a command beside what it calls, or one idea in two folders, to be compared.
SAME_NAME = {
    "buckets.py": {"bench", "reduce"},
    "collectives.py": {"bench", "shm"},
    "compare.py": {"cli", "record"},
    "convert.py": {"checkpoint", "cli"},
    "doctor.py": {"bench", "cli"},
    "naive.py": {"comm", "replicate"},
    "pipeline.py": {"bench", "pipeline"},
    "reducer.py": {"replicate", "shard"},
    "report.py": {"cli", "timeline"},
    "run.py": {"cli", "run"},
}
# Ideas of their own that one neighbour uses. This list only shrinks.
ONE_USER = {
    "instep/bench/buckets_rank.py",
    "instep/bench/collectives_rank.py",
    "instep/bench/pipeline_rank.py",
    "instep/bench/memory_usage.py",
    "instep/checkpoint/saved_optimizers.py",
    "instep/cli/run.py",
    "instep/comm/butterfly.py",
    "instep/comm/naive.py",
    "instep/comm/ring.py",
    "instep/data/keyed_samples.py",
    "instep/data/length_groups.py",
    "instep/data/shuffled.py",
    "instep/elastic/failures.py",
    "instep/elastic/worker_pool.py",
    "instep/pipeline/connections.py",
    "instep/pipeline/first_values.py",
    "instep/pipeline/one_process.py",
    "instep/pipeline/stage_gradients.py",
    "instep/pipeline/split_backward.py",
    "instep/recipes/corpus.py",
    "instep/reduce/hierarchical_transport.py",
    "instep/replicate/bucketed.py",
    "instep/replicate/flat.py",
    "instep/replicate/replica.py",
    "instep/run/generation.py",
    "instep/run/health.py",
    "instep/run/nonfinite.py",
    "instep/run/peak_memory.py",
    "instep/run/loop.py",
    "instep/run/unregistered.py",
    "instep/run/replay.py",
    "instep/shard/matrices.py",
    "instep/shard/optimizer_state.py",
    "instep/shard/reduce_scatter.py",
    "instep/shard/reducer.py",
    "instep/shard/sharding.py",
    "instep/shm/collectives.py",
    "instep/shm/handshake.py",
    "instep/shm/point_to_point.py",
    "instep/step/gradients.py",
    "instep/step/input_digest.py",
    "instep/step/loss_scale.py",
    "instep/verify/batch.py",
}


def path_of(file: Path) -> str:
    return file.relative_to(ROOT).as_posix()


def module_of(file: Path) -> str:
    return ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


MODULES = {module_of(file): file for file in SOURCES}


@cache
def tree_of(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


@pytest.fixture(scope="module", autouse=True)
def forgotten() -> Iterator[None]:
    """The trees are a million objects, which the collector would look at in all tests after these."""
    yield
    tree_of.cache_clear()
    nodes_of.cache_clear()


def folder_of(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


@cache
def nodes_of(file: Path) -> list[ast.AST]:
    """All of its tree: to walk it takes longer than to look at each."""
    return [*ast.walk(tree_of(file))]


def imports(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """The modules of instep that the statements among ``nodes`` import."""
    for child in nodes:
        if isinstance(child, ast.Import):
            yield from (alias.name for alias in child.names if alias.name.split(".")[0] == "instep")
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, "relative import: write the whole path"
            if child.module and child.module.split(".")[0] == "instep":
                names = {f"{child.module}.{alias.name}" for alias in child.names}
                yield from names & set(MODULES) or {child.module}


def functions(file: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in nodes_of(file) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def imports_late(file: Path) -> bool:
    return any(
        isinstance(node, ast.Import | ast.ImportFrom)
        for function in functions(file)
        for node in ast.walk(function)
    )


def too_long(file: Path) -> Iterator[str]:
    if len(file.read_text().splitlines()) > MAX_FILE_LINES:
        yield path_of(file)
    for node in functions(file):
        first = node.body[1] if ast.get_docstring(node) and len(node.body) > 1 else node.body[0]
        if (node.end_lineno or 0) - first.lineno >= MAX_FUNCTION_LINES:
            yield f"{path_of(file)}:{node.name}"


def imported_at_start(file: Path) -> set[str]:
    """What importing ``file`` imports: not what stands in a function or is for the type checker."""
    later: list[ast.AST] = list(functions(file))
    for node in nodes_of(file):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            later.append(node)
    skipped = {id(node) for part in later for node in ast.walk(part)}
    return set(imports(node for node in nodes_of(file) if id(node) not in skipped))


def found(pattern: str, file: Path) -> Iterator[str]:
    """``path:line`` of every line that ``pattern`` is found in."""
    for number, line in enumerate(file.read_text().splitlines(), start=1):
        if re.search(pattern, line):
            yield f"{path_of(file)}:{number}: {line.strip()}"


def test_every_file_has_a_row():
    assert {folder_of(module) for module in MODULES} <= set(ROW)


def test_imports_point_down():
    for file in SOURCES:
        here = folder_of(module_of(file))
        for module in imports(nodes_of(file)):
            there = folder_of(module)
            assert here == there or ROW[there] < ROW[here], f"{path_of(file)} imports {module}"


def test_no_file_imports_itself_by_a_detour():
    graph = {module: imported_at_start(file) - {module} for module, file in MODULES.items()}
    TopologicalSorter(graph).prepare()  # raises CycleError, which shows the cycle


def test_only_recipes_know_a_model_or_data():
    for file in SOURCES:
        if folder_of(module_of(file)) == "run":
            found = {module for module in imports(nodes_of(file)) if module.startswith(WHAT_IS_TRAINED)}
            assert not found, f"{path_of(file)} imports {found}: a recipe brings what is trained"


def test_a_class_has_a_name_of_its_own():
    named: dict[str, set[str]] = {}
    for file in SOURCES:
        for node in ast.walk(tree_of(file)):
            if isinstance(node, ast.ClassDef):
                named.setdefault(node.name, set()).add(path_of(file))
    assert not {name: files for name, files in named.items() if len(files) > 1}


def test_a_file_has_a_name_of_its_own_unless_its_folder_is_the_difference():
    named: dict[str, set[str]] = {}
    for file in SOURCES:
        if file.name != "__init__.py":
            named.setdefault(file.name, set()).add(folder_of(module_of(file)))
    assert {name: folders for name, folders in named.items() if len(folders) > 1} == SAME_NAME


def test_a_file_with_one_user_is_an_idea_of_its_own():
    importers: dict[str, set[str]] = {}
    for module, file in MODULES.items():
        for imported in imports(nodes_of(file)):
            importers.setdefault(imported, set()).add(module)
    alone = {
        path_of(MODULES[module])
        for module, users in importers.items()
        if len(users) == 1 and folder_of(module) == folder_of(next(iter(users))) and "." in module
    }
    assert alone == ONE_USER


def test_imports_stand_at_the_top():
    assert {path_of(file) for file in SOURCES if imports_late(file)} == LAZY_IMPORTS


def test_pure_files_import_neither_torch_nor_numpy():
    code = f"""
import importlib, sys
for name in {PURE}:
    importlib.import_module(name)
    heavy = [heavy for heavy in ("torch", "numpy") if heavy in sys.modules]
    if heavy:
        sys.exit(f"{{name}} imports {{heavy}}")
"""
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr


def test_folders_keep_their_budget():
    lines = Tally[str]()
    for file in SOURCES:
        lines["" if file.parent.name == "instep" else file.parent.name] += len(file.read_text().splitlines())
    assert lines.keys() == BUDGET.keys()
    assert not {folder: count for folder, count in lines.items() if count > BUDGET[folder]}


def test_files_and_functions_are_short():
    assert {name for file in [*SOURCES, *TESTS] for name in too_long(file)} == TOO_LONG


def test_files_are_named_after_their_idea():
    assert not [path_of(file) for file in [*SOURCES, *TESTS] if file.name in NO_IDEA]


def test_every_module_says_in_one_sentence_what_it_is():
    for file in SOURCES:
        sentence = (ast.get_docstring(tree_of(file)) or "").split("\n\n")[0]
        assert sentence.endswith((".", ":", "?")), (
            f"{path_of(file)}: expected a docstring that begins with one"
        )


@pytest.mark.parametrize(("pattern", "why"), ANYWHERE.items())
def test_banned_anywhere(pattern, why):
    files = [file for file in [*SOURCES, *TESTS] if file != Path(__file__)]
    assert not [line for file in files for line in found(pattern, file)], why


@pytest.mark.parametrize(("pattern", "why"), BELOW_RUN.items())
def test_banned_below_run(pattern, why):
    below = [file for file in SOURCES if ROW[folder_of(module_of(file))] < ROW["run"]]
    files = [file for file in below if path_of(file) not in ENVIRONMENT_READERS]
    assert not [line for file in files for line in found(pattern, file)], why


def test_the_environment_is_written_in_one_place():
    files = [file for file in SOURCES if path_of(file) not in ENVIRONMENT_WRITERS]
    assert not [line for file in files for line in found(WRITES, file)]


def test_a_store_is_read_by_those_who_meet_in_it_alone():
    files = [file for file in SOURCES if path_of(file) not in STORE_READERS]
    assert not [line for file in files for line in found(STORE, file)]


@pytest.mark.parametrize(("pattern", "why"), IN_TESTS.items())
def test_banned_in_tests(pattern, why):
    files = [file for file in TESTS if file != Path(__file__)]
    assert not [line for file in files for line in found(pattern, file)], why
