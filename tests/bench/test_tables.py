"""Samples become figures, figures become tables, and no file says on which host or in which folder."""

import csv
import json
import os
import socket

import pytest

from instep.bench.tables import (
    cell,
    duration_text,
    environment,
    geometric_mean,
    markdown,
    paired_ratio,
    quantile,
    quantiles,
    show,
    size_text,
    write_between,
    write_csv,
    write_json,
)

ROWS = [{"backend": "gloo", "size(B)": 1000, "time(us)": 12.345}, {"backend": "shm", "size(B)": 64000}]


def test_quantiles_of_a_hundred_and_one_are_their_places():
    found = quantiles([float(i) for i in reversed(range(101))])
    assert found == (0, 50, 99)


def test_between_two_samples_a_quantile_is_interpolated():
    assert quantile([10.0, 20.0], 0.25) == 12.5
    assert quantiles([7.0]) == (7, 7, 7)


@pytest.mark.parametrize(("samples", "share"), [([], 0.5), ([1.0], 1.5)])
def test_quantiles_of_nothing_are_refused(samples, share):
    with pytest.raises(ValueError, match="expected samples"):
        quantile(samples, share)


def test_a_disturbance_of_both_members_of_a_pair_leaves_their_ratio():
    disturbed = [1.0, 5.0, 1.0, 40.0, 1.0]
    found = paired_ratio([2 * x for x in disturbed], disturbed)
    assert found == (2, 2, 2)


def test_the_spread_of_a_ratio_is_its_quartiles():
    assert paired_ratio([1.0, 2.0, 3.0, 4.0, 5.0], [1.0] * 5) == (3, 2, 4)
    with pytest.raises(ValueError, match="expected pairs, got 1 and 2"):
        paired_ratio([1.0], [1.0, 2.0])


def test_the_mean_of_a_ratio_and_its_inverse_is_one():
    assert geometric_mean([4.0, 0.25]) == pytest.approx(1)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, ""),
        (1234567, "1,234,567"),
        (0.01234, "0.0123"),
        (12.34, "12.3"),
        (1234.5, "1,234"),
        (True, "yes"),
    ],
)
def test_cells_have_three_digits_that_count(value, text):
    assert cell(value) == text


def test_markdown_has_numbers_on_the_right_and_gaps_where_there_is_nothing():
    assert markdown(ROWS).splitlines() == [
        "| backend | size(B) | time(us) |",
        "| --- | ---: | ---: |",
        "| gloo | 1,000 | 12.3 |",
        "| shm | 64,000 |  |",
    ]


def test_a_table_is_aligned_and_within_a_hundred_columns_when_piped(capsys):
    wide = [{f"column {i}(GB/s)": 1234567.0 for i in range(9)} | row for row in ROWS]
    for rows in (ROWS, wide):
        show(rows, "A title", notes=["a note"])
        lines = capsys.readouterr().out.splitlines()
        assert lines[0] == "A title"
        assert "a note" in lines
        assert max(map(len, lines)) <= 100
        assert len({len(line) for line in lines if "gloo" in line or "shm" in line}) == 1


def test_files_hold_the_numbers_as_they_are(tmp_path):
    write_csv(tmp_path / "rows.csv", ROWS)
    with open(tmp_path / "rows.csv", newline="") as file:
        assert [row["time(us)"] for row in csv.DictReader(file)] == ["12.345", ""]
    write_json(tmp_path / "rows.json", {"rows": ROWS}, command="instep bench")
    found = json.loads((tmp_path / "rows.json").read_text())
    assert found["rows"] == ROWS
    assert found["environment"]["command"] == "instep bench"


def test_the_environment_names_no_host_and_no_folder(monkeypatch, tmp_path):
    monkeypatch.setattr("sys.argv", [f"{tmp_path}/__main__.py", "bench", "--json", f"{tmp_path}/a.json"])
    found = environment()
    assert set(found) == {"cpu", "cores", "torch", "python", "command", "date"}
    assert found["command"] == "instep bench --json a.json"
    assert os.sep not in found["command"]
    assert socket.gethostname() not in json.dumps(found)


def test_a_readme_keeps_what_stands_around_its_table(tmp_path):
    path = tmp_path / "README.md"
    path.write_text("before\n<!-- t -->\nold\n<!-- end of t -->\nafter\n")
    for _ in range(2):
        write_between(path, "t", "new")
    assert path.read_text() == "before\n<!-- t -->\nnew\n<!-- end of t -->\nafter\n"
    with pytest.raises(ValueError, match="expected one line '<!-- u -->'"):
        write_between(path, "u", "new")


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(996, "996 B"), (1000, "1 KB"), (64_000, "64 KB"), (10**8, "100 MB"), (10**9, "1 GB")],
)
def test_sizes_are_said_as_they_are_written(nbytes, text):
    assert size_text(nbytes) == text


def test_durations_have_the_unit_that_makes_them_short():
    assert [duration_text(us) for us in (1.5, 1500, 2e6)] == ["1.5 µs", "1.5 ms", "2 s"]
