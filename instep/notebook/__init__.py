"""Ranks beside a notebook: the magics of ``%load_ext instep``, and ``Ranks`` without IPython."""

from instep.notebook.ranks import CellFailed, Ranks

__all__ = ["CellFailed", "Ranks"]
