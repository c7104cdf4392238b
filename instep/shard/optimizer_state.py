"""The state of a sharded optimizer: what a rank holds, gathered whole, and saved and loaded in either form.

What has the shape of its parameter, a moment, is cut as the parameter is; what has another, such as the
number of steps, is the same on all pieces. What is saved is the plain optimizer's format, or one rank's:

    whole      {"state": {number: {...}}, "param_groups": [{..., "params": [numbers]}]}
    sharded    {"sharded": {"rank", "world_size"}, "param_groups": as above,
                "pieces": [{"parameter": number, "first", "last", "state": {...}}]}

Ranges count elements in logical order.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from itertools import count, islice
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from instep.memory import as_bytes
from instep.mesh.axes import round_up
from instep.net.agree import all_tell
from instep.net.process_group import Group
from instep.shard.checks import group_options, options_text
from instep.shard.flat_parameters import ShardedParameters
from instep.state.homes import ParameterShard, shape_of
from instep.state.shards import put_elements

States = dict[int, dict[str, Any]]  # by the number of the parameter, then by name
Groups = Sequence[Mapping[str, Any]]
ALIGN = 16  # bytes, of a tensor in a message: that of the widest element
LIMIT_BYTES = 1 << 28  # of a list of tensors


def gather_state(
    shards: ShardedParameters, local: Optimizer, parameters: Sequence[Tensor], group: Group
) -> States:
    """The whole state, on every rank, from the pieces that each has. Collective.

    W steps of a broadcast, of one rank's state each; all of it passes through CPU memory.

    Raises:
        TypeError: some state is neither a tensor nor a number or a string; on all ranks.
    """

    held = [
        (number, piece, key, value)
        for number, piece in shards.held.items()
        for key, value in local.state.get(piece.tensor, {}).items()
    ]

    def describe() -> bytes:
        return json.dumps([_describe(*each) for each in held]).encode()

    _, rows = all_tell(group, "the list of optimizer state", describe, bytes, limit=LIMIT_BYTES)
    whole: States = {}
    for rank, row in enumerate(rows):
        entries = json.loads(row)
        sizes = [round_up(entry["nbytes"], ALIGN) for entry in entries]
        message = torch.empty(sum(sizes), dtype=torch.uint8, device="cpu")
        parts = message.split(sizes)
        for part, (*_, x) in zip(parts, held, strict=True) if rank == group.rank else ():
            if isinstance(x, Tensor):
                part[: x.nbytes].copy_(as_bytes(x))
        if message.numel():
            group.broadcast(message, f"the optimizer state of rank {group.ranks[rank]}", root=rank)
        for entry, part in zip(entries, parts, strict=True):
            _place(whole, entry, part, parameters[entry["parameter"]])
    return {number: whole[number] for number in sorted(whole)}


def _describe(number: int, piece: ParameterShard, key: str, value: Any) -> dict[str, Any]:
    """State of ``piece`` as JSON, without the values of a tensor."""
    entry = {"parameter": number, "first": piece.first, "key": key, "nbytes": 0}
    if isinstance(value, Tensor):
        return entry | {
            "moment": value.shape == piece.tensor.shape,
            "nbytes": value.nbytes,
            "shape": list(value.shape),
            "dtype": str(value.dtype).removeprefix("torch."),
            "on_cpu": value.is_cpu,
        }
    if value is None or isinstance(value, bool | int | float | str):
        return entry | {"value": value}
    raise TypeError(
        f"{key} of parameter {number}: expected a tensor, a number or a string, got {value!r:.80}"
    )


def _place(whole: States, entry: Mapping[str, Any], part: Tensor, parameter: Tensor) -> None:
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
        state[key] = torch.empty(shape_of(parameter), dtype=values.dtype, device=device)
    put_elements(state[key], entry["first"], values)


def part_of(value: Any, name: str, held: ParameterShard, *, cut: bool) -> Any:
    """A copy of what of a parameter's whole state belongs to ``held``.

    Raises:
        ValueError: ``value`` has the shape neither of the parameter nor of one number, and has to be ``cut``.
            A fused kernel would read and write beyond its end.
    """
    if not isinstance(value, Tensor):
        return copy.deepcopy(value)
    if value.shape == held.shape:
        return held.part_of(value).clone()
    if cut and value.numel() != 1:
        raise ValueError(
            f"{name}: expected the shape {tuple(held.shape)} of its parameter or one number, got "
            f"{tuple(value.shape)}: not a state of this optimizer over these parameters"
        )
    return value.detach().clone()


def format_sharded(
    held: Mapping[int, ParameterShard], states: Mapping[int, dict[str, Any]], groups: Groups, group: Group
) -> dict[str, Any]:
    """The pieces of this rank, with the state of each."""
    pieces = [
        {"parameter": number, "first": x.first, "last": x.last, "state": states[number]}
        for number, x in held.items()
    ]
    place = {"rank": group.rank, "world_size": group.size}
    return {"sharded": place, "pieces": pieces, "param_groups": numbered(groups)}


def numbered(groups: Groups) -> list[dict[str, Any]]:
    """The groups, with numbers for their parameters."""
    numbers = count()
    return [{**group, "params": list(islice(numbers, len(group["params"])))} for group in groups]


def saved_lines(saved: Mapping[str, Any]) -> list[str]:
    """What has to be the same on all ranks that load, as lines."""
    lines = ["sharded state" if "sharded" in saved else "whole state"]
    lines += [f"group {i}: {options_text(group)}" for i, group in enumerate(saved["param_groups"])]
    for number, state in sorted(saved.get("state", {}).items()):
        for key, value in sorted(state.items()):
            is_moment = isinstance(value, Tensor) and (value.numel() > 1 or not value.is_cpu)
            lines.append(
                f"{key} of parameter {number}: {tuple(value.shape) if is_moment else repr(value)[:80]}"
            )
    return lines


def local_state(
    saved: Mapping[str, Any], held: Mapping[int, ParameterShard], groups: Groups, group: Group, *, cut: bool
) -> dict[str, Any]:
    """What the local optimizer is to load, whose parameters are the pieces ``held``, in that order.

    Raises:
        ValueError: ``saved`` is no state of an optimizer with these groups, or is cut in another way.
    """
    if not isinstance(saved.get("param_groups"), list) or not ("state" in saved or "pieces" in saved):
        raise ValueError("expected state and param_groups of an optimizer, as from state_dict()")
    ids = [[*part["params"]] for part in saved["param_groups"]]
    if [len(part) for part in ids] != [len(part["params"]) for part in groups]:
        raise ValueError(
            f"expected groups of {[len(part['params']) for part in groups]} parameters, got "
            f"{[len(part) for part in ids]}: make the optimizer with the groups that were saved"
        )
    if "sharded" in saved:
        states = _from_pieces(saved, held, group)
    else:
        states = _from_whole(saved["state"], [x for part in ids for x in part], held, cut=cut)
    positions = {number: i for i, number in enumerate(held)}
    packed = [
        {**group_options(part), "params": [positions[x] for x in part["params"] if x in positions]}
        for part in numbered(saved["param_groups"])
    ]
    return {"state": {positions[x]: state for x, state in states.items()}, "param_groups": packed}


def _from_whole(
    state: Mapping[Any, Mapping[str, Any]],
    ids: Sequence[Any],
    held: Mapping[int, ParameterShard],
    *,
    cut: bool,
) -> States:
    unknown = [key for key in state if key not in ids]
    if unknown:
        raise ValueError(f"expected state of parameters of the groups, got some of {unknown[0]!r:.80}")
    return {
        number: {
            key: part_of(value, f"{key} of parameter {number}", piece, cut=cut)
            for key, value in state[ids[number]].items()
        }
        for number, piece in held.items()
        if ids[number] in state
    }


def _from_pieces(saved: Mapping[str, Any], held: Mapping[int, ParameterShard], group: Group) -> States:
    place = dict(saved["sharded"])
    own = {"rank": group.rank, "world_size": group.size}
    cuts = [(piece["parameter"], piece["first"], piece["last"]) for piece in saved["pieces"]]
    if place != own or cuts != [(number, x.first, x.last) for number, x in held.items()]:
        raise ValueError(
            f"expected the pieces of rank {group.rank} of {group.size}, got those of rank {place['rank']} of "
            f"{place['world_size']}, or of other parameters: load a sharded state where it was saved, and "
            "save the whole, with state_dict(), for other ranks"
        )
    return {
        piece["parameter"]: {
            key: x.detach().clone() if isinstance(x, Tensor) else x for key, x in piece["state"].items()
        }
        for piece in saved["pieces"]
        if piece["state"]
    }


def adopt_groups(groups: Sequence[dict[str, Any]], loaded: Groups, saved: Groups) -> None:
    """``groups`` take the options that the local optimizer has ``loaded``, and ``saved`` names."""
    for group, local, before in zip(groups, loaded, saved, strict=True):
        names = before.get("param_names", group.get("param_names"))
        parameters = group["params"]
        group.clear()
        group.update(group_options(local), params=parameters)
        if names is not None:
            group["param_names"] = names
