"""Limits of control groups, as files of both versions tell them."""

import pytest

from instep.train.limits import cpu_limit, memory_limit


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


def test_version_two_takes_the_smallest_limit_of_all_ancestors(root):
    files = {"a/b/memory.max": "max\n", "a/memory.max": "1000\n", "a/b/cpu.max": "max 100000\n"}
    path = root("0::/a/b\n", files | {"a/cpu.max": "250000 100000\n"})
    assert (memory_limit(path), cpu_limit(path)) == (1000, 2.5)


def test_version_one_has_a_tree_per_controller(root):
    groups = "5:cpu,cpuacct:/c\n4:memory:/m\n0::/\n"
    files = {
        "memory/m/memory.limit_in_bytes": "500\n",
        "memory/memory.limit_in_bytes": "9223372036854771712\n",
        "cpu/c/cpu.cfs_quota_us": "50000\n",
        "cpu/c/cpu.cfs_period_us": "100000\n",
        "cpu/cpu.cfs_quota_us": "-1\n",
        "cpu/cpu.cfs_period_us": "100000\n",
    }
    path = root(groups, files)
    assert (memory_limit(path), cpu_limit(path)) == (500, 0.5)


def test_no_limit_and_no_control_groups_are_none(root, tmp_path):
    assert (memory_limit(tmp_path), cpu_limit(tmp_path)) == (None, None)
    path = root("0::/\n", {"memory.max": "max\n", "cpu.max": "max 100000\n"})
    assert (memory_limit(path), cpu_limit(path)) == (None, None)


def test_a_group_that_is_not_mounted_here_leaves_its_ancestors(root):
    assert memory_limit(root("0::/of/the/host\n", {"memory.max": "2000\n"})) == 2000
