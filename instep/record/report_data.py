"""What ``instep report`` tells of a run and writes: the data, the page that shows it, traces and a picture.

    run directory --> report_data() --> report.json   every figure, as one object
                                    --> report.html   a page that shows that object
                  --> traces        --> trace/        for Perfetto and Holistic Trace Analysis, and a picture

The run may be finished, going on, or dead, and any file may be missing or torn: what can be read is told, and
what cannot is a note.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

from matplotlib.figure import Figure

from instep.errors import counted
from instep.events import Timeline
from instep.record.directory import CONFIG, FAULTS, RECORD, SUMMARY
from instep.record.display import follow
from instep.record.jsonl import OF_STEPS, Fields, read_lines, read_object, replace_text
from instep.record.status import last_part, run_status, steps_done
from instep.record.step_lines import STARTED, of_script
from instep.record.summary import throughput_name
from instep.timeline.advice import in_percent
from instep.timeline.analysis import (
    WARM_UP,
    Analysis,
    analyse,
    bubble_of,
    formula_of,
    stage_slowness,
)
from instep.timeline.breakdown import BUBBLE, PARTS, Parts, RankBreakdown
from instep.timeline.bucket_times import BucketRow
from instep.timeline.chrome_trace import write_traces
from instep.timeline.report import Pictures, json_safe, printable, render
from instep.timeline.run_chart import curve, stacked_parts
from instep.timeline.step_chart import step_chart
from instep.timeline.style import png_of, save
from instep.timeline.trace_files import FOLDER, PATTERN, RunTraces, read_traces

PAGE, FIGURES, PICTURE = "report.html", "report.json", "step"
FORMAT = 1
MOST_POINTS = 400  # of a curve
MOST_FIGURES = 50_000  # of what is told for each rank: over time, of the buckets
MOST_LINES = 100  # of faults, of restarts
MOST_PICTURED = 16  # ranks
NUM_NAMED = 8  # in one note
SPOKEN = {"norm": "Gradient norm", "rate": "Learning rate"}


def write_report(path: Path, out: Path | None, steps: Sequence[int], trace_steps: int) -> Iterator[str]:
    """Write the report on the run in ``path``, and yield what to print.

    Raises:
        ValueError: there is no run.
    """
    data, tapes, insight = report_data(path, steps)
    out = out or path
    (out / FOLDER).mkdir(parents=True, exist_ok=True)
    yield f"{'run':<7}{printable(str(path))}: {data['run']['state']}"
    for note in data["run"]["notes"]:
        yield f"{'note':<7}{note}"
    for label, text in insight.lines():
        yield f"{label:<7}{text}"
    charts = _step_charts(tapes, insight, data)
    pictures = {"timeline": [(name, png_of(chart)) for name, chart in charts.items()], **_run_charts(data)}
    written = [out / PAGE, out / FIGURES]
    for file, text in zip(written, (render(data, pictures), to_json(data)), strict=True):
        replace_text(file, text)
    part = sorted({row.step for rows in insight.rows.values() for row in rows})
    written += _traces(tapes, data, out / FOLDER, part[-trace_steps:] if trace_steps > 0 else [])
    for chart in [*charts.values()][:1]:
        written += save(chart, out / FOLDER / PICTURE)
    for file in written:
        yield f"{'wrote':<7}{printable(str(file))}"


def report_data(path: Path, steps: Sequence[int] = ()) -> tuple[Fields, RunTraces, Analysis]:
    """What there is to say of the run in ``path``; its timeline shows ``steps``, or some worth a look.

    Curves, and the time step by step, are of the whole run; all other figures of its last part, which was
    made in one layout.

    Raises:
        ValueError: there is no run.
    """
    if not path.exists():
        raise ValueError(
            f"{path} does not exist: pass the directory of a run, or a file (.json, .json.gz) that "
            "torch.profiler has written"
        )
    if not (path / CONFIG).is_file() and not (path / FOLDER).is_dir():
        raise ValueError(
            f"{path}: expected the directory of a run, with its {CONFIG}, or of instep.trace(model, "
            f"path), with its {FOLDER}/"
        )
    notes: list[str] = []
    summary = read_object(path / SUMMARY, notes)
    lines = read_lines(path / RECORD, notes, OF_STEPS)
    starts = [line for line in lines if line.get("event") == STARTED]
    tapes = read_traces(path / FOLDER, starts[-1].get("world_size") if starts else None)
    about = run_status(path, summary, lines, starts, tapes, notes)
    part = last_part(starts, steps_done(lines), tapes.steps)
    whole = insight = analyse(tapes, each=lambda steps: follow(steps, "reading step"))
    if len(part) < len(tapes.steps):
        notes.append(f"only curves and the time by step are of the whole run, all else is of {_said(part)}")
        insight = analyse(tapes, part)
    notes += [*tapes.notes, *_lacking(path, tapes, insight)]
    chosen = _chosen(insight, tapes, steps, notes)
    data = {
        "format": FORMAT,
        "run": {**about, "first_step": min(part, default=0), "notes": notes},
        "advice": [{name.rstrip("_"): x for name, x in asdict(one).items()} for one in insight.advice],
        "slow": _slow(insight),
        "breakdown": {"parts": _parts(insight), "ranks": [_breakdown(row) for row in insight.breakdowns]},
        **_pipeline(insight),
        "over_time": _over_time(whole.rows),
        "buckets": _buckets(insight, tapes, notes),
        "curves": _curves(lines),
        "timeline": _timeline(tapes, chosen, notes),
        "contract": starts[-1].get("numerical", {}) if starts else {},
        "starts": [_start(line) for line in starts[-MOST_LINES:]],
        "faults": read_lines(path / FAULTS, notes)[-MOST_LINES:],
    }
    return json_safe(data), tapes, insight


def _said(part: Sequence[int]) -> str:
    return f"its last part: steps {part[0]} to {part[-1]}" if part else "its last part, which has no step yet"


def _lacking(path: Path, tapes: RunTraces, insight: Analysis) -> list[str]:
    """What there is no trace of."""
    if not tapes.traces and any((path / FOLDER).glob(PATTERN)):
        return [f"no trace in {FOLDER}/ can be read: nothing is known of where the time went"]
    if not tapes.traces:
        return [f"there is no trace in {FOLDER}/: the run kept none (--record.events 0), or it was removed"]
    if not insight.breakdowns:
        return ["no step has ended yet on any rank: there is nothing to break down"]
    return [f"rank {rank} took part until step {step}: the run went on without it"
            for rank, step in list(tapes.gone.items())[:NUM_NAMED]]  # fmt: skip


def _chosen(
    insight: Analysis, tapes: RunTraces, asked: Sequence[int], notes: list[str]
) -> list[tuple[int, str]]:
    """(step, why) of the steps to show."""
    known, asked = set(tapes.steps), list(dict.fromkeys(asked))
    if lacking := [step for step in asked if step not in known]:
        listed = ", ".join(map(str, lacking[:NUM_NAMED]))
        kept = f"{min(known)} to {max(known)}" if known else "none"
        notes.append(f"step {listed} is not in the trace, which keeps the last ones: {kept}")
    if found := [(step, "asked for") for step in asked if step in known]:
        return found
    walls: dict[int, list[float]] = {}
    for rows in insight.rows.values():
        for row in rows:
            walls.setdefault(row.step, []).append(row.wall)
    times = {step: fmean(walls[step]) for step in sorted(walls)}
    steady = sorted([*times][WARM_UP:] or times, key=times.__getitem__)
    if not steady:
        return []
    why = [(steady[len(steady) // 2], "median"), (steady[-1], "slowest"), (steady[0], "fastest")]
    seen: dict[int, str] = {}
    for step, reason in why:
        seen.setdefault(step, reason)
    return list(seen.items())


def _timeline(tapes: RunTraces, chosen: Sequence[tuple[int, str]], notes: list[str]) -> Fields:
    """Which steps are pictured, of which ranks."""
    shown = [{"step": step, "why": why, "ranks": tapes.ranks(step)[:MOST_PICTURED]} for step, why in chosen]
    if (num_ranks := max((len(tapes.ranks(step)) for step, _ in chosen), default=0)) > MOST_PICTURED:
        notes.append(f"pictures of steps show the first {MOST_PICTURED} of {num_ranks} ranks")
    return {"clock_error_us": tapes.error_ns / 1e3 if tapes.traces else None, "steps": shown}


def _over_time(rows: Mapping[int, Sequence[Parts]]) -> Fields:
    steps = sorted({row.step for each in rows.values() for row in each})
    taken = _thinned(steps, min(MOST_POINTS, MOST_FIGURES // ((len(PARTS) + 1) * max(len(rows), 1))))
    told = []
    for rank, each in rows.items():
        by_step = {row.step: row.totals() | {"wall": row.wall} for row in each}
        found = [by_step.get(step) for step in taken]
        curves = {
            name: [None if row is None else round(row[name] * 1e3, 3) for row in found]
            for name in ("wall", *PARTS)
        }
        told.append({"rank": rank, "wall": curves.pop("wall"), "parts": curves})
    return {"steps": taken, "ranks": told}


def _curves(lines: Sequence[Fields]) -> Fields:
    taken = _thinned([line for line in lines if "step_ms" in line])
    held_out = _thinned([line for line in lines if "held_out_loss" in line])
    names = ("loss", "step_ms", throughput_name(name for line in taken for name in line))
    points: dict[str, list[list[float | None]]] = {}
    for line in (line for line in lines if "event" not in line):
        for name, x in {"norm": line.get("norm"), "rate": line.get("rate"), **of_script(line)}.items():
            if x is not None:
                points.setdefault(name, []).append([_number(line.get("step")), _number(x)])
    return {
        "steps": [_number(line.get("step")) for line in taken],
        **{name: [_number(line.get(name)) for line in taken] for name in names},
        "figures": {SPOKEN.get(name, name): _thinned(its) for name, its in points.items()},
        "held_out": [[_number(line.get("step")), _number(line["held_out_loss"])] for line in held_out],
    }


def _number(value: Any) -> float | None:
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def _thinned(values: Sequence[Any], most: int = MOST_POINTS) -> list[Any]:
    """At most ``most`` of them, but at least two, at even distances, the last one included."""
    count = min(len(values), max(most, 2))
    return [values[len(values) - 1 - i * len(values) // count] for i in range(count)][::-1]


def _breakdown(row: RankBreakdown) -> Fields:
    return {
        **{name: getattr(row, name) for name in ("rank", "steps", "unattributed_share", "slowdown")},
        **{f"{name}_ms": getattr(row, f"{name}_s") * 1e3 for name in ("wall", "median", "hidden")},
        **{name: _in_ms(getattr(row, name)) for name in ("parts", "causes", "hosts")},
    }


def _parts(insight: Analysis) -> list[str]:
    """The names of the parts of a step; a pipeline's alone has a bubble."""
    return [name for name in PARTS if name != BUBBLE or insight.pipeline is not None]


def _pipeline(insight: Analysis) -> Fields:
    """The bubble of a pipeline, in words and by rank, and its stages."""
    pipeline = insight.pipeline
    if pipeline is None:
        return {}
    stages = {stage.stage: stage for stage in pipeline.stages}
    rows = [
        {
            "rank": row.rank,
            "stages": ", ".join(map(str, row.stages)),
            "forward_ms": sum(stages[number].forward_s for number in row.stages) * 1e3,
            "backward_ms": sum(stages[number].backward_s for number in row.stages) * 1e3,
            "computes_ms": row.computes_s * 1e3,
            "fill_ms": row.fill_s * 1e3,
            "steady_ms": row.steady_s * 1e3,
            "drain_ms": row.drain_s * 1e3,
        }
        for row in pipeline.ranks
    ]
    slow = "" if pipeline.slow is None else stage_slowness(pipeline.slow)
    said = [bubble_of(pipeline), formula_of(pipeline)]
    return {"pipeline": {"said": said, "slow": slow, "span_ms": pipeline.span_s * 1e3, "ranks": rows}}


def _in_ms(seconds: Mapping[str, float]) -> dict[str, float]:
    return {name: value * 1e3 for name, value in seconds.items()}


def _buckets(insight: Analysis, tapes: RunTraces, notes: list[str]) -> list[Fields]:
    rows = insight.buckets[: max(MOST_FIGURES // (10 + len(tapes.traces)), 1)]
    if len(rows) < len(insight.buckets):
        notes.append(f"the first {len(rows)} of {len(insight.buckets)} buckets are told")
    return [_bucket(row) for row in rows]


def _bucket(row: BucketRow) -> Fields:
    fields = asdict(row)
    num_bytes = fields.pop("bytes")
    return {**fields, "mb": num_bytes / 1e6, "ready_ms": {str(r): ms for r, ms in row.ready_ms.items()}}


def _slow(insight: Analysis) -> Fields | None:
    if (slow := insight.slow) is None:
        return None
    told = {name: getattr(slow, name) for name in ("rank", "phase", "since", "share")}
    return {**told, "excess_ms": slow.excess_s * 1e3}


def _start(line: Fields) -> Fields:
    names = ("step", "restarts", "generation", "world_size", "strategy", "fingerprint")
    return {name: line.get(name) for name in names}


def to_json(data: Fields) -> str:
    """As ``report.json``, with a line for each section."""
    lines = (f"{json.dumps(name)}: {json.dumps(section, allow_nan=False)}" for name, section in data.items())
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _traces(tapes: RunTraces, data: Fields, folder: Path, steps: Sequence[int]) -> list[Path]:
    for old in folder.glob("hta/rank-*.json.gz"):  # of ranks that there may not be any more
        old.unlink()
    if not steps:
        return []
    timeline = Timeline(event for step in steps for event in tapes.timeline(step).events)
    hosts = {rank: tape.host for rank, tape in tapes.traces.items()}
    backend = str(data["run"]["backend"] or "unknown")
    return write_traces(timeline, folder, world_size=tapes.world_size, hosts=hosts, backend=backend)


def _step_charts(tapes: RunTraces, insight: Analysis, data: Fields) -> dict[str, Figure]:
    """By their names, the steps that are shown."""
    run, charts = data["run"], {}
    for shown in data["timeline"]["steps"]:
        step, num = shown["step"], len(tapes.ranks(shown["step"]))
        known = step >= run["first_step"]  # how a step of an earlier part was made is not told
        how, bubble = run["strategy"], ""
        if insight.pipeline is not None:
            how = f"in a pipeline: {insight.pipeline.schedule or 'a schedule of its own'}"
            share = in_percent(insight.pipeline.bubble)
            bubble = f"; bubble of all steps {share}; {formula_of(insight.pipeline)}"
        name = f"step {step} ({shown['why']})"
        charts[name] = step_chart(
            tapes.timeline(step),
            step=step,
            ranks=shown["ranks"],
            title=_no_formula(f"One step on {counted(num, 'rank')}" + known * f", {how}"),
            subtitle=_no_formula(f"{run['name']}, {name}" + known * f", backend {run['backend']}{bubble}"),
        )
    return charts


def _run_charts(data: Fields) -> Pictures:
    """The parts of the steps, on average over the ranks, and the curves."""
    over, curves = data["over_time"], data["curves"]
    parts = {
        name: [fmean(known) if (known := [x for x in at if x is not None]) else None
               for at in zip(*(rank["parts"][name] for rank in over["ranks"]), strict=True)]
        for name in data["breakdown"]["parts"]
    }  # fmt: skip
    stacked = [("the parts of every step", stacked_parts(over["steps"], parts))] if over["steps"] else []
    rate = throughput_name(curves)
    drawn: dict[str, Any] = {
        "Loss (dots: held out)" if curves["held_out"] else "Loss": (curves["steps"], curves["loss"], False),
        "Time per step in ms": (curves["steps"], curves["step_ms"], True),
        rate.replace("_per_s", " per second").capitalize(): (curves["steps"], curves[rate], True),
        **{name: (*zip(*points, strict=True), False) for name, points in curves["figures"].items()},
    }
    return {
        "over_time": stacked,
        "curves": [
            (name, curve(steps, values, curves["held_out"] * name.startswith("Loss ("), from_zero=from_zero))
            for name, (steps, values, from_zero) in drawn.items()
            if any(value is not None for value in values)
        ],
    }


def _no_formula(text: str) -> str:
    """What matplotlib shall not take for one."""
    return text.replace("$", r"\$")
