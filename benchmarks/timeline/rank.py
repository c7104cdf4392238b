"""One rank's part: makes steps by each strategy in turn, and hands over what its recorders have of them.

``python -m benchmarks.timeline.rank TOLD FOUND`` is a rank on another host, as its environment says.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from instep.bench.contestants import Contestant, Loop, Stage
from instep.bench.ranks import World
from instep.bench.settings import Setting
from instep.events import STEP, Recorder
from instep.mesh.join import init

# The first step of a turn began before the others' turns, and in the second the caches are still theirs.
DROPPED = 2


def record(world: World, told: dict[str, Any]) -> dict[str, list[list[Any]]]:
    """The events of the steps that count, as fields, by strategy.

    ``told``: "setting" and "contestants" (the fields of each), "turns", and "steps" of a turn that count.
    """
    stage = Stage(world, Setting(**told["setting"]))
    contestants = [Contestant(**fields) for fields in told["contestants"]]
    loops = {one.strategy: one.play(stage) for one in contestants}
    found: dict[str, list[list[Any]]] = {strategy: [] for strategy in loops}
    for turn in range(told["turns"]):
        for strategy, loop in loops.items():
            assert isinstance(loop, Loop) and loop.recorder is not None
            before = len(_ended(loop.recorder))
            world.barrier()
            for _ in range(DROPPED + told["steps"]):
                loop.step()
            counted = set(_ended(loop.recorder)[before + DROPPED :])
            found[strategy] += [list(event) for event in loop.recorder.events if event.step in counted]
        world.say(f"  turn {turn + 1} of {told['turns']}")
    return found


def _ended(recorder: Recorder) -> list[int]:
    return [event.step for event in recorder.events if event.name == STEP]


def main(told: str, found: str) -> None:
    """Read what to do from ``told``, write what was recorded to ``found``."""
    mesh = init(backend="gloo")
    result = record(World(), json.loads(Path(told).read_text()))
    Path(found).write_text(json.dumps(result))
    mesh.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
