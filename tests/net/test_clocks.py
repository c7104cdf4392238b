"""Clocks of several hosts: the true offset lies within the stated error, and one host's are simply equal."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import instep
from instep.net.clocks import Clocks, boot, estimate, measure
from tests.lab import on_each, two_hosts
from tests.world import world

PATIENCE_S = 60
S, MS = 1_000_000_000, 1_000_000
SHIFTS = {"north": 0, "south": 5 * S, "west": -5 * S}  # what a host's clock is ahead by


def measure_as(mesh, host, **options):
    """As if this rank were on ``host``."""
    shift = SHIFTS[host]
    return measure(mesh.world.group, now=lambda: time.monotonic_ns() + shift, boot=lambda: host, **options)


@pytest.mark.parametrize("backend", ["gloo", "shm"])
@pytest.mark.parametrize(
    "hosts",
    [("north", "south", "west"), ("south", "north", "south"), ("west", "west", "south")],
    ids="-".join,
)
def test_offsets_are_found_within_the_error_that_is_stated(backend, hosts):
    world(3, backend=backend)(finds_the_shifts)(hosts=hosts)


def finds_the_shifts(mesh, hosts):
    clocks = measure_as(mesh, hosts[mesh.rank])
    for rank, host in enumerate(hosts):
        true = SHIFTS[host] - SHIFTS[hosts[0]]
        assert abs(clocks.offsets_ns[rank] - true) <= clocks.errors_ns[rank] < 50 * MS
        assert (clocks.errors_ns[rank] == 0) == (host == hosts[0])
    told = mesh.world.group.all_gather_bytes(repr(clocks).encode(), "the comparison of a test")
    assert set(told) == {repr(clocks).encode()}


def test_ranks_of_one_machine_say_so_once_and_send_nothing_else():
    said = []

    def gather(data, *_, **__):
        said.append(data)
        return [data] * 4

    group = SimpleNamespace(size=4, rank=2, all_gather_bytes=gather)  # and no other operation
    assert measure(group) == Clocks((0,) * 4, (0,) * 4)
    assert said == [boot().encode()]


def test_a_message_each_way_leaves_the_middle_and_half_the_width():
    # True times: rank 0 is there from 100 to 130, rank 1 from 110 to 125, and its clock is 5000 ahead.
    # It is less ahead than 5125 - 100 and more than 5110 - 130.
    assert estimate("ab", [[(100, 130)], [(5110, 5125)]]) == Clocks((0, 5002), (0, 23))


moments = st.integers(0, 10 * MS)


@st.composite
def meetings(draw):
    """Hosts of ranks, what each host's clock is ahead by, and visits in true time."""
    hosts = draw(st.lists(st.sampled_from("abc"), min_size=2, max_size=6))
    ahead = {host: draw(st.integers(-(10**18), 10**18)) for host in "abc"}
    visits, begun = [[] for _ in hosts], 0
    for _ in range(draw(st.integers(1, 5))):
        entered = [begun + draw(moments) for _ in hosts]
        left = [max(entered) + 1 + draw(moments) for _ in hosts]  # nobody before all have come
        for rank, times in enumerate(zip(entered, left, strict=True)):
            visits[rank].append(times)
        begun = max(left)
    return hosts, ahead, visits


@settings(max_examples=100, deadline=None)
@given(meetings())
def test_whatever_the_delays_the_truth_lies_within_the_error(meeting):
    hosts, ahead, visits = meeting
    read = [
        [(entered + ahead[host], left + ahead[host]) for entered, left in rounds]
        for host, rounds in zip(hosts, visits, strict=True)
    ]
    clocks = estimate(hosts, read)
    spans = zip(*visits, strict=True)  # by round
    shortest = min(max(left for _, left in span) - min(entered for entered, _ in span) for span in spans)
    for rank, host in enumerate(hosts):
        true = ahead[host] - ahead[hosts[0]]
        assert abs(clocks.offsets_ns[rank] - true) <= clocks.errors_ns[rank]
        assert clocks.errors_ns[rank] <= shortest + 1
        first = hosts.index(host)
        assert clocks.offsets_ns[rank] == clocks.offsets_ns[first]
        assert clocks.errors_ns[rank] == clocks.errors_ns[first]


def test_two_hosts_of_one_kernel_have_one_clock_and_others_are_measured_over_their_link():
    with two_hosts() as lab:
        (same, other), again = on_each(lab, compare)
    assert [same, other] == again
    assert same == [[0, 0], [0, 0]]
    offsets, errors = other
    assert offsets[0] == errors[0] == 0
    assert abs(offsets[1] - SHIFTS["south"]) <= errors[1] < 50 * MS


def compare() -> list[list[tuple[int, ...]]]:
    """What the ranks of a real world find: as they are, and as if each had a kernel of its own."""
    mesh = instep.init(backend="gloo", timeout_s=PATIENCE_S)
    found = [measure(mesh.world.group), measure_as(mesh, ("north", "south")[mesh.rank])]
    mesh.close()
    return [[clocks.offsets_ns, clocks.errors_ns] for clocks in found]
