"""The state of an optimizer in pieces, one rank each, and whole.

What has the shape of its parameter, a moment, is cut as the parameter is; what has another, such as the
number of steps, is the same on all pieces.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from instep.mesh.exits import as_told
from instep.mesh.group import Group
from instep.mesh.slices import round_up
from instep.shard.shards import Shards
from instep.shard.space import Held, in_memory_order, with_strides

States = dict[int, dict[str, Any]]  # by the number of the parameter, then by name
ALIGN = 16  # bytes, of a tensor in a message: that of the widest element
LIMIT_BYTES = 1 << 28  # of a list of tensors


class LocalState(Mapping[Tensor, dict[str, Any]]):
    """``optimizer.state``, where one rank has all of it; an error where it has not.

    A rank of several holds some pieces. Whatever this showed of a parameter would be taken for the whole.
    """

    def __init__(self, held: Mapping[int, Held], local: Optimizer, num_ranks: int) -> None:
        self._held, self._local, self._num_ranks = held, local, num_ranks

    def __getitem__(self, parameter: Tensor) -> dict[str, Any]:
        self._require_whole()
        for held in self._held.values():
            if held.parameter is parameter:
                return self._local.state[held.tensor]
        raise KeyError("a parameter that this optimizer does not update")

    def __iter__(self) -> Iterator[Tensor]:
        self._require_whole()
        return (held.parameter for held in self._held.values() if held.tensor in self._local.state)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __contains__(self, parameter: object) -> bool:
        return any(parameter is known for known in self)

    def __repr__(self) -> str:
        return f"<optimizer state, sharded over {self._num_ranks} ranks>"

    def _require_whole(self) -> None:
        if self._num_ranks > 1:
            raise RuntimeError(
                f"optimizer.state is spread over {self._num_ranks} ranks: call state_dict() on every rank "
                "for the whole of it, or sharded_state_dict() for this rank's pieces"
            )


def gather(shards: Shards, local: Optimizer, parameters: Sequence[Tensor], group: Group) -> States:
    """The whole state, on every rank, from the pieces that each has. Collective.

    W steps of a broadcast, of one rank's state each; all of it passes through CPU memory.

    Raises:
        TypeError: some state is neither a tensor nor a number or a string; ValueError on the other ranks.
    """
    headers, tensors, problem = _describe(shards.held, local)
    data = json.dumps({"entries": headers, "problem": str(problem or "")}).encode()
    rows = group.all_gather_bytes(data, "the list of optimizer state", limit=LIMIT_BYTES)
    described = [json.loads(row) for row in rows]
    if problem is not None:
        raise problem
    whole: States = {}
    for rank, row in enumerate(described):
        if row["problem"]:
            raise as_told(ValueError(f"rank {group.ranks[rank]}: {row['problem']}"))
        message = torch.empty(sum(_room(entry) for entry in row["entries"]), dtype=torch.uint8, device="cpu")
        parts = message.split([_room(entry) for entry in row["entries"]])
        if rank == group.rank:
            for part, x in zip(parts, tensors, strict=True):
                if x is not None:
                    part[: x.numel() * x.itemsize].copy_(in_memory_order(x).view(torch.uint8))
        if message.numel():
            group.broadcast(message, f"the optimizer state of rank {group.ranks[rank]}", root=rank)
        for entry, part in zip(row["entries"], parts, strict=True):
            parameter = parameters[entry["parameter"]]
            _place(whole, entry, part, parameter, shards.strides_of(parameter))
    return {number: whole[number] for number in sorted(whole)}


def _describe(
    held: Mapping[int, Held], local: Optimizer
) -> tuple[list[dict[str, Any]], list[Tensor | None], TypeError | None]:
    """What this rank has, as JSON, and its tensors, dense."""
    headers: list[dict[str, Any]] = []
    tensors: list[Tensor | None] = []
    for number, piece in held.items():
        for key, value in local.state.get(piece.tensor, {}).items():
            entry = {"parameter": number, "first": piece.first, "last": piece.last, "key": key, "nbytes": 0}
            if isinstance(value, Tensor):
                moment = value.shape == piece.tensor.shape
                value = with_strides(value, piece.tensor.stride()) if moment else value.detach().contiguous()
                entry |= {
                    "moment": moment,
                    "nbytes": value.numel() * value.itemsize,
                    "shape": list(value.shape),
                    "dtype": str(value.dtype).removeprefix("torch."),
                    "on_cpu": value.device.type == "cpu",
                }
            elif value is None or isinstance(value, bool | int | float | str):
                entry["value"] = value
            else:
                name = f"{key} of parameter {number}"
                return (
                    [],
                    [],
                    TypeError(f"{name}: expected a tensor, a number or a string, got {value!r:.80}"),
                )
            headers.append(entry)
            tensors.append(value if isinstance(value, Tensor) else None)
    return headers, tensors, None


def _room(entry: Mapping[str, Any]) -> int:
    return round_up(entry["nbytes"], ALIGN)


def _place(
    whole: States, entry: Mapping[str, Any], part: Tensor, parameter: Tensor, strides: tuple[int, ...]
) -> None:
    """Put what ``entry`` describes and ``part`` holds where it belongs."""
    state, key = whole.setdefault(entry["parameter"], {}), entry["key"]
    if "value" in entry:
        state[key] = entry["value"]
        return
    device = torch.device("cpu") if entry["on_cpu"] else parameter.device
    values = part[: entry["nbytes"]].view(getattr(torch, entry["dtype"]))
    if not entry["moment"]:
        state[key] = values.reshape(entry["shape"]).to(device, copy=True)
        return
    if key not in state:
        state[key] = torch.empty_strided(parameter.shape, strides, dtype=values.dtype, device=device)
    in_memory_order(state[key])[entry["first"] : entry["last"]].copy_(values)


def part_of(value: Any, name: str, held: Held, *, cut: bool) -> Any:
    """A copy of what of a parameter's whole state belongs to ``held``.

    Raises:
        ValueError: ``value`` has the shape neither of the parameter nor of one number, and has to be ``cut``.
            A fused kernel would read and write beyond its end.
    """
    if not isinstance(value, Tensor):
        return copy.deepcopy(value)
    if value.shape == held.parameter.shape:
        return held.part_of(value).clone()
    if cut and value.numel() != 1:
        raise ValueError(
            f"{name}: expected the shape {tuple(held.parameter.shape)} of its parameter or one number, got "
            f"{tuple(value.shape)}: not a state of this optimizer over these parameters"
        )
    return value.detach().clone()
