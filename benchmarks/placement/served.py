"""The text recipe in a plain loop around a parameter server, which ``instep.Run`` refuses."""

from __future__ import annotations

from pathlib import Path

import torch

import instep
from instep.checkpoint.registered import Registered
from instep.launch.launch import launch
from instep.recipes.text import (
    learning_rate,
    losses_of,
    make_model,
    open_text,
    optimizer_class,
    parameter_groups,
)
from instep.recipes.text_config import Config
from instep.state.hash import SharedHash


def served(config: Config, path: Path) -> str:
    """The state hash of the server after all steps of ``config``, by way of the file ``path``."""
    launch(train, (config, path), ranks=config.ranks, threads=config.parallel.threads)
    return path.read_text()


def train(config: Config, path: Path) -> None:
    """One rank."""
    mesh = instep.init(backend=config.parallel.named_backend)
    sizes = config.batch.global_size, config.batch.micro_size
    text = open_text(config.data, config.model.context)
    data = instep.Loader(text.train, *sizes, seed=config.seed, collate_fn=torch.stack)
    net = make_model(config, mesh.device)
    kind, settings = optimizer_class(config.optim)
    optimizer = kind(parameter_groups(net, config.optim.weight_decay), **settings)
    server = instep.ParameterServer(net, optimizer, mesh)
    for step in range(config.steps):
        for micro_batch in server.micro_batches(data):
            losses_of(net, micro_batch.data, config, mesh.device).mean().backward()
        instep.clip_grad_norm_(net.parameters(), config.optim.clip)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(config.optim, step, config.steps)
        server.step()
    if server.is_server:
        state = Registered({"model": net, "optimizer": optimizer}).state()
        path.write_text(SharedHash(state.group).digests(state.owned(state.hashed()), config.steps)[0])
    server.close()
    mesh.close()
