"""What a rank holds in memory, by what it is for: bytes of storages, whatever number of tensors show them.

A tensor says how many bytes it shows, not how many it keeps: ``.grad`` is a view of its bucket, a tied weight
has two names, a sharded parameter is a piece of one flat buffer with padding. So ranges of addresses are
counted, each once, for the first purpose that has it:

    parameters    of the module, trained or frozen; where they are in slices these, and what is gathered now
    gradients     ``.grad``, and the buckets or slices that it lies in between steps
    optimizer     its state: moments, and one number per parameter for the step
    buffers       of the module
    scratch       partial sums of several micro-batches, what waits to be sent, what an exchange receives

Activations come and go, and are not counted.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from instep.launch.process_memory import ResidentMemory, resident_memory, total_resident
from instep.net.process_group import Group
from instep.state.homes import JoinedOptimizers, homes, offered

if TYPE_CHECKING:
    from instep.run.script_training import ScriptTraining

OPERATION = "the gathering of memory"
PROCESS = {"resident_peak": "peak", "resident": "now", "private": "private", "pss": "pss"}
CLOSE = 0.05  # padding and the optimizer's counts may add as much before "as the formula says" is untrue

Ranges = dict[torch.device, list[tuple[int, int]]]  # first address and the one after the last


@dataclass(frozen=True)
class MemoryUsage:
    """Bytes that one rank holds from step to step."""

    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    buffers: int = 0
    scratch: int = 0

    @property
    def state(self) -> int:
        """What the formulas speak of: parameters, gradients and optimizer state."""
        return self.parameters + self.gradients + self.optimizer


def memory_usage(
    module: nn.Module, optimizer: Optimizer | JoinedOptimizers | None = None, model: Any = None
) -> MemoryUsage:
    """What this rank holds to train ``module`` with ``optimizer``, wrapped as ``model``. No communication.

    Gradients outside of buckets count while they are there: before ``zero_grad``.
    """
    wrapped, divided = offered(model), offered(optimizer)
    there = homes(module.parameters()) + ([] if divided is None else list(divided.homes))
    there = list({id(x): x for x in there}.values())
    alone = (optimizer,) if isinstance(optimizer, Optimizer) else ()
    steppers = alone if divided is None else divided.locals
    return count(
        parameters=[
            *module.parameters(),
            *(x for home in there for x in (*(held.tensor for held in home.held), *home.gathered)),
        ],
        gradients=[
            *(() if wrapped is None else wrapped.gradients()),
            *(p.grad for p in module.parameters() if p.grad is not None),
        ],
        optimizer=[x for local in steppers for x in _tensors(dict(local.state))],
        buffers=module.buffers(),
        scratch=() if wrapped is None else wrapped.scratch(),
    )


def count(**tensors: Iterable[Tensor]) -> MemoryUsage:
    """Bytes by purpose, named as in ``MemoryUsage``; memory of two purposes counts for the first."""
    ranges: Ranges = {}
    found, before = {}, 0
    for purpose in (field.name for field in fields(MemoryUsage)):
        for x in tensors.pop(purpose, ()):
            _add(ranges, x)
        after = sum(map(_covered, ranges.values()))
        found[purpose], before = after - before, after
    if tensors:
        raise TypeError(f"no purpose of memory is called {', '.join(tensors)}")
    return MemoryUsage(**found)


def _tensors(tree: Any) -> Iterator[Tensor]:
    """The tensors in nested dicts, lists and tuples."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, dict):
        for value in tree.values():
            yield from _tensors(value)
    elif isinstance(tree, list | tuple):
        for value in tree:
            yield from _tensors(value)


def _add(ranges: Ranges, x: Tensor) -> None:
    for part in (x._indices(), x._values()) if x.is_sparse else (x,):
        storage = part.untyped_storage()
        if part.device.type != "meta" and storage.nbytes():
            first = storage.data_ptr()
            ranges.setdefault(part.device, []).append((first, first + storage.nbytes()))


def _covered(ranges: Iterable[tuple[int, int]]) -> int:
    """How many addresses are in at least one of ``ranges``."""
    total = end = 0
    for first, last in sorted(ranges):
        total += max(last - max(first, end), 0)
        end = max(end, last)
    return total


# Of all ranks, and in words.


def run_memory(training: ScriptTraining) -> dict[str, Any]:
    """``memory`` of ``summary.json``, the same on every rank; "formula" of each rank is None where there is
    none, and that of them all is the one that asks for most.

    Collective over the world.
    """
    counted = asdict(training.memory_usage())
    found = everyone(training.mesh.world.group, {**counted, "formula": training.memory_estimate()})
    said = [row["formula"] for row in found["ranks"] if row["formula"] is not None]
    return {**found, "formula": max(said, key=_states, default=None)}


def everyone(group: Group, mine: Mapping[str, Any]) -> dict[str, Any]:
    """``ranks``, a row of bytes for each: ``mine``, and what its process takes; and ``hosts``. Collective.

    ``resident_peak`` is the most that was resident since the process began, though it may have been one of
    fewer or more ranks then: of a process with the pages that it shares, of a host each page once.
    ``resident``, ``private`` and ``pss`` are of now. None where the kernel does not tell.
    """
    now = resident_memory()
    told = {**mine, **{name: now and getattr(now, field) for name, field in PROCESS.items()}}
    answers = group.all_gather_bytes(json.dumps(told).encode(), OPERATION)
    rows = [{"rank": rank, **json.loads(each)} for rank, each in zip(group.ranks, answers, strict=True)]
    hosts: dict[str, list[dict[str, Any]]] = {}
    for row, peer in zip(rows, group.peers.table, strict=True):
        hosts.setdefault(peer.host, []).append(row)
    return {"ranks": rows, "hosts": [_host(of_it) for of_it in hosts.values()]}


def words(memory: Mapping[str, Any]) -> str:
    """A line for people about ``memory`` of ``summary.json``: of ranks that differ, the greatest figure."""
    rows = memory["ranks"]
    others = [f" + {_mb(most)} {name}" for name in ("scratch", "buffers") if (most := _most(rows, name))]
    text = _model_states(rows, memory["formula"]) + "".join(others)
    if resident := _most(rows, "resident_peak"):
        text += f"; {_mb(resident)} resident"
    if len(rows) > 1 and (whole := _most(memory["hosts"], "resident_peak")):
        text += f", {_mb(whole)} for all ranks of {'the' if len(memory['hosts']) == 1 else 'a'} host"
    return text


def _model_states(rows: Sequence[Mapping[str, Any]], said: Mapping[str, int | float] | None) -> str:
    """Model states, and how they stand to the formula."""
    states = list(map(_states, rows))
    most = max(states)
    if said is None:
        return f"{'' if min(states) == most else 'up to '}{_mb(most)} of state per rank"
    each, ratio = said["bytes_per_parameter"], most / _states(said)
    formula = f"{each} bytes per parameter, as the formula says"
    if abs(ratio - 1) > CLOSE:
        formula = f"{each * ratio:.1f} bytes per parameter; the formula says {each}"
    return f"{'' if min(states) == most else 'up to '}{_mb(most)} of state per rank ({formula})"


def _states(row: Mapping[str, Any]) -> int:
    """Bytes of model states."""
    found: int = row["parameters"] + row["gradients"] + row["optimizer"]
    return found


def _most(rows: Sequence[Mapping[str, Any]], name: str) -> int:
    """The greatest that is known, else 0."""
    return max((row[name] for row in rows if row[name] is not None), default=0)


def _host(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    ranks = [row["rank"] for row in rows]
    if any(row["resident_peak"] is None for row in rows):
        return {"ranks": ranks, "resident_peak": None}
    processes = [ResidentMemory(**{field: row[name] for name, field in PROCESS.items()}) for row in rows]
    return {"ranks": ranks, "resident_peak": total_resident(processes)}


def _mb(nbytes: int) -> str:
    """Three digits that count, in MB of 10**6 bytes."""
    megabytes = nbytes / 1e6
    digits = 3 if megabytes < 0.01 else max(0, 2 - math.floor(math.log10(megabytes)))
    return f"{megabytes:,.{min(digits, 3)}f} MB"
