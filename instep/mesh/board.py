"""A notice board: a rank that has to wait says for what, so that whoever never comes can be named.

A collective does not tell who is missing. But all who wait are there, so the one without a notice is not.
Notices go through the store that the world met in, and only after a wait has become long, so an ordinary
step writes nothing. Ranks of one host can ask each other instead (``desk``); between hosts this is all there
is.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from instep.mesh.flight import Row

if TYPE_CHECKING:
    from torch.distributed import Store


class Board:
    """One notice per global rank, in ``store`` under ``name``. Without a store it stays empty.

    Each rank makes as many boards of a name as the others; a new one does not show the notices of the last.
    Reading and posting may not fail: they happen when something else has failed, perhaps the store's host.
    """

    def __init__(self, store: Store | None = None, name: str = "", rank: int = 0) -> None:
        self._store = store
        self._name = name
        if store is not None:
            self._name += f"/{store.add(f'instep/board/{name}/made by {rank}', 1)}"

    def post(self, row: Row) -> None:
        """Where ``row.rank`` stands, for all to read."""
        if self._store is not None:
            with contextlib.suppress(RuntimeError):
                self._store.set(self._key(row.rank), row.to_bytes().decode())

    def read(self, rank: int) -> Row | None:
        """What was posted last about ``rank``."""
        if self._store is not None:
            with contextlib.suppress(RuntimeError, ValueError):
                if self._store.check([self._key(rank)]):
                    return Row.from_bytes(self._store.get(self._key(rank)))
        return None

    def _key(self, rank: int) -> str:
        return f"instep/board/{self._name}/{rank}"
