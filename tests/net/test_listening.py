"""Where instep itself opens the store, it listens where it was asked to, and on one host on loopback."""

from __future__ import annotations

import json
import os
import socket
import warnings
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

import pytest

import instep
from instep.launch.launch import launch
from instep.launch.launch_environment import LaunchEnvironment
from instep.mesh import join
from instep.net.process_group import default_store

ELSEWHERE = "198.51.100.7"  # of a network that is for examples alone


def listening() -> list[str]:
    """The addresses, in the kernel's hexadecimal, on which this process listens."""
    links = [os.path.join("/proc/self/fd", name) for name in os.listdir("/proc/self/fd")]
    own = {os.readlink(link) for link in links if os.path.islink(link)}
    rows = [
        row.split() for name in ("tcp", "tcp6") for row in Path("/proc/net", name).read_text().splitlines()
    ]
    return sorted(row[1].partition(":")[0] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in own)


def join_twice(directory: Path, environ: Mapping[str, str], named: str) -> None:
    rank, size = os.environ["RANK"], os.environ["WORLD_SIZE"]
    for name in (
        "INSTEP_STORE",
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "GLOO_SOCKET_IFNAME",
    ):
        os.environ.pop(name, None)
    os.environ |= environ | dict.fromkeys(named.split()[::2], rank)
    os.environ |= dict.fromkeys(named.split()[1::2], size)
    found, kept = [], []
    for _ in range(2):
        mesh = instep.init(backend="gloo", timeout_s=30)
        kept.append(default_store())  # so the second world finds the store of the first
        found.append(listening())
        mesh.close()
    (directory / rank).write_text(json.dumps([found, os.environ["GLOO_SOCKET_IFNAME"]]))


OMPI = "OMPI_COMM_WORLD_"
LAUNCHERS = {
    "by hand": "RANK WORLD_SIZE",
    "mpirun": f"{OMPI}RANK {OMPI}SIZE {OMPI}LOCAL_RANK {OMPI}LOCAL_SIZE",
}


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_nothing_outside_of_this_host_can_come_to_a_world_of_this_host(tmp_path: Path, launcher: str) -> None:
    with socket.socket() as place:  # bound and not listening, it keeps the port for a store on it
        place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        place.bind(("127.0.0.1", 0))
        port = str(place.getsockname()[1])
        addr = {"MASTER_ADDR": "127.0.0.1"} if launcher == "by hand" else {}
        environ = {**addr, "MASTER_PORT": port, "PMIX_NAMESPACE": "test"}
        launch(join_twice, (tmp_path, environ, LAUNCHERS[launcher]), ranks=2)
    for rank in range(2):
        found, interface = json.loads((tmp_path / str(rank)).read_text())
        assert {address for once in found for address in once} == {"0100007F"}
        assert interface == "lo"


def test_of_several_addresses_it_takes_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    both = [(socket.AF_INET, (ELSEWHERE, 0)), (socket.AF_INET, ("127.0.0.1", 0))]
    monkeypatch.setattr(join, "_addresses", lambda host, port: both)
    with closing(join._listen("name", 0, one_host=True)) as listener:
        assert listener.getsockname()[0] == "127.0.0.1"


@pytest.mark.parametrize("host", [ELSEWHERE, "127.0.1.1"])
def test_where_others_could_not_come_to_it_listens_everywhere_and_says_so(host: str) -> None:
    with pytest.warns(UserWarning, match=f"listens on all interfaces, because {host} .*: set MASTER_ADDR to"):
        assert join._listen(host, 0, one_host=False) is None


def test_a_port_that_is_taken_is_left_to_torch_which_may_know_who_has_it() -> None:
    with closing(join._listen("127.0.0.1", 0, one_host=True)) as taken, warnings.catch_warnings():
        warnings.simplefilter("error")
        assert join._listen("127.0.0.1", taken.getsockname()[1], one_host=True) is None


def test_a_port_of_another_process_is_named_with_what_to_set() -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as other:
        port = other.getsockname()[1]
        world = LaunchEnvironment(0, 2, 0, 2, source="env", master_addr="127.0.0.1", master_port=port)
        with pytest.raises(ValueError, match=f"rank 0 cannot .* 127.0.0.1: port {port} .* set MASTER_PORT"):
            join._reach_store(world, 5.0)


def test_a_host_that_cannot_be_looked_up_is_named_with_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*args: object, **kwargs: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(ValueError, match=r"got 'nowhere' \(Name or service not known\): set MASTER_ADDR"):
        join._listen("nowhere", 0, one_host=False)
