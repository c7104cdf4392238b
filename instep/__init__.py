"""Data-parallel PyTorch training whose bits do not depend on where the work is done.

The public names are imported on first use: ``import instep`` and ``instep --help`` do not wait for torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from instep import errors

if TYPE_CHECKING:
    from instep import expert, nn, tensor
    from instep.checkpoint.shorthand import load, save
    from instep.data.loader import Loader
    from instep.mesh.join import init
    from instep.mesh.mesh import get
    from instep.pipeline.pipeline import Pipeline
    from instep.reduce.evaluation import gather, mean
    from instep.reduce.norm import clip_grad_norm_
    from instep.replicate.server import ParameterServer
    from instep.replicate.threads import ThreadedReplicas
    from instep.replicate.wrapper import DataParallel
    from instep.rng.keys import initialize
    from instep.run.run import Run
    from instep.shard.fully import full_state_dict, fully_shard, gathered
    from instep.shard.optimizer import ShardedOptimizer
    from instep.timeline.trace import trace

__version__ = "0.1.0"

__all__ = [
    "DataParallel",
    "Loader",
    "ParameterServer",
    "Pipeline",
    "Run",
    "ShardedOptimizer",
    "ThreadedReplicas",
    "__version__",
    "clip_grad_norm_",
    "errors",
    "expert",
    "full_state_dict",
    "fully_shard",
    "gather",
    "gathered",
    "get",
    "init",
    "initialize",
    "load",
    "mean",
    "nn",
    "save",
    "tensor",
    "trace",
]

_HOMES = {
    "DataParallel": "instep.replicate.wrapper",
    "Loader": "instep.data.loader",
    "ParameterServer": "instep.replicate.server",
    "Pipeline": "instep.pipeline.pipeline",
    "Run": "instep.run.run",
    "ShardedOptimizer": "instep.shard.optimizer",
    "ThreadedReplicas": "instep.replicate.threads",
    "clip_grad_norm_": "instep.reduce.norm",
    "full_state_dict": "instep.shard.fully",
    "fully_shard": "instep.shard.fully",
    "gathered": "instep.shard.fully",
    "gather": "instep.reduce.evaluation",
    "get": "instep.mesh.mesh",
    "init": "instep.mesh.join",
    "initialize": "instep.rng.keys",
    "load": "instep.checkpoint.shorthand",
    "mean": "instep.reduce.evaluation",
    "save": "instep.checkpoint.shorthand",
    "trace": "instep.timeline.trace",
}


_FOLDERS = ("expert", "nn", "notebook", "tensor")  # of public names of their own: ``instep.tensor.shard``


def __getattr__(name: str) -> object:
    if name in _FOLDERS:
        return importlib.import_module(f"instep.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'instep' has no attribute {name!r}")
    public = getattr(importlib.import_module(_HOMES[name]), name)
    public.__module__ = __name__  # errors and docs show the path that users write
    globals()[name] = public
    return public


def load_ipython_extension(shell: object) -> None:
    """``%load_ext instep``: magics for ranks beside a notebook."""
    importlib.import_module("instep.notebook.magics").load(shell)


def unload_ipython_extension(shell: object) -> None:
    """``%unload_ext instep``."""
    importlib.import_module("instep.notebook.magics").unload(shell)


def __dir__() -> list[str]:
    return __all__
