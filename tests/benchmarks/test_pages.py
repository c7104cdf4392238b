"""The tables of READMEs and pages follow from the results; what is stale; nothing is measured by accident."""

import json
import re
import subprocess

import pytest

from benchmarks import run
from benchmarks.gpu import report
from benchmarks.pages import README, ROOT, between, made, prepare, save

PLACE = re.compile(r"^<!-- end of (.*) -->$", re.MULTILINE)
BENCHMARKS = ROOT / "benchmarks"


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # FSDP2's import
def test_every_table_is_what_its_results_make():
    seen = {(BENCHMARKS / "gpu" / README, "gpu tables")}
    found = list(report.read(BENCHMARKS / "gpu" / "results.jsonl"))
    assert between(BENCHMARKS / "gpu" / README, "gpu tables") == "\n\n".join(report.sections(found))
    for one in run.EXPERIMENTS:
        for folder, pages in one.pages():
            for page, tables in pages.items():
                path = folder / README if page == README else ROOT / page
                for name, text in tables.items():
                    assert between(path, name) == text, f"{path}, {name}: run make bench ARGS=--tables"
                    seen.add((path, name))
    assert seen >= {
        (path, name) for path in BENCHMARKS.glob("*/README.md") for name in PLACE.findall(path.read_text())
    }


def test_every_script_with_tables_is_an_experiment():
    scripts = {path for path in BENCHMARKS.rglob("*.py") if "\ndef pages(" in path.read_text()}
    known = {BENCHMARKS / f"{one.name}.py" for one in run.EXPERIMENTS}
    assert scripts - known == {BENCHMARKS / "faults" / "report.py"}
    assert all((ROOT / "instep" / folder).is_dir() for one in run.EXPERIMENTS for folder in one.measures)


def test_without_arguments_all_are_listed_and_none_is_run(monkeypatch, capsys):
    monkeypatch.setattr(run, "run", lambda chosen: pytest.fail("measures"))
    assert run.main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    for one in run.EXPERIMENTS:
        assert sum(line.startswith(one.command) for line in lines) == 1
    with pytest.raises(SystemExit, match="2"):
        run.main(["step"])
    assert "expected one of advice, collectives" in capsys.readouterr().err


def test_results_are_stale_once_what_they_measure_has_changed(tmp_path, monkeypatch):
    def git(*words):
        who = ["-c", "user.name=a", "-c", "user.email=a@b"]
        return subprocess.run(
            ["git", *who, *words], cwd=tmp_path, check=True, capture_output=True, text=True
        ).stdout

    monkeypatch.setattr(run, "ROOT", tmp_path)
    git("init", "-q")
    for folder in ("net", "shm"):
        (tmp_path / "instep" / folder).mkdir(parents=True)
        (tmp_path / "instep" / folder / "a.py").touch()
        git("add", ".")
        git("commit", "-qm", folder)
    first = git("rev-parse", "--short", "HEAD~").strip()
    assert run.stale({"commit": first}, ("net",)) == ""
    assert run.stale({"commit": first}, ("net", "shm")) == "stale: 1 commit since"
    assert run.stale({"commit": f"{first}-dirty"}, ("net",)) == "stale: made with uncommitted changes"
    assert run.stale({"commit": "0" * 12}, ("net",)) == "stale: made at a commit that is not here"
    assert run.stale({"date": "2001-01-01"}, ("net",)) == "stale: 1 commit since"
    assert run.stale({}, ("net",)) == "stale: made at no known commit"


def test_an_experiment_that_fails_is_named_and_the_next_one_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(run, "ROOT", tmp_path)
    monkeypatch.setattr(run, "HERE", tmp_path / "benchmarks")
    (tmp_path / "benchmarks").mkdir()
    scripts = {"bad": "raise SystemExit('no link')", "good": "print('a table')"}
    for name, text in scripts.items():
        (tmp_path / "benchmarks" / f"{name}.py").write_text(text)
        (tmp_path / "benchmarks" / f"{name}.json").write_text("{}")
    assert run.run([run.Experiment(name, (), 0.01) for name in scripts]) == 1
    out, err = capsys.readouterr()
    assert "bad: failed with code 1" in out and "good: done" in out and "no link" in err


def test_a_trial_elsewhere_leaves_the_pages_alone(tmp_path):
    home, away = tmp_path / "home", tmp_path / "away"
    home.mkdir()
    (home / README).write_text("a\n<!-- t -->\nold\n<!-- end of t -->\nz\n")
    prepare(away, home)
    pages = {README: {"t": "new"}, "docs/of no such page.md": {"t": "new"}}
    whole = save(away / "t.json", {"minutes": 2.04, "rows": [1]}, lambda results: pages, home, "make it")
    assert (home / README).read_text() == "a\n<!-- t -->\nold\n<!-- end of t -->\nz\n"
    assert (away / README).read_text() == "a\n<!-- t -->\nnew\n<!-- end of t -->\nz\n"
    assert whole == json.loads((away / "t.json").read_text())
    text = made({**whole, "environment": {**whole["environment"], "commit": "abc", "date": "2026-01-02"}})
    assert text.startswith("Made by `make it` on ") and text.endswith(
        ", 2026-01-02, commit `abc`, in 2 minutes."
    )
    with pytest.raises(ValueError, match="expected one line '<!-- u -->'"):
        between(home / README, "u")
