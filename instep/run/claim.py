"""Whose a run directory is: claimed by the process that starts the ranks, or by all ranks together."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from instep.checkpoint.files import step_directories
from instep.launch.launch_environment import LAUNCH_DIGITS, LaunchEnvironment
from instep.net.agree import on_first_rank, require_same_lines
from instep.net.process_group import Group
from instep.record.directory import CHECKPOINTS, CONFIG, FAULTS
from instep.record.jsonl import EVENTS, JsonLines
from instep.run import folder
from instep.run.writer import require_readable


class Wanted(NamedTuple):
    """A directory, or None for a new one in ``runs/``; and whether to go on with what is in it."""

    run_dir: Path | None
    resume: bool


def claim_together(
    config: folder.Claim,
    place: LaunchEnvironment,
    group: Group,
    hold: Callable[[folder.Claimed], object],
) -> tuple[Path, bool]:
    """The run directory, and whether to go on with what is in it, as after a restart. Collective.

    The launcher's store could carry the path over a restart, but others may write to it, and a run that
    believed it would go on from a stranger's checkpoint. So a path is what this rank's own config says, and a
    name that was made up is found again in ``runs/`` by what this start is known by. The first rank is to
    ``hold`` the directory for all.

    Raises:
        ValueError: the ranks were given different directories, or as ``folder.claim``; or a restart cannot
            know its directory.
    """
    require_same_lines(
        group, "run_dir", [str(config.run_dir)], fix=": give all ranks the same --run-dir, or none"
    )
    told = group.all_gather_bytes(place.launch.encode(), "the comparison of launches", limit=LAUNCH_DIGITS)
    restarted = bool(place.restart_count)

    def claim() -> tuple[str, bool]:
        if config.run_dir is None and restarted and place.source == "torchrun" and not place.launch:
            raise ValueError("this torchrun does not say which run it restarts: pass --run-dir")
        launches = {launch.decode() for launch in told if launch}
        known = config.run_dir or (folder.of_launch(launches) if restarted else None)
        begun = restarted and known is not None and (known / CONFIG).exists()
        resume = config.resume or begun
        claimed = folder.claim(Wanted(known, resume), say, place.launch)
        hold(claimed)
        require_readable(claimed.path)
        return claimed.path.name, resume

    name, resume = on_first_rank(group, "claiming the run directory", claim)
    return config.run_dir or folder.made_up(name), resume


def how_to_go_on(path: Path, resume: str = "") -> str:
    """What there is in ``path`` of a run that was interrupted, and what goes on with it, by default flags."""
    resume = resume or f"--resume --run-dir {shlex.quote(str(path))}"
    with suppress(OSError):
        steps = [step for step, _ in step_directories(path / CHECKPOINTS)]
        if steps:
            return f"with a checkpoint of step {steps[0]}: resume with {resume}"
    return f"before its first checkpoint: {resume} starts over"


def end_with_a_line(interrupt: KeyboardInterrupt, line: str) -> None:
    """Where ``interrupt`` ends the program, ``line`` stands in the place of its traceback."""
    before = sys.excepthook

    def told(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if error is interrupt:
            say(line)
        else:
            before(kind, error, trace)

    sys.excepthook = told


class FaultLog:
    """``faults.jsonl``, made when there is something to write."""

    def __init__(self, path: Path) -> None:
        self._path = path / FAULTS
        self._lines: JsonLines | None = None

    def note(self, event: dict[str, object]) -> None:
        """Write ``event`` down."""
        with suppress(OSError, ValueError):  # nothing ends a run for want of the tale of its faults
            self._lines = self._lines or JsonLines(self._path, before_step=0, shape=EVENTS)
            self._lines.write(**event)

    def close(self) -> None:
        """Flush to disk."""
        if self._lines is not None:
            self._lines.close()


def say(text: str) -> None:
    """What people shall read, of the run."""
    print(text, file=sys.stderr, flush=True)
