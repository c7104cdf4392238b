"""One generation's part of a run, from joined ranks to the reason why they part."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from instep.checkpoint import contract
from instep.checkpoint.contract import agree_on_canary
from instep.errors import ContractBroken
from instep.timeline import tape
from instep.timeline.breakdown import RankBreakdown
from instep.timeline.insight import Insight, look
from instep.timeline.words import lines
from instep.train import folder, summary
from instep.train.books import Books, placement, position, starts
from instep.train.config import Parallel
from instep.train.folder import METRICS, SUMMARY
from instep.train.footprint import footprint, words
from instep.train.keep import Checkpoints, MemoryCopy, restore_newest
from instep.train.ledger import part_begins
from instep.train.loggers import Loggers
from instep.train.loop import Aside, Ending, run_steps
from instep.train.progress import Display
from instep.train.setting import described
from instep.train.timing import LOOKED_AT, REMEMBERED
from instep.train.together import on_rank_zero
from instep.train.trainer import Trainer


@dataclass
class Part:
    """What a process needs to take part in a run, generation after generation."""

    trainer: Trainer
    path: Path
    checkpoints: Checkpoints
    memory: MemoryCopy | None = None
    agreed: Callable[[str], None] = field(default=lambda source: None)  # told where the state came from
    stepped: Callable[[], None] = field(default=lambda: None)  # told after the first step

    def run(self) -> Ending:
        """Agree on the state, train, and sum up if the run ends here. Collective over the trainer's mesh."""
        trainer, mesh, path = self.trainer, self.trainer.mesh, self.path
        with closing(Display(mesh.rank, trainer.config.steps)) as display:
            begun = self._begin(display)
            if begun["is_finished"]:
                display.say(summary.finished(trainer.steps_done, trainer.config.steps))
                trainer.pulse.enter("summary")
                on_rank_zero(mesh.world.group, "looking at the summary", self._show_again)
                return Ending.DONE
            self._record(display)
            with (
                self._loggers(display, begun["written"]) as loggers,
                closing(Books(path, trainer, begun["written"], loggers.step)) as books,
            ):
                books.started(begun["restarts"], begun["accepted"])
                ending = run_steps(trainer, books, display, self._aside())
                trainer.timing.end()
            if ending is Ending.REGROUP:
                return ending
            if ending is Ending.STOPPED:
                steps = f"{trainer.steps_done} of {trainer.config.steps}"
                display.say(f"stopped after step {steps}; --resume goes on")
        trainer.pulse.enter("summary")
        self.checkpoints.finish(trainer)
        told = mesh.world.group.all_gather_bytes(
            json.dumps(trainer.timing.breakdown(begun["first_step"]).to_json()).encode(),
            "the gathering of breakdowns",
        )
        memory = footprint(trainer)
        state = trainer.state_sha256() if trainer.hashes else ""
        trainer.pulse.enter("summary")
        # The others wait for rank 0 here: some launchers end everybody when the first rank has ended.
        on_rank_zero(mesh.world.group, "summing up", lambda: self._sum_up(begun, told, memory, state))
        return ending

    def _begin(self, display: Display) -> dict[str, Any]:
        """Take the state, and compare what this rank computes with what the run has computed so far."""
        trainer, path = self.trainer, self.path
        world = trainer.mesh.world.group
        trainer.pulse.enter("agree")
        source, told = restore_newest(trainer, self.memory, self.checkpoints)

        def look() -> dict[str, Any]:
            before = starts(path)
            ours = contract.fingerprint(trainer.contract)
            recorded = [start["canary"] for start in before if start.get("fingerprint") == ours]
            if trainer.generation > 1 and before and before[-1]["fingerprint"] != ours:
                raise ContractBroken(
                    "the ranks would go on under another contract than the one they began with:\n  "
                    + "\n  ".join(contract.differences(before[-1]["numerical"], trainer.contract))
                )
            now = {"step": trainer.steps_done, "generation": trainer.generation}
            return {
                "restarts": len(before),
                "first_step": part_begins([*before, {**now, **placement(trainer).layout()}]),
                "is_finished": self._is_finished(),
                "written": min(position(path), trainer.steps_done),  # the rest is done again
                "canary": recorded[-1] if recorded else None,
            }

        seen = on_rank_zero(world, "looking into the books", look)
        agree_on_canary(world, trainer.canary, seen["canary"])
        if trainer.generation == 1 or not seen["restarts"]:
            _announce(display, trainer, path)
        _announce_rows(display, trainer)
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
        told = folder.read_object(path / SUMMARY)
        return told.get("steps") == done and told.keys() >= summary.SHOWN

    def _show_again(self) -> None:
        summary.show_again(folder.read_object(self.path / SUMMARY), self.path)

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
        placed, run = tape.head_of(mesh.world.group), described(self.trainer)
        head = {**placed, **run, "generation": self.trainer.generation}
        try:
            tape.record(mesh.recorder, self.path / tape.FOLDER, capacity, head)
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
        insight = self._look([RankBreakdown.from_json(json.loads(each)) for each in told], first)
        folder.end(self.path, {**figures, "memory": memory, **insight.figures()})
        shown = lines(insight.breakdowns, insight.slow, insight.advice)
        summary.show(figures, self.path, [("memory", words(memory)), *shown])

    def _look(self, breakdowns: Sequence[RankBreakdown], first: int) -> Insight:
        """Where the time went after step ``first``; a run that is done does not fail for want of it."""
        slow = None
        try:
            slow = self.trainer.timing.slow(REMEMBERED)
            if not self.trainer.config.trace.events:
                return Insight({}, breakdowns, [], slow, [])
            tapes = tape.read_tapes(self.path / tape.FOLDER)
            done = self.trainer.steps_done  # a rank that is gone may have made more
            steps = [step for step in tapes.steps if first <= step < done]  # counted from 0
            return look(tapes, steps[-LOOKED_AT:], breakdowns=breakdowns, slow=slow)
        except Exception as error:
            print(f"no advice: the trace cannot be read: {error!r}", file=sys.stderr)
            return Insight({}, breakdowns, [], slow, [])


def _announce(display: Display, trainer: Trainer, path: Path) -> None:
    config = trainer.config
    size = sum(p.numel() for p in trainer.module.parameters())
    batch, where = config.batch, summary.where(config.parallel.strategy, trainer.parallel.num_replicas)
    display.say(
        f"{size / 1e6:.2f} M parameters on {where} of {trainer.mesh.device.type}, "
        f"{config.parallel.threads} thread(s) each; global batch {batch.global_size} = {config.num_leaves} "
        f"micro-batches of {batch.micro_size}; "
        f"strategy {_strategy(config.parallel, trainer.parallel.row_size)}; deadline {config.timeout_s:g} s"
    )
    display.say(f"{trainer.text.train.name}; run directory {path}")


def _announce_rows(display: Display, trainer: Trainer) -> None:
    """Say so where the ranks could not be cut as ``parallel.shard_ranks`` says."""
    asked, size = trainer.config.parallel.shard_ranks, trainer.mesh.data.size
    if asked and (row := trainer.parallel.row_size) != asked:
        display.say(
            f"{size} rank(s) are no whole rows of parallel.shard_ranks {asked}: the state is divided among "
            f"{row}, which changes no bits"
        )


def _strategy(parallel: Parallel, row_size: int) -> str:
    order = "" if parallel.ordered else ", not ordered"
    stage = f", stage {parallel.shard_stage} of sharding" if parallel.shard_stage else ""
    stage += f" in rows of {row_size} ranks" if parallel.shard_ranks else ""
    copies = ", one copy of the weights" if parallel.one_copy else ""
    return f"{parallel.strategy}{order}{stage}{copies}"


def _summary(trainer: Trainer, path: Path, first_step: int, restarts: int, state: str) -> dict[str, Any]:
    config = trainer.config
    tokens_per_step = config.batch.global_size * config.model.context
    return {
        "state_sha256": state,
        "steps": trainer.steps_done,
        "first_step": first_step,
        "world_size": trainer.mesh.axes.world_size,
        "num_replicas": trainer.parallel.num_replicas,
        "strategy": config.parallel.strategy,
        "ordered": config.parallel.ordered,
        "contract": trainer.parallel.contract,
        **summary.figures(folder.read_lines(path / METRICS), first_step, tokens_per_step),
        "skipped_steps": trainer.health.skipped,
        "restarts": restarts,
        "fingerprint": contract.fingerprint(trainer.contract),
        "parallel": asdict(config.parallel),
    }
