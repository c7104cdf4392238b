"""Compile the native core, with whatever C compiler there is: ``python -m instep.native.build``.

A missing compiler is no failure: without the core, ranks of a host use gloo, with the same bits. The library
lies beside its source and carries a stamp of it, so one of other source is never used. Imports nothing of
instep, because a wheel is built where instep is not installed.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

SOURCE = Path(__file__).with_name("core.c")
LIBRARY = SOURCE.with_name("core.so")
MACHINES = ("x86_64", "aarch64")  # for whose memory order its words are proven
# No contraction: a fused multiply-add rounds once where Python's path rounds twice.
FLAGS = (
    *("-std=c11", "-O3", "-ffp-contract=off", "-fPIC", "-shared", "-fvisibility=hidden", "-g0"),
    *("-Wall", "-Wextra"),
)
# The second one without several bodies for vector units, which some C libraries cannot choose from.
ATTEMPTS: tuple[tuple[str, ...], ...] = ((), ("-DINSTEP_ONE_TARGET",))
COMPILE_S = 300
HOW_TO = "install gcc or clang, or the Python package ziglang, then: python -m instep.native.build"


class BuildFailed(Exception):
    """No compiler is there, or none made a library of the source."""


def stamp() -> str:
    """Identifies this source and the flags that it is compiled with."""
    return hashlib.sha256(SOURCE.read_bytes() + " ".join(FLAGS).encode()).hexdigest()[:32]


def compilers(environ: Mapping[str, str]) -> Iterator[list[str]]:
    """Commands that compile C here: ``CC``, else the system's, else zig's from the package ziglang."""
    if environ.get("CC"):
        yield shlex.split(environ["CC"])
        return
    yield from ([name] for name in ("cc", "gcc", "clang") if shutil.which(name))
    if importlib.util.find_spec("ziglang") is not None:
        yield [sys.executable, "-m", "ziglang", "cc"]


def build(target: Path = LIBRARY, environ: Mapping[str, str] = os.environ) -> str:
    """Compile the core into ``target``; the command that did.

    Raises:
        BuildFailed: with the reason of each compiler.
    """
    if sys.platform != "linux" or platform.machine() not in MACHINES:
        wanted = " or ".join(MACHINES)
        raise BuildFailed(f"it is for Linux on {wanted}, not {sys.platform} on {platform.machine()}")
    reasons = []
    for command in compilers(environ):
        for extra in ATTEMPTS:
            try:
                compile_source([*command, *FLAGS, *extra], target)
            except BuildFailed as reason:
                reasons.append(str(reason))
            else:
                return shlex.join([*command, *extra])
    raise BuildFailed("; ".join(reasons) or "there is no C compiler")


def compile_source(command: Sequence[str], target: Path) -> None:
    """Run ``command`` on the source; ``target`` appears whole, also where processes have the old one mapped.

    Raises:
        BuildFailed: the command cannot be run, or fails.
    """
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".core-") as folder:
        made = Path(folder) / target.name
        whole = [*command, f'-DINSTEP_STAMP="{stamp()}"', str(SOURCE), "-o", str(made)]
        try:
            ended = subprocess.run(whole, capture_output=True, text=True, timeout=COMPILE_S)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise BuildFailed(f"{command[0]}: {error}") from error
        if ended.returncode or not made.exists():
            lines = [line for line in ended.stderr.splitlines() if "error" in line] or [ended.stderr.strip()]
            raise BuildFailed(f"{shlex.join(command[:3])}: {lines[0] or f'exit code {ended.returncode}'}")
        os.replace(made, target)


def main() -> int:
    """Build beside the source and print the outcome in one line; never a failure."""
    try:
        print(f"native core: compiled by {build()}")
    except BuildFailed as reason:
        print(f"native core: not compiled, ranks of a host use gloo ({reason}). To get it: {HOW_TO}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
