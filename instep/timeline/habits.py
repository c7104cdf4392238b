"""Advice about what ranks do by themselves: one is slow, all load, too many threads, unequal shares. Pure."""

from __future__ import annotations

import math

from instep.timeline.facts import COMPUTE, DATA, EXPOSED, WAITING, Advice, Facts, in_ms, in_percent

LOADING = 0.05  # of a step, in which batches are read
PHASES = {
    "its own compute": "computes longer than the others",
    "its data": "waits longer for its data than the others",
    "its host code": "spends longer than the others in host code, outside forward, backward and data",
}


def slow_rank(facts: Facts) -> Advice | None:
    """Would it be as fast as the others, the step were shorter by what they wait for it."""
    slow = facts.slow
    if slow is None:
        return None
    what = PHASES.get(slow.phase, f"is slower than the others in {slow.phase}")
    return facts.advice(
        "slow rank",
        facts.waited_s,
        f"Rank {slow.rank} {what}, {in_ms(slow.excess_s)} in every step since step {slow.since}, "
        f"and all ranks wait for it: look at {slow.phase} on rank {slow.rank}.",
        f"the {in_ms(slow.excess_s)} that rank {slow.rank} takes longer than the median of the other ranks, "
        f"at most the {in_ms(facts.part_s(WAITING, EXPOSED))} that those wait.",
    )


def loader(facts: Facts) -> Advice | None:
    """One batch loaded ahead hides under the rest of the step, or the rest of the step under it.

    A little of a step is the reading itself: who does that in the background does it all the same.
    """
    data_s, setting = facts.part_s(DATA), facts.setting
    if data_s < LOADING * facts.step_s:
        return None
    rest_s = max(facts.step_s - data_s, 0.0)
    how = (
        f"a step becomes the longer of loading ({in_ms(data_s)}) and everything else ({in_ms(rest_s)}) "
        "instead of their sum, if one batch is loaded ahead"
    )
    if setting.ranks_per_host * setting.threads >= setting.cores:
        how += "; less where loading is work and not waiting, since no core is idle"
    return facts.advice(
        "loader",
        min(data_s, rest_s),
        f"Every rank waits {in_ms(data_s)} per step ({in_percent(data_s / facts.step_s)}) for its data while "
        "nothing computes: load the next batch in the background, as torch's DataLoader(num_workers=1) does.",
        f"{how}.",
    )


def threads(facts: Facts) -> Advice | None:
    """Threads without a core of their own wait for one, and the others wait for them at every barrier."""
    setting = facts.setting
    wanted = setting.ranks_per_host * setting.threads
    fewer = max(setting.cores // setting.ranks_per_host, 1)
    if wanted <= setting.cores or fewer >= setting.threads:
        return None
    compute_s = facts.part_s(COMPUTE)
    share = 1 - max(setting.cores, setting.ranks_per_host * fewer) / wanted
    return facts.advice(
        "threads",
        compute_s * share,
        f"The {setting.ranks_per_host} ranks of a host run {setting.threads} threads each on its "
        f"{setting.cores} cores, so that threads wait for a core: give each rank {fewer}, which may change "
        "the bits of the weights.",
        f"an upper estimate: {in_percent(share)} of the {in_ms(compute_s)} of compute, the share of the "
        "threads that have no core.",
        f"--parallel.threads {fewer}",
    )


def uneven(facts: Facts) -> Advice | None:
    """All wait for the ranks with one micro-batch more."""
    setting = facts.setting
    num_leaves, num_ranks = setting.num_leaves, setting.world_size
    if not num_leaves or num_leaves % num_ranks == 0:
        return None
    most = math.ceil(num_leaves / num_ranks)
    whole = most * num_ranks
    return facts.advice(
        "uneven",
        facts.step_s * (1 - num_leaves / whole),
        f"{num_leaves} micro-batches on {num_ranks} ranks are {most} on some and {num_leaves // num_ranks} "
        f"on others, who wait: take {whole} micro-batches per step, which changes the training.",
        f"a step of {whole} micro-batches takes as long and does {whole / num_leaves:.2f} times the work; "
        "the gain is per step of as much work as now.",
        facts.with_leaves(whole),
        changes_training=True,
    )
