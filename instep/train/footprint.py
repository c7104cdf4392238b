"""The memory of a run: what every rank holds, what its processes take, and what the formulas say of both.

Model states in float32 are a weight, a gradient and the optimizer's moments, of 4 bytes each: 16 bytes per
parameter with AdamW, 12 with SGD and momentum, 8 with plain SGD. Source: S. Rajbhandari et al., "ZeRO: Memory
Optimizations Toward Training Trillion Parameter Models", arXiv 1910.02054, section 3.1, without the halves.
Its stages divide them among W ranks, here for AdamW:

    stage 0    weight 4      gradient 4      moments 8          16
    stage 1    4             4               8 / W              8 + 8 / W
    stage 2    4             4 / W           8 / W              4 + 12 / W
    stage 3    4 / W         4 / W           8 / W              16 / W, and the units that are gathered
    one copy   4 / W of the host's, with stage 1 or 2

Two units of stage 3 are gathered at a time, the one that computes and the next; and all that is in no block.

Activations of one micro-batch, floats per token that a block keeps for backward (h: width, f: feed-forward
width; attention by a fused kernel, which keeps no T x T matrix):

    norm  h | query, key, value from h, 3 h | mixed h, out from it | norm h | up from h | GELU f | down f
    2 norms in 2 h, 4 products in 3 h + f, and what they are made of: 3 h + f           = 8 h + 2 f

With f = 4 h that is 16 h floats, 64 bytes per token, block and unit of width: twice the 34 in half precision
of V. Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", arXiv 2205.05198,
section 4.1, less 2 for dropout masks. The two ends of the model add 2 h and the logits.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from instep.mesh.group import Group
from instep.mesh.resident import Resident, resident, together
from instep.models.config import GPTConfig, num_parameters
from instep.train.canary import synthetic_windows
from instep.train.config import Optim
from instep.train.held import activations, held
from instep.train.losses import text_loss
from instep.train.trainer import Trainer

OPERATION = "the gathering of memory"
PROCESS = {"resident_peak": "peak", "resident": "now", "private": "private", "pss": "pss"}
FLOAT_BYTES = 4
CLOSE = 0.05  # padding and the optimizer's counts may add as much before "as the formula says" is untrue


def footprint(trainer: Trainer) -> dict[str, Any]:
    """``memory`` of ``summary.json``, the same on every rank. Collective over the world.

    Activations are those of one more forward, of a micro-batch that nobody learns from.
    """
    config = trainer.config
    mine = {
        **asdict(held(trainer.module, trainer.optimizer, trainer.parallel.model)),
        "activations": _activations(trainer),
    }
    model = GPTConfig(**asdict(config.model))
    return {
        **everyone(trainer.mesh.world.group, mine),
        "formula": formula(
            model,
            num_moments(config.optim),
            config.batch.micro_size,
            autocast=config.autocast == "bf16",
            stage=config.parallel.shard_stage,
            ranks=trainer.parallel.row_size,
            one_copy=config.parallel.one_copy,
        ),
    }


def everyone(group: Group, mine: Mapping[str, int | None]) -> dict[str, Any]:
    """``ranks``, a row of bytes for each: ``mine``, and what its process takes; and ``hosts``. Collective.

    ``resident_peak`` is the most that was resident since the process began, though it may have been one of
    fewer or more ranks then: of a process with the pages that it shares, of a host each page once.
    ``resident``, ``private`` and ``pss`` are of now. None where the kernel does not tell.
    """
    now = resident()
    told = {**mine, **{name: now and getattr(now, field) for name, field in PROCESS.items()}}
    answers = group.all_gather_bytes(json.dumps(told).encode(), OPERATION)
    rows = [{"rank": rank, **json.loads(each)} for rank, each in zip(group.ranks, answers, strict=True)]
    hosts: dict[str, list[dict[str, Any]]] = {}
    for row, peer in zip(rows, group.peers.table, strict=True):
        hosts.setdefault(peer.host, []).append(row)
    return {"ranks": rows, "hosts": [_host(of_it) for of_it in hosts.values()]}


def formula(
    model: GPTConfig,
    moments: int,
    micro_size: int,
    *,
    autocast: bool = False,
    stage: int = 0,
    ranks: int = 1,
    one_copy: bool = False,
) -> dict[str, int | float]:
    """Bytes of one of ``ranks`` ranks with sharding of ``stage``, whose optimizer keeps ``moments`` floats
    per parameter; ``bytes_per_parameter`` is of what stays, without ``gathered``. With ``one_copy`` all ranks
    are of one host, and a rank's share of the weights is what each counts of them."""
    size = FLOAT_BYTES * num_parameters(model)
    kept = {
        "parameters": (1 if one_copy else 3, size),
        "gradients": (2, size),
        "optimizer": (1, moments * size),
    }
    states = {name: -(-whole // ranks) if stage >= cut else whole for name, (cut, whole) in kept.items()}
    each = round(sum(states.values()) / num_parameters(model), 2)
    return {
        "bytes_per_parameter": int(each) if each.is_integer() else each,
        **states,
        "gathered": _gathered_bytes(model) if stage >= 3 and ranks > 1 else 0,
        "activations": activation_bytes(model, micro_size, autocast=autocast),
    }


def _gathered_bytes(model: GPTConfig) -> int:
    """Of all that is in no block, and of two blocks."""
    block = num_parameters(replace(model, layers=model.layers + 1)) - num_parameters(model)
    rest = num_parameters(model) - model.layers * block
    return FLOAT_BYTES * (rest + min(model.layers, 2) * block)


def num_moments(optim: Optim) -> int:
    """How many floats per parameter the optimizer keeps."""
    return 2 if optim.name == "adamw" else int(optim.momentum > 0)


def activation_bytes(model: GPTConfig, micro_size: int, *, autocast: bool = False) -> int:
    """What a micro-batch keeps for backward, without ``checkpoint``.

    Each dropout keeps its mask as numbers, as on CPUs. ``autocast`` halves all but the norms and the
    embedding, and keeps the converted weights of the products.
    """
    h, f, layers, vocabulary = model.width, model.d_ff, model.layers, model.vocab_size
    item, drops = (2 if autocast else FLOAT_BYTES), int(model.dropout > 0)
    block = 2 * h * FLOAT_BYTES + (6 * h + 2 * f + 2 * h * drops) * item
    ends = (h + h * drops + vocabulary) * FLOAT_BYTES + h * item
    converted = (layers * (4 * h * h + 2 * h * f) + vocabulary * h) * item if autocast else 0
    return micro_size * model.context * (layers * block + ends) + converted


def words(memory: Mapping[str, Any]) -> str:
    """A line for people about ``memory`` of ``summary.json``: of ranks that differ, the greatest figure."""
    rows = memory["ranks"]
    others = [
        f" + {_mb(most)} {name}"
        for name in ("activations", "scratch", "buffers")
        if (most := _most(rows, name))
    ]
    text = _state(rows, memory["formula"]) + "".join(others)
    if resident := _most(rows, "resident_peak"):
        text += f"; {_mb(resident)} resident"
    if len(rows) > 1 and (whole := _most(memory["hosts"], "resident_peak")):
        text += f", {_mb(whole)} for all ranks of {'the' if len(memory['hosts']) == 1 else 'a'} host"
    return text


def _state(rows: Sequence[Mapping[str, Any]], said: Mapping[str, int | float]) -> str:
    """Model states, and how they stand to the formula."""
    states = [row["parameters"] + row["gradients"] + row["optimizer"] for row in rows]
    most, predicted = max(states), said["parameters"] + said["gradients"] + said["optimizer"]
    each, ratio = said["bytes_per_parameter"], most / predicted
    formula = f"{each} bytes per parameter, as the formula says"
    if abs(ratio - 1) > CLOSE:
        formula = f"{each * ratio:.1f} bytes per parameter; the formula says {each}"
    return f"{'' if min(states) == most else 'up to '}{_mb(most)} of state per rank ({formula})"


def _most(rows: Sequence[Mapping[str, Any]], name: str) -> int:
    """The greatest that is known, else 0."""
    return max((row[name] for row in rows if row[name] is not None), default=0)


def _activations(trainer: Trainer) -> int | None:
    """None where that much is not free any more: a run does not fail for want of a figure."""
    config, module, device = trainer.config, trainer.module, trainer.mesh.device
    windows = synthetic_windows(config)
    try:
        return activations(
            module, lambda: text_loss(module, windows, device=device, autocast=config.autocast)
        )
    except Exception:
        return None


def _host(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    ranks = [row["rank"] for row in rows]
    if any(row["resident_peak"] is None for row in rows):
        return {"ranks": ranks, "resident_peak": None}
    processes = [Resident(**{field: row[name] for name, field in PROCESS.items()}) for row in rows]
    return {"ranks": ranks, "resident_peak": together(processes)}


def _mb(nbytes: int) -> str:
    """Three digits that count, in MB of 10**6 bytes."""
    megabytes = nbytes / 1e6
    digits = 3 if megabytes < 0.01 else max(0, 2 - math.floor(math.log10(megabytes)))
    return f"{megabytes:,.{min(digits, 3)}f} MB"
