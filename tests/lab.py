"""Two hosts for a test, out of network namespaces, where the machine allows it.

with two_hosts(rate="1gbit") as network:
    ranks = [host.popen([...], env=env) for host, env in zip(network, network.environments())]
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import pytest

from instep.bench.hosts import Network, network, obstacle

why_not = cache(obstacle)


@contextmanager
def two_hosts(rate: str = "1gbit") -> Iterator[Network]:
    """Two hosts and a link of ``rate``; skips the test, with the reason, where there cannot be any."""
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    with network(2, rate=rate) as made:
        yield made
