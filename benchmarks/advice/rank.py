"""One rank's part: makes steps by each strategy in turn, and hands over what its recorders have of them."""

from __future__ import annotations

from typing import Any

from instep.bench.variants import SharedModel, TrainingLoop, Variant
from instep.bench.workloads import Workload
from instep.bench.worlds import World
from instep.events import STEP, Recorder

# The first step of a turn began before the others' turns, and in the second the caches are still theirs.
DROPPED = 2


def record(world: World, task: dict[str, Any]) -> dict[str, list[list[Any]]]:
    """The events of the steps that count, as fields, by strategy.

    ``task``: "workload" and "variants" (the fields of each), "turns", and "steps" of a turn that count.
    """
    shared = SharedModel(world, Workload(**task["workload"]))
    variants = [Variant(**fields) for fields in task["variants"]]
    loops = {one.strategy: one.start(shared) for one in variants}
    found: dict[str, list[list[Any]]] = {strategy: [] for strategy in loops}
    for turn in range(task["turns"]):
        for strategy, loop in loops.items():
            assert isinstance(loop, TrainingLoop) and loop.recorder is not None
            before = len(_ended(loop.recorder))
            world.barrier()
            for _ in range(DROPPED + task["steps"]):
                loop.step()
            counted = set(_ended(loop.recorder)[before + DROPPED :])
            found[strategy] += [list(event) for event in loop.recorder.events if event.step in counted]
        world.work.at(turn / task["turns"], f"turn {turn} of {task['turns']}")
    return found


def _ended(recorder: Recorder) -> list[int]:
    return [event.step for event in recorder.events if event.name == STEP]
