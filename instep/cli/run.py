"""``instep run``: a user's own script on ranks of this host that may die."""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from instep import _HOMES as PUBLIC
from instep.cli.exit_codes import EXPECTED, USAGE, exit_code, report_error
from instep.errors import InstepError
from instep.launch.launch_environment import detect
from instep.launch.rank_exit import RankFailed

PROGRAM = "instep run"
OF_SCRIPTS = (InstepError, KeyboardInterrupt)  # which need no traceback; its author looks for all others
DESCRIPTION = """\
Run a training script of your own, which makes an instep.Run, on ranks of this host. When one dies another
takes its place, and the step is made again with the same bits. What follows SCRIPT is the script's own.

Under torchrun, Slurm or mpirun the script needs no command: start it as it is.

Exit codes: 0 done, 1 failed, 2 usage, 3 checkpoint rejected, 75 stopped before the end (--resume goes on);
else what the script ends with.\
"""


def parser() -> argparse.ArgumentParser:
    """The words of the command."""
    words = argparse.ArgumentParser(
        prog=PROGRAM,
        usage="%(prog)s [OPTIONS] SCRIPT [ARGS ...]",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_words(words)
    words.add_argument("script", type=Path, metavar="SCRIPT", help="a Python file")
    words.add_argument("arguments", nargs=argparse.REMAINDER, metavar="ARGS", help="the script's own")
    return words


def add_words(words: argparse.ArgumentParser) -> None:
    """Those that say how a script is run, whichever it is."""
    words.add_argument(
        "-n", "--ranks", type=int, default=0, metavar="N", help="processes; 0: one per GPU, or per core"
    )
    words.add_argument(
        "--run-dir", type=Path, metavar="DIR", help="the run's folder, whatever the script says"
    )
    words.add_argument("--resume", action="store_true", help="go on with the run that is in the folder")
    words.add_argument(
        "--min-ranks", type=int, default=0, metavar="N", help="go on with so few until a lost one is replaced"
    )
    words.add_argument(
        "--stop-after", type=int, default=0, metavar="STEP", help="end, to be resumed, after STEP"
    )
    words.add_argument(
        "--accept-contract",
        action="store_true",
        help="go on although script, arguments, libraries or processor have changed",
    )
    words.add_argument(
        "--check-every", type=int, default=0, metavar="N", help="make one step in N twice, and compare"
    )
    words.add_argument(
        "--leaves", action="store_true", help="for instep compare: hash the gradient of each micro-batch"
    )
    words.add_argument(
        "--ledger-every", type=int, default=0, metavar="N", help="for instep compare: hash the state so often"
    )
    words.add_argument(
        "--threads",
        type=int,
        default=0,
        metavar="N",
        help="threads per rank, whatever the script says",
    )
    words.add_argument(
        "--timeout-s",
        type=float,
        default=0.0,
        metavar="S",
        help="the longest that a rank may keep others waiting, whatever the script says (300)",
    )
    words.add_argument(
        "--fault",
        action="append",
        default=[],
        metavar="KIND:KEY=VALUE,...",
        help="inject a fault: kill:rank=1,step=12,phase=exchange; several may be given",
    )


def main(args: Sequence[str]) -> int:
    """Run as ``args`` say; return the exit code."""
    speaks = True
    try:
        speaks = detect(os.environ).local_rank == 0
        return run_script(parser().parse_args(args))
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else USAGE
    except (Exception, KeyboardInterrupt) as error:
        expected = OF_SCRIPTS if _is_of_script(error) else EXPECTED
        return report_error(PROGRAM, error, expected) if speaks else exit_code(error)


def _is_of_script(error: BaseException) -> bool:
    """Whether it was raised while the script ran, in a rank or in this process."""
    if isinstance(error, RankFailed):
        return True
    frames = (frame.f_globals for frame, _ in traceback.walk_tb(error.__traceback__))
    script = "__main__", sys.argv[0]
    return any((names.get("__name__"), names.get("__file__")) == script for names in frames)


def run_script(given: argparse.Namespace) -> int:
    """Run the script that was ``given``, as the words of the command say; its exit code."""
    _require_sane(given)
    preload()
    from instep.net.device import num_gpus
    from instep.run.launch_script import launch_script
    from instep.run.script import ScriptCall

    call = ScriptCall(
        path=given.script,
        arguments=tuple(given.arguments),
        run_dir=given.run_dir,
        resume=given.resume,
        accept_contract=given.accept_contract,
        stop_after=given.stop_after,
        check_every=given.check_every,
        leaves=given.leaves,
        ledger_every=given.ledger_every,
        fault=tuple(given.fault),
        threads=given.threads,
        timeout_s=given.timeout_s,
    )
    ranks = given.ranks or num_gpus() or len(os.sched_getaffinity(0))
    return launch_script(call, ranks=ranks, min_ranks=given.min_ranks)


def preload(*modules: str) -> None:
    """Have the process that ranks are forked from load torch, what a script calls, and ``modules``.

    It does so while this one goes on. A process that takes another's place would else import for a second,
    while all others wait for it.
    """
    if detect(os.environ).source == "single":
        from instep.launch.launch import warm

        warm("instep.run.script", *dict.fromkeys(PUBLIC.values()), *modules)


def _require_sane(given: argparse.Namespace) -> None:
    if not given.script.is_file():
        kind = "a folder" if given.script.is_dir() else "not there"
        raise ValueError(f"{given.script} is {kind}: expected a Python script: instep run -n 4 train.py")
    for name in ("ranks", "min_ranks", "stop_after", "check_every", "ledger_every"):
        if getattr(given, name) < 0:
            raise ValueError(f"--{name.replace('_', '-')} {getattr(given, name)}: expected 0 or more")
    if given.threads < 0 or given.timeout_s < 0:
        raise ValueError("expected --threads of 1 or more, and --timeout-s above 0")
