"""The state of a sharded optimizer: what a rank holds, gathered whole, and saved and loaded in either form.

What has the shape of its parameter, a moment, is cut as the parameter is; what has another, such as the
number of steps, is the same on all pieces. What is saved is the plain optimizer's format, or one rank's:

    whole      {"state": {number: {...}}, "param_groups": [{..., "params": [numbers]}]}
    sharded    {"sharded": {"rank", "world_size", "order": "logical"}, "param_groups": as above,
                "pieces": [{"parameter": number, "first", "last", "state": {...}}]}

A sharded state without "order" is an older one, whose ranges counted elements in the order of memory.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from instep.launch.rank_exit import mark_secondary
from instep.memory import as_bytes
from instep.mesh.axes import round_up
from instep.net.process_group import Group
from instep.shard.checks import group_options, options_text
from instep.shard.flat_parameters import ShardedParameters
from instep.state.homes import ParameterShard, home, in_order, shape_of, with_strides
from instep.state.shards import put_elements

States = dict[int, dict[str, Any]]  # by the number of the parameter, then by name
Groups = Sequence[Mapping[str, Any]]
ALIGN = 16  # bytes, of a tensor in a message: that of the widest element
LIMIT_BYTES = 1 << 28  # of a list of tensors
LOGICAL = "logical"  # the order of elements that ranges count


class LocalOptimizerState(Mapping[Tensor, dict[str, Any]]):
    """``optimizer.state``, where one rank has all of it; an error where it has not.

    A rank of several holds some pieces. Whatever this showed of a parameter would be taken for the whole.
    """

    def __init__(self, held: Mapping[int, ParameterShard], local: Optimizer, num_ranks: int) -> None:
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


def gather_state(
    shards: ShardedParameters, local: Optimizer, parameters: Sequence[Tensor], group: Group
) -> States:
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
            raise mark_secondary(ValueError(f"rank {group.ranks[rank]}: {row['problem']}"))
        message = torch.empty(
            sum(_padded_bytes(entry) for entry in row["entries"]), dtype=torch.uint8, device="cpu"
        )
        parts = message.split([_padded_bytes(entry) for entry in row["entries"]])
        if rank == group.rank:
            for part, x in zip(parts, tensors, strict=True):
                if x is not None:
                    part[: x.nbytes].copy_(as_bytes(x))
        if message.numel():
            group.broadcast(message, f"the optimizer state of rank {group.ranks[rank]}", root=rank)
        for entry, part in zip(row["entries"], parts, strict=True):
            parameter = parameters[entry["parameter"]]
            _place(whole, entry, part, parameter, shards.strides_of(parameter))
    return {number: whole[number] for number in sorted(whole)}


def _describe(
    held: Mapping[int, ParameterShard], local: Optimizer
) -> tuple[list[dict[str, Any]], list[Tensor | None], TypeError | None]:
    """What this rank has, as JSON, and its tensors."""
    headers: list[dict[str, Any]] = []
    tensors: list[Tensor | None] = []
    for number, piece in held.items():
        for key, value in local.state.get(piece.tensor, {}).items():
            entry = {"parameter": number, "first": piece.first, "last": piece.last, "key": key, "nbytes": 0}
            if isinstance(value, Tensor):
                value = value.detach()
                entry |= {
                    "moment": value.shape == piece.tensor.shape,
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


def _padded_bytes(entry: Mapping[str, Any]) -> int:
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
        state[key] = torch.empty_strided(shape_of(parameter), strides, dtype=values.dtype, device=device)
    put_elements(state[key], entry["first"], values)


def part_of(value: Any, name: str, held: ParameterShard, *, cut: bool) -> Any:
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


def format_whole(states: States, groups: Groups) -> dict[str, Any]:
    """The format of a plain optimizer."""
    return {"state": states, "param_groups": _numbered(groups)}


def format_sharded(
    held: Mapping[int, ParameterShard], local: Optimizer, groups: Groups, group: Group
) -> dict[str, Any]:
    """The pieces of this rank, whose state ``local`` has."""
    pieces = [
        {"parameter": number, "first": x.first, "last": x.last, "state": dict(local.state.get(x.tensor, {}))}
        for number, x in held.items()
    ]
    place = {"rank": group.rank, "world_size": group.size, "order": LOGICAL}
    return {"sharded": place, "pieces": pieces, "param_groups": _numbered(groups)}


def _numbered(groups: Groups) -> list[dict[str, Any]]:
    """The groups, with numbers for their parameters."""
    numbered, begin = [], 0
    for group in groups:
        end = begin + len(group["params"])
        numbered.append({**group, "params": list(range(begin, end))})
        begin = end
    return numbered


def saved_lines(saved: Mapping[str, Any]) -> list[str]:
    """What has to be the same on all ranks that load, as lines."""
    lines = ["sharded state" if "sharded" in saved else "whole state"]
    lines += [f"group {i}: {options_text(group)}" for i, group in enumerate(saved["param_groups"])]
    for number, state in sorted(saved.get("state", {}).items()):
        lines += [f"{key} of parameter {number}: {_shape(state[key])}" for key in sorted(state)]
    return lines


def _shape(value: object) -> str:
    if not isinstance(value, Tensor):
        return repr(value)[:80]
    return (
        repr(value.item()) if value.numel() == 1 and value.device.type == "cpu" else str(tuple(value.shape))
    )


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
    packed, begin = [], 0
    for part in saved["param_groups"]:
        numbers = range(begin, begin + len(part["params"]))
        begin = numbers.stop
        packed.append({**group_options(part), "params": [positions[x] for x in numbers if x in positions]})
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
    _require_order(place.pop("order", None), held)
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
            key: _laid_out(x, held[piece["parameter"]]) if isinstance(x, Tensor) else x
            for key, x in piece["state"].items()
        }
        for piece in saved["pieces"]
        if piece["state"]
    }


def _require_order(order: object, held: Mapping[int, ParameterShard]) -> None:
    """ValueError unless ranges in ``order`` (None: that of memory) are the ones that are meant here."""
    if order == LOGICAL:
        return
    if order is not None:
        raise ValueError(
            f"expected pieces in {LOGICAL} order, got {order!r:.80}: a newer format; update instep"
        )
    for number, x in held.items():
        lives_in, shape = home(x.parameter), x.parameter.shape
        strides = x.parameter.stride() if lives_in is None else lives_in.strides_of(x.parameter)
        if not x.is_whole and not in_order(shape, strides):
            raise ValueError(
                f"parameter {number} of shape {tuple(shape)}: expected pieces in {LOGICAL} order, got "
                "a sharded state of an older instep, in the order of memory, which is another here (strides "
                f"{strides}): load it with that version, save the whole with state_dict(), and load that"
            )


def _laid_out(x: Tensor, held: ParameterShard) -> Tensor:
    """A copy of ``x``; a moment has the order of memory of ``held``, as fused kernels compare no strides."""
    x = x.detach()
    return (with_strides(x, held.tensor.stride()) if x.shape == held.tensor.shape else x).clone()


def adopt_groups(groups: Sequence[dict[str, Any]], loaded: Groups, saved: Groups) -> None:
    """``groups`` take the options that the local optimizer has ``loaded``, and ``saved`` names."""
    for group, local, before in zip(groups, loaded, saved, strict=True):
        names = before.get("param_names", group.get("param_names"))
        parameters = group["params"]
        group.clear()
        group.update(group_options(local), params=parameters)
        if names is not None:
            group["param_names"] = names
