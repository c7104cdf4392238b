"""The state hash of some 40 placements, to compare a redesign with the code before it on one machine.

python benchmarks/placement/hashes.py before.json            writes the hashes; some two minutes
python benchmarks/placement/hashes.py before.json            again: compares, exit code 1 if one differs
python benchmarks/placement/hashes.py before.json --only pp  only the placements with "pp" in their name

Hashes depend on the processor and on torch's build, so a file of hashes is never committed.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.placement.run import printing_to, recipe, trained
from benchmarks.placement.served import served
from instep.bench.hosts import network, obstacle
from instep.pipeline.schedules import NAMES
from instep.recipes.text_config import Config
from instep.run.folder import SUMMARY
from instep.run.toml import to_toml

ROOT = Path(__file__).parents[2]
DATA = ROOT / "LICENSE"  # any text that stays
STEPS = 6
KILLS = ("kill:rank=1,step=2,phase=exchange", "kill:rank=0,step=4,phase=update")
HOSTS = "two hosts"


def placements() -> Iterator[tuple[str, dict[str, Any]]]:
    """Names, and what each changes: settings of ``parallel``, and ``ranks``, ``fault``, ``resumed``."""
    for strategy in ("naive", "flat", "overlap", "bucketed", "server"):
        yield f"{strategy} shm 3", {"strategy": strategy, "backend": "shm", "ranks": 3}
        yield f"{strategy} gloo 2", {"strategy": strategy, "backend": "gloo", "ranks": 2, "bucket_mb": 0.1}
    for ranks in (1, 4, 5):
        yield f"bucketed shm {ranks}", {"backend": "shm", "ranks": ranks, "bucket_mb": 1.0}
        yield f"bucketed gloo {ranks}", {"backend": "gloo", "ranks": ranks, "bucket_mb": 1.0}
    for stage in (1, 2, 3):
        yield f"stage {stage} shm 3", {"shard_stage": stage, "backend": "shm", "ranks": 3}
        yield f"stage {stage} gloo 2", {"shard_stage": stage, "backend": "gloo", "ranks": 2}
        yield f"stage {stage} 2 x 2", {"shard_stage": stage, "shard": 2, "ranks": 4}
        yield f"stage {stage} killed", {"shard_stage": stage, "ranks": 3, "fault": KILLS}
    for schedule in NAMES:
        yield f"pp {schedule} 2", {"pp": 2, "schedule": schedule, "ranks": 2, "backend": "gloo"}
    yield "pp 1f1b 2 x 2 shm", {"pp": 2, "ranks": 4, "backend": "shm"}
    yield "pp 1f1b 4 killed", {"pp": 2, "ranks": 4, "fault": KILLS}
    yield "bucketed shm 3 killed", {"backend": "shm", "ranks": 3, "fault": KILLS}
    yield "bucketed gloo 3 killed", {"backend": "gloo", "ranks": 3, "fault": KILLS}
    yield "bucketed 2 then 3", {"ranks": 2, "resumed": 3}
    for nodes, rounding in (("bfloat16", "nearest"), ("int8", "stochastic")):
        for backend, ranks in (("shm", 1), ("shm", 3), ("gloo", 2)):
            options = {"nodes": nodes, "rounding": rounding, "backend": backend, "ranks": ranks}
            yield f"{nodes} {backend} {ranks}", options
    for per_host in (1, 2):
        yield f"{HOSTS} of {per_host}", {"per_host": per_host}


def hash_of(options: dict[str, Any], directory: Path) -> str:
    """The state hash after ``STEPS`` steps of a run in ``directory``."""
    base = replace(recipe(DATA), steps=STEPS)
    if "per_host" in options:
        return _on_two_hosts(base, options["per_host"], directory)
    own = {name: options[name] for name in ("ranks", "fault") if name in options}
    parallel = {name: x for name, x in options.items() if name not in ("ranks", "fault", "resumed")}
    if parallel.get("strategy") == "server":
        del parallel["strategy"]
        return served(replace(base, parallel=replace(base.parallel, **parallel), **own), directory / "hash")
    config = replace(base, parallel=replace(base.parallel, **parallel), **own)
    resumed = replace(config, ranks=options["resumed"]) if "resumed" in options else None
    return trained(config, directory, resumed)


def _on_two_hosts(base: Config, per_host: int, directory: Path) -> str:
    (directory / "config.toml").write_text(to_toml(replace(base, run_dir=directory / "run")))
    words = [sys.executable, "-m", "instep", "train", "--config", directory / "config.toml"]
    with network(2) as made:
        hosts = [host for host in made.hosts for _ in range(per_host)]
        for host, environment in zip(hosts, made.environments(per_host), strict=True):
            host.popen(words, env=environment)
        codes = [process.wait() for host in made.hosts for process in host.processes]
    if any(codes):
        raise RuntimeError(f"ranks on two hosts ended with codes {codes}")
    return str(json.loads((directory / "run" / SUMMARY).read_text())["state_sha256"])


def main(args: Sequence[str] | None = None) -> int:
    """Write or compare; return the exit code."""
    words = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    words.add_argument("file", type=Path)
    words.add_argument("--only", default="", help="only placements with this in their name")
    given = words.parse_args(args)
    before = json.loads(given.file.read_text()) if given.file.exists() else {}
    found: dict[str, str] = {}
    why = obstacle()
    with tempfile.TemporaryDirectory(prefix="instep-hashes-") as folder:
        for name, options in placements():
            if given.only not in name:
                continue
            if name.startswith(HOSTS) and why is not None:
                print(f"{name}: skipped, {why}")
                continue
            began, log = time.monotonic(), Path(folder, "log")
            directory = Path(tempfile.mkdtemp(dir=folder))
            try:
                with printing_to(log):
                    found[name] = hash_of(options, directory)
            except Exception as error:
                found[name] = f"{type(error).__name__}: {error}; {log.read_text()[-500:]}"
            verdict = "" if name not in before else "same" if before[name] == found[name] else "DIFFERS"
            print(f"{name}: {found[name][:12]} {verdict} ({time.monotonic() - began:.1f} s)", flush=True)
    kinds = {hash[:12] for name, hash in found.items() if "int8" not in name and "bfloat16" not in name}
    differing = [name for name in found if name in before and before[name] != found[name]]
    print(f"{len(found)} placements, {len(kinds)} hash(es) in float32, {len(differing)} differ from before")
    if not before:
        given.file.write_text(json.dumps(found, indent=1))
    return int(bool(differing) or len(kinds) != 1)


if __name__ == "__main__":
    sys.exit(main())
