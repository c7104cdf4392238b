"""``instep doctor``: the capabilities and problems of this machine."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import tyro

from instep.cli.exit_codes import FAILED, report_error

PROGRAM = "instep doctor"
DESCRIPTION = """\
Check this machine for problems, and print each with its fix.

Exit codes: 0 done, 1 an error was found, 2 usage.\
"""


@dataclass(frozen=True, kw_only=True)
class DoctorOptions:
    """What can be asked of ``instep doctor``."""

    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print one JSON object instead of lines."""
    verify: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Start two ranks and prove, with every strategy, that their gradient is that of one process."""


def main(args: Sequence[str]) -> int:
    """Look as ``args`` say; return the exit code."""
    try:
        options = tyro.cli(DoctorOptions, prog=PROGRAM, description=DESCRIPTION, args=list(args))
        # From here on torch is imported, which --help and a mistyped flag do not wait for.
        from instep.bench.doctor import run

        return run(json_wanted=options.json, verify=options.verify)
    except ModuleNotFoundError as error:
        print(f"{PROGRAM}: error: {error}: {sys.executable} -m pip install instep", file=sys.stderr)
        return FAILED
    except (Exception, KeyboardInterrupt) as error:
        return report_error(PROGRAM, error)
