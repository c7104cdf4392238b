"""Schedules for property tests: every name, up to 8 ranks, 32 micro-batches and 4 stages per rank."""

from __future__ import annotations

from hypothesis import strategies as st

from instep.pipeline.actions import Schedule
from instep.pipeline.schedules import NAMES, generate


@st.composite
def schedules(draw: st.DrawFn, ranks: int = 1) -> Schedule:
    """Any schedule over at least so many ranks."""
    name = draw(st.sampled_from(sorted(NAMES)))
    chunks = draw(st.integers(1, 4)) if name == "interleaved" else None
    return generate(name, draw(st.integers(ranks, 8)), draw(st.integers(1, 32)), chunks)
