"""The supervisor and toys that misbehave: the run goes on, or ends in the right words, and leaves nothing."""

from __future__ import annotations

import contextlib
import gc
import json
import math
import os
import signal
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from instep.elastic import supervise, watchdog
from instep.elastic.failures import RunFailed
from instep.elastic.faults import parse_all
from instep.elastic.supervise import SuperviseOptions, _ranks
from instep.launch.launch import Children, warm
from instep.launch.rank_exit import Exit, RankFailed
from tests.elastic.toys import LOG, SAID, Script, work

SETTLE_S = 5.0  # for what other threads have open for a moment


@dataclass
class Scene:
    """Runs of toys in a directory, and what was heard of them."""

    directory: Path
    said: list[str] = field(default_factory=list)
    notes: list[dict[str, Any]] = field(default_factory=list)

    def run(self, *, ranks: int = 2, options: dict[str, Any] | None = None, **script: Any) -> int:
        """The exit code of a supervised run."""
        faults = parse_all(script.get("faults", ()))
        full: dict[str, Any] = {"faults": faults, "say": self.say, "note": self.notes.append}
        supervised = SuperviseOptions(ranks=ranks, **{**full, **(options or {})})
        return supervise.supervise(work, (Script(self.directory, **script),), supervised)

    def say(self, text: str) -> None:
        """Toys read it, too."""
        self.said.append(text)
        with (self.directory / SAID).open("a") as file:
            file.write(text)

    def say_and_see_rank_zero_end(self, text: str) -> None:
        """As a supervisor that is busy: it looks again when the first rank 0 is gone."""
        self.say(text)
        while is_alive(self.ranks(1)[0]):
            os.sched_yield()

    def lines(self, what: str = "") -> list[dict[str, Any]]:
        """What the workers have logged, in order."""
        path = self.directory / LOG
        found = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        return [line for line in found if what in ("", line["what"])]

    def ranks(self, generation: int) -> dict[int, int]:
        """Rank to process id."""
        return {line["rank"]: line["pid"] for line in self.lines("joins") if line["generation"] == generation}

    def failures(self) -> list[tuple[int, str]]:
        return [(note["rank"], note["how"]) for note in self.notes if note["event"] == "failure"]

    def recoveries(self) -> list[dict[str, Any]]:
        return [note for note in self.notes if note["event"] == "recovery"]


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A scene, after which neither a process, a descriptor nor a file of the supervisor may be left."""
    warm("pytest", "tests.elastic.toys")
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    monkeypatch.setattr(supervise, "LOOK_S", 0.02)
    monkeypatch.setattr(supervise, "SPARE_AFTER_S", math.inf)
    monkeypatch.setattr(supervise, "GRACE_S", 0.5)
    before = descriptors()
    scene = Scene(tmp_path)
    yield scene
    assert left_open(before) == set()
    assert list(temporary.iterdir()) == []
    assert not [line["pid"] for line in scene.lines("built") if is_alive(line["pid"])]


def descriptors() -> set[str]:
    """What this process has open."""
    gc.collect()  # the garbage of other tests has some, too
    found = set()
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # that of the directory, or another thread's
            found.add(f"{number}: {os.readlink(f'/proc/self/fd/{number}')}")
    return found


def left_open(before: set[str]) -> set[str]:
    """What is open, was not ``before``, and stays so: other threads of this process open and close some."""
    left = descriptors() - before
    until = time.monotonic() + SETTLE_S
    while left and time.monotonic() < until:
        left &= descriptors()
    return left


@pytest.mark.parametrize(
    ("fault", "how"),
    [
        ("kill", "was killed by SIGKILL, by --fault kill:rank=1,step=2,phase=exchange"),
        ("exit:code=0", "exited with code 0, by --fault exit:rank=1,step=2,phase=exchange,code=0"),
        ("raise", "failed with RuntimeError: fault injected at step 2 in exchange"),
    ],
)
def test_a_rank_that_ends_is_replaced_and_the_survivor_stays(scene: Scene, fault: str, how: str) -> None:
    comma = "," if ":" in fault else ":"
    assert scene.run(generations=2, faults=(f"{fault}{comma}rank=1,step=2,phase=exchange",)) == 0
    first, second = scene.ranks(1), scene.ranks(2)
    assert first[0] == second[0]
    assert first[1] != second[1]
    ((rank, text),) = scene.failures()
    assert rank == 1
    assert text.startswith(how)
    (note,) = [note for note in scene.notes if note["event"] == "failure"]
    assert (note["pid"], note["step"], note["phase"]) == (first[1], 2, "exchange")
    assert 0 <= note["noticed_ns"] - note["injected_ns"] < 10 * 10**9
    (recovery,) = scene.recoveries()
    assert recovery["seconds"]["ready"] >= 0
    assert recovery["seconds"]["total"] >= recovery["seconds"]["ready"]
    assert any(line.startswith("going on with 2 ranks at step ") for line in scene.said)
    assert scene.said[0].startswith(f"rank 1 (pid {first[1]}), in step 2 (exchange), {how}")


def test_a_fault_that_no_rank_has_come_to_is_told_of(scene: Scene) -> None:
    faults = ("kill:rank=7,step=1", "slow:rank=0,step=1,seconds=0.001", "nan:rank=0,step=1")
    assert scene.run(faults=faults) == 0
    missed = [line for line in scene.said if line.startswith("--fault ")]
    assert missed == ["--fault kill:rank=7,step=1 not triggered: its rank, step or phase was never reached"]


@given(st.lists(st.integers(-1, 6), min_size=1, max_size=7))
def test_all_ranks_are_assigned_and_kept_where_that_is_possible(before: list[int]) -> None:
    after = _ranks(before)
    assert sorted(after) == list(range(len(before)))
    for rank in range(len(before)):
        had_it = [i for i, its in enumerate(before) if its == rank]
        assert not had_it or after[had_it[0]] == rank


def test_a_replacement_takes_the_place_of_the_rank_that_it_replaces(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The place is the index of the GPU. It was the number of the process, which only grows."""
    monkeypatch.setattr(supervise, "SPARE_AFTER_S", 0.0)
    faults = tuple(f"kill:rank={rank},step={step},phase=exchange" for rank, step in ((1, 2), (2, 4), (1, 6)))
    assert scene.run(ranks=4, steps=8, faults=faults, extra="asks_for_its_place") == 0
    lines = scene.lines()
    places = {line["pid"]: line["place"] for line in lines if line["what"] == "place"}
    assert [sorted(scene.ranks(generation)) for generation in range(1, 5)] == [[0, 1, 2, 3]] * 4
    joins = [line for line in lines if line["what"] == "joins"]
    assert all(places[line["pid"]] == line["rank"] for line in joins)
    events = [(line["what"], line["pid"]) for line in lines]
    spare = [pid for what, pid in events if what == "asks"][4]
    goes_on = [line["what"] for line in lines].index("goes on")
    assert events.index(("asks", spare)) < goes_on < events.index(("place", spare))


def test_all_ranks_at_once(scene: Scene) -> None:
    assert (
        scene.run(ranks=3, generations=2, faults=tuple(f"kill:rank={rank},step=2" for rank in range(3))) == 0
    )
    assert len({*scene.ranks(1).values(), *scene.ranks(2).values()}) == 6


@pytest.mark.parametrize("phase", ["built", "join", "agree"])
def test_a_death_before_the_first_step_is_made_up_for(
    scene: Scene, phase: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who waits for it in the meeting is not named by anybody, and never comes back by itself."""
    monkeypatch.setattr(watchdog, "LEAST_S", 0.3)
    rank = -1 if phase == "built" else 1
    assert scene.run(faults=(f"kill:rank={rank},step=-1,phase={phase}",), options={"timeout_s": 15}) == 0
    assert len(scene.failures()) <= 2
    assert scene.failures()[0] == (rank, scene.failures()[0][1])


def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """What takes seconds takes a moment."""
    monkeypatch.setattr(watchdog, "LEAST_S", 0.4)
    monkeypatch.setattr(watchdog, "CONFIRMED_S", 0.1)
    monkeypatch.setattr(supervise, "MISSED_S", 0.1)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("stop", "was stopped for "),
        ("spin", "made no progress in forward for "),
        ("hold", "made no progress in forward for "),
    ],
)
def test_a_rank_that_does_not_end_but_stands_still_is_ended(
    scene: Scene, fault: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    patient(monkeypatch)
    assert scene.run(generations=2, faults=(f"{fault}:rank=1,step=3",)) == 0
    (rank, how) = scene.failures()[0]
    assert rank == 1
    assert how.startswith(words)
    table = next(text for text in scene.said if text.startswith("rank"))
    assert f"{scene.ranks(1)[1]}" in table
    if fault != "stop":
        stacks = next(text for text in scene.said if "Current thread" in text)
        assert f"_{fault}" in stacks


def test_a_rank_that_hangs_where_work_beats_from_inside_is_ended_the_first_time(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    patient(monkeypatch)
    fault = "hang:rank=1,step=2,phase=save"  # it is entered within the third step
    assert scene.run(generations=2, faults=(fault,), extra="save_once") == 0
    ((rank, how),) = scene.failures()
    assert rank == 1
    assert how.startswith("made no progress in save for ")


def test_a_rank_that_is_alone_and_hangs_where_it_would_wait_for_others_is_ended_by_the_deadline(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    patient(monkeypatch)
    script = {"generations": 2, "faults": ("hang:rank=0,step=2,phase=exchange",)}
    assert scene.run(ranks=1, **script, options={"timeout_s": 1.0}) == 0
    ((rank, how),) = scene.failures()
    assert rank == 0
    assert how.startswith("made no progress in exchange for ")


def test_a_long_save_that_makes_progress_is_let_be(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    patient(monkeypatch)
    assert scene.run(extra="save_for_long") == 0
    assert scene.failures() == []


def test_a_survivor_that_does_not_come_back_is_ended_too(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    patient(monkeypatch)
    script = {"generations": 2, "faults": ("kill:rank=1,step=2",), "extra": "never_asks_again"}
    assert scene.run(**script, options={"timeout_s": 1.0}) == 0
    assert [rank for rank, _ in scene.failures()] == [1, 0]
    assert "made no progress in lost" in scene.failures()[1][1]
    assert not set(scene.ranks(1).values()) & set(scene.ranks(2).values())


def test_a_group_that_is_lost_though_nobody_died_counts_as_a_failure(scene: Scene) -> None:
    with pytest.raises(RunFailed, match="5 failures in a row") as ended:
        scene.run(steps=4, extra="loses_its_group")
    assert len(ended.value.failures) == 5
    assert str(ended.value).count("lost its group") == 5
    assert all(
        f"generation {number}" in str(ended.value) or f"try {number}" in str(ended.value)
        for number in range(1, 6)
    )
    assert scene.ranks(1) == scene.ranks(5)  # all have stayed


def test_what_fails_before_the_first_step_ends_the_run_at_once(scene: Scene) -> None:
    with pytest.raises(RankFailed, match=r"rank 1 of 2 .* failed with RuntimeError: fault injected") as ended:
        scene.run(always=("raise:rank=1,step=-1,phase=join",))
    assert ended.value.exit.pid == scene.ranks(1)[1]
    with pytest.raises(RankFailed, match="failed with RuntimeError: fault injected at step -1 in built"):
        scene.run(always=("raise:rank=-1,step=-1,phase=built",))
    assert scene.failures() == []


def test_workers_that_never_get_as_far_as_a_rank_end_the_run(scene: Scene) -> None:
    with pytest.raises(RunFailed, match="5 failures in a row"):
        scene.run(ranks=1, always=("kill:rank=-1,step=-1,phase=built",))
    assert scene.lines("joins") == []


def test_replacements_that_never_get_as_far_as_a_rank_end_the_run(scene: Scene) -> None:
    with pytest.raises(RunFailed) as ended:
        scene.run(steps=10**9, faults=("kill:rank=1,step=3",), extra="spares_die")
    assert len(ended.value.failures) <= 5
    assert len(scene.lines("built")) == 2


CANNOT_READ = (
    ", in built, failed with FileNotFoundError: expected a data file, got gone.txt, which does not exist"
)


def test_a_newcomer_that_cannot_read_is_replaced_by_another(scene: Scene) -> None:
    script = {"generations": 2, "faults": ("kill:rank=1,step=2",)}
    assert scene.run(**script, extra="one_spare_cannot_read") == 0
    (line,) = [text for text in scene.said if text.startswith("a spare")]
    assert line.endswith(CANNOT_READ)
    assert "\n" not in line
    assert sorted(scene.ranks(2)) == [0, 1]


def test_where_no_newcomer_can_read_the_run_goes_on_with_fewer_if_it_may(scene: Scene) -> None:
    script = {"steps": 9, "generations": 2, "faults": ("kill:rank=1,step=2",)}
    assert scene.run(**script, extra="no_spare_can_read", options={"min_ranks": 1}) == 0
    assert sorted(scene.ranks(2)) == [0]


def test_an_error_that_would_come_again_ends_the_run_and_names_who_met_it(scene: Scene) -> None:
    with pytest.raises(RankFailed, match=r"rank 1 of 3 .* field threads: expected 1, got 2") as ended:
        scene.run(ranks=3, extra="contract")
    assert ended.value.type_name == "instep.errors.ContractBroken"
    assert ended.value.exit.pid == scene.ranks(1)[1]
    assert scene.ranks(2) == {}


def test_with_fewer_ranks_allowed_nobody_is_waited_for(scene: Scene) -> None:
    """The one that is missing comes back later, and takes the rank that is free."""
    script = {"generations": 3, "faults": ("kill:rank=0,step=2",)}
    assert scene.run(ranks=3, **script, options={"min_ranks": 2}) == 0
    sizes = {line["generation"]: line["world_size"] for line in scene.lines("joins")}
    assert sizes == {1: 3, 2: 2, 3: 3}
    assert sorted(scene.ranks(2)) == [0, 1]
    assert set(scene.ranks(2).values()) < set(scene.ranks(1).values())
    assert set(scene.ranks(2).values()) < set(scene.ranks(3).values())


def test_ranks_grow_and_shrink_between_two_steps(scene: Scene) -> None:
    sizes = {1: 2, 2: 4, 3: 1, 4: 3}
    faults = ("resize:step=3,ranks=4", "resize:step=6,ranks=1", "resize:step=9,ranks=3")
    assert scene.run(generations=4, faults=faults, extra="grows_and_shrinks") == 0
    found = {line["generation"]: line["world_size"] for line in scene.lines("joins")}
    assert found == sizes
    assert scene.failures() == []
    assert set(scene.ranks(1).values()) < set(scene.ranks(2).values())
    assert set(scene.ranks(3).values()) < set(scene.ranks(2).values())
    assert len(scene.lines("leaves")) == 3


def test_a_dismissed_worker_that_lingers_gets_no_rank(scene: Scene) -> None:
    faults = ("resize:step=2,ranks=1", "kill:rank=0,step=5")
    assert scene.run(generations=3, faults=faults, extra="lingers") == 0
    (gone,) = [line["pid"] for line in scene.lines("leaves")]
    assert gone in scene.ranks(1).values()
    assert gone not in (*scene.ranks(2).values(), *scene.ranks(3).values())
    assert len(scene.lines("built")) == 3


def test_a_spare_is_ready_before_it_is_needed(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervise, "SPARE_AFTER_S", 0.0)
    assert scene.run(generations=2, extra="waits_for_a_spare") == 0
    spare = next(line for line in scene.lines("built") if line["pid"] not in scene.ranks(1).values())
    assert scene.ranks(2)[1] == spare["pid"]


def test_spares_that_die_are_named_as_such_and_given_up(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervise, "SPARE_AFTER_S", 0.0)
    assert scene.run(extra="waits_for_dead_spares") == 0
    assert [rank for rank, _ in scene.failures()] == [-1] * supervise.MAX_SPARES_LOST
    assert scene.said[0].startswith("a spare (pid ")
    assert len(scene.lines("built")) == 2
    assert scene.recoveries() == []
    assert scene.ranks(2) == {}


def test_a_snapshot_outlives_all_workers(scene: Scene) -> None:
    faults = tuple(f"kill:rank={rank},step=4,phase=update" for rank in range(2))
    assert scene.run(steps=8, generations=2, faults=faults, remembers=True) == 0
    (found,) = scene.lines("found")
    assert found["generation"] == 2
    assert found["step"] in (4, 5)
    assert [line["memory"] for line in scene.lines("joins") if line["generation"] == 1] == [False, False]


def test_what_a_worker_said_before_it_ended_counts(scene: Scene) -> None:
    """It had said much when its supervisor, busy with another's death, looked again."""

    assert scene.run(extra="says_much_and_leaves", options={"say": scene.say_and_see_rank_zero_end}) == 7
    assert [rank for rank, _ in scene.failures()] == [1]


def test_a_snapshot_that_was_handed_over_just_before_a_death_is_held(scene: Scene) -> None:
    options = {"say": scene.say_and_see_rank_zero_end}
    assert scene.run(generations=2, extra="hands_over_and_dies", options=options) == 0
    assert [line["step"] for line in scene.lines("found")] == [2]


def test_a_signal_to_a_worker_ends_the_run_after_the_step(scene: Scene) -> None:
    assert scene.run(steps=10**9, faults=("usr1:rank=1,step=3",)) == 75


def test_a_signal_to_the_supervisor_ends_the_run_after_the_step(scene: Scene) -> None:
    assert scene.run(steps=10**9, extra="asks_to_end", supervisor=os.getpid()) == 75
    assert scene.said == [
        "SIGTERM: stopping after this step, with a checkpoint; a second signal stops at once"
    ]


@pytest.mark.filterwarnings("ignore:.*/proc/:pytest.PytestUnraisableExceptionWarning")
def test_a_second_signal_ends_everything_at_once_and_in_order(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its ``SystemExit`` may come between an ``open`` and its ``with``; the collector closes that file."""
    stop, during = Children.stop, []

    def observed(children: Children, grace_s: float) -> list[Exit]:
        during.append(signal.getsignal(signal.SIGTERM))
        return stop(children, grace_s)

    monkeypatch.setattr(Children, "stop", observed)
    with pytest.raises(SystemExit) as ended:
        scene.run(steps=10**9, extra="insists", supervisor=os.getpid())
    assert ended.value.code == 128 + signal.SIGTERM
    assert during == [signal.SIG_IGN]  # a third one does not interrupt the cleaning up
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_what_the_caller_is_told_may_fail(scene: Scene) -> None:
    """An exception of a callback ends everything in order."""

    def refuse(event: object) -> None:
        raise LookupError("no")

    with pytest.raises(LookupError):
        scene.run(faults=("kill:rank=1,step=1",), options={"note": refuse})
