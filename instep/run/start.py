"""``instep run`` from words to exit code: claim the folder that the script names, supervise its ranks."""

from __future__ import annotations

import os
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from instep.elastic.faults import parse_all
from instep.elastic.supervise import SuperviseOptions, supervise
from instep.launch.launch_environment import detect
from instep.launch.output import outlive_output
from instep.record.directory import FAULTS
from instep.record.jsonl import EVENTS, JsonLines
from instep.run.folder import Claimed, claim, how_to_go_on, say
from instep.run.script import ScriptCall, execute_here, work
from instep.run.settings import RunConfig


def launch_script(call: ScriptCall, config: RunConfig) -> int:
    """Run the script of ``call`` on ``config.ranks`` processes of this host until it is done; its exit code.

    In a world that another launcher has started it runs in this process.
    """
    outlive_output()
    faults = parse_all(config.fault)
    if detect(os.environ).source != "single":
        return execute_here(call)
    if asks_for_help(call):  # which is printed once
        config = replace(config, ranks=1, min_ranks=0)
    with ExitStack() as stack:
        admission = _Admission(call, stack)
        terms = SuperviseOptions(
            ranks=config.ranks,
            min_ranks=config.min_ranks,
            threads=config.parallel.threads,
            timeout_s=config.timeout_s,
            faults=faults,
            say=say,
            note=admission.note,
            admit=admission.admit,
        )
        path = call.path.resolve()
        try:
            code = supervise(work, (replace(call, path=path),), terms)
        except KeyboardInterrupt as error:
            if admission.path is None:
                raise
            raise KeyboardInterrupt(f"{error}, {how_to_go_on(admission.path)}") from error
        admission.require_in_place(code)
        return code


def asks_for_help(call: ScriptCall) -> bool:
    """Whether the script will probably print its help, and end."""
    return call.arguments[-1:] in (("-h",), ("--help",))


class _Admission:
    """The folder of the run, claimed when the first process says what the script calls it."""

    def __init__(self, call: ScriptCall, stack: ExitStack) -> None:
        self.path: Path | None = None
        self._call, self._stack = call, stack
        self._wanted: str | None = None
        self._claimed: Claimed | None = None
        self._events: list[dict[str, Any]] = []  # that are not written yet
        self._lines: JsonLines | None = None  # of ``faults.jsonl``, made when there is something to write

    def admit(self, message: dict[str, Any]) -> str:
        """What every process is told: the folder.

        Raises:
            ValueError: scripts of one run name different ones, or as ``claim``.
        """
        wanted = message["run_dir"]
        if self.path is not None:
            if wanted != self._wanted:
                raise ValueError(
                    f"one process of the script names the run directory {self._wanted}, another {wanted}: "
                    "choose a name without a time or process id in it, or pass --run-dir"
                )
            return str(self.path)
        if asks_for_help(self._call):
            raise ValueError(
                f"{self._call.arguments[-1]} is the last argument of the script, so only one process was "
                "started, to print the help, but the script trains: put another argument last"
            )
        self._wanted = wanted
        run_dir = None if wanted is None else Path(wanted)
        try:
            claimed = claim(run_dir, message["resume"])
        except ValueError as error:
            misplaced = [word for word in ("--resume", "--run-dir") if word in self._call.arguments]
            if not misplaced:
                raise
            raise ValueError(f"{error}. {misplaced[0]} belongs before the script") from None
        self._claimed = self._stack.enter_context(claimed)
        self.path = self._claimed.path
        if self._call.main is None:  # else no process goes to another directory meanwhile
            self.path = self.path.absolute()
        self._write()
        return str(self.path)

    def note(self, event: dict[str, Any]) -> None:
        """Write down what went wrong, and how it went on."""
        self._events.append(event)
        self._write()

    def _write(self) -> None:
        if self.path is None or not self._events:
            return
        with suppress(OSError, ValueError):  # nothing ends a run for want of the tale of its faults
            if self._lines is None:
                self._lines = JsonLines(self.path / FAULTS, before_step=0, shape=EVENTS)
                self._stack.callback(self._lines.close)
            while self._events:
                self._lines.write(**self._events.pop(0))

    def require_in_place(self, code: int) -> None:
        """OSError if the folder was removed meanwhile."""
        if self._claimed is not None:
            self._claimed.require_in_place()
        elif not code:  # else the script has said why it ended
            say("the script never iterated run.steps(): every process ran independently")
