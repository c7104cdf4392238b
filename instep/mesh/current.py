"""The mesh that this process registered, and the questions a script asks of it.

One of the two places of process-wide state; the other is the optimizer hook of ``replicate/guard.py``.
A ``ContextVar``, so that ranks that are threads each have their own.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from instep.mesh.mesh import Mesh

_registered: ContextVar[Mesh | None] = ContextVar("instep_mesh", default=None)


def registered() -> Mesh | None:
    """The mesh of ``get.register_mesh``, or None."""
    return _registered.get()


def forget(mesh: Mesh) -> None:
    """``mesh`` is closed: nobody shall find it registered."""
    if _registered.get() is mesh:
        _registered.set(None)


class Get:
    """``get(what, mesh=None)``: this rank's place in a mesh.

    "grank" is the global rank. "rank", "ws" (world size) and "pg" (the ``ProcessGroup``, None for a single
    rank) belong to ``mesh`` if it has one axis (``mesh["dp"]``), else to the whole world of ``mesh``, which
    is by default the registered one. "lrank" is the rank on this host, "device" the rank's device.
    """

    __module__ = "instep"
    _names = ("grank", "rank", "ws", "pg", "lrank", "device")

    def __call__(self, what: str, mesh: Mesh | None = None) -> Any:
        mesh = mesh or registered()
        if what not in self._names:
            raise ValueError(f"get({what!r}): expected one of {', '.join(self._names)}")
        if mesh is None:
            raise ValueError(f"get({what!r}): no mesh yet: call instep.init() first, or pass mesh=")
        axis = mesh.whole
        answers = {
            "grank": mesh.rank,
            "rank": axis.rank,
            "ws": axis.size,
            "pg": axis.pg,
            "lrank": mesh.local_rank,
            "device": mesh.device,
        }
        return answers[what]

    def register_mesh(self, mesh: Mesh | None) -> None:
        """Make ``mesh`` the default of ``get`` and of every ``process_group=None``."""
        _registered.set(mesh)


get = Get()
