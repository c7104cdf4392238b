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


def test_versions_and_kinds_are_those_of_this_process(machine):
    assert torch.__version__ in the("torch", machine).text
    assert torch.backends.cpu.get_cpu_capability() in the("cpu", machine).text


def test_nothing_secret_of_the_environment_is_shown(machine):
    secret = "hunter2"
    environ = dict.fromkeys(("AWS_SECRET_ACCESS_KEY", "HF_TOKEN", "PATH", "HOME", "INSTEP_X"), secret)
    findings = examine(with_environment(machine, **environ))
    assert secret not in json.dumps([vars(finding) for finding in findings])


def test_kernel_switches_are_named(machine):
    assert the("kernel switches", machine).level == OK
    found = the("kernel switches", with_environment(machine, MKL_CBWR="AVX2"))
    assert found.level == WARNING and "MKL_CBWR=AVX2" in found.text


def test_the_launcher_is_found_and_half_an_environment_is_an_error(machine):
    assert the("launcher", machine).text.startswith("none")
    found = the("launcher", with_environment(machine, RANK="1"))
    assert found.level == ERROR and "WORLD_SIZE" in found.fix
    world = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    world |= {"MASTER_ADDR": "host0", "MASTER_PORT": "29500"}
    assert "rank 1 of 4" in the("launcher", with_environment(machine, **world)).text
    if not torch.cuda.is_available():
        assert the("backend", with_environment(machine, **world)).text.startswith(
            "gloo, because the ranks are"
        )


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


def test_no_memory_for_files_in_memory_is_noticed(machine, monkeypatch):
    def refuse(nbytes: int) -> None:
        raise OSError(24, "too many open files")

    monkeypatch.setattr(doctor.segment, "create", refuse)
    assert "too many open files" in the("shared memory", machine).text


def test_few_descriptors_are_a_warning(machine, monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda which: (256, 4096))
    found = the("open files", machine)
    assert found.level == WARNING and found.fix == "ulimit -n 4096"


def test_little_memory_is_a_warning_also_if_the_control_group_has_it(machine):
    assert the("memory", machine) == Finding("memory", "4.0 of 8.0 GiB available")
    (machine.root / "proc/meminfo").write_text(MEMINFO.format(1000))
    assert the("memory", machine).level == WARNING
    (machine.root / "proc/meminfo").write_text(MEMINFO.format(4 << 20))
    group = machine.root / "sys/fs/cgroup"
    group.mkdir(parents=True)
    (machine.root / "proc/self/cgroup").write_text("0::/\n")
    (group / "memory.max").write_text(f"{1 << 29}\n")
    found = the("memory", machine)
    assert found.level == WARNING and "may have 0.5 GiB" in found.text


def test_less_processor_time_than_cores_is_a_warning(machine, monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1, 2, 3})
    assert the("cores", machine).level == OK
    group = machine.root / "sys/fs/cgroup"
    group.mkdir(parents=True)
    (machine.root / "proc/self/cgroup").write_text("0::/\n")
    (group / "cpu.max").write_text("150000 100000\n")
    found = the("cores", machine)
    assert found.level == WARNING and "gives time for 1.5" in found.text and "-n 1" in found.fix


def test_an_interface_that_is_not_there_is_an_error(machine):
    found = the("network", with_environment(machine, GLOO_SOCKET_IFNAME="nowhere0"))
    assert found.level == ERROR and "nowhere0, which is not among" in found.text
    assert the("network", with_environment(machine, GLOO_SOCKET_IFNAME="lo")).level == OK


def test_a_host_name_that_means_loopback_is_an_error_only_across_hosts(machine, monkeypatch):
    monkeypatch.setattr("socket.getaddrinfo", lambda *args: [(2, 1, 6, "", ("127.0.1.1", 0))])
    found = the("network", machine)
    assert found.level == OK and "127.0.1.1, which others cannot reach" in found.text
    world = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    world |= {"MASTER_ADDR": "host0", "MASTER_PORT": "29500"}
    found = the("network", with_environment(machine, **world))
    assert found.level == ERROR and "GLOO_SOCKET_IFNAME" in found.fix


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
    assert the("run directory", machine).level == OK


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


def test_people_get_lines_and_the_tables_that_matter(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "warm", lambda: None)
    monkeypatch.setattr(doctor, "verify_strategies", verified)
    doctor.run(json_wanted=False, verify=True)
    out = capsys.readouterr().out
    assert f"\nerror    {'verify':15}  1 of 2 ways" in out and "fix: the sum went wrong" in out
    assert out.endswith("\ntable of flat\nrows\ntable of naive\n")
    assert doctor.run(json_wanted=True, verify=False) == 0
    assert json.loads(capsys.readouterr().out)["verify"] is None


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


def test_no_limit_and_no_control_groups_are_none(root, tmp_path):
    assert (memory_limit(tmp_path), cpu_limit(tmp_path)) == (None, None)
    path = root("0::/\n", {"memory.max": "max\n", "cpu.max": "max 100000\n"})
    assert (memory_limit(path), cpu_limit(path)) == (None, None)


def test_a_group_that_is_not_mounted_here_leaves_its_ancestors(root):
    assert memory_limit(root("0::/of/the/host\n", {"memory.max": "2000\n"})) == 2000
