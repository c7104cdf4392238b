"""Several buckets under way over messages: the bits, the verdicts and the errors of one at a time."""

from __future__ import annotations

import threading
from itertools import pairwise

import pytest
import torch
from torch import nn

from instep.comm import meeting_place
from instep.errors import Desync, PeerLost
from instep.events import Recorder
from instep.mesh.process_group import Group
from instep.ordered import by_messages
from instep.ordered.buckets import Bucket
from instep.ordered.by_messages import ByMessages
from instep.ordered.exchange import OrderedAllReduce
from instep.ordered.tree import rank_major
from instep.replicate.wrapper import DataParallel
from tests.ordered.reductions import (
    NUM_ELEMENTS,
    SHAPES,
    Leaves,
    content,
    drawn_gradients,
    filled_bucket,
    header_for,
    one_process,
)
from tests.world import world

NUM_BUCKETS = 7


class Exchanges:
    """One exchange of this rank, and buckets with other numbers in each, none of which is small."""

    def __init__(self, group: Group, leaves: Leaves, num_buckets: int = NUM_BUCKETS) -> None:
        self.group, self.leaves = group, leaves
        self.num_leaves = sum(map(len, leaves))
        self.exchange = OrderedAllReduce(group, Recorder(), ordered=True, max_parameters=len(SHAPES))
        assert isinstance(self.exchange.transport, ByMessages)
        self.exchange.transport.at_once_bytes = 0
        drawn = drawn_gradients(self.num_leaves)
        self.gradients = [[g * (1 + k) for g in drawn] for k in range(num_buckets)]
        self.buckets = [self._bucket(k) for k in range(num_buckets)]

    def _bucket(self, k: int) -> Bucket:
        own = {leaf: torch.tensor(self.gradients[k][leaf]) for leaf in self.leaves[self.group.rank]}
        return filled_bucket(self.group, own, self.num_leaves)

    def run(self, k: int, *, more: bool, **change: int) -> None:
        bucket = self.buckets[k]
        header = header_for(bucket, self.leaves, len(self.leaves[self.group.rank]))
        header = header._replace(**{"bucket": k, **change})
        self.exchange.run(bucket, header, self.leaves, more=more)

    def run_all(self) -> None:
        for k in range(len(self.buckets)):
            self.run(k, more=k + 1 < len(self.buckets))

    def is_reduced(self, k: int) -> bool:
        expected = one_process(self.gradients[k], self.num_leaves)
        return content(self.buckets[k]).numpy().tobytes() == expected.tobytes()

    @property
    def num_under_way(self) -> int:
        return len(self.exchange._under_way)


@pytest.mark.parametrize("has_line", [False, True])
@pytest.mark.parametrize("size", [2, 3, 5])
def test_buckets_under_way_have_the_bits_of_one_process(size, has_line):
    world(size)(reduces_all)(has_line=has_line)


def reduces_all(mesh, has_line: bool):
    group = mesh.world.duplicate()
    if has_line:
        group.open_line()
    assert (group.messages_pg is not group.pg) is has_line
    nobody: list[list[int]] = [[] for _ in range(group.size - 1)]
    for leaves in (rank_major(group.size, group.size), rank_major(13, group.size), [*nobody, range(7)]):
        exchanges = Exchanges(group, leaves)
        for _ in range(2):  # in the same buffers, too
            exchanges.buckets = [exchanges._bucket(k) for k in range(NUM_BUCKETS)]
            exchanges.run_all()
            assert [k for k in range(NUM_BUCKETS) if not exchanges.is_reduced(k)] == []
    group.close()


@world(2)
def test_a_bounded_number_is_under_way_and_the_last_one_waits_for_all(mesh):
    exchanges = Exchanges(mesh.world.group, rank_major(4, 2))
    seen = []
    for k in range(NUM_BUCKETS):
        exchanges.run(k, more=k + 1 < NUM_BUCKETS)
        seen.append(exchanges.num_under_way)
    most = exchanges.exchange.transport.num_under_way
    assert seen == [*range(1, most), *[most] * (NUM_BUCKETS - most), 0]
    received = exchanges.buckets[0].nbytes // 2 * 2  # two roots of the other rank, a slice of each
    scratch = exchanges.exchange.transport.scratch.buffers
    assert 1 < len(scratch) <= most
    assert all(x.nbytes < 2 * received for x in scratch)


@world(2)
def test_one_bucket_alone_needs_no_memory_beside(mesh):
    exchanges = Exchanges(mesh.world.group, rank_major(4, 2), num_buckets=1)
    for _ in range(4):
        exchanges.buckets = [exchanges._bucket(0)]
        exchanges.run_all()
        assert exchanges.is_reduced(0)
    assert len(exchanges.exchange.transport.scratch.buffers) == 1


def test_small_and_large_buckets_come_between_those_under_way(monkeypatch):
    world(3)(mixes_sizes)(monkeypatch=monkeypatch, patched=threading.Barrier(3))


def mixes_sizes(mesh, monkeypatch, patched):
    exchanges = Exchanges(mesh.world.group, rank_major(8, 3))
    if mesh.rank == 0:
        monkeypatch.setattr(by_messages, "BESIDE_BYTES", 1)
    patched.wait(10)
    for k in range(4):  # too large to be beside others
        exchanges.run(k, more=True)
        assert exchanges.num_under_way == 0
    patched.wait(10)
    if mesh.rank == 0:
        monkeypatch.undo()
    patched.wait(10)
    exchanges.run(4, more=True)
    exchanges.exchange.transport.at_once_bytes = 1 << 20
    exchanges.run(5, more=True)
    assert exchanges.num_under_way == 2, "what has ended meanwhile is told of in its turn"
    exchanges.run(6, more=False)
    assert exchanges.num_under_way == 0
    assert all(exchanges.is_reduced(k) for k in range(NUM_BUCKETS))


@pytest.mark.parametrize("soon", [True, False], ids=["found at a look", "waited for by a thread"])
def test_a_small_bucket_travels_with_its_header(monkeypatch, soon):
    if not soon:
        monkeypatch.setattr(meeting_place, "comes_soon", lambda is_there: False)
    world(3)(sends_small_buckets)()


def sends_small_buckets(mesh):
    for leaves in (rank_major(3, 3), rank_major(8, 3), [[], [], [0, 1, 2, 3, 4, 5, 6]]):
        group = mesh.world.duplicate()
        exchanges = Exchanges(group, leaves, num_buckets=3)
        assert not exchanges.exchange.scratch
        exchanges.exchange.transport.at_once_bytes = 1 << 20
        before = group.peers.flight.number
        exchanges.run_all()
        assert group.peers.flight.number - before == 3, "one operation for each"
        assert all(exchanges.is_reduced(k) for k in range(3))
        assert {x.dtype for x in exchanges.exchange.scratch} == {torch.uint8}, "it counts as scratch"
        group.close()


@world(2)
@pytest.mark.parametrize(("leaves", "num_operations"), [([[0, 1], [2, 3]], 1), ([[0, 1, 2], [3, 4, 5]], 2)])
def test_a_larger_one_does_so_where_that_takes_no_more_bytes(mesh, leaves, num_operations):
    exchanges = Exchanges(mesh.world.group, leaves, num_buckets=1)
    exchanges.exchange.transport.at_once_bytes = exchanges.buckets[0].nbytes  # and there are more roots
    before = mesh.world.group.peers.flight.number
    exchanges.run_all()
    assert exchanges.is_reduced(0)
    assert mesh.world.group.peers.flight.number - before == num_operations


@world(2)
def test_a_large_bucket_after_a_small_one_is_not_taken_for_it(mesh):
    exchanges = Exchanges(mesh.world.group, rank_major(4, 2), num_buckets=4)
    for k, at_once_bytes in enumerate([1 << 20, 0, 1 << 20, 0]):
        exchanges.exchange.transport.at_once_bytes = at_once_bytes
        exchanges.run(k, more=False)
    assert all(exchanges.is_reduced(k) for k in range(4))


@world(2)
def test_what_travels_with_headers_on_one_rank_only_is_noticed(mesh):
    exchanges = Exchanges(mesh.world.group, [[0, 1, 2], [3, 4, 5]], num_buckets=1)
    total = 4 * exchanges.buckets[0].nbytes  # two roots of each
    exchanges.exchange.transport.at_once_bytes = total - mesh.rank
    with pytest.raises(Desync, match=r"expected .* do not agree on whether gradients travel with headers"):
        exchanges.run_all()


@world(2)
def test_what_is_begun_may_end_before_it_is_known(mesh):
    group = mesh.world.group
    submit = group._submit

    def submit_and_wait(*args, **options):
        work = submit(*args, **options)
        for lane in group._lanes.values():
            if threading.current_thread() is not lane._thread:
                lane.drain()
        return work

    group._submit = submit_and_wait
    ended = []
    wait = group.begin(lambda: lambda: lambda: ended.append(True), "two halves")
    assert wait() > 0
    assert ended == [True]


@world(3)
@pytest.mark.parametrize("change", [{"step": 5}, {"bucket": 9}, {"num_elements": 7}])
def test_ranks_out_of_step_have_what_was_under_way_before(mesh, change):
    exchanges = Exchanges(mesh.world.group, rank_major(8, 3))
    exchanges.run(0, more=True)
    exchanges.run(1, more=True)
    before = exchanges.buckets[2].home.clone()
    with pytest.raises(Desync, match="the ranks are out of step: rank 1 "):
        exchanges.run(2, more=True, **(change if mesh.rank == 1 else {}))
    assert exchanges.num_under_way == 0
    assert exchanges.is_reduced(0) and exchanges.is_reduced(1)
    assert exchanges.buckets[2].home.tolist() == before.tolist()
    for k in range(2, NUM_BUCKETS):  # and the group is fit for more
        exchanges.run(k, more=k + 1 < NUM_BUCKETS)
    assert all(exchanges.is_reduced(k) for k in range(NUM_BUCKETS))


@world(3)
def test_a_rank_leaves_while_buckets_are_under_way(mesh):
    exchanges = Exchanges(mesh.world.group, rank_major(8, 3))
    exchanges.run(0, more=True)
    exchanges.run(1, more=True)
    if mesh.rank == 2:
        header = header_for(exchanges.buckets[2], exchanges.leaves, 1)._replace(bucket=2)
        exchanges.exchange.leave(header, "leaving a step")
    else:
        with pytest.raises(Desync, match="rank 2 left step 4 before its gradients were whole"):
            exchanges.run(2, more=True)
    assert exchanges.num_under_way == 0
    assert exchanges.is_reduced(0) and exchanges.is_reduced(1)
    exchanges.run(2, more=False)
    assert exchanges.is_reduced(2)


def test_a_rank_that_goes_while_buckets_are_under_way_is_missed_at_once():
    world(2, timeout_s=20)(goes)(missed=threading.Event())


def goes(mesh, missed: threading.Event):
    group = mesh.world.duplicate()
    group.open_line()
    exchanges = Exchanges(group, rank_major(8, 2))
    exchanges.run(0, more=True)
    if mesh.rank == 1:
        group.close()
        assert missed.wait(10)
        return
    try:
        with pytest.raises(PeerLost, match="after 4 optimizer steps") as lost:
            exchanges.run_all()
        assert lost.value.operation.startswith("the exchange of bucket")
        assert exchanges.num_under_way == 0
    finally:
        missed.set()
    group.close()


@world(2)
def test_buckets_under_way_are_told_of_one_after_the_other(mesh):
    exchanges = Exchanges(mesh.world.group, rank_major(8, 2))
    exchanges.run_all()
    events = [event for event in exchanges.exchange.recorder.events if event.name != "queued"]
    told = [event.bucket for event in events if event.name == "exchange"]
    assert told == list(range(NUM_BUCKETS))
    assert {event.bytes for event in events if event.name == "exchange"} == {exchanges.buckets[0].nbytes}
    assert all(before.end_ns <= after.start_ns for before, after in pairwise(events))
    assert all(event.start_ns <= event.end_ns for event in events)


@world(2)
@pytest.mark.parametrize(
    ("options", "has_line"), [({}, True), ({"bucket_cap_mb": 25}, False), ({"strategy": "flat"}, False)]
)
def test_a_model_of_several_buckets_gets_connections_for_them(mesh, options, has_line):
    module = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model = DataParallel(module, process_group=mesh, **{"bucket_cap_mb": 1e-4, **options})
    assert (model.group.messages_pg is not model.group.pg) is has_line
    model(torch.ones(1, 8)).sum().backward()
    model.close()


@world(2)
def test_padding_of_buckets_under_way_stays_minus_zero(mesh):
    exchanges = Exchanges(mesh.world.group, rank_major(8, 2))
    exchanges.run_all()
    for bucket in exchanges.buckets:
        padding = torch.ones(bucket.num_elements, dtype=torch.bool)
        for slot in bucket.slots:
            padding[slot.offset : slot.offset + slot.length] = False
        assert int(padding.sum()) == bucket.num_elements - NUM_ELEMENTS > 0
        assert bool((bucket.home[padding] == 0).all()) and bool(torch.signbit(bucket.home[padding]).all())
