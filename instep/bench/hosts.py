"""Several hosts on one machine: network namespaces joined by links of a chosen rate.

On one host a message costs a few copies in memory, and the same cores that compute make them, so there all
strategies look much alike. What they were invented for is a network: slower than memory, and working by
itself. A namespace has interfaces, addresses and ports of its own, so a process in it sees what it would see
on another machine, and the kernel's token bucket lets through as many bytes per second as a cable would:

    host 0   eth0 10.77.0.1 ──── port0 ┐
    host 1   eth0 10.77.0.2 ──── port1 ├ bridge          both ends of every link send at most ``rate``
    host 2   eth0 10.77.0.3 ──── port2 ┘

A bridge is a switch: two pairs of hosts do not disturb each other, and a host that talks to all has one link
for it. Each host has a name of its own, too, by which ranks tell who shares one with them. What this is not:
the hosts share their cores and their memory. It needs Linux, root, ``ip`` and ``tc``.
"""

from __future__ import annotations

import itertools
import os
import re
import select
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PREFIX = "instep"
RATE = "1gbit"  # where no other is asked for
INTERFACE = "eth0"
FIRST_PORT = 29500
# The beginning of every message, as much as the bucket holds, passes at the speed of memory: what the link
# carries in a millisecond. Packets that segmentation offload has put together (up to 64 KiB) are cut up where
# they are larger, which costs a slow link no time to speak of.
BURST_S = 1e-3
LEAST_BURST = 4096  # a packet that is not cut up has to fit
# How long a packet may queue: longer than TCP needs to keep the link busy.
QUEUE = "50ms"
KILL_S = 10.0
NAMED = 'echo "$0" > /proc/sys/kernel/hostname && exec "$@"'
UNIT_BITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}

_numbers = itertools.count()


@dataclass
class Host:
    """One namespace while it exists; ``popen`` starts a process in it."""

    name: str
    address: str
    processes: list[subprocess.Popen[Any]] = field(default_factory=list)

    def popen(
        self, args: Sequence[object], *, env: Mapping[str, str] | None = None, **options: Any
    ) -> subprocess.Popen[Any]:
        """``subprocess.Popen(args)`` on this host; ``env`` is added to this process's environment.

        The process is killed when the host goes, and, where ``setpriv`` is there, when this process does;
        where ``unshare`` is there, it sees the host's own name.
        """
        bound = ["setpriv", "--pdeathsig", "KILL"] if shutil.which("setpriv") else []
        named = ["unshare", "--uts", "sh", "-c", NAMED, self.name] if shutil.which("unshare") else []
        command = ["ip", "netns", "exec", self.name, *bound, *named, *map(str, args)]
        process = subprocess.Popen(command, env={**os.environ, **(env or {})}, **options)
        self.processes.append(process)
        return process


@dataclass(frozen=True)
class Network:
    """The hosts of one ``network``, and the variables by which ranks on them find each other."""

    hosts: list[Host]
    bytes_per_s: float
    ports: Iterator[int] = field(default_factory=lambda: itertools.count(FIRST_PORT))

    def __iter__(self) -> Iterator[Host]:
        return iter(self.hosts)

    def environments(self, per_host: int = 1) -> list[dict[str, str]]:
        """What torchrun would set for ``per_host`` ranks on each host, by rank, those of a host in a row.

        And gloo's interface. A new world at each call.
        No other process is in the namespace of rank 0, so every port of it is free that was not given before.
        """
        port = next(self.ports)
        world_size = per_host * len(self.hosts)
        world = {
            "WORLD_SIZE": world_size,
            "LOCAL_WORLD_SIZE": per_host,
            "MASTER_ADDR": self.hosts[0].address,
            "MASTER_PORT": port,
            "GLOO_SOCKET_IFNAME": INTERFACE,
        }
        texts = {name: str(value) for name, value in world.items()}
        return [
            {**texts, "RANK": str(rank), "LOCAL_RANK": str(rank % per_host)} for rank in range(world_size)
        ]


def obstacle() -> str | None:
    """Why this machine cannot have a ``network``, or None; makes a small one and removes it."""
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"{' and '.join(missing)} not found: install iproute2"
    if os.geteuid() != 0:
        return f"network namespaces need root, and this is user {os.geteuid()}: use sudo"
    try:
        with network(1):
            return None
    except RuntimeError as error:
        return str(error)


def require_hosts() -> None:
    """``RuntimeError`` with the reason, where this machine cannot have a ``network``."""
    if (reason := obstacle()) is not None:
        raise RuntimeError(f"no second host to be had: {reason}")


@contextmanager
def network(num_hosts: int = 2, *, rate: str = RATE) -> Iterator[Network]:
    """``num_hosts`` hosts on one switch, whose links carry ``rate`` in each direction.

    Whatever way the block ends, its processes and namespaces end too. What a killed process left behind is
    removed by the next one.

    Args:
        rate: as ``tc`` has it, e.g. "1gbit" or "100mbit".

    Raises:
        ValueError: no rate.
        RuntimeError: the machine refuses; ``obstacle`` asks beforehand.
    """
    carried = bytes_per_s(rate)
    burst = max(round(carried * BURST_S), LEAST_BURST)
    _sweep()
    own = f"{PREFIX}-{os.getpid()}-{next(_numbers)}"
    hosts: list[Host] = []
    try:
        switch = _namespace(f"{own}-switch")
        _ip(switch, "link add bridge type bridge")
        _ip(switch, "link set bridge up")
        for i in range(num_hosts):
            name = _namespace(f"{own}-{i}")
            host = Host(name, f"10.77.0.{i + 1}")
            hosts.append(host)
            _ip(name, f"link add {INTERFACE} type veth peer name port{i} netns {switch}")
            _ip(name, f"addr add {host.address}/24 dev {INTERFACE}")
            _ip(name, f"link set {INTERFACE} up")
            _ip(switch, f"link set port{i} master bridge up")
            for namespace, interface in ((name, INTERFACE), (switch, f"port{i}")):
                shape = f"root tbf rate {rate} burst {burst} latency {QUEUE}"
                _run("tc", "-n", namespace, "qdisc", "add", "dev", interface, *shape.split())
        yield Network(hosts, carried)
    finally:
        _remove(f"{own}-")
        for process in itertools.chain.from_iterable(host.processes for host in hosts):
            process.wait()


def bytes_per_s(rate: str) -> float:
    """What a link of ``rate`` carries in each direction; ``ValueError`` for what is no rate."""
    found = re.fullmatch(r"(\d+\.?\d*|\.\d+)([kmg]bit)", rate)
    if found is None:
        raise ValueError(f"rate {rate!r}: expected a number with kbit, mbit or gbit, such as 1gbit")
    return float(found[1]) * UNIT_BITS[found[2]] / 8


def rate_text(rate: str) -> str:
    """``"10gbit"`` -> "10 Gbit/s"."""
    return f"{rate[:-4]} {rate[-4:].capitalize()}/s"


def _namespace(name: str) -> str:
    _run("ip", "netns", "add", name)
    _ip(name, "link set lo up")
    return name


def _ip(namespace: str, words: str) -> None:
    _run("ip", "-n", namespace, *words.split())


def _run(*command: str) -> str:
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: {ended.stderr.strip() or f'exit code {ended.returncode}'}")
    return ended.stdout


def _names() -> list[str]:
    listed = _run("ip", "netns", "list") if shutil.which("ip") else ""
    return [line.split()[0] for line in listed.splitlines() if line.startswith(f"{PREFIX}-")]


def _sweep() -> None:
    """Remove the namespaces of processes that are gone."""
    for owner in {name.split("-")[1] for name in _names()}:
        if not Path("/proc", owner).exists():
            _remove(f"{PREFIX}-{owner}-")


def _remove(prefix: str) -> None:
    """End what runs in the namespaces of this prefix, then remove them; their links go with them."""
    for name in [name for name in _names() if name.startswith(prefix)]:
        for pid in map(int, _run("ip", "netns", "pids", name).split()):
            with suppress(ProcessLookupError):
                _kill(pid)
        _run("ip", "netns", "delete", name)


def _kill(pid: int) -> None:
    """Kill a process, a child of ours or not, and wait until it has left its namespace."""
    pidfd = os.pidfd_open(pid)
    try:
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        select.select([pidfd], [], [], KILL_S)
    finally:
        os.close(pidfd)
