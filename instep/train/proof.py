"""Every strategy verified on ranks of this host, with a model small enough to take no time."""

from __future__ import annotations

import json
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from instep.mesh.join import init
from instep.mesh.launch import launch
from instep.models.transformer import GPT, GPTConfig
from instep.ordered.keys import derive, initialize
from instep.replicate.strategies import STRATEGIES
from instep.replicate.wrapper import DataParallel

TIMEOUT_S = 60.0
MODEL = GPTConfig(vocab_size=64, context=16, layers=2, width=32, heads=2, dropout=0.1)
WAYS = [("bucketed", False), *((strategy, True) for strategy in STRATEGIES)]  # strategy, ordered


@dataclass(frozen=True)
class Proof:
    """What ``verify`` has reported for each of ``WAYS``: for JSON, and as a table for people."""

    reports: list[dict[str, Any]]
    tables: list[str]


def prove(num_ranks: int) -> Proof:
    """Start ``num_ranks`` ranks and have them verify.

    Raises:
        RankFailed: a rank raised, or died.
    """
    with tempfile.TemporaryDirectory(prefix="instep-proof-") as directory:
        path = Path(directory) / "proof.json"
        launch(prove_on_rank, (str(path),), ranks=num_ranks)
        return Proof(**json.loads(path.read_text()))


def prove_on_rank(path: str) -> None:
    """One rank's part; rank 0 writes the ``Proof`` to ``path``. Ranks have batches of different sizes."""
    mesh = init(timeout_s=TIMEOUT_S)
    module = GPT(MODEL)
    initialize(module, seed=0)
    module.to(mesh.device)
    generator = torch.Generator().manual_seed(derive(0, "proof", mesh.rank) % (1 << 31))
    tokens = torch.randint(MODEL.vocab_size, (2 + mesh.rank, MODEL.context + 1), generator=generator)
    reports = []
    for strategy, ordered in WAYS:
        model = DataParallel(module, process_group=mesh, strategy=strategy, ordered=ordered)
        reports.append(model.verify(tokens.to(mesh.device), _next_token))
        model.close()
    if mesh.rank == 0:
        proof = Proof([report.to_dict() for report in reports], list(map(str, reports)))
        Path(path).write_text(json.dumps(asdict(proof)))
    mesh.close()


def _next_token(model: nn.Module, tokens: Tensor) -> Tensor:
    logits = model(tokens[:, :-1].contiguous())  # (B, T, V)
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
