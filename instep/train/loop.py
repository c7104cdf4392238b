"""The training loop: steps, and what is done after each of them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from instep.train.books import Books
from instep.train.progress import Display
from instep.train.trainer import Trainer


class Ending(Enum):
    """Why the loop has ended."""

    DONE = "the last step is done"
    STOPPED = "the run shall stop here, and go on another time"
    REGROUP = "the ranks shall take other seats"


@dataclass(frozen=True)
class Aside:
    """What happens beside the steps: ``save`` a checkpoint when one is due, ``keep`` a copy after each step
    (given how many seconds it took), ``watch`` for errors of what goes on in the background."""

    save: Callable[[], None]
    keep: Callable[[float], None] = lambda step_s: None
    watch: Callable[[], None] = lambda: None
    first_step: Callable[[], None] = lambda: None


def run_steps(trainer: Trainer, books: Books, display: Display, aside: Aside) -> Ending:
    """Train until the last step, or until ``stop_after``, or until a rank is asked to end.

    If the state is newer than the books, what follows a step is made up for first.
    """
    config, written = trainer.config, books.written
    last = min(config.stop_after or config.steps, config.steps)

    def evaluate() -> float:
        held_out = trainer.evaluate()
        display.say(f"step {trainer.steps_done}  held out {held_out:.3f} nats per byte")
        return held_out

    def due(every: int) -> bool:
        done = trainer.steps_done
        return done == last or (every > 0 and done % every == 0)

    def follow_up(*, stop: bool) -> None:
        """What follows a step; all of it may be done twice."""
        made, span = trainer.last, trainer.mesh.recorder.span
        saves = stop or due(config.checkpoint.every)
        if made is not None and trainer.steps_done > written:
            trainer.pulse.enter("gather")
            with span("ledger", lane="host"):
                books.leaves(made)
                held_out = evaluate() if due(config.eval.every) else None
                trainer.pulse.enter("ledger")
                books.step(made, held_out, last=trainer.steps_done == last or stop)
                display.step(trainer.steps_done, made, trainer.timing.slow)
        every = config.checks.replicas_every
        if trainer.group.size > 1 and (saves or (every and trainer.steps_done % every == 0)):
            trainer.compare_replicas()
        if saves:
            with span("save", lane="host"):
                trainer.pulse.enter("save")
                aside.save()

    if trainer.steps_done == 0 and written < 0:
        books.before_steps(evaluate())
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
