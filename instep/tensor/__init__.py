"""Tensor parallelism: layers cut over the ranks of the mesh's axis ``tp``, with the bits of one rank.

    >>> mesh = instep.init()  # with tp=2 every two ranks share a model
    >>> plan = {"0": instep.tensor.Column(), "2": instep.tensor.Row()}
    >>> model = instep.tensor.shard(model, mesh, plan, chunks=2)
    >>> model = instep.DataParallel(model, mesh)  # over the data axes

Start reading in ``plan.py``, then ``layers.py``; ``products.py`` says why the bits do not depend on ``tp``.
"""

from instep.tensor.layers import ColumnLinear, RowLinear
from instep.tensor.loss import cross_entropy
from instep.tensor.plan import Column, Row, Sequence, Style, Vocabulary, gather, scatter, shard
from instep.tensor.plans import gpt_plan, llama_plan

__all__ = [
    "Column",
    "ColumnLinear",
    "Row",
    "RowLinear",
    "Sequence",
    "Style",
    "Vocabulary",
    "cross_entropy",
    "gather",
    "gpt_plan",
    "llama_plan",
    "scatter",
    "shard",
]
