"""``%attach RUN_DIR``: processes, newest steps and times of a run that another command has started.

Nothing in the run changes: its files are read, and its ranks' debug servers (``net.hang_report``) answer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from instep.launch.process_memory import resident_memory
from instep.net.hang_report import aligned
from instep.net.peers import is_alive, statuses_of
from instep.record.directory import RECORD
from instep.record.display import step_figures
from instep.record.jsonl import read_last_lines
from instep.record.report_data import report_data
from instep.record.status import workers
from instep.record.step_lines import FIGURES, PER_S, Made, of_script

NUM_STEPS = 3  # the newest ones


def attached(path: Path) -> Iterator[str]:
    """The lines that describe the run in ``path``: running, or how it has ended.

    Raises:
        ValueError: there is no run.
    """
    data, _, insight = report_data(path)
    run = data["run"]
    yield f"{'run':<7}{path}: {run['state']}"
    yield from (f"{'note':<7}{note}" for note in run["notes"])
    peers = {peer.rank: peer for peer in workers(path)}
    pids = {rank: peer.pid for rank, peer in peers.items() if is_alive(peer)}
    if pids:
        yield process_table(pids)
    if away := [rank for rank, peer in peers.items() if is_alive(peer) is None]:
        yield f"{'note':<7}ranks on other hosts, which cannot be asked from here: {away}"
    for line in [line for line in read_last_lines(path / RECORD) if "event" not in line][-NUM_STEPS:]:
        known = {name: line[name] for name in FIGURES if name in line}
        made = Made(**known, logged={name: x for name, x in line.items() if name.endswith(PER_S)})
        yield f"{'step':<7}{line['step']}  {step_figures(made, of_script(line), None)}"
    for label, text in insight.lines():
        yield f"{label:<7}{text}"
    if not pids and "state_sha256" in run["summary"]:
        yield f"{'state':<7}{run['summary']['steps']} steps, sha256 {run['summary']['state_sha256']}"


def process_table(pids: Mapping[int, int], cells: Mapping[int, str] | None = None) -> str:
    """A table of ranks of this host: process, memory, last operation, line of the program, and last cell."""
    rows = [("rank", "pid", "state", "MB", "last operation", "line", "last cell" if cells else "")]
    for row in statuses_of(pids):
        memory = resident_memory(Path(f"/proc/{pids[row.rank]}"))
        size = "" if memory is None else f"{memory.now / 1e6:,.0f}"
        operation = f"{row.status} {row.operation}" if row.status else ""
        cell = cells[row.rank] if cells else ""
        rows.append((str(row.rank), str(pids[row.rank]), row.state, size, operation, row.site, cell))
    return "\n".join(aligned(rows, {0, 1, 3}))
