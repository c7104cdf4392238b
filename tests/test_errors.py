"""The errors are one tree, carry what a loop wants to know, and survive being copied between processes."""

from __future__ import annotations

from multiprocessing.reduction import ForkingPickler

import pytest

from instep import errors


@pytest.mark.parametrize("name", [name for name in errors.__all__ if name != "InstepError"])
def test_every_error_is_caught_by_the_base_and_shows_its_public_name(name):
    kind = getattr(errors, name)
    assert issubclass(kind, errors.InstepError)
    assert issubclass(kind, RuntimeError)
    assert f"{kind.__module__}.{kind.__qualname__}" == f"instep.errors.{name}"
    assert f"── {name} " in (errors.__doc__ or "")


def test_a_lost_peer_tells_which_ranks_and_where():
    error = errors.PeerLost("rank 3 died", ranks=[3, 5], operation="the exchange of bucket 0")
    assert (str(error), error.ranks, error.operation) == ("rank 3 died", (3, 5), "the exchange of bucket 0")
    assert errors.PeerLost("nobody knows").ranks == ()


def test_a_lost_peer_arrives_whole_in_another_process():
    error = errors.PeerLost("rank 3 died", ranks=(3,), operation="a broadcast")
    arrived = ForkingPickler.loads(ForkingPickler.dumps(error))
    assert type(arrived) is errors.PeerLost
    assert (str(arrived), arrived.ranks, arrived.operation) == ("rank 3 died", (3,), "a broadcast")


def test_replicas_that_differ_are_told_with_what_differs():
    error = errors.ReplicasDiffer("rank 2 is odd", ranks=[2], parameters=["weight", "bias"])
    arrived = ForkingPickler.loads(ForkingPickler.dumps(error))
    assert (str(arrived), arrived.ranks, arrived.parameters) == ("rank 2 is odd", (2,), ("weight", "bias"))
    assert errors.ReplicasDiffer("nobody knows").ranks == ()


def test_a_run_that_diverged_tells_where_it_began():
    error = errors.Diverged("nan", ranks=[1], parameter="weight")
    arrived = ForkingPickler.loads(ForkingPickler.dumps(error))
    assert (str(arrived), arrived.ranks, arrived.parameter) == ("nan", (1,), "weight")
    assert (errors.Diverged("nan").ranks, errors.Diverged("nan").parameter) == ((), "")
