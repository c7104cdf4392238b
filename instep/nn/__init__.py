"""Over the global batch: batch norm, contrastive losses, and the step that they need.

Example:
    >>> model = instep.DataParallel(model)
    >>> embed = lambda micro_batch: (model(x[micro_batch.index :: 8]), y[micro_batch.index :: 8])
    >>> loss = instep.nn.global_step(model, embed, instep.nn.InfoNCE(symmetric=True), 8)
"""

from instep.nn.batch_norm import BatchNorm, convert_batchnorm
from instep.nn.global_step import global_step
from instep.nn.losses import InfoNCE, SigLIP, SupCon

__all__ = ["BatchNorm", "InfoNCE", "SigLIP", "SupCon", "convert_batchnorm", "global_step"]

for _name in __all__:
    globals()[_name].__module__ = __name__  # errors and docs show the path that users write
