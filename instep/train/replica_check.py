"""Numbers that went bad without an error: what should be the same on several ranks is compared.

    compare_replicas   weights and moments, which all ranks hold      a bit that flipped in memory stays seen
    compare_leaves     gradients, which any rank can compute          a rank that computes otherwise

A flipped bit in one rank's weights spoils the gradient of all, and no loss curve tells. Replicas have the
same bits by construction, so one hash per rank shows it. The majority is taken to be right; two ranks have
none. What one rank alone holds has no replica: there a flip changes the state's hash, and another run has to
tell. With several shard groups each shard has as many replicas.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from instep.errors import ReplicasDiffer
from instep.mesh.agree import all_or_none
from instep.mesh.process_group import Group
from instep.mesh.rank_process import as_told
from instep.ordered.hash import Entry, bare, block_digests, state_sha256
from instep.ordered.shards import Shard
from instep.train.recompute import Compute

REPLICAS = "the comparison of replicas"
LEAVES = "the comparison of micro-batches"
T = TypeVar("T")  # something that JSON can carry

Digests = dict[str, str]
"""Half a SHA-256 in hexadecimal, by name."""


def compare_replicas(shards: Sequence[Shard], step: int, group: Group) -> str:
    """Compare what this rank holds after ``step`` steps with the same shards of other ranks of ``group``.

    The hash of what all hold, if all have the same. What one rank alone holds has no replica. Collective.

    Raises:
        ReplicasDiffer: on every rank, naming the odd ranks and what differs.
    """
    # By the ranks that hold the same; all hold something, if only the number of steps.
    held: dict[str, list[Entry]] = {",".join(map(str, range(group.size))): []}
    for shard in shards:
        if group.size == 1 or len(shard.holders) > 1:
            held.setdefault(",".join(map(str, shard.holders)), []).append((bare(shard.name), shard.tensor))
    mine = {holders: state_sha256(entries, step) for holders, entries in held.items()}
    everyone = list(_gather(group, mine, REPLICAS).values())
    if all(_agree(holders, everyone) for said in everyone for holders in said):
        return mine[",".join(map(str, range(group.size)))]
    said = {holders: {"the step": str(step), **digests(entries)} for holders, entries in held.items()}
    votes = _gather(group, said, REPLICAS)
    alike = [
        {group.ranks[i]: votes[group.ranks[i]].get(holders, {}) for i in map(int, holders.split(","))}
        for holders in dict.fromkeys(holders for its in votes.values() for holders in its)
    ]
    error = _hold_different(alike, step)
    raise as_told(error) if group.rank else error


def _agree(holders: str, everyone: Sequence[Mapping[str, str]]) -> bool:
    """Whether the ranks that hold the same say the same of it."""
    return len({everyone[rank].get(holders) for rank in map(int, holders.split(","))}) == 1


def compare_leaves(group: Group, compute: Compute, plan: Sequence[Sequence[int]], step: int) -> None:
    """Every rank computes the first micro-batch of the next rank, too, and the bits are compared. Collective.

    ``plan[r]`` are the micro-batches of group rank r in ``step``. The owner also computes its own again,
    since what it has sent is part of a sum by now. So this finds a rank that computes otherwise each time:
    broken arithmetic, another build, other weights or samples; not a slip in the step itself. If two ranks
    differ, a third one decides. It must come before the update; ranks have two micro-batches more to
    compute in such a step.

    Raises:
        ReplicasDiffer: on every rank, naming micro-batch, parameter, the ranks that computed it, and of
            three or more ranks the odd one.
    """
    if group.size == 1:
        return
    owners = {own[0]: rank for rank, own in enumerate(plan) if len(own)}
    votes: dict[int, dict[int, Digests]] = {leaf: {} for leaf in owners}

    def ask(distance: int, about: Iterable[int]) -> None:
        """Let the rank that is ``distance`` after its owner compute each of the leaves ``about``."""
        mine = [leaf for leaf in about if (owners[leaf] + distance) % group.size == group.rank]
        computed = all_or_none(
            group, LEAVES, lambda: {str(leaf): digests(compute(leaf).gradients.items()) for leaf in mine}
        )
        for rank, said in _gather(group, computed, LEAVES).items():
            for leaf, values in said.items():
                votes[int(leaf)][rank] = values

    ask(0, owners)
    ask(-1, owners)
    doubtful = [leaf for leaf in owners if odd_one_out(votes[leaf])]
    if not doubtful:
        return
    if group.size > 2:
        ask(1, doubtful)
    error = _compute_different({leaf: votes[leaf] for leaf in doubtful}, step)
    raise as_told(error) if group.rank else error


def digests(entries: Iterable[Entry]) -> Digests:
    """What identifies the dtype, the shape and the bits of each of ``entries``."""
    found = {}
    for name, x in entries:
        whole = hashlib.sha256(json.dumps([str(x.dtype), list(x.shape)]).encode())
        for digest in block_digests(x.to_dense() if x.is_sparse else x):
            whole.update(digest)
        found[name] = whole.hexdigest()[:32]
    return found


def _hold_different(alike: Sequence[Mapping[int, Digests]], step: int) -> ReplicasDiffer:
    """``alike`` are the votes of ranks that should hold the same."""
    odd = _together([one for votes in alike if (one := odd_one_out(votes)) is not None])
    if odd is None:
        return ReplicasDiffer(
            f"after step {step} the ranks' hashes of their states differ, but nothing does when it is hashed "
            "once more: the memory or the arithmetic of one of the hosts is unreliable",
            ranks=tuple(rank for votes in alike for rank in votes),
        )
    than = "other values than the other ranks" if odd.certain else "different values"
    verb = "hold" if len(odd.ranks) > 1 else "holds"
    return ReplicasDiffer(
        f"after step {step} {ranks_listed(odd.ranks)} {verb} {than} in {listed(odd.names)}: a bit has "
        f"flipped in memory, or an update was computed otherwise. {_way_out(odd)}",
        ranks=odd.ranks,
        parameters=odd.names,
    )


def _together(found: Sequence[Odd]) -> Odd | None:
    """All of ``found`` as one."""
    if not found:
        return None
    names = dict.fromkeys(name for odd in found for name in odd.names)
    ranks = {rank for odd in found for rank in odd.ranks}
    return Odd(tuple(names), tuple(sorted(ranks)), all(odd.certain for odd in found))


def _compute_different(votes: Mapping[int, Mapping[int, Digests]], step: int) -> ReplicasDiffer:
    lines: list[str] = []
    found: list[Odd] = []
    for leaf, said in votes.items():
        odd = odd_one_out(said)
        assert odd is not None
        asked = ranks_listed(tuple(sorted(said)))
        blame = f": {ranks_listed(odd.ranks)} computed otherwise" if odd.certain else ", all that were asked"
        lines.append(f"  micro-batch {leaf}, by {asked}{blame}: {listed(odd.names)}")
        found.append(odd)
    whole = _together(found)
    assert whole is not None
    table = "\n".join(lines)
    return ReplicasDiffer(
        f"in step {step} ranks computed different gradients of one micro-batch:\n{table}\n{_way_out(whole)}",
        ranks=whole.ranks,
        parameters=whole.names,
    )


def _way_out(odd: Odd) -> str:
    again = "resume from a checkpoint of before"
    if odd.certain:
        return f"Leave out the host of {ranks_listed(odd.ranks)} and {again}"
    return f"One of {ranks_listed(odd.ranks)} is wrong and there is no majority to tell which: {again}"


def _gather(group: Group, mine: T, operation: str) -> dict[int, T]:
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
