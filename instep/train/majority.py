"""Who is odd: of several ranks that should have the same, those that have not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass


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
