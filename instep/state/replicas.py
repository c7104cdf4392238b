"""Replicated tensors compared: which rank has other bits, and in which tensors.

Replicas have the same bits by construction, so one digest per tensor and rank shows a rank that has other
ones. The majority is taken to be right; two ranks have none. A tensor that one rank alone holds has no
replica. With several shard groups each shard has as many replicas.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from instep.errors import ReplicasDiffer
from instep.launch.rank_exit import mark_secondary
from instep.net.process_group import Group
from instep.state.hash import bare, tensor_digest
from instep.state.shards import Shard

REPLICAS = "the comparison of replicas"
T = TypeVar("T")  # something that JSON can carry

Digests = dict[str, str]
"""Half a SHA-256 in hexadecimal, by name."""


def compare_replicas(
    shards: Sequence[Shard], step: int, group: Group, words: tuple[str, str] = ("", ""), when: str = ""
) -> None:
    """Compare this rank's ``shards`` after ``step`` steps with the same shards of other ranks of ``group``.

    Collective. ``words`` are the cause and the fix, where the caller knows them; ``when`` replaces the step
    in the message.

    Raises:
        ReplicasDiffer: on every rank, naming the odd ranks and the tensors.
    """
    every = tuple(range(group.size))
    held: dict[tuple[int, ...], Digests] = {every: {"the step": str(step)}}  # by holders
    for shard in shards:
        if len(shard.holders) > 1:
            held.setdefault(shard.holders, {})[bare(shard.name)] = tensor_digest(shard.tensor).hex()[:32]
    everyone = gather(group, [*held.items()], REPLICAS)
    votes: dict[tuple[int, ...], dict[int, Digests]] = {}
    for rank, said in everyone.items():
        for holders, digests in said:
            votes.setdefault(tuple(holders), {})[rank] = digests
    expected = {holders: [group.ranks[i] for i in holders] for holders in votes}
    odd = odd_one_out(*({rank: its.get(rank, {}) for rank in expected[key]} for key, its in votes.items()))
    if odd is None:
        return
    than = "other values than the other ranks" if odd.certain else "different values"
    verb = "hold" if len(odd.ranks) > 1 else "holds"
    cause = words[0] or "a bit has flipped in memory, or an update was computed otherwise"
    if not odd.certain and not words[0]:
        cause = f"the model is not wrapped in instep.DataParallel, or {cause}"
    error = ReplicasDiffer(
        f"{when or f'after {step} steps'} {ranks_listed(odd.ranks)} {verb} {than} in {listed(odd.names)}: "
        f"{cause}. {words[1] or way_out(odd)}",
        ranks=odd.ranks,
        parameters=odd.names,
    )
    raise mark_secondary(error) if group.rank else error


def gather(group: Group, mine: T, operation: str) -> dict[int, T]:
    """``mine`` of every rank, by global rank. Collective."""
    everyone = group.all_gather_bytes(json.dumps(mine).encode(), operation)
    return {rank: json.loads(data) for rank, data in zip(group.ranks, everyone, strict=True)}


@dataclass(frozen=True)
class Odd:
    """The names in which ranks differ.

    ``ranks`` are those outside the majority, or all that voted, where there is none; ``certain``: each name
    had a majority.
    """

    names: tuple[str, ...]
    ranks: tuple[int, ...]
    certain: bool


def odd_one_out(*votes: Mapping[int, Mapping[str, str]]) -> Odd | None:
    """Compare what each rank says of each name, in each of ``votes``; None if the ranks of each agree.

    A majority is formed name by name, because two ranks may be wrong about different ones. Names are in the
    order of the first rank that has them.
    """
    differ, ranks, certain = dict[str, None](), set[int](), True
    for vote in votes:
        for name in dict.fromkeys(name for said in vote.values() for name in said):
            said = {rank: values.get(name) for rank, values in vote.items()}
            (most, times), *others = Counter(said.values()).most_common()
            if others:
                decided = 2 * times > len(vote)
                differ[name] = None
                ranks |= {rank for rank, value in said.items() if value != most or not decided}
                certain = certain and decided
    return Odd(tuple(differ), tuple(sorted(ranks)), certain) if differ else None


def way_out(odd: Odd) -> str:
    """What to do where numbers have gone bad."""
    again = "resume from a checkpoint of before"
    if odd.certain:
        return f"Leave out the host of {ranks_listed(odd.ranks)} and {again}"
    return f"One of {ranks_listed(odd.ranks)} is wrong and there is no majority to tell which: {again}"


def listed(names: tuple[str, ...], limit: int = 3) -> str:
    """ "'a', 'b', 'c' and 4 more"."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(map(repr, names[:limit])) + more


def ranks_listed(ranks: tuple[int, ...]) -> str:
    """ "rank 1", "ranks 1 and 2", "ranks 0, 1 and 2"."""
    *first, last = map(str, ranks)
    return f"ranks {', '.join(first)} and {last}" if first else f"rank {last}"
