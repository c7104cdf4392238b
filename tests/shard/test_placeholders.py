"""What a program may do with the ``.grad`` of a sharded module: nothing but to ask if there is one."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from instep.mesh.mesh import Mesh
from instep.reduce.norm import clip_grad_norm_
from instep.replicate.wrapper import DataParallel
from instep.shard.fully import full_state_dict, fully_shard
from instep.shard.optimizer import ShardedOptimizer
from tests.parity import filled, numbers
from tests.shard.trained import WIDTH, Wide, assert_same
from tests.world import world

LOOP = {"lr": 0.05, "momentum": 0.9, "foreach": False, "fused": False}
STAGES = pytest.mark.parametrize("stage", [2, 3])
Use = Callable[[nn.Module], Any]


class Ended(Wide):
    """With parameters of one element, which torch would let anybody write to."""

    def __init__(self) -> None:
        super().__init__()
        self.end = nn.Linear(WIDTH, 1)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.end(super().forward(x)) * self.scale


def loss(model: nn.Module, rank: int) -> Tensor:
    return model(numbers(4, WIDTH, key=f"x on rank {rank}")).square().mean()


def gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


USES: dict[str, Use] = {
    "clip_grad_norm_": lambda model: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
    "clip_grad_norm_ by foreach": lambda model: nn.utils.clip_grad_norm_(
        model.parameters(), 1.0, foreach=True
    ),
    "clip_grad_value_": lambda model: nn.utils.clip_grad_value_(model.parameters(), 1.0),
    "get_total_norm": lambda model: nn.utils.get_total_norm(gradients(model)),
    "all_reduce": lambda model: [torch.distributed.all_reduce(x) for x in gradients(model)],
    "mul_": lambda model: [x.mul_(0.5) for x in gradients(model)],
    "mul_ of the last": lambda model: gradients(model)[-1].mul_(0.5),
    "data": lambda model: [x.data.mul_(0.5) for x in gradients(model)],
    "fill_": lambda model: [x.fill_(1.0) for x in gradients(model)],
    "item assignment": lambda model: gradients(model)[0].__setitem__(0, 1.0),
    "out=": lambda model: torch.add(torch.ones(1), 1, out=gradients(model)[-2]),
    "norm": lambda model: [x.norm() for x in gradients(model)],
    "isnan": lambda model: torch.isnan(gradients(model)[0]).any(),
    "numpy": lambda model: gradients(model)[0].numpy(),
    "clone": lambda model: [x.clone() for x in gradients(model)],
    "a copy": lambda model: copy.deepcopy(gradients(model)[0]),
    "a file": lambda model: torch.save(gradients(model), io.BytesIO()),
    "another dtype": lambda model: gradients(model)[0].double(),
}


_undisturbed: dict[tuple[int, int], Any] = {}  # the weights by stage and rank: each rank asks for its own

# Each use in one stage, in turn; in the other with `make slow`.
USES_AND_STAGES = [
    pytest.param(use, stage, marks=[pytest.mark.slow] * (i % 2 != stage % 2))
    for i, use in enumerate(USES)
    for stage in (2, 3)
]


@pytest.mark.parametrize(("use", "stage"), USES_AND_STAGES)
@world(2)
def test_whoever_computes_with_it_is_told_what_to_do_and_training_goes_on(
    mesh: Mesh, stage: int, use: str
) -> None:
    key = stage, mesh.rank
    if key not in _undisturbed:
        _undisturbed[key] = after_a_step(mesh, stage)
    assert_same(after_a_step(mesh, stage, USES[use]), _undisturbed[key], "weights")


def after_a_step(mesh: Mesh, stage: int, tried: Use | None = None) -> Any:
    """The weights, where all ranks have ``tried`` in vain to use what stands for the gradients."""
    model = fully_shard(filled(Ended()), mesh, stage)
    optimizer = ShardedOptimizer(model.parameters(), SGD, mesh, **LOOP)
    loss(model, mesh.rank).backward()
    if tried is not None:
        with pytest.raises(
            RuntimeError,
            match=r"the gradient of '[a-z0-9.]+' is in slices, one on each rank, and \.grad only stands "
            r"for it: .* cannot use it\. Clip with instep\.clip_grad_norm_\(model\.parameters\(\), ",
        ):
            tried(model)
    clip_grad_norm_(model.parameters(), 0.01)
    optimizer.step()
    weights = full_state_dict(model)
    optimizer.close()
    model.close()
    return weights


@world(2)
@STAGES
def test_it_says_that_there_is_a_gradient_and_which(mesh: Mesh, stage: int) -> None:
    model = fully_shard(filled(Ended()), mesh, stage)
    loss(model, mesh.rank).backward()
    model.to("cpu").float()  # as it is already
    for name, p in model.named_parameters():
        x = p.grad
        assert x is not None and isinstance(x, Tensor)
        assert (x.shape, x.dtype, x.device, x.layout) == (p.shape, p.dtype, p.device, p.layout)
        assert (x.numel(), x.dim(), x.is_sparse, x.requires_grad) == (p.numel(), p.dim(), False, False)
        assert x.untyped_storage().nbytes() == p.element_size()
        assert f"{x}" == repr(x) == f"<in slices, one on each rank: the gradient of {name!r}>"
    model.zero_grad()
    assert gradients(model) == []
    model.close()


@world(2, by="process")
@STAGES
def test_a_module_is_compiled_again_while_its_gradients_are_in_slices(mesh: Mesh, stage: int) -> None:
    """Of every parameter the compiler looks at ``.grad`` too."""
    torch._dynamo.reset()
    whole = DataParallel(filled(nn.Linear(5, 3)), process_group=mesh)
    model = fully_shard(filled(nn.Linear(5, 3)), mesh, stage)
    compiled = torch.compile(model, backend="eager", dynamic=False)
    for rows in (2, 4, 6):
        for m in (compiled, whole):
            m(numbers(rows, 5, key=f"x on rank {mesh.rank}")).square().mean().backward()
        expected = clip_grad_norm_(whole.parameters(), float("inf"))
        assert torch.equal(clip_grad_norm_(model.parameters(), float("inf")), expected)
    whole.close()
    model.close()
