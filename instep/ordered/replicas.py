"""What several ranks hold alike, compared: which rank has other bits, and in what.

Replicas have the same bits by construction, so one hash per rank shows one that has not. The majority is
taken to be right; two ranks have none. What one rank alone holds has no replica. With several shard groups
each shard has as many replicas.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from instep.errors import ReplicasDiffer
from instep.mesh.process_group import Group
from instep.mesh.rank_exit import mark_secondary
from instep.ordered.hash import Entry, bare, block_digests, state_sha256
from instep.ordered.shards import Shard

REPLICAS = "the comparison of replicas"
T = TypeVar("T")  # something that JSON can carry

Digests = dict[str, str]
"""Half a SHA-256 in hexadecimal, by name."""


def compare_replicas(
    shards: Sequence[Shard], step: int, group: Group, words: tuple[str, str] = ("", ""), when: str = ""
) -> str:
    """Compare what this rank holds after ``step`` steps with the same shards of other ranks of ``group``.

    The hash of what all hold, if all have the same. What one rank alone holds has no replica. Collective.
    ``words`` are the cause and the fix, where more is known than that numbers have gone bad; ``when`` says
    more than the step.

    Raises:
        ReplicasDiffer: on every rank, naming the odd ranks and what differs.
    """
    # By the ranks that hold the same; all hold something, if only the number of steps.
    held: dict[str, list[Entry]] = {",".join(map(str, range(group.size))): []}
    for shard in shards:
        if group.size == 1 or len(shard.holders) > 1:
            held.setdefault(",".join(map(str, shard.holders)), []).append((bare(shard.name), shard.tensor))
    mine = {holders: state_sha256(entries, step) for holders, entries in held.items()}
    everyone = list(gather(group, mine, REPLICAS).values())
    if all(_agree(holders, everyone) for said in everyone for holders in said):
        return mine[",".join(map(str, range(group.size)))]
    said = {holders: {"the step": str(step), **digests(entries)} for holders, entries in held.items()}
    votes = gather(group, said, REPLICAS)
    alike = [
        {group.ranks[i]: votes[group.ranks[i]].get(holders, {}) for i in map(int, holders.split(","))}
        for holders in dict.fromkeys(holders for its in votes.values() for holders in its)
    ]
    error = _hold_different(alike, when or f"after step {step}", words)
    raise mark_secondary(error) if group.rank else error


def _agree(holders: str, everyone: Sequence[Mapping[str, str]]) -> bool:
    """Whether the ranks that hold the same say the same of it."""
    return len({everyone[rank].get(holders) for rank in map(int, holders.split(","))}) == 1


def digests(entries: Iterable[Entry]) -> Digests:
    """What identifies the dtype, the shape and the bits of each of ``entries``."""
    found = {}
    for name, x in entries:
        whole = hashlib.sha256(json.dumps([str(x.dtype), list(x.shape)]).encode())
        for digest in block_digests(x.to_dense() if x.is_sparse else x):
            whole.update(digest)
        found[name] = whole.hexdigest()[:32]
    return found


def _hold_different(
    alike: Sequence[Mapping[int, Digests]], when: str, words: tuple[str, str]
) -> ReplicasDiffer:
    """``alike`` are the votes of ranks that should hold the same."""
    odd = together([one for votes in alike if (one := odd_one_out(votes)) is not None])
    if odd is None:
        return ReplicasDiffer(
            f"{when} the ranks' hashes of their states differ, but nothing does when it is hashed "
            "once more: the memory or the arithmetic of one of the hosts is unreliable",
            ranks=tuple(rank for votes in alike for rank in votes),
        )
    than = "other values than the other ranks" if odd.certain else "different values"
    verb = "hold" if len(odd.ranks) > 1 else "holds"
    cause = words[0] or "a bit has flipped in memory, or an update was computed otherwise"
    return ReplicasDiffer(
        f"{when} {ranks_listed(odd.ranks)} {verb} {than} in {listed(odd.names)}: "
        f"{cause}. {words[1] or way_out(odd)}",
        ranks=odd.ranks,
        parameters=odd.names,
    )


def together(found: Sequence[Odd]) -> Odd | None:
    """All of ``found`` as one."""
    if not found:
        return None
    names = dict.fromkeys(name for odd in found for name in odd.names)
    ranks = {rank for odd in found for rank in odd.ranks}
    return Odd(tuple(names), tuple(sorted(ranks)), all(odd.certain for odd in found))


def way_out(odd: Odd) -> str:
    """What to do where numbers have gone bad."""
    again = "resume from a checkpoint of before"
    if odd.certain:
        return f"Leave out the host of {ranks_listed(odd.ranks)} and {again}"
    return f"One of {ranks_listed(odd.ranks)} is wrong and there is no majority to tell which: {again}"


def gather(group: Group, mine: T, operation: str) -> dict[int, T]:
    """What every rank has passed, by global rank. Collective."""
    everyone = group.all_gather_bytes(json.dumps(mine).encode(), operation)
    return {rank: json.loads(data) for rank, data in zip(group.ranks, everyone, strict=True)}


@dataclass(frozen=True)
class Odd:
    """What ranks differ in.

    ``ranks`` are those that are not with a majority, or all that were asked, where there is none;
    ``certain``: there was one for every name.
    """

    names: tuple[str, ...]
    ranks: tuple[int, ...]
    certain: bool


def odd_one_out(votes: Mapping[int, Mapping[str, str]]) -> Odd | None:
    """Compare what each rank says of each name; None if they agree.

    A majority is formed name by name, because two ranks may be wrong about different ones. Names are in the
    order of the first rank that has them.
    """
    names = list(dict.fromkeys(name for said in votes.values() for name in said))
    differ, ranks, certain = [], set(), True
    for name in names:
        said = {rank: values.get(name) for rank, values in votes.items()}
        (most, times), *others = Counter(said.values()).most_common()
        if not others:
            continue
        decided = 2 * times > len(votes)
        differ.append(name)
        ranks |= {rank for rank, value in said.items() if value != most or not decided}
        certain = certain and decided
    return Odd(tuple(differ), tuple(sorted(ranks)), certain) if differ else None


def listed(names: tuple[str, ...], limit: int = 3) -> str:
    """ "'a', 'b', 'c' and 4 more"."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(map(repr, names[:limit])) + more


def ranks_listed(ranks: tuple[int, ...]) -> str:
    """ "rank 1", "ranks 1 and 2", "ranks 0, 1 and 2"."""
    *first, last = map(str, ranks)
    return f"ranks {', '.join(first)} and {last}" if first else f"rank {last}"
