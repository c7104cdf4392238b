"""Ranks beside a notebook: the magics of ``%load_ext instep``; ``launch`` and ``Ranks`` without IPython."""

from instep.notebook.functions import launch
from instep.notebook.ranks import CellFailed, Ranks

__all__ = ["CellFailed", "Ranks", "launch"]
