"""The runs that the repository of the Sailor paper publishes, as predicted by the plan.

F. Strati et al., "Sailor: Automating Distributed Training over Dynamic, Heterogeneous, and Geo-distributed
Clusters", SOSP 2025; github.com/eth-easl/sailor, ``sailor/Planner/simulations/validation``: step times and
peak memory (``nvidia-smi``) of Megatron-DeepSpeed in float32, with TF32 products on GH200.

    by profile   products and tensor parallelism take as long as a block in the authors' profile of one host,
                 ``sailor_profiles.csv``: what their own simulator is given. All else is predicted.
    by one run   on GH200: products reach one share of the peak per model, fitted to the run of ``FITTED``

Links: within a host the authors' bandwidths (``providers/intra_node_bandwidths.json``); between hosts
Slingshot's 200 Gbit/s per GH200, and on the other cluster the authors' 117.5 MB/s (``providers/mit``), shared
by the ranks of a host. The runs with four ranks per host had a faster network, which is not published: it is
fitted to the run ``LINK``. The plan knows one kind of GPU: of several the slowest is taken; but an RTX 3090
with tp 8, always in the first stage, is the plan's slower rank.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from instep.plan.cluster import Cluster
from instep.plan.memory_estimate import MIB, Batch, Device, Placement, largest
from instep.plan.model import Transformer
from instep.plan.step_time import TimePlan, compute_s, shared_s, step, step_s

HERE = Path(__file__).parent
FITTED = {  # the run that sets a model's efficiency
    "OPT-350M": "clariden/OPT-350/N8/plan_config_N8_D4",
    "GPT-Neo-2.7B": "clariden/GPT-NEO/N8/plan_config_N8_D4",
}
LINK = "mit/N4/plan_config_N4_D4"  # the run that sets the link of hosts with four of the mixed GPUs
LINK_SYNC_S = 1.47979  # in which that run reduces its gradients
CONTEXT = "clariden/OPT-350/N1/plan_config_N1_D1_M4_G1"  # the run that sets memory outside of tensors
# Vocabularies are padded to a multiple of 128 tp. ReLU keeps no input beside that of the next product.
_OPT = Transformer(layers=24, width=1024, heads=16, context=2048, activation="none", tied=False,
                   attention="eager")  # fmt: skip
MODELS = {"OPT-350M": _OPT, "GPT-Neo-2.7B": Transformer(layers=32, width=2560, heads=32, context=2048,
                                                        attention="eager")}  # fmt: skip
VOCAB = 50257
PEAKS = {"GH200": 494.7, "Titan RTX": 16.3, "RTX 2080": 13.4, "RTX 3090": 35.6}  # TFLOP/s; data sheets
LOCAL = {  # GB/s by GPU and ranks per host
    ("GH200", 4): 250.6, ("Titan RTX", 2): 10.8, ("Titan RTX", 4): 12.3, ("Titan RTX", 8): 24.3,
    ("RTX 2080", 4): 22.7, ("RTX 2080", 8): 24.6, ("RTX 3090", 2): 49.8, ("RTX 3090", 8): 5.3,
}  # fmt: skip
SLINGSHOT_GB_PER_S = 25
ETHERNET_GB_PER_S = 0.1175  # of a host
DEEPSPEED_BUCKET = 500e6 * 4 / MIB  # of gradients, in runtime/engine.py
LEFT_OUT = "left out"
Row = Mapping[str, Any]


def read(name: str) -> list[dict[str, str]]:
    with open(HERE / f"{name}.csv", newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def plan_of(row: Row, efficiency: float) -> TimePlan:
    """The plan of a row."""
    kinds, tp, ranks_per_host = row["gpus"].split(" + "), int(row["tp"]), int(row["ranks_per_host"])
    cluster = Cluster(
        tflops=min(PEAKS[kind] for kind in kinds),
        efficiency=efficiency,
        memory_gb_per_s=4000 if kinds == ["GH200"] else 616,
        ranks_per_host=ranks_per_host,
        local_gb_per_s=min(LOCAL[kind, ranks_per_host] for kind in kinds),
        remote_us=50,
        remote_gb_per_s=SLINGSHOT_GB_PER_S if kinds == ["GH200"] else ETHERNET_GB_PER_S / ranks_per_host,
        collectives="ring",
    )
    place = Placement(
        dp=int(row["dp"]), tp=tp, pp=int(row["pp"]), cuts=tuple(map(int, row["cuts"].split())),
        declared=False, bucket_mb=DEEPSPEED_BUCKET,
    )  # fmt: skip
    model = replace(MODELS[row["model"]], vocab_size=-(-VOCAB // (128 * tp)) * 128 * tp)
    plan = TimePlan(
        model=model,
        batch=Batch(global_size=int(row["global"]), micro_size=int(row["micro"])),
        parallel=place,
        cluster=cluster,
        strategy="flat",
    )
    if kinds != ["GH200"] and ranks_per_host == 4:  # a ring's 2 (W-1)/W of a rank's gradients, W = 4 hosts
        per_rank = largest(replace(plan, parallel=Placement(tp=4))).of("gradients")
        cluster = replace(cluster, remote_gb_per_s=2 * 3 / 4 * per_rank / LINK_SYNC_S / 1e9)
    return replace(plan, cluster=cluster)


def seconds(plan: TimePlan) -> float:
    """Of a step; DeepSpeed sends each tensor-parallel rank's slice to the next stage."""
    return step_s(step(replace(plan, parallel=replace(plan.parallel, sequence=True))))


def profiled(row: Row, profiles: Mapping[tuple[str, str, str, str], float]) -> TimePlan:
    """The plan in which forward, backward and exchanges of a block take as long as in the profile."""
    kinds, plan = row["gpus"].split(" + "), plan_of(row, 1.0)
    waits_s = 2 * shared_s(plan)[0]
    computed_s = {
        kind: profiles[row["model"], kind, row["tp"], row["micro"]] / 1e3 - waits_s for kind in kinds
    }
    slowest = computed_s.pop("RTX 3090") if len(kinds) == 3 else 0.0
    usual = max(computed_s.values())
    return replace(plan_of(row, 3 * compute_s(plan)[0] / usual), slow_by=max(slowest / usual, 1.0))


def fitted(row: Row) -> float:
    """The efficiency at which the step takes as long as measured."""
    low, high = 1e-3, 1.0
    while high - low > 1e-5:
        middle = (low + high) / 2
        slower = seconds(plan_of(row, middle)) > float(row["step_s"])
        low, high = (middle, high) if slower else (low, middle)
    return low


def predictions() -> list[dict[str, Any]]:
    """All rows, with step time and memory as predicted; none of what is left out."""
    rows = read("sailor")
    profiles = {
        (row["model"], row["gpu"], row["tp"], row["micro"]): float(row["block ms"])
        for row in read("sailor_profiles")
    }
    by_file = {row["file"]: row for row in rows}
    efficiency = {model: fitted(by_file[name]) for model, name in FITTED.items()}
    plain = largest(plan_of(by_file[CONTEXT], 1.0))
    context_mb = (int(by_file[CONTEXT]["memory_bytes"]) - plain.total + context_bytes(plain)) / 1e6
    found = []
    for row in rows:
        new: dict[str, Any] = dict(row)
        if not row["note"].startswith(LEFT_OUT):
            plan = plan_of(row, efficiency[row["model"]])
            new["by_profile_s"] = seconds(profiled(row, profiles))
            new["memory"] = largest(plan).total
            if row["gpus"] == "GH200":
                new["by_run_s"] = seconds(plan)
                new["memory_by_run"] = largest(replace(plan, device=Device(context_mb=context_mb))).total
        found.append(new)
    return found


def context_bytes(rank: Any) -> int:
    return next(line.num_bytes for line in rank.lines if line.form.startswith("CUDA context"))


FITS = {"by_run_s": FITTED.values(), "by_profile_s": [LINK], "memory_by_run": [CONTEXT]}


def off(row: Row, predicted: str, measured: str) -> float | None:
    """The error of a prediction; None where there is none: left out, fitted, copied, or not predicted."""
    copied = measured == "memory_bytes" and row["note"].startswith("memory:")
    if predicted not in row or copied or row["file"] in FITS.get(predicted, ()):
        return None
    return float(row[predicted]) / float(row[measured]) - 1


COLUMNS = {
    "step, block times by profile": ("by_profile_s", "step_s"),
    "step, efficiency by one run per model": ("by_run_s", "step_s"),
    "memory by formula": ("memory", "memory_bytes"),
    "memory, constants by one run": ("memory_by_run", "memory_bytes"),
}


def table(found: Sequence[Row]) -> list[dict[str, Any]]:
    """A line per configuration."""
    rows = []
    for row in found:
        new = {"source": row["file"].replace("plan_config_", ""), "GPUs": row["gpus"]}
        new["dp x tp x pp"] = f"{row['dp']} x {row['tp']} x {row['pp']}"
        new["micro, global batch"] = f"{row['micro']}, {row['global']}"
        new["step s"] = float(row["step_s"]) if row["step_s"] else None
        new |= _beside(row, "by_profile_s", "step_s", "by profile", 1)
        new |= _beside(row, "by_run_s", "step_s", "by one run", 1)
        new["memory GB"] = int(row["memory_bytes"]) / 1e9
        new |= _beside(row, "memory", "memory_bytes", "by formula", 1e9)
        new |= _beside(row, "memory_by_run", "memory_bytes", "constants by one run", 1e9)
        rows.append({**new, "note": row["note"]})
    return rows


def _beside(row: Row, predicted: str, measured: str, name: str, unit: float) -> dict[str, Any]:
    if predicted not in row:
        return {name: None}
    error = off(row, predicted, measured)
    words = "fitted" if row["file"] in FITS.get(predicted, ()) else "copied"
    return {name: f"{row[predicted] / unit:.4g} ({words if error is None else f'{error:+.1%}'})"}


def summary(found: Sequence[Row]) -> list[dict[str, Any]]:
    """Median and worst absolute error by group of rows."""
    groups = {
        "all": found,
        "GH200, Slingshot": [row for row in found if row["gpus"] == "GH200"],
        "GH200, micro-batches of 4 or 8 windows": [
            row for row in found if row["gpus"] == "GH200" and int(row["micro"]) >= 4
        ],
        "mixed GPUs over Ethernet": [row for row in found if row["gpus"] != "GH200"],
    }
    rows = []
    for name, (predicted, measured) in COLUMNS.items():
        before: list[float] = []
        for group, members in groups.items():
            errors = [abs(e) for row in members if (e := off(row, predicted, measured)) is not None]
            if errors in ([], before):
                continue
            before = errors
            rows.append({
                "prediction": name, "runs": group, "number": len(errors),
                "median error": f"{median(errors):.1%}", "worst": f"{max(errors):.1%}",
            })  # fmt: skip
    return rows
