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
    ("state",),
    ("step", "data"),
    ("verify",),
    ("replicate", "shard"),
    ("pipeline", "tensor", "expert", "nn"),
    ("checkpoint", "timeline", "models"),
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
PURE = [
    "errors", "events", "regular_files", "ring_buffer", "native.build", "native.library", "mesh.axes",
    "launch.rank_exit", "launch.rank_process", "launch.launch_environment", "launch.memory_file",
    "launch.output", "launch.process_memory", "launch.process_state", "comm.algorithms", "comm.cost",
    "net.messages", "comm.play", "reduce.tree", "replicate.auto_cap", "pipeline.actions", "pipeline.check",
    "pipeline.closed_forms", "pipeline.communication", "pipeline.cuts", "pipeline.recorded",
    "pipeline.schedules", "pipeline.simulate", "plan.cluster", "plan.memory_estimate", "plan.memory_table",
    "plan.model", "plan.run_check", "plan.search", "plan.step_table", "plan.step_time",
    "data.length_groups", "data.order",
    "data.sample_shards", "models.config", "checkpoint.manifest", "shard.layout", "timeline.advice",
    "timeline.breakdown", "timeline.bubbles", "timeline.bucket_times", "timeline.chrome_trace",
    "timeline.intervals", "timeline.palette", "timeline.profile_tables", "timeline.profiler",
    "timeline.report", "timeline.predict", "timeline.straggler", "timeline.analysis",
    "verify.gradient_report", "record.compare", "record.directory", "record.jsonl", "record.shape",
    "record.step_lines", "record.summary", "run.health", "run.settings", "run.toml", "run.flags",
    "recipes.text_config", "bench.bandwidth", "bench.workloads", "bench.options", "cli.bench", "cli.doctor",
    "cli.compare", "cli.convert", "cli.main", "cli.plan", "cli.report", "cli.show", "cli.train",
]  # fmt: skip

# Lines of the Python files of each folder, docstrings included. They only shrink, or a capability was added.
BUDGET = {
    "": 995,
    "bench": 5865,
    "checkpoint": 4090,
    "cli": 1410,
    "comm": 1070,
    "data": 1195,
    "elastic": 2040,
    "expert": 690,
    "integrations": 200,
    "launch": 1500,
    "mesh": 1170,
    "models": 325,
    "native": 250,
    "net": 2895,
    "nn": 930,
    "notebook": 1370,
    "pipeline": 4180,
    "plan": 2200,
    "recipes": 965,
    "record": 1840,
    "reduce": 2740,
    "replicate": 1835,
    "rng": 405,
    "run": 5180,
    "shard": 4190,
    "shm": 2030,
    "state": 2265,
    "step": 2735,
    "tensor": 1070,
    "timeline": 4915,
    "verify": 755,
}
MAX_FILE_LINES = 800
MAX_FUNCTION_LINES = 60  # below the docstring
TOO_LONG: set[str] = set()  # "path", or "path:function"
# torch, after --help and usage errors
LAZY_IMPORTS = {f"instep/cli/{word}.py" for word in ("bench", "convert", "doctor", "report", "run", "train")}

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
    "instep/notebook/rank.py",  # where the next world meets
    "instep/record/loggers.py",  # a setting that W&B reads from there alone
}
STORE_READERS = {"instep/net/store.py", "instep/shm/handshake.py"}
NO_IDEA = {"utils.py", "util.py", "helpers.py", "common.py", "misc.py"}


# What the folder run/ must not know.
WHAT_IS_TRAINED = ("instep.models", "instep.data", "instep.recipes")
# Files of one name, and why: a command beside what it calls, or one idea in two folders, to be compared.
SAME_NAME = {
    "buckets.py", "collectives.py", "compare.py", "convert.py", "doctor.py", "exchange.py", "layers.py",
    "naive.py", "pipeline.py", "plan.py", "reducer.py", "report.py", "run.py",
}  # fmt: skip


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
    assert {name for name, folders in named.items() if len(folders) > 1} == SAME_NAME


def test_imports_stand_at_the_top():
    assert {path_of(file) for file in SOURCES if imports_late(file)} == LAZY_IMPORTS


def test_pure_files_import_neither_torch_nor_numpy():
    code = f"""
import importlib, sys
for name in {PURE}:
    importlib.import_module(f"instep.{{name}}")
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


def but(files: Iterable[Path], excused: set[str]) -> list[Path]:
    return [file for file in files if path_of(file) not in excused]


BELOW_RUN = [file for file in SOURCES if ROW[folder_of(module_of(file))] < ROW["run"]]
EVERYWHERE = [file for file in [*SOURCES, *TESTS] if file != Path(__file__)]
WRITES = r"os\.(environ(\[.*\] *=[^=]|\.(pop|update|setdefault|clear)\()|putenv|unsetenv)|del os\.environ"
BANNED = [
    (EVERYWHERE, r"pickle\.loads?\(", "bytes from elsewhere are never unpickled"),
    (EVERYWHERE, r"\btorch\.load\(", "it unpickles: use safetensors"),
    (EVERYWHERE, r"(all_gather|gather)_object|broadcast_object_list|scatter_object", "they unpickle"),
    (EVERYWHERE, r"\b(TODO|FIXME|XXX|HACK)\b", "an open end belongs into an issue"),
    (but(BELOW_RUN, ENVIRONMENT_READERS), r"os\.(environ|getenv|putenv)", "parts are handed what they need"),
    (but(SOURCES, ENVIRONMENT_WRITERS), WRITES, "the environment is written in one place"),
    # To the store of a launcher others may write: it says who is there and who waits, and no path, ever.
    (but(SOURCES, STORE_READERS), r"\bstore\.(get|wait|check|compare_set|queue_pop)\(", "read by few"),
    (
        but(TESTS, {path_of(Path(__file__))}),
        r"time\.sleep\(",
        "wait for the thing itself, or inject the fault",
    ),
]


@pytest.mark.parametrize(("files", "pattern", "why"), BANNED, ids=[pattern for _, pattern, _ in BANNED])
def test_what_is_banned_is_nowhere(files, pattern, why):
    assert not [line for file in files for line in found(pattern, file)], why
