"""What is saved of a sharded optimizer: the plain optimizer's format, or one rank's pieces; and back.

whole      {"state": {number: {...}}, "param_groups": [{..., "params": [numbers]}]}
sharded    {"sharded": {"rank", "world_size"}, "param_groups": as above,
            "pieces": [{"parameter": number, "first", "last", "state": {...}}]}
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from instep.mesh.group import Group
from instep.shard.groups import options_text
from instep.shard.space import Held
from instep.shard.state import States, part_of

Groups = Sequence[Mapping[str, Any]]


def options(group: Mapping[str, Any]) -> dict[str, Any]:
    """What is said in a parameter group but which parameters it has."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def format_whole(states: States, groups: Groups) -> dict[str, Any]:
    """The format of a plain optimizer."""
    return {"state": states, "param_groups": _numbered(groups)}


def format_sharded(
    held: Mapping[int, Held], local: Optimizer, groups: Groups, group: Group
) -> dict[str, Any]:
    """The pieces of this rank, whose state ``local`` has."""
    pieces = [
        {"parameter": number, "first": x.first, "last": x.last, "state": dict(local.state.get(x.tensor, {}))}
        for number, x in held.items()
    ]
    place = {"rank": group.rank, "world_size": group.size}
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
    saved: Mapping[str, Any], held: Mapping[int, Held], groups: Groups, group: Group, *, cut: bool
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
        packed.append({**options(part), "params": [positions[x] for x in numbers if x in positions]})
    return {"state": {positions[x]: state for x, state in states.items()}, "param_groups": packed}


def _from_whole(
    state: Mapping[Any, Mapping[str, Any]], ids: Sequence[Any], held: Mapping[int, Held], *, cut: bool
) -> States:
    strangers = [key for key in state if key not in ids]
    if strangers:
        raise ValueError(f"expected state of parameters of the groups, got some of {strangers[0]!r:.80}")
    return {
        number: {
            key: part_of(value, f"{key} of parameter {number}", piece, cut=cut)
            for key, value in state[ids[number]].items()
        }
        for number, piece in held.items()
        if ids[number] in state
    }


def _from_pieces(saved: Mapping[str, Any], held: Mapping[int, Held], group: Group) -> States:
    place = saved["sharded"]
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
        group.update(options(local), params=parameters)
        if names is not None:
            group["param_names"] = names
