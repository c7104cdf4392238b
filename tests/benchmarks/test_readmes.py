"""Every README of a benchmark has a place for each table that its command writes."""

import shutil
from pathlib import Path

import pytest

from instep.bench.tables import write_between

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.parametrize(
    ("folder", "name"),
    [
        *(("steps", name) for name in ("communication table", "compute table", "environment")),
        *(("small_steps", name) for name in ("small steps table", "declared table", "environment")),
        *(("timeline", name) for name in ("parts table", "account table", "cost table", "environment")),
        ("fuzz", "fuzz"),
        ("gpu", "gpu tables"),
        ("broadcast", "broadcast"),
        ("collectives", "collectives"),
        *(("soak", name) for name in ("soak", "kills")),
        *(("advice", name) for name in ("gains table", "lines table", "environment")),
        *(("shard", f"{name} table") for name in ("update", "weights", "muon", "memory", "fits")),
        *(("memory_savers", name) for name in ("memory table", "loss table", "environment")),
        *(
            ("link", name)
            for name in ("link table", "hosts table", "formats table", "sweep table", "environment")
        ),
        *(("nodes", f"{name} table") for name in ("loss", "rounding", "placement", "cost")),
        ("nodes", "environment"),
        *(("buckets", f"{place} table") for place in ("gloo", "shm", "link")),
        *(("scaling", name) for name in ("scaling table", "environment")),
        ("data_parallel", "workers table"),
        ("own_loop", "own loop table"),
        ("loader", "loader table"),
        *(("placement", name) for name in ("placement table", "pipelines table")),
        *(("pipeline", f"bubble of {name}") for name in ("1f1b", "interleaved", "zb-h1", "zb-h2")),
        *(("pipeline", name) for name in ("all schedules", "speed-up of gpipe", "throughput")),
        *(("pipeline", name) for name in ("few and many", "measured", "notes on the measured", "kept")),
        *(("pipeline", name) for name in ("environment", "against torch")),
        ("pipeline", "against torch environment"),
    ],
)
def test_the_place_is_there_once(folder, name, tmp_path):
    readme = Path(shutil.copy(BENCHMARKS / folder / "README.md", tmp_path))
    write_between(readme, name, "what was measured")
    assert readme.read_text().count(f"<!-- {name} -->\nwhat was measured\n<!-- end of {name} -->") == 1
