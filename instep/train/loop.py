"""The training loop of one generation: agree on the state, make steps, sum up.

ranks join    Generation.run    restore_newest    every rank has the newest state         recovery.py
                                run_steps         a step; ledger, metrics, snapshot,
                                                  comparison and checkpoint when due
                                the end           summary, report data                    run/summary.py
ranks part    because the run has ended, shall stop, or a rank was lost or added
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from instep.checkpoint.canary import agree_on_canary
from instep.checkpoint.manifest import differences, fingerprint
from instep.errors import ContractBroken
from instep.mesh.agree import on_first_rank
from instep.run import folder, jsonl, summary
from instep.run.display import Display
from instep.run.folder import METRICS, SUMMARY
from instep.run.ledger import part_begins
from instep.run.loggers import Loggers
from instep.run.timing import LOOKED_AT, REMEMBERED
from instep.run.writer import (
    METRIC_LINES,
    RunWriter,
    placement,
    position,
    starts,
    trace_head,
)
from instep.timeline import trace_files
from instep.timeline.analysis import Analysis, analyse, summary_lines
from instep.timeline.breakdown import RankBreakdown
from instep.train.memory_usage import run_memory, words
from instep.train.recovery import Checkpoints, Snapshots, restore_newest
from instep.train.run_config import BatchConfig, ParallelConfig
from instep.train.trainer import Trainer

LISTED = 8  # ranks, whose shares are told one by one


class Ending(Enum):
    """Why the loop has ended."""

    DONE = "the last step is done"
    STOPPED = "the run stops here, and --resume goes on"
    REGROUP = "the ranks shall meet again in another group"


@dataclass(frozen=True)
class Aside:
    """What happens beside the steps: ``save`` a checkpoint when one is due, ``keep`` a copy after each step
    (given how many seconds it took), ``watch`` for errors of what goes on in the background."""

    save: Callable[[], None]
    keep: Callable[[float], None] = lambda step_s: None
    watch: Callable[[], None] = lambda: None
    first_step: Callable[[], None] = lambda: None


def run_steps(trainer: Trainer, writer: RunWriter, display: Display, aside: Aside) -> Ending:
    """Train until the last step, or until ``stop_after``, or until a rank is asked to end.

    If the state is newer than the ledger, what follows a step is made up for first.
    """
    config, written = trainer.config, writer.written
    last = min(config.stop_after or config.steps, config.steps)

    def evaluate() -> float:
        held_out = trainer.evaluate()
        display.say(f"step {trainer.steps_done}  held out {held_out:.3f} {trainer.recipe.loss_unit}")
        return held_out

    def due(every: int) -> bool:
        done = trainer.steps_done
        return done == last or (every > 0 and done % every == 0)

    def follow_up(*, stop: bool) -> None:
        """What follows a step; all of it may be done twice."""
        made, span = trainer.last, trainer.mesh.recorder.span
        saves = stop or due(config.checkpoint.every)
        if made is not None and trainer.steps_done > written:
            trainer.heartbeat.enter("gather")
            with span("ledger", lane="host"):
                writer.leaves(made)
                held_out = evaluate() if due(config.eval.every) else None
                trainer.heartbeat.enter("ledger")
                writer.step(made, held_out, last=trainer.steps_done == last or stop)
                display.step(trainer.steps_done, made, trainer.timing.slow)
        every = config.checks.replicas_every
        if trainer.group.size > 1 and (saves or (every and trainer.steps_done % every == 0)):
            trainer.compare_replicas()
        if saves:
            with span("save", lane="host"):
                trainer.heartbeat.enter("save")
                aside.save()

    if trainer.steps_done == 0 and written < 0:
        writer.before_steps(evaluate())
    elif trainer.steps_done > 0:
        follow_up(stop=False)
    is_first = True
    while trainer.steps_done < last:
        aside.watch()
        began = time.monotonic()
        made = trainer.step()
        with trainer.mesh.recorder.span("snapshot", lane="host"):
            aside.keep(time.monotonic() - began)
        if is_first:
            aside.first_step()
            is_first = False
        follow_up(stop=made.stop)
        if made.stop:
            break
        if made.regroup and trainer.steps_done < last:
            return Ending.REGROUP
    return Ending.DONE if trainer.steps_done >= config.steps else Ending.STOPPED


@dataclass
class Generation:
    """What a process needs to take part in a run, one group of ranks after another."""

    trainer: Trainer
    path: Path
    checkpoints: Checkpoints
    memory: Snapshots | None = None
    agreed: Callable[[str], None] = field(default=lambda source: None)  # told where the state came from
    stepped: Callable[[], None] = field(default=lambda: None)  # told after the first step

    def run(self) -> Ending:
        """Agree on the state, train, and sum up if the run ends here. Collective over the trainer's mesh."""
        trainer, mesh, path = self.trainer, self.trainer.mesh, self.path
        with closing(Display(mesh.rank, trainer.config.steps)) as display:
            begun = self._begin(display)
            if begun["is_finished"]:
                display.say(summary.finished(trainer.steps_done, trainer.config.steps))
                trainer.heartbeat.enter("summary")
                on_first_rank(mesh.world.group, "looking at the summary", self._show_again)
                return Ending.DONE
            self._record(display)
            with (
                self._loggers(display, begun["written"]) as loggers,
                closing(RunWriter(path, trainer, begun["written"], loggers.step)) as writer,
            ):
                writer.started(begun["restarts"], begun["accepted"])
                ending = run_steps(trainer, writer, display, self._aside())
                trainer.timing.end()
            if ending is Ending.REGROUP:
                return ending
            if ending is Ending.STOPPED:
                steps = f"{trainer.steps_done} of {trainer.config.steps}"
                display.say(f"stopped after step {steps}; --resume goes on")
        trainer.heartbeat.enter("summary")
        self.checkpoints.finish(trainer)
        told = mesh.world.group.all_gather_bytes(
            json.dumps(trainer.timing.breakdown(begun["first_step"]).to_json()).encode(),
            "the gathering of breakdowns",
        )
        memory = run_memory(trainer)
        state = trainer.state_sha256() if trainer.owns else ""
        trainer.heartbeat.enter("summary")
        # The others wait for rank 0 here: some launchers end all ranks when the first has ended.
        on_first_rank(mesh.world.group, "summing up", lambda: self._sum_up(begun, told, memory, state))
        return ending

    def _begin(self, display: Display) -> dict[str, Any]:
        """Take the state, and compare what this rank computes with what the run has computed so far."""
        trainer, path = self.trainer, self.path
        world = trainer.mesh.world.group
        trainer.heartbeat.enter("agree")
        source, told = restore_newest(trainer, self.memory, self.checkpoints)

        def look() -> dict[str, Any]:
            before = starts(path)
            ours = fingerprint(trainer.contract)
            recorded = [start["canary"] for start in before if start.get("fingerprint") == ours]
            if trainer.generation > 1 and before and before[-1]["fingerprint"] != ours:
                raise ContractBroken(
                    "the ranks would go on under another contract than the one they began with:\n  "
                    + "\n  ".join(differences(before[-1]["numerical"], trainer.contract))
                )
            now = {"step": trainer.steps_done, "generation": trainer.generation}
            return {
                "restarts": len(before),
                "first_step": part_begins([*before, {**now, **placement(trainer).layout()}]),
                "is_finished": self._is_finished(),
                "written": min(position(path), trainer.steps_done),  # the rest is done again
                "canary": recorded[-1] if recorded else None,
            }

        seen = on_first_rank(world, "comparing with the recorded run", look)
        agree_on_canary(world, trainer.canary, seen["canary"])
        if trainer.generation == 1 or not seen["restarts"]:
            _announce(display, trainer, path)
        num, what = trainer.parallel.num_replicas, summary.replicas(trainer.config.parallel.strategy)
        display.say(global_batch(trainer.config.batch, list(map(len, trainer.parallel.plan(num))), what))
        _announce_shard_groups(display, trainer)
        for note in told.get("notes", ()):
            display.say(note)
        if trainer.mesh.rank == 0 and not seen["is_finished"]:
            folder.begin(path, trainer.config, world.peers.table)
        self.agreed(source)
        return {**seen, "accepted": told.get("accepted", [])}

    def _is_finished(self) -> bool:
        """Whether an earlier command has made the last step, and summed up."""
        trainer, path = self.trainer, self.path
        done = trainer.steps_done
        if trainer.generation > 1 or done < trainer.config.steps or position(path) != done:
            return False
        told = jsonl.read_object(path / SUMMARY)
        return told.get("steps") == done and not summary.SHOWN.problem(told)

    def _show_again(self) -> None:
        figures = jsonl.read_object(self.path / SUMMARY)
        summary.show(figures, self.path, loss_unit=self.trainer.recipe.loss_unit)

    def _loggers(self, display: Display, written: int) -> Loggers:
        config, rank = self.trainer.config, self.trainer.mesh.rank
        return Loggers(
            config.logs.names,
            self.path,
            asdict(config),
            rank=rank,
            written=written,
            project=config.logs.wandb_project,
            timeout_s=min(30.0, config.timeout_s / 4),  # the other ranks wait for this one
            say=display.say,
        )

    def _record(self, display: Display) -> None:
        """From now on, what this rank does is on disk, to be read at any time."""
        mesh, capacity = self.trainer.mesh, self.trainer.config.trace.events
        if not capacity:  # on no rank
            return
        placed, run = trace_files.head_of(mesh.world.group), trace_head(self.trainer)
        head = {**placed, **run, "generation": self.trainer.generation}
        try:
            trace_files.record(mesh.recorder, self.path / trace_files.FOLDER, capacity, head)
        except (OSError, ValueError) as error:  # which ends no run for want of its trace
            display.say(f"no trace is kept: {error}")

    def _aside(self) -> Aside:
        trainer, memory = self.trainer, self.memory
        return Aside(
            save=lambda: self.checkpoints.save(trainer),
            keep=lambda step_s: memory.after_step(trainer, step_s) if memory else None,
            watch=self.checkpoints.watch,
            first_step=self.stepped,
        )

    def _sum_up(
        self, begun: dict[str, Any], told: Sequence[bytes], memory: dict[str, Any], state: str
    ) -> None:
        first = begun["first_step"]
        figures = _summary(self.trainer, self.path, first, begun["restarts"], state)
        analysis = self._look([RankBreakdown.from_json(json.loads(each)) for each in told], first)
        folder.end(self.path, {**figures, "memory": memory, **analysis.figures()})
        shown = summary_lines(analysis.breakdowns, analysis.slow, analysis.advice)
        said = [("memory", words(memory)), *shown]
        summary.show(figures, self.path, said, loss_unit=self.trainer.recipe.loss_unit)

    def _look(self, breakdowns: Sequence[RankBreakdown], first: int) -> Analysis:
        """Where the time went after step ``first``; a run that is done does not fail for want of it."""
        slow = None
        try:
            slow = self.trainer.timing.slow(REMEMBERED)
            if not self.trainer.config.trace.events:
                return Analysis({}, breakdowns, [], slow, [])
            traces = trace_files.read_traces(self.path / trace_files.FOLDER)
            done = self.trainer.steps_done  # a rank that is gone may have made more
            steps = [step for step in traces.steps if first <= step < done]  # counted from 0
            return analyse(traces, steps[-LOOKED_AT:], breakdowns=breakdowns, slow=slow)
        except Exception as error:
            print(f"no advice: the trace cannot be read: {error!r}", file=sys.stderr)
            return Analysis({}, breakdowns, [], slow, [])


def _announce(display: Display, trainer: Trainer, path: Path) -> None:
    config = trainer.config
    size = sum(p.numel() for p in trainer.module.parameters())
    where = summary.where(config.parallel.strategy, trainer.parallel.num_replicas)
    strategy = _strategy(config.parallel, trainer.parallel.shard_group_size)
    display.say(
        f"{size / 1e6:.2f} M parameters on {where} of {trainer.mesh.device.type}, "
        f"{config.parallel.threads} thread(s) each; strategy {strategy}; deadline {config.timeout_s:g} s"
    )
    display.say(f"{trainer.recipe.training(trainer.data).name}; run directory {path}")


def global_batch(batch: BatchConfig, shares: Sequence[int], what: str = "rank") -> str:
    """The equation of the batch, where each of so many ranks has its share of the micro-batches of a step.

    global batch 32 = micro-batch 4 x accumulation 4 x 2 ranks         every rank has as many
    global batch 32 = micro-batch 4 x 8, of which 3 ranks have 3 + 3 + 2
    """
    begin = f"global batch {batch.global_size} = micro-batch {batch.micro_size} x "
    ranks = f"{len(shares)} {what}{'s' * (len(shares) != 1)}"
    times = Counter(shares)
    if len(times) == 1:
        return f"{begin}accumulation {shares[0]} x {ranks}"
    listed = " + ".join(map(str, shares))
    if len(shares) > LISTED:
        listed = ", ".join(f"{share} on {number}" for share, number in sorted(times.items(), reverse=True))
    return f"{begin}{sum(shares)}, of which {ranks} have {listed}"


def _announce_shard_groups(display: Display, trainer: Trainer) -> None:
    """Say so where the ranks could not be cut as ``parallel.shard_ranks`` says."""
    asked, size = trainer.config.parallel.shard_ranks, trainer.mesh.data.size
    if asked and (found := trainer.parallel.shard_group_size) != asked:
        display.say(
            f"{size} rank(s) are no whole shard groups of parallel.shard_ranks {asked}: the state is divided "
            f"among {found}, which changes no bits"
        )


def _strategy(parallel: ParallelConfig, shard_group_size: int) -> str:
    order = "" if parallel.ordered else ", not ordered"
    stage = f", stage {parallel.shard_stage} of sharding" if parallel.shard_stage else ""
    stage += f" in shard groups of {shard_group_size} ranks" if parallel.shard_ranks else ""
    copies = ", one copy of the weights" if parallel.one_copy else ""
    return f"{parallel.strategy}{order}{stage}{copies}"


def _summary(trainer: Trainer, path: Path, first_step: int, restarts: int, state: str) -> dict[str, Any]:
    config, lines = trainer.config, jsonl.read_lines(path / METRICS, shape=METRIC_LINES)
    return {
        "state_sha256": state,
        "steps": trainer.steps_done,
        "first_step": first_step,
        "world_size": trainer.mesh.axes.world_size,
        "num_replicas": trainer.parallel.num_replicas,
        "strategy": config.parallel.strategy,
        "ordered": config.parallel.ordered,
        "contract": trainer.parallel.contract,
        **summary.figures(lines, first_step, trainer.recipe.items_per_step),
        "skipped_steps": trainer.health.skipped,
        "restarts": restarts,
        "fingerprint": fingerprint(trainer.contract),
        "parallel": asdict(config.parallel),
    }
