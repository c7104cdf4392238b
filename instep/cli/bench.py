"""``instep bench WORD``: reads the options of a measurement, then starts it; torch is imported after that."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from typing import Annotated

import tyro

from instep.bench.options import Buckets, Collectives, Steps
from instep.cli.exits import DONE, tell

PROGRAM = "instep bench"
DESCRIPTION = """\
Measure on this machine: results on stdout, progress on stderr.

Exit codes: 0 done, 1 failed, 2 usage.\
"""
Options = (
    Annotated[Collectives, tyro.conf.subcommand("collectives")]
    | Annotated[Steps, tyro.conf.subcommand("steps")]
    | Annotated[Buckets, tyro.conf.subcommand("buckets")]
)
MODULES = {
    Collectives: "instep.bench.collectives",
    Steps: "instep.bench.steps",
    Buckets: "instep.bench.buckets",
}


def parse(args: Sequence[str]) -> Collectives | Steps | Buckets:
    """The options that ``args`` ask for.

    Raises:
        SystemExit: 0 after ``--help``; 2 after what is not an option, with the nearest that are.
    """
    options: Collectives | Steps | Buckets = tyro.cli(
        Options,
        prog=PROGRAM,
        description=DESCRIPTION,
        args=list(args) or ["--help"],
        config=(tyro.conf.OmitSubcommandPrefixes,),
    )
    return options


def main(args: Sequence[str]) -> int:
    """Measure as ``args`` say; return the exit code."""
    try:
        options = parse(args)
        options.check()
        if not isinstance(options, Steps):  # whose ranks may live in another network
            from instep.mesh.launch import warm

            warm()  # the process that ranks are forked from loads torch while this one does
        importlib.import_module(MODULES[type(options)]).run(options)
        sys.stdout.flush()
        return DONE
    except (Exception, KeyboardInterrupt) as error:
        return tell(PROGRAM, error)
