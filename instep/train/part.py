"""One generation's part of a run, from joined ranks to the reason why they part."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from instep.checkpoint import contract
from instep.checkpoint.contract import agree_on_canary
from instep.errors import ContractBroken
from instep.train import folder, summary
from instep.train.books import Books, position, starts
from instep.train.folder import METRICS
from instep.train.keep import Checkpoints, MemoryCopy, find
from instep.train.loop import Aside, Ending, run_steps
from instep.train.progress import Display
from instep.train.state import agree
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
            with closing(Books(path, trainer, begun["written"])) as books:
                books.started(begun["restarts"], begun["accepted"])
                ending = run_steps(trainer, books, display, self._aside())
            if ending is Ending.REGROUP:
                return ending
            if ending is Ending.STOPPED:
                steps = f"{trainer.steps_done} of {trainer.config.steps}"
                display.say(f"stopped after step {steps}; --resume goes on")
        trainer.pulse.enter("summary")
        self.checkpoints.finish(trainer)
        # The others wait for rank 0 here: some launchers end everybody when the first rank has ended.
        on_rank_zero(mesh.world.group, "summing up", lambda: self._sum_up(begun))
        return ending

    def _begin(self, display: Display) -> dict[str, Any]:
        """Take the state, and compare what this rank computes with what the run has computed so far."""
        trainer, path = self.trainer, self.path
        world = trainer.mesh.world.group
        trainer.pulse.enter("agree")
        source, told = agree(trainer, lambda: find(trainer, self.memory, self.checkpoints))

        def look() -> dict[str, Any]:
            before = starts(path)
            ours = contract.fingerprint(trainer.contract)
            recorded = [start["canary"] for start in before if start.get("fingerprint") == ours]
            if trainer.generation > 1 and before and before[-1]["fingerprint"] != ours:
                raise ContractBroken(
                    "the ranks would go on under another contract than the one they began with:\n  "
                    + "\n  ".join(contract.differences(before[-1]["numerical"], trainer.contract))
                )
            return {
                "restarts": len(before),
                "first_step": _begun(before, trainer.generation, trainer.steps_done),
                "written": min(position(path), trainer.steps_done),  # the rest is done again
                "canary": recorded[-1] if recorded else None,
            }

        seen = on_rank_zero(world, "looking into the books", look)
        agree_on_canary(world, trainer.canary, seen["canary"])
        if trainer.generation == 1 or not seen["restarts"]:
            _announce(display, trainer, path)
        for note in told.get("notes", ()):
            display.say(note)
        if trainer.mesh.rank == 0:
            folder.begin(path, trainer.config, world.peers.table)
        self.agreed(source)
        return {**seen, "accepted": told.get("accepted", [])}

    def _aside(self) -> Aside:
        trainer, memory = self.trainer, self.memory
        return Aside(
            save=lambda: self.checkpoints.save(trainer),
            keep=lambda step_s: memory.after_step(trainer, step_s) if memory else None,
            watch=self.checkpoints.watch,
            first_step=self.stepped,
        )

    def _sum_up(self, begun: dict[str, Any]) -> None:
        figures = _summary(self.trainer, self.path, begun["first_step"], begun["restarts"])
        summary.show(folder.end(self.path, figures), self.path)


def _begun(before: Sequence[dict[str, Any]], generation: int, step: int) -> int:
    """Where this command began: the step of its first generation, of which ``before`` may tell."""
    for start in reversed(before):
        if start.get("generation", 1) >= generation:
            break
        step, generation = start["step"], start.get("generation", 1)
    return step


def _announce(display: Display, trainer: Trainer, path: Path) -> None:
    config = trainer.config
    size = sum(p.numel() for p in trainer.module.parameters())
    batch, where = config.batch, summary.where(config.parallel.strategy, trainer.parallel.num_replicas)
    display.say(
        f"{size / 1e6:.2f} M parameters on {where} of {trainer.mesh.device.type}, "
        f"{config.parallel.threads} thread(s) each; global batch {batch.global_size} = {config.num_leaves} "
        f"micro-batches of {batch.micro_size}; strategy {config.parallel.strategy}"
        f"{'' if config.parallel.ordered else ', not ordered'}; deadline {config.timeout_s:g} s"
    )
    display.say(f"{trainer.text.train.name}; run directory {path}")


def _summary(trainer: Trainer, path: Path, first_step: int, restarts: int) -> dict[str, Any]:
    config = trainer.config
    tokens_per_step = config.batch.global_size * config.model.context
    return {
        "state_sha256": trainer.state_sha256(),
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
