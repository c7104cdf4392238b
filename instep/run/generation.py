"""A generation of a run on one rank: agree on the state, follow up each step, sum up.

    ranks join    Generation.begin      restore_newest    every rank has the newest state       recovery.py
                  a step is made        made: a snapshot, if it is time to
                  Generation.follow_up  steps.jsonl, comparison of replicas, checkpoint, when due
                  Generation.end        summary, report data                                    summary.py
    ranks part    because the run has ended, shall stop, or a rank was lost or added

Who makes the steps is not known here: a script does, in its loop (``loop.py``).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from instep.checkpoint.manifest import differences
from instep.errors import CheckpointRejected, ContractBroken
from instep.net.agree import on_first_rank
from instep.plan.run_check import check, run_figures
from instep.record import jsonl, summary
from instep.record.compare import after
from instep.record.directory import CHECKPOINTS, RECORD, SUMMARY, config_of
from instep.record.display import Display
from instep.record.loggers import Loggers
from instep.record.step_lines import LINES, Made, is_of_another_contract, part_begins, starts, steps_recorded
from instep.run import folder
from instep.run.membership import Membership
from instep.run.peak_memory import peak_memory, words
from instep.run.recovery import BEGINNING, Checkpoints, Snapshots, restore_newest
from instep.run.script_training import ScriptTraining
from instep.run.timing import LOOKED_AT, REMEMBERED
from instep.run.writer import RunWriter, layout, trace_head
from instep.timeline import trace_files
from instep.timeline.analysis import Analysis, analyse
from instep.timeline.breakdown import RankBreakdown


class Ending(Enum):
    """Why a generation has ended."""

    DONE = "the last step is done"
    STOPPED = "the run stops here, and --resume goes on"
    REGROUP = "the ranks shall meet again in another group"


EXIT_CODES = {Ending.DONE: 0, Ending.STOPPED: 75}


class AfterSteps:
    """What follows each step, of one generation; all of it may be done twice.

    A checkpoint into ``checkpoints`` when one is due, a copy into ``memory`` after each step; ``member`` is
    told of the first one.
    """

    def __init__(
        self,
        training: ScriptTraining,
        writer: RunWriter,
        display: Display,
        checkpoints: Checkpoints,
        memory: Snapshots | None = None,
        member: Membership | None = None,
    ) -> None:
        self.training, self.writer, self.display = training, writer, display
        self.checkpoints, self.memory, self.member = checkpoints, memory, member
        self._is_first = True

    @property
    def last(self) -> int:
        """The number of steps after which no further one is made."""
        made, config = self.training.last, self.training.config
        if made is not None and made.finish:
            return self.training.steps_done
        return min(config.stop_after or config.steps, config.steps)

    def begin(self, *, is_saved: bool) -> None:
        """Make up for what follows the step that led here, where the state is newer than its record.

        ``is_saved``: its checkpoint is there, as it was before a new contract was accepted, and stays.
        """
        training = self.training
        if training.steps_done == 0 and self.writer.written < 0:
            if (held_out := self._evaluate()) is not None:
                self.writer.evaluated(held_out)
        elif training.steps_done > 0:
            self._follow_up(stop=False, is_saved=is_saved)

    @property
    def ending(self) -> Ending | None:
        """Why no further step is made; None while there are some."""
        if self.training.steps_done < self.last:
            return None
        return self._stopped()

    def made(self, step_s: float) -> None:
        """A step was made, in so many seconds: copy the state, if it is time to."""
        with self.training.timing.bookkeeping("snapshot"):
            if self.memory is not None:
                self.memory.after_step(self.training, step_s)
        if self._is_first:
            if self.member is not None:
                self.member.stepped()
            self.training.compare_objects()
            self._is_first = False

    def follow_up(self) -> Ending | None:
        """What follows the step that was made; why it was the last, if it was."""
        made = self.training.last
        assert made is not None
        self._follow_up(stop=made.stop)
        if made.stop:
            return self._stopped()
        if made.regroup and self.training.steps_done < self.last:
            return Ending.REGROUP
        return self.ending

    def _stopped(self) -> Ending:
        return Ending.DONE if self.training.is_finished else Ending.STOPPED

    def _evaluate(self) -> float | None:
        held_out = self.training.evaluate()
        if held_out is not None:
            unit = self.training.loss_unit and f" {self.training.loss_unit}"
            when = after(self.training.steps_done - 1)
            self.display.say(f"held-out loss {held_out:.3f}{unit} {when}")
        return held_out

    def _is_best(self, made: Made, held_out: float | None) -> bool:
        """Whether the checkpoint of this step is to be kept as the best one. Collective, where one is."""
        best = self.training.best
        if best is None:
            return False
        figures = {"loss": made.loss, "held_out_loss": held_out, **made.logged}
        value = on_first_rank(self.training.group, "the best figure", lambda: figures.get(best.name))
        return best.improves(self.training.steps_done, value)

    def _is_due(self, every: int) -> bool:
        done = self.training.steps_done
        return done == self.last or (every > 0 and done % every == 0)

    def _follow_up(self, *, stop: bool, is_saved: bool = False) -> None:
        training, config = self.training, self.training.config
        made, bookkeeping = training.last, training.timing.bookkeeping
        saves, best = not is_saved and (stop or self._is_due(config.checkpoint.every)), False
        if made is not None and training.steps_done > self.writer.written:
            training.heartbeat.enter("gather")
            held_out = self._evaluate() if self._is_due(config.eval.every) else None
            with bookkeeping("ledger"):
                best = self._is_best(made, held_out)
                training.heartbeat.enter("ledger")
                self.writer.step(made, held_out, last=training.steps_done == self.last or stop)
                self.display.step(training.steps_done - 1, made, training.timing.slow)
        every, saves = config.checks.replicas_every, saves or best
        if training.group.size > 1 and (saves or (every and training.steps_done % every == 0)):
            training.compare_replicas()
        if saves:
            with bookkeeping("save"):
                training.heartbeat.enter("save")
                self.checkpoints.save(training)


@dataclass
class Generation:
    """What a process needs to take part in a run, one group of ranks after another.

    In one: ``begin``, then steps, each followed by ``after.made`` and ``after.follow_up``, until that tells
    the ending; ``end`` with it. ``close`` in any case, which waits for no rank. All but ``close`` are
    collective over the mesh of ``training``.

    ``introduction`` says what the run is about to do, in lines: all of it, or (False) of another group of
    ranks alone. ``memory`` and ``member`` are those of a supervised process.
    """

    training: ScriptTraining
    path: Path
    checkpoints: Checkpoints
    memory: Snapshots | None
    member: Membership | None
    introduction: Callable[[bool], list[str]]
    _open: ExitStack = field(default_factory=ExitStack, repr=False)

    def begin(self) -> Ending | None:
        """Agree on the state and open the files; the ending, where there is no step left to make."""
        training, mesh = self.training, self.training.mesh
        self.display = self._open.enter_context(closing(Display(mesh.rank, training.config.steps)))
        self._begun = begun = self._agree()
        if begun["is_finished"]:
            self.display.say(summary.finished(training.steps_done, command=training.command))
            training.heartbeat.enter("summary")
            on_first_rank(mesh.world.group, "looking at the summary", self._show_again)
            return Ending.DONE
        self._record()
        self._files = self._open.enter_context(ExitStack())
        loggers = self._files.enter_context(self._loggers(begun["written"]))
        writer = RunWriter(self.path, training, begun["written"], loggers.step)
        self._files.enter_context(closing(writer))
        writer.started(begun["restarts"], begun["accepted"])
        parts = self.checkpoints, self.memory, self.member
        self.after = AfterSteps(training, writer, self.display, *parts)
        self.after.begin(is_saved=begun["is_saved"])
        return self.after.ending

    def end(self, ending: Ending) -> None:
        """Sum up, unless the ranks meet again or there was nothing to do."""
        training, begun = self.training, self._begun
        if begun["is_finished"]:
            self.close()
            return
        training.timing.end()
        self._files.close()
        if ending is Ending.STOPPED:
            steps = f"{training.steps_done} of {training.config.steps}"
            self.display.say(f"stopped after {steps} steps; --resume continues")
        self.close()
        if ending is Ending.REGROUP:
            return
        world = training.mesh.world.group
        training.heartbeat.enter("summary")
        self.checkpoints.finish(training)
        told = world.all_gather_bytes(
            json.dumps(training.timing.breakdown(begun["first_step"]).to_json()).encode(),
            "the gathering of breakdowns",
        )
        memory = peak_memory(world, training.mesh.device)
        state = training.state_sha256() if training.owns else ""
        training.heartbeat.enter("summary")
        # The others wait for rank 0 here: some launchers end all ranks when the first has ended.
        on_first_rank(world, "summing up", lambda: self._sum_up(told, memory, state))

    def close(self) -> None:
        """Close the files, and give the terminal back."""
        self._open.close()

    def _agree(self) -> dict[str, Any]:
        """Take the state, and compare what this rank computes with what the run has computed so far."""
        training, path = self.training, self.path
        world = training.mesh.world.group
        training.heartbeat.enter("agree")
        source, told = restore_newest(training, self.memory, self.checkpoints)

        def look() -> dict[str, Any]:
            before = starts(path)
            ours = training.fingerprint
            if training.generation > 1 and before and before[-1]["fingerprint"] != ours:
                raise ContractBroken(
                    "the ranks' numerical configuration is no longer the one the run began with:\n  "
                    + "\n  ".join(differences(before[-1]["numerical"], training.contract))
                )
            recorded_steps, note = steps_recorded(path), ""
            if source == BEGINNING and recorded_steps > 0:
                note = self._begins_again(recorded_steps)
            elif training.generation == 1 and recorded_steps > training.steps_done:
                note = f"steps {training.steps_done} to {recorded_steps - 1} are made again"
            now = {"step": training.steps_done, "generation": training.generation}
            return {
                "restarts": len(before),
                "first_step": part_begins([*before, {**now, **layout(training)}]),
                "is_finished": self._is_finished(recorded_steps),
                "written": min(recorded_steps, training.steps_done),  # the rest is made again
                "note": note,
                "is_saved": bool(told.get("accepted")) or is_of_another_contract(path, training.steps_done),
            }

        seen = on_first_rank(world, "comparing with the recorded run", look)
        is_first = training.generation == 1 or not seen["restarts"]
        notes = [*told.get("notes", ()), *([seen["note"]] if seen["note"] else [])]
        for line in [*self.introduction(is_first), *notes]:
            self.display.say(line)
        if training.mesh.rank == 0 and not seen["is_finished"]:
            folder.begin(path, training.recorded, world.peers.table)
        if self.member is not None:
            self.member.agreed(source)
        return {**seen, "accepted": told.get("accepted", [])}

    def _begins_again(self, recorded_steps: int) -> str:
        """What to say where no state is left of ``recorded_steps``.

        Raises:
            CheckpointRejected: one must have been saved, so it was moved or removed.
        """
        every = self.training.config.checkpoint.every
        where = f"{self.path / CHECKPOINTS} has no checkpoint of the {recorded_steps} recorded steps"
        # A supervised run saves step 0; the save of any other goes on beside some steps.
        if self.memory is not None or 0 < 2 * every <= recorded_steps:
            raise CheckpointRejected(
                f"{where}: put the checkpoints back (links are not followed), or start a run in another "
                "directory"
            )
        return f"{where}: beginning again with step 0"

    def _is_finished(self, recorded_steps: int) -> bool:
        """Whether an earlier command has made the last step, and summed up."""
        training, path = self.training, self.path
        done = training.steps_done
        if training.generation > 1 or done < training.config.steps or recorded_steps != done:
            return False
        told = jsonl.read_object(path / SUMMARY)
        return told.get("steps") == done and not summary.SHOWN.problem(told)

    def _show_again(self) -> None:
        figures = jsonl.read_object(self.path / SUMMARY)
        summary.show(figures, self.path, loss_unit=self.training.loss_unit)

    def _loggers(self, written: int) -> Loggers:
        config, rank = self.training.config, self.training.mesh.rank
        return Loggers(
            config.record.loggers,
            self.path,
            asdict(self.training.settings),
            rank=rank,
            written=written,
            project=config.record.wandb,
            timeout_s=min(30.0, config.timeout_s / 4),  # the other ranks wait for this one
            say=self.display.say,
        )

    def _record(self) -> None:
        """From now on, what this rank does is on disk, to be read at any time."""
        mesh, capacity = self.training.mesh, self.training.config.record.events
        if not capacity:  # on no rank
            return
        placed, run = trace_files.head_of(mesh.world.group), trace_head(self.training)
        head = {**placed, **run, "generation": self.training.generation}
        try:
            trace_files.record(mesh.recorder, self.path / trace_files.FOLDER, capacity, head)
        except (OSError, ValueError) as error:  # which ends no run for want of its trace
            self.display.say(f"no trace is kept: {error}")

    def _sum_up(self, told: Sequence[bytes], memory: dict[str, Any], state: str) -> None:
        first = self._begun["first_step"]
        figures = _summary(self.training, self.path, first, self._begun["restarts"], state)
        analysis = self._look([RankBreakdown.from_json(json.loads(each)) for each in told], first)
        found = {**figures, "memory": memory, **analysis.figures()}
        folder.end(self.path, found)
        said = [("memory", words(memory)), *analysis.lines(), *self._plan(found)]
        summary.show(figures, self.path, said, loss_unit=self.training.loss_unit)

    def _plan(self, figures: Mapping[str, Any]) -> list[tuple[str, str]]:
        """The run beside its plan; a run that is done does not fail for want of it."""
        try:
            found = run_figures(config_of(self.path), figures)
            return [] if found is None else [("plan", check(found).words())]
        except Exception as error:
            print(f"no plan: {error!r}", file=sys.stderr)
            return []

    def _look(self, breakdowns: Sequence[RankBreakdown], first: int) -> Analysis:
        """Where the time went after step ``first``; a run that is done does not fail for want of it."""
        slow = None
        try:
            slow = self.training.timing.slow(REMEMBERED)
            if not self.training.config.record.events:
                return Analysis({}, breakdowns, [], slow, [])
            traces = trace_files.read_traces(self.path / trace_files.FOLDER)
            done = self.training.steps_done  # a rank that is gone may have made more
            steps = [step for step in traces.steps if first <= step < done]  # counted from 0
            return analyse(traces, steps[-LOOKED_AT:], breakdowns=breakdowns, slow=slow)
        except Exception as error:
            print(f"no advice: the trace cannot be read: {error!r}", file=sys.stderr)
            return Analysis({}, breakdowns, [], slow, [])


def _summary(
    training: ScriptTraining, path: Path, first_step: int, restarts: int, state: str
) -> dict[str, Any]:
    config, lines = training.config, jsonl.read_lines(path / RECORD, shape=LINES)
    return {
        "state_sha256": state,
        "steps": training.steps_done,
        "is_finished": training.is_finished,
        "first_step": first_step,
        "world_size": training.mesh.axes.world_size,
        "strategy": config.parallel.strategy,
        "ordered": config.parallel.ordered,
        "step_mode": training.step_mode,
        **summary.figures(lines, first_step, training.items_per_step),
        "skipped_steps": training.health.skipped,
        "restarts": restarts,
        "fingerprint": training.fingerprint,
        "parallel": training.parallel,
    }
