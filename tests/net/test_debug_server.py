"""A process answers its peers, and no other, while its program does something else."""

from __future__ import annotations

import ctypes
import os
import signal
import time

import torch
import torch.distributed as dist

from instep.launch.process_state import look
from instep.net import hang_report
from instep.net.hang_report import AFTER, BEFORE, FlightRecorder
from instep.net.peers import Peer, own_peer
from instep.net.store import StatusStore
from tests.world import world

OPERATION = "the gathering of a test"


def test_a_flight_of_this_process_is_answered_without_a_detour_as_long_as_it_lives():
    flight, other, me = FlightRecorder(4), FlightRecorder(4), own_peer(4)
    hang_report.publish_flight(flight, me, "one group")
    hang_report.publish_flight(other, me, "another")
    flight.begin(OPERATION)
    assert hang_report.ask_peers([me], "one group", seconds=0.0)[4].operation == OPERATION
    assert hang_report.ask_peers([me], "another", seconds=0.0)[4].status == BEFORE
    assert hang_report.ask_peers([me], hang_report.LATEST, seconds=0.0)[4].operation == OPERATION
    del flight
    assert hang_report.ask_peers([me], "one group") == {}


def test_a_process_without_a_debug_server_is_not_waited_for():
    stranger = Peer(1, own_peer(0).host, os.getppid(), 1, 0)
    began = time.monotonic()
    assert hang_report.ask_peers([stranger], "a group", seconds=30) == {}
    assert time.monotonic() - began < 15


@world(2, by="process")
def test_a_process_that_computes_answers_with_its_stack(mesh, tmp_path):
    group, path = mesh.world.group, tmp_path / "asked"
    group.barrier(OPERATION)
    if mesh.rank == 0:
        while not (row := group.peers.rows()[1]).site.endswith(" compute_until"):
            pass
        path.touch()
        assert (row.rank, row.status, row.operation) == (1, AFTER, OPERATION)
        assert "net/test_debug_server.py" in row.site
        assert any(" test_a_process_that_computes" in line for line in row.stack)
        assert row.state in ("running", "sleeping")
    else:
        compute_until(path)
    group.barrier(OPERATION)


def compute_until(path):
    """Python code that never rests."""
    while not os.path.exists(path):
        pass


@world(2, by="process")
def test_a_process_that_holds_the_interpreter_lock_gives_no_answer(mesh, tmp_path):
    group, path = mesh.world.group, tmp_path / "go on"
    if mesh.rank == 0:
        os.mkfifo(path)
    group.barrier(OPERATION)
    pipe = os.open(path, os.O_RDWR)
    if mesh.rank == 1:
        ctypes.PyDLL(None).read(pipe, ctypes.create_string_buffer(1), 1)  # a call that keeps the lock
    else:
        while (row := group.peers.rows()[1]).status:
            pass
        os.write(pipe, b".")
        assert (row.rank, row.state, row.stack) == (1, "sleeping", ())
    group.barrier(OPERATION)
    os.close(pipe)


@world(2, by="process")
def test_a_stopped_process_is_waited_for_half_a_second_and_no_longer(mesh):
    group = mesh.world.group
    group.barrier(OPERATION)
    if mesh.rank == 0:
        peer = group.peers.table[1]
        os.kill(peer.pid, signal.SIGSTOP)
        while look(peer.pid) != ("T", peer.start_time):  # until then its server may answer
            pass
        began = time.monotonic()
        rows = group.peers.rows()
        waited_s = time.monotonic() - began
        os.kill(peer.pid, signal.SIGCONT)
        assert (rows[1].status, rows[1].state) == ("", "stopped")
        assert hang_report.ANSWER_S <= waited_s < 20 * hang_report.ANSWER_S  # on a busy machine
    group.barrier(OPERATION)


@world(2)
def test_ranks_that_are_threads_each_tell_of_their_own_program(mesh):
    group = mesh.world.group
    x = torch.ones(3)
    group.all_reduce(x, OPERATION)
    rows = group.peers.rows()
    assert [row.rank for row in rows] == [0, 1]
    mine = rows[mesh.rank]
    assert (mine.what, mine.operation) == ("float32 (3,)", OPERATION)
    assert any(" test_ranks_that_are_threads" in line for line in mine.stack)
    group.barrier(OPERATION)


@world(4, dp=2, tp=2)
def test_groups_have_slices_of_one_table_and_their_own_rows(mesh):
    everyone, again = mesh.world.group.peers, mesh.world.duplicate()
    groups = [mesh.along[name].group for name in ("dp", "tp")]
    for group in (*groups, again):
        assert group.peers.table == tuple(everyone.table[rank] for rank in group.ranks)
        assert group.peers.flight.number == 0 < everyone.flight.number  # only the world has exchanged records
    groups[0].barrier(OPERATION)
    assert [row.operation for row in groups[0].peers.rows()] == [OPERATION] * 2
    assert [row.status for row in groups[1].peers.rows()] == [BEFORE] * 2
    again.barrier("the end")
    again.close()


def test_of_lost_ranks_the_first_report_counts_and_deaths_before_all():
    store = dist.HashStore()
    here, there = (StatusStore(store, rank) for rank in (0, 1))
    assert there.lost() == ([], False)
    assert here.report_lost([2], dead=False) == ([2], False) == there.lost()
    assert there.report_lost([0], dead=False) == ([2], False)
    assert there.report_lost([], dead=False) == ([2], False)
    assert there.report_lost([1, 3], dead=True) == ([1, 3], True) == here.lost()
    assert here.report_lost([0], dead=True) == ([1, 3], True)
