"""A row of the matrix, made: its commands in a corner of their own, and what became of them."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any, TypeAlias

from benchmarks.faults.acts import INSTEP, Inside, namespace
from benchmarks.faults.command import ROOT, Ended, last_step, run, steps_of, worlds_of
from benchmarks.faults.judge import Found, judge
from benchmarks.faults.matrix import RESUME, Row, Run
from instep.recipes import text_config
from instep.recipes.text_config import Config
from instep.record.directory import FAULTS, RECORD, SUMMARY
from instep.record.jsonl import read_lines
from instep.run.toml import to_toml

SAID_CHARACTERS = 20_000
Ledger: TypeAlias = Mapping[int, tuple[float, float]]


@dataclass(frozen=True)
class Made:
    """A row that was made once: what was found, and what is wrong with it."""

    found: Found
    wrong: list[str]

    def fields(self) -> dict[str, Any]:
        """As JSON."""
        found = self.found
        return {
            "wrong": self.wrong,
            "codes": list(found.codes),
            "same": found.same,
            "redone": found.redone,
            "seconds": found.seconds,
            "sources": [event["source"] for event in found.recoveries],
            "named": sorted({event["rank"] for event in found.failures}),
            "left": list(found.left),
        }


class Bench:
    """A text, a recipe, and the undisturbed runs on one rank that all others are compared with.

    ``hooks`` are in every command of a row.
    """

    def __init__(self, directory: Path, hooks: Sequence[str] = ()) -> None:
        self.directory = directory
        self.hooks = tuple(hooks)
        self._references: dict[tuple[str, ...], tuple[str, Ledger]] = {}
        # A copy: somebody may be editing.
        text = directory / "text"
        text.write_bytes(b"".join(path.read_bytes() for path in sorted((ROOT / "instep").rglob("*.py"))))
        (directory / "recipe.toml").write_text(to_toml(replace(text_config.tiny(), data=text)))

    @cached_property
    def can_mount(self) -> bool:
        """Whether a command may have mounts of its own here."""
        try:
            script = [*namespace(), "sh", "-c", 'mount -t tmpfs tmpfs "$1"', "sh", str(self.directory)]
            return subprocess.run(script, capture_output=True, timeout=10).returncode == 0
        except (OSError, subprocess.TimeoutExpired):
            return False

    def skipped(self, row: Row) -> str:
        """Why ``row`` cannot be made here; "" if it can."""
        return (
            "needs mounts of its own (root, or user namespaces)" if row.mounts and not self.can_mount else ""
        )

    def reference(self, row: Row) -> tuple[str, Ledger]:
        """The hash of the undisturbed run on one rank, and its losses and norms."""
        args = ("--steps", str(row.steps), *row.alike)
        if args not in self._references:
            with corner() as place:
                ended = self._command(Run(args, ranks=1, pauses=False), place)
                if ended.code:
                    raise RuntimeError(f"the undisturbed run ended with code {ended.code}:\n{ended.said}")
                self._references[args] = str(_summary(place)["state_sha256"]), _ledger(place / "run")
        return self._references[args]

    def make(self, row: Row) -> Made:
        """``row``, once."""
        found = self.found(row)
        config: Config = text_config.tiny()
        wrong = judge(row.expect, found, num_steps=row.steps, global_size=config.batch.global_size)
        return Made(found, wrong)

    def found(self, row: Row) -> Found:
        """What becomes of ``row``, not yet judged."""
        with corner() as place:
            return self._program(row, place) if row.program else self._runs(row, place)

    def _runs(self, row: Row, place: Path) -> Found:
        path = place / "run"
        expected, ledger = self.reference(row) if row.expect.same else ("", {})
        ends: list[Ended] = []
        redone = 0
        for number, one in enumerate(row.runs):
            before = last_step(path)
            if one.damage is not None:
                one.damage(path)
            first = ("--steps", str(row.steps)) if number == 0 else ()
            ends.append(self._command(replace(one, args=(*first, *one.args)), place))
            if one.args[: len(RESUME)] == RESUME and ends[-1].code == 0:
                redone = max(redone, before - _started(path))
        summary = _summary(place)
        steps = steps_of(path)
        problems = [end.notes["problem"] for end in ends if "problem" in end.notes]
        worlds = tuple(world for world, _ in groupby(worlds_of(path)))
        if row.worlds and worlds != row.worlds:
            problems.append(f"expected {row.worlds} ranks in turn, got {worlds}")
        return Found(
            codes=tuple(end.code for end in ends),
            said="\n".join(end.said[-SAID_CHARACTERS:] for end in ends),
            events=read_lines(path / FAULTS),
            moments=[moment for end in ends for moment in end.moments],
            same=summary.get("state_sha256") == expected if row.expect.same else None,
            same_ledger=_ledger(path) == ledger if row.expect.same else None,
            steps=[(line["step"], line["cursor"]) for line in steps],
            skipped=summary.get("skipped_steps", 0),
            redone_by_resume=redone,
            left=[name for end in ends for name in end.left],
            problems=problems,
            took=[{"total": end.notes["total_s"]} for end in ends if "total_s" in end.notes],
        )

    def _command(self, one: Run, place: Path) -> Ended:
        path = place / "run"
        words = [*INSTEP, "train", "--config", str(self.directory / "recipe.toml"), "--run-dir", str(path)]
        if one.args[: len(RESUME)] == RESUME:  # it has the config of the run that it goes on with
            words = [*INSTEP, "train", "--run-dir", str(path)]
        words += one.words
        through = one.through
        if isinstance(through, Inside):
            through = Inside((*self.hooks, *through.hooks))
        elif self.hooks and words[: len(INSTEP)] == INSTEP:
            words = Inside(self.hooks)(words, place)
        if through is not None:
            words = through(words, place)
        return run(words, place, path, act=one.act)

    def _program(self, row: Row, place: Path) -> Found:
        path = place / "run"
        path.mkdir()
        ended = run([sys.executable, "-m", "benchmarks.faults.programs", row.program], place, path)
        try:
            told = json.loads(ended.said.splitlines()[-1])
        except (ValueError, IndexError):
            told = {}
        took = []
        if told.get("noticed_ns") and ended.moments:
            seconds = (told["noticed_ns"] - ended.moments[0]) / 1e9
            took = [{"detect": seconds, "total": seconds}]
        return Found((ended.code,), ended.said, left=ended.left, took=took)


@contextmanager
def corner() -> Iterator[Path]:
    """A new directory for what a row leaves, gone after it."""
    place = Path(tempfile.mkdtemp(prefix="faults-"))
    try:
        yield place
    finally:
        shutil.rmtree(place)


def _ledger(path: Path) -> Ledger:
    """Loss and norm of each step; of one that was made twice the last."""
    return {line["step"]: (line.get("loss"), line.get("norm")) for line in steps_of(path)}


def _summary(place: Path) -> dict[str, Any]:
    path = place / "run" / SUMMARY
    return dict(json.loads(path.read_text())) if path.exists() else {}


def _started(path: Path) -> int:
    """The step from which the run has gone on last."""
    return max(
        (line["step"] for line in read_lines(path / RECORD) if line.get("event") == "started"), default=0
    )
