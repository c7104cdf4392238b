"""A user's script as the work of a supervised process: it runs from its top, as ``__main__``, and finds here
who has started it.
"""

from __future__ import annotations

import atexit
import os
import runpy
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from instep.checkpoint.contract import file_hash
from instep.elastic.rendezvous import ControlChannel, WorkerSpec
from instep.launch.launch_environment import detect
from instep.launch.rank_process import exit_now
from instep.mesh.join import refuse_init
from instep.run.membership import supervised
from instep.run.settings import ScriptCommand

NO_GROUP = (
    "Under `instep run` ranks form a group where the loop over run.steps begins, and a new one when a rank "
    "is lost: take init_process_group() out of the script, and use run.mesh"
)
RESERVED = {3: "a checkpoint was rejected", 75: "the run was preempted, and is to be resumed"}
OWN = "instep"
MAIN = ("__main__", "__mp_main__")  # the second one is multiprocessing's name for the first
OTHERS = {"site-packages", "dist-packages"}  # folders of modules that are not the script's own


@dataclass(frozen=True)
class ScriptCall:
    """What ``instep run`` was told: the script with its arguments, and the settings that hold whatever the
    script says, as tables.

    With ``module`` it is run as ``python -m MODULE`` runs it. With ``main``, a function of the module in
    ``path``, that is called with ``config``.
    """

    path: Path
    arguments: tuple[str, ...] = ()
    module: str = ""
    main: Callable[[Any], object] | None = None
    config: Any = None
    given: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Started:
    """Who has started this process, for the ``Run`` that the script makes."""

    channel: ControlChannel | None  # None: another launcher did, of whose ranks this is one
    call: ScriptCall
    loops: list[Any] = field(default_factory=list)  # ``RunLoop``: one at most


_started: dict[int, Started] = {}  # by process: a child that is forked has its parent's memory


def started() -> Started | None:
    """Who has started this process as a script; None if nobody has, in any of its threads."""
    return _started.get(os.getpid())


def work(spec: WorkerSpec, call: ScriptCall) -> None:
    """Run the script from its top, under whatever ranks the supervisor assigns to this process."""
    channel = supervised(spec)
    begun = _started[os.getpid()] = Started(channel, call)
    refuse_init(
        "under `instep run` ranks form a group in the loop over run.steps, and a new one when a rank is "
        "lost: make an instep.Run and use its mesh, or start the script with torchrun"
    )
    channel.heartbeat.enter("script")  # which may read for minutes before it comes to its loop
    code = 0
    try:
        execute(call)
    except SystemExit as end:
        code = code_of(end)
    except ValueError as error:
        if "env:// rendezvous" in str(error):
            raise ValueError(f"{error}. {NO_GROUP}") from error
        raise
    finally:
        atexit._run_exitfuncs()  # as at the end of any script; this process ends by os._exit
    for loop in begun.loops:
        if code and loop.left:
            print(
                f"rank {loop.rank} left the script {loop.left} with exit code {code}: the run ends without "
                "a checkpoint of that step",
                file=sys.stderr,
            )
        elif loop.left and not loop.rank:
            print(
                f"the script left its loop {loop.left}, without a summary or a checkpoint of that step: call "
                "run.finish() to end a run with both",
                file=sys.stderr,
            )
        if loop.left:
            code = code or 1
    if code in RESERVED and not any(loop.code == code for loop in begun.loops):
        if not any(loop.rank for loop in begun.loops):
            print(
                f"the script ended with exit code {code}, by which `instep run` says that {RESERVED[code]}: "
                "it ends with 1 instead",
                file=sys.stderr,
            )
        code = 1
    channel.heartbeat.enter("lost")
    channel.say("finished", code=code)
    exit_now(code)


def execute_here(call: ScriptCall) -> int:
    """Run the script in this process, which is a rank of another launcher's, or alone; its exit code."""
    if detect(os.environ).restart_count:  # a fault happens once, and this process cannot know which have
        call = replace(call, given={**call.given, "fault": ()})
    _started[os.getpid()] = Started(None, call)
    try:
        execute(call)
    except SystemExit as end:
        return code_of(end)
    return 0


def execute(call: ScriptCall) -> None:
    """As ``python SCRIPT ARGS...`` or ``python -m MODULE ARGS...``, in this process; or call its ``main``."""
    if call.main is not None:
        call.main(call.config)
        return
    sys.argv = [str(call.path), *call.arguments]
    if call.module:
        sys.path.insert(0, os.getcwd())
        runpy.run_module(call.module, run_name="__main__", alter_sys=True)
        return
    source = call.path.read_bytes()
    sys.path.insert(0, str(call.path.parent.resolve()))
    main = types.ModuleType("__main__")
    main.__file__ = str(call.path)
    sys.modules["__main__"] = main
    exec(compile(source, str(call.path), "exec", dont_inherit=True), main.__dict__)


def script_fields(path: Path | None) -> dict[str, Any]:
    """What of the code of a script the bits may depend on: its own, and that of modules from its folder."""
    if path is None:
        return {}
    fields = {"script.code": file_hash(path)}
    for name, file in sorted(_neighbours(path.parent.resolve())):
        if file != path:
            fields[f"script.code.{name}"] = file_hash(file)
    return fields


def script_command() -> ScriptCommand:
    """What this process runs, and what follows its name; "" where a function of it is called."""
    begun, path = started(), script_path()
    if path is None or (begun is not None and begun.call.main is not None):
        return ScriptCommand()
    module = "" if begun is None else begun.call.module
    return ScriptCommand(script=str(path), module=module, arguments=tuple(sys.argv[1:]))


def script_path() -> Path | None:
    """The file that this process runs; None in a notebook, or at a prompt."""
    begun = started()
    if begun is not None:
        return begun.call.path
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    return None if file is None else Path(file)


def _neighbours(folder: Path) -> Iterator[tuple[str, Path]]:
    """Modules that were imported from ``folder``, or from one below it."""
    begin = os.path.join(folder, "")
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        # Text first: there are some thousand modules, and a Path of each takes longer than all else here.
        if name in MAIN or not isinstance(file, str) or not file.startswith(begin):
            continue
        if name.partition(".")[0] == OWN:  # a recipe is beside how its command line is read
            continue
        if file.endswith(".py") and not OTHERS & set(Path(file).relative_to(folder).parts):
            yield name, Path(file)


def code_of(end: SystemExit) -> int:
    """The exit code; what is not a number is said, as Python does."""
    if end.code is None or isinstance(end.code, int):
        return end.code or 0
    print(end.code, file=sys.stderr)
    return 1
