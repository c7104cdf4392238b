"""Charts: the same numbers give the same bytes, a name has one colour, and labels do not overlap."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from instep.bench.charts import Measure, bars, lines
from instep.bench.collectives import against_size
from instep.timeline.style import colours, spread

SIZES = [
    {
        "backend": backend,
        "ranks": ranks,
        "size(B)": size,
        "time(us)": 10.0 * ranks + size / 1e3,
        "min(us)": 9.0 * ranks,
        "p99(us)": 20.0 * ranks + size / 1e3,
        "busbw(GB/s)": 1 + size / 1e6,
    }
    for backend in ("gloo", "shm")
    for ranks in (2, 4)
    for size in (1000, 10**6)
]
STEPS = [
    {"name": name, "median": 100.0 * i, "low": 90.0 * i, "high": 120.0 * i, "setting": setting}
    for setting in ("communication", "compute")
    for i, name in enumerate(("naive", "bucketed"), start=1)
]
THROUGHPUT = [
    {"work": work, "strategy": name, "ranks": ranks, "tokens/s": y, "low": y - 1, "high": y + 1}
    for work in ("strong", "weak")
    for name in ("none", "bucketed")
    for ranks, y in ((1, 10.0), (2, 19.0), (4, 20.0))
]
SWEEP = [
    {"mib": x, "ms": y, "of": of}
    for of in ("bucketed", "model")
    for x, y in ((1, 9.0), (10, 5.0), (100, 8.0))
]
DRAW = {
    "lines": lambda path: against_size(SIZES, path, title="A title", subtitle="how " * 60),
    "bars": lambda path: bars(
        STEPS, path, title="A title", group="setting", reference=100, reference_text="torch DDP", unit="ms"
    ),
    "bars without spread": lambda path: bars([{"name": "a", "median": 1.0}], path, title="A title"),
    "scaling": lambda path: lines(
        THROUGHPUT,
        path,
        measures=[Measure("tokens/s", "tokens/s", None, "low", "high")],
        series="strategy",
        x="ranks",
        panel="work",
        title="A title",
    ),
    "sweep": lambda path: lines(
        SWEEP, path, measures=[Measure("ms", "ms")], series="of", x="mib", x_text=str, title="A title"
    ),
}


@pytest.mark.parametrize("draw", DRAW.values(), ids=DRAW)
def test_the_same_numbers_give_the_same_bytes(draw, tmp_path):
    first, second = draw(tmp_path / "a.svg"), draw(tmp_path / "b.svg")
    assert [path.suffix for path in first] == [".svg", ".png"]
    for one, other in zip(first, second, strict=True):
        assert one.read_bytes() == other.read_bytes()


def test_a_name_has_the_same_colour_whoever_stands_beside_it():
    alone, together = colours(["shm"]), colours(["new", "gloo", "shm", "other"])
    assert alone["shm"] == together["shm"]
    assert len(set(together.values())) == 4


@given(st.dictionaries(st.text(min_size=1), st.floats(-100, 100), min_size=1, max_size=8))
def test_labels_keep_their_order_and_their_distance(heights):
    found = spread(heights, gap=10)
    places = [found[name] for name in sorted(heights, key=lambda name: heights[name])]
    assert all(above - below > 10 - 1e-6 for below, above in pairwise(places))


def test_labels_that_have_room_stay_where_they_are():
    assert spread({"a": 0.0, "b": 50.0}, gap=10) == {"a": 0.0, "b": 50.0}
    assert spread({"a": 0.0, "b": 2.0}, gap=10) == {"a": -4.0, "b": 6.0}


def test_labels_stay_beside_the_axes():
    found = spread({"a": 95.0, "b": 98.0, "c": 99.0, "d": 1.0}, gap=10, low=0, high=100)
    assert found == {"d": 1.0, "a": 80.0, "b": 90.0, "c": 100.0}
