"""Rows in which the state is at stake: bad numbers, broken disks, damaged checkpoints."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.faults.acts import (
    Inside,
    ReadOnly,
    SmallDisk,
    all_flipped,
    flipped,
    missing,
    stale,
    truncated,
)
from benchmarks.faults.judge import MANIFEST, NORM, REPLICAS, SYSTEM, Expect
from benchmarks.faults.row import AT, EVERY, RESUME, SAVES, Row, Run, injected, lost

FILES = ("model.safetensors", "optimizer.safetensors", "manifest.json")
ENTRIES = {"parameter": "embedding.tokens.weight", "moment": "exp_avg/embedding.tokens.weight"}
LAG = 5  # steps that may be made until a save that goes on in the background has failed
DISK_KIB = 800  # room for one checkpoint and the rest of a run, and not for two
GOES_ON = Run(RESUME, pauses=False)
HALF = Run((*SAVES, "--stop-after", str(AT)), pauses=False)


def rows() -> Iterator[Row]:
    """All of them."""
    yield from numbers()
    yield from disks()
    yield from damages()


def numbers() -> Iterator[Row]:
    group = "bad numbers"
    run = Run(faults=(injected("nan"),))
    expect, alike = Expect(NORM, skipped=1), ("--checks.skip-steps", str(AT))
    what = f"in one rank's gradient of step {AT}, which is skipped"
    yield Row(group, "nan", what, expect, (run,), alike=alike, headline=True)
    run = Run(faults=tuple(injected("nan", step=AT + i) for i in range(6)))
    expect = Expect(NORM, (1,), says=r"rank 1 computed, is not finite", same=False)
    yield Row(group, "nan, six in a row", "one more than may be skipped: the run ends", expect, (run,))
    for kind, entry in ENTRIES.items():
        args = (*SAVES, "--checks.replicas-every", "10")
        run = Run(args, (injected("flip", phase="data", name=entry),), ranks=3)
        expect = Expect(REPLICAS, (0,), (1, 3), (), rf"rank 1\b.*{entry}", redone=10)
        what = "in one of three ranks; compared every 10 steps, the last checkpoint is taken"
        yield Row(group, f"flipped bit, {kind}", what, expect, (run,), headline=kind == "parameter")


def disks() -> Iterator[Row]:
    group = "disks"
    run = Run(SAVES, through=Inside(("kill-at=rename:2",)))
    what = "before the rename by which the second would be there"
    yield Row(group, "killed in a save", what, lost(0), (run,))
    run = Run(SAVES, through=SmallDisk(DISK_KIB), pauses=False)
    expect = Expect(SYSTEM, (1, 0), says="[Nn]o space left on device", redone=EVERY + LAG)
    what = "no room for a second checkpoint: the run ends, and is resumed elsewhere"
    yield Row(group, "full disk", what, expect, (run, GOES_ON), mounts=True, headline=True)
    run = Run(SAVES, through=Inside(("disk=EIO:fsync:9",)), pauses=False)
    expect = Expect(SYSTEM, (1, 0), says="[Ii]nput/output error", redone=EVERY + LAG)
    yield Row(group, "EIO", "in the second checkpoint and from then on", expect, (run, GOES_ON))
    run = Run(RESUME, through=ReadOnly("checkpoints"), pauses=False)
    expect = Expect(SYSTEM, (75, 1, 0), says="[Rr]ead-only file system", redone=EVERY)
    what = "the run ends, and is resumed when they can be written"
    yield Row(group, "read-only checkpoints", what, expect, (HALF, run, GOES_ON), mounts=True)
    run = Run(RESUME, through=ReadOnly(), pauses=False)
    expect = Expect(SYSTEM, (75, 2, 0), says="cannot be written to")
    yield Row(group, "read-only directory", "refused", expect, (HALF, run, GOES_ON), mounts=True)


def damages() -> Iterator[Row]:
    group = "checkpoints"
    found = {f"flipped bit, {name}": flipped(name) for name in FILES}
    found |= {"truncated": truncated("model.safetensors"), "missing": missing("optimizer.safetensors")}
    expect = Expect(MANIFEST, (75, 0), says="passed over", redone=EVERY)
    for name, damage in found.items():
        runs = (HALF, Run(RESUME, damage=damage, pauses=False))
        what = "in the newest: the one before is taken"
        yield Row(group, name, what, expect, runs, headline=name == "truncated")
    runs = (HALF, Run(RESUME, damage=stale, pauses=False))
    what = "a temporary directory in the place of the newest"
    yield Row(group, "half a save", what, Expect(MANIFEST, (75, 0), redone=EVERY), runs)
    runs = (HALF, Run(RESUME, damage=all_flipped, pauses=False))
    says = "expected a checkpoint that verifies"
    expect = Expect(MANIFEST, (75, 3), says=says, same=False)
    yield Row(group, "all damaged", "a bit of each is flipped: refused", expect, runs)
