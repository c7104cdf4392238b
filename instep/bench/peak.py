"""What a contestant needs at its peak, measured where it is alone.

Contestants that take turns share a process, and the high-water mark of its resident memory is that of all of
them. So each has a world of its own for three steps, in which buckets are laid out, used, and laid out anew.
The mark counts everything: torch itself, weights, activations, gradients, buckets. A page of shared memory
counts on every rank that has touched it, and once in what all ranks take together.

One more step is counted by what the memory is for. That is exact where resident memory is not, and as little
as what can be named: not torch itself, not what its allocator keeps, not the messages of a backend.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from torch import Tensor, nn

from instep.bench.contestants import NONE, Absent, Contestant, Loop, Player, Serve, Stage
from instep.bench.ranks import World
from instep.bench.settings import Setting
from instep.mesh.resident import Resident, resident, together
from instep.train.footprint import formula
from instep.train.held import Held, activations, held

NUM_STEPS = 3
MEGABYTE = 1e6

# What a rank has measured; None for a contestant that has no part on it.
Needed = Mapping[str, Any]


def peak(world: World, told: dict[str, Any]) -> Needed | None:
    """ "held", "activations" and "resident" of one rank, in bytes, after some steps of a contestant.

    ``told``: "setting", "contestant" (the fields of each). None if the contestant is absent.
    """
    stage = Stage(world, Setting(**told["setting"]))
    try:
        player = Contestant(**told["contestant"]).play(stage)
    except Absent:
        return None
    for _ in range(NUM_STEPS):
        player.step()
    world.barrier()
    now = resident()
    world.barrier()  # what is counted from here on takes memory of its own
    counted = count(player)
    return {
        "held": None if counted is None else asdict(counted),
        "activations": _activations(stage, player),
        "resident": None if now is None else asdict(now),
    }


def count(player: Player) -> Held | None:
    """What is held in one more step, gradients among it. Collective."""
    found: list[Held] = []
    if isinstance(player, Serve):
        player.step()
        return held(player.server.module, player.server.optimizer, player.server)
    if not isinstance(player, Loop):
        player.step()
        return None
    hook = player.optimizer.register_step_post_hook(lambda *_: found.append(_held(player)))
    player.step()
    hook.remove()
    return found[0]


def columns(needed: Sequence[Needed], setting: Setting, one: Contestant = NONE) -> dict[str, float | None]:
    """The figures of a table, in MB: of the rank that needs most, but for what all ranks take together.

    ``needed`` is what every rank has measured of ``one``, and beside it stands what the formula says of it.
    """
    counts = [Held(**each["held"]) for each in needed if each["held"]]
    kept = [each["activations"] for each in needed if each["activations"] is not None]
    processes = [Resident(**each["resident"]) for each in needed if each["resident"]]
    stage, one_copy = one.kind.stage, one.kind.one_copy
    said = formula(
        setting.config, setting.num_moments, setting.batch, stage=stage, ranks=len(needed), one_copy=one_copy
    )
    purposes = {
        f"{purpose}(MB)": max((asdict(each)[purpose] for each in counts), default=None)
        for purpose in asdict(Held())
    }
    found = {
        **purposes,
        "formula(MB)": said["parameters"] + said["gradients"] + said["optimizer"],
        "state(MB)": max((each.state for each in counts), default=None),
        "gathered(MB)": said["gathered"],
        "activations(MB)": max(kept, default=None),
        "peak(MB)": max((each.peak for each in processes), default=None),
        "host(MB)": together(processes) if processes else None,
    }
    return {name: None if nbytes is None else nbytes / MEGABYTE for name, nbytes in found.items()}


def _held(player: Loop) -> Held:
    found = held(player.model, player.optimizer, player.model)
    if isinstance(player.model, nn.parallel.DistributedDataParallel):
        # Its buckets lie where torch shows them to nobody; gradients are views of them, or copies.
        buckets = (
            0 if player.model.gradient_as_bucket_view else sum(p.nbytes for p in player.model.parameters())
        )
        found = replace(found, scratch=found.scratch + buckets)
    return found


def _activations(stage: Stage, player: Player) -> int | None:
    """Of one forward of the bare module: what wraps it keeps none."""
    batch: Tensor | None = getattr(player, "batch", stage.batch if isinstance(player, Serve) else None)
    if batch is None:
        return None
    return activations(stage.module, lambda: stage.loss(stage.module, batch), [batch])
