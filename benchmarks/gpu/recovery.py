"""A rank is killed and replaced, with the bits of the undisturbed run; a spare starts no CUDA before."""

from __future__ import annotations

import json
import re
import tempfile
from pathlib import Path

from benchmarks.gpu.part import ROOT, Part, instep, main

SPARE = Path(__file__).with_name("spare.py")
KILLS = ("kill:rank=1,step=3,phase=exchange", "kill:rank=0,step=5,phase=backward")


def kill(part: Part) -> None:
    """``instep train`` on one rank, on two, and on two of which first one is killed, then the other."""
    expected = ""
    for what, words in {
        "one rank": ("-n", 1),
        "two ranks": ("-n", 2),
        "two ranks, two kills": ("-n", 2, *(word for kill in KILLS for word in ("--fault", kill))),
    }.items():
        with tempfile.TemporaryDirectory() as folder:
            run = Path(folder, "run")
            try:
                instep("train", *recipe(part), *words, "--run-dir", run, cwd=Path(folder))
            except RuntimeError as error:
                part.found(what, "failed", why=str(error))
                continue
            summary = json.loads((run / "summary.json").read_text())
            faults = (run / "faults.jsonl").read_text() if (run / "faults.jsonl").exists() else ""
            device = re.findall(r'"device": "(\w+)"', (run / "steps.jsonl").read_text())[0]
        digest, recovered = summary["state_sha256"], faults.count('"recovery"')
        expected = expected or digest
        as_planned = device in part.device and recovered == words.count("--fault")
        verdict = "differs" if digest != expected else "same" if as_planned else "failed"
        part.found(what, verdict, device=device, recoveries=recovered, state_sha256=digest)


def recipe(part: Part) -> list[object]:
    """A small GPT with dropout and clipping on the package's own source."""
    size = [] if part.quick else ["--model.layers", 4, "--model.width", 256]
    words = ["--steps", 8, "--data", ROOT / "instep" / "recipes", "--eval.windows", 8, *size]
    words += ["--model.dropout", 0.1]
    return [*words, "--parallel.device", part.device, "--parallel.backend", "gloo", "--timeout-s", 30]


def spare(part: Part) -> None:
    """A script under ``instep run`` in which every process writes down when it came to the device."""
    with tempfile.TemporaryDirectory() as folder:
        told = Path(folder, "told.jsonl")
        instep("run", "-n", 2, "--fault", KILLS[0], SPARE, part.device, told, cwd=Path(folder))
        lines = [json.loads(line) for line in told.read_text().splitlines()]
    before, after, done = (
        {x["pid"]: x for x in lines if x["at"] == at} for at in ("before", "after", "done")
    )
    lost_s = next(x["s"] for x in lines if x["at"] == "waited")
    late = [pid for pid in after if before[pid]["s"] < lost_s < after[pid]["s"]]
    early = any(x["cuda"] for x in before.values())
    seen = all(x["cuda"] == part.on_gpu for x in done.values())  # that the check sees CUDA where it is
    part.found("no CUDA before a device is given", "failed" if early or not seen else "same")
    verdict = "same" if len(late) == 1 else "failed"
    part.found("a spare waits until a rank is lost", verdict, processes=len(before), waited=len(late))


if __name__ == "__main__":
    main({"kill": kill, "spare": spare})
