"""What holds for every test: the same random state, the signals of a terminal, and nothing is left behind."""

from __future__ import annotations

import gc
import importlib
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import settings

PATIENCE_S = 20.0
SHARED_MEMORY = Path("/dev/shm")
TESTS = Path(__file__).parent
WORKER = "PYTEST_XDIST_WORKER"  # in whose environment xdist says which one it is
# These stay until the session ends; the last one sees to what commands leave behind.
SERVERS = (b"multiprocessing.forkserver", b"multiprocessing.resource_tracker", b"tests.launched.ember")
# What ranks of tests import, all of which are forks of one process: a fifth of a second of each.
RANKS_IMPORT = (
    "pytest",
    "tests.rejoin",
    "tests.world",
    "tests.shard.trained",
    "tests.replicate.nets",
    "instep.run.script",
)
# torch sets the last one at the first step of any optimizer.
NOT_OURS = {"PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR"}


# No deadline for an example, which would be a test of the machine. The same examples in every run: what is
# found must be found by whoever broke it. Others with --hypothesis-seed=N.
settings.register_profile("instep", deadline=None, max_examples=50, derandomize=True)
settings.load_profile("instep")


@pytest.fixture(autouse=True)
def same_random_state() -> None:
    """Seed torch, with one thread as in a rank, where sums have the order that they have there."""
    if (torch := _loaded("torch")) is not None:
        # Not torch.manual_seed: it keeps the stack for each kind of accelerator that may come, a millisecond.
        torch.default_generator.manual_seed(0)
        if torch.cuda.is_initialized():
            torch.cuda.manual_seed_all(0)
        torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def signals_of_a_terminal() -> None:
    """Child processes receive the signals that a background shell or ``nohup`` makes pytest ignore.

    Children inherit ignored signals, but no handlers, so pytest gets handlers that do nothing.
    """
    for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, lambda *_: None)


@pytest.fixture(scope="module", autouse=True)
def little_to_collect() -> None:
    """What earlier files have left stays to the end, or each collection that is asked for looks at it again.

    Runs of scripts, and tests of what is let go, ask for hundreds.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Fail a test that leaves a process, thread, variable, shared memory segment or default group."""
    before = _Footprint.now()
    yield
    left = [*_groups(), *before.variables(), *before.threads(), *before.processes(), *before.segments()]
    if left:
        pytest.fail("the test left behind " + "; ".join(left), pytrace=False)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--fifth",
        type=lambda commit: int(commit, 16) % 5,
        metavar="COMMIT",
        help="run only a fifth of the selected tests, chosen by this hexadecimal number",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Let each worker of xdist begin to collect elsewhere, where it finds no others at the same work.

    In a fresh clone the assertions of every file are rewritten, which takes longer than all else before the
    tests: whoever comes to a file first leaves its bytecode for the others.

    GPUs are hidden, but from tests that are about them (``-m gpu``): ranks by default would each want one.
    """
    if "gpu" not in config.option.markexpr:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    worker = os.environ.get(WORKER, "")
    if worker and [Path(arg).resolve() for arg in config.args] == [TESTS]:
        folders = sorted(path for path in TESTS.iterdir() if any(path.glob("test_*.py")))
        first = int(worker.removeprefix("gw")) * len(folders) // int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
        config.args[:] = map(str, [*folders[first:], *folders[:first], *sorted(TESTS.glob("test_*.py"))])


@pytest.hookimpl(trylast=True)  # after -m
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The same order in all workers, wherever they began: each folder's files spread over the whole run.

    So tests that wait for processes, which are in few folders, run beside others that compute.
    """
    if config.option.fifth is not None:
        chosen = one_fifth((item.nodeid for item in items), config.option.fifth)
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in chosen])
        items[:] = [item for item in items if item.nodeid in chosen]
    if WORKER not in os.environ:
        return
    by_folder: dict[Path, list[Path]] = {}
    for path in sorted({item.path for item in items}):
        by_folder.setdefault(path.parent, []).append(path)
    place = {path: (i + 0.5) / len(paths) for paths in by_folder.values() for i, path in enumerate(paths)}
    items.sort(key=lambda item: (place[item.path], item.path))


def one_fifth(names: Iterable[str], number: int) -> set[str]:
    """Every fifth of ``names``: each file, and each parametrised test, is spread over all five fifths."""
    return set(sorted(names)[number::5])


def pytest_collection_finish() -> None:
    """Have the collector look at the tests' own objects only: torch and all test modules stay to the end.

    Tests of what is let go make it run, and it then looks at each of some million objects.
    """
    if WORKER in os.environ and _loaded("torch") is not None:
        importlib.import_module("torch._dynamo")  # the first optimizer would, and leave it to the collector
    gc.collect()
    gc.freeze()
    if (launching := _loaded("instep.launch.launch")) is not None:
        launching.PRELOAD = (*launching.PRELOAD, *RANKS_IMPORT)  # type: ignore[attr-defined]


def pytest_sessionfinish() -> None:
    if (pool := _loaded("tests.pool")) is not None:
        pool.shut_down()
    if (command := _loaded("tests.launched.command")) is not None:
        command.put_out()


def _loaded(name: str) -> ModuleType | None:
    """A module that some test has imported. Importing torch takes seconds, and pure tests do without."""
    return sys.modules.get(name)


@dataclass
class _Footprint:
    """What there was before a test; each method names what is new since, and takes it away if it can."""

    environ: dict[str, str]
    alive: set[threading.Thread]
    pids: set[int]
    shared: set[str]

    @staticmethod
    def now() -> _Footprint:
        return _Footprint(dict(os.environ), set(threading.enumerate()), _descendants(), _shared())

    def variables(self) -> list[str]:
        names = self.environ.keys() | os.environ.keys()
        changed = {name for name in names - NOT_OURS if self.environ.get(name) != os.environ.get(name)}
        for name in changed:
            os.environ.pop(name, None)
            if name in self.environ:
                os.environ[name] = self.environ[name]
        return [f"environment variable {name}" for name in sorted(changed)]

    def threads(self) -> list[str]:
        new = [thread for thread in set(threading.enumerate()) - self.alive if not thread.daemon]
        for thread in new:
            thread.join(PATIENCE_S)
        return [f"thread {thread.name!r}" for thread in new if thread.is_alive()]

    def processes(self) -> list[str]:
        stayed = {pid for pid in _descendants() - self.pids if not _ends(pid)}
        # Asked again: between fork and exec a server has the command line of its parent.
        return [f"process {pid} ({_command(pid)})" for pid in stayed & _descendants()]

    def segments(self) -> list[str]:
        # Semaphores of multiprocessing are those of a test beside this one: what has made them removes them.
        found = {name for name in _shared() - self.shared if not name.startswith("sem.mp-")}
        new = {name for name in found if not _belongs_to_strangers(SHARED_MEMORY / name)}
        return [f"shared memory {name}" for name in sorted(new)]


def _groups() -> list[str]:
    dist = _loaded("torch.distributed")
    if dist is None or not dist.is_initialized():
        return []
    dist.destroy_process_group()
    return ["torch's default process group"]


def _descendants() -> set[int]:
    """Processes that this one started, directly or not, without the pools' ranks and the servers."""
    pool = _loaded("tests.pool")
    ranks = pool.pids() if pool else set()
    found: set[int] = set()
    parents = [os.getpid()]
    while parents:
        children = _children(parents.pop()) - ranks
        parents += children
        found |= {pid for pid in children if not any(server in _command(pid) for server in SERVERS)}
    return found


def _children(pid: int) -> set[int]:
    children: set[int] = set()
    with suppress(OSError):  # before and after each test: pathlib's ways would take it milliseconds
        for task in os.listdir(f"/proc/{pid}/task"):
            with suppress(OSError), open(f"/proc/{pid}/task/{task}/children") as file:
                children.update(map(int, file.read().split()))
    return children


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").strip()
    except OSError:
        return b""


def _ends(pid: int) -> bool:
    """Whether the process is gone, or about to be."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([pidfd], [], [], PATIENCE_S)[0])
    finally:
        os.close(pidfd)


def _shared() -> set[str]:
    return set(os.listdir(SHARED_MEMORY)) if SHARED_MEMORY.is_dir() else set()


def _belongs_to_strangers(path: Path) -> bool:
    """Whether only processes outside this test session have it mapped: other sessions run on this host.

    Until its maker has mapped it no process has, and where it was let go before it was removed.
    """
    until = time.monotonic() + PATIENCE_S
    while path.exists():
        holders = set()
        for maps in Path("/proc").glob("[0-9]*/maps"):
            with suppress(OSError):
                if str(path) in maps.read_text():
                    holders.add(int(maps.parent.name))
        if holders or time.monotonic() > until:
            return bool(holders) and not holders & {os.getpid(), *_descendants()}
    return True
