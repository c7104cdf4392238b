"""Faults: read as they are written, refused in words, injected once, where and when they were asked for."""

from __future__ import annotations

import math
import os
import re
import signal
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from instep.elastic import faults
from instep.elastic.faults import (
    ELSEWHERE,
    KINDS,
    Fault,
    FaultInjector,
    flip_bit,
    named,
    parse,
    parse_all,
)
from instep.elastic.heartbeat import MAX_FAULTS, PHASES, HeartbeatPage

SIGNALS = {
    "kill": signal.SIGKILL,
    "segv": signal.SIGSEGV,
    "abort": signal.SIGABRT,
    "term": signal.SIGTERM,
    "usr1": signal.SIGUSR1,
    "int": signal.SIGINT,
    "stop": signal.SIGSTOP,
}
some = st.builds(
    Fault,
    kind=st.sampled_from(sorted(KINDS)),
    rank=st.integers(0, 10**6),
    step=st.integers(0, 10**9),
    phase=st.sampled_from(PHASES),
    entry=st.integers(1, 1000),
    after_ms=st.just(0.0),
    seconds=st.floats(1e-9, 1e6),
    code=st.integers(0, 255),
    ranks=st.integers(1, 1000),
    name=st.from_regex(r"[a-z_]+/[a-z_.0-9]+", fullmatch=True) | st.just(""),
)


@given(some)
def test_what_is_written_is_read_again(fault: Fault) -> None:
    assert str(Fault("kill", rank=1, step=12, phase="exchange")) == "kill:rank=1,step=12,phase=exchange"
    assert parse(str(fault)) == fault


@given(st.floats(0, 1e6), st.sampled_from(sorted(SIGNALS)))
def test_delays_are_read_again_bit_by_bit(after_ms: float, kind: str) -> None:
    fault = Fault(kind, after_ms=after_ms)
    assert parse(str(fault)) == fault


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("", f"fault '': expected one of {', '.join(KINDS)}, got ''"),
        ("explode:rank=1", f"fault 'explode:rank=1': expected one of {', '.join(KINDS)}, got 'explode'"),
        (
            "kill:node=1",
            "fault 'kill:node=1': expected one of rank, step, phase, entry, after_ms, seconds, steps, code, "
            "ranks, name, got 'node'",
        ),
        ("kill:rank", "fault 'kill:rank': rank: expected int, got ''"),
        ("kill:rank=one", "fault 'kill:rank=one': rank: expected int, got 'one'"),
        ("kill:after_ms=soon", "fault 'kill:after_ms=soon': after_ms: expected float, got 'soon'"),
        ("kill:kind=stop", "got 'kind'"),
        ("kill:phase=lunch", f"phase: expected one of {', '.join(PHASES)}, got 'lunch'"),
        ("resize:step=3", "fault 'resize:step=3': ranks: expected how many ranks there shall be, got 0"),
        ("resize:ranks=-1", "got -1"),
        ("kill:entry=0", "fault 'kill:entry=0': entry: expected 1 or more, got 0"),
        *(
            (f, f"fault '{f}': ")
            for f in ("slow:seconds=-1", "slow:rank=1", "kill:after_ms=-5", "raise:after_ms=5")
        ),
    ],
)
def test_a_bad_spec_is_refused_in_words(spec: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        parse(spec)


def test_there_is_room_for_so_many() -> None:
    assert parse_all(["kill"] * MAX_FAULTS) == (Fault("kill"),) * MAX_FAULTS
    with pytest.raises(ValueError, match=f"^expected at most {MAX_FAULTS} faults, got {MAX_FAULTS + 1}$"):
        parse_all(["kill"] * (MAX_FAULTS + 1))


@pytest.fixture
def happened(monkeypatch: pytest.MonkeyPatch) -> list[Fault]:
    """Faults of all kinds, in the order in which they would have happened."""
    log: list[Fault] = []
    for kind in KINDS:
        monkeypatch.setitem(KINDS, kind, log.append)
    return log


def test_it_happens_to_this_rank_at_this_step_in_this_phase_and_once(happened: list[Fault]) -> None:
    wanted = Fault("kill", rank=1, step=3, phase="exchange")
    others = [Fault("kill", rank=0, step=3), Fault("kill", rank=1, step=4), Fault("kill", rank=1, step=3)]
    injector = FaultInjector([*others, wanted])
    injector.rank = 1
    injector.reach("exchange", 2)
    injector.reach("backward", 3)
    assert happened == []
    injector.reach("exchange", 3)
    injector.reach("exchange", 3)
    assert happened == [wanted]


def test_a_rank_that_has_moved_is_hit_where_it_is_now(happened: list[Fault]) -> None:
    injector = FaultInjector([Fault("kill", rank=2)])
    injector.reach("forward", 0)
    injector.rank = 2
    injector.reach("forward", 0)
    assert len(happened) == 1


def test_the_page_remembers_for_the_next_process(happened: list[Fault], page: HeartbeatPage) -> None:
    twice = [Fault("kill"), Fault("kill")]
    for process in range(2):
        injector = FaultInjector(twice, page if process == 0 else HeartbeatPage(page.file))
        injector.reach("forward", 0)
    assert happened == twice  # each of the two once
    assert page.fired_ns > 0


def test_what_happens_elsewhere_is_no_worker_s_business(
    happened: list[Fault], page: HeartbeatPage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(faults, "RESIZE_S", 0.0)
    FaultInjector([Fault(kind, ranks=1) for kind in ELSEWHERE], page).reach("forward", 0)
    assert happened == []
    assert page.fired_ns == 0


@pytest.mark.parametrize("end", ["fire", "stop", "over"])
def test_a_rank_waits_for_the_supervisor_to_resize(
    end: str, page: HeartbeatPage, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = list[float]()

    def look(seconds: float) -> None:
        looks.append(seconds)
        if len(looks) == 3 and end == "fire":
            page.fire(1)
        elif len(looks) == 3:
            setattr(page, end, 1)

    monkeypatch.setattr(faults, "time", SimpleNamespace(monotonic=time.monotonic, sleep=look))
    injector = FaultInjector([Fault("kill", rank=1), Fault("resize", step=4, ranks=3)], page)
    injector.reach("forward", 3)
    assert looks == []
    for _ in range(2):  # nobody waits for one that has happened
        injector.reach("forward", 4)
    assert len(looks) == 3


def test_it_happens_when_a_step_enters_its_phase_for_that_time_from_the_beginning(
    happened: list[Fault],
) -> None:
    injector = FaultInjector([Fault("kill", step=3, entry=3)])
    for step in (2, 2, 2, 3, 3):
        injector.reach("forward", step)
    injector.reach("join", 3)  # the step was left, and is made again
    for _ in range(2):
        injector.reach("forward", 3)
    assert happened == []
    injector.reach("forward", 3)
    assert [fault.entry for fault in happened] == [3]


def test_a_delayed_fault_comes_from_the_side(happened: list[Fault]) -> None:
    before = set(threading.enumerate())
    FaultInjector([Fault("stop", after_ms=1.0)]).reach("forward", 0)
    for thread in set(threading.enumerate()) - before:
        thread.join()
    assert [fault.kind for fault in happened] == ["stop"]


def test_signals_are_sent_to_this_process_and_a_slow_rank_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[object] = []
    monkeypatch.setattr(os, "kill", lambda pid, number: sent.append((pid, number)))
    monkeypatch.setattr(faults.time, "sleep", sent.append)
    for kind in SIGNALS:
        KINDS[kind](Fault(kind))
    FaultInjector([Fault("slow", seconds=2.5)]).reach("forward", 0)
    assert sent == [*((os.getpid(), number) for number in SIGNALS.values()), 2.5]


def test_an_exception_says_where_it_was_injected() -> None:
    with pytest.raises(RuntimeError, match=r"^fault injected at step 2 in save$"):
        FaultInjector([Fault("raise", step=2, phase="save")]).reach("save", 2)


def test_one_bit_of_the_entry_that_was_named_flips() -> None:
    entries = [("a", torch.ones(2)), ("exp_avg/b", torch.ones(2))]
    FaultInjector([Fault("flip", name="exp_avg/b")], entries=lambda: entries).reach("forward", 0)
    assert torch.equal(entries[0][1], torch.ones(2))
    assert entries[1][1].tolist() != [1.0, 1.0]
    FaultInjector([Fault("flip")], entries=lambda: entries).reach("forward", 0)
    assert entries[0][1].tolist() != [1.0, 1.0]


def test_a_name_that_is_not_there_is_said_so() -> None:
    model = nn.Linear(2, 1)
    entries = [("exp_avg/weight", model.weight.detach())]
    with pytest.raises(ValueError, match=r"flip:name=nowhere: expected one of exp_avg/weight, got 'nowhere'"):
        FaultInjector([Fault("flip", name="nowhere")], entries=lambda: entries).reach("forward", 0)
    with pytest.raises(ValueError, match="nan:name=nowhere: expected one of weight, bias, got 'nowhere'"):
        named(Fault("nan", name="nowhere"), list(model.named_parameters()))


WIDTHS = {
    torch.float16: 16,
    torch.bfloat16: 16,
    torch.float32: 32,
    torch.float64: 64,
    torch.int64: 64,
    torch.uint8: 8,
    torch.complex64: 64,
}


def integer(x: torch.Tensor) -> int:
    """The memory of ``x`` as one number."""
    return int.from_bytes(x.detach().contiguous().view(torch.uint8).numpy().tobytes(), "little")


@pytest.mark.parametrize(
    ("dtype", "bit"), [(d, bit) for d, width in WIDTHS.items() for bit in (0, 5, width - 1)]
)
def test_one_bit_of_one_element_flips_and_flips_back(dtype, bit):
    x = torch.arange(1, 7).to(dtype)
    before = integer(x)
    flip_bit(x, 4, bit)
    assert before ^ integer(x) == 1 << (4 * WIDTHS[dtype] + bit)
    flip_bit(x, 4, bit)
    assert integer(x) == before


def test_elements_are_counted_in_logical_order():
    x = torch.zeros(3, 4).t()  # (4, 3), not contiguous
    flip_bit(x, 7, 31)
    assert [math.copysign(1, value) for value in x.reshape(-1).tolist()] == [1] * 7 + [-1] + [1] * 4


@pytest.mark.parametrize(("index", "bit"), [(6, 0), (-1, 0), (0, 32), (0, -1)])
def test_what_is_not_there_cannot_flip(index, bit):
    with pytest.raises(ValueError, match="expected one of the"):
        flip_bit(torch.zeros(6), index, bit)
