"""Files that are valid JSON, but not what a run writes, and pipes in their place: refused by name or read."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from instep.net.peers import own_peer
from instep.recipes import text_config
from instep.record import summary
from instep.record.compare import compare
from instep.record.directory import CONFIG, FAULTS, RECORD, SUMMARY, WORKERS
from instep.record.jsonl import EVENTS, OF_STEPS, JsonLines, read_lines, read_object
from instep.record.status import run_status
from instep.record.step_lines import LINES, Made, evaluated, part_begins, read_run, started, starts, step_line
from instep.ring_buffer import RingBuffer, read_head
from instep.run import folder
from instep.run.toml import to_toml
from instep.run.writer import require_readable
from instep.timeline.trace_files import RunTraces

ODD: list[Any] = [None, True, -1, 1 << 70, "text", [1], {"a": {"b": []}}]


def a_run(path: Path) -> Path:
    """The files that a run of two steps leaves, in ``path``."""
    folder.begin(path, to_toml(text_config.tiny()), [own_peer(0)])
    lines = JsonLines(path / RECORD, before_step=0)
    state, layout = ("ab", {"w": "cd"}), {"world_size": 2, "placement": {"dp": 2}, "strategy": "bucketed"}
    contract = {"fingerprint": "f", "numerical": {"seed": 0}}
    lines.write(**started(0, layout, restarts=0, **contract, state=state))
    lines.write(**evaluated(5.0))
    for step in (0, 1):
        made = Made(loss=3.0, norm=1.0, step_ms=2.0, exposed_ms=0.1, logged={"tokens_per_s": 10.0})
        leaves = [{"leaf": 0, "rank": 1, "parameters": {"w": "ab"}}]
        hashes = {"whole": state, "leaves": leaves, "reduced": {"w": "ef"}}
        lines.write(**step_line(step, made, cursor=step + 1, sampled=[("w", 0, "ab")], **hashes))
    lines.close()
    faults = JsonLines(path / FAULTS, before_step=0, shape=EVENTS)
    faults.write(event="failure", step=-1, rank=0)
    faults.close()
    figures = {"steps": 2, "strategy": "bucketed", "num_replicas": 2, "state_sha256": "ab", "loss_last": 3.0}
    folder.end(path, {**figures, "step_ms_median": 2.0, "parallel": {"shard_stage": 0}})
    return path


def resumed(path: Path) -> None:
    """What a command reads of an earlier one, goes on with, and sums up."""
    folder.workers(path)
    require_readable(path)
    part_begins(starts(path))
    for name, shape in {RECORD: LINES, FAULTS: EVENTS}.items():
        JsonLines(path / name, before_step=1, shape=shape).close()
    summary.figures(read_lines(path / RECORD, shape=LINES), 0, 8)


def shown_again(path: Path) -> None:
    told = read_object(path / SUMMARY)
    if not summary.SHOWN.problem(told):
        summary.show(told, path)


def compared(path: Path) -> None:
    compare(read_run(path), read_run(path))


def reported(path: Path) -> None:
    notes: list[str] = []
    lines = read_lines(path / RECORD, notes, OF_STEPS)
    read_lines(path / FAULTS, notes)
    run_status(path, read_object(path / SUMMARY, notes), lines, lines, RunTraces({}), notes)


Read = Callable[[Path], None]
READERS: list[tuple[Read, str]] = [
    *[(resumed, name) for name in (RECORD, FAULTS, WORKERS)],
    *[(reported, name) for name in (RECORD, FAULTS, SUMMARY, WORKERS)],
    (shown_again, SUMMARY),
    (compared, RECORD),
]
REFUSED = {(resumed, RECORD), (resumed, FAULTS), (compared, RECORD)}


def damaged(line: Any) -> Iterator[Any]:
    """``line`` with each value in it, at any depth, replaced by others, or left out; then all of it."""
    if isinstance(line, dict):
        for key, value in line.items():
            yield {name: x for name, x in line.items() if name != key}
            yield from ({**line, key: other} for other in damaged(value))
    elif isinstance(line, list):
        for i, value in enumerate(line):
            yield from ([*line[:i], other, *line[i + 1 :]] for other in damaged(value))
    yield from ODD


def problem_of(read: Read, path: Path) -> str:
    """What ``read`` refuses the run in ``path`` for; "" if it does not. Any other end is a failure."""
    try:
        read(path)
    except (OSError, ValueError) as error:
        return str(error)
    return ""


@pytest.mark.parametrize(("read", "name"), READERS)
def test_whatever_json_is_in_a_file_it_is_read_or_refused_with_its_name(
    tmp_path: Path, name: str, read: Read
) -> None:
    file = a_run(tmp_path) / name
    whole = file.read_text()
    lines = [json.loads(whole)] if name.endswith(".json") else list(map(json.loads, whole.splitlines()))
    refused = False
    for number, line in enumerate(lines):
        for other in damaged(line):
            all_lines = [*lines[:number], other, *lines[number + 1 :]]
            file.write_text("".join(json.dumps(each) + "\n" for each in all_lines))
            problem = problem_of(read, tmp_path)
            refused = refused or bool(problem)
            assert not problem or problem.startswith(f"{file}, line {number + 1}: ")
    assert refused == ((read, name) in REFUSED)
    file.write_text(whole)
    read(tmp_path)


@pytest.mark.parametrize(("read", "name"), [*READERS, (reported, CONFIG)])
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: path.symlink_to("/dev/zero")])
def test_what_is_no_file_is_read_by_no_command_and_waited_for_by_none(
    tmp_path: Path, name: str, read: Read, make: Callable[[Path], None]
) -> None:
    file = a_run(tmp_path) / name
    file.unlink()
    make(file)
    problem = problem_of(read, tmp_path)
    assert bool(problem) == ((read, name) in REFUSED) and (not problem or name in problem)


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero")])
def test_a_trace_goes_into_no_pipe_and_no_device(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path / "rank-00000.ring")
    assert read_head(tmp_path / "rank-00000.ring") is None
    with pytest.raises(OSError, match=r"expected a (regular file|file or nothing), got a (pipe|link)"):
        RingBuffer(8, tmp_path / "rank-00000.ring")


def test_a_peer_comes_back_as_it_was_written(tmp_path: Path) -> None:
    a_run(tmp_path)
    (peer,) = folder.workers(tmp_path)
    assert asdict(peer) == {**asdict(own_peer(0)), "token": peer.token}
