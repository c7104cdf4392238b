"""The files of ``instep report``: page, figures, traces, picture."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from instep.events import Timeline
from instep.timeline.chrome import write_traces
from instep.timeline.page import render
from instep.timeline.picture import step_picture
from instep.timeline.plain import words as printable
from instep.timeline.tape import FOLDER, Tapes
from instep.timeline.words import lines
from instep.train.story import Story, tell, to_json

PAGE, FIGURES, PICTURE = "report.html", "report.json", "step"
MOST_PICTURED = 16  # ranks


def report(path: Path, out: Path | None, steps: Sequence[int], trace_steps: int) -> Iterator[str]:
    """Write the report on the run in ``path``, and yield what to print.

    Raises:
        ValueError: there is no run.
    """
    story, tapes, insight = tell(path, steps)
    out = out or path
    (out / FOLDER).mkdir(parents=True, exist_ok=True)
    yield f"{'run':<7}{printable(str(path))}: {story['run']['state']}"
    for note in story["run"]["notes"]:
        yield f"{'note':<7}{note}"
    for label, text in lines(insight.breakdowns, insight.slow, insight.advice):
        yield f"{label:<7}{text}"
    written = [_write(out / PAGE, render(story)), _write(out / FIGURES, to_json(story))]
    part = sorted({row.step for rows in insight.rows.values() for row in rows})
    written += _traces(tapes, story, out / FOLDER, part[-trace_steps:] if trace_steps > 0 else [])
    written += _picture(tapes, story, out / FOLDER / PICTURE)
    for file in written:
        yield f"{'wrote':<7}{printable(str(file))}"


def _traces(tapes: Tapes, story: Story, folder: Path, steps: Sequence[int]) -> list[Path]:
    for old in folder.glob("hta/rank-*.json.gz"):  # of ranks that there may not be any more
        old.unlink()
    if not steps:
        return []
    timeline = Timeline(event for step in steps for event in tapes.timeline(step).events)
    hosts = {rank: tape.host for rank, tape in tapes.tapes.items()}
    backend = str(story["run"]["backend"] or "unknown")
    return write_traces(timeline, folder, world_size=tapes.world_size, hosts=hosts, backend=backend)


def _picture(tapes: Tapes, story: Story, path: Path) -> list[Path]:
    """The median step, or the one that was asked for."""
    shown = story["timeline"]["steps"]
    if not shown:
        return []
    step, run = shown[0]["step"], story["run"]
    ranks = tapes.ranks(step)[:MOST_PICTURED]
    known = step >= run["first_step"]  # how a step of an earlier part was made is not told
    return step_picture(
        tapes.timeline(step),
        path,
        step=step,
        ranks=ranks,
        title=_no_formula(f"One step on {len(tapes.ranks(step))} rank(s)" + known * f", {run['strategy']}"),
        subtitle=_no_formula(
            f"{run['name']}, step {step} ({shown[0]['why']})" + known * f", backend {run['backend']}"
        ),
    )


def _no_formula(text: str) -> str:
    """What matplotlib shall not take for one."""
    return text.replace("$", r"\$")


def _write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path
