"""``instep run``: a user's own script on ranks of this host, which are replaced when they die."""

from __future__ import annotations

import importlib.util
import os
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from instep import _HOMES as PUBLIC
from instep.cli.exit_codes import EXPECTED, exit_code, report_error
from instep.errors import InstepError
from instep.launch.launch_environment import detect
from instep.launch.rank_exit import RankFailed
from instep.run import flags
from instep.run.settings import RunConfig
from instep.run.toml import check

PROGRAM = "instep run"
OF_SCRIPTS = (InstepError, KeyboardInterrupt)  # which need no traceback; its author looks for all others
DESCRIPTION = """\
    instep run [OPTIONS] SCRIPT [ARGS ...]
    instep run [OPTIONS] -m MODULE [ARGS ...]

Run a training script that makes an instep.Run, on ranks of this host. A rank that dies is replaced, and the
step is retried with the same bits. Everything after SCRIPT or MODULE belongs to the script. A setting that
is given here overrides the script's instep.Run; the defaults shown are those of instep.Run.

Under torchrun, Slurm or mpirun the script needs no command: start it as it is.

Exit codes: 0 done, 1 failed, 2 usage, 3 checkpoint rejected, 75 stopped early (continue with --resume); else
the script's own code.\
"""


@dataclass(frozen=True, kw_only=True)
class RunFlags(flags.LaunchFlags, RunConfig):
    """The settings of a run, as flags."""

    preload: bool = False
    """Import what the script imports at its top once, before ranks are forked: ranks, and those that replace
    them, start sooner. Not for imports that start threads or CUDA."""


def main(args: Sequence[str]) -> int:
    """Run as ``args`` say; return the exit code."""
    speaks = True
    try:
        speaks = detect(os.environ).local_rank == 0
        end = flags.split(RunFlags(), args)
        own, rest = args[:end], args[end:]
        config = flags.parse(RunFlags(), own, program=PROGRAM, description=DESCRIPTION, quiet=not speaks)
        check(config)
        path, module, arguments = named(rest)
        preload(imports_of=path if config.preload else None)
        from instep.net.device import num_gpus
        from instep.run.script import ScriptCall
        from instep.run.start import launch_script

        given = flags.given(config, own)
        given.pop("preload", None)  # which is of this process alone
        call = ScriptCall(path=path, module=module, arguments=arguments, given=given)
        ranks = config.ranks or num_gpus() or len(os.sched_getaffinity(0))
        return launch_script(call, replace(config, ranks=ranks))
    except (Exception, KeyboardInterrupt) as error:
        expected = OF_SCRIPTS if _is_of_script(error) else EXPECTED
        return report_error(PROGRAM, error, expected) if speaks else exit_code(error)


def named(words: Sequence[str]) -> tuple[Path, str, tuple[str, ...]]:
    """The file, the module ("" for a script), and the arguments that ``words``, SCRIPT and the rest, name.

    Raises:
        ValueError: there is no such script or module.
    """
    words = words[1:] if words[:1] == ["--"] else words
    if words[:1] == ["-m"] and len(words) > 1:
        return _file_of(words[1]), words[1], tuple(words[2:])
    if not words or words[0] == "-m":
        raise ValueError("no script: expected a Python file, or -m and a module: instep run -n 4 train.py")
    path = Path(words[0])
    if not path.is_file():
        kind = "a folder" if path.is_dir() else "not there"
        raise ValueError(f"{path} is {kind}: expected a Python script: instep run -n 4 train.py")
    return path, "", tuple(words[1:])


def _file_of(module: str) -> Path:
    """The file that ``python -m MODULE`` runs."""
    sys.path.insert(0, os.getcwd())
    try:
        found = importlib.util.find_spec(module)
        if found is not None and found.submodule_search_locations is not None:
            found = importlib.util.find_spec(f"{module}.__main__")
    except ModuleNotFoundError as error:
        raise ValueError(f"-m {module}: {error}") from None
    finally:
        sys.path.pop(0)
    if found is None or found.origin is None or not found.origin.endswith(".py"):
        raise ValueError(f"-m {module}: expected a module, or a package with a __main__.py")
    return Path(found.origin)


def _is_of_script(error: BaseException) -> bool:
    """Whether it was raised while the script ran, in a rank or in this process."""
    if isinstance(error, RankFailed):
        return True
    frames = (frame.f_globals for frame, _ in traceback.walk_tb(error.__traceback__))
    script = "__main__", sys.argv[0]
    return any((names.get("__name__"), names.get("__file__")) == script for names in frames)


def preload(*modules: str, imports_of: Path | None = None) -> None:
    """Have the process that ranks are forked from load torch, what a script calls, ``modules``, and the
    imports at the top of a script.

    It does so while this one goes on. A process that takes another's place would else import for a second,
    while all others wait for it.
    """
    if detect(os.environ).source == "single":
        from instep.launch.launch import warm

        if imports_of is not None:
            os.environ["INSTEP_PRELOAD"] = str(imports_of.resolve())
            modules = (*modules, "instep.launch.script_imports")
        warm("instep.run.script", *dict.fromkeys(PUBLIC.values()), *modules)
        os.environ.pop("INSTEP_PRELOAD", None)
