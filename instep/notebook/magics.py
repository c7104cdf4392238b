"""The magics of ``%load_ext instep``: cells go to the ranks, as long as there are any.

A cell goes to all ranks, but for lines with a magic at its top, ``%sync`` say, which the kernel executes
first. So does a cell with another magic for cells, ``%%time`` say: what that executes goes to the ranks.
Cells that an editor executes unseen, to list variables, stay in the kernel.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell
from IPython.core.magic import Magics, cell_magic, line_magic, magics_class
from IPython.core.magic_arguments import argument, magic_arguments, parse_argstring
from IPython.display import Image, display

from instep.notebook.attach import attached
from instep.notebook.folding import parse_ranks
from instep.notebook.ranks import Ranks, prepare
from instep.timeline.analysis import analyse
from instep.timeline.step_chart import step_chart
from instep.timeline.style import png_of
from instep.timeline.trace_files import FOLDER, read_traces

IN_KERNEL = ("%", "!", "?")
RANK_LINE = re.compile(r"%%rank\s*(.*)")


@magics_class
class RankMagics(Magics):
    """The magics, and the ranks of this kernel, if there are any."""

    shell: InteractiveShell

    def __init__(self, shell: InteractiveShell) -> None:
        super().__init__(shell)
        self.ranks: Ranks | None = None
        self._is_seen = True  # the cell that is executed

    @line_magic
    @magic_arguments()
    @argument("-n", "--num-processes", type=int, default=2, help="ranks to start")
    @argument("--device", help="cuda, cuda:0 or cpu; by default a GPU per rank where there are any")
    @argument("--backend", help="nccl, shm or gloo; by default the fastest that works")
    @argument("--threads", type=int, default=1, help="threads of torch per rank")
    @argument(
        "--timeout",
        dest="timeout_s",
        type=float,
        default=60.0,
        help="seconds until a collective names who is missing",
    )
    def dist_init(self, line: str) -> None:
        """Start ranks, which execute the following cells."""
        if self.ranks is not None:
            raise UsageError(f"{self.ranks.size} ranks are running: %dist_shutdown ends them")
        args = vars(parse_argstring(self.dist_init, line))
        self.ranks = Ranks(args.pop("num_processes"), **args)
        pids = ", ".join(map(str, self.ranks.pids))
        print(f"{self.ranks.size} ranks (pids {pids}) execute the following cells; %%local: the kernel does")

    @line_magic
    def dist_status(self, line: str) -> None:
        """Show each rank's process, last cell, memory, last operation and line."""
        print(self._running().status())

    @line_magic
    def attach(self, line: str) -> None:
        """Show what a run of instep run or instep train is doing, or how it has ended: %attach runs/mine."""
        try:
            print("\n".join(attached(Path(line.strip()))))
        except ValueError as error:
            raise UsageError(f"%attach: {error}") from None

    @line_magic
    def dist_shutdown(self, line: str) -> None:
        """End all ranks."""
        ranks, self.ranks = self._running(), None
        pids = ranks.pids
        ranks.shutdown()
        print(f"{len(pids)} ranks have ended; cells are executed by the kernel again")

    @line_magic
    def sync(self, line: str) -> None:
        """Wait until all ranks have come to a barrier."""
        self._running().sync()

    @line_magic
    def compare(self, line: str) -> None:
        """Show whether an expression has the same bits on all ranks, and where not: %compare model."""
        print(self._running().compare(line))

    @line_magic
    @magic_arguments()
    @argument("names", nargs="+")
    @argument("-r", "--rank", type=int, default=0)
    def pull(self, line: str) -> None:
        """Copy variables of a rank into the kernel."""
        args = parse_argstring(self.pull, line)
        [rank] = self._ranks_of(str(args.rank))
        self.shell.push({name: self._running().pull(name, rank) for name in args.names})

    @line_magic
    @magic_arguments()
    @argument("names", nargs="+")
    @argument("-r", "--rank", default="all")
    def push(self, line: str) -> None:
        """Copy variables of the kernel to ranks, by default to all."""
        args = parse_argstring(self.push, line)
        for name in args.names:
            if name not in self.shell.user_ns:
                raise UsageError(f"%push: the kernel has no variable {name!r}; %%local cells make them")
            self._running().push(name, self.shell.user_ns[name], self._ranks_of(args.rank))

    @cell_magic
    def rank(self, line: str, cell: str) -> None:
        """Execute the cell on some ranks: %%rank [0], %%rank 1,3, %%rank 0-2."""
        if self._is_seen or line:
            self._running().run(cell, self._ranks_of(line or "all"), name=self._cell_name)
        else:
            self.shell.ex(cell)

    @cell_magic
    def trace(self, line: str, cell: str) -> None:
        """Draw the steps that the cell makes with a wrapped model: %%trace model.

        The picture is of the last step, and the lines say where the time of all steps went.
        """
        ranks = self._running()
        with TemporaryDirectory(prefix="instep-trace-") as folder:
            ranks.run(f"import instep\n_trace = instep.trace({line}, {folder!r})\n_trace.__enter__();")
            try:
                ranks.run(cell, name=self._cell_name)
            finally:
                ranks.run("_trace.__exit__(None, None, None);")
            traces = read_traces(Path(folder) / FOLDER)
            if not traces.steps:
                raise UsageError(f"%%trace: no step of {line} has ended: one ends with optimizer.step()")
            last = traces.steps[-1]
            display(Image(png_of(step_chart(traces.timeline(last), step=last))))
            found = analyse(traces)
        for label, text in found.lines():
            print(f"{label:<7}{text}")

    def to_ranks(self, lines: list[str]) -> list[str]:
        """The transformation of each cell, before IPython's own."""
        if lines and lines[0].rstrip() == "%%local":
            return lines[1:]
        if lines and (found := RANK_LINE.match(lines[0])):  # also "%%rank[0]"
            return [f"%%rank {found[1].strip()}\n", *lines[1:]]
        first = next((i for i, line in enumerate(lines) if not _is_of_kernel(line)), len(lines))
        rest = "".join(lines[first:])
        magics = [line.split()[0] for line in lines[:first] if line.strip()]
        has_ranks = self.ranks is not None or "%dist_init" in magics  # once the lines above the rest have run
        stays = "%dist_shutdown" in magics or any(word.startswith("%%") for word in magics)
        if not rest.strip() or not has_ranks or stays:
            return lines
        if "get_ipython()." in rest[:40] or rest.rstrip().endswith("?"):
            return lines
        return [*lines[:first], f"get_ipython().run_cell_magic('rank', '', {rest!r})\n"]

    to_ranks.has_side_effects = True  # type: ignore[attr-defined]  # not for the question whether a cell is complete

    def before_cell(self) -> None:
        self._is_seen = False

    def before_seen_cell(self, info: Any) -> None:
        self._is_seen = bool(info.store_history)

    @property
    def _cell_name(self) -> str:
        """With the number beside the cell; ``execution_count`` is one more from IPython 9 on."""
        return f"cell {len(self.shell.user_ns['In']) - 1}"

    def _running(self) -> Ranks:
        if self.ranks is None:
            raise UsageError("there are no ranks: %dist_init -n 2 starts two")
        return self.ranks

    def _ranks_of(self, text: str) -> Sequence[int]:
        try:
            return parse_ranks(text, self._running().size)
        except ValueError as error:
            raise UsageError(str(error)) from None


def _is_of_kernel(line: str) -> bool:
    return not line.strip() or line.lstrip().startswith((*IN_KERNEL, "#"))


def load(shell: InteractiveShell) -> None:
    """Register the magics with ``shell``, and load torch in the background."""
    magics = RankMagics(shell)
    shell.register_magics(magics)
    shell.input_transformers_cleanup.append(magics.to_ranks)
    shell.events.register("pre_execute", magics.before_cell)
    shell.events.register("pre_run_cell", magics.before_seen_cell)
    prepare()


def unload(shell: InteractiveShell) -> None:
    """End the ranks, and execute all cells in the kernel again."""
    magics = shell.magics_manager.registry["RankMagics"]
    if magics.ranks is not None:
        magics.dist_shutdown("")
    shell.input_transformers_cleanup.remove(magics.to_ranks)
    shell.events.unregister("pre_execute", magics.before_cell)
    shell.events.unregister("pre_run_cell", magics.before_seen_cell)
