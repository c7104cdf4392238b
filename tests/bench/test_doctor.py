"""What the doctor finds on machines that are well, and on ones with one thing wrong; limits of containers."""

from __future__ import annotations

import json
import resource
from pathlib import Path

import pytest
import torch

from instep.bench import doctor
from instep.bench.doctor import (
    CHECKS,
    ERROR,
    OK,
    WARNING,
    Finding,
    Machine,
    StrategyReports,
    cpu_limit,
    examine,
    memory_limit,
)
from instep.launch.rank_exit import Exit, RankFailed
from instep.native.library import core
from tests.native.without import without_core

MEMINFO = "MemTotal:       8388608 kB\nMemFree:   1 kB\nMemAvailable:   {} kB\n"


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """8 GiB of memory, nothing in the environment, and a directory for runs."""
    root = tmp_path / "root"
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(MEMINFO.format(4 << 20))
    return Machine({}, root, tmp_path)


def with_environment(machine: Machine, **environ: str) -> Machine:
    return Machine(environ, machine.root, machine.directory)


def the(name: str, machine: Machine) -> Finding:
    return CHECKS[name](machine)


def test_a_machine_that_is_well_has_no_errors_and_every_wrong_thing_has_a_fix(machine):
    findings = examine(machine)
    assert [finding.name for finding in findings] == list(CHECKS)
    assert not [finding for finding in findings if finding.level == ERROR]
    assert all(bool(finding.fix) == (finding.level != OK) for finding in findings)


def test_nothing_secret_of_the_environment_is_shown(machine):
    secret = "hunter2"
    environ = dict.fromkeys(("AWS_SECRET_ACCESS_KEY", "HF_TOKEN", "PATH", "HOME", "INSTEP_X"), secret)
    findings = examine(with_environment(machine, **environ))
    assert secret not in json.dumps([vars(finding) for finding in findings])


WORLD = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
WORLD |= {"MASTER_ADDR": "host0", "MASTER_PORT": "29500"}
GROUP = {"proc/self/cgroup": "0::/\n"}
LITTLE = {"proc/meminfo": MEMINFO.format(1000)}
# A check, what is in the environment and in files, and its finding: level, words of the text and of the fix.
CASES = [
    ("kernel switches", {}, {}, OK, "", ""),
    ("kernel switches", {"MKL_CBWR": "AVX2"}, {}, WARNING, "MKL_CBWR=AVX2", ""),
    ("launcher", {}, {}, OK, "none", ""),
    ("launcher", {"RANK": "1"}, {}, ERROR, "", "WORLD_SIZE"),
    ("launcher", WORLD, {}, OK, "rank 1 of 4", ""),
    ("open files", {}, {}, WARNING, "", "ulimit -n 4096"),
    ("memory", {}, {}, OK, "4.0 of 8.0 GiB available", ""),
    ("memory", {}, LITTLE, WARNING, "", ""),
    ("memory", {}, GROUP | {"sys/fs/cgroup/memory.max": f"{1 << 29}\n"}, WARNING, "may have 0.5 GiB", ""),
    ("cores", {}, {}, OK, "", ""),
    ("cores", {}, GROUP | {"sys/fs/cgroup/cpu.max": "150000 100000\n"}, WARNING, "time for 1.5", "-n 1"),
    ("network", {"GLOO_SOCKET_IFNAME": "nowhere0"}, {}, ERROR, "nowhere0, which is not among", ""),
    ("network", {"GLOO_SOCKET_IFNAME": "lo"}, {}, OK, "", ""),
    ("network", {}, {}, OK, "127.0.1.1, which others cannot reach", ""),
    ("network", WORLD, {}, ERROR, "", "GLOO_SOCKET_IFNAME"),
    ("run directory", {}, {}, OK, "", ""),
]


@pytest.mark.parametrize(("name", "environ", "files", "level", "text", "fix"), CASES)
def test_what_is_wrong_is_found_and_comes_with_its_fix(
    name, environ, files, level, text, fix, machine, monkeypatch
):
    monkeypatch.setattr(resource, "getrlimit", lambda which: (256, 4096))
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1, 2, 3})
    monkeypatch.setattr("socket.getaddrinfo", lambda *args: [(2, 1, 6, "", ("127.0.1.1", 0))])
    for path, content in files.items():
        write(machine.root / path, content)
    found = the(name, with_environment(machine, **environ))
    assert found.level == level and text in found.text and fix in found.fix


def test_without_shared_memory_the_backend_is_gloo_and_says_why(machine):
    with without_core():
        found = the("shared memory", machine)
        assert found.level == WARNING and "needs Linux and the native core" in found.text
        if not torch.cuda.is_available():
            assert the("backend", machine).text.startswith("gloo, because shared memory does not work")


def test_the_native_core_is_there_or_the_doctor_says_how_to_get_it(machine):
    with without_core():
        found = the("native core", machine)
        assert (
            found.level == WARNING and "gloo instead of shared" in found.text and "native.build" in found.fix
        )
    if core() is not None:
        assert the("native core", machine).text.startswith("compiled")


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about a torch that finds no GPU")
def test_a_driver_that_torch_cannot_use_is_told(machine, monkeypatch):
    (machine.root / "proc/driver/nvidia").mkdir(parents=True)
    (machine.root / "proc/driver/nvidia/version").write_text("NVRM version: x\n")
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "CPU build" in the("gpu", machine).text
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert the("gpu", machine).level == ERROR


def test_a_directory_that_cannot_hold_runs_is_an_error(machine):
    gone = Machine({}, machine.root, machine.directory / "gone")
    found = the("run directory", gone)
    assert found.level == ERROR and "--run-dir" in found.fix


def test_a_check_that_cannot_be_made_says_so(machine):
    (machine.root / "proc/meminfo").unlink()
    found = next(finding for finding in examine(machine) if finding.name == "memory")
    assert found.level == WARNING and "could not be looked at" in found.text


REPORT = {"ok": False, "cause": "the sum went wrong"}


def verified(*args: object) -> StrategyReports:
    tables = ["table of flat\nrows", "table of naive\nrows"]
    return StrategyReports([REPORT, {"ok": True, "cause": ""}], tables)


def failed(*args: object) -> StrategyReports:
    raise RankFailed(Exit(1, 7, -9), 2)


@pytest.mark.parametrize(("verify", "words"), [(verified, "1 of 2 ways"), (failed, "rank 1")])
def test_a_gradient_that_is_wrong_or_a_rank_that_dies_ends_with_one(verify, words, monkeypatch, capsys):
    monkeypatch.setattr(doctor, "warm", lambda: None)
    monkeypatch.setattr(doctor, "verify_strategies", verify)
    assert doctor.run(json_wanted=True, verify=True) == 1
    found = json.loads(capsys.readouterr().out)
    last = found["findings"][-1]
    assert found["ok"] is False and last["level"] == ERROR and words in last["text"]


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.fixture
def root(tmp_path):
    def make(groups, files):
        write(tmp_path / "proc/self/cgroup", groups)
        for name, text in files.items():
            write(tmp_path / "sys/fs/cgroup" / name, text)
        return tmp_path

    return make


def test_the_smallest_limit_of_all_ancestors_counts(root):
    files = {"a/b/memory.max": "max\n", "a/memory.max": "1000\n", "a/b/cpu.max": "max 100000\n"}
    path = root("0::/a/b\n", files | {"a/cpu.max": "250000 100000\n"})
    assert (memory_limit(path), cpu_limit(path)) == (1000, 2.5)


def test_a_group_that_is_not_mounted_here_leaves_its_ancestors(root):
    assert memory_limit(root("0::/of/the/host\n", {"memory.max": "2000\n"})) == 2000
