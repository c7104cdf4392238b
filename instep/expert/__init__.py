"""Mixture of experts: each token chooses a few of many feed-forward networks, which ranks may divide.

Start reading in ``moe.py``, then ``routes.py`` and ``dispatch.py``; ``balance.py`` is about equal loads.

Example:
    >>> model = torch.nn.Sequential(torch.nn.Linear(8, 16), instep.expert.MoE(16, 64, num_experts=4))
    >>> model = instep.DataParallel(instep.expert.shard(model, instep.init()))
"""

from instep.expert.balance import StepLoads, aux_loss, balanced
from instep.expert.moe import MoE, shard

__all__ = ["MoE", "StepLoads", "aux_loss", "balanced", "shard"]
