"""Ranks in a notebook: instep beside nbdistributed, ipyparallel and accelerate's notebook_launcher.

python benchmarks/notebook/run.py        writes results.json, and the tables in README.md beside it

Each tool starts two ranks from the cells of a real Jupyter kernel. It needs the extra ``notebook``. A tool
that is not installed in the same environment is left out, and its column says so.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any

import psutil
from jupyter_client.manager import KernelManager

from benchmarks.pages import README, Pages, Results, made, parser_of, prepare, save
from instep.bench import tables

HERE = Path(__file__).parent
COMMAND = "python benchmarks/notebook/run.py"
NUM_CELLS = 30
PATIENCE_S = 60.0  # for a start, and for a cell
END_S = 10.0  # for processes to end
MARK = "NOTEBOOK_BENCHMARK"  # a variable of all processes that come from one kernel
ABSENT, NO = "not installed", "no"

LAUNCHED = """
def body():
    import os
    rank = int(os.environ["RANK"])
{}
notebook_launcher(body, (), num_processes=2, mixed_precision="no", master_addr="127.0.0.1", use_port="0")
"""


def said(word: str) -> str:
    """A cell that prints ``word`` and the rank in one piece, which lines of other ranks cannot cut."""
    return f"print('{word} %d\\n' % rank, end='', flush=True)"


def launched(code: str) -> str:
    return LAUNCHED.format("\n".join(f"    {line}" for line in code.splitlines()))


@dataclass(frozen=True)
class Tool:
    """How cells load it, start ranks, execute ``each`` cell on all ranks, and stop it."""

    name: str
    package: str
    load: str
    start: str
    stop: str
    each: Callable[[str], str] = lambda code: code


TOOLS = (
    Tool("instep", "instep", "%load_ext instep", "%dist_init -n 2", "%dist_shutdown"),
    Tool(
        "nbdistributed",
        "nbdistributed",
        "%load_ext nbdistributed",
        "%dist_init --num-processes 2",
        "%dist_shutdown",
    ),
    Tool(
        "ipyparallel",
        "ipyparallel",
        "import ipyparallel",
        "cluster = ipyparallel.Cluster(n=2)\nclient = cluster.start_and_connect_sync(activate=True)\n"
        "client[:].scatter('rank', range(2), flatten=True, block=True)",
        "cluster.stop_cluster_sync()",
        each=lambda code: f"%%px\n{code}",
    ),
    Tool(
        "notebook_launcher",
        "accelerate",
        "from accelerate import notebook_launcher",
        "",
        "",
        each=launched,
    ),
)


class Kernel:
    """A Jupyter kernel; ``processes`` are those that come from it, whoever has adopted them since."""

    def __init__(self) -> None:
        self.mark = uuid.uuid4().hex
        self.manager = KernelManager(kernel_name="python3")
        self.manager.kernel_spec.argv[0] = sys.executable
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])  # as if activated
        self.manager.start_kernel(env={**os.environ, MARK: self.mark, "PATH": path}, cwd=HERE)
        self.client = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=PATIENCE_S)

    def run(self, cell: str, *, interrupt_after: str = "") -> tuple[str, float]:
        """What the cell has shown, and its seconds: since the interrupt, if it was interrupted.

        Raises:
            TimeoutError: the cell has not ended.
        """
        shown, began, self.first_s = "", time.perf_counter(), float("inf")

        def hook(message: dict[str, Any]) -> None:
            nonlocal shown, began, interrupt_after
            content = message["content"]
            piece = content.get("text", "") + "\n".join(content.get("traceback", []))
            piece += content.get("data", {}).get("text/plain", "")
            shown += piece
            if piece.strip():
                self.first_s = min(self.first_s, time.perf_counter() - began)
            if interrupt_after and interrupt_after in shown:
                interrupt_after = ""
                began = time.perf_counter()
                self.manager.interrupt_kernel()

        self.client.execute_interactive(cell, timeout=PATIENCE_S, output_hook=hook)
        return re.sub(r"\x1b\[[0-9;]*m", "", shown), time.perf_counter() - began

    def processes(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.environ().get(MARK) == self.mark and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def listening(self) -> set[str]:
        """The addresses at which its processes listen, but for those of the kernel itself."""
        found = set()
        for process in self.processes():
            if process.pid != self.manager.provisioner.pid:
                with suppress(psutil.Error):
                    found |= {x.laddr.ip for x in process.net_connections("inet") if x.status == "LISTEN"}
        return found

    def close(self) -> None:
        self.client.stop_channels()
        with suppress(Exception):
            self.manager.shutdown_kernel(now=True)
        for process in self.processes():
            with suppress(psutil.Error):
                process.kill()


def start(tool: Tool) -> tuple[Kernel, dict[str, float]]:
    """A kernel with ranks that have executed a cell with torch, and the seconds that it took."""
    kernel = Kernel()
    try:
        _, load_s = kernel.run(tool.load)
        return kernel, {"load_s": load_s, "start_s": started(tool, kernel)}
    except BaseException:
        kernel.close()
        raise


def started(tool: Tool, kernel: Kernel) -> float:
    """Start ranks; the seconds until both have executed a cell, however often it has to be tried."""
    began = time.perf_counter()
    if tool.start:
        kernel.run(tool.start)
    while True:
        shown, _ = kernel.run(tool.each(f"import torch.distributed\n{said('ready')}"))
        if time.perf_counter() - began > PATIENCE_S or "ready 0" in shown:
            require_both(shown, "ready")
            return time.perf_counter() - began


def require_both(shown: str, word: str) -> None:
    if not all(f"{word} {rank}" in shown for rank in (0, 1)):
        raise RuntimeError(f"expected {word} 0 and {word} 1, got {shown[-400:]!r}")


def timed(tool: Tool) -> dict[str, float]:
    kernel, found = start(tool)
    try:
        cells = [kernel.run(tool.each("x = 1"))[1] for _ in range(NUM_CELLS if tool.start else 3)]
        if tool.stop:
            kernel.run(tool.stop)
        return {**found, "cell_ms": 1e3 * median(cells), "again_s": started(tool, kernel)}
    finally:
        kernel.close()


def tried(tool: Tool) -> dict[str, str]:
    """What happens in each of ``TRIALS``, in a few words; harmless ones share a kernel."""
    found: dict[str, str] = {}
    for trials in TRIALS:
        try:
            kernel, _ = start(tool)
        except (TimeoutError, RuntimeError) as error:
            found |= dict.fromkeys(trials, f"{NO}: it does not start ({type(error).__name__})")
            continue
        try:
            for name, trial in trials.items():
                try:
                    found[name] = trial(tool, kernel)
                except TimeoutError:
                    found[name] = f"{NO}: no answer in {PATIENCE_S:.0f} s"
        finally:
            kernel.close()
    return found


def keeps_state(tool: Tool, kernel: Kernel) -> str:
    kernel.run(tool.each("kept = rank"))
    shown, _ = kernel.run(tool.each(f"kept\n{said('kept')}"))
    return "yes" if "kept 0" in shown and "kept 1" in shown else f"{NO}: a variable of the last cell is gone"


def folds(tool: Tool, kernel: Kernel) -> str:
    shown, _ = kernel.run(tool.each("for i in range(3): print('alike %d\\n' % i, end='', flush=True)"))
    return {0: f"{NO}: not seen", 1: "yes"}.get(shown.count("alike 2"), f"{NO}: each rank's")


def streams(tool: Tool, kernel: Kernel) -> str:
    _, seconds = kernel.run(tool.each("import time\nprint('now', flush=True)\ntime.sleep(3)"))
    return "yes" if kernel.first_s < seconds - 1 else f"{NO}: at the end of the cell"


def interrupts(tool: Tool, kernel: Kernel) -> str:
    with suppress(RuntimeError):
        kernel.run(tool.each("kept = 7"))
    _, seconds = kernel.run(
        tool.each("import time\nprint('now', flush=True)\ntime.sleep(15)"), interrupt_after="now"
    )
    if seconds > 14.5:
        return f"{NO}: the cell ends by itself"
    again = tool.each("print('kept %d %s\\n' % (rank, 'kept' in globals()), end='', flush=True)")
    shown = kernel.run(again)[0] + kernel.run(again)[0]  # the first cell after a stop may be stopped, too
    state = "state kept" if "True" in shown else "state lost"
    return (
        f"yes, {state}" if all(f"kept {rank}" in shown for rank in (0, 1)) else f"{NO}: no ranks afterwards"
    )


def replaces(tool: Tool, kernel: Kernel) -> str:
    shown, _ = kernel.run(tool.each("import os\nif rank == 1: os.kill(os.getpid(), 9)"))
    named = "SIGKILL" in shown or "died" in shown.lower() or "exitcode" in shown
    try:
        again = tool.each(said("again"))
        require_both(kernel.run(again)[0] + kernel.run(again)[0], "again")
    except (TimeoutError, RuntimeError):
        return f"{NO}: no ranks afterwards" + ("" if named else ", and nothing names the rank")
    return f"yes{', named' if named else ', not named'}"


def listens(tool: Tool, kernel: Kernel) -> str:
    if not tool.stop:
        return "not tried: its processes end with the cell"
    kernel.run(tool.each("import torch"))
    found = kernel.listening()
    if not found:
        return "at no port"
    return "on all interfaces" if found & {"0.0.0.0", "::"} else "on loopback"


def stops(tool: Tool, kernel: Kernel) -> str:
    if not tool.stop:
        return "nothing to stop"
    kernel.run(tool.stop)
    until = time.monotonic() + END_S
    while (left := [one for one in kernel.processes() if is_rank(one, kernel)]) and time.monotonic() < until:
        time.sleep(0.1)
    return "yes" if not left else f"{NO}: {len(left)} processes left after {END_S:.0f} s"


def is_rank(process: psutil.Process, kernel: Kernel) -> bool:
    """Not the kernel, nor a child of it that serves the next start: a helper of multiprocessing."""
    with suppress(psutil.Error):
        is_helper = any(name in " ".join(process.cmdline()) for name in ("resource_tracker", "forkserver"))
        own = kernel.manager.provisioner.pid
        return process.pid != own and not (is_helper and process.ppid() == own)
    return False


def ends(tool: Tool, kernel: Kernel) -> str:
    os.kill(kernel.manager.provisioner.pid, signal.SIGKILL)
    until = time.monotonic() + END_S
    while (left := kernel.processes()) and time.monotonic() < until:
        time.sleep(0.1)
    return "yes" if not left else f"{NO}: {len(left)} processes left after {END_S:.0f} s"


TRIALS: tuple[dict[str, Callable[[Tool, Kernel], str]], ...] = (
    {
        "state is kept from cell to cell": keeps_state,
        "output appears while a cell runs": streams,
        "equal lines are shown once": folds,
        "ranks and what starts them listen": listens,
    },
    {"the stop button stops ranks in a sleep": interrupts},
    {"a killed rank is replaced": replaces},
    {"the stop magic or call ends all ranks": stops},
    {"no process is left when the kernel is killed": ends},
)
FIGURES = (
    ("load_s", "load the extension or module (s)", "{:.2f}"),
    ("start_s", "start, until both ranks have executed a cell with torch (s)", "{:.2f}"),
    ("again_s", "start again after a stop (s)", "{:.2f}"),
    ("cell_ms", "a cell (ms)", "{:,.1f}"),
)


def main(words: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__, HERE)
    parser.add_argument("--starts", type=int, default=5, help="of each tool, timed; 0: only the trials")
    wanted = parser.parse_args(words)
    began = time.monotonic()
    os.environ["IPYTHONDIR"] = os.environ.get("TMPDIR", "/tmp") + "/ipython-of-benchmark"
    versions, times, features = {}, {}, {}
    for tool in TOOLS:
        try:
            versions[tool.name] = version(tool.package)
        except PackageNotFoundError:
            versions[tool.name] = ABSENT
    there = [tool for tool in TOOLS if versions[tool.name] != ABSENT]
    for turn in range(wanted.starts):
        for tool in there[:: -1 if turn % 2 else 1]:
            try:
                times.setdefault(tool.name, []).append(timed(tool))
            except (TimeoutError, RuntimeError) as error:
                print(f"{tool.name}: {type(error).__name__}: {error}", file=sys.stderr)
    for tool in there:
        features[tool.name] = tried(tool)
        print(tool.name, features[tool.name], flush=True)
    prepare(wanted.out, HERE)
    about = {"minutes": (time.monotonic() - began) / 60, "load": os.getloadavg()[2]}
    results = {**about, "versions": versions, "times": times, "features": features}
    for text in pages(save(wanted.out / "results.json", results, pages, HERE, COMMAND))[README].values():
        print(text)
    return 0


def pages(results: Results) -> Pages:
    names = list(results["versions"])
    rows = []
    for figure, label, form in FIGURES:
        rows.append({"two ranks": label, **{name: _times(results, name, figure, form) for name in names}})
    about = "; ".join(f"{name} {it}" for name, it in results["versions"].items())
    note = f"Medians, and least to most; load of the machine {results['load']:.0f}. {about}. {made(results)}"
    speed = f"{tables.markdown(rows)}\n\n{note}"
    if not results["times"]:
        speed = f"Not measured on an idle machine yet (--starts 0). {about}. {made(results)}"
    trials = [
        {"tried": trial, **{name: results["features"].get(name, {}).get(trial, ABSENT) for name in names}}
        for trial in [name for trials in TRIALS for name in trials]
    ]
    return {README: {"speed table": speed, "trials table": tables.markdown(trials)}}


def _times(results: Results, name: str, figure: str, form: str) -> str:
    if results["versions"][name] == ABSENT:
        return ABSENT
    found = sorted(each[figure] for each in results["times"].get(name, []))
    if not found:
        return "does not start"
    low, high = (form.format(x) for x in (found[0], found[-1]))
    return f"{form.format(median(found))} ({low} to {high})"


if __name__ == "__main__":
    sys.exit(main())
