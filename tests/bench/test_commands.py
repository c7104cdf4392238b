"""``instep bench`` from the command line to its rows, its table and its files, once for each measurement."""

import json

import pytest

from tests.launched.command import instep

NCCL_TESTS = ["size(B)", "count", "type", "redop", "root", "time(us)", "algbw(GB/s)", "busbw(GB/s)", "#wrong"]
# The words of each, the columns that tell its rows apart, and these.
COMMANDS = {
    "collectives": (
        "-n 2 --sizes 1KB,3KB --samples 3 --backends gloo,shm,shm-in-place,direct",
        ("backend", "#wrong"),
        [(name, 0) for _ in range(2) for name in ("gloo", "shm", "shm-in-place", "direct")],
    ),
    "pipeline": (
        "--schedules 1f1b,zb-v --micro-batches 1,3 --width 32 --context 8 --layers 4 --samples 1",
        ("schedule", "micro-batches"),
        [("1f1b", 1), ("zb-v", 1), ("1f1b", 3), ("zb-v", 3)],
    ),
    "buckets": (
        "--params 200K --tokens 8 --sizes 0.1 1 --samples 2 --rounds 1",
        ("bucket(MiB)",),
        [(0.1,), (1,)],
    ),
    "memory-savers": (
        "--params 200K --batch 2 --context 16 --samples 2 --steps 3 --seeds 1",
        ("way",),
        [(name,) for name in ("neither", "checkpoint", "bf16", "both")],
    ),
    "scaling": (
        "-n 1 2 --params 200K --tokens 8 --batch 2 --samples 2",
        ("work", "ranks", "strategy"),
        [
            (work, *rest)
            for work in ("strong", "weak")
            for rest in ((1, "one rank"), (2, "none"), (2, "bucketed"))
        ],
    ),
}
QUICK = ("collectives", "pipeline")


@pytest.mark.parametrize(
    "command", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in COMMANDS]
)
def test_the_command_writes_its_rows_its_table_and_its_chart(command, tmp_path):
    words, columns, expected = COMMANDS[command]
    files = "--json a.json --csv a.csv --chart a.svg"
    ended = instep("bench", command, *words.split(), *files.split(), cwd=tmp_path, timeout=300)
    assert ended.code == 0, ended.err
    found = json.loads((tmp_path / "a.json").read_text())
    assert [tuple(row[name] for name in columns) for row in found["rows"]] == expected
    assert found["environment"]["command"].startswith(f"instep bench {command} ")
    assert columns[0] in (tmp_path / "a.csv").read_text().splitlines()[0]
    assert (tmp_path / "a.svg").read_bytes().startswith(b"<?xml")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    if command == "collectives":
        assert all(name.partition("(")[0] in ended.out for name in NCCL_TESTS)
        assert set(NCCL_TESTS) | {"min(us)", "p99(us)", "predicted(us)", "time/predicted"} <= set(
            found["rows"][0]
        )
        assert "all_reduce, 2 ranks, 1 KB" not in ended.out
